"""Decode step of a checkpoint: mlx-bun (mlx-lm's arithmetic) against mlx-lm, in turn; medians and their ratio.

usage: PYTHON bench/decode_step.py [CHECKPOINT] [STEPS] [ROUNDS]
PYTHON is one with mlx-lm 0.32.2, such as .native/oracle/bin/python (scripts/oracle/setup.py makes it).
Without CHECKPOINT a random 4-layer Llama is written to a temporary folder.
`step` is the wall time a token in the pipelined loop, `host` the time to build a step's graph.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

ROOT = Path(__file__).resolve().parent.parent
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
}
PROMPT = [11, 48, 85, 122, 159, 196, 233, 270]


def write_checkpoint(folder):
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(CONFIG))


def decode(model, steps):
    generator = generate_step(mx.array(PROMPT), model, max_tokens=steps + 1)
    next(generator)
    clock = time.perf_counter()
    for _ in generator:
        pass
    return (time.perf_counter() - clock) / steps * 1e3


def graph(model, steps):
    cache, token, host = make_prompt_cache(model), mx.array([[5]]), 0.0
    for _ in range(steps):
        clock = time.perf_counter()
        logits = model(token, cache=cache)
        host += time.perf_counter() - clock
        mx.eval(logits, [layer.state for layer in cache])
    return host / steps * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", type=Path)
    parser.add_argument("steps", nargs="?", type=int, default=200)
    parser.add_argument("rounds", nargs="?", type=int, default=9)
    arguments = parser.parse_args()
    steps, rounds = arguments.steps, arguments.rounds
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.checkpoint or Path(temporary)
        if not arguments.checkpoint:
            write_checkpoint(folder)
        # with the command, so that both share one build of the engine
        build = ["cargo", "build", "--release", "--quiet", "--package", "mlx-bun", "--package", "mlx-bun-bench"]
        subprocess.run(build, cwd=ROOT, check=True)
        target = json.loads(
            subprocess.run(
                ["cargo", "metadata", "--format-version", "1", "--no-deps"], cwd=ROOT, check=True, capture_output=True
            ).stdout
        )["target_directory"]
        ours_command = [str(Path(target) / "release" / "decode_step"), str(folder), str(steps), "1"]
        model, _ = load_model(folder)
        decode(model, steps)
        ours, theirs = [], []
        for _ in range(rounds):
            line = subprocess.run(ours_command, check=True, capture_output=True, text=True).stdout
            ours.append(json.loads(line))
            theirs.append({"step_ms": decode(model, steps), "host_ms": graph(model, steps)})
        for figure in ("step_ms", "host_ms"):
            a = statistics.median(run[figure] for run in ours)
            b = statistics.median(run[figure] for run in theirs)
            ratio = statistics.median(x[figure] / y[figure] for x, y in zip(ours, theirs))
            print(f"{figure}: mlx-bun {a:.3f}, mlx-lm {b:.3f}, median ratio {ratio:.2f} of {rounds} pairs")


if __name__ == "__main__":
    main()
