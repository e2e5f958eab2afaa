//! Text to token ids and back: Hugging Face tokenizers with what mlx-lm and transformers put around them.

mod bound;
pub mod chat_template;
mod class;
mod decoder;
mod detokenizer;
mod error;
mod guard;
mod load;
mod special;
mod thinking;
mod vocabulary_bytes;

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::Value;

pub use bound::TextBound;
use decoder::Pipeline;
pub use detokenizer::Detokenizer;
pub use error::TokenizerError;
use guard::guard;
pub use load::TokenizerParts;
pub use special::SpecialTokens;
pub use thinking::Thinking;
pub use vocabulary_bytes::TokenBytes;

/// A model's tokenizer.
///
/// It encodes and decodes as `AutoTokenizer` of transformers 5 does for the same files (a tokenizer.json is
/// needed), and keeps the set of tokens that end a generation, as mlx-lm's `TokenizerWrapper`. Cloning is
/// cheap for the vocabulary and copies the rest.
#[derive(Clone)]
pub struct Tokenizer {
    vocabulary: Arc<tokenizers::Tokenizer>,
    decoder: Arc<Pipeline>,
    special: SpecialTokens,
    eos_token_ids: BTreeSet<u32>,
    thinking: Option<Thinking>,
    config: Value,
}

impl Tokenizer {
    /// The ids of `text`. Special tokens written in the text become their ids either way;
    /// `add_special_tokens` says whether the tokenizer adds its own around it (a bos, say). A rendered chat
    /// template already holds its specials: encode it with false.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TokenizerError> {
        match guard(|| self.vocabulary.encode_fast(text, add_special_tokens)) {
            Some(Ok(encoding)) => Ok(encoding.get_ids().to_vec()),
            Some(Err(error)) => Err(TokenizerError::Encode(error.to_string())),
            None => Err(TokenizerError::Encode(
                "a part of tokenizer.json (normalizer, split pattern, model or template) breaks down on it"
                    .to_owned(),
            )),
        }
    }

    /// The ids of a prompt written by hand: special tokens are added unless the text starts with the bos
    /// token (mlx_lm/generate.py, `stream_generate`), and a doubled bos is reduced to one.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let has_bos = self.bos_token().is_some_and(|bos| text.starts_with(bos));
        let mut ids = self.encode(text, !has_bos)?;
        if let Some(bos) = self.bos_id() {
            let doubled = ids.iter().take_while(|&&id| id == bos).count().saturating_sub(1);
            ids.drain(..doubled);
        }
        Ok(ids)
    }

    /// The text of `ids`, with or without special tokens. Ids outside the vocabulary give no text.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> String {
        let mut pipeline = Pipeline::clone(&self.decoder);
        let mut text = String::new();
        for token in ids.iter().filter_map(|&id| self.vocabulary.id_to_token(id)) {
            if !(skip_special_tokens && self.vocabulary.get_added_vocabulary().is_special_token(&token)) {
                pipeline.push(token, &mut text);
            }
        }
        pipeline.finish(&mut text);
        text
    }

    /// A detokenizer for one sequence. Cheap: the vocabulary is shared.
    pub fn detokenizer(&self) -> Detokenizer {
        Detokenizer::new(Arc::clone(&self.vocabulary), Arc::clone(&self.decoder))
    }

    /// The id of exactly this token, added tokens included.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.vocabulary.token_to_id(token)
    }

    /// The token as the vocabulary spells it (`Ġthe`, `▁the`, `<0x0A>`), not its text.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.vocabulary.id_to_token(id)
    }

    /// The bytes of text that a token stands for in the middle of a text: ` the` for `Ġthe`, one byte of a
    /// character for some. Empty for an id outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        self.vocabulary.id_to_token(id).map(|token| self.decoder.bytes_of(token)).unwrap_or_default()
    }

    /// How many tokens there are, added tokens included. A model's embedding may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.vocabulary.get_vocab_size(true)
    }

    /// The special tokens by role.
    pub fn special_tokens(&self) -> &SpecialTokens {
        &self.special
    }

    /// The token that begins a sequence, as the files name it.
    pub fn bos_token(&self) -> Option<&str> {
        self.special.get("bos_token")
    }

    /// The token that ends a sequence, as the files name it.
    pub fn eos_token(&self) -> Option<&str> {
        self.special.get("eos_token")
    }

    /// Id of [`bos_token`](Self::bos_token).
    pub fn bos_id(&self) -> Option<u32> {
        self.special_id("bos_token")
    }

    /// Id of [`eos_token`](Self::eos_token).
    pub fn eos_id(&self) -> Option<u32> {
        self.special_id("eos_token")
    }

    /// Id of the padding token.
    pub fn pad_id(&self) -> Option<u32> {
        self.special_id("pad_token")
    }

    /// Id of the token for text outside the vocabulary.
    pub fn unk_id(&self) -> Option<u32> {
        self.special_id("unk_token")
    }

    fn special_id(&self, role: &str) -> Option<u32> {
        self.token_to_id(self.special.get(role)?)
    }

    /// The ids that end a generation: the tokenizer's eos and what was added.
    pub fn eos_token_ids(&self) -> &BTreeSet<u32> {
        &self.eos_token_ids
    }

    /// Adds the `eos_token_id`s of config.json or generation_config.json.
    pub fn extend_eos_token_ids(&mut self, ids: impl IntoIterator<Item = u32>) {
        self.eos_token_ids.extend(ids);
    }

    /// Adds a token that ends a generation, given as an id or as a token (mlx_lm/tokenizer_utils.py,
    /// `TokenizerWrapper.add_eos_token`). A token that does not exist is an error; mlx-lm takes the unknown
    /// token for it.
    pub fn add_eos_token(&mut self, token: &str) -> Result<(), TokenizerError> {
        let id = match token.trim().parse() {
            Ok(id) => id,
            Err(_) => {
                self.token_to_id(token).ok_or_else(|| TokenizerError::UnknownToken(token.to_owned()))?
            }
        };
        self.eos_token_ids.insert(id);
        Ok(())
    }

    /// The markers around the model's reasoning, if its vocabulary has such.
    pub fn thinking(&self) -> Option<&Thinking> {
        self.thinking.as_ref()
    }

    /// Whether the model can reason before it answers.
    pub fn has_thinking(&self) -> bool {
        self.thinking.is_some()
    }

    /// The text that opens reasoning.
    pub fn think_start(&self) -> Option<&str> {
        self.thinking.as_ref().map(|thinking| thinking.start.as_str())
    }

    /// The text that closes reasoning.
    pub fn think_end(&self) -> Option<&str> {
        self.thinking.as_ref().map(|thinking| thinking.end.as_str())
    }

    /// tokenizer_config.json, an empty object without one.
    pub fn config(&self) -> &Value {
        &self.config
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("special", &self.special)
            .field("eos_token_ids", &self.eos_token_ids)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
