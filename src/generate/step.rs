//! The decode loop over tokens (`generate_step` of mlx-lm's generate.py): knows nothing about text.
//!
//! The prompt is fed in chunks up to its last token; that one is a step of its own, so that every step has the
//! same shape. One step is always in flight: the next token is being computed while the current one is read. With a
//! grammar the next step waits for the current token, and its mask is computed while the device computes its logits.

use crate::cache::{LayerCache, maybe_quantize};
use crate::mlx::cpu_ops::{self, Kernels, in_prefill};
use crate::mlx::random::RandomState;
use crate::mlx::{self, Array, DeviceKind, Dtype, memory};
use crate::models::Model;
use crate::sampling::{LogitsProcessors, PenaltyParams, RangeError, Sampler, SamplingParams, mask};
use crate::structured::grammar::{Grammar, GrammarError, Matcher};

/// Prompt tokens fed at a time, unless asked otherwise.
pub const PREFILL_STEP_SIZE: usize = 2048;

/// Steps between returns of the allocator's spare memory.
const CLEAR_CACHE_EVERY: usize = 256;

/// Packing of the key-value cache while generating.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
        vocab_size: i32,
    },
    /// A bias for an id the model has no logit for.
    #[error("logit_bias names token {id}, but the vocabulary has {vocab_size}")]
    BiasedToken {
        /// The id.
        id: u32,
        /// Logits at a position.
        vocab_size: i32,
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
    caches: &'a mut Vec<LayerCache>,
    sampler: Sampler,
    processors: Option<LogitsProcessors>,
    matcher: Option<Matcher>,
    rng: RandomState,
    max_tokens: Option<usize>,
    kv_quantization: Option<KvQuantization>,
    prefill_step_size: usize,
    /// Prompt tokens not fed yet; empty once generation has begun.
    pending: Vec<u32>,
    /// Ours, where the model's are.
    kernels: Option<Kernels>,
    /// The step in flight: its token and log-probabilities.
    in_flight: Option<(Array, Array)>,
    generated: usize,
}

/// The step in flight is finished first: MLX's thread would otherwise run into the end of the process, or write into
/// caches that somebody else goes on with.
impl Drop for TokenGenerator<'_> {
    fn drop(&mut self) {
        // An error here is one that nobody is left to be told of.
        let _ = mlx::synchronize();
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
        options.sampling.validate()?;
        options.penalties.validate()?;
        let vocab_size = model.vocab_size();
        if prompt.is_empty() {
            return Err(StepError::EmptyPrompt);
        }
        let unknown = |id: &u32| i64::from(*id) >= i64::from(vocab_size);
        if let Some(&id) = prompt.iter().find(|id| unknown(id)) {
            return Err(StepError::UnknownToken { id, vocab_size });
        }
        if let Some(&(id, _)) = options.penalties.logit_bias.iter().find(|(id, _)| unknown(id)) {
            return Err(StepError::BiasedToken { id, vocab_size });
        }
        if options.prefill_step_size == 0 {
            return Err(StepError::PrefillStep);
        }
        if let Some(KvQuantization { group_size, .. }) = options.kv_quantization {
            check_kv_group(group_size, model.head_dim())?;
        }
        Ok(Self {
            model,
            caches,
            sampler: Sampler::new(&options.sampling, vocab_size)?,
            processors: LogitsProcessors::new(&options.penalties, vocab_size)?,
            matcher: options
                .grammar
                .as_ref()
                .map(|grammar| grammar.matcher(usize::try_from(vocab_size).unwrap_or(0))),
            rng: match options.seed {
                Some(seed) => RandomState::from_seed(seed)?,
                None => RandomState::from_clock()?,
            },
            max_tokens: options.max_tokens,
            kv_quantization: options.kv_quantization,
            prefill_step_size: options.prefill_step_size,
            pending: prompt.to_vec(),
            kernels: cpu_ops::kernels(),
            in_flight: None,
            generated: 0,
        })
    }

    /// Feeds the prompt and starts the first step. Returns `Break` when `progress` asked to stop.
    pub fn prefill(&mut self, progress: Progress) -> Result<ControlFlow, StepError> {
        let prompt = std::mem::take(&mut self.pending);
        let (total, mut done) = (prompt.len(), 0);
        if progress(done, total).is_break() {
            return Ok(ControlFlow::Break(()));
        }
        while total - done > 1 {
            let count = self.prefill_step_size.min(total - done - 1);
            let chunk = token_array(&prompt[done..done + count])?;
            let ids = chunk.expand_dims(0)?;
            in_prefill(|| self.model.forward(&ids, Some(self.caches)))?;
            self.quantize_caches()?;
            if self.eval_caches(&mut || progress(done, total))?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
            if let Some(processors) = &mut self.processors {
                processors.observe(&chunk)?;
            }
            done += count;
            if progress(done, total).is_break() {
                return Ok(ControlFlow::Break(()));
            }
            memory::clear_cache()?;
        }
        self.dispatch(&token_array(&prompt[done..])?)?;
        Ok(ControlFlow::Continue(()))
    }

    /// The next token; `None` once `max_tokens` were generated. Feeds the prompt first if that was not done.
    #[allow(clippy::should_implement_trait)] // fallible, and lending would not fit `Iterator`
    pub fn next(&mut self) -> Result<Option<Step>, StepError> {
        if !self.pending.is_empty() {
            let _ = self.prefill(&mut |_, _| ControlFlow::Continue(()))?;
        }
        if self.max_tokens.is_some_and(|most| self.generated >= most) {
            return Ok(None);
        }
        let Some((token, logprobs)) = self.in_flight.take() else { return Ok(None) };
        if self.matcher.is_none() {
            let stored = |cache: &LayerCache| matches!(cache, LayerCache::Stored(_));
            if cpu_ops::enabled() && !self.caches.iter().all(stored) {
                // A step that still runs holds the caches' buffers; the next would copy them instead of writing in
                // place, which costs more than waiting once the kernels are fast. Stored ones are written in place.
                token.eval()?;
            }
            self.dispatch(&token)?;
        }
        let id = token.item_u32()?;
        if i64::from(id) >= i64::from(self.model.vocab_size()) {
            return Err(StepError::NanLogits);
        }
        if self.generated == 0 && logprobs.isnan()?.any()?.to_vec::<bool>()? == [true] {
            return Err(StepError::NanLogits);
        }
        if self.generated.is_multiple_of(CLEAR_CACHE_EVERY) {
            memory::clear_cache()?;
        }
        self.generated += 1;
        let is_last = self.follow_grammar(id, &token)?;
        Ok(Some(Step { token: id, logprobs, is_last }))
    }

    /// Tells the grammar which token was chosen, and only then starts the next step, whose mask depends on it.
    /// Whether the grammar is complete.
    fn follow_grammar(&mut self, id: u32, token: &Array) -> Result<bool, StepError> {
        let Some(matcher) = &mut self.matcher else { return Ok(false) };
        matcher.advance(id)?;
        if matcher.is_finished() {
            return Ok(true);
        }
        if self.max_tokens != Some(self.generated) {
            self.dispatch(token)?;
        }
        Ok(false)
    }

    /// Feeds tokens `[n]` and starts computing the one that follows.
    fn dispatch(&mut self, tokens: &Array) -> Result<(), StepError> {
        let logits = self.model.forward(&tokens.expand_dims(0)?, Some(self.caches))?;
        let length = logits.dim(1);
        let mut logits = logits.slice(1, length - 1, length)?.squeeze(1)?;
        if let Some(processors) = &mut self.processors {
            processors.observe(tokens)?;
            logits = processors.apply(&logits)?;
        }
        if let Some(matcher) = &mut self.matcher {
            // The device works on the logits meanwhile.
            mlx::async_eval([&logits])?;
            logits = mask::keep_allowed(&logits, &matcher.mask()?)?;
        }
        self.quantize_caches()?;
        let logprobs = match &self.kernels {
            Some(kernels) if logits.dtype() == Dtype::Float32 => kernels.log_probabilities(&logits)?,
            _ => logits.subtract(&logits.logsumexp_all(true)?)?,
        };
        let token = self.sampler.sample(&logprobs, &mut self.rng)?;
        let logprobs = logprobs.squeeze(0)?;
        mlx::async_eval([&token, &logprobs])?;
        self.in_flight = Some((token, logprobs));
        Ok(())
    }

    /// Computes what a chunk left in the caches. On a CPU layer after layer, so that the work can be stopped inside
    /// a chunk: the graph, and with it every bit, is the same. A GPU would idle between the layers.
    fn eval_caches(&self, poll: &mut dyn FnMut() -> ControlFlow) -> Result<ControlFlow, mlx::Error> {
        if mlx::default_device() == DeviceKind::Gpu {
            mlx::eval(self.caches.iter().flat_map(LayerCache::arrays))?;
            return Ok(ControlFlow::Continue(()));
        }
        for (layer, cache) in self.caches.iter().enumerate() {
            if layer > 0 && poll().is_break() {
                return Ok(ControlFlow::Break(()));
            }
            mlx::eval(cache.arrays())?;
        }
        Ok(ControlFlow::Continue(()))
    }

    fn quantize_caches(&mut self) -> Result<(), mlx::Error> {
        match self.kv_quantization {
            Some(KvQuantization { bits, group_size, start }) => {
                maybe_quantize(self.caches, bits, group_size, start)
            }
            None => Ok(()),
        }
    }
}

fn check_kv_group(group_size: u32, head_dim: i32) -> Result<(), StepError> {
    if i64::from(group_size) > 0 && i64::from(head_dim) % i64::from(group_size) == 0 {
        return Ok(());
    }
    let suggestion = match head_dim {
        dim if dim % 64 == 0 => "64",
        dim if dim % 32 == 0 => "32",
        _ => "none: leave the cache unquantized",
    };
    Err(StepError::KvGroup { group_size, head_dim, suggestion })
}

fn token_array(ids: &[u32]) -> Result<Array, mlx::Error> {
    Array::from_slice(ids, &[ids.len() as i32])
}
