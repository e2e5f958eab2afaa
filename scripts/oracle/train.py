#!/usr/bin/env python3
"""What mlx_lm.lora does to tiny checkpoints: fixtures/train, for tests/train.rs.

usage: train.py              (with the oracle's Python, scripts/oracle/setup.py)
       train.py check MODEL ADAPTER    loads an adapter in mlx-lm and prints a hash of logits

Writes rows to train on, and for each case the loss of every step and of every validation, the first 32 bits of SHA-256
over each trained array, and the sum of its magnitudes. Each case runs with compilation switched off; those in COMPILED
run once more as mlx_lm.lora runs them, with their step compiled (by g++ on a CPU, which takes minutes).
"""

import json
import os
import sys
import tempfile
import types
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm import lora
from mlx_lm.tuner.callbacks import TrainingCallback
from mlx_lm.tuner.datasets import load_local_dataset
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load

from golden import ROOT, short_hash

CHECKPOINTS = ROOT / "fixtures" / "checkpoints"
TARGET = ROOT / "fixtures" / "train"

CASES = {
    "lora": {"checkpoint": "llama-f32"},
    "lora-gemma": {"checkpoint": "gemma3_text-f32", "mask_prompt": True, "batch_size": 3, "data": "chats"},
    "lora-text": {"checkpoint": "qwen3-f32", "data": "texts", "num_layers": 1, "max_seq_length": 40},
    "lora-packed": {"checkpoint": "llama-4bit"},
    "lora-bf16": {"checkpoint": "llama-bf16"},
    "dropout": {"checkpoint": "llama-f32", "lora_parameters": {"rank": 4, "dropout": 0.25, "scale": 10.0}},
    "accumulation": {"checkpoint": "qwen2-f32", "grad_accumulation_steps": 3},
    "dora": {"checkpoint": "qwen2-f32", "fine_tune_type": "dora"},
    "full": {"checkpoint": "llama-f32", "fine_tune_type": "full", "num_layers": 1},
    "full-gemma": {"checkpoint": "gemma3_text-f32", "fine_tune_type": "full"},
    "keys": {"checkpoint": "llama-f32", "lora_parameters": {"rank": 2, "dropout": 0.0, "scale": 4.0, "keys": ["self_attn.v_proj", "model.embed_tokens"]}},
    "adamw": {"checkpoint": "llama-f32", "optimizer": "adamw", "optimizer_config": {"adamw": {"weight_decay": 0.1, "bias_correction": True}}},
    "muon": {"checkpoint": "llama-f32", "optimizer": "muon"},
    "sgd": {"checkpoint": "llama-f32", "optimizer": "sgd", "optimizer_config": {"sgd": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}}},
    "adafactor": {"checkpoint": "llama-f32", "optimizer": "adafactor"},
    "schedule": {"checkpoint": "llama-f32", "lr_schedule": {"name": "cosine_decay", "warmup": 4, "warmup_init": 1e-5, "arguments": [2e-4, 12, 1e-6]}},
}
COMPILED = ["lora", "lora-gemma"]
DEFAULTS = {"data": "pairs", "batch_size": 2, "learning_rate": 2e-5, "num_layers": -1, "mask_prompt": False, "max_seq_length": 100}


def sentence(seed, words):
    names = ["red", "blue", "seven", "is", "the", "cat", "of", "two", "and", "Go!", "x1", "why?"]
    return " ".join(names[(seed * 7 + place * place * 3 + place) % len(names)] for place in range(words))


def write_rows():
    def rows(kind, count, seed):
        for index in range(count):
            prompt, answer = sentence(seed + index, 3 + index % 5), sentence(seed * 3 + index, 2 + index % 7)
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            yield {
                "pairs": {"prompt": prompt, "completion": answer},
                "chats": {"messages": ([{"role": "system", "content": "Be brief."}] if index % 3 == 0 else []) + turns},
                "texts": {"text": sentence(seed + index, 4 + index % 9)},
            }[kind]

    for kind in ("pairs", "chats", "texts"):
        folder = TARGET / kind
        folder.mkdir(parents=True, exist_ok=True)
        for split, count, seed in (("train", 13, 1), ("valid", 6, 50)):
            with open(folder / f"{split}.jsonl", "w") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows(kind, count, seed))


class Recorder(TrainingCallback):
    def __init__(self):
        self.train, self.valid, self.rates = [], [], []

    def on_train_loss_report(self, info):
        self.train.append(info["train_loss"])
        self.rates.append(info["learning_rate"])

    def on_val_loss_report(self, info):
        self.valid.append(info["val_loss"])


def run(case):
    options = {**lora.CONFIG_DEFAULTS, **DEFAULTS, **case, "iters": 20, "steps_per_report": 1, "steps_per_eval": 8, "val_batches": 2, "save_every": 100}
    with tempfile.TemporaryDirectory() as folder:
        args = types.SimpleNamespace(**{**options, "data": str(TARGET / options["data"]), "adapter_path": folder, "model": str(CHECKPOINTS / case["checkpoint"])})
        np.random.seed(args.seed)
        model, tokenizer = load(args.model)
        train, valid, _ = load_local_dataset(Path(args.data), tokenizer, args)
        recorder = Recorder()
        lora.train_model(args, model, train, valid, recorder)
        trained = dict(tree_flatten(model.trainable_parameters()))
    arrays = {name: [short_hash(array)[:8], array.size, float(np.float32(mx.abs(array.astype(mx.float32)).sum().item()))] for name, array in sorted(trained.items())}
    rates = {"rates": recorder.rates} if "lr_schedule" in case else {}
    return {"train": recorder.train, "valid": recorder.valid, **rates, "arrays": arrays}


def main():
    mx.set_default_device(mx.cpu)
    write_rows()
    results = {}
    for name, case in CASES.items():
        mx.disable_compile()
        results[name] = {"options": {**DEFAULTS, **case}, "plain": run(case)}
    (TARGET / "expected.json").write_text(json.dumps(results, indent=0) + "\n")
    for name in COMPILED:
        mx.enable_compile()
        results[name]["compiled"] = run(CASES[name])["train"]
    (TARGET / "expected.json").write_text(json.dumps(results, indent=0) + "\n")
    print(f"{TARGET.relative_to(ROOT)}: {len(results)} cases")


def check(checkpoint, adapter):
    mx.set_default_device(mx.cpu)
    model, _ = load(checkpoint)
    model = load_adapters(model, adapter)
    model.eval()
    print(short_hash(model(mx.array([[(index * 37 + 11) % 320 for index in range(12)]])))[:8])


if __name__ == "__main__":
    check(*sys.argv[2:]) if sys.argv[1:2] == ["check"] else main()
