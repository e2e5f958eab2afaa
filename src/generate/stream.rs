//! Text from a model: the token loop, decoded, cut at stop strings, measured (`stream_generate` of generate.py).

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::limits::Limits;
use super::step::{ControlFlow, Progress, Step, StepError, StepOptions, TokenGenerator};
use super::stop::{StopError, StopMatcher};
use crate::cache::LayerCache;
use crate::mlx::{self, Array, memory};
use crate::models::Model;
use crate::tokenizer::{Detokenizer, Tokenizer};

/// Why a reply ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end-of-sequence token, a stop string, or the end of the grammar.
    Stop,
    /// `max_tokens`.
    Length,
    /// The caller asked to stop.
    Cancelled,
}

impl FinishReason {
    /// The word clients know.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
        }
    }
}

/// What a text-level generation is told.
#[derive(Clone, Debug, Default)]
pub struct StreamOptions {
    /// The token level.
    pub step: StepOptions,
    /// Text that ends the reply and does not belong to it.
    pub stop: Vec<String>,
    /// End-of-sequence ids; the tokenizer's own when `None`.
    pub eos_token_ids: Option<BTreeSet<u32>>,
    /// Log-probabilities to report a token: how many of the most likely; 0 reports the token's own only.
    pub logprobs: Option<usize>,
}

/// Log-probabilities at one position, after processors and before the sampler's filters.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// The chosen token's.
    pub logprob: f32,
    /// The most likely tokens, best first.
    pub top: Vec<(u32, f32)>,
}

/// A piece of a reply.
#[derive(Clone, Debug, PartialEq)]
pub struct Chunk {
    /// Text that became certain; may be empty while a character or a possible stop string is incomplete.
    pub text: String,
    /// The token that was generated; `None` for the text released at the end.
    pub token: Option<u32>,
    /// When asked for.
    pub logprobs: Option<TokenLogprobs>,
}

/// Counts and times with mlx-lm's clock boundaries.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    /// Tokens of the prompt that were fed.
    pub prompt_tokens: usize,
    /// From the start to the first token, in which the step after it was also dispatched.
    pub prompt_time: Duration,
    /// Tokens generated, an end-of-sequence token included.
    pub generation_tokens: usize,
    /// From the first token to the last.
    pub generation_time: Duration,
    /// Most bytes that MLX held at once.
    pub peak_memory: usize,
}

impl Stats {
    /// Prompt tokens a second.
    pub fn prompt_tps(&self) -> f64 {
        rate(self.prompt_tokens, self.prompt_time)
    }

    /// Generated tokens a second.
    pub fn generation_tps(&self) -> f64 {
        rate(self.generation_tokens, self.generation_time)
    }
}

fn rate(count: usize, time: Duration) -> f64 {
    let seconds = time.as_secs_f64();
    if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
}

/// Why a reply cannot be produced.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// The token level failed.
    #[error(transparent)]
    Step(#[from] StepError),
    /// A stop string that cannot be matched.
    #[error(transparent)]
    Stop(#[from] StopError),
    /// MLX failed.
    #[error(transparent)]
    Mlx(#[from] mlx::Error),
    /// `max_tokens` of zero.
    #[error("max_tokens must not be 0 (use -1 for no limit)")]
    NoTokens,
    /// More tokens than the model was trained for.
    #[error("the prompt has {prompt} tokens, but the model's context is {context}; shorten the prompt")]
    ContextLength {
        /// Tokens of the prompt, those already cached included.
        prompt: usize,
        /// `max_position_embeddings`.
        context: usize,
    },
}

/// Refuses a prompt of more tokens than the model was trained for; nothing is ever cut off silently.
///
/// # Errors
/// [`StreamError::ContextLength`].
pub fn check_context(model: &dyn Model, prompt: usize) -> Result<(), StreamError> {
    Limits::of(model).check_context(prompt)
}

/// The text of one reply as its tokens come: decoded, cut at stop strings, measured. Knows no model.
pub struct Reply {
    detokenizer: Detokenizer,
    stop: StopMatcher,
    eos_token_ids: BTreeSet<u32>,
    logprobs: Option<usize>,
    max_tokens: Option<usize>,
    stats: Stats,
    clock: Option<Instant>,
    finish: Option<FinishReason>,
    drained: bool,
}

impl Reply {
    /// A reply to a prompt of which `fed` tokens are computed.
    ///
    /// # Errors
    /// A stop string that cannot be matched.
    pub fn new(tokenizer: &Tokenizer, fed: usize, options: &StreamOptions) -> Result<Self, StreamError> {
        Ok(Self {
            detokenizer: tokenizer.detokenizer(),
            stop: StopMatcher::new(options.stop.iter().cloned())?,
            eos_token_ids: options.eos_token_ids.clone().unwrap_or_else(|| tokenizer.eos_token_ids().clone()),
            logprobs: options.logprobs,
            max_tokens: options.step.max_tokens,
            stats: Stats { prompt_tokens: fed, ..Stats::default() },
            clock: None,
            finish: None,
            drained: false,
        })
    }

    /// The prompt is going to be fed.
    pub fn begin(&mut self) {
        self.clock = Some(Instant::now());
    }

    /// Ends the reply: what was held back comes out with [`finish`](Self::finish).
    pub fn cancel(&mut self) {
        self.finish.get_or_insert(FinishReason::Cancelled);
    }

    /// Takes a step's token, or the end of the tokens, and returns the text that became certain.
    ///
    /// # Errors
    /// MLX's.
    pub fn push(&mut self, step: Option<Step>) -> Result<Chunk, StreamError> {
        let Some(step) = step else {
            self.finish.get_or_insert(FinishReason::Length);
            return Ok(self.finish(None, None));
        };
        self.count_token()?;
        if self.eos_token_ids.contains(&step.token) {
            self.finish = Some(FinishReason::Stop);
            return Ok(self.finish(None, None));
        }
        let logprobs = match self.logprobs {
            Some(top) => Some(read_logprobs(&step.logprobs, step.token, top)?),
            None => None,
        };
        self.detokenizer.add_token(step.token);
        if step.is_last {
            self.finish = Some(FinishReason::Stop);
            return Ok(self.finish(Some(step.token), logprobs));
        }
        if self.max_tokens == Some(self.stats.generation_tokens) {
            self.finish = Some(FinishReason::Length);
            return Ok(self.finish(Some(step.token), logprobs));
        }
        let event = self.stop.push(&self.detokenizer.take_segment());
        if event.stopped.is_some() {
            self.finish = Some(FinishReason::Stop);
            self.drained = true;
        }
        Ok(Chunk { text: event.text, token: Some(step.token), logprobs })
    }

    /// Releases what the detokenizer and the stop matcher hold back; there is nothing after that.
    pub fn finish(&mut self, token: Option<u32>, logprobs: Option<TokenLogprobs>) -> Chunk {
        self.drained = true;
        let tail = self.detokenizer.finish();
        let mut event = self.stop.push(&tail);
        if event.stopped.is_none() {
            let rest = self.stop.finish();
            event.text.push_str(&rest.text);
            event.stopped = rest.stopped;
        }
        if event.stopped.is_some() {
            self.finish = Some(FinishReason::Stop);
        }
        Chunk { text: event.text, token, logprobs }
    }

    /// Counts and times so far.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Why the reply ended; `None` while it has not.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.finish
    }

    /// Whether its last chunk was returned.
    pub fn is_complete(&self) -> bool {
        self.drained
    }

    /// The stop string that ended it.
    pub fn matched_stop(&self) -> Option<&str> {
        self.stop.matched()
    }

    fn count_token(&mut self) -> Result<(), StreamError> {
        let since = self.clock.map(|clock| clock.elapsed()).unwrap_or_default();
        if self.stats.generation_tokens == 0 {
            self.stats.prompt_time = since;
            self.clock = Some(Instant::now());
        } else {
            self.stats.generation_time = since;
        }
        self.stats.generation_tokens += 1;
        self.stats.peak_memory = memory::peak()?;
        Ok(())
    }
}

/// A reply in progress.
pub struct TextGenerator<'a> {
    tokens: TokenGenerator<'a>,
    reply: Reply,
    begun: bool,
}

impl<'a> TextGenerator<'a> {
    /// Prepares a reply to `prompt`, token ids that follow what `caches` hold. Computes nothing yet.
    ///
    /// # Errors
    /// Everything that can be wrong with the request.
    pub fn new(
        model: &'a dyn Model,
        tokenizer: &Tokenizer,
        caches: &'a mut Vec<LayerCache>,
        prompt: &[u32],
        options: &StreamOptions,
    ) -> Result<Self, StreamError> {
        let cached = caches.first().map_or(0, |cache| cache.offset().max(0) as usize);
        options.validate(cached + prompt.len(), &Limits::of(model))?;
        let reply = Reply::new(tokenizer, prompt.len(), options)?;
        Ok(Self { tokens: TokenGenerator::new(model, caches, prompt, &options.step)?, reply, begun: false })
    }

    /// Feeds the prompt; `progress` may break off, which ends the reply as cancelled.
    ///
    /// # Errors
    /// MLX's and the grammar's.
    pub fn prefill(&mut self, progress: Progress) -> Result<(), StreamError> {
        self.begun = true;
        self.reply.begin();
        if let ControlFlow::Break(()) = self.tokens.prefill(progress)? {
            self.cancel();
        }
        Ok(())
    }

    /// Ends the reply: what was held back comes out with the next [`TextGenerator::next`].
    pub fn cancel(&mut self) {
        self.reply.cancel();
    }

    /// The next piece; `None` after the last.
    ///
    /// # Errors
    /// MLX's and the grammar's, and logits that are not numbers.
    #[allow(clippy::should_implement_trait)] // fallible, and lending would not fit `Iterator`
    pub fn next(&mut self) -> Result<Option<Chunk>, StreamError> {
        if self.reply.is_complete() {
            return Ok(None);
        }
        if self.reply.finish_reason().is_none() && !self.begun {
            self.prefill(&mut |_, _| ControlFlow::Continue(()))?;
        }
        if self.reply.finish_reason().is_some() {
            return Ok(Some(self.reply.finish(None, None)));
        }
        let step = self.tokens.next()?;
        self.reply.push(step).map(Some)
    }

    /// Counts and times so far.
    pub fn stats(&self) -> Stats {
        self.reply.stats()
    }

    /// The stop string that ended it.
    pub fn matched_stop(&self) -> Option<&str> {
        self.reply.matched_stop()
    }

    /// Why the reply ended; `None` while it has not.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.reply.finish_reason()
    }
}

/// Reads the chosen token's log-probability and those of the `top` most likely from `[V]`.
fn read_logprobs(logprobs: &Array, token: u32, top: usize) -> Result<TokenLogprobs, mlx::Error> {
    let values = logprobs.to_f32_vec()?;
    let mut ranked: Vec<(u32, f32)> = (0u32..).zip(values.iter().copied()).collect();
    let top = top.min(ranked.len());
    let descending = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    if top > 0 {
        ranked.select_nth_unstable_by(top - 1, descending);
    }
    ranked.truncate(top);
    ranked.sort_by(descending);
    Ok(TokenLogprobs { logprob: values.get(token as usize).copied().unwrap_or(f32::NAN), top: ranked })
}
