#!/usr/bin/env python3
"""Runs mlx-lm over the tiny checkpoints and writes goldens/<machine>/mlx-<version>/.

usage: run.py [--family FAMILY]… [NAME…]      (all checkpoints without an argument; NAME is e.g. llama-bf16)

Tokens and logprobs come out of mlx_lm.generate.generate_step itself, with mx.compile left on: the compiled
activations and samplers are part of the reference. Run it with the oracle's Python (scripts/oracle/setup.py).
"""

import argparse
import logging
import os
import tempfile
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.utils import load_model

import cells as plan
from golden import ROOT, GoldenFile, dtype_name, folder, short_hash, top2_gap

CHECKPOINTS = Path("fixtures") / "checkpoints"
# A run this long is kept as its tokens and one hash.
LONG = 200


def kv_options(cell):
    """generate_step's cache options; max_kv_size matters only where the cache is made."""
    return {key: value for key, value in cell.get("kv", {}).items() if key != "max_kv_size"}


def new_cache(cell, model):
    return make_prompt_cache(model, cell.get("kv", {}).get("max_kv_size"))


def cache_after_prefix(cell, model, golden):
    """The prefix processed as mlx_lm.cache_prompt does, saved and loaded again."""
    cache = new_cache(cell, model)
    for _ in generate_step(mx.array(cell["prefix"]), model, max_tokens=0, prompt_cache=cache, **kv_options(cell)):
        pass
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "cache.safetensors"
        if "cache_file" in cell:
            folder().mkdir(parents=True, exist_ok=True)
            path = folder() / cell["cache_file"]
        save_prompt_cache(str(path), cache, {"model": f"{golden.family}-{golden.variant}"})
        loaded = load_prompt_cache(str(path))
        mx.eval([entry.state for entry in loaded])
    return loaded


def processors_of(cell):
    options = dict(cell.get("processors", {}))
    if "logit_bias" in options:
        options["logit_bias"] = {int(token): value for token, value in options["logit_bias"].items()}
    return make_logits_processors(**options)


def generate(cell, model, golden):
    cache = cache_after_prefix(cell, model, golden) if "prefix" in cell else new_cache(cell, model)
    if "seed" in cell:
        mx.random.seed(cell["seed"])
    steps = generate_step(
        mx.array(cell["prompt"]),
        model,
        max_tokens=cell["max_tokens"],
        sampler=make_sampler(**cell.get("sampler", {})),
        logits_processors=processors_of(cell),
        prompt_cache=cache,
        prefill_step_size=cell.get("prefill_step_size", 2048),
        **kv_options(cell),
    )
    pairs = [(token, logprobs) for token, logprobs in steps]
    return [token for token, _ in pairs], [logprobs for _, logprobs in pairs]


def expect_steps(cell, raw, model, golden):
    tokens, rows = generate(cell, model, golden)
    for step in raw:
        golden.keep(f"{cell['name']}.{step}", rows[step])
    gaps = [top2_gap(row) for row in rows]
    if len(tokens) > LONG:
        run = {"tokens": tokens, "dtype": dtype_name(rows[0]), "logprobs": short_hash(*rows), "smallest_gap": min(gaps)}
        return {"run": {**run, "raw": raw}}
    hashes = [short_hash(row) for row in rows]
    return {"steps": {"tokens": tokens, "dtype": dtype_name(rows[0]), "logprobs": hashes, "top2_gap": gaps, "raw": raw}}


def expect_prefill(cell, model, golden):
    """The whole prompt in one call; with a fresh cache and without one the bits must agree."""
    inputs = mx.array(cell["prompt"])[None]
    logits = model(inputs, cache=make_prompt_cache(model))
    assert short_hash(logits) == short_hash(model(inputs)), f"{cell['name']}: a cache changes the logits"
    golden.keep(f"{cell['name']}.last", logits[0, -1])
    return {"prefill": {"shape": list(logits.shape), "dtype": dtype_name(logits), "logits": short_hash(logits)}}


def expect_refused(path, cell):
    try:
        load_model(path, model_config=cell["config_overrides"])
    except Exception as error:  # mlx-lm refuses by whatever its code happens to raise
        message = str(error).replace(f"{ROOT}/", "")  # the same record wherever it is made
        return {"refused": message.splitlines()[0] if message else type(error).__name__}
    raise AssertionError(f"{cell['name']}: mlx-lm accepts it")


def record(family, variant):
    path = CHECKPOINTS / f"{family}-{variant}"
    golden = GoldenFile(family, variant, path)
    plain, _ = load_model(ROOT / path)
    for cell in plan.cells(family, variant):
        if cell["mode"] == "refused":
            golden.add(cell, expect_refused(ROOT / path, cell))
            continue
        model = plain
        if overrides := cell.get("config_overrides"):
            model, _ = load_model(ROOT / path, model_config=overrides)
        raw = cell.pop("raw", [])
        if cell["max_tokens"] == 0:
            expect = expect_prefill(cell, model, golden)
        else:
            expect = expect_steps(cell, raw, model, golden)
        golden.add(cell, expect)
    golden.write()


def main():
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", action="append", default=[])
    parser.add_argument("names", nargs="*", metavar="NAME")
    args = parser.parse_args()
    found = sorted(entry.name for entry in os.scandir(ROOT / CHECKPOINTS))
    wanted = [name for name in found if name in args.names or name.rsplit("-", 1)[0] in args.family]
    missing = (set(args.names) - set(found)) | (set(args.family) - {name.rsplit("-", 1)[0] for name in found})
    if missing:
        parser.error(f"no checkpoint of {', '.join(sorted(missing))} in {CHECKPOINTS}; there are {', '.join(found)}")
    for name in wanted if args.names or args.family else found:
        record(*name.rsplit("-", 1))


if __name__ == "__main__":
    main()
