//! How few tokens a text can have, told from its length alone: what cannot fit need not be tokenized to know it.

use serde_json::Value;
use tokenizers::models::ModelWrapper;

use super::Tokenizer;
use super::decoder::{byte_of, fallback_byte};

/// The most text that a token of a vocabulary stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextBound {
    /// Bytes.
    longest: usize,
    /// Any number of blanks may hide in a token that takes those around it.
    blanks_are_free: bool,
}

impl TextBound {
    /// No tokenization of `text` has fewer tokens.
    pub fn least_tokens(&self, text: &str) -> usize {
        let bytes = match self.blanks_are_free {
            true => text.split_whitespace().map(str::len).sum(),
            false => text.len(),
        };
        bytes.div_ceil(self.longest)
    }
}

impl Tokenizer {
    /// The bound of this vocabulary; `None` where a token may stand for any amount of text: unknown words that become
    /// one token, normalizers or split rules that drop text.
    pub fn text_bound(&self) -> Option<TextBound> {
        let shrinks = shrinkage(&part(self.vocabulary.get_normalizer()))?;
        let splits = part(self.vocabulary.get_pre_tokenizer());
        if !keeps_text(&splits) {
            return None;
        }
        let ModelWrapper::BPE(model) = self.vocabulary.get_model() else { return None };
        let byte_level = has_stage(&splits, "ByteLevel");
        let added = self.vocabulary.get_added_tokens_decoder();
        let (mut longest, mut bytes) = (1, [false; 256]);
        for (token, id) in self.vocabulary.get_vocab(true) {
            let size = match added.get(&id) {
                Some(token) => token.content.len(),
                None if byte_level => token.chars().count(),
                None => token.len(),
            };
            longest = longest.max(size);
            let mut characters = token.chars();
            let byte = match (byte_level, characters.next(), characters.next()) {
                (true, Some(only), None) => byte_of(only),
                (false, ..) if model.byte_fallback => fallback_byte(&token),
                _ => None,
            };
            if let Some(known) = byte.and_then(|byte| bytes.get_mut(usize::from(byte))) {
                *known = true;
            }
        }
        // What has no token of its own is unknown, or dropped, whatever its length.
        bytes.iter().all(|known| *known).then(|| TextBound {
            longest: longest * shrinks,
            blanks_are_free: added.values().any(|token| token.lstrip || token.rstrip),
        })
    }
}

fn part<T: serde::Serialize>(part: Option<&T>) -> Value {
    part.and_then(|part| serde_json::to_value(part).ok()).unwrap_or_default()
}

fn kind(stage: &Value) -> &str {
    stage.get("type").and_then(Value::as_str).unwrap_or_default()
}

fn list<'a>(stage: &'a Value, name: &str) -> &'a [Value] {
    stage.get(name).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
}

/// By how much a normalizer may shorten a text at most, as a factor; `None` if there is no such bound.
fn shrinkage(stage: &Value) -> Option<usize> {
    match kind(stage) {
        "" | "Prepend" => Some(1),
        // Three conjoining jamo of three bytes each are one syllable of three; U+1FEF, of three bytes, is a backtick.
        "NFC" | "NFD" => Some(3),
        "Replace" => {
            let pattern = stage.pointer("/pattern/String").and_then(Value::as_str)?;
            let content = stage.get("content").and_then(Value::as_str)?;
            (content.len() >= pattern.len()).then_some(1)
        }
        "Sequence" => list(stage, "normalizers")
            .iter()
            .try_fold(1usize, |factor, stage| factor.checked_mul(shrinkage(stage)?)),
        _ => None,
    }
}

/// Whether all of a text reaches the model.
fn keeps_text(stage: &Value) -> bool {
    match kind(stage) {
        "" | "ByteLevel" | "Digits" | "Metaspace" => true,
        "Split" | "Punctuation" => {
            stage.get("behavior").and_then(Value::as_str).is_some_and(|behavior| behavior != "Removed")
        }
        "Sequence" => list(stage, "pretokenizers").iter().all(keeps_text),
        _ => false,
    }
}

fn has_stage(stage: &Value, wanted: &str) -> bool {
    kind(stage) == wanted || list(stage, "pretokenizers").iter().any(|stage| has_stage(stage, wanted))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;
    use crate::tokenizer::TokenizerParts;

    const TEXTS: [&str; 8] = [
        "",
        "Hello there, world",
        "        \n\n\n\t\t   \u{3000}\u{3000}  ",
        "1234567890 + 99999 = ???",
        "e\u{301}a\u{308}\u{304} \u{1100}\u{1161}\u{11a8} \u{1fef}\u{212a}",
        "héllo 漢字 🦀🦀 العربية",
        "<s></s><unk><|im_start|><|endoftext|>   x   ",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    ];

    /// The fixtures whose bytes all have tokens, as the tokenizers of current models.
    #[test]
    fn no_text_has_fewer_tokens_than_its_bound() {
        let mut bounded = 0;
        for (folder, name) in [
            ("tokenizers", "byte-level"),
            ("tokenizers", "byte-fallback"),
            ("tokenizers", "metaspace"),
            ("checkpoints", "llama-f32"),
            ("checkpoints", "qwen3-f32"),
            ("checkpoints", "gemma3_text-f32"),
        ] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(folder).join(name);
            let tokenizer = Tokenizer::from_dir(&folder).unwrap();
            let Some(bound) = tokenizer.text_bound() else { continue };
            bounded += 1;
            let longest = (0..tokenizer.vocab_size() as u32).map(|id| tokenizer.decode(&[id], false));
            let longest = longest.max_by_key(String::len).unwrap().repeat(7);
            for text in TEXTS.iter().copied().chain([longest.as_str()]) {
                let tokens = tokenizer.encode(text, false).unwrap().len();
                assert!(bound.least_tokens(text) <= tokens, "{name}: {text:?}: {tokens}");
            }
            assert!(bound.least_tokens(&"word ".repeat(1_000_000)) > 10_000, "{name}: {bound:?}");
        }
        assert!(bounded >= 3, "only {bounded} are bounded");
    }

    #[test]
    fn where_text_may_vanish_there_is_no_bound() {
        let tokenizer = |change: &dyn Fn(&mut Value)| {
            let file =
                Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/checkpoints/llama-f32/tokenizer.json");
            let mut json: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
            change(&mut json);
            let parts =
                TokenizerParts { tokenizer_json: json.to_string().into_bytes(), ..Default::default() };
            Tokenizer::from_parts(parts).unwrap().text_bound()
        };
        let usual = tokenizer(&|_| {}).unwrap();
        let normalizer = |normalizer: Value| tokenizer(&|json| json["normalizer"] = normalizer.clone());
        assert_eq!(normalizer(json!({"type": "Lowercase"})), None);
        assert_eq!(normalizer(json!({"type": "Strip", "strip_left": true, "strip_right": true})), None);
        assert_eq!(normalizer(json!({"type": "NFC"})).unwrap().longest, 3 * usual.longest);
        let stripping = tokenizer(&|json| json["added_tokens"][0]["rstrip"] = json!(true)).unwrap();
        assert!(stripping.blanks_are_free);
        assert_eq!(stripping.least_tokens(&" ".repeat(1_000_000)), 0);
        assert_eq!(tokenizer(&|json| json["pre_tokenizer"] = json!({"type": "WhitespaceSplit"})), None);
    }
}
