//! The decode loop over the tokens of one sequence (`generate_step` of mlx-lm's generate.py): knows nothing about
//! text. The step itself is that of [`sequence`](super::sequence), which batches share.

use super::limits::Limits;
use super::sequence::{self, Sequence};
use crate::cache::LayerCache;
use crate::mlx::{self, Array, memory};
use crate::models::Model;
use crate::sampling::{PenaltyParams, RangeError, SamplingParams};
use crate::structured::grammar::{Grammar, GrammarError};

/// Prompt tokens fed at a time, unless asked otherwise.
pub const PREFILL_STEP_SIZE: usize = 2048;

/// Packing of the key-value cache while generating.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KvQuantization {
    /// Bits a value.
    pub bits: u8,
    /// Values that share a scale; must divide the head dimension.
    pub group_size: u32,
    /// Positions a layer holds before it is packed.
    pub start: i32,
}

/// What a token-level generation is told.
#[derive(Clone, Debug)]
pub struct StepOptions {
    /// Tokens to generate; `None` for no limit.
    pub max_tokens: Option<usize>,
    /// How to choose tokens.
    pub sampling: SamplingParams,
    /// What to do to logits first.
    pub penalties: PenaltyParams,
    /// Seed of the draws; drawn from the clock when absent.
    pub seed: Option<u64>,
    /// Prompt tokens fed at a time, at least 1.
    pub prefill_step_size: usize,
    /// Packing of the cache.
    pub kv_quantization: Option<KvQuantization>,
    /// What the tokens must follow.
    pub grammar: Option<Grammar>,
}

impl Default for StepOptions {
    fn default() -> Self {
        Self {
            max_tokens: Some(256),
            sampling: SamplingParams::default(),
            penalties: PenaltyParams::default(),
            seed: None,
            prefill_step_size: PREFILL_STEP_SIZE,
            kv_quantization: None,
            grammar: None,
        }
    }
}

/// Why a generation cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// MLX failed.
    #[error(transparent)]
    Mlx(#[from] mlx::Error),
    /// A sampling parameter outside its range.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// The grammar cannot be followed.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// Nothing to continue from.
    #[error("the prompt is empty; generation needs at least one token")]
    EmptyPrompt,
    /// The prompt holds an id the model has no row for.
    #[error(
        "token {id} of the prompt is outside the model's vocabulary of {vocab_size}; the tokenizer and the model do not belong together"
    )]
    UnknownToken {
        /// The id.
        id: u32,
        /// Rows of the embedding.
        vocab_size: usize,
    },
    /// A bias for an id the model has no logit for.
    #[error("logit_bias names token {id}, but the vocabulary has {vocab_size}")]
    BiasedToken {
        /// The id.
        id: u32,
        /// Logits at a position.
        vocab_size: usize,
    },
    /// A chunk size of zero would never finish.
    #[error("the prefill step size must be at least 1")]
    PrefillStep,
    /// The group does not divide the head dimension.
    #[error(
        "a quantized KV cache with group size {group_size} needs a head dimension that it divides; this model's is \
         {head_dim} (try {suggestion})"
    )]
    KvGroup {
        /// The group size asked for.
        group_size: u32,
        /// Features a head.
        head_dim: i32,
        /// What would work.
        suggestion: &'static str,
    },
    /// Logits that are not numbers.
    #[error("the model's logits are NaN; its weights or its quantization are broken")]
    NanLogits,
    /// Logits that stopped being numbers under the request's penalties.
    #[error("the logits are NaN after the request's penalties and logit_bias; make them milder")]
    NanPenalties,
}

/// Called with prompt tokens done and in total; `Break` stops the prefill. On a CPU it is also called between the
/// layers of a chunk, with the count unchanged: a chunk may take a minute there.
pub type Progress<'a> = &'a mut dyn FnMut(usize, usize) -> ControlFlow;

/// Whether to go on.
pub type ControlFlow = std::ops::ControlFlow<()>;

/// One generated token.
pub struct Step {
    /// Its id.
    pub token: u32,
    /// Log-probabilities of the whole vocabulary, `[V]`, after processors, before the sampler's filters.
    pub logprobs: Array,
    /// The grammar is complete and nothing can follow: this is the last token.
    pub is_last: bool,
}

/// A generation in progress over one model and its caches.
pub struct TokenGenerator<'a> {
    model: &'a dyn Model,
    /// Where the caches return to.
    home: &'a mut Vec<LayerCache>,
    sequence: Sequence,
    prefill_step_size: usize,
    begun: bool,
}

/// The step in flight is finished first: MLX's thread would otherwise run into the end of the process, or write into
/// caches that somebody else goes on with.
impl Drop for TokenGenerator<'_> {
    fn drop(&mut self) {
        // An error here is one that nobody is left to be told of.
        let _ = mlx::synchronize();
        *self.home = self.sequence.take_caches().unwrap_or_default();
    }
}

impl<'a> TokenGenerator<'a> {
    /// Prepares a generation that continues `caches` with `prompt`. Computes nothing yet.
    ///
    /// # Errors
    /// See [`StepError`]; everything that can be wrong with the request is found here.
    pub fn new(
        model: &'a dyn Model,
        caches: &'a mut Vec<LayerCache>,
        prompt: &[u32],
        options: &StepOptions,
    ) -> Result<Self, StepError> {
        options.validate(prompt, &Limits::of(model))?;
        let sequence = Sequence::new(model, std::mem::take(caches), prompt, options)?;
        let prefill_step_size = options.prefill_step_size;
        Ok(Self { model, home: caches, sequence, prefill_step_size, begun: false })
    }

    /// Feeds the prompt and starts the first step. Returns `Break` when `progress` asked to stop.
    ///
    /// # Errors
    /// MLX's and the grammar's.
    pub fn prefill(&mut self, progress: Progress) -> Result<ControlFlow, StepError> {
        self.begun = true;
        let sequence = &mut self.sequence;
        let total = sequence.unfed() + 1;
        let mut done = 0;
        if progress(done, total).is_break() {
            return Ok(ControlFlow::Break(()));
        }
        while sequence.unfed() > 0 {
            let poll = &mut || progress(done, total);
            if sequence.feed(self.model, self.prefill_step_size, poll)?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
            done = total - 1 - sequence.unfed();
            if progress(done, total).is_break() {
                return Ok(ControlFlow::Break(()));
            }
            memory::clear_cache()?;
        }
        sequence.start(self.model)?;
        Ok(ControlFlow::Continue(()))
    }

    /// The next token; `None` once `max_tokens` were generated. Feeds the prompt first if that was not done.
    ///
    /// # Errors
    /// MLX's and the grammar's, and logits that are not numbers.
    #[allow(clippy::should_implement_trait)] // fallible, and lending would not fit `Iterator`
    pub fn next(&mut self) -> Result<Option<Step>, StepError> {
        if !self.begun {
            let _ = self.prefill(&mut |_, _| ControlFlow::Continue(()))?;
        }
        sequence::step(self.model, &mut [&mut self.sequence]).pop().unwrap_or(Ok(None))
    }
}
