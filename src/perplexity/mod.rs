//! Perplexity of a model on token sequences, and how far it strays from another model.

mod dataset;
mod numpy_random;

use std::ops::ControlFlow;

pub use dataset::{DatasetError, Row, RowKind, encode_chat, read_row, read_rows, sequences, tokenize};
pub use numpy_random::RandomState;

use crate::cache::make_prompt_cache;
use crate::mlx::cpu_ops;
use crate::mlx::{self, Array, Dtype, eval};
use crate::models::Model;

/// A mean and its standard error.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The mean.
    pub mean: f64,
    /// Its standard error; infinite for a single value.
    pub standard_error: f64,
}

impl Estimate {
    /// Of independent values.
    pub fn of(values: impl Iterator<Item = f64> + Clone) -> Self {
        let count = values.clone().count() as f64;
        let mean = values.clone().sum::<f64>() / count.max(1.0);
        let squares: f64 = values.map(|value| (value - mean).powi(2)).sum();
        let standard_error =
            if count > 1.0 { (squares / (count - 1.0) / count).sqrt() } else { f64::INFINITY };
        Self { mean, standard_error }
    }
}

/// What was measured at each predicted token of one sequence.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sequence {
    /// Negative log-probability of the token, in nats.
    pub losses: Vec<f32>,
    /// Against another model: KL(other || this), in nats; empty without one.
    pub divergences: Vec<f32>,
    /// Against another model: whether both find the same token likeliest; empty without one.
    pub agreements: Vec<bool>,
}

/// A model measured on sequences.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Evaluation {
    /// In the order of the sequences.
    pub sequences: Vec<Sequence>,
}

impl Evaluation {
    fn losses(&self) -> impl Iterator<Item = f64> + Clone {
        self.sequences.iter().flat_map(|sequence| &sequence.losses).map(|loss| f64::from(*loss))
    }

    /// Tokens that were predicted.
    pub fn token_count(&self) -> usize {
        self.losses().count()
    }

    /// Mean loss in nats, summed in single precision by MLX as mlx-lm does.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn mean_loss(&self) -> mlx::Result<f64> {
        let losses: Vec<f32> =
            self.sequences.iter().flat_map(|sequence| sequence.losses.iter().copied()).collect();
        let count = losses.len();
        let sum = Array::from_slice(&losses, &[count as i32])?.sum(0, false)?;
        let mean = sum.multiply(&Array::from_slice(&[(1.0 / count.max(1) as f64) as f32], &[])?)?;
        Ok(mean.to_f32_vec()?.first().copied().map_or(f64::NAN, f64::from))
    }

    /// Perplexity and its standard error (mlx-lm `perplexity.py`, `eval_ppl`).
    ///
    /// # Errors
    /// When MLX fails.
    pub fn perplexity(&self) -> mlx::Result<Estimate> {
        let mean = self.mean_loss()?.exp();
        Ok(Estimate { mean, standard_error: mean * Estimate::of(self.losses()).standard_error })
    }

    /// KL divergence from the other model, in nats a token; `None` without one.
    pub fn divergence(&self) -> Option<Estimate> {
        let values = self.sequences.iter().flat_map(|sequence| &sequence.divergences);
        values.clone().next()?;
        Some(Estimate::of(values.map(|value| f64::from(*value))))
    }

    /// Share of the tokens where both models find the same one likeliest; `None` without another.
    pub fn agreement(&self) -> Option<Estimate> {
        let values = self.sequences.iter().flat_map(|sequence| &sequence.agreements);
        values.clone().next()?;
        Some(Estimate::of(values.map(|agrees| f64::from(u8::from(*agrees)))))
    }
}

/// Logits `[B, L, vocab]` of whole sequences in float32: our kernels run fused where a model has caches, and mlx-lm
/// evaluates without any.
fn predictions(model: &dyn Model, inputs: &Array) -> mlx::Result<Array> {
    let mut caches = cpu_ops::enabled().then(|| make_prompt_cache(model.layer_kinds(), None));
    model.forward(inputs, caches.as_deref_mut())?.astype(Dtype::Float32)
}

/// Measures `model` on sequences of one length (at least 2), `batch_size` at a time; with a `baseline` of the same
/// vocabulary, how far it strays from that. `on_progress` hears the sequences done and says whether to go on.
///
/// # Errors
/// When MLX fails.
pub fn evaluate(
    model: &dyn Model,
    baseline: Option<&dyn Model>,
    sequences: &[Vec<u32>],
    batch_size: usize,
    on_progress: &mut dyn FnMut(usize) -> ControlFlow<()>,
) -> mlx::Result<Option<Evaluation>> {
    let mut evaluation = Evaluation::default();
    for batch in sequences.chunks(batch_size.max(1)) {
        let length = batch.first().map_or(0, Vec::len);
        let ids = Array::from_slice(&batch.concat(), &[batch.len() as i32, length as i32])?;
        let inputs = ids.slice(1, 0, length as i32 - 1)?;
        let targets = ids.slice(1, 1, length as i32)?;
        let logits = predictions(model, &inputs)?;
        let losses = cross_entropy(&logits, &targets)?;
        let against = match baseline {
            Some(baseline) => {
                let theirs = predictions(baseline, &inputs)?;
                let agreements = theirs.argmax(-1)?.equal(&logits.argmax(-1)?)?;
                Some((divergence(&theirs, &logits)?, agreements))
            }
            None => None,
        };
        eval([&losses].into_iter().chain(against.iter().flat_map(|(a, b)| [a, b])))?;
        let losses: Vec<f32> = losses.to_vec()?;
        let (divergences, agreements) = match against {
            Some((divergences, agreements)) => (divergences.to_vec::<f32>()?, agreements.to_vec::<bool>()?),
            None => (Vec::new(), Vec::new()),
        };
        let each = length.saturating_sub(1).max(1);
        for (index, losses) in losses.chunks(each).enumerate() {
            let part = index * each..(index + 1) * each;
            evaluation.sequences.push(Sequence {
                losses: losses.to_vec(),
                divergences: divergences.get(part.clone()).unwrap_or_default().to_vec(),
                agreements: agreements.get(part).unwrap_or_default().to_vec(),
            });
        }
        if on_progress(evaluation.sequences.len()).is_break() {
            return Ok(None);
        }
    }
    Ok(Some(evaluation))
}

/// `nn.losses.cross_entropy(logits, targets, reduction="none")` where there is no fast path for it.
fn cross_entropy(logits: &Array, targets: &Array) -> mlx::Result<Array> {
    let logits = logits.subtract(&logits.max(-1, true)?)?;
    let score = logits.take_along_axis(&targets.expand_dims(-1)?, -1)?.squeeze(-1)?;
    logits.logsumexp(-1, false)?.subtract(&score)
}

/// KL(`reference` || `logits`) at each position, in nats.
///
/// # Errors
/// When the shapes differ.
pub fn divergence(reference: &Array, logits: &Array) -> mlx::Result<Array> {
    let reference = reference.subtract(&reference.logsumexp(-1, true)?)?;
    let logits = logits.subtract(&logits.logsumexp(-1, true)?)?;
    reference.exp()?.multiply(&reference.subtract(&logits)?)?.sum(-1, false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimates_have_their_standard_error() {
        let estimate = Estimate::of([1.0, 2.0, 3.0, 4.0].into_iter());
        assert_eq!(estimate.mean, 2.5);
        assert!((estimate.standard_error - (5.0f64 / 3.0 / 4.0).sqrt()).abs() < 1e-12);
        assert!(Estimate::of([1.0].into_iter()).standard_error.is_infinite());
    }

    #[test]
    fn divergence_is_zero_only_for_equal_distributions() {
        let a = Array::from_slice(&[0.0f32, 1.0, 2.0, 5.0, 5.0, 5.0], &[2, 3]).unwrap();
        let shifted = a.add_scalar(3.0).unwrap();
        assert!(divergence(&a, &shifted).unwrap().to_vec::<f32>().unwrap().iter().all(|kl| kl.abs() < 1e-6));
        let b = Array::from_slice(&[0.0f32, 0.0, 0.0, 5.0, 5.0, 4.0], &[2, 3]).unwrap();
        let kl: Vec<f32> = divergence(&a, &b).unwrap().to_vec().unwrap();
        assert!((kl[0] - 0.266_2).abs() < 1e-3 && kl[1] > 0.0, "{kl:?}");
    }
}
