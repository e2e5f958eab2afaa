#!/usr/bin/env python3
"""The starter model as HF snapshots in f32 and bf16, made from its GGUF, and 100 greedy steps of each by mlx-lm.

usage: starter.py snapshot | record [f32 | bf16]

Snapshots go to .native/starter/{f32,bf16}: weights dequantized by the `gguf` package, llama's row permutation of
q and k undone, tokenizer and chat template rebuilt from the metadata. `record` writes goldens/…/starter-*.json.
Run it with the oracle's Python (scripts/oracle/setup.py).
"""

import json
import os
import shutil
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from gguf import GGUFReader, dequantize
from mlx_lm.generate import generate_step
from mlx_lm.utils import load
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from golden import ROOT, GoldenFile, dtype_name, short_hash, top2_gap

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SNAPSHOTS = Path(".native") / "starter"
DTYPES = {"f32": mx.float32, "bf16": mx.bfloat16}
MESSAGES = [{"role": "user", "content": "What is the capital of France? Then name 3 rivers and explain 2 of them."}]
STEPS = 100
TOP = 16
CHOSEN_STEPS = (0, 1, 2, 15, 31, 63, 99)

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
CONTROL_TOKEN = 3


def gguf_path():
    cache = os.environ.get("MLX_BUN_CACHE")
    if not cache:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        cache = os.path.join(base, "mlx-bun")
    return Path(cache) / "models" / GGUF_FILE


def unpermute(rows, heads):
    """GGUF interleaves the two halves of each rotary head; HF keeps them apart."""
    out, width = rows.shape
    return rows.reshape(heads, out // heads // 2, 2, width).swapaxes(1, 2).reshape(out, width)


def weights(reader, heads, kv_heads):
    """Every tensor under its HF name, in float32."""
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name == "token_embd.weight":
            yield "model.embed_tokens.weight", values
        elif tensor.name == "output_norm.weight":
            yield "model.norm.weight", values
        else:
            _, layer, kind, _ = tensor.name.split(".")
            if kind == "attn_q":
                values = unpermute(values, heads)
            elif kind == "attn_k":
                values = unpermute(values, kv_heads)
            yield f"model.layers.{layer}.{NAMES[kind]}.weight", values


def tokenizer_files(field):
    tokens, merges = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.merges")
    types = field("tokenizer.ggml.token_type")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    # `smollm` splits off every digit, then cuts as GPT-2 does.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    named = {
        name: tokens[field(f"tokenizer.ggml.{key}_token_id")]
        for name, key in [("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")]
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(field("tokenizer.ggml.add_bos_token")),
        "clean_up_tokenization_spaces": False,
        "model_max_length": field("llama.context_length"),
        "chat_template": field("tokenizer.chat_template"),
        **named,
    }
    return tokenizer, config


def snapshot():
    path = gguf_path()
    if not path.exists():
        sys.exit(f"error: no {path}\nhint: python3 scripts/setup.py starter")
    reader = GGUFReader(path)

    def field(name):
        return reader.fields[name].contents()

    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": field("llama.embedding_length"),
        "num_hidden_layers": field("llama.block_count"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": field("llama.rope.dimension_count"),
        # The metadata holds float32; the decimal it was written from is what HF configs carry.
        "rms_norm_eps": float(f"{field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": field("llama.rope.freq_base"),
        "max_position_embeddings": field("llama.context_length"),
        "vocab_size": field("llama.vocab_size"),
        "tie_word_embeddings": True,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
    }
    tokenizer, tokenizer_config = tokenizer_files(field)
    tensors = {name: mx.array(values) for name, values in weights(reader, heads, kv_heads)}
    for name, dtype in DTYPES.items():
        target = ROOT / SNAPSHOTS / name
        partial = target.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        cast = {key: value.astype(dtype) for key, value in tensors.items()}
        mx.save_safetensors(str(partial / "model.safetensors"), cast, metadata={"format": "mlx"})
        torch_name = {"f32": "float32", "bf16": "bfloat16"}[name]
        write_json(partial / "config.json", {**config, "torch_dtype": torch_name})
        write_json(partial / "tokenizer_config.json", tokenizer_config)
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
        write_json(partial / "generation_config.json", ids)
        tokenizer.save(str(partial / "tokenizer.json"))
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        print(f"{SNAPSHOTS / name}: {len(cast)} tensors")


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def top_entries(row):
    """The TOP highest entries: ids, and values in the row's own dtype."""
    ids = mx.argsort(-row)[:TOP]
    return ids, row[ids]


def record(variant):
    path = SNAPSHOTS / variant
    if not (ROOT / path / "model.safetensors").exists():
        snapshot()
    model, tokenizer = load(str(ROOT / path))
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
    golden = GoldenFile("starter", variant, path)
    tokens, hashes, gaps, chosen, dtype = [], [], [], {}, None
    for step, (token, logprobs) in enumerate(generate_step(mx.array(prompt), model, max_tokens=STEPS)):
        tokens.append(token)
        hashes.append(short_hash(logprobs))
        gaps.append(top2_gap(logprobs))
        dtype = dtype_name(logprobs)
        if step in CHOSEN_STEPS:
            ids, values = top_entries(logprobs)
            chosen[step] = ids.tolist()
            golden.keep(f"greedy.{step}.top", values)
        if sys.stderr.isatty():
            print(f"\r{variant}: {step + 1}/{STEPS}", end="\n" if step + 1 == STEPS else "", file=sys.stderr, flush=True)
    steps = {"tokens": tokens, "dtype": dtype, "logprobs": hashes, "top2_gap": gaps, "top": chosen}
    golden.add({"name": "greedy", "mode": "greedy", "prompt": prompt, "max_tokens": STEPS}, {"steps": steps})
    golden.write()
    print(tokenizer.decode(tokens))


def main():
    match sys.argv[1:]:
        case ["snapshot"]:
            snapshot()
        case ["record", *variants] if set(variants) <= set(DTYPES):
            for variant in variants or DTYPES:
                record(variant)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
