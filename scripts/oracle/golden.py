"""What a golden file holds, and how it is written (goldens/README.md describes the format).

A file is JSON (cells: what was run, what came out) beside a safetensors file with the raw tensors of chosen steps.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path

import mlx.core as mx

ROOT = Path(__file__).resolve().parents[2]
FORMAT = 1


def machine_class():
    """The part of the path that keeps results of different arithmetic apart."""
    system = {"Linux": "linux", "Darwin": "macos"}.get(platform.system(), platform.system().lower())
    backend = "cpu"
    if mx.default_device().type == mx.DeviceType.gpu:
        backend = "metal" if mx.metal.is_available() else "cuda"
    return f"{system}-{platform.machine()}-{backend}"


def folder():
    return ROOT / "goldens" / machine_class() / f"mlx-{importlib.metadata.version('mlx')}"


def little_endian_bytes(array):
    """The array's bytes in row-major order, in its own dtype."""
    mx.eval(array)
    flat = mx.contiguous(array).reshape(-1)
    return bytes(memoryview(flat.view(mx.uint8)))


def short_hash(*arrays):
    """The first 64 bits of SHA-256 over the arrays' bytes, in hex."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(little_endian_bytes(array))
    return digest.hexdigest()[:16]


def file_hash(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def top2_gap(row):
    """How far the best entry of a row lies above the second, in the row's own rounding: 0 is a tie."""
    top = mx.sort(row.astype(mx.float32).reshape(-1))[-2:].tolist()
    return float(f"{top[1] - top[0]:.4g}")


def dtype_name(array):
    return str(array.dtype).removeprefix("mlx.core.")


def environment():
    """What the numbers may depend on besides the machine class; for people to read when a check fails."""
    compiler = subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True)
    return {
        "mlx": importlib.metadata.version("mlx"),
        "mlx_lm": importlib.metadata.version("mlx-lm"),
        "device": mx.device_info().get("device_name", ""),
        "libc": " ".join(platform.libc_ver()).strip(),
        "compiler": f"g++ {compiler.stdout.strip()}" if compiler.returncode == 0 else "",
    }


class GoldenFile:
    """Collects the cells of one checkpoint; `write` puts both files in place, whole or not at all."""

    def __init__(self, family, variant, checkpoint):
        self.family, self.variant = family, variant
        self.checkpoint = Path(checkpoint)
        self.cells, self.tensors = [], {}

    def keep(self, name, array):
        """Files a raw tensor under `name`."""
        mx.eval(array)
        self.tensors[name] = mx.contiguous(array)

    def add(self, cell, expect):
        self.cells.append({**cell, "expect": expect})

    def write(self):
        target = folder()
        target.mkdir(parents=True, exist_ok=True)
        stem = target / f"{self.family}-{self.variant}"
        head = {
            "format": FORMAT,
            "family": self.family,
            "variant": self.variant,
            "checkpoint": self.checkpoint.as_posix(),
            "weights_sha256": file_hash(ROOT / self.checkpoint / "model.safetensors"),
            "environment": environment(),
        }
        lines = [f'{json.dumps(k)}:{json.dumps(v, separators=(",", ":"))}' for k, v in head.items()]
        cells = ",\n".join(json.dumps(cell, separators=(",", ":")) for cell in self.cells)
        text = "{" + ",\n".join(lines) + ',\n"cells":[\n' + cells + "\n]}\n"
        partial = stem.with_suffix(".partial.safetensors")
        mx.save_safetensors(str(partial), self.tensors)
        os.replace(partial, stem.with_suffix(".safetensors"))
        partial = stem.with_suffix(".json.partial")
        partial.write_text(text)
        os.replace(partial, stem.with_suffix(".json"))
        print(f"{stem.relative_to(ROOT)}.json: {len(self.cells)} cells, {len(text) // 1024} KiB of JSON")
