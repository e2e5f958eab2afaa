"""Which cells are recorded for each checkpoint. A cell is plain data: the very object that the golden file holds.

Keys (all but name, mode and prompt optional; goldens/README.md says more): config_overrides, prefix, cache_file, seed,
max_tokens, prefill_step_size, sampler (arguments of make_sampler), processors (of make_logits_processors), kv
(max_kv_size, kv_bits, kv_group_size, quantized_kv_start). `raw` lists the steps whose logprobs are kept whole; it is
recorded with the expectation.
"""

import numpy as np

from tiny_tokenizer import VOCAB_SIZE

FIRST_ORDINARY_ID = 4
WINDOW = 16


def prompt(length, seed):
    return np.random.default_rng(seed).integers(FIRST_ORDINARY_ID, VOCAB_SIZE, length).tolist()


SHORT = prompt(12, 1)
LONG = prompt(40, 2)
# Few distinct tokens, so that penalties of every window size have something to bite on.
REPEATING = [20, 31, 20, 45, 31, 20, 20, 77, 45, 20, 31, 90, 20, 45]

CACHES_TO_KEEP = {"llama-4bit": "kv4", "qwen2-bf16": "rotating", "gemma3_text-bf16": "plain"}


def cell(name, mode, prompt=SHORT, max_tokens=32, raw=(0, -1), **rest):
    raw = sorted(step % max_tokens for step in raw)
    return {"name": name, "mode": mode, "prompt": prompt, **rest, "max_tokens": max_tokens, "raw": raw}


def prefill(name, mode="prefill", prompt=SHORT, **rest):
    return {"name": name, "mode": mode, "prompt": prompt, **rest, "max_tokens": 0}


def refused(name, **overrides):
    return {"name": name, "mode": "refused", "prompt": SHORT, "config_overrides": overrides, "max_tokens": 1}


def basic():
    return [
        prefill("prefill-12"),
        prefill("prefill-40", prompt=LONG),
        cell("greedy", "greedy", raw=(0, 1, 15, 31)),
        cell("greedy-1-token-prompt", "greedy", prompt=SHORT[:1], max_tokens=8),
    ]


def sampling():
    plans = {
        "temperature": {"temp": 0.8},
        "hot": {"temp": 2.5},
        "top-p": {"temp": 1.0, "top_p": 0.9},
        "top-k": {"temp": 1.5, "top_k": 20},
        "min-p": {"temp": 1.5, "min_p": 0.05},
        "min-p-keep-3": {"temp": 2.0, "min_p": 0.9, "min_tokens_to_keep": 3},
        "xtc": {"temp": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05},
        "xtc-special": {
            "temp": 1.0,
            "xtc_probability": 1.0,
            "xtc_threshold": 0.02,
            "xtc_special_tokens": [14, *range(100, 300)],
        },
        "all": {
            "temp": 1.2,
            "top_p": 0.97,
            "min_p": 0.01,
            "min_tokens_to_keep": 2,
            "xtc_probability": 0.3,
            "xtc_threshold": 0.1,
            "xtc_special_tokens": [14],
            "top_k": 40,
        },
    }
    for seed, (name, sampler) in enumerate(plans.items(), start=11):
        yield cell(name, "sampling", seed=seed, sampler=sampler, raw=())
    # A seed above 32 bits: both halves of the key count.
    yield cell("temperature-64-bit-seed", "sampling", seed=(1 << 40) + 5, sampler={"temp": 0.8}, max_tokens=8, raw=())


def processors():
    bias = {"5": 2.5, "19": -100.0, "201": 2.25}
    plans = {
        "repetition": {"repetition_penalty": 1.3},
        "repetition-window-3": {"repetition_penalty": 1.3, "repetition_context_size": 3},
        "repetition-whole-history": {"repetition_penalty": 1.2, "repetition_context_size": 0},
        "presence": {"presence_penalty": 0.8},
        "presence-negative": {"presence_penalty": -0.5, "presence_context_size": 5},
        "frequency": {"frequency_penalty": 0.4},
        "frequency-window-50": {"frequency_penalty": 0.4, "frequency_context_size": 50},
        "bias": {"logit_bias": bias},
    }
    for name, options in plans.items():
        yield cell(name, "processors", prompt=REPEATING, processors=options, raw=())
    everything = {
        "logit_bias": bias,
        "repetition_penalty": 1.15,
        "repetition_context_size": 8,
        "presence_penalty": 0.3,
        "presence_context_size": 16,
        "frequency_penalty": 0.2,
        "frequency_context_size": 12,
    }
    sampler = {"temp": 0.9, "top_p": 0.95, "top_k": 50}
    yield cell("all-processors-sampled", "processors", REPEATING, seed=29, sampler=sampler, processors=everything, raw=())
    yield cell("all-processors-chunked", "processors", LONG, prefill_step_size=7, processors=everything, raw=())


def chunked():
    return [
        cell("chunks-of-7", "chunked", prompt=LONG, prefill_step_size=7),
        cell("chunks-of-13-exact", "chunked", prompt=LONG, prefill_step_size=13, max_tokens=8),
        cell("chunks-of-1", "chunked", prompt=SHORT, prefill_step_size=1, max_tokens=8),
        cell("unchunked-40", "chunked", prompt=LONG, max_tokens=8),
    ]


def quantized_kv():
    def kv(bits, start):
        return {"kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": start}

    return [
        cell("kv8-from-start", "kv-quant", kv=kv(8, 0)),
        cell("kv4-from-start", "kv-quant", kv=kv(4, 0)),
        cell("kv8-mid-generation", "kv-quant", kv=kv(8, 20)),
        cell("kv4-mid-generation", "kv-quant", kv=kv(4, 20)),
        cell("kv4-mid-prefill", "kv-quant", prompt=LONG, prefill_step_size=7, kv=kv(4, 10)),
        cell("kv8-sampled", "kv-quant", seed=41, sampler={"temp": 0.8}, kv=kv(8, 0), raw=(-1,)),
    ]


def max_kv_size(rotates):
    """mlx-lm rotates only where the model has no make_cache of its own; elsewhere the option changes nothing."""
    if not rotates:
        return [cell("max-kv-size-ignored", "max-kv-size", kv={"max_kv_size": WINDOW})]
    return [
        cell("wrap-in-decode", "max-kv-size", kv={"max_kv_size": WINDOW}),
        cell("wrap-in-prefill", "max-kv-size", prompt=LONG, kv={"max_kv_size": WINDOW}),
        cell("wrap-in-chunks", "max-kv-size", prompt=LONG, prefill_step_size=7, kv={"max_kv_size": WINDOW}),
        cell("above-256", "max-kv-size", max_tokens=300, kv={"max_kv_size": 280}, raw=(299,)),
    ]


def window(**rest):
    return [
        prefill("window-prefill", "window", prompt=LONG, **rest),
        cell("window-wrap-in-decode", "window", **rest),
        cell("window-wrap-in-prefill", "window", prompt=LONG, **rest),
        cell("window-wrap-in-chunks", "window", prompt=LONG, prefill_step_size=7, **rest),
    ]


def resume(rotates, quantizes):
    prefix = prompt(20, 3)
    cells = [cell("saved-and-loaded", "resume", prefix=prefix, max_tokens=16)]
    if quantizes:
        kv = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
        cells.append(cell("saved-and-loaded-kv8", "resume", prefix=prefix, max_tokens=16, kv=kv))
    if rotates:
        cells.append(cell("saved-and-loaded-rotated", "resume", prefix=prefix, max_tokens=16, kv={"max_kv_size": WINDOW}))
    return cells


def kept_cache(checkpoint):
    """Continues from a prompt cache that mlx-lm wrote; the file lies beside the golden."""
    kinds = {
        "kv4": {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 0},
        "rotating": {"max_kv_size": WINDOW},
        "plain": {},
    }
    kind = CACHES_TO_KEEP.get(checkpoint)
    if kind is None:
        return []
    file = f"{checkpoint}.prompt-cache.safetensors"
    rest = {"kv": kinds[kind]} if kinds[kind] else {}
    return [cell(f"from-file-{kind}", "resume", prefix=prompt(20, 4), cache_file=file, max_tokens=16, **rest)]


def long_run():
    return [cell("300-tokens", "long", max_tokens=300, raw=())]


def rope():
    """Every entry of rope_utils over one set of weights; lengths that reach the scaled range."""
    factors = [round(1.0 + 0.25 * i, 2) for i in range(16)]
    plans = {
        "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
        "linear-old-key": {"rope_scaling": {"type": "linear", "factor": 4.0}},
        "dynamic": {"max_position_embeddings": 32, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "llama3": {
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
        },
        "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        "yarn-mscale": {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 40.0,
                "original_max_position_embeddings": 256,
                "beta_fast": 16,
                "beta_slow": 2,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
            }
        },
        "longrope": {
            "max_position_embeddings": 512,
            "rope_scaling": {
                "rope_type": "longrope",
                "original_max_position_embeddings": 64,
                "short_factor": [1.0] * 16,
                "long_factor": factors,
            },
        },
        "proportional": {"rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0}},
        "mrope-as-plain": {"rope_scaling": {"rope_type": "mrope", "mrope_section": [4, 6, 6]}},
        "traditional": {"rope_traditional": True},
        "theta-5e5": {"rope_theta": 500000},
    }
    for name, overrides in plans.items():
        yield cell(f"rope-{name}", "rope", prompt=LONG, config_overrides=overrides, max_tokens=12)


def refusals():
    return [
        refused("refused-rope-su", rope_scaling={"rope_type": "su", "factor": 4.0}),
        refused("refused-rope-without-factor", rope_scaling={"rope_type": "linear"}),
        refused("refused-mrope-of-2", rope_scaling={"rope_type": "mrope", "mrope_section": [8, 8]}),
        refused("refused-family", model_type="no-such-family"),
        refused("refused-model-file", model_file="modeling.py"),
        refused("refused-shape", intermediate_size=80),
    ]


def extra_checkpoint(quantizes=True):
    kv = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
    cells = [*basic()[:3], cell("temperature", "sampling", seed=11, sampler={"temp": 0.8}, raw=(-1,)), chunked()[0]]
    return cells + ([cell("kv8-from-start", "kv-quant", kv=kv)] if quantizes else [])


def family_specials(family, variant):
    """What only one family has: its window, its own config keys."""
    if family == "llama":
        mistral = {
            "model_type": "mistral",
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": WINDOW,
        }
        cells = window(config_overrides=mistral)
        if variant in ("f32", "bf16"):
            cells += rope()
        return cells + (refusals() if variant == "f32" else [])
    if family == "gemma3_text":
        linear = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
        return window() + [
            cell("rope-linear-global", "rope", prompt=LONG, config_overrides=linear, max_tokens=12),
            cell("all-global", "window", prompt=LONG, config_overrides={"sliding_window_pattern": 1}, max_tokens=12),
            cell("score-scale", "greedy", config_overrides={"query_pre_attn_scalar": 48}, max_tokens=8),
        ]
    if family == "qwen3":
        nested = {"rope_theta": None, "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}}
        yarn = {"rope_theta": None, "rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}}
        return [
            cell("rope-parameters", "rope", prompt=LONG, config_overrides=nested, max_tokens=12),
            cell("rope-parameters-yarn", "rope", prompt=LONG, config_overrides=yarn, max_tokens=12),
        ]
    yarn = {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}
    return [
        cell("rope-yarn", "rope", prompt=LONG, config_overrides=yarn, max_tokens=12),
        cell("rope-traditional", "rope", prompt=LONG, config_overrides={"rope_traditional": True}, max_tokens=12),
    ]


def cells(family, variant):
    if variant not in ("f32", "bf16", "4bit", "8bit"):
        return extra_checkpoint(quantizes=family != "gemma3_text")
    rotates = family in ("qwen2", "qwen3")
    # mlx-lm cannot quantize a rotating cache, which every Gemma 3 has.
    quantizes = family != "gemma3_text"
    return [
        *basic(),
        *sampling(),
        *processors(),
        *chunked(),
        *(quantized_kv() if quantizes else []),
        *max_kv_size(rotates),
        *family_specials(family, variant),
        *resume(rotates, quantizes),
        *kept_cache(f"{family}-{variant}"),
        *long_run(),
    ]
