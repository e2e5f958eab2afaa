"""Texts for tokenizers, and how llama.cpp's pre-tokenizers cut them into words."""

import regex

TEXTS = [
    "Hello, world!",
    "The capital of France is Paris.",
    " leading space",
    "trailing space ",
    "two  spaces   three    four",
    "tabs\tand\nnewlines\r\nand\n\n\nmore",
    "1234567890",
    "3.14159, 2,718 and 1e-5",
    "In 2024, 12 of 345 were 6789.",
    "it's, don't, they'll, we've, I'm, he'd, you're",
    "IT'S, DON'T, THEY'LL, WE'VE",
    "def main(argument):\n    return [x for x in argument if x is not None]\n",
    "for (int i = 0; i < 10; ++i) { sum += a[i]; }",
    '{"key": "value", "list": [1, 2, 3]}',
    "https://example.com/path?query=1&other=%20",
    "user@example.com #hashtag @mention $100 50%",
    "Größe, naïve, façade, coöperate",
    "Gro\u0308ße nai\u0308ve (decomposed)",
    "Ελληνικά και русский язык",
    "日本語のテキストです。中文文本，标点符号！",
    "한국어 텍스트",
    "العربية نص",
    "हिन्दी पाठ",
    "ภาษาไทย",
    "emoji: 😀 👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈",
    "math: ∑ ∫ √2 ≈ 1.414, x² + y² = z²",
    "①②③ ½ ¾ Ⅷ ٣٤٥",
    "CamelCaseIdentifier snake_case_identifier kebab-case SCREAMING_CASE",
    "....!!!???---___***",
    "“curly quotes” ‘single’ — em dash … ellipsis",
    "zero\u200bwidth\u00a0nbsp\u3000ideographic",
    "a",
    " ",
    "\n",
    "\u2581literal metaspace",
    "x" * 50,
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "<b>html</b> &amp; <!-- comment -->",
    "\U0001f9ff\ue000\U00020000 rare",
    "control \x00\x01\x7f characters",
]
CHATML_TEXTS = [
    "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|> spaced <|im_end|>",
    "almost <|im_start |> special <|im_end|><|endoftext|>",
]

# llama.cpp's expressions by the first name of each kind (src/llama-vocab.cpp), where they cut like the originals.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + TAIL
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + TAIL
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
START = r"[^\r\n\p{L}\p{N}]?"
SLASH_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
EXPRESSIONS = {
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "llama-bpe": [LLAMA3],
    "dbrx": [LLAMA3],
    "qwen2": [QWEN2],
    "deepseek-r1-qwen": [QWEN2],
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "command-r": [r"\p{N}", GPT2],
    "tekken": [f"{START}{UPPER}*{LOWER}+|{START}{UPPER}+{LOWER}*|\\p{{N}}{SLASH_TAIL}"],
    "gpt-4o": [
        f"{START}{UPPER}*{LOWER}+{CONTRACTIONS}?|{START}{UPPER}+{LOWER}*{CONTRACTIONS}?|\\p{{N}}{{1,3}}{SLASH_TAIL}"
    ],
    "minicpm5": [r"\p{N}{1,3}", CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+" + TAIL],
    "seed-coder": [
        CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    # The list of cased letters is that of an older Unicode; for the sample texts the property does as well.
    "deepseek-llm": [
        r"[\r\n]", r"\s?[\p{Ll}\p{Lu}\p{Lt}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}+",
    ],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"],
    "poro-chat": [BLOOM],
    "viking": [BLOOM, r"\p{N}"],
}  # fmt: skip


def cut_words(text, expressions):
    """Each expression cuts the pieces of the one before; what it does not match stays a piece."""
    pieces = [text]
    for expression in expressions:
        compiled = regex.compile(expression)
        cut = []
        for piece in pieces:
            at = 0
            for match in compiled.finditer(piece):
                if match.start() == match.end():
                    continue
                if match.start() > at:
                    cut.append(piece[at : match.start()])
                cut.append(match.group())
                at = match.end()
            if at < len(piece):
                cut.append(piece[at:])
        pieces = cut
    return pieces


def pre_tokenizer_words():
    # No private or unassigned characters: Unicode versions differ there.
    texts = [text for text in TEXTS if "\ue000" not in text]
    return {"texts": texts, "words": {n: [cut_words(t, e) for t in texts] for n, e in EXPRESSIONS.items()}}
