"""Small GGUF files with the tensors that are expected of them: written by PyPI gguf, checked with MLX."""

from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as T
from gguf import quants

OUT = Path(__file__).resolve().parents[2] / "fixtures" / "gguf"
rng = np.random.default_rng(20)


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
