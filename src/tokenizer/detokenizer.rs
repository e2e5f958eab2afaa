//! Streaming detokenizer: ids in, text that is safe to show out.

use std::sync::Arc;

use super::decoder::Pipeline;

/// Turns one sequence's ids into text as they are generated.
///
/// What [`take_segment`](Self::take_segment) and [`finish`](Self::finish) return, joined, equals
/// [`Tokenizer::decode`](super::Tokenizer::decode) of all ids with special tokens kept, for any ids and any
/// decoder: no character is split, no space eaten or doubled. Ids outside the vocabulary (models pad
/// theirs) give no text. One detokenizer serves one sequence: those of a batch share only the vocabulary.
///
/// Text is held back only while later tokens can still change it: the bytes of an unfinished character, a
/// run of byte-fallback tokens until the token after it.
#[derive(Clone)]
pub struct Detokenizer {
    vocabulary: Arc<tokenizers::Tokenizer>,
    start: Arc<Pipeline>,
    pipeline: Pipeline,
    segment: String,
}

impl Detokenizer {
    pub(super) fn new(vocabulary: Arc<tokenizers::Tokenizer>, start: Arc<Pipeline>) -> Self {
        let pipeline = Pipeline::clone(&start);
        Self { vocabulary, start, pipeline, segment: String::new() }
    }

    /// Consumes one token id.
    pub fn add_token(&mut self, id: u32) {
        if let Some(token) = self.vocabulary.id_to_token(id) {
            self.pipeline.push(token, &mut self.segment);
        }
    }

    /// The text that became certain since the last call; empty while a character is unfinished.
    pub fn take_segment(&mut self) -> String {
        std::mem::take(&mut self.segment)
    }

    /// Ends the sequence: the text not yet taken and what was held back, with U+FFFD for an unfinished
    /// character. The detokenizer is then ready for another sequence.
    pub fn finish(&mut self) -> String {
        self.pipeline.finish(&mut self.segment);
        self.pipeline = Pipeline::clone(&self.start);
        self.take_segment()
    }
}

impl std::fmt::Debug for Detokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Detokenizer").field("segment", &self.segment).finish_non_exhaustive()
    }
}
