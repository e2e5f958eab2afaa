#!/usr/bin/env python3
"""Writes fixtures/gguf/: small GGUF files and what independent readers make of them.

usage: record_gguf.py          (needs: mlx gguf numpy regex sentencepiece tokenizers protobuf)

The files come from PyPI gguf's writer, tensors from its quantizers (or random blocks where it has none), expected
values from its dequantizers. Layouts that MLX must understand are checked with MLX itself. Token ids come from
SentencePiece and from `tokenizers` set up as the models' own tokenizer.json has it. The starter model is read from
where scripts/setup.py puts it.
"""

import json
import os
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T
from gguf_file import OUT, File, check_affine, layers, llama3_factors, mix_hash, random_blocks, sizes
from gguf_texts import CHATML_TEXTS, TEXTS, pre_tokenizer_words
from gguf_vocabulary import Vocabulary, byte_level_reference
from tokenizers import pre_tokenizers

STARTER_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def types_file(vocabulary):
    """Every tensor type, on the llama architecture, rows of 256."""
    file = File("types", "llama")
    config = sizes(file, hidden=256, layers=2, ffn=256, heads=1, kv=1, head=8, theta=10000.0)
    size = vocabulary.tiny(file.writer)
    file.tensor("token_embd.weight", "model.embed_tokens.weight", (size, 256), T.Q4_1)
    file.tensor("output_norm.weight", "model.norm.weight", (256,), T.F32)
    kinds = [
        [T.Q6_K, T.Q5_K, T.Q3_K, T.Q2_K, T.Q4_K, T.Q5_0, T.Q5_1],
        [T.Q4_1, T.Q8_0, T.Q4_0, T.BF16, T.F16, T.Q8_K, T.Q4_0],
    ]
    parts = [
        ("attn_q", "self_attn.q_proj"), ("attn_k", "self_attn.k_proj"), ("attn_v", "self_attn.v_proj"),
        ("attn_output", "self_attn.o_proj"), ("ffn_gate", "mlp.gate_proj"), ("ffn_up", "mlp.up_proj"),
        ("ffn_down", "mlp.down_proj"),
    ]  # fmt: skip
    for layer in range(2):
        for (stored, name), kind in zip(parts, kinds[layer]):
            blocks = None
            if (layer, stored) == (1, "ffn_down"):  # a scale whose eightfold is beyond half precision
                blocks = random_blocks(T.Q4_0, 8, 256)
                blocks[3, 36:38] = np.array([9000], dtype="<f2").view(np.uint8)
            heads = 1 if stored in ("attn_q", "attn_k") else None
            file.tensor(
                f"blk.{layer}.{stored}.weight", f"model.layers.{layer}.{name}.weight", (8, 256), kind, heads, blocks=blocks
            )
    return file.finish({
        "model_type": "llama", **config, "vocab_size": size, "tie_word_embeddings": True, "attention_bias": False,
        "mlp_bias": False, "eos_token_id": [0],
        "quantization": {
            "group_size": 32, "bits": 4, "mode": "affine",
            "model.layers.1.self_attn.k_proj": {"group_size": 32, "bits": 8, "mode": "affine"},
            **{f"model.layers.0.{name}": False for _, name in parts},
            **{f"model.layers.1.{name}": False for name in
               ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")},
        },
    })  # fmt: skip


def llama_file(vocabulary):
    file = File("llama", "llama")
    shape = {"hidden": 32, "ffn": 64, "heads": 4, "kv": 2, "head": 8}
    config = sizes(file, layers=2, theta=500000.0, **shape)
    size = vocabulary.sentence_piece(file.writer)
    file.tensor("token_embd.weight", "model.embed_tokens.weight", (size, 32), T.Q8_0)
    file.tensor("output.weight", "lm_head.weight", (size, 32), T.Q4_0)
    file.tensor("output_norm.weight", "model.norm.weight", (32,), T.F32)
    biases = ("attn_q", "attn_k", "attn_v", "attn_output")
    layers(file, count=2, kinds=[T.Q8_0, T.Q4_0, T.F16, T.Q4_1, T.F32, T.BF16], permuted=True, biases=biases, **shape)
    file.writer.add_tensor("rope_freqs.weight", llama3_factors(8, 500000.0, 8.0))
    return file.finish({
        "model_type": "llama", **config, "vocab_size": size, "tie_word_embeddings": False, "attention_bias": True,
        "mlp_bias": False, "bos_token_id": 1, "eos_token_id": [2],
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    })  # fmt: skip


def qwen_file(name, vocabulary):
    file = File(name, name)
    shape = {"hidden": 32, "ffn": 64, "heads": 4, "kv": 2, "head": 8 if name == "qwen2" else 16}
    config = sizes(file, layers=2, theta=1000000.0, eps=1e-6, **shape)
    size = vocabulary.byte_level(file.writer)
    extra = {}
    if name == "qwen3":
        file.writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        file.writer.add_rope_scaling_factor(4.0)
        file.writer.add_rope_scaling_orig_ctx_len(128)
        extra["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    file.tensor("token_embd.weight", "model.embed_tokens.weight", (size, 32), T.Q4_1)
    file.tensor("output_norm.weight", "model.norm.weight", (32,), T.F32)
    biases = ("attn_q", "attn_k", "attn_v") if name == "qwen2" else ()
    layers(file, count=2, kinds=[T.Q8_0, T.F16, T.Q4_0], biases=biases, qk_norm=name == "qwen3", **shape)
    return file.finish({
        "model_type": name, **config, "vocab_size": size, "tie_word_embeddings": True, "bos_token_id": 0,
        "eos_token_id": [2, 0], **extra,
    })  # fmt: skip


def gemma3_file(vocabulary):
    file = File("gemma3", "gemma3")
    shape = {"hidden": 32, "ffn": 64, "heads": 2, "kv": 1, "head": 16}
    config = sizes(file, layers=2, theta=1000000.0, eps=1e-6, **shape)
    file.writer.add_sliding_window(64)
    file.writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    file.writer.add_rope_scaling_factor(8.0)
    size = vocabulary.gemma(file.writer)
    file.tensor("token_embd.weight", "model.embed_tokens.weight", (size, 32), T.Q8_0)
    file.tensor("output_norm.weight", "model.norm.weight", (32,), T.F32, norm=True)
    layers(file, count=2, kinds=[T.Q5_0, T.Q8_0, T.BF16], qk_norm=True, gemma=True, **shape)
    return file.finish({
        "model_type": "gemma3_text", **config, "vocab_size": size, "tie_word_embeddings": True, "bos_token_id": 2,
        "eos_token_id": [1, 5], "rope_local_base_freq": 10000.0, "query_pre_attn_scalar": 16, "sliding_window": 64,
        "sliding_window_pattern": 6, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    })  # fmt: skip


def starter():
    cache = os.environ.get("MLX_BUN_CACHE")
    if not cache:
        cache = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "mlx-bun")
    path = Path(cache) / "models" / STARTER_FILE
    reader = gguf.GGUFReader(path)
    heads = {"attn_q": 9, "attn_k": 3}
    hashes = {}
    for tensor in reader.tensors:
        name, kind, data = tensor.name, tensor.tensor_type, np.array(tensor.data)
        part = name.split(".")[2] if name.startswith("blk.") else None
        if part in heads:  # undo the permutation, on stored rows
            shape = data.shape
            data = data.reshape(heads[part], shape[0] // heads[part] // 2, 2, -1).swapaxes(1, 2).reshape(shape)
        if kind == T.F32:
            hashes[name] = mix_hash(data.astype("<f4").tobytes())
        else:
            _, words, scales, biases = check_affine(data, kind)
            hashes[name] = mix_hash(words.tobytes() + scales.tobytes() + biases.tobytes())

    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in reader.fields["tokenizer.ggml.merges"].contents()]
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    special = [token for token, kind in zip(tokens, kinds) if kind == gguf.TokenType.CONTROL]
    # SmolLM2's own tokenizer.json: single digits, then GPT-2's words and bytes. (transformers' import of GGUF files
    # is no reference: it takes any `gpt2` vocabulary of the llama architecture for Llama 3's and keeps digits together.)
    words = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])  # fmt: skip
    reference = byte_level_reference(tokens, merges, special, words)
    texts = TEXTS + CHATML_TEXTS
    ids = [reference.encode(text, add_special_tokens=False).ids for text in texts]
    return {"tensors": dict(sorted(hashes.items())), "ids": ids}


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    vocabulary = Vocabulary()
    files = {
        "types": types_file(vocabulary),
        "llama": llama_file(vocabulary),
        "qwen2": qwen_file("qwen2", vocabulary),
        "qwen3": qwen_file("qwen3", vocabulary),
        "gemma3": gemma3_file(vocabulary),
        "unigram": vocabulary.unigram(),
    }
    extra = {
        "qwen2": CHATML_TEXTS,
        "llama": ["<s>a</s> b<s>", "[INST] Hi [/INST]"],
        "gemma3": ["<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"],
    }
    ids = {
        name: {"texts": vocabulary.unigram_texts if name == "unigram" else TEXTS + extra[name], "ids": ids}
        for name, ids in vocabulary.references.items()
    }
    found = starter()
    ids["starter"] = {"texts": TEXTS + CHATML_TEXTS, "ids": found["ids"]}
    write("expected", files)
    write("tokens", ids)
    write("pre_tokenizers", pre_tokenizer_words())
    write("starter", found["tensors"])


def write(name, value):
    # A line for each second-level entry: diffs stay readable, files small.
    lines = []
    for key, entry in value.items():
        if isinstance(entry, dict):
            inner = ",\n  ".join(f"{json.dumps(k)}: {dump(v)}" for k, v in entry.items())
            lines.append(f"{json.dumps(key)}: {{\n  {inner}\n}}")
        else:
            lines.append(f"{json.dumps(key)}: {dump(entry)}")
    (OUT / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def dump(value):
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))


if __name__ == "__main__":
    main()
