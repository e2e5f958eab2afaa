"""Prompt and generation speed of the command against mlx-lm on the same checkpoint, in turn; medians and their ratios.

usage: PYTHON bench/generate.py MODEL [--tokens 32] [--rounds 3] [--binary mlx-bun] [-- FLAGS]
PYTHON is one with mlx-lm 0.32.2, such as .native/oracle/bin/python (scripts/oracle/setup.py makes it).
MODEL is a folder in mlx-lm's layout, such as `mlx-bun convert -q` writes. FLAGS go to `mlx-bun generate`.
Both generate greedily after the same text, and report their speeds themselves.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys

PROMPT = "The old town by the river was quiet, and the people in it"


def figures(command):
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        sys.exit(run.stderr)
    return run.stdout


def ours(binary, model, tokens, flags):
    command = [binary, "generate", "--model", model, "--raw", "--json", "--temp", "0", "-m", str(tokens), *flags, PROMPT]
    stats = json.loads(figures(command))["stats"]
    return stats["prompt_tps"], stats["generation_tps"]


def theirs(model, tokens):
    command = [sys.executable, "-m", "mlx_lm", "generate", "--model", model, "--ignore-chat-template", "--temp", "0"]
    printed = figures([*command, "-m", str(tokens), "-p", PROMPT])
    return tuple(float(speed) for speed in re.findall(r"([0-9.]+) tokens-per-sec", printed))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--binary", default="mlx-bun")
    arguments, flags = parser.parse_known_args()
    flags = [flag for flag in flags if flag != "--"]
    rows = []
    for _ in range(arguments.rounds):
        pair = theirs(arguments.model, arguments.tokens), ours(arguments.binary, arguments.model, arguments.tokens, flags)
        rows.append(pair)
        names = ("mlx_lm_prompt", "mlx_lm_generation", "prompt", "generation")
        print(json.dumps({name: round(value, 2) for name, value in zip(names, pair[0] + pair[1])}), flush=True)
    ratios = [statistics.median(own[index] / other[index] for other, own in rows) for index in (0, 1)]
    print(json.dumps({"prompt_ratio": round(ratios[0], 1), "generation_ratio": round(ratios[1], 1)}))


if __name__ == "__main__":
    main()
