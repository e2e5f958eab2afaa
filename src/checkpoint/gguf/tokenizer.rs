//! A `tokenizer.json` and a `tokenizer_config.json` out of GGUF metadata.
//!
//! Three kinds: byte-level BPE (`gpt2`), SentencePiece BPE with byte fallback (`llama`; Gemma's is one without
//! the leading space) and SentencePiece unigram (`t5`). Rules where the metadata is silent are llama.cpp's
//! (`llama_vocab::impl::load`), the shape of the result is that of transformers' converters.

use serde::ser::{SerializeMap, SerializeSeq};
use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};

use super::error::Fault;
use super::merges::{self, Merges};
use super::pre_tokenizer::{PreTokenizer, byte_level};
use super::value::Metadata;
use super::vocabulary::{TokenKind, Vocabulary};

/// SentencePiece's mark for a space.
const SPACE: &str = "\u{2581}";

/// Texts that end a reply whatever the metadata says (llama.cpp's list).
const END_TEXTS: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<｜end▁of▁sentence｜>",
];

/// What the metadata says about the tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    /// The bytes of a tokenizer.json.
    pub json: Vec<u8>,
    /// A tokenizer_config.json, chat template included.
    pub config: Value,
    /// Tokens that end generation; the one the metadata calls EOS first.
    pub eos_token_ids: Vec<u32>,
    /// The token that begins a text, if there is one.
    pub bos_token_id: Option<u32>,
    /// Number of tokens.
    pub tokens: usize,
}

/// Reads the tokenizer.
///
/// # Errors
/// If the kind is not known or the vocabulary is unusable.
pub fn read(metadata: &Metadata<'_>) -> Result<Tokenizer, Fault> {
    const MODEL: &str = "tokenizer.ggml.model";
    let model = metadata.text(MODEL)?.ok_or_else(|| Fault::MissingKey(MODEL.to_owned()))?;
    let vocabulary = Vocabulary::read(metadata)?;
    let kind = match model {
        "gpt2" => byte_level_bpe(metadata, &vocabulary)?,
        "llama" => sentence_piece_bpe(metadata, &vocabulary)?,
        "t5" => unigram(metadata, &vocabulary)?,
        _ => {
            return Err(Fault::key(
                MODEL,
                format!("is {model:?}, which is not supported (gpt2, llama and t5 are)"),
            ));
        }
    };
    let special = Specials::read(metadata, &vocabulary, &kind.defaults)?;

    let document = Document {
        version: "1.0",
        truncation: (),
        padding: (),
        added_tokens: added_tokens(&vocabulary),
        normalizer: kind.normalizer,
        pre_tokenizer: kind.pre_tokenizer,
        post_processor: special.post_processor(&vocabulary),
        decoder: kind.decoder,
        model: kind.model,
    };
    let json = serde_json::to_vec(&document).map_err(|error| Fault::Tokenizer(error.to_string()))?;
    Ok(Tokenizer {
        json,
        config: special.config(metadata, &vocabulary)?,
        eos_token_ids: special.ends(&vocabulary),
        bos_token_id: special.bos,
        tokens: vocabulary.tokens.len(),
    })
}

/// What sets one kind of tokenizer apart.
struct Kind<'v> {
    normalizer: Value,
    pre_tokenizer: Value,
    decoder: Value,
    model: Model<'v>,
    defaults: Defaults,
}

/// What holds if the metadata does not say.
#[derive(Default)]
struct Defaults {
    adds_bos: bool,
    adds_eos: bool,
    bos: Option<u32>,
    eos: Option<u32>,
    unknown: Option<u32>,
}

fn byte_level_bpe<'v>(metadata: &Metadata<'v>, vocabulary: &'v Vocabulary<'v>) -> Result<Kind<'v>, Fault> {
    const MERGES: &str = "tokenizer.ggml.merges";
    const PRE: &str = "tokenizer.ggml.pre";
    let name = metadata.text(PRE)?.unwrap_or("default");
    let pre_tokenizer = PreTokenizer::named(name)
        .ok_or_else(|| Fault::key(PRE, format!("is {name:?}, a pre-tokenizer that is not supported")))?;
    let merges = metadata.array(MERGES)?.ok_or_else(|| Fault::MissingKey(MERGES.to_owned()))?;
    Ok(Kind {
        normalizer: pre_tokenizer.normalizer(),
        pre_tokenizer: pre_tokenizer.json(),
        decoder: byte_level(),
        model: Model::Bpe(Bpe {
            kind: "BPE",
            unk_token: None,
            fuse_unk: false,
            byte_fallback: false,
            ignore_merges: pre_tokenizer.ignore_merges,
            vocab: ById(vocabulary),
            merges: merges::listed(merges, vocabulary)?,
        }),
        defaults: Defaults { adds_bos: pre_tokenizer.adds_bos, ..Defaults::default() },
    })
}

fn sentence_piece_bpe<'v>(
    metadata: &Metadata<'v>,
    vocabulary: &'v Vocabulary<'v>,
) -> Result<Kind<'v>, Fault> {
    let prefix = metadata.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    // Files made from a tokenizer.json may list the merges; scores are then all alike.
    let merges = match metadata.array("tokenizer.ggml.merges")? {
        Some(array) if !array.is_empty() => merges::listed(array, vocabulary)?,
        _ => merges::from_scores(vocabulary)?,
    };
    let defaults = Defaults {
        adds_bos: true,
        adds_eos: false,
        bos: Some(1),
        eos: Some(2),
        unknown: vocabulary.first(TokenKind::Unknown).or(Some(0)),
    };
    let unknown = unknown(metadata, &defaults)?;
    Ok(Kind {
        normalizer: json!({"type": "Sequence", "normalizers": spaces(prefix)}),
        pre_tokenizer: Value::Null,
        decoder: decoder(prefix),
        model: Model::Bpe(Bpe {
            kind: "BPE",
            unk_token: unknown.and_then(|id| vocabulary.text(id)),
            fuse_unk: true,
            byte_fallback: true,
            ignore_merges: false,
            vocab: ById(vocabulary),
            merges,
        }),
        defaults,
    })
}

fn unigram<'v>(metadata: &Metadata<'v>, vocabulary: &'v Vocabulary<'v>) -> Result<Kind<'v>, Fault> {
    const CHARACTER_MAP: &str = "tokenizer.ggml.precompiled_charsmap";
    if vocabulary.scores.is_none() {
        return Err(Fault::MissingKey("tokenizer.ggml.scores".to_owned()));
    }
    let prefix = metadata.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(false);
    let squeeze = metadata.flag("tokenizer.ggml.remove_extra_whitespaces")?.unwrap_or(false);
    let defaults = Defaults {
        adds_bos: false,
        adds_eos: true,
        bos: None,
        eos: Some(1),
        unknown: vocabulary.first(TokenKind::Unknown).or(Some(2)),
    };
    let mut normalizers = Vec::new();
    if let Some(map) = metadata.array(CHARACTER_MAP)? {
        let map = map.octets().ok_or_else(|| Fault::key(CHARACTER_MAP, "does not hold bytes"))?;
        normalizers.push(json!({"type": "Precompiled", "precompiled_charsmap": base64(map)}));
    }
    if squeeze {
        normalizers.push(json!({"type": "Strip", "strip_left": true, "strip_right": true}));
        normalizers.push(json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}));
    }
    normalizers.extend(spaces(prefix));
    Ok(Kind {
        normalizer: json!({"type": "Sequence", "normalizers": normalizers}),
        pre_tokenizer: Value::Null,
        decoder: decoder(prefix),
        model: Model::Unigram(Unigram {
            kind: "Unigram",
            unk_id: unknown(metadata, &defaults)?,
            byte_fallback: vocabulary.first(TokenKind::Byte).is_some(),
            vocab: Scored(vocabulary),
        }),
        defaults,
    })
}

/// How SentencePiece sees spaces, and with `prefix` one before each text between added tokens, as llama.cpp and
/// Llama 2's own tokenizer.json have it.
fn spaces(prefix: bool) -> Vec<Value> {
    let prepend = prefix.then(|| json!({"type": "Prepend", "prepend": SPACE}));
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
    prepend.into_iter().chain([replace]).collect()
}

/// The inverse of [`spaces`], and bytes put together.
fn decoder(prefix: bool) -> Value {
    let mut steps = vec![
        json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefix {
        steps.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    json!({"type": "Sequence", "decoders": steps})
}

/// Tokens with a part of their own: those the metadata names.
struct Specials {
    bos: Option<u32>,
    eos: Option<u32>,
    ends: [Option<u32>; 2],
    unknown: Option<u32>,
    padding: Option<u32>,
    adds_bos: bool,
    adds_eos: bool,
}

impl Specials {
    fn read(
        metadata: &Metadata<'_>,
        vocabulary: &Vocabulary<'_>,
        defaults: &Defaults,
    ) -> Result<Self, Fault> {
        let token = |name: &str, default: Option<u32>| -> Result<Option<u32>, Fault> {
            let key = format!("tokenizer.ggml.{name}_token_id");
            match metadata.integer(&key)? {
                None => Ok(default.filter(|&id| vocabulary.text(id).is_some())),
                Some(id) => match u32::try_from(id).ok().filter(|&id| vocabulary.text(id).is_some()) {
                    Some(id) => Ok(Some(id)),
                    None => {
                        let problem = format!("is {id} in a vocabulary of {}", vocabulary.tokens.len());
                        Err(Fault::key(&key, problem))
                    }
                },
            }
        };
        let adds = |name: &str, default: bool, token: Option<u32>| -> Result<bool, Fault> {
            let key = format!("tokenizer.ggml.add_{name}_token");
            match (metadata.flag(&key)?, token) {
                (Some(true), None) => {
                    Err(Fault::key(&key, format!("is set, but the file names no {name} token")))
                }
                (flag, token) => Ok(flag.unwrap_or(default) && token.is_some()),
            }
        };
        let (bos, eos) = (token("bos", defaults.bos)?, token("eos", defaults.eos)?);
        Ok(Self {
            bos,
            eos,
            ends: [token("eot", None)?, token("eom", None)?],
            unknown: token("unknown", defaults.unknown)?,
            padding: token("padding", None)?,
            adds_bos: adds("bos", defaults.adds_bos, bos)?,
            adds_eos: adds("eos", defaults.adds_eos, eos)?,
        })
    }

    /// llama.cpp's end-of-generation tokens, without those for filling in the middle of code. `</s>` counts only
    /// as a control token: in Gemma's vocabulary it is a tag of HTML.
    fn ends(&self, vocabulary: &Vocabulary<'_>) -> Vec<u32> {
        let by_text = END_TEXTS.iter().filter_map(|text| vocabulary.id(text));
        let strict = vocabulary.id("</s>").filter(|&id| vocabulary.kind(id) == Some(TokenKind::Control));
        let mut ends = Vec::new();
        for id in self.eos.into_iter().chain(self.ends.into_iter().flatten()).chain(by_text).chain(strict) {
            if !ends.contains(&id) {
                ends.push(id);
            }
        }
        ends
    }

    fn post_processor(&self, vocabulary: &Vocabulary<'_>) -> Value {
        let bos = self.bos.filter(|_| self.adds_bos).and_then(|id| Some((id, vocabulary.text(id)?)));
        let eos = self.eos.filter(|_| self.adds_eos).and_then(|id| Some((id, vocabulary.text(id)?)));
        if bos.is_none() && eos.is_none() {
            return Value::Null;
        }
        let around = |sequence: &str, number: u32| {
            let piece = |(_, text): (u32, &str)| json!({"SpecialToken": {"id": text, "type_id": number}});
            let mut pieces: Vec<Value> = bos.map(piece).into_iter().collect();
            pieces.push(json!({"Sequence": {"id": sequence, "type_id": number}}));
            pieces.extend(eos.map(piece));
            pieces
        };
        let mut tokens = Map::new();
        for (id, text) in bos.into_iter().chain(eos) {
            tokens.insert(text.to_owned(), json!({"id": text, "ids": [id], "tokens": [text]}));
        }
        let pair: Vec<Value> = around("A", 0).into_iter().chain(around("B", 1)).collect();
        json!({"type": "TemplateProcessing", "single": around("A", 0), "pair": pair, "special_tokens": tokens})
    }

    fn config(&self, metadata: &Metadata<'_>, vocabulary: &Vocabulary<'_>) -> Result<Value, Fault> {
        let mut config = Map::new();
        config.insert("tokenizer_class".to_owned(), json!("PreTrainedTokenizerFast"));
        config.insert("add_bos_token".to_owned(), json!(self.adds_bos));
        config.insert("add_eos_token".to_owned(), json!(self.adds_eos));
        config.insert("clean_up_tokenization_spaces".to_owned(), json!(false));
        for (name, id) in [("bos", self.bos), ("eos", self.eos), ("unk", self.unknown), ("pad", self.padding)]
        {
            if let Some(text) = id.and_then(|id| vocabulary.text(id)) {
                config.insert(format!("{name}_token"), json!(text));
            }
        }
        if let Some(template) = chat_template(metadata)? {
            config.insert("chat_template".to_owned(), template);
        }
        Ok(Value::Object(config))
    }
}

/// The chat template: a string, or named ones in a list as in tokenizer_config.json.
fn chat_template(metadata: &Metadata<'_>) -> Result<Option<Value>, Fault> {
    const NAMES: &str = "tokenizer.chat_templates";
    const DEFAULT: &str = "tokenizer.chat_template";
    let default = metadata.text(DEFAULT)?;
    let mut named = Vec::new();
    if let Some(names) = metadata.array(NAMES)? {
        let names = names.strings().ok_or_else(|| Fault::key(NAMES, "does not hold strings"))?;
        for name in names {
            let name = std::str::from_utf8(name).map_err(|_| Fault::key(NAMES, "is not UTF-8"))?;
            if name != "default"
                && let Some(template) = metadata.text(&format!("{DEFAULT}.{name}"))?
            {
                named.push(json!({"name": name, "template": template}));
            }
        }
    }
    if named.is_empty() {
        return Ok(default.map(|template| json!(template)));
    }
    let default = default.map(|template| json!({"name": "default", "template": template}));
    Ok(Some(default.into_iter().chain(named).collect()))
}

fn unknown(metadata: &Metadata<'_>, defaults: &Defaults) -> Result<Option<u32>, Fault> {
    let id = metadata.integer("tokenizer.ggml.unknown_token_id")?.and_then(|id| u32::try_from(id).ok());
    Ok(id.or(defaults.unknown))
}

#[derive(Serialize)]
struct Document<'v> {
    version: &'static str,
    truncation: (),
    padding: (),
    added_tokens: Vec<AddedToken<'v>>,
    normalizer: Value,
    pre_tokenizer: Value,
    post_processor: Value,
    decoder: Value,
    model: Model<'v>,
}

#[derive(Serialize)]
struct AddedToken<'v> {
    id: u32,
    content: &'v str,
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
    normalized: bool,
    special: bool,
}

/// Tokens that are found in text before anything else is done to it. The known ends of a reply are special
/// even where a converter has marked them otherwise.
fn added_tokens<'v>(vocabulary: &'v Vocabulary<'_>) -> Vec<AddedToken<'v>> {
    let ends: Vec<u32> = END_TEXTS.iter().filter_map(|text| vocabulary.id(text)).collect();
    let tokens = (0_u32..).zip(&vocabulary.tokens).zip(&vocabulary.kinds);
    tokens
        .filter_map(|((id, content), kind)| {
            let special = matches!(kind, TokenKind::Control | TokenKind::Unknown) || ends.contains(&id);
            (special || *kind == TokenKind::UserDefined).then_some(AddedToken {
                id,
                content,
                single_word: false,
                lstrip: false,
                rstrip: false,
                normalized: false,
                special,
            })
        })
        .collect()
}

#[derive(Serialize)]
#[serde(untagged)]
enum Model<'v> {
    Bpe(Bpe<'v>),
    Unigram(Unigram<'v>),
}

#[derive(Serialize)]
struct Bpe<'v> {
    #[serde(rename = "type")]
    kind: &'static str,
    unk_token: Option<&'v str>,
    fuse_unk: bool,
    byte_fallback: bool,
    ignore_merges: bool,
    vocab: ById<'v>,
    merges: Merges<'v>,
}

#[derive(Serialize)]
struct Unigram<'v> {
    #[serde(rename = "type")]
    kind: &'static str,
    unk_id: Option<u32>,
    byte_fallback: bool,
    vocab: Scored<'v>,
}

/// A vocabulary as an object of ids by text.
struct ById<'v>(&'v Vocabulary<'v>);

impl Serialize for ById<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.tokens.len()))?;
        for (id, token) in self.0.tokens.iter().enumerate() {
            map.serialize_entry(token, &id)?;
        }
        map.end()
    }
}

/// A vocabulary as a list of texts and scores.
struct Scored<'v>(&'v Vocabulary<'v>);

impl Serialize for Scored<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(Some(self.0.tokens.len()))?;
        for (token, score) in self.0.tokens.iter().zip(self.0.scores.iter().flatten()) {
            list.serialize_element(&(token, score))?;
        }
        list.end()
    }
}

fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let at = |index: usize| u32::from(chunk.get(index).copied().unwrap_or(0));
        let word = at(0) << 16 | at(1) << 8 | at(2);
        for place in 0..4 {
            let digit = ALPHABET[(word >> (18 - 6 * place) & 63) as usize];
            text.push(if place <= chunk.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::base64;

    #[test]
    fn base64_pads() {
        let encoded = [&b""[..], b"f", b"fo", b"foo", b"foob"].map(base64);
        assert_eq!(encoded, ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYg=="]);
    }
}
