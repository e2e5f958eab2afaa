//! Logits processors: bias and the three penalties (`make_logits_processors`).

use super::{RangeError, require};
use crate::mlx::{Array, Error, Result};

/// A penalty and the number of last tokens it looks at; 0 looks at all of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Penalty {
    /// Strength.
    pub value: f32,
    /// Window in tokens.
    pub context_size: i32,
}

/// What to do to logits before they become probabilities. The default is nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PenaltyParams {
    /// Added to the logits of these ids.
    pub logit_bias: Vec<(u32, f32)>,
    /// Divides positive logits of tokens seen, multiplies negative ones: <https://arxiv.org/abs/1909.05858>.
    pub repetition: Option<Penalty>,
    /// Subtracted once from each token seen.
    pub presence: Option<Penalty>,
    /// Subtracted for each time a token was seen.
    pub frequency: Option<Penalty>,
}

impl PenaltyParams {
    /// Checks the ranges.
    pub fn validate(&self) -> std::result::Result<(), RangeError> {
        let window = |name, penalty: Option<Penalty>| {
            penalty.map_or(Ok(()), |penalty| {
                require(penalty.context_size >= 0, name, ">= 0", penalty.context_size)
            })
        };
        if let Some(Penalty { value, .. }) = self.repetition {
            require(value.is_finite() && value >= 0.0, "repetition_penalty", "a finite number >= 0", value)?;
        }
        window("repetition_context_size", self.repetition)?;
        window("presence_context_size", self.presence)?;
        window("frequency_context_size", self.frequency)
    }
}

/// The active processors in order, with the token history they look at.
pub struct LogitsProcessors {
    bias: Option<(Array, Array)>,
    repetition: Option<Penalty>,
    presence: Option<Penalty>,
    frequency: Option<Penalty>,
    history: Option<Array>,
}

impl LogitsProcessors {
    /// Builds the chain for a vocabulary of `vocab_size` entries; `None` when nothing is active.
    ///
    /// # Errors
    /// A biased id outside the vocabulary.
    pub fn new(params: &PenaltyParams, vocab_size: i32) -> Result<Option<Self>> {
        let active = |penalty: Option<Penalty>| penalty.filter(|penalty| penalty.value != 0.0);
        let bias = if params.logit_bias.is_empty() {
            None
        } else {
            let (ids, values): (Vec<u32>, Vec<f32>) = params.logit_bias.iter().copied().unzip();
            if let Some(id) = ids.iter().find(|&&id| i64::from(id) >= i64::from(vocab_size)) {
                return Err(Error::new(format!(
                    "logit_bias names token {id}, but the vocabulary has {vocab_size}"
                )));
            }
            let count = [ids.len() as i32];
            Some((Array::from_slice(&ids, &count)?, Array::from_slice(&values, &count)?))
        };
        let chain = Self {
            bias,
            repetition: active(params.repetition),
            presence: active(params.presence),
            frequency: active(params.frequency),
            history: None,
        };
        let idle = chain.bias.is_none()
            && chain.repetition.is_none()
            && chain.presence.is_none()
            && chain.frequency.is_none();
        Ok((!idle).then_some(chain))
    }

    /// Adds tokens, `[n]`, to the history.
    pub fn observe(&mut self, tokens: &Array) -> Result<()> {
        self.history = Some(match self.history.take() {
            Some(history) => Array::concatenate([&history, tokens], 0)?,
            None => tokens.clone(),
        });
        Ok(())
    }

    /// Logits `[1, V]` after all processors.
    pub fn apply(&self, logits: &Array) -> Result<Array> {
        let mut logits = logits.clone();
        if let Some((ids, values)) = &self.bias {
            logits = logits.scatter_add_columns(ids, values)?;
        }
        let Some(history) = &self.history else { return Ok(logits) };
        if let Some(penalty) = self.repetition {
            let seen = window(history, penalty.context_size)?;
            let old = logits.take(&seen, 1)?;
            let zero = Array::scalar(0.0, old.dtype())?;
            let (worse, smaller) = (old.multiply_scalar(penalty.value)?, old.divide_scalar(penalty.value)?);
            let new = old.less(&zero)?.select(&worse, &smaller)?;
            logits = logits.put_along_axis(&seen.expand_dims(0)?, &new, 1)?;
        }
        if let Some(penalty) = self.presence {
            let seen = window(history, penalty.context_size)?;
            let new = logits.take(&seen, 1)?.subtract(&Array::scalar(penalty.value, logits.dtype())?)?;
            logits = logits.put_along_axis(&seen.expand_dims(0)?, &new, 1)?;
        }
        if let Some(penalty) = self.frequency {
            let seen = window(history, penalty.context_size)?;
            let minus = Array::full(&[seen.dim(0)], -penalty.value, logits.dtype())?;
            logits = logits.scatter_add_columns(&seen, &minus)?;
        }
        Ok(logits)
    }
}

/// The last `size` tokens; all of them for 0, as Python slices.
fn window(history: &Array, size: i32) -> Result<Array> {
    let length = history.dim(0);
    if size == 0 || size >= length { Ok(history.clone()) } else { history.slice(0, length - size, length) }
}
