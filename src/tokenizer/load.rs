//! A tokenizer from a model directory or from parts made elsewhere (a GGUF's metadata).

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};
use tokenizers::AddedToken;
use tokenizers::models::ModelWrapper;

use crate::checkpoint::json;

use super::class::TokenizerClass;
use super::decoder::Pipeline;
use super::guard::{check_growth, guard};
use super::special::{self, Declared};
use super::{Thinking, Tokenizer, TokenizerError};

const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const SPECIAL_TOKENS_MAP: &str = "special_tokens_map.json";
const MODEL_CONFIG: &str = "config.json";

/// The contents of the files that make a tokenizer.
#[derive(Debug, Clone, Default)]
pub struct TokenizerParts {
    /// tokenizer.json.
    pub tokenizer_json: Vec<u8>,
    /// tokenizer_config.json; null or an empty object without one.
    pub config: Value,
    /// special_tokens_map.json.
    pub special_tokens_map: Option<Value>,
}

impl Tokenizer {
    /// Loads tokenizer.json and, where present, tokenizer_config.json, special_tokens_map.json and the
    /// model's type from config.json, as `AutoTokenizer.from_pretrained` of transformers 5 would.
    ///
    /// `add_bos_token` and `add_eos_token` have no effect, as there: with a tokenizer.json its
    /// post-processor alone decides.
    pub fn from_dir(dir: &Path) -> Result<Self, TokenizerError> {
        let path = dir.join(TOKENIZER);
        let Some(tokenizer_json) = read(&path)? else {
            return Err(TokenizerError::Missing { hint: hint_for_missing(dir), path });
        };
        let model = read_json(&dir.join(MODEL_CONFIG))?.unwrap_or_default();
        let parts = TokenizerParts {
            tokenizer_json,
            config: read_json(&dir.join(TOKENIZER_CONFIG))?.unwrap_or_default(),
            special_tokens_map: read_json(&dir.join(SPECIAL_TOKENS_MAP))?,
        };
        let origin = Origin {
            dir: Some(dir),
            model_type: model.get("model_type").and_then(Value::as_str),
            tokenizer_class: model.get("tokenizer_class").and_then(Value::as_str),
        };
        build(parts, origin)
    }

    /// Builds a tokenizer from file contents. Errors name the files without a directory.
    pub fn from_parts(parts: TokenizerParts) -> Result<Self, TokenizerError> {
        build(parts, Origin::default())
    }
}

/// Where the parts come from: for error messages, and what config.json says about the class.
#[derive(Clone, Copy, Default)]
struct Origin<'a> {
    dir: Option<&'a Path>,
    model_type: Option<&'a str>,
    tokenizer_class: Option<&'a str>,
}

impl Origin<'_> {
    fn file(self, name: &str) -> String {
        self.dir.map_or_else(|| name.to_owned(), |dir| dir.join(name).display().to_string())
    }

    fn invalid(self, name: &str, reason: impl Into<String>) -> TokenizerError {
        TokenizerError::Invalid { file: self.file(name), reason: reason.into() }
    }
}

fn build(parts: TokenizerParts, origin: Origin<'_>) -> Result<Tokenizer, TokenizerError> {
    let config = match parts.config {
        Value::Object(config) => config,
        Value::Null => Map::new(),
        _ => return Err(origin.invalid(TOKENIZER_CONFIG, "it is not a JSON object")),
    };
    let special_tokens_map = match &parts.special_tokens_map {
        Some(Value::Object(map)) => Some(map),
        Some(Value::Null) | None => None,
        Some(_) => return Err(origin.invalid(SPECIAL_TOKENS_MAP, "it is not a JSON object")),
    };

    let mut vocabulary = parse(&parts.tokenizer_json, origin)?;
    let class = TokenizerClass::resolve(&config, origin.model_type, origin.tokenizer_class);
    let failed = |error: tokenizers::Error| origin.invalid(TOKENIZER, error.to_string());
    class.apply(&mut vocabulary, &config).map_err(failed)?;
    vocabulary.with_truncation(None).map_err(failed)?;
    vocabulary.with_padding(None);
    vocabulary.set_encode_special_tokens(flag(&config, "split_special_tokens"));

    let present: BTreeMap<u32, AddedToken> = vocabulary.get_added_tokens_decoder().into_iter().collect();
    let Declared { special, to_add } = special::declared(&config, special_tokens_map, class, &present)
        .map_err(|reason| origin.invalid(TOKENIZER_CONFIG, reason))?;
    guard(|| vocabulary.add_tokens(&to_add))
        .ok_or_else(|| origin.invalid(TOKENIZER_CONFIG, "its added tokens do not fit tokenizer.json"))?;

    let decoder = Pipeline::new(vocabulary.get_decoder(), cleans_up(&vocabulary, &config));
    let mut tokenizer = Tokenizer {
        vocabulary: Arc::new(vocabulary),
        decoder: Arc::new(decoder),
        special,
        eos_token_ids: BTreeSet::new(),
        thinking: None,
        config: Value::Object(config),
    };
    tokenizer.eos_token_ids.extend(tokenizer.eos_id());
    tokenizer.thinking = Thinking::infer(&tokenizer)?;
    Ok(tokenizer)
}

/// What must be there, checked before the `tokenizers` crate reads the text: it panics on text that breaks
/// off inside the decoder.
#[derive(Deserialize)]
struct Outline {
    model: Option<IgnoredAny>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    decoder: Value,
}

fn parse(json: &[u8], origin: Origin<'_>) -> Result<tokenizers::Tokenizer, TokenizerError> {
    let outline: Outline = serde_json::from_slice(json).map_err(|error| TokenizerError::Json {
        file: origin.file(TOKENIZER),
        problem: json::problem(&error),
    })?;
    if outline.model.is_none() {
        return Err(origin.invalid(TOKENIZER, "it has no `model`; download it again"));
    }
    for (name, part) in [("normalizer", &outline.normalizer), ("decoder", &outline.decoder)] {
        check_growth(part).map_err(|problem| origin.invalid(TOKENIZER, format!("{name}: {problem}")))?;
    }
    match guard(|| tokenizers::Tokenizer::from_bytes(json)) {
        Some(Ok(tokenizer)) => Ok(tokenizer),
        Some(Err(error)) => Err(origin.invalid(TOKENIZER, error.to_string())),
        None => Err(origin.invalid(TOKENIZER, "its parts contradict each other; download it again")),
    }
}

/// Whether transformers removes spaces before punctuation after decoding: only on demand, and for BPE only
/// when the config insists (`TokenizersBackend._decode`).
fn cleans_up(vocabulary: &tokenizers::Tokenizer, config: &Map<String, Value>) -> bool {
    let bpe = matches!(vocabulary.get_model(), ModelWrapper::BPE(_));
    flag(config, "clean_up_tokenization_spaces")
        && (!bpe || flag(config, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"))
}

fn flag(config: &Map<String, Value>, name: &str) -> bool {
    config.get(name).and_then(Value::as_bool).unwrap_or(false)
}

fn hint_for_missing(dir: &Path) -> &'static str {
    let has = |name: &str| dir.join(name).exists();
    if has("tokenizer.model") || has("spiece.model") || has("tekken.json") || has("tiktoken.model") {
        "the directory holds a tokenizer of another format; convert it once with transformers \
         (AutoTokenizer.from_pretrained(dir).save_pretrained(dir))"
    } else if has("vocab.json") || has("vocab.txt") {
        "the directory holds only a vocabulary; make the file from it with transformers \
         (AutoTokenizer.from_pretrained(dir).save_pretrained(dir))"
    } else {
        "download it from where the model came from"
    }
}

/// The file's bytes, None if there is no such file.
fn read(path: &Path) -> Result<Option<Vec<u8>>, TokenizerError> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(cause) => Err(TokenizerError::Read { path: path.to_owned(), cause }),
    }
}

fn read_json(path: &Path) -> Result<Option<Value>, TokenizerError> {
    let Some(bytes) = read(path)? else { return Ok(None) };
    let value = serde_json::from_slice(&bytes).map_err(|error| TokenizerError::Json {
        file: path.display().to_string(),
        problem: json::problem(&error),
    })?;
    Ok(Some(value))
}
