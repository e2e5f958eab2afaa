//! Exclude top choices (`apply_xtc`): now and then, all but the least likely of the likely tokens go.

use super::{RangeError, require};
use crate::mlx::random::{split, uniform};
use crate::mlx::{Array, Compiled, Dtype, Result};

/// Parameters of the filter.
#[derive(Clone, Debug, PartialEq)]
pub struct Xtc {
    /// Chance of applying it at a step.
    pub probability: f32,
    /// Probability from which a token counts as likely; at most 0.5.
    pub threshold: f32,
    /// Tokens it never removes: newlines and end-of-sequence tokens.
    pub special_tokens: Vec<u32>,
}

impl Xtc {
    pub(super) fn validate(&self) -> std::result::Result<(), RangeError> {
        require((0.0..=1.0).contains(&self.probability), "xtc_probability", "in [0, 1]", self.probability)?;
        require((0.0..=0.5).contains(&self.threshold), "xtc_threshold", "in [0, 0.5]", self.threshold)
    }
}

pub(super) fn compile(params: &Xtc, vocab_size: i32) -> Result<Compiled> {
    let (probability, threshold) = (params.probability, params.threshold);
    let special: Vec<u32> =
        params.special_tokens.iter().copied().filter(|&id| i64::from(id) < i64::from(vocab_size)).collect();
    Compiled::new(
        move |inputs| {
            let (state, key) = split(&inputs[1])?;
            Ok(vec![apply(&inputs[0], probability, threshold, &special, &key)?, state])
        },
        false,
    )
}

fn apply(logits: &Array, probability: f32, threshold: f32, special: &[u32], key: &Array) -> Result<Array> {
    let probs = logits.softmax(-1, false)?;
    let scalar = |value| Array::scalar(value, probs.dtype());
    let likely = probs.greater(&scalar(threshold)?)?;
    let least = likely.select(&probs, &scalar(f32::INFINITY)?)?.min(-1, true)?;
    let mut mask = probs.greater(&least)?;
    if !special.is_empty() {
        let indices = Array::from_slice(special, &[1, special.len() as i32])?;
        mask = mask.put_along_axis(&indices, &Array::scalar(0.0, Dtype::Bool)?, -1)?;
    }
    let excluded = mask.select(&Array::scalar(f32::NEG_INFINITY, logits.dtype())?, logits)?;
    let skip = uniform(key)?.greater(&Array::scalar(probability, Dtype::Float32)?)?;
    skip.select(logits, &excluded)
}
