"""A step of training: mlx-bun against mlx_lm.lora, in turn; seconds a step and peak memory, medians and their ratios,
and the largest relative difference of two losses of the same step.

usage: PYTHON bench/train.py MLX_BUN MODEL [--batch 1,4] [--words 24] [--steps 3] [--rounds 3] [--learning-rate 1e-5] [--arguments="--seg 8"]
PYTHON is one with mlx-lm 0.32.2, such as .native/oracle/bin/python (scripts/oracle/setup.py makes it). MLX_BUN is a
release build. Both learn the same rows with LoRA of rank 8 on all layers; each runs as a process of its own, whose peak
resident memory counts. The time of a step is that of the last report, so that loading and the first step are left out.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

NAMES = "red blue seven is the cat of two and go one why house tree walks green under over more less".split()


def rows(folder, count, words):
    with open(folder / "train.jsonl", "w") as file:
        for row in range(count):
            text = " ".join(NAMES[(row * 7 + place * place * 3 + place) % len(NAMES)] for place in range(words))
            file.write(json.dumps({"text": text}) + "\n")


CHILD = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""

ORACLE = """
import json, sys, types
import mlx.core as mx, numpy as np
from pathlib import Path
from mlx_lm import lora
from mlx_lm.tuner.callbacks import TrainingCallback
from mlx_lm.tuner.datasets import load_local_dataset
from mlx_lm.utils import load
options = json.loads(sys.argv[1])
class Recorder(TrainingCallback):
    def on_train_loss_report(self, info):
        open(options["report"], "a").write(json.dumps({"speed": info["iterations_per_second"], "loss": info["train_loss"]}) + "\\n")
args = types.SimpleNamespace(**{**lora.CONFIG_DEFAULTS, **options})
np.random.seed(0)
mx.set_default_device(mx.cpu)
if not options["compile"]: mx.disable_compile()
model, tokenizer = load(args.model)
train, valid, _ = load_local_dataset(Path(args.data), tokenizer, args)
lora.train_model(args, model, train, valid, Recorder())
"""


def measured(command):
    output = subprocess.run([sys.executable, "-c", CHILD, *command], capture_output=True, text=True, check=True)
    return int(output.stdout) * 1024 / 1e9


def ours(options, folder):
    adapter = folder / "ours"
    command = [options.mlx_bun, "train", "--model", options.model, "--data", str(folder), "--adapter-path", str(adapter)]
    command += ["--batch-size", str(options.size), "--iters", str(options.steps), "--steps-per-report", "1", "--num-layers", "-1"]
    command += ["--learning-rate", str(options.learning_rate)]
    peak = measured(command + options.arguments.split())
    events = [json.loads(line) for line in (adapter / "metrics.jsonl").read_text().splitlines()]
    reports = [event for event in events if event.get("kind") == "train"]
    return 1 / reports[-1]["iterations_per_second"], peak, [report["loss"] for report in reports]


def theirs(options, folder):
    report = folder / "report.jsonl"
    report.unlink(missing_ok=True)
    settings = {"model": options.model, "data": str(folder), "adapter_path": str(folder / "theirs"), "batch_size": options.size}
    settings |= {"iters": options.steps, "steps_per_report": 1, "num_layers": -1, "report": str(report), "compile": options.compile}
    settings["learning_rate"] = options.learning_rate
    peak = measured([sys.executable, "-c", ORACLE, json.dumps(settings)])
    reports = [json.loads(line) for line in report.read_text().splitlines()]
    return 1 / reports[-1]["speed"], peak, [report["loss"] for report in reports]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mlx_bun")
    parser.add_argument("model")
    parser.add_argument("--batch", default="1,4")
    parser.add_argument("--words", type=int, default=24)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--arguments", default="", help="more flags for mlx-bun")
    parser.add_argument("--compile", action="store_true", help="let mlx-lm compile its step (minutes with g++)")
    options = parser.parse_args()
    for options.size in map(int, options.batch.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            rows(folder, options.size * options.steps, options.words)
            results = {ours: [], theirs: []}
            for _ in range(options.rounds):
                for side in (ours, theirs):
                    results[side].append(side(options, folder))
            a, b = ([statistics.median(run[place] for run in results[side]) for place in (0, 1)] for side in (ours, theirs))
            losses = zip(results[ours][-1][2], results[theirs][-1][2], strict=True)
            apart = max(abs(mine - other) / abs(other) for mine, other in losses)
            times = f"ours {a[0]:.3f} s, {a[1]:.2f} GB; mlx-lm {b[0]:.3f} s, {b[1]:.2f} GB; ratios {a[0] / b[0]:.3f}, {a[1] / b[1]:.3f}"
            print(f"batch {options.size}: {times}; losses differ by {apart:.1e}", flush=True)


if __name__ == "__main__":
    main()
