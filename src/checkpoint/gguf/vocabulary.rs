//! The vocabulary of a GGUF file: token texts, scores and kinds.

use std::borrow::Cow;
use std::collections::HashMap;

use super::error::Fault;
use super::value::Metadata;

/// What a token is (`llama_token_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    /// Ordinary text.
    Normal,
    /// Stands for what has no token.
    Unknown,
    /// Not text: BOS, end of turn and the like.
    Control,
    /// Added by the model's author; matched before anything else.
    UserDefined,
    /// A place holder.
    Unused,
    /// One byte, written `<0x0A>`.
    Byte,
}

/// Tokens by id, and ids by text.
#[derive(Debug)]
pub struct Vocabulary<'a> {
    /// Texts, all different.
    pub tokens: Vec<Cow<'a, str>>,
    /// As many kinds.
    pub kinds: Vec<TokenKind>,
    /// As many scores, if the file has them.
    pub scores: Option<Vec<f32>>,
    ids: HashMap<String, u32>,
}

impl<'a> Vocabulary<'a> {
    /// Reads `tokenizer.ggml.tokens`, `.scores` and `.token_type`.
    ///
    /// # Errors
    /// If there are no tokens, two have the same text, or the arrays differ in length or type.
    pub fn read(metadata: &Metadata<'a>) -> Result<Self, Fault> {
        const TOKENS: &str = "tokenizer.ggml.tokens";
        const SCORES: &str = "tokenizer.ggml.scores";
        const KINDS: &str = "tokenizer.ggml.token_type";
        let array = metadata.array(TOKENS)?.ok_or_else(|| Fault::MissingKey(TOKENS.to_owned()))?;
        let strings = array.strings().ok_or_else(|| Fault::key(TOKENS, "does not hold strings"))?;
        let mut tokens = Vec::with_capacity(array.len());
        let mut ids = HashMap::with_capacity(array.len());
        for (id, bytes) in (0_u32..).zip(strings) {
            let text = std::str::from_utf8(bytes)
                .map_err(|_| Fault::key(TOKENS, format!("has a token ({id}) that is not UTF-8")))?;
            let text =
                if text.is_empty() { Cow::Owned(format!("[EMPTY_{id}]")) } else { Cow::Borrowed(text) };
            if let Some(other) = ids.insert(text.clone().into_owned(), id) {
                return Err(Fault::Tokenizer(format!("tokens {other} and {id} are both {text:?}")));
            }
            tokens.push(text);
        }
        let scores = match metadata.array(SCORES)? {
            None => None,
            Some(array) => Some(array.floats().ok_or_else(|| Fault::key(SCORES, "does not hold numbers"))?),
        };
        let kinds = match metadata.array(KINDS)? {
            None => vec![TokenKind::Normal; tokens.len()],
            Some(array) => {
                let numbers = array.integers().ok_or_else(|| Fault::key(KINDS, "does not hold integers"))?;
                numbers.into_iter().map(kind).collect()
            }
        };
        for (key, length) in [(SCORES, scores.as_ref().map_or(tokens.len(), Vec::len)), (KINDS, kinds.len())]
        {
            if length != tokens.len() {
                return Err(Fault::key(key, format!("has {length} elements for {} tokens", tokens.len())));
            }
        }
        Ok(Self { tokens, kinds, scores, ids })
    }

    /// The id of the token with this text.
    pub fn id(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    /// The text of a token.
    pub fn text(&self, id: u32) -> Option<&str> {
        self.tokens.get(usize::try_from(id).ok()?).map(AsRef::as_ref)
    }

    /// The kind of a token.
    pub fn kind(&self, id: u32) -> Option<TokenKind> {
        self.kinds.get(usize::try_from(id).ok()?).copied()
    }

    /// The first token of a kind.
    pub fn first(&self, kind: TokenKind) -> Option<u32> {
        self.kinds.iter().position(|&other| other == kind).and_then(|id| u32::try_from(id).ok())
    }
}

fn kind(number: i64) -> TokenKind {
    match number {
        2 => TokenKind::Unknown,
        3 => TokenKind::Control,
        4 => TokenKind::UserDefined,
        5 => TokenKind::Unused,
        6 => TokenKind::Byte,
        _ => TokenKind::Normal,
    }
}
