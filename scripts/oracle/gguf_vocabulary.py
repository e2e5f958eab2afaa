"""Small tokenizers for GGUF files, with reference ids from SentencePiece and `tokenizers`."""

import json
import tempfile
from pathlib import Path

import gguf
import regex
import sentencepiece
from gguf import GGMLQuantizationType as T
from gguf_file import File, sizes
from gguf_texts import CHATML_TEXTS, TEXTS
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = """
The quick brown fox jumps over the lazy dog, while the old man watches from his porch and smiles.
A language model reads text, splits it into tokens, and predicts the next token again and again.
In 2024 there were 1234567 of them; by 2031 it will be 98765, or so they say.
def main(argument): return [value for value in argument if value is not None]
Größe, naïve, façade, coöperate, Ελληνικά, русский язык, 日本語のテキスト, 한국어, العربية, हिन्दी.
The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is Madrid.
    for index in range(10):
        print(index, end="")
""" * 3

QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level_reference(tokens, merges, special, pre, normalizer=None):
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


class Vocabulary:
    """Small tokenizers, trained once, written into files and asked for reference ids."""

    def __init__(self):
        self.references = {}
        trained = Tokenizer(models.BPE())
        trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        trained.train_from_iterator(
            CORPUS.splitlines(),
            trainers.BpeTrainer(
                vocab_size=320,
                special_tokens=self.special,
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            ),
        )
        model = json.loads(trained.to_str())["model"]
        self.tokens = sorted(model["vocab"], key=model["vocab"].get)
        self.merges = [tuple(pair) for pair in model["merges"]]

    def tiny(self, w):
        """A few tokens for a file whose tokenizer is of no interest."""
        tokens = ["<|endoftext|>", "a", "b", "ab"]
        w.add_tokenizer_model("gpt2")
        w.add_tokenizer_pre("gpt-2")
        w.add_token_list(tokens)
        w.add_token_types([3, 1, 1, 1])
        w.add_token_merges(["a b"])
        w.add_eos_token_id(0)
        return len(tokens)

    def byte_level(self, w):
        kinds = [gguf.TokenType.CONTROL if t in self.special else gguf.TokenType.NORMAL for t in self.tokens]
        w.add_tokenizer_model("gpt2")
        w.add_tokenizer_pre("qwen2")
        w.add_token_list(self.tokens)
        w.add_token_types(kinds)
        w.add_token_merges([" ".join(pair) for pair in self.merges])
        w.add_bos_token_id(0)
        w.add_eos_token_id(2)
        w.add_add_bos_token(False)
        w.add_chat_template("{{ messages[0].content }}")
        words = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])  # fmt: skip
        reference = byte_level_reference(self.tokens, self.merges, self.special, words, normalizers.NFC())
        self.references["qwen2"] = [reference.encode(t, add_special_tokens=False).ids for t in TEXTS + CHATML_TEXTS]
        return len(self.tokens)

    def train_pieces(self, **options):
        with tempfile.TemporaryDirectory() as folder:
            corpus = Path(folder) / "corpus"
            corpus.write_text(CORPUS)
            sentencepiece.SentencePieceTrainer.train(
                input=str(corpus), model_prefix=str(Path(folder) / "m"), byte_fallback=True, minloglevel=2,
                normalization_rule_name="identity", remove_extra_whitespaces=False, hard_vocab_limit=False,
                character_coverage=0.98, **options,
            )  # fmt: skip
            proto = sentencepiece_model_pb2.ModelProto()
            proto.ParseFromString((Path(folder) / "m.model").read_bytes())
        return proto

    def write_pieces(self, w, proto, user_defined_score=None):
        kinds = [piece.type for piece in proto.pieces]
        tokens, scores = [], []
        for piece in proto.pieces:
            text, score = piece.piece, piece.score
            if piece.type == gguf.TokenType.USER_DEFINED and user_defined_score is not None:
                text, score = text.replace("\u2581", " "), user_defined_score  # as llama.cpp's converter
            tokens.append(text)
            scores.append(score)
        w.add_tokenizer_pre("default")
        w.add_token_list(tokens)
        w.add_token_scores(scores)
        w.add_token_types(kinds)
        return tokens

    def piece_ids(self, proto, texts, special):
        """Ids of each text; control tokens are cut out first, as llama.cpp does, and each rest is a text."""
        processor = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
        ids = {piece.piece: i for i, piece in enumerate(proto.pieces)}
        cut = regex.compile("(" + "|".join(map(regex.escape, special)) + ")")
        return [
            [i for part in cut.split(text) if part for i in ([ids[part]] if part in special else processor.encode(part))]
            for text in texts
        ]

    def sentence_piece(self, w):
        proto = self.train_pieces(model_type="bpe", vocab_size=440, add_dummy_prefix=True)
        w.add_tokenizer_model("llama")
        tokens = self.write_pieces(w, proto)
        w.add_bos_token_id(1)
        w.add_eos_token_id(2)
        w.add_unk_token_id(0)
        texts = TEXTS + ["<s>a</s> b<s>", "[INST] Hi [/INST]"]
        self.references["llama"] = self.piece_ids(proto, texts, ["<s>", "</s>", "<unk>"])
        return len(tokens)

    def gemma(self, w):
        user_defined = ["\n\n", "\n\n\n", "\u2581\u2581", "\u2581\u2581\u2581", "<b>", "</b>"]
        proto = self.train_pieces(
            model_type="bpe", vocab_size=440, add_dummy_prefix=False, split_digits=True,
            user_defined_symbols=user_defined, control_symbols=["<start_of_turn>", "<end_of_turn>"],
            pad_id=0, eos_id=1, bos_id=2, unk_id=3, pad_piece="<pad>", eos_piece="<eos>", bos_piece="<bos>",
        )  # fmt: skip
        w.add_tokenizer_model("llama")
        tokens = self.write_pieces(w, proto, user_defined_score=-1000.0)
        w.add_bos_token_id(2)
        w.add_eos_token_id(1)
        w.add_unk_token_id(3)
        w.add_pad_token_id(0)
        w.add_add_bos_token(True)
        w.add_add_space_prefix(False)
        special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
        texts = TEXTS + ["<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"]
        self.references["gemma3"] = self.piece_ids(proto, texts, special)
        return len(tokens)

    def unigram(self):
        """A file without tensors but the embedding: only its tokenizer is of interest."""
        proto = self.train_pieces(model_type="unigram", vocab_size=430, add_dummy_prefix=True)
        file = File("unigram", "llama")
        config = sizes(file, hidden=32, layers=1, ffn=32, heads=1, kv=1, head=32, theta=10000.0)
        w = file.writer
        w.add_tokenizer_model("t5")
        tokens = self.write_pieces(w, proto)
        w.add_bos_token_id(1)
        w.add_eos_token_id(2)
        w.add_unk_token_id(0)
        w.add_add_space_prefix(True)
        w.add_add_bos_token(False)
        w.add_add_eos_token(True)
        file.tensor("token_embd.weight", "model.embed_tokens.weight", (len(tokens), 32), T.Q4_0)
        texts = [text for text in TEXTS if text.strip() and not text.startswith(" ")]
        self.references["unigram"] = self.piece_ids(proto, texts, ["<s>", "</s>", "<unk>"])
        self.unigram_texts = texts
        return file.finish({**config, "vocab_size": len(tokens)})
