#!/usr/bin/env python3
"""What mlx-lm's calibrated methods make of tiny checkpoints: fixtures/quant_methods.json, for tests/quant_methods.rs.

usage: quant_methods.py      (with the oracle's Python, scripts/oracle/setup.py)

Token ids come from a formula that the test repeats. A tensor is recorded by the first 32 bits of SHA-256
over its bytes and, for floats, the sum of its magnitudes, so that what differs can be bounded.
"""

import contextlib
import io
import json

import mlx.core as mx
import mlx.optimizers as optimizers
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.quant.awq import AWQ_MODEL_CONFIGS, awq_quantize
from mlx_lm.quant.dwq import dwq_quantize
from mlx_lm.quant.dynamic_quant import estimate_sensitivities, estimate_threshold
from mlx_lm.quant.gptq import gptq_quantize
from mlx_lm.utils import load, quantize_model

from golden import ROOT, short_hash

CHECKPOINTS = ROOT / "fixtures" / "checkpoints"
GROUP = 32


def ids(rows, length, seed):
    return [[(row * 131 + place * 37 + place * place * 7 + seed) % 317 + 3 for place in range(length)] for row in range(rows)]


def described(array):
    if not mx.issubdtype(array.dtype, mx.floating):
        return short_hash(array)[:8]
    return [short_hash(array)[:8], float(np.float32(array.astype(mx.float32).abs().sum().item()))]


def tensors(model):
    return {name: described(array) for name, array in sorted(tree_flatten(model.parameters()))}


def loaded(checkpoint):
    return load(str(CHECKPOINTS / checkpoint), return_config=True)


def dynamic_quant(checkpoint):
    model, _, _ = loaded(checkpoint)
    data = mx.array(ids(6, 40, 1))
    sensitivities = dict(estimate_sensitivities(model, data, 4, GROUP, 5, GROUP))
    values = sorted(sensitivities.values())
    target = 6.0 if "bf16" in checkpoint else 7.0
    threshold = estimate_threshold(model, sensitivities, target, 4, GROUP, 5, GROUP)
    high = sorted(name for name, value in sensitivities.items() if value > threshold)
    return {"sensitivities": sensitivities, "target": target, "high": high, "spread": values[-1] - values[0]}


def gptq(checkpoint):
    model, _, _ = loaded(checkpoint)
    model, _ = gptq_quantize(model, mx.array(ids(10, 40, 2)), 4, GROUP, 6, GROUP)
    return {"tensors": tensors(model)}


def awq(checkpoint):
    model, _, config = loaded(checkpoint)
    awq_quantize(model, mx.array(ids(6, 40, 3)), AWQ_MODEL_CONFIGS[config["model_type"]], bits=3, group_size=GROUP, embed_bits=4, embed_group_size=GROUP, n_grid=10)
    return {"tensors": tensors(model)}


def dwq(checkpoint):
    teacher, _, _ = loaded(checkpoint)
    student, _, config = loaded(checkpoint)
    student, _ = quantize_model(student, config, GROUP, 3)
    rows = [row[: 20 + 5 * index] for index, row in enumerate(ids(8, 60, 4))]
    train, valid = [(row, 0) for row in rows], [(row, 0) for row in rows[:4]]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        dwq_quantize(student, lambda batch, *_, **__: teacher(batch), optimizers.Adam(learning_rate=1e-4, bias_correction=True), train, valid, 2, 50, 5, dtype=mx.bfloat16 if "bf16" in checkpoint else mx.float32)
    return {"tensors": tensors(student)}


def main():
    mx.set_default_device(mx.cpu)
    cases = []
    for method, checkpoints in [
        (dynamic_quant, ["llama-f32", "gemma3_text-f32", "qwen3-bf16"]),
        (gptq, ["llama-f32", "gemma3_text-untied", "qwen2-f32"]),
        (awq, ["llama-f32", "gemma3_text-f32", "qwen2-f32"]),
        (dwq, ["llama-f32", "qwen3-bf16"]),
    ]:
        for checkpoint in checkpoints:
            np.random.seed(0)
            cases.append({"method": method.__name__, "checkpoint": checkpoint} | method(checkpoint))
            print(method.__name__, checkpoint, flush=True)
    target = ROOT / "fixtures" / "quant_methods.json"
    target.write_text(json.dumps(cases, separators=(",", ":")) + "\n")
    print(f"{target.relative_to(ROOT)}: {len(cases)} cases, {target.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
