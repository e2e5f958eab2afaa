//! What each token adds to a text, as bytes: what grammars, which see text, need to know of a vocabulary.

use serde_json::Value;

use super::decoder::{byte_of, fallback_byte};
use super::{Tokenizer, TokenizerError};

/// What a token adds to a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenBytes {
    /// Text; it may be part of a character.
    Text(Vec<u8>),
    /// Nothing: a control token, of this name.
    Special(String),
    /// Unknown: the id is unused, or its text depends on its neighbours.
    None,
}

/// How a vocabulary spells text.
enum Spelling {
    /// A character a byte, as GPT-2.
    ByteLevel,
    /// Text with a character for the space; `<0x41>` for bytes.
    Spaced { space: String, bytes: bool },
}

impl Tokenizer {
    /// The bytes of every id, the id being the index. A token that transformers adds or strips a space for at the
    /// beginning of a text counts with its space.
    ///
    /// # Errors
    /// The tokenizer joins tokens in a way that depends on their neighbours (WordPiece).
    pub fn vocabulary_bytes(&self) -> Result<Vec<TokenBytes>, TokenizerError> {
        let spelling = self.spelling()?;
        let added = self.vocabulary.get_added_tokens_decoder();
        let vocabulary = self.vocabulary.get_vocab(true);
        let length = vocabulary.values().max().map_or(0, |&id| id as usize + 1);
        let mut tokens = vec![TokenBytes::None; length];
        for (token, id) in vocabulary {
            let Some(slot) = tokens.get_mut(id as usize) else { continue };
            *slot = match added.get(&id) {
                Some(token)
                    if token.special || (token.content.starts_with('<') && token.content.ends_with('>')) =>
                {
                    TokenBytes::Special(token.content.clone())
                }
                Some(token) => TokenBytes::Text(token.content.clone().into_bytes()),
                None => spelling.bytes(&token).map_or(TokenBytes::None, TokenBytes::Text),
            };
        }
        for &id in &self.eos_token_ids {
            if let Some(slot @ TokenBytes::Text(_)) = tokens.get_mut(id as usize) {
                *slot = TokenBytes::Special(self.vocabulary.id_to_token(id).unwrap_or_default());
            }
        }
        Ok(tokens)
    }

    /// Whether encoding a text gives the tokens that a model would write for it after other text: no space is put
    /// before it.
    pub fn encodes_bytes(&self) -> bool {
        matches!(self.spelling(), Ok(Spelling::ByteLevel))
    }

    fn spelling(&self) -> Result<Spelling, TokenizerError> {
        let decoder = match self.vocabulary.get_decoder() {
            Some(decoder) => serde_json::to_value(decoder).unwrap_or_default(),
            None => Value::Null,
        };
        let mut stages = Vec::new();
        flatten(&decoder, &mut stages);
        let kind = |stage: &Value| stage.get("type").and_then(Value::as_str).unwrap_or_default().to_owned();
        let mut spelling = Spelling::Spaced { space: "\u{2581}".to_owned(), bytes: false };
        for stage in stages {
            match (kind(stage).as_str(), &mut spelling) {
                ("ByteLevel", _) => return Ok(Spelling::ByteLevel),
                ("ByteFallback", Spelling::Spaced { bytes, .. }) => *bytes = true,
                ("Replace", Spelling::Spaced { space, .. })
                    if stage.get("content") == Some(&Value::from(" ")) =>
                {
                    if let Some(pattern) = stage.pointer("/pattern/String").and_then(Value::as_str) {
                        pattern.clone_into(space);
                    }
                }
                ("Metaspace", Spelling::Spaced { space, .. }) => {
                    if let Some(replacement) = stage.get("replacement").and_then(Value::as_str) {
                        replacement.clone_into(space);
                    }
                }
                ("WordPiece" | "BPEDecoder" | "CTC", _) => return Err(TokenizerError::NoBytes(kind(stage))),
                _ => {}
            }
        }
        Ok(spelling)
    }
}

fn flatten<'a>(decoder: &'a Value, stages: &mut Vec<&'a Value>) {
    match decoder.get("decoders").and_then(Value::as_array) {
        Some(inner) => inner.iter().for_each(|decoder| flatten(decoder, stages)),
        None => stages.push(decoder),
    }
}

impl Spelling {
    fn bytes(&self, token: &str) -> Option<Vec<u8>> {
        match self {
            Self::ByteLevel => token.chars().map(byte_of).collect(),
            Self::Spaced { space, bytes } => match fallback_byte(token).filter(|_| *bytes) {
                Some(byte) => Some(vec![byte]),
                None => Some(token.replace(space.as_str(), " ").into_bytes()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn bytes_of_tokens_add_up_to_the_decoded_text() {
        for name in ["byte-level", "byte-fallback", "metaspace"] {
            let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures/tokenizers").join(name);
            let tokenizer = Tokenizer::from_dir(&dir).unwrap();
            let table = tokenizer.vocabulary_bytes().unwrap();
            for text in ["hello world", "a  b\n\"c\" {1}", "né 🙂"] {
                let ids = tokenizer.encode(text, false).unwrap();
                let mut bytes = Vec::new();
                for id in &ids {
                    if let TokenBytes::Text(token) = &table[*id as usize] {
                        bytes.extend(token);
                    }
                }
                let decoded = tokenizer.decode(&ids, true);
                let joined = String::from_utf8_lossy(&bytes).into_owned();
                assert_eq!(joined.trim_start(), decoded.trim_start(), "{name} {text:?}");
            }
        }
    }

    #[test]
    fn every_byte_has_one_character() {
        let mut seen: Vec<u8> = (0..0x144).filter_map(char::from_u32).filter_map(byte_of).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..=255).collect::<Vec<u8>>());
        assert_eq!(
            (byte_of('Ġ'), byte_of('Ċ'), byte_of('A'), byte_of(' ')),
            (Some(b' '), Some(b'\n'), Some(b'A'), None)
        );
    }
}
