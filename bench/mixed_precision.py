"""Perplexity of a model quantized to about the same size in several ways; prints the table of docs/convert.md.

usage: python3 bench/mixed_precision.py MODEL TEXT CALIBRATION [--target 4.5] [--candidates 3,4,5,6,8]
           [--samples 32] [--binary mlx-bun] [--folder DIR]
MODEL is a folder of float32 weights, TEXT what perplexity is measured on, CALIBRATION the text that bits are chosen on (a
part of the corpus that TEXT is not from). Models, and the results of probing, stay in DIR and are used again.
dynamic_quant gets the bits a weight that --target-bpw came to, so that both files have the same size.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path


def run(command):
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(command)}\n{result.stderr}")
    return result


def bits_per_weight(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]
    return index["total_size"] * 8 / index["total_parameters"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("calibration")
    parser.add_argument("--target", default="4.5")
    parser.add_argument("--candidates", default="3,4,5,6,8")
    parser.add_argument("--n-calibration", default="32")
    parser.add_argument("--samples", default="32")
    parser.add_argument("--gradient-samples", default="8")
    parser.add_argument("--binary", default="mlx-bun")
    parser.add_argument("--folder", type=Path, default=Path("mixed-precision"))
    arguments, more = parser.parse_known_args()
    arguments.folder.mkdir(exist_ok=True)
    mixed = arguments.folder / "mixed"

    def convert(name, *flags):
        target = arguments.folder / name
        if not target.exists():
            run([arguments.binary, "convert", arguments.model, "--mlx-path", str(target), *flags])
        return target

    rows = [("unquantized", Path(arguments.model), None)]
    uniform = convert("uniform", "-q", "--dtype", "bfloat16")
    rows.append(("uniform 4 bits, groups of 64", uniform, bits_per_weight(uniform)))
    text = ["--dtype", "bfloat16", "--calibration-mix", arguments.calibration]
    flags = ["--candidate-bits", arguments.candidates, "--n-calibration", arguments.n_calibration]
    convert("mixed", "--target-bpw", arguments.target, *flags, *text, *more)
    size = bits_per_weight(mixed)
    rows.append((f"--target-bpw {arguments.target}", mixed, size))
    flags = ["--target-bpw", f"{size:.4f}", "--num-samples", arguments.gradient_samples]
    # Widths are chosen on float32 weights; the file gets scales of the others' type.
    dynamic = convert("dynamic", "--method", "dynamic_quant", *flags, *text, *more)
    rows.append(("--method dynamic_quant", dynamic, bits_per_weight(dynamic)))

    print("| weights | bits a weight | perplexity | KL divergence, nats a token |\n| --- | --- | --- | --- |")
    for name, folder, bits in rows:
        command = [arguments.binary, "perplexity", "--model", str(folder), "--data-path", arguments.text, "--json"]
        command += ["--num-samples", arguments.samples]
        command += [] if bits is None else ["--baseline", arguments.model]
        result = json.loads(run(command).stdout)
        estimate = lambda key, digits: f"{result[key]['mean']:.{digits}f} ± {result[key]['standard_error']:.{digits}f}"
        cells = [name, "32" if bits is None else f"{bits:.3f}", estimate("perplexity", 3)]
        print("|", " | ".join(cells + ["0" if bits is None else estimate("kl", 4)]), "|", flush=True)


if __name__ == "__main__":
    main()
