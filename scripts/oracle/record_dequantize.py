"""Records what MLX makes of packed weights: fixtures/kernels/dequantize.json.

Random words and scales, dequantized by mx.dequantize on the CPU (mlx 0.32.2). Run: python scripts/oracle/record_dequantize.py
"""

import json
import pathlib

import mlx.core as mx
import numpy as np

mx.set_default_device(mx.cpu)
random = np.random.default_rng(0)


def shortest(values):
    return [float(str(value)) for value in values]


def record(mode, bits, group):
    columns = max(64, group)
    words = random.integers(0, 2**32, size=(1, columns * bits // 32), dtype=np.uint32)
    groups = columns // group
    if mode == "affine":
        scales = (random.random((1, groups)).astype(np.float32) - 0.5) / 2**bits
        biases = random.standard_normal((1, groups)).astype(np.float32)
    else:
        scales = random.integers(0 if mode == "nvfp4" else 118, 256 if mode == "nvfp4" else 134, size=(1, groups))
        scales, biases = scales.astype(np.uint8), None
    values = mx.dequantize(
        mx.array(words),
        mx.array(scales),
        None if biases is None else mx.array(biases),
        group_size=group,
        bits=bits,
        mode=mode,
        dtype=mx.float32,
    )
    return {
        "mode": mode,
        "bits": bits,
        "group_size": group,
        "words": words[0].tolist(),
        "scales": shortest(scales[0]),
        "biases": None if biases is None else shortest(biases[0]),
        "values": shortest(np.array(values)[0]),
    }


cases = [record("affine", bits, group) for bits, group in [(2, 32), (3, 64), (4, 32), (4, 64), (4, 128), (5, 64), (6, 32), (8, 64)]]
cases += [record("mxfp4", 4, 32), record("nvfp4", 4, 16), record("mxfp8", 8, 32)]
path = pathlib.Path(__file__).resolve().parents[2] / "fixtures/kernels/dequantize.json"
path.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")
