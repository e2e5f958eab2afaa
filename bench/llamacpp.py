"""Decode and prefill of the command against llama.cpp on the same GGUF file, in turn; medians and their ratios.

usage: python3 bench/llamacpp.py LIBRARIES MODEL.gguf [--threads 2] [--rounds 5] [--binary mlx-bun] [-- FLAGS]
LIBRARIES is a folder with libllama and libggml, such as `bins/linux-x64` of npm's @node-llama-cpp/linux-x64.
FLAGS go to `mlx-bun generate`, for instance `--cpu-precision int8`.
Both feed 400 tokens and then generate 128, whose logits each reads. llama.cpp runs through libllama's C API; the
command is measured whole, by the figures of `generate --json`.
"""

import argparse
import ctypes as c
import glob
import json
import os
import statistics
import subprocess
import sys
import time

PROMPT_TOKENS, NEW_TOKENS = 400, 128
# One token each in the starter's vocabulary; the command reports how many it fed.
WORDS = "the old town by the river was quiet and the people in it went to work every day "


def load(folder, name):
    return c.CDLL(sorted(glob.glob(os.path.join(folder, name)))[0], c.RTLD_GLOBAL)


class ModelParams(c.Structure):
    _fields_ = [("words", c.c_uint64 * 64)]  # larger than the real one: filled and passed on as it is


class ContextParams(c.Structure):
    _fields_ = [("words", c.c_uint32 * 128)]


class Batch(c.Structure):
    _fields_ = [("count", c.c_int32), *[(name, c.c_void_p) for name in ("token", "embd", "pos", "n", "seq", "logits")]]


class LlamaCpp:
    def __init__(self, folder, model, threads):
        load(folder, "libggml-base*.so*")
        ggml, self.llama = load(folder, "libggml.*"), load(folder, "libllama.*")
        lib = self.llama
        quiet = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
        self.keep = quiet(lambda *_: None)
        lib.llama_log_set(self.keep, None)
        ggml.ggml_backend_load_all_from_path(c.c_char_p(folder.encode()))
        lib.llama_model_default_params.restype = ModelParams
        lib.llama_context_default_params.restype = ContextParams
        lib.llama_model_load_from_file.argtypes = [c.c_char_p, ModelParams]
        lib.llama_init_from_model.argtypes = [c.c_void_p, ContextParams]
        lib.llama_batch_get_one.argtypes = [c.c_void_p, c.c_int32]
        lib.llama_batch_get_one.restype = Batch
        lib.llama_decode.argtypes = [c.c_void_p, Batch]
        lib.llama_get_logits_ith.argtypes = [c.c_void_p, c.c_int32]
        lib.llama_get_memory.argtypes = [c.c_void_p]
        lib.llama_memory_clear.argtypes = [c.c_void_p, c.c_bool]
        lib.llama_set_n_threads.argtypes = [c.c_void_p, c.c_int32, c.c_int32]
        for name in ("llama_model_load_from_file", "llama_init_from_model", "llama_get_logits_ith", "llama_get_memory"):
            getattr(lib, name).restype = c.c_void_p
        weights = lib.llama_model_load_from_file(model.encode(), lib.llama_model_default_params())
        if not weights:
            sys.exit(f"llama.cpp cannot load {model}")
        params = lib.llama_context_default_params()
        params.words[0] = 2048  # n_ctx
        self.context = lib.llama_init_from_model(weights, params)
        lib.llama_set_n_threads(self.context, threads, threads)

    def feed(self, tokens):
        array = (c.c_int32 * len(tokens))(*tokens)
        if self.llama.llama_decode(self.context, self.llama.llama_batch_get_one(array, len(tokens))):
            sys.exit("llama_decode failed")
        self.llama.llama_get_logits_ith(self.context, -1)

    def round(self):
        self.llama.llama_memory_clear(self.llama.llama_get_memory(self.context), True)
        start = time.perf_counter()
        self.feed([1 + index * 37 % 4000 for index in range(PROMPT_TOKENS)])
        middle = time.perf_counter()
        for _ in range(NEW_TOKENS):
            self.feed([198])
        end = time.perf_counter()
        return PROMPT_TOKENS / (middle - start), NEW_TOKENS / (end - middle)


def ours(binary, model, threads, flags):
    prompt = (WORDS * (PROMPT_TOKENS // 17 + 1)).split()[:PROMPT_TOKENS]
    command = [binary, "generate", "--model", model, "--raw", "--json", "--temp", "0", "--threads", str(threads)]
    command += ["--max-tokens", str(NEW_TOKENS), *flags, " ".join(prompt)]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        sys.exit(run.stderr)
    return json.loads(run.stdout)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("libraries")
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--binary", default="mlx-bun")
    arguments, flags = parser.parse_known_args()
    flags = [flag for flag in flags if flag != "--"]
    theirs = LlamaCpp(os.path.abspath(arguments.libraries), arguments.model, arguments.threads)
    theirs.round()
    rows = []
    for _ in range(arguments.rounds):
        prefill, decode = theirs.round()
        reply = ours(arguments.binary, arguments.model, arguments.threads, flags)
        figures = reply.get("stats", reply)
        rows.append((prefill, decode, figures["prompt_tps"], figures["generation_tps"]))
        names = ("llama_prefill", "llama_decode", "prefill", "decode")
        print(json.dumps({name: round(value, 1) for name, value in zip(names, rows[-1])}), flush=True)
    prefill = statistics.median(row[2] / row[0] for row in rows)
    decode = statistics.median(row[3] / row[1] for row in rows)
    print(json.dumps({"prefill_ratio": round(prefill, 2), "decode_ratio": round(decode, 2)}))


if __name__ == "__main__":
    main()
