#!/usr/bin/env python3
"""What PyPI gguf makes of some numbers: fixtures/gguf/blocks.json, which tests/gguf_export.rs compares with.

usage: gguf_blocks.py        (with the oracle's Python, scripts/oracle/setup.py)
"""

import json

import gguf
import numpy as np

from golden import ROOT


def numbers():
    index = np.arange(32 * 40, dtype=np.uint32)
    noise = (index * np.uint32(2_654_435_761) + np.uint32(12_345)) >> np.uint32(8)
    scale = np.exp2((index // 32 % 10).astype(np.float32) - 6)
    return (noise.astype(np.float32) / np.float32(8_388_608) - np.float32(1)) * scale.astype(np.float32)


def main():
    values = numbers()
    types = gguf.GGMLQuantizationType
    blocks = {kind.name: gguf.quants.quantize(values, kind).tobytes().hex() for kind in (types.F16, types.Q8_0, types.Q4_0, types.Q4_1)}
    target = ROOT / "fixtures" / "gguf" / "blocks.json"
    target.write_text(json.dumps(blocks, indent=0) + "\n")
    print(f"{target.relative_to(ROOT)}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
