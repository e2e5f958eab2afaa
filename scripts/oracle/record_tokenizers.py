#!/usr/bin/env python3
"""Makes the small tokenizers in fixtures/tokenizers and records what transformers does with them.

Run it with the oracle environment (mlx-lm 0.32.2 and its transformers): it writes
  fixtures/tokenizers/{byte-level,byte-fallback,metaspace}/{tokenizer.json,tokenizer_config.json}
  fixtures/tokenizers/oracle.json   cases: a fixture, changes to its files, ids of the texts, texts of ids
A second run writes the same bytes.
"""

import json
import math
import os
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_OFFLINE"] = "1"

import tokenizers
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[2] / "fixtures" / "tokenizers"

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "What is the capital of France? The capital of France is Paris.",
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "你好，世界！今天天气很好。",
    "def main():\n    print(\"hello, world\")\n\n    return 0\n",
    "user assistant system: You are a helpful assistant.",
    "1, 2, 3 and 10, 20, 30 are numbers; it isn't that they're many.",
] * 4

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

TEXTS = [
    "",
    "Hello, world!",
    " leading and trailing ",
    "   three   spaces\n\n\nand\ttabs \n",
    "\n\n1. first\n2.  second 2024",
    "Příliš žluťoučký kůň",
    "你好，世界",
    "emoji 👩‍👩‍👧 🙂🇨🇿 end",
    "a ,b . c ? it 's n't",
    "<s>[INST] hi [/INST] ok</s>",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>",
    "x<|bos|> y <|im_end|>  z",
    "e\u0301 vs \u00e9, ﬁ",
    "<unk> <pad> ▁ Ġ <0x41>",
]


def write(directory, tokenizer, config, edit=None):
    directory.mkdir(parents=True, exist_ok=True)
    content = json.loads(tokenizer.to_str())
    if edit:
        edit(content)
    (directory / "tokenizer.json").write_text(
        json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n"
    )
    (directory / "tokenizer_config.json").write_text(
        json.dumps(config, ensure_ascii=False, indent=2) + "\n"
    )


def byte_level():
    """Qwen's layout: exactly 320 tokens, ChatML, the reasoning markers as added tokens."""
    specials = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        show_progress=False,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    assert tokenizer.get_vocab_size() == 320
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.token_to_id("<|bos|>"))]
    )

    def edit(content):
        for token in content["added_tokens"]:
            if "think" in token["content"]:
                token["special"] = False

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHATML,
    }
    write(ROOT / "byte-level", tokenizer, config, edit)


def words():
    """How often each word with its sentencepiece space occurs in the corpus."""
    return Counter("▁" + word for line in CORPUS for word in line.split())


def learn_merges(count):
    """Byte-pair merges of the corpus. The library's trainer breaks ties by chance."""
    spelled = {word: list(word) for word in words()}
    merges = []
    for _ in range(count):
        pairs = Counter()
        for word, occurrences in words().items():
            for pair in zip(spelled[word], spelled[word][1:]):
                pairs[pair] += occurrences
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for parts in spelled.values():
            for at in range(len(parts) - 2, -1, -1):
                if tuple(parts[at : at + 2]) == best:
                    parts[at : at + 2] = ["".join(best)]
    return merges


def byte_fallback():
    """Llama 2's layout: pieces with the sentencepiece space, bytes for everything else."""
    merges = learn_merges(80)
    letters = sorted({letter for word in words() for letter in word if letter < "\u0100"} | {"▁"})
    letters += sorted({part for merge in merges for part in merge if len(part) == 1} - set(letters))
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += letters + ["".join(merge) for merge in merges]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "add_eos_token": False,
    }
    write(ROOT / "byte-fallback", tokenizer, config)


def metaspace():
    """T5's layout: Unigram with Metaspace."""
    letters = Counter()
    for word, occurrences in words().items():
        letters.update({letter: occurrences for letter in word})
    common = [(word, n) for word, n in words().items() if len(word) > 2 and word.isascii() or len(word) > 4]
    pieces = sorted(letters.items()) + sorted(common)[:70]
    scored = [(piece, round(math.log(n / 1000) - 1 / len(piece), 4)) for piece, n in pieces]
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)] + scored
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=2, byte_fallback=False))
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "normalized": False},
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": True,
    }
    write(ROOT / "metaspace", tokenizer, config)


def cases():
    """Fixture, changes to tokenizer_config.json, other files, model_type of config.json."""
    marker = {
        "content": "<extra>", "lstrip": True, "rstrip": False,
        "normalized": False, "single_word": False, "special": True,
    }
    return [
        ("byte-level", {}, {}, None),
        ("byte-level", {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None}, {}, "qwen3"),
        ("byte-level", {"tokenizer_class": "LlamaTokenizerFast"}, {}, "qwen2"),
        ("byte-level", {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>"}, {}, "llama"),
        ("byte-level", {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, {}, None),
        ("byte-level", {"add_bos_token": False, "add_eos_token": True}, {}, None),
        ("byte-level", {"additional_special_tokens": ["quick", "<new>"], "image_token": "<image>"}, {}, None),
        ("byte-level", {"added_tokens_decoder": {"320": marker}, "eos_token": "<extra>"},
         {"special_tokens_map.json": {"eos_token": "<|endoftext|>"}}, None),
        ("byte-level", {}, {"special_tokens_map.json": {"eos_token": {"content": "<|endoftext|>"}}}, None),
        ("byte-fallback", {}, {}, None),
        ("byte-fallback", {"tokenizer_class": "LlamaTokenizer"}, {}, "llama"),
        ("byte-fallback", {"tokenizer_class": "LlamaTokenizerFast", "legacy": True}, {}, "llama"),
        ("byte-fallback", {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}, {}, None),
        ("byte-fallback", {"tokenizer_class": "LlamaTokenizer"}, {}, "mistral"),
        ("byte-fallback",
         {"tokenizer_class": "GemmaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}, {}, "gemma3_text"),
        ("metaspace", {}, {}, None),
        ("metaspace", {"clean_up_tokenization_spaces": False}, {}, None),
    ]


def record(fixture, changes, files, model_type, generator):
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        for file in (ROOT / fixture).iterdir():
            shutil.copy(file, directory)
        config = json.loads((directory / "tokenizer_config.json").read_text()) | changes
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        for name, content in files.items():
            (directory / name).write_text(json.dumps(content))
        if model_type:
            (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
        tokenizer = AutoTokenizer.from_pretrained(directory)

    def decoded(ids):
        return {
            "ids": ids,
            "text": tokenizer.decode(ids, skip_special_tokens=False),
            "without_specials": tokenizer.decode(ids, skip_special_tokens=True),
        }

    encoded = []
    for text in TEXTS:
        entry = decoded(tokenizer.encode(text, add_special_tokens=True))
        plain = tokenizer.encode(text, add_special_tokens=False)
        encoded.append(entry if plain == entry["ids"] else entry | {"plain_ids": plain})
    # Halves of characters, specials in odd places, ids past the vocabulary.
    lists = [entry["ids"][3:-2] for entry in encoded[5:8]]
    lists += [[generator.randrange(len(tokenizer) + 8) for _ in range(12)] for _ in range(4)]
    return {
        "fixture": fixture,
        "config": changes,
        "files": files,
        "model_type": model_type,
        "bos_id": tokenizer.bos_token_id,
        "eos_id": tokenizer.eos_token_id,
        "pad_id": tokenizer.pad_token_id,
        "unk_id": tokenizer.unk_token_id,
        "vocab_size": len(tokenizer),
        "encode": encoded,
        "decode": [decoded(ids) for ids in lists],
    }


def main():
    byte_level()
    byte_fallback()
    metaspace()
    generator = random.Random(0)
    oracle = {
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "texts": TEXTS,
        "cases": [record(*case, generator) for case in cases()],
    }
    lines = json.dumps(oracle | {"cases": []}, ensure_ascii=False)[:-2]
    body = ",\n".join(json.dumps(case, ensure_ascii=False, separators=(",", ":")) for case in oracle["cases"])
    (ROOT / "oracle.json").write_text(lines + "\n" + body + "\n]}\n")


if __name__ == "__main__":
    main()
