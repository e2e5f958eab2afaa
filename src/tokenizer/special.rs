//! Special and added tokens, gathered from the configuration files as transformers 5 does
//! (tokenization_utils_base.py `_from_pretrained`, tokenization_utils_tokenizers.py `TokenizersBackend`).

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};
use tokenizers::AddedToken;

use super::class::TokenizerClass;

/// transformers' `SPECIAL_TOKENS_ATTRIBUTES`.
const ROLES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Special tokens by role: `bos_token`, `eos_token`, `pad_token` and so on, and any role of the model's own
/// (`image_token`). A chat template sees them as variables.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    named: Vec<(String, String)>,
    extra: Vec<String>,
}

impl SpecialTokens {
    /// The token of a role.
    pub fn get(&self, role: &str) -> Option<&str> {
        self.iter().find_map(|(name, token)| (name == role).then_some(token))
    }

    /// Roles and their tokens.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.named.iter().map(|(role, token)| (role.as_str(), token.as_str()))
    }

    /// Special tokens without a role (`additional_special_tokens`).
    pub fn extra(&self) -> &[String] {
        &self.extra
    }
}

/// The special tokens that the files declare and the tokens to add to the vocabulary, in order.
pub(super) struct Declared {
    pub(super) special: SpecialTokens,
    pub(super) to_add: Vec<AddedToken>,
}

/// Reads tokenizer_config.json and special_tokens_map.json, which counts only when the former has no
/// `added_tokens_decoder`. `present` are the added tokens of tokenizer.json.
pub(super) fn declared(
    config: &Map<String, Value>,
    special_tokens_map: Option<&Map<String, Value>>,
    class: TokenizerClass,
    present: &BTreeMap<u32, AddedToken>,
) -> Result<Declared, String> {
    let added = match config.get("added_tokens_decoder") {
        Some(Value::Object(tokens)) => Some(added_tokens_decoder(tokens)?),
        Some(Value::Null) | None => None,
        Some(_) => return Err("`added_tokens_decoder` is not an object".to_owned()),
    };
    let mut entries = config.clone();
    if let (None, Some(map)) = (&added, special_tokens_map) {
        entries.extend(map.iter().map(|(key, value)| (key.clone(), value.clone())));
    }
    let added = added.unwrap_or_else(|| present.clone());

    let mut named: Vec<(String, AddedToken)> = Vec::new();
    for role in ROLES {
        let token = match entries.get(role) {
            Some(Value::Null) => None,
            Some(value) => Some(token(value).map_err(|reason| format!("`{role}` {reason}"))?),
            None => class.default_token(role).map(|content| AddedToken::from(content, true)),
        };
        named.extend(token.map(|token| (role.to_owned(), token)));
    }
    let of_the_model = entries.iter().filter(|(key, value)| {
        key.ends_with("_token") && !ROLES.contains(&key.as_str()) && value.is_string()
    });
    for (role, value) in of_the_model {
        named.push((role.clone(), token(value)?));
    }
    let mut extra = Vec::new();
    match entries.get("extra_special_tokens").or_else(|| entries.get("additional_special_tokens")) {
        Some(Value::Array(values)) => {
            for value in values {
                extra.push(token(value).map_err(|reason| format!("an extra special token {reason}"))?);
            }
        }
        Some(Value::Object(values)) => {
            for (role, value) in values {
                named.push((role.clone(), token(value).map_err(|reason| format!("`{role}` {reason}"))?));
            }
        }
        Some(Value::Null) | None => {}
        Some(_) => return Err("`extra_special_tokens` is neither a list nor an object".to_owned()),
    }

    let special = SpecialTokens {
        named: named.iter().map(|(role, token)| (role.clone(), token.content.clone())).collect(),
        extra: extra.iter().map(|token| token.content.clone()).collect(),
    };
    let roles: BTreeSet<&str> = special.iter().map(|(_, token)| token).collect();
    let mut known: BTreeSet<String> = present.values().map(|token| token.content.clone()).collect();
    let mut to_add = Vec::new();
    for mut token in added.into_values() {
        token.special |= roles.contains(token.content.as_str());
        known.insert(token.content.clone());
        to_add.push(token);
    }
    for token in named.into_iter().map(|(_, token)| token).chain(extra) {
        if known.insert(token.content.clone()) {
            to_add.push(AddedToken { special: true, ..token });
        }
    }
    Ok(Declared { special, to_add })
}

fn added_tokens_decoder(tokens: &Map<String, Value>) -> Result<BTreeMap<u32, AddedToken>, String> {
    tokens
        .iter()
        .map(|(id, value)| {
            let id: u32 = id.parse().map_err(|_| format!("`added_tokens_decoder` has the id `{id}`"))?;
            let token = token(value).map_err(|reason| format!("`added_tokens_decoder` {id} {reason}"))?;
            Ok((id, token))
        })
        .collect()
}

/// A token written as a string or as `{"content": …, "lstrip": …, …}`.
fn token(value: &Value) -> Result<AddedToken, String> {
    match value {
        Value::String(content) => Ok(AddedToken::from(content.as_str(), true)),
        Value::Object(fields) => {
            let content = fields
                .get("content")
                .and_then(Value::as_str)
                .ok_or_else(|| "has no `content` string".to_owned())?;
            let flag = |name: &str| fields.get(name).and_then(Value::as_bool);
            let special = flag("special").unwrap_or(false);
            Ok(AddedToken::from(content, special)
                .single_word(flag("single_word").unwrap_or(false))
                .lstrip(flag("lstrip").unwrap_or(false))
                .rstrip(flag("rstrip").unwrap_or(false))
                .normalized(flag("normalized").unwrap_or(!special)))
        }
        _ => Err("is neither a string nor an object with `content`".to_owned()),
    }
}
