#!/usr/bin/env python3
"""What mlx-lm predicts of text in float32: a log-probability for every token of the starter's first rows.

usage: starter_perplexity.py TEXT [ROWS]

Writes fixtures/starter_rows.safetensors: `tokens` [rows, 512] and `logprobs` [rows, 511]. The weights are those of
.native/starter/bf16, widened to float32, so that they are the bits a bfloat16 checkpoint holds. Stock MLX takes a
minute or two a row. Run it with the oracle's Python (scripts/oracle/setup.py).
"""

import sys

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load

from golden import ROOT

LENGTH = 512


def main():
    text = open(sys.argv[1], encoding="utf-8").read()
    rows = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    model, tokenizer = load(str(ROOT / ".native" / "starter" / "bf16"))
    model.set_dtype(mx.float32)
    ids = tokenizer.encode(text[: rows * LENGTH * 16])[: rows * LENGTH]
    tokens = mx.array(ids).reshape(rows, LENGTH)
    logprobs = []
    for row in tokens:
        losses = nn.losses.cross_entropy(model(row[None, :-1]), row[None, 1:])[0]
        mx.eval(losses)
        logprobs.append(-losses)
        so_far = mx.exp(-mx.concatenate(logprobs).mean()).item()
        print(f"row {len(logprobs)}: {-losses.mean().item():.6f}, perplexity so far {so_far:.5f}", flush=True)
    path = ROOT / "fixtures" / "starter_rows.safetensors"
    mx.save_safetensors(str(path), {"tokens": tokens.astype(mx.uint16), "logprobs": mx.stack(logprobs)})


if __name__ == "__main__":
    main()
