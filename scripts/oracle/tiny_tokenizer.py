"""The tokenizer of the tiny checkpoints: byte-level BPE, 320 ids.

0 to 3 are special, 4 to 259 the bytes in order, 260 to 319 merges of common English pairs.
"""

import json

from tokenizers import pre_tokenizers

VOCAB_SIZE = 320
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
BOS, EOS, PAD = 0, 2, 3
# Each pair is made of bytes or of earlier merges, written as byte-level BPE writes them (Ġ is a space).
MERGES = """
Ġ t|Ġ a|h e|i n|r e|o n|Ġt he|e r|Ġ s|a t|Ġ w|Ġ o|e n|Ġ c|i t|i s|a n|o r|e s|Ġ b|e d|Ġ f|in g|Ġ p|o u
Ġa n|a l|a r|Ġt o|Ġ m|Ġo f|Ġ in|Ġ d|Ġ h|Ġan d|i c|a s|l e|Ġt h|i on|o m|l l|en t|Ġ n|Ġ l|s t|Ġ re|v e
Ġ e|r o|l y|Ġb e|Ġ g|Ġ T|c t|Ġ S|i d|o t|Ġ I|u t
""".replace("\n", "|")

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_symbols():
    """The printable character byte-level BPE writes for each byte, in byte order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    assert set(table.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    return [table[byte] for byte in range(256)]


def special_token(index):
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": index, "content": SPECIALS[index], **flags}


def tokenizer_json():
    merges = [pair.split(" ") for pair in MERGES.split("|") if pair]
    tokens = SPECIALS + byte_symbols() + ["".join(pair) for pair in merges]
    assert len(tokens) == len(set(tokens)) == VOCAB_SIZE, (len(tokens), len(set(tokens)))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special_token(index) for index in range(len(SPECIALS))],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def tokenizer_config():
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[BOS],
        "eos_token": SPECIALS[EOS],
        "pad_token": SPECIALS[PAD],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": CHAT_TEMPLATE,
    }


def write(folder):
    """Puts tokenizer.json and tokenizer_config.json into a snapshot."""
    text = json.dumps(tokenizer_json(), ensure_ascii=False, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=2) + "\n")
