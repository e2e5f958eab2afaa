"""A lesson that shows: 200 rows of a rule, and how many of 50 others are answered by it, before and after.

usage: python3 bench/lesson.py MLX_BUN [MODEL]
MLX_BUN is a release build; without MODEL the starter is taught. The rule turns an order in words into a list:
"3 apples and 5 pears" is answered by "apples=3; pears=5". Training and both examinations are timed; an answer counts
if it is right to the letter. With --pairs the same rows are taught by orpo, with the order in words as the worse
answer, and the margin of the first and the last report is told, too.
"""

import argparse
import json
import random
import subprocess
import tempfile
import time
from pathlib import Path

THINGS = "apples pears plums nuts figs cups pens books lamps chairs".split()


def tasks(count, seed):
    draw = random.Random(seed)
    for _ in range(count):
        first, second = draw.sample(THINGS, 2)
        a, b = draw.randint(1, 30), draw.randint(1, 30)
        yield f"{a} {first} and {b} {second}", f"{first}={a}; {second}={b}"


def examine(program, model, adapter, held_out, folder):
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt, "max_tokens": 20, "temperature": 0}) + "\n" for prompt, _ in held_out))
    command = [program, "-q", "generate", "--prompt-file", str(prompts), *model, *(["--adapter-path", str(adapter)] if adapter else [])]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    replies = [json.loads(line)["text"].strip() for line in output.splitlines()]
    return sum(reply == answer for reply, (_, answer) in zip(replies, held_out)), replies[:2]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mlx_bun")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--iters", default="150")
    parser.add_argument("--batch", default="4")
    parser.add_argument("--lr", default="2e-4")
    options = parser.parse_args()
    model = ["--model", options.model] if options.model else []
    everything = list(dict.fromkeys(tasks(400, 1)))
    train, held_out = everything[:200], everything[200:250]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        data, adapter = folder / "train.jsonl", folder / "adapter"
        row = lambda prompt, answer: {"prompt": prompt, "chosen": answer, "rejected": prompt} if options.pairs else {"prompt": prompt, "completion": answer}
        data.write_text("".join(json.dumps(row(*task)) + "\n" for task in train))
        before, shown = examine(options.mlx_bun, model, None, held_out, folder)
        print(f"before: {before} of {len(held_out)} right, such as {shown}", flush=True)
        command = [options.mlx_bun, "train", *model, "--data", str(data), "--adapter-path", str(adapter), "--iters", options.iters]
        command += ["--lr", options.lr, "--num-layers", "-1", "--max-seq-length", "128"]
        command += ["--method", "orpo", "--batch-size", "1"] if options.pairs else ["--mask-prompt", "--batch-size", options.batch]
        clock = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        seconds = time.perf_counter() - clock
        events = [json.loads(line) for line in (adapter / "metrics.jsonl").read_text().splitlines()]
        reports = [event for event in events if event.get("kind") == "train"]
        margins = f", margin {reports[0]['margin']:.3f} to {reports[-1]['margin']:.3f}" if options.pairs else ""
        print(f"trained: {seconds:.0f} s, loss {reports[0]['loss']:.3f} to {reports[-1]['loss']:.3f}{margins}", flush=True)
        after, shown = examine(options.mlx_bun, model, adapter, held_out, folder)
        print(f"after: {after} of {len(held_out)} right, such as {shown}")


if __name__ == "__main__":
    main()
