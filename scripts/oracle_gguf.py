#!/usr/bin/env python3
"""Writes fixtures/gguf/: small GGUF files and what independent readers make of them.

usage: oracle_gguf.py          (needs: mlx gguf numpy regex sentencepiece tokenizers protobuf)

The files come from PyPI gguf's writer, tensors from its quantizers (or random blocks where it has none), expected
values from its dequantizers. Layouts that MLX must understand are checked with MLX itself. Token ids come from
SentencePiece and from `tokenizers` set up as the models' own tokenizer.json has it. The starter model is read from
where scripts/setup.py puts it.
"""

import json
import os
import tempfile
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import regex
import sentencepiece
from gguf import GGMLQuantizationType as T
from gguf import quants
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

OUT = Path(__file__).resolve().parent.parent / "fixtures" / "gguf"
STARTER_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
rng = np.random.default_rng(20)

CORPUS = """
The quick brown fox jumps over the lazy dog, while the old man watches from his porch and smiles.
A language model reads text, splits it into tokens, and predicts the next token again and again.
In 2024 there were 1234567 of them; by 2031 it will be 98765, or so they say.
def main(argument): return [value for value in argument if value is not None]
Größe, naïve, façade, coöperate, Ελληνικά, русский язык, 日本語のテキスト, 한국어, العربية, हिन्दी.
The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is Madrid.
    for index in range(10):
        print(index, end="")
""" * 3

TEXTS = [
    "Hello, world!",
    "The capital of France is Paris.",
    " leading space",
    "trailing space ",
    "two  spaces   three    four",
    "tabs\tand\nnewlines\r\nand\n\n\nmore",
    "1234567890",
    "3.14159, 2,718 and 1e-5",
    "In 2024, 12 of 345 were 6789.",
    "it's, don't, they'll, we've, I'm, he'd, you're",
    "IT'S, DON'T, THEY'LL, WE'VE",
    "def main(argument):\n    return [x for x in argument if x is not None]\n",
    "for (int i = 0; i < 10; ++i) { sum += a[i]; }",
    '{"key": "value", "list": [1, 2, 3]}',
    "https://example.com/path?query=1&other=%20",
    "user@example.com #hashtag @mention $100 50%",
    "Größe, naïve, façade, coöperate",
    "Gro\u0308ße nai\u0308ve (decomposed)",
    "Ελληνικά και русский язык",
    "日本語のテキストです。中文文本，标点符号！",
    "한국어 텍스트",
    "العربية نص",
    "हिन्दी पाठ",
    "ภาษาไทย",
    "emoji: 😀 👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈",
    "math: ∑ ∫ √2 ≈ 1.414, x² + y² = z²",
    "①②③ ½ ¾ Ⅷ ٣٤٥",
    "CamelCaseIdentifier snake_case_identifier kebab-case SCREAMING_CASE",
    "....!!!???---___***",
    "“curly quotes” ‘single’ — em dash … ellipsis",
    "zero\u200bwidth\u00a0nbsp\u3000ideographic",
    "a",
    " ",
    "\n",
    "\u2581literal metaspace",
    "x" * 50,
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "<b>html</b> &amp; <!-- comment -->",
    "\U0001f9ff\ue000\U00020000 rare",
    "control \x00\x01\x7f characters",
]
CHATML_TEXTS = [
    "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|> spaced <|im_end|>",
    "almost <|im_start |> special <|im_end|><|endoftext|>",
]


def mix_hash(data):
    """A 64-bit hash that numpy computes quickly: a sum of mixed words, each with its position."""
    data = bytes(data)
    length = len(data)
    words = np.frombuffer(data + b"\0" * (-length % 8), dtype="<u8")
    with np.errstate(over="ignore"):
        x = words + (np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
        total = np.uint64(x.sum(dtype=np.uint64)) + np.uint64(length)
    return f"{int(total):016x}"


def values_hash(array, zeros_alike):
    array = np.ascontiguousarray(array, dtype="<f4")
    return mix_hash((array + np.float32(0)).tobytes() if zeros_alike else array.tobytes())


# --- Tensors ---------------------------------------------------------------------------------------------------------


def dequantize(stored, kind):
    if kind == T.Q8_K:  # PyPI gguf leaves it out: d (f32), 256 signed bytes, 16 sums
        blocks = stored.reshape(-1, 292)
        d = blocks[:, :4].copy().view("<f4")
        return (d * blocks[:, 4:260].view(np.int8).astype(np.float32)).reshape(stored.shape[0], -1)
    return quants.dequantize(stored, kind)


def random_blocks(kind, rows, columns):
    """Blocks of random bytes with sane scales: ordinary, subnormal, negative and zero ones."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, size=(rows * columns // block, size), dtype=np.uint8)
    places = {
        T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0], T.Q2_K: [80, 82], T.Q3_K: [108],
        T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208], T.Q8_K: [],
    }[kind]  # fmt: skip
    for place in places:
        scales = rng.normal(scale=0.05, size=len(blocks)).astype("<f2")
        scales[::7] *= np.float16(1e-4)
        scales[3::11] = np.float16(0)
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    if kind == T.Q8_K:
        blocks[:, :4] = rng.normal(scale=0.05, size=len(blocks)).astype("<f4").view(np.uint8).reshape(-1, 4)
    return blocks.reshape(rows, -1)


def affine(stored, kind):
    """MLX's layout of Q4_0, Q4_1 and Q8_0, made element by element; None if half precision cannot hold it."""
    rows = stored.shape[0]
    blocks = stored.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    scales = blocks[:, :2].copy().view("<f2")[:, 0]
    if kind == T.Q8_0:
        q = (blocks[:, 2:].view(np.int8).astype(np.int32) + 128).astype(np.uint32)
        bits, biases = 8, scales.astype(np.float32) * -128
    else:
        packed = blocks[:, 4:] if kind == T.Q4_1 else blocks[:, 2:]
        q = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.uint32)
        minimum = blocks[:, 2:4].copy().view("<f2")[:, 0].astype(np.float32)
        bits, biases = 4, minimum if kind == T.Q4_1 else scales.astype(np.float32) * -8
    with np.errstate(over="ignore"):
        half = biases.astype("<f2")
    if not np.array_equal(half.astype(np.float32), biases):
        return None
    per_word = 32 // bits
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    words = np.bitwise_or.reduce(q.reshape(rows, -1, per_word) << shifts, axis=-1).astype("<u4")
    return bits, words, scales.reshape(rows, -1), half.reshape(rows, -1)


def check_affine(stored, kind):
    """MLX's own dequantization of the repacked blocks equals ggml's of the stored ones. Returns the repacked ones."""
    repacked = affine(stored, kind)
    if repacked is None:
        return None
    bits, words, scales, biases = repacked
    as_f32 = [mx.array(a.astype(np.float32)) for a in (scales, biases)]
    found = np.array(mx.dequantize(mx.array(words), *as_f32, group_size=32, bits=bits))
    expected = dequantize(stored, kind)
    assert np.array_equal(found + np.float32(0), expected + np.float32(0)), kind
    return repacked


def permute(array, heads):
    """As llama.cpp's converter stores query and key projections of the llama architecture."""
    shape = array.shape
    return array.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


class File:
    """A GGUF file and what is expected of it."""

    def __init__(self, name, architecture):
        self.name, self.architecture = name, architecture
        self.path = OUT / f"{name}.gguf"
        self.writer = gguf.GGUFWriter(self.path, architecture)
        self.expected = {}

    def tensor(self, stored_name, name, shape, kind, heads=None, norm=False, blocks=None):
        """Adds a tensor. `shape` is Hugging Face's; `heads` permutes the rows; `norm` stores one more."""
        columns = shape[-1]
        if kind in (T.F32, T.F16, T.BF16):
            values = rng.normal(size=shape).astype(np.float32)
            if norm:  # as if it came from bfloat16, so that adding one is exact
                values = dequantize(quants.quantize(values * np.float32(0.1), T.BF16), T.BF16).reshape(shape)
            stored = quants.quantize(values, kind)
            values = dequantize(stored, kind).reshape(shape)
        else:
            stored = random_blocks(kind, shape[0], columns) if blocks is None else blocks
            values = dequantize(stored, kind)
        entry = {"type": kind.name, "shape": list(shape), "form": "dense"}
        if norm:
            stored = quants.quantize(values + np.float32(1), kind)
            values = dequantize(stored, kind).reshape(shape) - np.float32(1)
        if kind in (T.Q4_0, T.Q4_1, T.Q8_0) and check_affine(stored, kind) is not None:
            entry["form"] = "affine"
        elif kind in (T.F16, T.BF16) and not norm:
            entry["form"] = kind.name
        entry["hash"] = values_hash(values, entry["form"] == "affine")
        self.expected[name] = entry
        self.writer.add_tensor(stored_name, permute(stored, heads) if heads else stored, raw_dtype=kind)

    def finish(self, config):
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return {"config": config, "tensors": self.expected}


def sizes(file, *, hidden, layers, ffn, heads, kv, head, theta, eps=1e-5, context=512):
    w = file.writer
    w.add_context_length(context)
    w.add_embedding_length(hidden)
    w.add_block_count(layers)
    w.add_feed_forward_length(ffn)
    w.add_head_count(heads)
    w.add_head_count_kv(kv)
    w.add_key_length(head)
    w.add_value_length(head)
    w.add_layer_norm_rms_eps(eps)
    w.add_rope_freq_base(theta)
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": ffn, "num_attention_heads": heads,
        "num_key_value_heads": kv, "head_dim": head, "rms_norm_eps": eps, "max_position_embeddings": context,
        "rope_theta": theta,
    }  # fmt: skip


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


def llama3_factors(head, theta, factor, low=1.0, high=4.0, original=8192):
    """As llama.cpp's converter writes them, in single precision."""
    frequencies = np.float32(1) / np.float32(theta) ** (np.arange(0, head, 2, dtype=np.float32) / np.float32(head))
    factors = []
    for frequency in frequencies:
        wavelength = np.float32(2 * np.pi) / frequency
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (np.float32(original) / wavelength - np.float32(low)) / np.float32(high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def layers(file, *, hidden, count, ffn, heads, kv, head, kinds, permuted=False, biases=(), qk_norm=False, gemma=False):
    rows = {
        "attn_q": (heads * head, hidden), "attn_k": (kv * head, hidden), "attn_v": (kv * head, hidden),
        "attn_output": (hidden, heads * head), "ffn_gate": (ffn, hidden), "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
    }  # fmt: skip
    modules = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    norms = {"attn_norm": ("input_layernorm", hidden), "ffn_norm": ("post_attention_layernorm", hidden)}
    if qk_norm:
        norms |= {"attn_q_norm": ("self_attn.q_norm", head), "attn_k_norm": ("self_attn.k_norm", head)}
    if gemma:
        norms |= {
            "ffn_norm": ("pre_feedforward_layernorm", hidden),
            "post_attention_norm": ("post_attention_layernorm", hidden),
            "post_ffw_norm": ("post_feedforward_layernorm", hidden),
        }
    for layer in range(count):
        for stored, (name, size) in norms.items():
            place = f"model.layers.{layer}.{name}.weight"
            file.tensor(f"blk.{layer}.{stored}.weight", place, (size,), T.F32, norm=gemma)
        for index, (stored, shape) in enumerate(rows.items()):
            kind = kinds[(index + layer * len(rows)) % len(kinds)]
            permutation = {"attn_q": heads, "attn_k": kv}.get(stored) if permuted else None
            place = f"model.layers.{layer}.{modules[stored]}"
            file.tensor(f"blk.{layer}.{stored}.weight", f"{place}.weight", shape, kind, permutation)
            if stored in biases:
                file.tensor(f"blk.{layer}.{stored}.bias", f"{place}.bias", shape[:1], T.F32, permutation)


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


# --- Tokenizers ------------------------------------------------------------------------------------------------------

QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level_reference(tokens, merges, special, pre, normalizer=None):
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


class Vocabulary:
    """Small tokenizers, trained once, written into files and asked for reference ids."""

    def __init__(self):
        self.references = {}
        trained = Tokenizer(models.BPE())
        trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        trained.train_from_iterator(
            CORPUS.splitlines(),
            trainers.BpeTrainer(
                vocab_size=320,
                special_tokens=self.special,
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            ),
        )
        model = json.loads(trained.to_str())["model"]
        self.tokens = sorted(model["vocab"], key=model["vocab"].get)
        self.merges = [tuple(pair) for pair in model["merges"]]

    def tiny(self, w):
        """A few tokens for a file whose tokenizer is of no interest."""
        tokens = ["<|endoftext|>", "a", "b", "ab"]
        w.add_tokenizer_model("gpt2")
        w.add_tokenizer_pre("gpt-2")
        w.add_token_list(tokens)
        w.add_token_types([3, 1, 1, 1])
        w.add_token_merges(["a b"])
        w.add_eos_token_id(0)
        return len(tokens)

    def byte_level(self, w):
        kinds = [gguf.TokenType.CONTROL if t in self.special else gguf.TokenType.NORMAL for t in self.tokens]
        w.add_tokenizer_model("gpt2")
        w.add_tokenizer_pre("qwen2")
        w.add_token_list(self.tokens)
        w.add_token_types(kinds)
        w.add_token_merges([" ".join(pair) for pair in self.merges])
        w.add_bos_token_id(0)
        w.add_eos_token_id(2)
        w.add_add_bos_token(False)
        w.add_chat_template("{{ messages[0].content }}")
        words = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])  # fmt: skip
        reference = byte_level_reference(self.tokens, self.merges, self.special, words, normalizers.NFC())
        self.references["qwen2"] = [reference.encode(t, add_special_tokens=False).ids for t in TEXTS + CHATML_TEXTS]
        return len(self.tokens)

    def train_pieces(self, **options):
        with tempfile.TemporaryDirectory() as folder:
            corpus = Path(folder) / "corpus"
            corpus.write_text(CORPUS)
            sentencepiece.SentencePieceTrainer.train(
                input=str(corpus), model_prefix=str(Path(folder) / "m"), byte_fallback=True, minloglevel=2,
                normalization_rule_name="identity", remove_extra_whitespaces=False, hard_vocab_limit=False,
                character_coverage=0.98, **options,
            )  # fmt: skip
            proto = sentencepiece_model_pb2.ModelProto()
            proto.ParseFromString((Path(folder) / "m.model").read_bytes())
        return proto

    def write_pieces(self, w, proto, user_defined_score=None):
        kinds = [piece.type for piece in proto.pieces]
        tokens, scores = [], []
        for piece in proto.pieces:
            text, score = piece.piece, piece.score
            if piece.type == gguf.TokenType.USER_DEFINED and user_defined_score is not None:
                text, score = text.replace("\u2581", " "), user_defined_score  # as llama.cpp's converter
            tokens.append(text)
            scores.append(score)
        w.add_tokenizer_pre("default")
        w.add_token_list(tokens)
        w.add_token_scores(scores)
        w.add_token_types(kinds)
        return tokens

    def piece_ids(self, proto, texts, special):
        """Ids of each text; control tokens are cut out first, as llama.cpp does, and each rest is a text."""
        processor = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
        ids = {piece.piece: i for i, piece in enumerate(proto.pieces)}
        cut = regex.compile("(" + "|".join(map(regex.escape, special)) + ")")
        return [
            [i for part in cut.split(text) if part for i in ([ids[part]] if part in special else processor.encode(part))]
            for text in texts
        ]

    def sentence_piece(self, w):
        proto = self.train_pieces(model_type="bpe", vocab_size=440, add_dummy_prefix=True)
        w.add_tokenizer_model("llama")
        tokens = self.write_pieces(w, proto)
        w.add_bos_token_id(1)
        w.add_eos_token_id(2)
        w.add_unk_token_id(0)
        texts = TEXTS + ["<s>a</s> b<s>", "[INST] Hi [/INST]"]
        self.references["llama"] = self.piece_ids(proto, texts, ["<s>", "</s>", "<unk>"])
        return len(tokens)

    def gemma(self, w):
        user_defined = ["\n\n", "\n\n\n", "\u2581\u2581", "\u2581\u2581\u2581", "<b>", "</b>"]
        proto = self.train_pieces(
            model_type="bpe", vocab_size=440, add_dummy_prefix=False, split_digits=True,
            user_defined_symbols=user_defined, control_symbols=["<start_of_turn>", "<end_of_turn>"],
            pad_id=0, eos_id=1, bos_id=2, unk_id=3, pad_piece="<pad>", eos_piece="<eos>", bos_piece="<bos>",
        )  # fmt: skip
        w.add_tokenizer_model("llama")
        tokens = self.write_pieces(w, proto, user_defined_score=-1000.0)
        w.add_bos_token_id(2)
        w.add_eos_token_id(1)
        w.add_unk_token_id(3)
        w.add_pad_token_id(0)
        w.add_add_bos_token(True)
        w.add_add_space_prefix(False)
        special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
        texts = TEXTS + ["<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"]
        self.references["gemma3"] = self.piece_ids(proto, texts, special)
        return len(tokens)

    def unigram(self):
        """A file without tensors but the embedding: only its tokenizer is of interest."""
        proto = self.train_pieces(model_type="unigram", vocab_size=430, add_dummy_prefix=True)
        file = File("unigram", "llama")
        config = sizes(file, hidden=32, layers=1, ffn=32, heads=1, kv=1, head=32, theta=10000.0)
        w = file.writer
        w.add_tokenizer_model("t5")
        tokens = self.write_pieces(w, proto)
        w.add_bos_token_id(1)
        w.add_eos_token_id(2)
        w.add_unk_token_id(0)
        w.add_add_space_prefix(True)
        w.add_add_bos_token(False)
        w.add_add_eos_token(True)
        file.tensor("token_embd.weight", "model.embed_tokens.weight", (len(tokens), 32), T.Q4_0)
        texts = [text for text in TEXTS if text.strip() and not text.startswith(" ")]
        self.references["unigram"] = self.piece_ids(proto, texts, ["<s>", "</s>", "<unk>"])
        self.unigram_texts = texts
        return file.finish({**config, "vocab_size": len(tokens)})


# llama.cpp's expressions by the first name of each kind (src/llama-vocab.cpp), where they cut like the originals.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + TAIL
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + TAIL
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
START = r"[^\r\n\p{L}\p{N}]?"
SLASH_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
EXPRESSIONS = {
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "llama-bpe": [LLAMA3],
    "dbrx": [LLAMA3],
    "qwen2": [QWEN2],
    "deepseek-r1-qwen": [QWEN2],
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "command-r": [r"\p{N}", GPT2],
    "tekken": [f"{START}{UPPER}*{LOWER}+|{START}{UPPER}+{LOWER}*|\\p{{N}}{SLASH_TAIL}"],
    "gpt-4o": [
        f"{START}{UPPER}*{LOWER}+{CONTRACTIONS}?|{START}{UPPER}+{LOWER}*{CONTRACTIONS}?|\\p{{N}}{{1,3}}{SLASH_TAIL}"
    ],
    "minicpm5": [r"\p{N}{1,3}", CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+" + TAIL],
    "seed-coder": [
        CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    # The list of cased letters is that of an older Unicode; for the sample texts the property does as well.
    "deepseek-llm": [
        r"[\r\n]", r"\s?[\p{Ll}\p{Lu}\p{Lt}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}+",
    ],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"],
    "poro-chat": [BLOOM],
    "viking": [BLOOM, r"\p{N}"],
}  # fmt: skip


def cut_words(text, expressions):
    """Each expression cuts the pieces of the one before; what it does not match stays a piece."""
    pieces = [text]
    for expression in expressions:
        compiled = regex.compile(expression)
        cut = []
        for piece in pieces:
            at = 0
            for match in compiled.finditer(piece):
                if match.start() == match.end():
                    continue
                if match.start() > at:
                    cut.append(piece[at : match.start()])
                cut.append(match.group())
                at = match.end()
            if at < len(piece):
                cut.append(piece[at:])
        pieces = cut
    return pieces


def pre_tokenizer_words():
    # No private or unassigned characters: Unicode versions differ there.
    texts = [text for text in TEXTS if "\ue000" not in text]
    return {"texts": texts, "words": {n: [cut_words(t, e) for t in texts] for n, e in EXPRESSIONS.items()}}


# --- The starter model -----------------------------------------------------------------------------------------------


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
