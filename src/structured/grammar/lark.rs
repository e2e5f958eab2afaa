//! Pieces of Lark grammars: literal text, in which control tokens are tokens, and text up to a marker.

use crate::tokenizer::{TokenBytes, Tokenizer, TokenizerError};

/// A quoted text; the escapes are JSON's.
pub(super) fn literal(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Builds expressions, and the rules that they need.
pub(super) struct Text<'a> {
    tokenizer: &'a Tokenizer,
    /// Rules are named by number after it.
    prefix: &'static str,
    bytes: Vec<TokenBytes>,
    rules: Vec<String>,
}

/// A stretch of a marker.
enum Part {
    Token(u32),
    Literal(String),
}

impl<'a> Text<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer, prefix: &'static str) -> Result<Self, TokenizerError> {
        Ok(Self { tokenizer, prefix, bytes: tokenizer.vocabulary_bytes()?, rules: Vec::new() })
    }

    /// The rules that expressions refer to.
    pub(super) fn rules(&self) -> String {
        self.rules.join("\n")
    }

    /// Adds a rule; the expression that names it.
    pub(super) fn rule(&mut self, body: &str) -> String {
        let name = self.next_name();
        self.rules.push(format!("{name}: {body}"));
        name
    }

    fn next_name(&self) -> String {
        format!("{}_{}", self.prefix, self.rules.len())
    }

    /// This text.
    pub(super) fn exactly(&self, text: &str) -> String {
        let parts = self.parts(text).into_iter().map(|part| match part {
            Part::Token(id) => format!("<[{id}]>"),
            Part::Literal(text) => literal(&text),
        });
        parts.collect::<Vec<_>>().join(" ")
    }

    /// Any text, and the first `marker` after it.
    pub(super) fn until(&mut self, marker: &str) -> String {
        let mut parts = self.parts(marker).into_iter();
        let first = match parts.next() {
            Some(Part::Literal(text)) => {
                let name = self.next_name();
                self.rules.push(format!("{name}[suffix={}]: /(.|\\n)*/", literal(&text)));
                name
            }
            // A control token ends any text.
            Some(Part::Token(id)) => {
                let text = self.rule("/(.|\\n)*/");
                format!("{text} <[{id}]>")
            }
            None => return String::new(),
        };
        let rest = parts.map(|part| match part {
            Part::Token(id) => format!("<[{id}]>"),
            Part::Literal(text) => literal(&text),
        });
        std::iter::once(first).chain(rest).collect::<Vec<_>>().join(" ")
    }

    /// Control tokens of the vocabulary that occur in the text, and what stands between them.
    fn parts(&self, text: &str) -> Vec<Part> {
        let mut parts = Vec::new();
        let mut plain = String::new();
        let mut rest = text;
        while let Some(c) = rest.chars().next() {
            let token = self.special_at(rest);
            let (skipped, part) = match token {
                Some((id, length)) => (length, Some(Part::Token(id))),
                None => (c.len_utf8(), None),
            };
            match part {
                Some(part) => {
                    if !plain.is_empty() {
                        parts.push(Part::Literal(std::mem::take(&mut plain)));
                    }
                    parts.push(part);
                }
                None => plain.push(c),
            }
            rest = rest.get(skipped..).unwrap_or_default();
        }
        if !plain.is_empty() {
            parts.push(Part::Literal(plain));
        }
        parts
    }

    /// The control token that `text` begins with, and its length in bytes.
    fn special_at(&self, text: &str) -> Option<(u32, usize)> {
        let close = match text.chars().next()? {
            '<' => '>',
            '[' => ']',
            _ => return None,
        };
        let length = text.find(close)? + close.len_utf8();
        let id = self.tokenizer.token_to_id(text.get(..length)?)?;
        let special = matches!(self.bytes.get(id as usize), Some(TokenBytes::Special(_)));
        special.then_some((id, length))
    }
}
