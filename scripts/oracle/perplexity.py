#!/usr/bin/env python3
"""Perplexities of tiny checkpoints by mlx_lm.perplexity's functions: fixtures/perplexity.json.

usage: perplexity.py [--model DIR --data FILE --sequence-length N --num-samples N]

Rows come from fixtures/perplexity.jsonl; the hub's `datasets` is not needed. With --model it prints one result. Run it
with the oracle's Python (scripts/oracle/setup.py).
"""

import argparse
import contextlib
import io
import json
import types

import mlx.core as mx
import numpy as np
from mlx_lm import perplexity
from mlx_lm.tuner.datasets import create_dataset
from mlx_lm.utils import load

from golden import ROOT

SEED = 123
CASES = [(name, length, samples) for name in ("llama-f32", "llama-bf16", "qwen3-4bit") for length, samples in ((16, 4), (32, 9))]


def measure(model_path, data_path, length, samples):
    rows = [json.loads(line) for line in open(data_path)]
    np.random.seed(SEED)
    mx.random.seed(SEED)
    model, tokenizer = load(str(model_path))
    perplexity.load_dataset = lambda args, tokenizer: [create_dataset(rows, tokenizer, types.SimpleNamespace())]
    data = perplexity.load_data(tokenizer, "", samples, length)
    with contextlib.redirect_stdout(io.StringIO()):
        ppl, se = perplexity.eval_ppl(model, data)
    return f"{ppl:.3f} ± {se:.3f}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--data", default=str(ROOT / "fixtures" / "perplexity.jsonl"))
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--num-samples", type=int, default=1)
    args = parser.parse_args()
    if args.model:
        print(measure(args.model, args.data, args.sequence_length, args.num_samples))
        return
    cases = []
    for name, length, samples in CASES:
        result = measure(ROOT / "fixtures" / "checkpoints" / name, args.data, length, samples)
        cases.append({"model": name, "sequence_length": length, "num_samples": samples, "perplexity": result})
    (ROOT / "fixtures" / "perplexity.json").write_text(json.dumps(cases, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
