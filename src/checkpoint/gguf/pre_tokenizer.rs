//! How byte-level BPE tokenizers cut text into words, by the name in `tokenizer.ggml.pre`.
//!
//! llama.cpp (`llm_tokenizer_bpe` in src/llama-vocab.cpp) knows each tokenizer by a name and a list of
//! regular expressions, each applied to the pieces the one before left. tokenizer.json says the same with a
//! sequence of `Split`s. Expressions are those of the tokenizers' own tokenizer.json where llama.cpp had to
//! adapt them. Names of tokenizers that no supported architecture uses are left out.

use serde_json::{Value, json};

/// One cut.
#[derive(Clone, Copy, Debug)]
enum Cut {
    /// Matches become pieces of their own.
    Regex(&'static str),
    /// Each digit becomes a piece.
    Digits,
}

/// A kind of byte-level BPE tokenizer.
#[derive(Debug)]
pub struct PreTokenizer {
    names: &'static [&'static str],
    cuts: &'static [Cut],
    /// A word that is a token as a whole is not built from merges.
    pub ignore_merges: bool,
    /// Whether a BOS token is added if the metadata does not say.
    pub adds_bos: bool,
    /// Text is put in Unicode's composed form first.
    composed: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const MINICPM5: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const SEED_CODER: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
const DEEPSEEK_CJK: &str = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+";
const DEEPSEEK3_CJK: &str = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+";
/// Letters with case, spelled out as of some older Unicode version.
const DEEPSEEK_WORDS: &str = concat!(
    r"\s?[A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}",
    r"\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}",
    r"\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}",
    r"\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}",
    r"\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}",
    r"\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}",
    r"\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}",
    r"\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}",
    r"\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}",
    r"\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}",
    r"\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}",
    r"\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}",
    r"\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}]+",
);
const DEEPSEEK_PUNCTUATION: &str =
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+";
const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";

const PLAIN: PreTokenizer =
    PreTokenizer { names: &[], cuts: &[], ignore_merges: false, adds_bos: false, composed: false };

const KINDS: &[PreTokenizer] = &[
    PreTokenizer {
        names: &["default"],
        cuts: &[
            Cut::Regex(r"[\p{P}\$\+<=>\^~\|]+"),
            Cut::Regex(GPT2),
            Cut::Regex(r"\p{N}+"),
            Cut::Regex("[0-9][0-9][0-9]"),
        ],
        ..PLAIN
    },
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"],
        cuts: &[Cut::Regex(LLAMA3)],
        ignore_merges: true,
        adds_bos: true,
        ..PLAIN
    },
    PreTokenizer {
        names: &["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"],
        cuts: &[Cut::Regex(LLAMA3)],
        ..PLAIN
    },
    PreTokenizer { names: &["qwen2"], cuts: &[Cut::Regex(QWEN2)], composed: true, ..PLAIN },
    PreTokenizer {
        names: &[
            "deepseek-r1-qwen",
            "kormo",
            "f2llmv2",
            "megrez",
            "stablelm2",
            "hunyuan",
            "solar-open",
            "grok-2",
        ],
        cuts: &[Cut::Regex(QWEN2)],
        ..PLAIN
    },
    PreTokenizer {
        names: &[
            "gpt-2",
            "phi-2",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "exaone4",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
        ],
        cuts: &[Cut::Regex(GPT2)],
        ..PLAIN
    },
    PreTokenizer {
        names: &["smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"],
        cuts: &[Cut::Digits, Cut::Regex(GPT2)],
        ..PLAIN
    },
    PreTokenizer { names: &["command-r"], cuts: &[Cut::Digits, Cut::Regex(GPT2)], composed: true, ..PLAIN },
    PreTokenizer {
        names: &["tekken"],
        cuts: &[Cut::Regex(TEKKEN)],
        ignore_merges: true,
        adds_bos: true,
        ..PLAIN
    },
    PreTokenizer { names: &["gpt-4o", "llama4", "kanana2"], cuts: &[Cut::Regex(GPT4O)], ..PLAIN },
    PreTokenizer {
        names: &["minicpm5"],
        cuts: &[Cut::Regex(r"\p{N}{1,3}"), Cut::Regex(MINICPM5)],
        ignore_merges: true,
        ..PLAIN
    },
    PreTokenizer { names: &["seed-coder"], cuts: &[Cut::Regex(SEED_CODER)], ..PLAIN },
    PreTokenizer {
        names: &["deepseek-llm"],
        cuts: &[
            Cut::Regex(r"[\r\n]"),
            Cut::Regex(DEEPSEEK_WORDS),
            Cut::Regex(DEEPSEEK_PUNCTUATION),
            Cut::Regex(r"\s+$"),
            Cut::Regex(DEEPSEEK_CJK),
            Cut::Regex(r"\p{N}+"),
        ],
        ..PLAIN
    },
    PreTokenizer {
        names: &["deepseek-coder"],
        cuts: &[
            Cut::Regex(r"[\r\n]"),
            Cut::Regex(r"\s?\p{L}+"),
            Cut::Regex(r"\s?\p{P}+"),
            Cut::Regex(DEEPSEEK_CJK),
            Cut::Digits,
        ],
        ..PLAIN
    },
    PreTokenizer {
        names: &["deepseek-v3", "hunyuan-dense", "joyai-llm"],
        cuts: &[Cut::Regex(r"\p{N}{1,3}"), Cut::Regex(DEEPSEEK3_CJK), Cut::Regex(DEEPSEEK3)],
        ..PLAIN
    },
    PreTokenizer {
        names: &["falcon"],
        cuts: &[Cut::Regex(r"[\p{P}\$\+<=>\^~\|`]+"), Cut::Regex(GPT2), Cut::Regex("[0-9][0-9][0-9]")],
        ..PLAIN
    },
    PreTokenizer { names: &["poro-chat", "bloom", "gpt3-finnish"], cuts: &[Cut::Regex(BLOOM)], ..PLAIN },
    PreTokenizer { names: &["viking"], cuts: &[Cut::Regex(BLOOM), Cut::Digits], ..PLAIN },
];

impl PreTokenizer {
    /// The kind that `tokenizer.ggml.pre` names.
    pub fn named(name: &str) -> Option<&'static Self> {
        KINDS.iter().find(|kind| kind.names.contains(&name))
    }

    /// tokenizer.json's `normalizer`.
    pub fn normalizer(&self) -> Value {
        if self.composed { json!({"type": "NFC"}) } else { Value::Null }
    }

    /// tokenizer.json's `pre_tokenizer`.
    pub fn json(&self) -> Value {
        let cut = |cut: &Cut| match cut {
            Cut::Regex(regex) => {
                json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false})
            }
            Cut::Digits => json!({"type": "Digits", "individual_digits": true}),
        };
        let mut steps: Vec<Value> = self.cuts.iter().map(cut).collect();
        steps.push(byte_level());
        json!({"type": "Sequence", "pretokenizers": steps})
    }
}

/// The name of the kind that a tokenizer.json describes with these fields, `None` when there is none.
pub fn name_of(normalizer: &Value, pre_tokenizer: &Value, ignore_merges: bool) -> Option<&'static str> {
    let composed = match normalizer["type"].as_str() {
        None => false,
        Some("NFC") => true,
        Some("Sequence") if normalizer["normalizers"].as_array().is_some_and(Vec::is_empty) => false,
        Some(_) => return None,
    };
    let mut cuts = Vec::new();
    if !collect_cuts(pre_tokenizer, &mut cuts) || cuts.pop() != Some(Found::Bytes) {
        return None;
    }
    let same = |kind: &&PreTokenizer| {
        let wanted = kind.cuts.iter().map(|cut| match cut {
            Cut::Regex(regex) => Found::Regex(regex),
            Cut::Digits => Found::Digits,
        });
        kind.composed == composed && kind.ignore_merges == ignore_merges && wanted.eq(cuts.iter().copied())
    };
    KINDS.iter().find(same).and_then(|kind| kind.names.first().copied())
}

/// A step of a tokenizer.json's pre-tokenizer.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Found<'v> {
    Regex(&'v str),
    Digits,
    Bytes,
}

/// The steps of a pre-tokenizer in their order; whether all are known.
fn collect_cuts<'v>(step: &'v Value, cuts: &mut Vec<Found<'v>>) -> bool {
    match step["type"].as_str() {
        Some("Sequence") => match step["pretokenizers"].as_array() {
            Some(steps) => steps.iter().all(|step| collect_cuts(step, cuts)),
            None => false,
        },
        Some("Digits") if step["individual_digits"] == true => {
            cuts.push(Found::Digits);
            true
        }
        // Matches become pieces of their own, however that is put.
        Some("Split")
            if matches!(
                (step["behavior"].as_str(), step["invert"].as_bool().unwrap_or(false)),
                (Some("Isolated"), false) | (Some("Removed"), true)
            ) =>
        {
            let regex = step["pattern"]["Regex"].as_str();
            cuts.extend(regex.map(Found::Regex));
            regex.is_some()
        }
        Some("ByteLevel") if step["add_prefix_space"] != true => {
            if step["use_regex"].as_bool().unwrap_or(true) {
                cuts.push(Found::Regex(GPT2));
            }
            cuts.push(Found::Bytes);
            true
        }
        _ => false,
    }
}

/// Bytes as printable characters and back; the words are cut already.
pub fn byte_level() -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false})
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::{
        OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _, PreTokenizerWrapper,
    };

    /// Words of sample texts, cut by Python's `regex` with llama.cpp's expressions.
    const EXPECTED: &str = include_str!("../../../fixtures/gguf/pre_tokenizers.json");

    #[test]
    fn kinds_are_known_by_what_they_do() {
        for kind in KINDS {
            let found = name_of(&kind.normalizer(), &kind.json(), kind.ignore_merges).unwrap();
            let found = PreTokenizer::named(found).unwrap();
            assert_eq!(found.json(), kind.json(), "{:?}", kind.names);
        }
        let smollm = json!({"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": true},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        ]});
        assert_eq!(name_of(&Value::Null, &smollm, false), Some("smollm"));
        let gpt2 = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true});
        assert_eq!(name_of(&Value::Null, &gpt2, false), Some("gpt-2"));
        assert_eq!(name_of(&json!({"type": "Lowercase"}), &gpt2, false), None);
        assert_eq!(name_of(&Value::Null, &json!({"type": "Whitespace"}), false), None);
    }

    #[test]
    fn cuts_words_as_llama_cpp() {
        let expected: Value = serde_json::from_str(EXPECTED).unwrap();
        let texts: Vec<&str> =
            expected["texts"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
        let kinds = expected["words"].as_object().unwrap();
        for kind in KINDS {
            let name = kind.names[0];
            let words = kinds.get(name).unwrap_or_else(|| panic!("no expectation for {name}"));
            let mut steps = kind.json();
            steps["pretokenizers"].as_array_mut().unwrap().pop(); // bytes would hide the words
            let pre_tokenizer: PreTokenizerWrapper = serde_json::from_value(steps).unwrap();
            for (text, words) in texts.iter().zip(words.as_array().unwrap()) {
                let mut cut = PreTokenizedString::from(*text);
                pre_tokenizer.pre_tokenize(&mut cut).unwrap();
                let found: Vec<_> = cut
                    .get_splits(OffsetReferential::Original, OffsetType::Byte)
                    .into_iter()
                    .map(|(word, _, _)| word.to_owned())
                    .collect();
                assert_eq!(json!(found), *words, "{name}: {text:?}");
            }
        }
    }
}
