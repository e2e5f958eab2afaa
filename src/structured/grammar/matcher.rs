//! A grammar at work on one reply.

use super::{GrammarError, reason};

/// What of a grammar is still to come, after the tokens so far.
///
/// ```text
/// loop: mask = matcher.mask()  ->  choose a token that it allows  ->  matcher.advance(token)
///       until matcher.is_finished()
/// ```
pub struct Matcher {
    inner: llguidance::Matcher,
    /// Rows of the model's output, at least as many as the tokenizer has ids.
    vocab_size: usize,
}

impl Matcher {
    pub(super) fn new(inner: llguidance::Matcher, vocab_size: usize) -> Self {
        Self { inner, vocab_size }
    }

    /// Which tokens may follow, a bit an id, the lowest first, in `ceil(vocab_size / 32)` words. Ids beyond the
    /// tokenizer's are never allowed. Once the grammar is finished, only the ids that end a reply are.
    ///
    /// # Errors
    /// The grammar is too much work here, or no token can follow.
    pub fn mask(&mut self) -> Result<Vec<u32>, GrammarError> {
        let allowed = self.inner.compute_mask_or_eos().map_err(failed)?;
        let mut words = allowed.as_slice().to_vec();
        words.resize(self.vocab_size.div_ceil(32), 0);
        let used = self.vocab_size % 32;
        if let Some(last) = words.last_mut().filter(|_| used > 0) {
            *last &= (1 << used) - 1;
        }
        if words.iter().all(|&word| word == 0) {
            return Err(GrammarError::Matcher("no token of the vocabulary continues the text".to_owned()));
        }
        Ok(words)
    }

    /// Takes the token that was chosen.
    ///
    /// # Errors
    /// The token was not allowed.
    pub fn advance(&mut self, token: u32) -> Result<(), GrammarError> {
        self.inner.consume_token(token).map_err(failed)
    }

    /// How many of the tokens the grammar allows, in a row from here. The matcher stays where it is.
    pub fn accepted(&mut self, tokens: &[u32]) -> Result<usize, GrammarError> {
        self.inner.validate_tokens(tokens).map_err(failed)
    }

    /// Takes back the last tokens, as when a draft is refused.
    ///
    /// # Errors
    /// There were fewer.
    pub fn rollback(&mut self, tokens: usize) -> Result<(), GrammarError> {
        self.inner.rollback(tokens).map_err(failed)
    }

    /// Whether the reply may end here.
    pub fn is_accepting(&mut self) -> Result<bool, GrammarError> {
        self.inner.is_accepting().map_err(failed)
    }

    /// Whether the reply must end here: the text is complete and nothing can be added.
    pub fn is_finished(&self) -> bool {
        self.inner.is_stopped()
    }

    /// The tokens that must follow whatever the model says, as the tokenizer spells the text that must follow; empty
    /// where there is a choice, and for tokenizers that cannot spell a text without its beginning.
    pub fn forced_tokens(&mut self) -> Vec<u32> {
        self.inner.compute_ff_tokens()
    }

    /// The bytes that must follow.
    pub fn forced_bytes(&mut self) -> Vec<u8> {
        self.inner.compute_ff_bytes()
    }
}

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matcher").field("vocab_size", &self.vocab_size).finish_non_exhaustive()
    }
}

fn failed(error: impl std::fmt::Display) -> GrammarError {
    GrammarError::Matcher(reason(&error.to_string()))
}
