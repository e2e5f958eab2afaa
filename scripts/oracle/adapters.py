#!/usr/bin/env python3
"""Adapters for tiny checkpoints, and what mlx-lm makes of them: fixtures/adapters.

usage: adapters.py           (with the oracle's Python, scripts/oracle/setup.py)

Writes an adapter a folder, and expected.json: logits of the adapted model for some ids, and the tensors that
mlx_lm.fuse changes, by the first 32 bits of SHA-256 over their bytes.
"""

import json
import shutil

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load

from golden import ROOT, short_hash

CHECKPOINTS = ROOT / "fixtures" / "checkpoints"
TARGET = ROOT / "fixtures" / "adapters"
RANK = 2
CASES = [
    ("lora", "llama-f32", "lora", ["self_attn.q_proj", "mlp.down_proj"]),
    ("lora-packed", "llama-4bit", "lora", ["self_attn.v_proj"]),
    ("dora", "llama-f32", "dora", ["self_attn.q_proj", "mlp.down_proj"]),
    ("lora-embedding", "llama-f32", "lora", ["model.embed_tokens", "self_attn.v_proj"]),
    ("dora-embedding", "llama-f32", "dora", ["model.embed_tokens"]),
]


def write(folder, checkpoint, kind, keys):
    model, _ = load(str(CHECKPOINTS / checkpoint))
    config = {"fine_tune_type": kind, "num_layers": 1, "lora_parameters": {"rank": RANK, "scale": 4.0, "dropout": 0.0, "keys": keys}}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=4) + "\n")
    random = np.random.RandomState(len(folder.name))
    from mlx_lm.tuner.utils import linear_to_lora_layers

    linear_to_lora_layers(model, 1, config["lora_parameters"], use_dora=kind == "dora")
    tensors = {}
    for name, array in tree_flatten(model.parameters()):
        leaf = name.rsplit(".", 1)[-1]
        if leaf in ("lora_a", "lora_b"):
            tensors[name] = mx.array(random.uniform(-0.2, 0.2, array.shape).astype(np.float32))
        elif leaf == "m":
            tensors[name] = (array.astype(mx.float32) * mx.array(random.uniform(0.8, 1.2, array.shape).astype(np.float32))).astype(array.dtype)
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)


def expected(folder, checkpoint):
    model, _ = load(str(CHECKPOINTS / checkpoint))
    before = dict(tree_flatten(model.parameters()))
    model = load_adapters(model, str(folder))
    model.eval()
    ids = mx.array([[(index * 37 + 11) % 320 for index in range(12)]])
    logits = model(ids)
    fused = [(name, module.fuse(dequantize=False)) for name, module in model.named_modules() if hasattr(module, "fuse")]
    model.update_modules(tree_unflatten(fused))
    after = dict(tree_flatten(model.parameters()))
    changed = {name: short_hash(array)[:8] for name, array in after.items() if short_hash(array) != short_hash(before[name])}
    return {
        "checkpoint": checkpoint,
        "logits": short_hash(logits)[:8],
        "last": logits[0, -1, :40].astype(mx.float32).tolist(),
        "largest": mx.abs(logits).max().item(),
        "fused": short_hash(model(ids))[:8],
        "changed": dict(sorted(changed.items())),
    }


def main():
    mx.set_default_device(mx.cpu)
    cases = {}
    for name, checkpoint, kind, keys in CASES:
        write(TARGET / name, checkpoint, kind, keys)
        cases[name] = expected(TARGET / name, checkpoint)
    (TARGET / "expected.json").write_text(json.dumps(cases, indent=0) + "\n")
    print(f"{TARGET.relative_to(ROOT)}: {len(cases)} adapters")


if __name__ == "__main__":
    main()
