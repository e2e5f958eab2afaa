#!/usr/bin/env python3
"""Preference objectives, written from their papers: fixtures/train/preference.json, for tests/train_preference.rs.

usage: preference.py         (with the oracle's Python, scripts/oracle/setup.py)

Sequences come from a formula that the test repeats. For each objective: the loss, its figures, and the gradients of a
LoRA adapter with factors from a formula, each as sum and sum of magnitudes. Nothing here is shared with mlx-lm's trainer:
log-probabilities are taken sequence by sequence, without padding.
"""

import json

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load

from golden import ROOT

CHECKPOINTS = ROOT / "fixtures" / "checkpoints"


def ids(length, seed):
    return [(place * 37 + place * place * 11 + seed * 53) % 317 + 3 for place in range(length)]


def pairs():
    """(prompt, chosen, rejected), several of them."""
    return [(ids(5 + row, row), ids(4 + row, row + 40), ids(7 - row, row + 80)) for row in range(3)]


def factor(path, shape):
    size = 1
    for dim in shape:
        size *= dim
    seed = sum(ord(letter) for letter in path)
    values = (mx.arange(size) * 7 + seed * 13) % 101
    return ((values.astype(mx.float32) - 50.0) / 1000.0).reshape(shape)


def logps(model, prompt, answer):
    """Log-probabilities of the answer's tokens, and of the prompt's but its first."""
    tokens = mx.array([prompt + answer])
    scores = nn.log_softmax(model(tokens[:, :-1]).astype(mx.float32), axis=-1)
    found = mx.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[0, :, 0]
    return found[len(prompt) - 1 :], found[: len(prompt) - 1]


def objective(name, model, reference):
    losses, figures = [], []
    rows = []
    for (prompt, chosen, rejected), (ref_w, ref_l) in zip(pairs(), reference):
        w, before = logps(model, prompt, chosen)
        l, _ = logps(model, prompt, rejected)
        rows.append((w, l, before, ref_w, ref_l))
    if name == "kto":
        beta = 0.1
        gain_w = mx.stack([beta * (w.sum() - ref) for w, _, _, ref, _ in rows])
        gain_l = mx.stack([beta * (l.sum() - ref) for _, l, _, _, ref in rows])
        point_w, point_l = (mx.stop_gradient(mx.maximum(gain.mean(), 0.0)) for gain in (gain_w, gain_l))
        desirable = 1.5 * (1 - mx.sigmoid(gain_w - point_l))
        undesirable = 1 - mx.sigmoid(point_w - gain_l)
        return (desirable.sum() + undesirable.sum()) / (2 * len(rows)), mx.mean(gain_w - gain_l)
    for w, l, before, ref_w, ref_l in rows:
        if name == "dpo":
            margin = 0.1 * ((w.sum() - ref_w) - (l.sum() - ref_l))
            losses.append(-nn.log_sigmoid(margin))
        elif name == "simpo":
            margin = 2.0 * (w.mean() - l.mean())
            losses.append(-nn.log_sigmoid(margin - 1.0))
        else:
            log_odds = (w.mean() - mx.log(1 - mx.exp(w.mean()))) - (l.mean() - mx.log(1 - mx.exp(l.mean())))
            nll = -(w.sum() + before.sum()) / (w.size + before.size) if name == "orpo" else -w.mean()
            losses.append(nll - 0.25 * nn.log_sigmoid(log_odds))
            margin = w.mean() - l.mean()
        figures.append(margin)
    return sum(losses) / len(losses), sum(figures) / len(figures)


def run(checkpoint):
    model, _ = load(str(CHECKPOINTS / checkpoint))
    reference = [(mx.stop_gradient(logps(model, p, w)[0].sum()), mx.stop_gradient(logps(model, p, l)[0].sum())) for p, w, l in pairs()]
    mx.eval(reference)
    model.freeze()
    linear_to_lora_layers(model, -1, {"rank": 4, "scale": 2.0, "dropout": 0.0})
    model.update(tree_map_with_path(factor_of, model.trainable_parameters()))
    results = {}
    for name in ("dpo", "orpo", "orpo-response", "simpo", "kto"):
        (loss, margin), gradients = nn.value_and_grad(model, lambda model: objective(name, model, reference))(model)
        sums = {path: [g.sum().item(), mx.abs(g).sum().item()] for path, g in sorted(tree_flatten(gradients))}
        results[name] = {"loss": loss.item(), "margin": margin.item(), "gradients": sums}
    return results


def factor_of(path, array):
    return factor(path, array.shape)


def main():
    mx.set_default_device(mx.cpu)
    mx.disable_compile()
    results = {checkpoint: run(checkpoint) for checkpoint in ("llama-f32", "gemma3_text-f32")}
    target = ROOT / "fixtures" / "train" / "preference.json"
    target.write_text(json.dumps(results, indent=0) + "\n")
    print(f"{target.relative_to(ROOT)}: {len(results)} checkpoints")


if __name__ == "__main__":
    main()
