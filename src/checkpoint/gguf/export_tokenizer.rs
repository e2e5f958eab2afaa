//! A tokenizer.json as GGUF metadata: the inverse of [`super::tokenizer`].

use std::collections::HashMap;

use serde_json::Value;

use super::pre_tokenizer;
use super::writer::MetadataBuilder;
use crate::checkpoint::error::shown_name;

/// `llama_token_type`.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;
/// Score of tokens that no merge makes: below all that one makes.
const LOWEST_SCORE: f32 = -1e6;

/// Why a tokenizer cannot be said in GGUF.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenizerExportError {
    /// Not a tokenizer.json.
    #[error("tokenizer.json is not valid: {0}")]
    Broken(String),
    /// A kind that GGUF has no name for.
    #[error("{0}, which GGUF has no name for")]
    Unknown(String),
    /// More tokens than rows.
    #[error(
        "the tokenizer has {tokens} tokens, the model's embedding {rows} rows; they do not belong together"
    )]
    TooMany {
        /// Ids that the tokenizer has.
        tokens: usize,
        /// Rows of the embedding.
        rows: usize,
    },
    /// A role's token that is not in the vocabulary.
    #[error("`{}` is the {role} and not in the vocabulary", shown_name(token))]
    Missing {
        /// The role, such as `bos_token`.
        role: &'static str,
        /// The token.
        token: String,
    },
}

/// What is written of a tokenizer.
#[derive(Debug)]
pub struct TokenizerFiles<'a> {
    /// The bytes of a tokenizer.json.
    pub tokenizer_json: &'a [u8],
    /// The token of a role (`bos_token`, `eos_token`, `unk_token`, `pad_token`).
    pub special: HashMap<&'static str, String>,
    /// Ids that end a generation besides the `eos_token`'s.
    pub more_ends: Vec<u32>,
    /// As tokenizer_config.json has it: a string, or named ones in a list.
    pub chat_template: Option<Value>,
}

/// Adds the tokenizer's keys. `rows` is how many tokens the embedding has; ids without a token are filled up.
///
/// # Errors
/// When GGUF has no name for what the tokenizer does.
pub fn add(
    metadata: &mut MetadataBuilder,
    files: &TokenizerFiles<'_>,
    rows: usize,
) -> Result<(), TokenizerExportError> {
    let json: Value = serde_json::from_slice(files.tokenizer_json)
        .map_err(|error| TokenizerExportError::Broken(error.to_string()))?;
    let kind = Kind::of(&json)?;
    let vocabulary = Vocabulary::read(&json, rows, &kind)?;
    let merges = merges(&json)?;
    metadata.text("tokenizer.ggml.model", kind.name());
    if let Kind::ByteLevel { pre } = kind {
        metadata.text("tokenizer.ggml.pre", pre);
    }
    metadata.texts("tokenizer.ggml.tokens", &vocabulary.tokens);
    if let Kind::SentencePiece { prefix } = kind {
        metadata.numbers("tokenizer.ggml.scores", &scores(&vocabulary, &merges));
        metadata.flag("tokenizer.ggml.add_space_prefix", prefix);
    }
    metadata.integers("tokenizer.ggml.token_type", &vocabulary.kinds);
    metadata
        .texts("tokenizer.ggml.merges", &merges.iter().map(|pair| joined(pair, &kind)).collect::<Vec<_>>());
    add_special(metadata, files, &json, &vocabulary)?;
    add_templates(metadata, files.chat_template.as_ref());
    Ok(())
}

/// How text becomes tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Byte-level BPE.
    ByteLevel { pre: &'static str },
    /// SentencePiece's BPE with bytes for what it does not know.
    SentencePiece { prefix: bool },
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::ByteLevel { .. } => "gpt2",
            Self::SentencePiece { .. } => "llama",
        }
    }

    fn of(json: &Value) -> Result<Self, TokenizerExportError> {
        let model = &json["model"];
        let unknown = |what: &str| Err(TokenizerExportError::Unknown(what.to_owned()));
        if model["type"].as_str().is_some_and(|kind| kind != "BPE") || !model["vocab"].is_object() {
            return unknown("the tokenizer is no BPE");
        }
        if ["continuing_subword_prefix", "end_of_word_suffix"]
            .iter()
            .any(|field| model[*field].as_str().is_some_and(|text| !text.is_empty()))
        {
            return unknown("the tokenizer marks parts of words");
        }
        if model["byte_fallback"] == true {
            return match space_prefix(&json["normalizer"], &json["pre_tokenizer"]) {
                Some(prefix) => Ok(Self::SentencePiece { prefix }),
                None => unknown("the tokenizer changes text in a way of its own"),
            };
        }
        let ignore_merges = model["ignore_merges"] == true;
        match pre_tokenizer::name_of(&json["normalizer"], &json["pre_tokenizer"], ignore_merges) {
            Some(pre) => Ok(Self::ByteLevel { pre }),
            None => unknown("the tokenizer cuts text into words in a way of its own"),
        }
    }
}

/// Whether a space goes before each text, if spaces are all that the steps are about.
fn space_prefix(normalizer: &Value, pre_tokenizer: &Value) -> Option<bool> {
    fn steps<'v>(value: &'v Value, list: &str) -> Vec<&'v Value> {
        match value["type"].as_str() {
            None => Vec::new(),
            Some("Sequence") => value[list].as_array().into_iter().flatten().collect(),
            Some(_) => vec![value],
        }
    }
    let mut prefix = false;
    for step in steps(normalizer, "normalizers") {
        match step["type"].as_str() {
            Some("Prepend") => prefix = true,
            Some("Replace") if step["pattern"]["String"] == " " && step["content"] == "\u{2581}" => {}
            _ => return None,
        }
    }
    for step in steps(pre_tokenizer, "pretokenizers") {
        match step["type"].as_str() {
            Some("Metaspace") => {
                let scheme = step["prepend_scheme"].as_str();
                prefix |= scheme.map_or(step["add_prefix_space"] != false, |scheme| scheme != "never");
            }
            // Gemma's; its normalizer has left no space to cut at.
            Some("Split") if step["pattern"]["String"] == " " => {}
            _ => return None,
        }
    }
    Some(prefix)
}

/// Tokens by id, with what each is.
struct Vocabulary {
    tokens: Vec<String>,
    kinds: Vec<i32>,
    ids: HashMap<String, u32>,
}

impl Vocabulary {
    fn read(json: &Value, rows: usize, kind: &Kind) -> Result<Self, TokenizerExportError> {
        let broken = |what: String| TokenizerExportError::Broken(what);
        let mut texts: Vec<Option<(String, i32)>> = Vec::new();
        let mut put = |text: &str, id: &Value, kind: i32| {
            let id = id.as_u64().and_then(|id| usize::try_from(id).ok());
            let id = id.ok_or_else(|| broken(format!("`{}` has no id", shown_name(text))))?;
            if id >= rows {
                return Err(TokenizerExportError::TooMany { tokens: id.saturating_add(1), rows });
            }
            if texts.len() <= id {
                texts.resize(id + 1, None);
            }
            texts[id] = Some((text.to_owned(), kind));
            Ok(())
        };
        let unknown = json["model"]["unk_token"].as_str();
        for (text, id) in json["model"]["vocab"].as_object().into_iter().flatten() {
            let what = match kind {
                _ if unknown == Some(text) => UNKNOWN,
                Kind::SentencePiece { .. } if is_byte(text) => BYTE,
                _ => NORMAL,
            };
            put(text, id, what)?;
        }
        for added in json["added_tokens"].as_array().into_iter().flatten() {
            let Some(text) = added["content"].as_str() else {
                return Err(broken("an added token has no content".to_owned()));
            };
            let what = match added["special"] == true {
                true if unknown == Some(text) => UNKNOWN,
                true => CONTROL,
                false => USER_DEFINED,
            };
            put(text, &added["id"], what)?;
        }
        texts.resize(rows, None);
        let filled = texts.into_iter().enumerate();
        let (tokens, kinds): (Vec<_>, Vec<_>) =
            filled.map(|(id, text)| text.unwrap_or_else(|| (format!("[PAD{id}]"), UNUSED))).unzip();
        let ids = (0u32..).zip(&tokens).map(|(id, text)| (text.clone(), id)).collect();
        Ok(Self { tokens, kinds, ids })
    }
}

/// `<0x0A>`
fn is_byte(text: &str) -> bool {
    let digits = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && u8::from_str_radix(digits, 16).is_ok())
}

type Pair = (String, String);

fn merges(json: &Value) -> Result<Vec<Pair>, TokenizerExportError> {
    let pair = |merge: &Value| match merge {
        Value::String(text) => {
            let (left, right) = text.split_once(' ')?;
            Some((left.to_owned(), right.to_owned()))
        }
        Value::Array(parts) => match &parts[..] {
            [left, right] => Some((left.as_str()?.to_owned(), right.as_str()?.to_owned())),
            _ => None,
        },
        _ => None,
    };
    let merges = json["model"]["merges"].as_array().into_iter().flatten();
    let merges: Option<Vec<Pair>> = merges.map(pair).collect();
    merges.ok_or_else(|| TokenizerExportError::Broken("a merge is not a pair".to_owned()))
}

/// The text of a merge. Byte-level tokens have no spaces; where one has, llama.cpp's converter writes it 256 higher.
fn joined((left, right): &Pair, kind: &Kind) -> String {
    match kind {
        Kind::ByteLevel { .. } => {
            format!("{} {}", left.replace(' ', "\u{120}"), right.replace(' ', "\u{120}"))
        }
        Kind::SentencePiece { .. } => format!("{left} {right}"),
    }
}

/// SentencePiece joins the pair whose union has the best score. A token gets the rank of the first merge that makes
/// it, so better merges have better scores.
fn scores(vocabulary: &Vocabulary, merges: &[Pair]) -> Vec<f32> {
    let mut scores = vec![LOWEST_SCORE; vocabulary.tokens.len()];
    for (rank, (left, right)) in merges.iter().enumerate() {
        let made = vocabulary.ids.get(&format!("{left}{right}"));
        if let Some(score) = made.and_then(|&id| scores.get_mut(id as usize))
            && *score == LOWEST_SCORE
        {
            *score = -(rank as f32);
        }
    }
    scores
}

fn add_special(
    metadata: &mut MetadataBuilder,
    files: &TokenizerFiles<'_>,
    json: &Value,
    vocabulary: &Vocabulary,
) -> Result<(), TokenizerExportError> {
    let roles =
        [("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")];
    let mut ids = HashMap::new();
    for (role, key) in roles {
        let Some(token) = files.special.get(role) else { continue };
        let missing = || TokenizerExportError::Missing { role, token: token.clone() };
        let id = vocabulary.ids.get(token).copied().ok_or_else(missing)?;
        metadata.integer(&format!("tokenizer.ggml.{key}_token_id"), id);
        ids.insert(key, token.as_str());
    }
    let eos = files.special.get("eos_token").and_then(|token| vocabulary.ids.get(token));
    let others =
        files.more_ends.iter().filter(|id| Some(*id) != eos && (**id as usize) < vocabulary.tokens.len());
    for (id, key) in others.zip(["eot", "eom"]) {
        metadata.integer(&format!("tokenizer.ggml.{key}_token_id"), *id);
    }
    for (key, first) in [("bos", true), ("eos", false)] {
        if let Some(token) = ids.get(key) {
            metadata.flag(
                &format!("tokenizer.ggml.add_{key}_token"),
                adds(&json["post_processor"], token, first),
            );
        }
    }
    Ok(())
}

/// Whether the post-processor puts `token` before (or after) a single text.
fn adds(processor: &Value, token: &str, first: bool) -> bool {
    match processor["type"].as_str() {
        Some("Sequence") => {
            processor["processors"].as_array().into_iter().flatten().any(|step| adds(step, token, first))
        }
        Some("TemplateProcessing") => {
            let pieces = processor["single"].as_array().map(Vec::as_slice).unwrap_or_default();
            let piece = if first { pieces.first() } else { pieces.last() };
            piece.is_some_and(|piece| piece["SpecialToken"]["id"] == token)
        }
        _ => false,
    }
}

fn add_templates(metadata: &mut MetadataBuilder, template: Option<&Value>) {
    match template {
        Some(Value::String(text)) => metadata.text("tokenizer.chat_template", text),
        Some(Value::Array(named)) => {
            let named =
                named.iter().filter_map(|one| Some((one["name"].as_str()?, one["template"].as_str()?)));
            let mut names = Vec::new();
            for (name, text) in named {
                if name == "default" {
                    metadata.text("tokenizer.chat_template", text);
                } else {
                    metadata.text(&format!("tokenizer.chat_template.{name}"), text);
                    names.push(name);
                }
            }
            if !names.is_empty() {
                metadata.texts("tokenizer.chat_templates", &names);
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn files<'a>(json: &'a [u8], special: &[(&'static str, &str)]) -> TokenizerFiles<'a> {
        let special = special.iter().map(|(role, token)| (*role, (*token).to_owned())).collect();
        TokenizerFiles { tokenizer_json: json, special, more_ends: Vec::new(), chat_template: None }
    }

    fn error(json: &Value, rows: usize, special: &[(&'static str, &str)]) -> String {
        let json = serde_json::to_vec(json).unwrap();
        add(&mut MetadataBuilder::default(), &files(&json, special), rows).unwrap_err().to_string()
    }

    #[test]
    fn what_gguf_cannot_say_is_refused() {
        let mut json = json!({
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
            "added_tokens": [{"id": 3, "content": "<s>", "special": true}],
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
        });
        let bytes = serde_json::to_vec(&json).unwrap();
        add(&mut MetadataBuilder::default(), &files(&bytes, &[("bos_token", "<s>")]), 6).unwrap();
        assert!(error(&json, 3, &[]).starts_with("the tokenizer has 4 tokens, the model's embedding 3 rows"));
        assert_eq!(
            error(&json, 4, &[("eos_token", "</s>")]),
            "`</s>` is the eos_token and not in the vocabulary"
        );
        json["pre_tokenizer"] = json!({"type": "Whitespace"});
        assert!(error(&json, 4, &[]).contains("words in a way of its own, which GGUF has no name for"));
        json["model"]["type"] = json!("Unigram");
        assert_eq!(error(&json, 4, &[]), "the tokenizer is no BPE, which GGUF has no name for");
        assert!(add(&mut MetadataBuilder::default(), &files(b"{", &[]), 4).is_err());
    }

    #[test]
    fn earlier_merges_score_better() {
        let json = json!({"model": {"vocab": {"a": 0, "b": 1, "ab": 2, "aba": 3, "<0x0A>": 4}}});
        let kind = Kind::SentencePiece { prefix: true };
        let vocabulary = Vocabulary::read(&json, 6, &kind).unwrap();
        assert_eq!(vocabulary.kinds, [NORMAL, NORMAL, NORMAL, NORMAL, BYTE, UNUSED]);
        assert_eq!(vocabulary.tokens[5], "[PAD5]");
        let pairs = [("a", "b"), ("ab", "a"), ("a", "ba")].map(|(a, b)| (a.to_owned(), b.to_owned()));
        let scores = scores(&vocabulary, &pairs);
        assert_eq!(scores, [LOWEST_SCORE, LOWEST_SCORE, 0.0, -1.0, LOWEST_SCORE, LOWEST_SCORE]);
    }
}
