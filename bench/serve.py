"""`mlx-bun serve` against mlx_lm.server on the same model, in turn; medians and median ratios of pairs.

usage: PYTHON bench/serve.py [MODEL] [--rounds 7] [--binary target/release/mlx-bun] [-- FLAGS]
PYTHON is one with mlx-lm 0.32.2, such as .native/oracle/bin/python (scripts/oracle/setup.py makes it).
MODEL is a folder with safetensors; without one, .native/starter/bf16 (scripts/oracle/starter.py makes it). FLAGS go to
`mlx-bun serve`. A third server, `mlx-bun serve --batch 1`, shows what batching gains over a queue.
"""

import argparse
import http.client
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GREEDY = ["--temp", "0", "--top-p", "0", "--top-k", "0", "--max-tokens", "512"]
TOKENS = 64


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    def __init__(self, command):
        self.port = free_port()
        self.clock = time.perf_counter()
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while True:
            try:
                connection = self.connect()
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    break
            except (OSError, http.client.HTTPException):
                if self.process.poll() is not None:
                    raise RuntimeError(f"{command[0]} did not start") from None
            time.sleep(0.002)
        self.ready = time.perf_counter() - self.clock

    def connect(self):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)

    def stream(self, prompt, tokens):
        """Times of the pieces of text, from the request on."""
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "stream": True, "temperature": 0}
        # The same length on both sides: no end of sequence.
        body["logit_bias"] = {str(token): -1000 for token in self.stops}
        connection = self.connect()
        clock = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        times = []
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                if choices and choices[0].get("delta", {}).get("content"):
                    times.append(time.perf_counter() - clock)
        connection.close()
        return times

    stops = [0, 1, 2]

    def aggregate(self, prompts, tokens):
        threads = [threading.Thread(target=self.stream, args=(prompt, tokens)) for prompt in prompts]
        clock = time.perf_counter()
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        return len(prompts) * tokens / (time.perf_counter() - clock)

    def stop(self):
        self.process.kill()
        self.process.wait()


def show(name, unit, ours, theirs, against):
    ratio = statistics.median(a / b for a, b in zip(ours, theirs))
    a, b = statistics.median(ours), statistics.median(theirs)
    print(f"{name}: mlx-bun {a:.4g} {unit}, {against} {b:.4g} {unit}, median ratio {ratio:.2f} of {len(ours)} pairs", flush=True)


def main():
    arguments = sys.argv[1:]
    flags = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default=str(ROOT / ".native" / "starter" / "bf16"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--binary", default=str(ROOT / "target" / "release" / "mlx-bun"))
    args = parser.parse_args(arguments[: len(arguments) - len(flags) - ("--" in arguments)])
    ours_command = [args.binary, "serve", "--model", args.model, *GREEDY, "--prompt-cache", "0", *flags]
    theirs_command = [sys.executable, "-m", "mlx_lm", "server", "--model", args.model, "--prompt-cache-size", "1"]

    starts = []
    for _ in range(args.rounds):
        pair = []
        for command in (ours_command, theirs_command):
            server = Server(command)
            pair.append(server.ready)
            server.stop()
        starts.append(pair)
    show("start to ready", "s", *zip(*starts), "mlx_lm.server")

    ours, theirs, queue = Server(ours_command), Server(theirs_command), Server([*ours_command, "--batch", "1"])
    try:
        for server in (ours, theirs, queue):
            server.stream("Hello", 8)
        first, between, four, eight, queued = [], [], [], [], []
        for round in range(args.rounds):
            prompt = f"Question {round}: what is the capital of France?"
            times = [server.stream(prompt, TOKENS) for server in (ours, theirs)]
            first.append([t[0] for t in times])
            between.append([(t[-1] - t[0]) / (len(t) - 1) * 1e3 for t in times])
            prompts = [f"Question {round}.{index}: tell me about the number {index}." for index in range(8)]
            four.append([server.aggregate(prompts[:4], TOKENS) for server in (ours, theirs)])
            rates = [server.aggregate(prompts, TOKENS) for server in (ours, theirs, queue)]
            eight.append(rates[:2])
            queued.append([rates[0], rates[2]])
        show("first text of a short prompt", "s", *zip(*first), "mlx_lm.server")
        show("between texts, alone", "ms", *zip(*between), "mlx_lm.server")
        show("tokens a second, 4 at once", "tok/s", *zip(*four), "mlx_lm.server")
        show("tokens a second, 8 at once", "tok/s", *zip(*eight), "mlx_lm.server")
        show("tokens a second, 8 at once", "tok/s", *zip(*queued), "--batch 1")
        overhead = []
        for round in range(args.rounds):
            prompt = f"Overhead {round}: what is the capital of France?"
            times = ours.stream(prompt, TOKENS)
            served = (times[-1] - times[0]) / (len(times) - 1)
            command = [args.binary, "generate", "-q", "--json", "-m", str(TOKENS), "--model", args.model, prompt]
            command += [f"--logit-bias={token}=-1000" for token in Server.stops] + flags
            stats = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["stats"]
            overhead.append([served * 1e3, 1e3 / stats["generation_tps"]])
        show("a token served and a token generated", "ms", *zip(*overhead), "mlx-bun generate")
    finally:
        for server in (ours, theirs, queue):
            server.stop()


if __name__ == "__main__":
    main()
