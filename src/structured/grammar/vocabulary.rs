//! A tokenizer as llguidance sees it: a trie of the tokens' bytes.

use std::panic::{AssertUnwindSafe, catch_unwind};

use llguidance::toktrie::{TokRxInfo, TokTrie, TokenId, TokenizerEnv};

use super::GrammarError;
use crate::tokenizer::{TokenBytes, Tokenizer};

/// Tokens of more bytes do not fit the trie, and no reply needs them.
const LONGEST_TOKEN: usize = 512;

/// The tokens of a model.
pub(super) struct Vocabulary {
    trie: TokTrie,
    tokenizer: Tokenizer,
    canonical: bool,
}

impl Vocabulary {
    pub(super) fn new(tokenizer: &Tokenizer) -> Result<Self, GrammarError> {
        let words: Vec<Vec<u8>> = tokenizer
            .vocabulary_bytes()?
            .into_iter()
            .map(|token| match token {
                TokenBytes::Text(bytes) if bytes.len() <= LONGEST_TOKEN => bytes,
                TokenBytes::Special(name) if name.len() < LONGEST_TOKEN => {
                    std::iter::once(TokTrie::SPECIAL_TOKEN_MARKER).chain(name.into_bytes()).collect()
                }
                _ => Vec::new(),
            })
            .collect();
        let size = u32::try_from(words.len()).map_err(GrammarError::invalid)?;
        let ends: Vec<TokenId> = tokenizer.eos_token_ids().iter().copied().filter(|&id| id < size).collect();
        let &first = ends.first().ok_or(GrammarError::NoEndOfSequence)?;
        // The trie checks itself by assertions.
        let build = || TokTrie::from(&TokRxInfo::new(size, first), &words).with_eos_tokens(&ends);
        let trie = catch_unwind(AssertUnwindSafe(build))
            .map_err(|_| GrammarError::Invalid("the vocabulary is too large".to_owned()))?;
        Ok(Self { trie, tokenizer: tokenizer.clone(), canonical: tokenizer.encodes_bytes() })
    }
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let encode = |text: &str| self.tokenizer.encode(text, false).ok();
        let ids = std::str::from_utf8(bytes).ok().filter(|_| self.canonical).and_then(encode);
        // A normalizer may have changed the text.
        ids.filter(|ids| self.trie.decode_raw(ids) == bytes)
            .unwrap_or_else(|| self.trie.greedy_tokenize(bytes))
    }

    fn tokenize_is_canonical(&self) -> bool {
        self.canonical
    }
}
