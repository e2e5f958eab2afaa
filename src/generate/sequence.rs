//! A sequence that grows token by token, and the step that lets one or many of them grow.
//!
//! The prompt is fed in chunks up to its last token; that one is a step of its own, so that every step has the
//! same shape. One step is always in flight: the next token is being computed while the current one is read. Where a
//! grammar takes part the next step waits for the current tokens, and masks are computed while the device computes
//! the logits.

use super::limits::Limits;
use super::step::{ControlFlow, KvQuantization, Step, StepError, StepOptions};
use crate::cache::{LayerCache, maybe_quantize};
use crate::levers;
use crate::mlx::cpu_ops::{self, Kernels, filling_caches};
use crate::mlx::random::RandomState;
use crate::mlx::{self, Array, DeviceKind, Dtype, memory};
use crate::models::Model;
use crate::sampling::{LogitsProcessors, Sampler, mask};
use crate::structured::grammar::Matcher;

/// Steps between returns of the allocator's spare memory.
const CLEAR_CACHE_EVERY: usize = 256;

/// Everything that one generation consists of, but for the model. Rows of a batch share nothing.
pub struct Sequence {
    caches: Vec<LayerCache>,
    prompt: Vec<u32>,
    /// Prompt tokens fed.
    fed: usize,
    sampler: Sampler,
    processors: Option<LogitsProcessors>,
    matcher: Option<Matcher>,
    rng: RandomState,
    vocab_size: usize,
    max_tokens: Option<usize>,
    kv_quantization: Option<KvQuantization>,
    /// Ours, where the model's are.
    kernels: Option<Kernels>,
    /// The step in flight: its token and log-probabilities.
    in_flight: Option<(Array, Array)>,
    generated: usize,
}

impl Sequence {
    /// Prepares to continue `caches` with `prompt`. Computes nothing yet.
    ///
    /// # Errors
    /// See [`StepError`]; everything that can be wrong with the request is found here.
    pub fn new(
        model: &dyn Model,
        caches: Vec<LayerCache>,
        prompt: &[u32],
        options: &StepOptions,
    ) -> Result<Self, StepError> {
        let limits = Limits::of(model);
        options.validate(prompt, &limits)?;
        Ok(Self {
            caches,
            prompt: prompt.to_vec(),
            fed: 0,
            sampler: Sampler::new(&options.sampling, model.vocab_size())?,
            processors: LogitsProcessors::new(&options.penalties, model.vocab_size())?,
            matcher: options.grammar.as_ref().map(|grammar| grammar.matcher(limits.vocab_size)),
            rng: match options.seed {
                Some(seed) => RandomState::from_seed(seed)?,
                None => RandomState::from_clock()?,
            },
            vocab_size: limits.vocab_size,
            max_tokens: options.max_tokens,
            kv_quantization: options.kv_quantization,
            kernels: cpu_ops::kernels(),
            in_flight: None,
            generated: 0,
        })
    }

    /// Takes tokens into the history that penalties look at, without feeding them: those that the caches hold.
    ///
    /// # Errors
    /// MLX's.
    pub fn remember(&mut self, tokens: &[u32]) -> Result<(), StepError> {
        if let Some(processors) = self.processors.as_mut().filter(|_| !tokens.is_empty()) {
            processors.observe(&token_array(tokens)?)?;
        }
        Ok(())
    }

    /// The caches.
    pub fn caches(&self) -> &[LayerCache] {
        &self.caches
    }

    /// The caches, for others to go on with, each by itself; this sequence is at its end.
    ///
    /// # Errors
    /// MLX's, which lose the caches.
    pub fn take_caches(&mut self) -> Result<Vec<LayerCache>, mlx::Error> {
        self.in_flight = None;
        let mut caches = std::mem::take(&mut self.caches);
        let mut apart = Vec::new();
        for (layer, cache) in caches.iter_mut().enumerate() {
            if let LayerCache::Joined(joined) = cache {
                *cache = joined.export()?;
                apart.push(layer);
            }
        }
        // Copies hold on to the rows of others until they are computed.
        mlx::eval(apart.into_iter().flat_map(|layer| caches[layer].arrays()))?;
        Ok(caches)
    }

    /// Whether the first step has not begun.
    pub fn is_in_prompt(&self) -> bool {
        self.fed < self.prompt.len()
    }

    /// Prompt tokens to [`feed`](Self::feed): all but the last, with which [`start`](Self::start) begins.
    pub fn unfed(&self) -> usize {
        self.prompt.len().saturating_sub(self.fed + 1)
    }

    /// Feeds up to `most` tokens of the prompt. After a break the caches are torn: nobody can go on with them, unless
    /// it was asked for between chunks.
    ///
    /// # Errors
    /// MLX's.
    pub fn feed(
        &mut self,
        model: &dyn Model,
        most: usize,
        poll: &mut dyn FnMut() -> ControlFlow,
    ) -> Result<ControlFlow, StepError> {
        let (start, end) = (self.fed, self.fed + most.min(self.unfed()));
        let part = model.rows_at_once(&self.caches)?.unwrap_or(most).max(1);
        while self.fed < end {
            if self.fed > start && poll().is_break() {
                return Ok(ControlFlow::Break(()));
            }
            let count = part.min(end - self.fed);
            let chunk = token_array(&self.prompt[self.fed..self.fed + count])?;
            let ids = chunk.expand_dims(0)?;
            let following = self.prompt.len() - self.fed - count;
            filling_caches(following, || model.forward(&ids, Some(&mut self.caches)))?;
            // After the whole chunk, as in mlx-lm: what a position attends to does not depend on the parts.
            if self.fed + count == end {
                self.quantize_caches()?;
            }
            if self.eval_caches(poll)?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
            if let Some(processors) = &mut self.processors {
                processors.observe(&chunk)?;
            }
            self.fed += count;
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Starts the first step, with the prompt's last token.
    ///
    /// # Errors
    /// MLX's and the grammar's.
    pub fn start(&mut self, model: &dyn Model) -> Result<(), StepError> {
        let last = token_array(&self.prompt[self.fed..])?;
        self.fed = self.prompt.len();
        dispatch(model, &mut [(self, &last)]).pop().unwrap_or(Ok(()))
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
                maybe_quantize(&mut self.caches, bits, group_size, start)
            }
            None => Ok(()),
        }
    }

    /// The step in flight, unless enough tokens were generated.
    fn take_current(&mut self) -> Option<(Array, Array)> {
        if self.max_tokens.is_some_and(|most| self.generated >= most) {
            return None;
        }
        self.in_flight.take()
    }

    /// Logits `[1, V]` as the processors leave them, after `token`.
    fn process(&mut self, tokens: &Array, logits: Array) -> Result<Array, StepError> {
        match &mut self.processors {
            Some(processors) => {
                processors.observe(tokens)?;
                Ok(processors.apply(&logits)?)
            }
            None => Ok(logits),
        }
    }

    /// Chooses from processed logits `[1, V]`; the step is then in flight, but nothing computes it yet.
    fn choose(&mut self, mut logits: Array) -> Result<(), StepError> {
        if let Some(matcher) = &mut self.matcher {
            logits = mask::keep_allowed(&logits, &matcher.mask()?)?;
        }
        self.quantize_caches()?;
        let logprobs = match &self.kernels {
            Some(kernels) if logits.dtype() == Dtype::Float32 => kernels.log_probabilities(&logits)?,
            _ => logits.subtract(&logits.logsumexp_all(true)?)?,
        };
        let token = self.sampler.sample(&logprobs, &mut self.rng)?;
        self.in_flight = Some((token, logprobs.squeeze(0)?));
        Ok(())
    }

    fn nan(&self) -> StepError {
        if self.processors.is_some() { StepError::NanPenalties } else { StepError::NanLogits }
    }

    /// Reads the token of a step and tells the grammar.
    fn accept(&mut self, token: &Array, logprobs: Array) -> Result<Step, StepError> {
        let id = token.item_u32()?;
        if usize::try_from(id).is_ok_and(|id| id >= self.vocab_size) {
            return Err(self.nan());
        }
        // Of penalties within their ranges only those can leave float16 that add up over a reply.
        let piles_up = self.processors.is_some() && logprobs.dtype() == Dtype::Float16;
        if (self.generated == 0 || piles_up) && logprobs.isnan()?.any()?.to_vec::<bool>()? == [true] {
            return Err(self.nan());
        }
        if self.generated.is_multiple_of(CLEAR_CACHE_EVERY) {
            memory::clear_cache()?;
        }
        self.generated += 1;
        let is_last = match &mut self.matcher {
            Some(matcher) => {
                matcher.advance(id)?;
                matcher.is_finished()
            }
            None => false,
        };
        Ok(Step { token: id, logprobs, is_last })
    }
}

/// One token of each sequence, in order: `None` where `max_tokens` were generated. They share one forward pass; what
/// goes wrong with one of them is its own result.
pub fn step(model: &dyn Model, rows: &mut [&mut Sequence]) -> Vec<Result<Option<Step>, StepError>> {
    levers::delay_step();
    let mut results: Vec<Result<Option<Step>, StepError>> = rows.iter().map(|_| Ok(None)).collect();
    // Those that go on, with their place.
    let mut current: Vec<(usize, &mut Sequence, (Array, Array))> = Vec::new();
    for (place, row) in rows.iter_mut().enumerate() {
        if let Some(step) = row.take_current() {
            current.push((place, row, step));
        }
    }
    let waits = current.iter().any(|(_, row, _)| row.matcher.is_some());
    if !waits {
        let stored = |cache: &LayerCache| matches!(cache, LayerCache::Stored(_));
        if cpu_ops::enabled() && !current.iter().all(|(_, row, _)| row.caches.iter().all(stored)) {
            // A step that still runs holds the caches' buffers; the next would copy them instead of writing in
            // place, which costs more than waiting once the kernels are fast. Stored ones are written in place. An
            // error shows again when a token is read.
            let _ = mlx::eval(current.iter().map(|(_, _, (token, _))| token));
        }
        let mut next: Vec<_> = current.iter_mut().map(|(_, row, (token, _))| (&mut **row, &*token)).collect();
        let dispatched = dispatch(model, &mut next);
        for ((place, ..), dispatched) in current.iter().zip(dispatched) {
            if let Err(error) = dispatched {
                results[*place] = Err(error);
            }
        }
    }
    let mut going_on = Vec::new();
    for (place, row, (token, logprobs)) in current {
        if results[place].is_err() {
            continue;
        }
        results[place] = row.accept(&token, logprobs).map(Some);
        let ended = !matches!(&results[place], Ok(Some(step)) if !step.is_last);
        if waits && !ended && row.max_tokens != Some(row.generated) {
            going_on.push((place, row, token));
        }
    }
    if waits {
        let mut next: Vec<_> = going_on.iter_mut().map(|(_, row, token)| (&mut **row, &*token)).collect();
        let dispatched = dispatch(model, &mut next);
        for ((place, ..), dispatched) in going_on.iter().zip(dispatched) {
            if let Err(error) = dispatched {
                results[*place] = Err(error);
            }
        }
    }
    results
}

/// Feeds tokens, `[n]` to a lone sequence or `[1]` to each of several, and starts computing those that follow.
fn dispatch(model: &dyn Model, rows: &mut [(&mut Sequence, &Array)]) -> Vec<Result<(), StepError>> {
    let logits = match forward(model, rows) {
        Ok(logits) => logits,
        Err(error) => return rows.iter().map(|_| Err(error.clone().into())).collect(),
    };
    let processed: Vec<_> =
        rows.iter_mut().zip(logits).map(|((row, tokens), logits)| row.process(tokens, logits)).collect();
    if rows.iter().any(|(row, _)| row.matcher.is_some()) {
        // The device works on the logits meanwhile. What fails here fails again below.
        let _ = mlx::async_eval(processed.iter().flatten());
    }
    let mut results: Vec<Result<(), StepError>> = rows
        .iter_mut()
        .zip(processed)
        .map(|((row, _), logits)| logits.and_then(|logits| row.choose(logits)))
        .collect();
    let steps = rows.iter().filter_map(|(row, _)| row.in_flight.as_ref());
    let started = mlx::async_eval(steps.flat_map(|(token, logprobs)| [token, logprobs]));
    if let Err(error) = started {
        results = rows.iter().map(|_| Err(error.clone().into())).collect();
    }
    results
}

/// Logits `[1, V]` of the last position of each row.
fn forward(model: &dyn Model, rows: &mut [(&mut Sequence, &Array)]) -> Result<Vec<Array>, mlx::Error> {
    if let [(row, tokens)] = rows {
        let logits = model.forward(&tokens.expand_dims(0)?, Some(&mut row.caches))?;
        let length = logits.dim(1);
        return Ok(vec![logits.slice(1, length - 1, length)?.squeeze(1)?]);
    }
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    let tokens = Array::concatenate(rows.iter().map(|(_, token)| *token), 0)?;
    let mut caches: Vec<&mut [LayerCache]> = rows.iter_mut().map(|(row, _)| &mut row.caches[..]).collect();
    model.forward_rows(&tokens, &mut caches)
}

fn token_array(ids: &[u32]) -> Result<Array, mlx::Error> {
    Array::from_slice(ids, &[ids.len() as i32])
}
