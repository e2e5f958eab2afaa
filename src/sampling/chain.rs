//! The sampler: the active filters in order, then a draw (`make_sampler`).

use super::{Hlg, MinP, RangeError, Xtc, hlg, min_p, require, top_k, top_p, xtc};
use crate::mlx::random::{RandomState, categorical, split};
use crate::mlx::{Array, Compiled, Dtype, Result, cpu_ops};

/// How to choose among log-probabilities. The default is greedy.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingParams {
    /// Temperature; 0 takes the most likely token and draws nothing. Double precision, like Python's floats: the
    /// reciprocal is taken before the value is rounded to the logits' type.
    pub temperature: f64,
    /// Nucleus mass; active inside (0, 1).
    pub top_p: f64,
    /// Minimum probability relative to the most likely token.
    pub min_p: Option<MinP>,
    /// Exclude top choices.
    pub xtc: Option<Xtc>,
    /// Number of candidates; 0, or the vocabulary's size and more, is off.
    pub top_k: i32,
    /// Tone curve instead of every filter above.
    pub hlg: Option<Hlg>,
}

impl SamplingParams {
    /// Checks the ranges.
    pub fn validate(&self) -> std::result::Result<(), RangeError> {
        let temperature = self.temperature;
        require(
            temperature.is_finite() && temperature >= 0.0,
            "temperature",
            "a finite number >= 0",
            temperature,
        )?;
        require((0.0..=1.0).contains(&self.top_p), "top_p", "in [0, 1]", self.top_p)?;
        require(self.top_k >= 0, "top_k", ">= 0", self.top_k)?;
        self.min_p.map_or(Ok(()), MinP::validate)?;
        self.xtc.as_ref().map_or(Ok(()), Xtc::validate)?;
        self.hlg.map_or(Ok(()), Hlg::validate)
    }
}

/// One filter: log-probabilities `[1, V]` to the same with candidates at minus infinity; some draw.
enum Filter {
    Plain(Compiled),
    Drawing(Compiled),
}

/// Chooses tokens. Holds compiled filters, so make one a request and keep it.
pub struct Sampler {
    filters: Vec<Filter>,
    draw: Option<Compiled>,
}

impl Sampler {
    /// Builds the chain for a vocabulary of `vocab_size` entries.
    pub fn new(params: &SamplingParams, vocab_size: i32) -> Result<Self> {
        let inverse = (1.0 / params.temperature) as f32;
        if params.temperature == 0.0 || is_greedy(inverse, Dtype::Float32, LOWEST) {
            return Ok(Self { filters: Vec::new(), draw: None });
        }
        if let Some(curve) = params.hlg {
            let draw = Compiled::new(
                move |inputs| {
                    let (state, key) = split(&inputs[1])?;
                    if is_greedy(inverse, inputs[0].dtype(), CURVE) {
                        return Ok(vec![inputs[0].argmax(-1)?, state]);
                    }
                    Ok(vec![categorical(&hlg::apply(&inputs[0], curve, inverse)?, &key)?, state])
                },
                false,
            )?;
            return Ok(Self { filters: Vec::new(), draw: Some(draw) });
        }
        let mut filters = Vec::new();
        if 0.0 < params.top_p && params.top_p < 1.0 {
            filters.push(Filter::Plain(top_p::compile(params.top_p as f32)?));
        }
        if let Some(min_p) = params.min_p.filter(|min_p| min_p.p != 0.0) {
            filters.push(Filter::Plain(min_p::compile(min_p)?));
        }
        if let Some(xtc) = params.xtc.as_ref().filter(|xtc| xtc.probability > 0.0) {
            filters.push(Filter::Drawing(xtc::compile(xtc, vocab_size)?));
        }
        if 0 < params.top_k && params.top_k < vocab_size {
            filters.push(Filter::Plain(top_k::compile(params.top_k)?));
        }
        let draw = Compiled::new(
            move |inputs| {
                let (state, key) = split(&inputs[1])?;
                if is_greedy(inverse, inputs[0].dtype(), LOWEST) {
                    return Ok(vec![inputs[0].argmax(-1)?, state]);
                }
                Ok(vec![categorical(&inputs[0].multiply_scalar(inverse)?, &key)?, state])
            },
            false,
        )?;
        Ok(Self { filters, draw: Some(draw) })
    }

    /// Chooses from log-probabilities `[1, V]`; returns one `uint32`, shape `[1]`. Lazy, as every operation.
    pub fn sample(&self, logprobs: &Array, rng: &mut RandomState) -> Result<Array> {
        let Some(draw) = &self.draw else {
            return match cpu_ops::kernels() {
                Some(kernels) => kernels.argmax(logprobs),
                None => logprobs.argmax(-1),
            };
        };
        let mut logprobs = logprobs.clone();
        for filter in &self.filters {
            logprobs = match filter {
                Filter::Plain(filter) => filter.call_one([&logprobs])?,
                Filter::Drawing(filter) => call_drawing(filter, &logprobs, rng)?,
            };
        }
        call_drawing(draw, &logprobs, rng)
    }
}

/// The likeliest of `V` tokens has at least the log-probability `-ln V`, which is above this for any vocabulary.
const LOWEST: f32 = 16.0;
/// What the tone curve makes of log-probabilities stays within this for any of its parameters.
const CURVE: f32 = 128.0;

/// Whether `1 / temperature` is so large that scores of this reach would leave the logits' type: then all candidates, the
/// likeliest too, would become infinite and the draw blind. The limit of low temperatures is the arg-max.
fn is_greedy(inverse: f32, dtype: Dtype, reach: f32) -> bool {
    inverse >= -dtype.finite_min() / reach
}

/// Calls a function of (input, key) that returns (output, next key), as `mx.compile` threads the random state.
fn call_drawing(function: &Compiled, input: &Array, rng: &mut RandomState) -> Result<Array> {
    let mut results = function.call([input, rng.key()])?.into_iter();
    match (results.next(), results.next()) {
        (Some(output), Some(state)) => {
            rng.set_key(state);
            Ok(output)
        }
        _ => Err(crate::mlx::Error::new("a sampler returned fewer arrays than it promises")),
    }
}
