#!/usr/bin/env python3
"""Writes the tiny random checkpoints in fixtures/checkpoints: one HF snapshot a family and variant.

usage: make_fixtures.py [NAME…]        (all without a name, e.g. llama-f32)

Weights come from NumPy's generator seeded by tensor name, so that a checkpoint is the same wherever it is made and
a new tensor leaves the others alone. Quantized ones go through mlx-lm's own quantize_model and are saved by its own
writers. A new family is one entry in FAMILIES. Run it with the oracle's Python (scripts/oracle/setup.py).
"""

import contextlib
import io
import json
import shutil
import sys
import zlib

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, load, quantize_model, save_config, save_model

import tiny_tokenizer
from golden import ROOT

CHECKPOINTS = ROOT / "fixtures" / "checkpoints"
SEED = 20260

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": tiny_tokenizer.VOCAB_SIZE,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": tiny_tokenizer.BOS,
    "eos_token_id": tiny_tokenizer.EOS,
    "pad_token_id": tiny_tokenizer.PAD,
}

# An intermediate size of 96 takes groups of 32 but not of 64: down_proj of the 4-bit llama stays unquantized.
LLAMA = {**TINY, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": 96, "rope_theta": 10000.0}
# Qwen2 has no head_dim of its own: 2 heads of 32.
QWEN2 = {
    **{key: value for key, value in TINY.items() if key != "head_dim"},
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_theta": 1000000.0,
}
QWEN3 = {
    **TINY,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "intermediate_size": 64,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
GEMMA3 = {
    **TINY,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "intermediate_size": 64,
    "num_key_value_heads": 1,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "query_pre_attn_scalar": 32,
    "sliding_window": 16,
    "sliding_window_pattern": 2,
}

FAMILIES = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "gemma3_text": GEMMA3}
VARIANTS = {
    "f32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "4bit": {"dtype": "bfloat16", "quantize": {"group_size": 64, "bits": 4}},
    "8bit": {"dtype": "bfloat16", "quantize": {"group_size": 32, "bits": 8}},
}

QUANTMIX = {
    **LLAMA,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
MINICPM5 = {
    **LLAMA,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
    "rope_theta": 5000000.0,
}
EXTRAS = {
    "llama-bias": (
        {**LLAMA, "hidden_size": 32, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
        VARIANTS["f32"],
    ),
    "llama-minicpm5": (MINICPM5, VARIANTS["bf16"]),
    "llama-quantmix_f32": (QUANTMIX, {"dtype": "float32", "quantize": "mix"}),
    "llama-quantmix_bf16": (QUANTMIX, {"dtype": "bfloat16", "quantize": "mix"}),
    "gemma3_text-untied": ({**GEMMA3, "tie_word_embeddings": False}, VARIANTS["bf16"]),
}

AFFINE_BITS = (2, 3, 4, 5, 6, 8)
MIX = [
    *({"group_size": group, "bits": bits, "mode": "affine"} for group in (128, 64, 32) for bits in AFFINE_BITS),
    {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    {"group_size": 32, "bits": 8, "mode": "mxfp8"},
]
MIX_DEFAULT = {"group_size": 32, "bits": 4, "mode": "affine"}
MIX_UNQUANTIZED = "model.layers.3.self_attn.o_proj"


def values(name, shape, gemma):
    """Random float32 entries whose scale suits what the tensor is, so that logits are spread and tokens vary."""
    draw = np.random.default_rng([SEED, zlib.crc32(name.encode())]).standard_normal(shape).astype(np.float32)
    if "norm" in name:
        # Gemma adds 1 itself. Its embeddings are scaled up and tied: without louder blocks it repeats its input.
        mean = 1.0 if not gemma else 8.0 if name == "model.norm.weight" else 1.5 if ".post_" in name else 0.0
        return draw * np.float32(0.2) + np.float32(mean)
    if name.endswith("bias"):
        return draw * np.float32(0.3)
    if "embed_tokens" in name:
        return draw * np.float32(0.05 if gemma else 0.35)
    return draw * np.float32(2.5 / np.sqrt(shape[-1]))


def random_model(config, dtype):
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    if config["model_type"] == "gemma3_text" and config["tie_word_embeddings"]:
        model.sanitize({})
    gemma = config["model_type"].startswith("gemma")
    shapes = {name: array.shape for name, array in tree_flatten(model.parameters())}
    weights = [(name, mx.array(values(name, shape, gemma))) for name, shape in shapes.items()]
    model.load_weights(weights, strict=True)
    model.set_dtype(getattr(mx, dtype))
    return model


def mix_predicate():
    """Deals the entries of MIX out to the layers in order; a layer takes the first one whose groups divide its rows."""
    left = list(MIX)

    def predicate(path, module):
        if path == MIX_UNQUANTIZED:
            return False
        fitting = [params for params in left if module.weight.shape[-1] % params["group_size"] == 0]
        if not fitting:
            return True
        left.remove(fitting[0])
        return dict(fitting[0])

    return predicate, left


def quantized(model, config, how):
    with contextlib.redirect_stdout(io.StringIO()):
        if how != "mix":
            return quantize_model(model, config, **how)
        predicate, left = mix_predicate()
        model, config = quantize_model(model, config, **MIX_DEFAULT, quant_predicate=predicate)
    assert not left, f"no layer took {left}"
    config["quantization"][MIX_UNQUANTIZED] = False
    return model, config


def make(name, config, variant):
    target = CHECKPOINTS / name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    config = {**config, "torch_dtype": variant["dtype"]}
    model = random_model(config, variant["dtype"])
    if "quantize" in variant:
        model, config = quantized(model, config, variant["quantize"])
    save_model(target, model)
    save_config(config, config_path=target / "config.json")
    tiny_tokenizer.write(target)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (target / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")
    load(str(target))
    size = sum(file.stat().st_size for file in target.iterdir())
    print(f"{target.relative_to(ROOT)}: {size // 1024} KiB")


def main():
    plans = {f"{family}-{name}": (config, how) for family, config in FAMILIES.items() for name, how in VARIANTS.items()}
    plans |= EXTRAS
    names = sys.argv[1:] or list(plans)
    for name in names:
        if name not in plans:
            sys.exit(f"error: no checkpoint `{name}`\nhint: {', '.join(plans)}")
        make(name, *plans[name])


if __name__ == "__main__":
    main()
