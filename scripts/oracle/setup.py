#!/usr/bin/env python3
"""Makes the oracle's venv in .native/oracle (stock MLX and mlx-lm from PyPI) and prints the path of its Python.

MLX_BUN_ORACLE_PYTHON names a Python that already has them and is taken instead.
MLX_BUN_BACKEND=cuda13 takes MLX's CUDA build. Standard library only.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".native" / "oracle"
EXTRAS = {"cpu": "cpu", "cuda13": "cuda13"}
MLX = "0.32.2"
REQUIREMENTS = ["mlx-lm==0.32.2", "gguf==0.19.0"]
PROBE = (
    "import importlib.metadata as m, gguf, mlx.core, mlx_lm;"
    f"assert m.version('mlx') == '{MLX}' and m.version('mlx-lm') == '0.32.2'"
)


def fail(message, hint):
    print(f"error: {message}\nhint: {hint}", file=sys.stderr)
    sys.exit(1)


def complete(python):
    return Path(python).exists() and subprocess.run([str(python), "-c", PROBE], capture_output=True).returncode == 0


def main():
    named = os.environ.get("MLX_BUN_ORACLE_PYTHON")
    if named:
        if not complete(named):
            fail(f"`{named}` lacks mlx {MLX}, mlx-lm 0.32.2 or gguf", "unset MLX_BUN_ORACLE_PYTHON to have a venv made")
        print(named)
        return
    backend = os.environ.get("MLX_BUN_BACKEND", "cpu")
    if backend not in EXTRAS:
        fail(f"MLX_BUN_BACKEND is `{backend}`", "use cpu or cuda13")
    # macOS wheels carry Metal and take no extra.
    mlx = f"mlx=={MLX}" if sys.platform == "darwin" else f"mlx[{EXTRAS[backend]}]=={MLX}"
    venv = VENV if backend == "cpu" else VENV.with_name(f"oracle-{backend}")
    python = venv / "bin" / "python"
    if not complete(python):
        print(f"setup: fetching the oracle ({mlx}, {', '.join(REQUIREMENTS)})", file=sys.stderr)
        shutil.rmtree(venv, ignore_errors=True)
        steps = [
            [sys.executable, "-m", "venv", str(venv)],
            [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "install", mlx, *REQUIREMENTS],
        ]
        for step in steps:
            if subprocess.run(step, stdout=sys.stderr).returncode != 0:
                fail(f"`{' '.join(step)}` failed", "the package index must be reachable")
    print(python)


if __name__ == "__main__":
    main()
