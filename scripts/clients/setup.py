#!/usr/bin/env python3
"""Makes the venv of the client tests in .native/clients (the openai and anthropic SDKs from PyPI) and prints its Python.

Standard library only.
"""

import shutil
import subprocess
import sys
from pathlib import Path

VENV = Path(__file__).resolve().parents[2] / ".native" / "clients"
REQUIREMENTS = ["openai==3.57.0", "anthropic==2.14.0"]
PROBE = "import importlib.metadata as m;" + ";".join(
    f"assert m.version('{name}') == '{version}'" for name, version in (r.split("==") for r in REQUIREMENTS)
)


def complete(python):
    return python.exists() and subprocess.run([str(python), "-c", PROBE], capture_output=True).returncode == 0


def main():
    python = VENV / "bin" / "python"
    if not complete(python):
        print(f"setup: fetching {', '.join(REQUIREMENTS)}", file=sys.stderr)
        shutil.rmtree(VENV, ignore_errors=True)
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "install", *REQUIREMENTS]
        for step in ([sys.executable, "-m", "venv", str(VENV)], pip):
            if subprocess.run(step, stdout=sys.stderr).returncode != 0:
                sys.exit(f"error: `{' '.join(step)}` failed\nhint: the package index must be reachable")
    print(python)


if __name__ == "__main__":
    main()
