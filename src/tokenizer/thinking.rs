//! Markers of reasoning, recognised by the vocabulary (mlx_lm/tokenizer_utils.py, `_infer_thinking`).

use super::{Tokenizer, TokenizerError};

/// Pairs that are single tokens.
const SINGLE_TOKENS: [(&str, &str); 3] =
    [("<think>", "</think>"), ("<longcat_think>", "</longcat_think>"), ("<|think:start|>", "<|think:end|>")];

/// Pairs of several tokens, with the tokens that the vocabulary must have.
const SEVERAL_TOKENS: [(&[&str], &str, &str); 2] = [
    (&["<|channel>", "<channel|>"], "<|channel>thought", "<channel|>"),
    (
        &["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"],
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
    ),
];

/// What opens and closes a model's reasoning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Thinking {
    /// The opening text.
    pub start: String,
    /// The closing text.
    pub end: String,
    /// Ids of the opening text.
    pub start_tokens: Vec<u32>,
    /// Ids of the closing text.
    pub end_tokens: Vec<u32>,
}

impl Thinking {
    /// The first pair that the vocabulary has.
    pub(super) fn infer(tokenizer: &Tokenizer) -> Result<Option<Self>, TokenizerError> {
        for (start, end) in SINGLE_TOKENS {
            if let (Some(start_id), Some(end_id)) = (tokenizer.token_to_id(start), tokenizer.token_to_id(end))
            {
                return Ok(Some(Self::new(start, end, vec![start_id], vec![end_id])));
            }
        }
        for (needed, start, end) in SEVERAL_TOKENS {
            if needed.iter().all(|token| tokenizer.token_to_id(token).is_some()) {
                let (start_tokens, end_tokens) =
                    (tokenizer.encode(start, false)?, tokenizer.encode(end, false)?);
                return Ok(Some(Self::new(start, end, start_tokens, end_tokens)));
            }
        }
        Ok(None)
    }

    /// Whether a prompt ends inside reasoning: its last opening tag comes after its last closing one
    /// (mlx_lm/server.py, `_tokenize`).
    pub fn is_open(&self, prompt: &[u32]) -> bool {
        let last = |tag: &[u32]| match tag.len() {
            0 => None,
            length => prompt.windows(length).rposition(|window| window == tag),
        };
        last(&self.start_tokens) > last(&self.end_tokens)
    }

    fn new(start: &str, end: &str, start_tokens: Vec<u32>, end_tokens: Vec<u32>) -> Self {
        Self { start: start.to_owned(), end: end.to_owned(), start_tokens, end_tokens }
    }
}
