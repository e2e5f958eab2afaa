#!/usr/bin/env python3
"""What mlx_lm.convert makes of the tiny checkpoints: fixtures/convert.json, which the conversion tests compare with.

usage: convert.py            (writes fixtures/convert.json)

A case is a checkpoint and mlx_lm.convert's options; its result the config it wrote, the index's metadata, and for each
tensor dtype, shape and the first 32 bits of SHA-256 over its bytes. Run it with the oracle's Python (scripts/oracle/setup.py).
"""

import contextlib
import io
import json
import tempfile
from pathlib import Path

import mlx.core as mx
from mlx_lm.convert import convert

from golden import ROOT, short_hash

CHECKPOINTS = ROOT / "fixtures" / "checkpoints"

AFFINE = [{"q_bits": bits, "q_group_size": 32} for bits in (2, 3, 5, 6, 8)]
CASES = [
    *(("llama-bf16", {"quantize": True, **sizes}) for sizes in AFFINE),
    ("llama-bf16", {"quantize": True}),
    ("llama-f32", {"quantize": True, "q_group_size": 32, "dtype": "float16"}),
    *(("qwen3-bf16", {"quantize": True, "q_mode": mode}) for mode in ("mxfp4", "nvfp4", "mxfp8")),
    *(("gemma3_text-f32", {"quantize": True, "q_mode": mode}) for mode in ("mxfp4", "nvfp4", "mxfp8")),
    ("llama-quantmix_f32", {"dequantize": True}),
    ("llama-quantmix_bf16", {"dequantize": True}),
    ("llama-8bit", {"dequantize": True, "dtype": "float32"}),
    ("qwen2-4bit", {"quantize": True}),
    ("llama-quantmix_bf16", {"quantize": True, "q_group_size": 32}),
    ("gemma3_text-untied", {}),
    ("qwen2-bf16", {"dtype": "float16"}),
    *(("qwen3-bf16", {"quantize": True, "q_group_size": 64, "quant_predicate": name}) for name in ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")),
    ("llama-minicpm5", {"quantize": True, "q_group_size": 32}),
]


def run(checkpoint, options):
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "out"
        with contextlib.redirect_stdout(io.StringIO()):
            convert(str(CHECKPOINTS / checkpoint), str(target), **options)
        tensors = {}
        for file in sorted(target.glob("model*.safetensors")):
            for name, array in mx.load(str(file)).items():
                dtype = str(array.dtype).removeprefix("mlx.core.")
                tensors[name] = f"{dtype}{list(array.shape)} {short_hash(array)[:8]}"
        index = json.loads((target / "model.safetensors.index.json").read_text())
        return {
            "checkpoint": checkpoint,
            "options": options,
            "config": (target / "config.json").read_text(),
            "card": (target / "README.md").read_text(),
            "metadata": index["metadata"],
            "tensors": dict(sorted(tensors.items())),
        }


def main():
    cases = [run(checkpoint, options) for checkpoint, options in CASES]
    target = ROOT / "fixtures" / "convert.json"
    target.write_text(json.dumps(cases, separators=(",", ":")) + "\n")
    print(f"{target.relative_to(ROOT)}: {len(cases)} cases, {target.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
