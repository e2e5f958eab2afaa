"""Writes a Llama with random weights, for measurements of speed: sizes that no registry carries.

usage: PYTHON bench/random_llama.py OUT --tokenizer FOLDER [--hidden 4096] [--layers 32] [--heads 32] [--kv-heads 8]
       [--intermediate 14336] [--dtype bfloat16] [--seed 0]
PYTHON is one with mlx. FOLDER holds the tokenizer.json and tokenizer_config.json that OUT gets copies of; the vocabulary
has as many rows as they name. One shard a layer, so that memory stays small.
"""

import argparse
import json
import shutil
from pathlib import Path

import mlx.core as mx


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    for name, value in [("hidden", 4096), ("layers", 32), ("heads", 32), ("kv-heads", 8), ("intermediate", 14336)]:
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    dtype = getattr(mx, args.dtype)
    mx.random.seed(args.seed)
    args.out.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(args.tokenizer / name, args.out / name)
    tokenizer = json.loads((args.tokenizer / "tokenizer.json").read_text())
    ids = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])]
    vocabulary, head = max(ids) + 1, args.hidden // args.heads

    def matrix(rows, columns):
        return mx.random.normal((rows, columns), dtype, scale=columns**-0.5)

    def layer(index):
        prefix, queries, keys = f"model.layers.{index}.", args.heads * head, args.kv_heads * head
        shapes = {
            "self_attn.q_proj": (queries, args.hidden),
            "self_attn.k_proj": (keys, args.hidden),
            "self_attn.v_proj": (keys, args.hidden),
            "self_attn.o_proj": (args.hidden, queries),
            "mlp.gate_proj": (args.intermediate, args.hidden),
            "mlp.up_proj": (args.intermediate, args.hidden),
            "mlp.down_proj": (args.hidden, args.intermediate),
        }
        tensors = {f"{prefix}{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = mx.ones(args.hidden, dtype)
        return tensors

    shards, weight_map, size = args.layers + 1, {}, 0
    for index in range(shards):
        last = {
            "model.embed_tokens.weight": matrix(vocabulary, args.hidden),
            "model.norm.weight": mx.ones(args.hidden, dtype),
            "lm_head.weight": matrix(vocabulary, args.hidden),
        }
        tensors = layer(index) if index < args.layers else last
        file = f"model-{index + 1:05}-of-{shards:05}.safetensors"
        mx.save_safetensors(str(args.out / file), tensors, {"format": "mlx"})
        weight_map |= dict.fromkeys(tensors, file)
        size += sum(tensor.nbytes for tensor in tensors.values())
    (args.out / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=1)
    )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": head,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": args.dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (args.out / "config.json").write_text(json.dumps(config, indent=1))
    print(f"{args.out}: {size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
