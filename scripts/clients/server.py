"""Starts `mlx-bun serve` on a free port, for the programs here."""

import json
import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINTS = ROOT / "fixtures" / "checkpoints"
TEMPLATES = ROOT / "fixtures" / "chat_templates" / "templates"


def binary():
    """MLX_BUN_BINARY, else the one that cargo built for tests."""
    if named := os.environ.get("MLX_BUN_BINARY"):
        return named
    metadata = ["cargo", "metadata", "--format-version", "1", "--no-deps"]
    found = subprocess.run(metadata, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return str(Path(json.loads(found)["target_directory"]) / "debug" / "mlx-bun")


@contextmanager
def serving(model, *flags, quiet=True):
    """The server's address and its process; killed at the end."""
    command = [binary(), "serve", "--port", "0", *(["--model", str(model)] if model else []), *flags]
    stderr = subprocess.DEVNULL if quiet else None
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        try:
            url = process.stdout.readline().strip()
            if not url:
                raise RuntimeError(f"`{' '.join(command)}` did not start")
            yield url, process
        finally:
            process.kill()
