#!/usr/bin/env python3
"""Writes fixtures/evals/multiple_choice.json: what stock mlx-lm finds for fixtures/evals/multiple_choice.jsonl.

Log-probabilities of each choice after its context, as EleutherAI's lm-evaluation-harness splits them, on tiny
checkpoints. Run by the Python that scripts/oracle/setup.py prints.
"""

import json
from pathlib import Path

import mlx.core as mx
from mlx_lm import load

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
MODELS = ["qwen3-f32", "llama-4bit", "gemma3_text-f32"]


def log_probability(model, tokenizer, context, choice):
    trimmed = context.rstrip()
    gap = context[len(trimmed) :]
    if not gap and not choice[0].isspace():
        gap = " "
    tokens = tokenizer.encode(trimmed + gap + choice)
    start = max(1, len(tokenizer.encode(trimmed)))
    logits = model(mx.array([tokens[:-1]]))[0].astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return sum(logprobs[at - 1, tokens[at]].item() for at in range(start, len(tokens)))


def main():
    rows = [json.loads(line) for line in (FIXTURES / "evals" / "multiple_choice.jsonl").read_text().splitlines()]
    expected = {}
    for name in MODELS:
        model, tokenizer = load(str(FIXTURES / "checkpoints" / name))
        found = []
        correct = {"acc": 0, "acc_norm": 0}
        for row in rows:
            sums = [log_probability(model, tokenizer, row["context"], choice) for choice in row["choices"]]
            answer = row["answer"]
            if isinstance(answer, str):
                answer = row["choices"].index(answer) if answer in row["choices"] else "ABC".index(answer)
            normed = [value / len(choice) for value, choice in zip(sums, row["choices"])]
            correct["acc"] += sums.index(max(sums)) == answer
            correct["acc_norm"] += normed.index(max(normed)) == answer
            found.append([round(value, 4) for value in sums])
        expected[name] = {**correct, "log_probabilities": found}
    (FIXTURES / "evals" / "multiple_choice.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main()
