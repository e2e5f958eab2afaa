#!/usr/bin/env python3
"""The same greedy requests to mlx_lm.server and to `mlx-bun serve --l1`: the texts must be the same.

usage: $(python3 scripts/oracle/setup.py) scripts/clients/differential.py [MODEL]…

Without a model: tiny checkpoints of every family, and the starter (scripts/oracle/starter.py snapshot) if it is there.
Two habits of mlx-lm's detokenizer are set aside: it drops a reply's first blank and shows the byte 0 as a letter.
mlx_lm.server reads a prompt's system message and thinking tail apart, and its prompt cache goes on from what came
before; both change shapes of computation and may flip a choice between two tokens that are equally likely.
"""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

from server import CHECKPOINTS, ROOT, serving

TINY = ["llama-f32", "llama-bf16", "qwen2-f32", "qwen3-f32", "qwen3-bf16", "gemma3_text-f32"]
PORT = 18473
RECIPE = ["--temp", "0", "--top-p", "0", "--top-k", "0", "--max-tokens", "512", "--batch", "1", "--l1"]
RECIPE += ["--prompt-cache", "0"]


def requests():
    """At least ten a model: chats, histories, raw text, stops, penalties, streams."""
    chats = [
        [{"role": "user", "content": "Hello"}],
        [{"role": "user", "content": "Name three colours, please."}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of France?"}],
        [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi, how can I help?"},
            {"role": "user", "content": [{"type": "text", "text": "Count "}, {"type": "text", "text": "to five."}]},
        ],
    ]
    for messages in chats:
        yield "/v1/chat/completions", {"messages": messages, "max_tokens": 24}
    yield "/v1/chat/completions", {"messages": chats[0], "max_tokens": 12, "stream": True}
    yield "/v1/chat/completions", {"messages": chats[1], "max_tokens": 24, "repetition_penalty": 1.3}
    yield "/v1/chat/completions", {"messages": chats[1], "max_tokens": 24, "logit_bias": {"5": 3.0, "7": -100.0}}
    yield "/v1/chat/completions", {"messages": chats[1], "max_tokens": 24, "presence_penalty": 0.8}
    yield "/v1/completions", {"prompt": "Once upon a time", "max_tokens": 24}
    yield "/v1/completions", {"prompt": "1, 2, 3,", "max_tokens": 16, "frequency_penalty": 0.5}
    yield "/v1/completions", {"prompt": "The quick brown fox", "max_tokens": 10, "stream": True}


def ask(url, path, body):
    data = json.dumps({"model": "default_model", **body}).encode()
    call = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(call, timeout=600) as reply:
        text = reply.read().decode()
    if not body.get("stream"):
        choice = json.loads(text)["choices"][0]
        return choice.get("text") if "text" in choice else choice["message"].get("content") or "", choice["finish_reason"]
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ") and line != "data: [DONE]"]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    text = "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)
    return text, choices[-1]["finish_reason"]


@contextmanager
def reference(model):
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model), "--port", str(PORT), "--prompt-cache-size", "1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{PORT}"
        try:
            for _ in range(600):
                try:
                    urllib.request.urlopen(f"{url}/health", timeout=2).read()
                    break
                except (urllib.error.URLError, ConnectionError, TimeoutError):
                    if process.poll() is not None:
                        raise RuntimeError("mlx_lm.server did not start") from None
                    time.sleep(0.1)
            yield url
        finally:
            process.kill()


def plain(answer):
    text, finish = answer
    return text.replace("\u0100", "\0").removeprefix(" "), finish


def main():
    starters = [ROOT / ".native" / "starter" / dtype for dtype in ("f32", "bf16")]
    known = [CHECKPOINTS / name for name in TINY] + [starter for starter in starters if starter.exists()]
    models = sys.argv[1:] or known
    total = different = 0
    for model in models:
        print(model, flush=True)
        with reference(model) as theirs, serving(model, *RECIPE) as (ours, _):
            for path, body in requests():
                total += 1
                expected, found = ask(theirs, path, body), ask(ours, path, body)
                if plain(expected) != plain(found):
                    different += 1
                    print(f"{model} {path} {json.dumps(body)}\n  mlx-lm:  {expected}\n  mlx-bun: {found}")
    print(f"{total} requests, {different} differ")
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
