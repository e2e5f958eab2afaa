#!/usr/bin/env python3
"""GGUF files of `mlx-bun convert --to-gguf` against PyPI gguf and llama.cpp.

usage: check_gguf.py LIBRARIES MODEL [--binary mlx-bun] [--tokens 32] [--types F16,Q8_0,Q4_0,Q4_1]
LIBRARIES is a folder with libllama and libggml (see bench/llamacpp.py), MODEL a snapshot folder of plain weights.
Writes MODEL as each type; compares every tensor with what PyPI gguf makes of MODEL's numbers, and the greedy
continuation by llama.cpp with `mlx-bun generate` on the same file. llama.cpp rounds activations to 8 bits where weights
are quantized, so continuations may part there; those of F16 must not. Run it with the oracle's Python.
"""

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
from llamacpp import LlamaCpp  # noqa: E402

PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "1, 2, 3, 4,", "Once upon a time"]
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def expected(folder, kind):
    """Tensors of a llama snapshot as llama.cpp's converter would write them."""
    config = json.loads((folder / "config.json").read_text())
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for file in sorted(folder.glob("*.safetensors")):
        for name, array in mx.load(str(file)).items():
            values = np.array(array.astype(mx.float32))
            module = name.removesuffix(".weight")
            if module.startswith("model.layers."):
                layer, module = module.removeprefix("model.layers.").split(".", 1)
                part = NAMES[module]
                if part in heads:
                    shape = values.shape
                    values = values.reshape(heads[part], 2, shape[0] // heads[part] // 2, shape[1]).swapaxes(1, 2).reshape(shape)
                stored = f"blk.{layer}.{part}.weight"
            else:
                stored = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[module] + ".weight"
            wanted = gguf.GGMLQuantizationType[kind] if values.ndim == 2 else gguf.GGMLQuantizationType.F32
            yield stored, gguf.quants.quantize(values, wanted), wanted


def greedy(llama, tokens, count):
    llama.llama.llama_memory_clear(llama.llama.llama_get_memory(llama.context), True)
    out, feed = [], tokens
    for _ in range(count):
        llama.feed(feed)
        pointer = llama.llama.llama_get_logits_ith(llama.context, -1)
        size = llama.vocabulary
        logits = np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (size,))
        feed = [int(logits.argmax())]
        out += feed
    return out


def ours(binary, model, prompt, count):
    command = [binary, "generate", "--model", str(model), "--raw", "--json", "--temp", "0", "--max-tokens", str(count), prompt]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        sys.exit(run.stderr)
    return json.loads(run.stdout)["text"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("libraries")
    parser.add_argument("model", type=Path)
    parser.add_argument("--binary", default="mlx-bun")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--types", default="F16,Q8_0,Q4_0,Q4_1")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    ends = json.loads((arguments.model / "config.json").read_text())["eos_token_id"]
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for kind in arguments.types.split(","):
            file = Path(folder) / f"{kind}.gguf"
            command = [arguments.binary, "convert", str(arguments.model), "--to-gguf", kind, "--gguf-path", str(file)]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
            tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
            differing, count = [], 0
            for name, data, wanted in expected(arguments.model, kind):
                count += 1
                found = tensors[name]
                if found.tensor_type != wanted or found.data.tobytes() != data.tobytes():
                    differing.append(name)
            if count != len(tensors):
                differing.append(f"{len(tensors)} tensors where {count} are expected")
            llama = LlamaCpp(arguments.libraries, str(file), 1)
            llama.vocabulary = tokenizer.get_vocab_size()
            same = 0
            for prompt in PROMPTS:
                theirs = greedy(llama, tokenizer.encode(prompt).ids, arguments.tokens)
                theirs = theirs[: theirs.index(ends)] if ends in theirs else theirs
                theirs, mine = tokenizer.decode(theirs, skip_special_tokens=False), ours(arguments.binary, file, prompt, arguments.tokens)
                same += theirs == mine
                if theirs != mine:
                    print(f"  {prompt!r}\n    llama.cpp {theirs!r}\n    mlx-bun   {mine!r}")
            print(f"{kind}: {count} tensors, {len(differing)} differ {differing[:3] or ''}; {same} of {len(PROMPTS)} continuations equal", flush=True)
            failed |= bool(differing) or (kind == "F16" and same < len(PROMPTS))
            file.unlink()
    sys.exit(failed)


if __name__ == "__main__":
    main()
