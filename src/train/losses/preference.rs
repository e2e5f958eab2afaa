//! Objectives over pairs of a preferred and another answer.

use super::{Objective, SftScope};
use crate::mlx::{Array, Dtype, Error, Result};
use crate::train::batches::{Batch, Stream};

/// Least odds that are told from none.
const LEAST: f32 = 1e-6;

/// Log-probability of each answer under the untrained model, `[B]` a stream.
#[derive(Clone, Debug, Default)]
pub struct References {
    sums: Vec<Array>,
}

impl References {
    /// From the loss of each target.
    pub(in crate::train) fn of(losses: &[Array], batch: &Batch) -> Result<Self> {
        let sum = |(losses, stream): (&Array, &Stream)| Ok(answer(losses, stream)?.0);
        let sums = losses.iter().zip(&batch.streams).map(sum).collect::<Result<Vec<_>>>()?;
        crate::mlx::eval(&sums)?;
        Ok(Self { sums })
    }
}

/// Log-probability of each answer, `[B]`, and how many tokens it has.
fn answer(losses: &Array, stream: &Stream) -> Result<(Array, Array)> {
    let sum = losses.astype(Dtype::Float32)?.multiply(&stream.mask)?.sum(-1, false)?.negative()?;
    Ok((sum, stream.mask.sum(-1, false)?))
}

/// `-log(sigmoid(x))`.
fn minus_log_sigmoid(x: &Array) -> Result<Array> {
    Array::scalar(0.0, Dtype::Float32)?.logaddexp(&x.negative()?)
}

/// `log(1 - e^x)` for `x <= 0`.
fn log_one_minus_exp(x: &Array) -> Result<Array> {
    let one = Array::scalar(1.0, Dtype::Float32)?;
    one.subtract(&x.exp()?)?.maximum(&Array::scalar(LEAST, Dtype::Float32)?)?.log()
}

/// How often `x` is above zero.
fn share_above_zero(x: &Array) -> Result<Array> {
    x.greater(&Array::scalar(0.0, Dtype::Float32)?)?.astype(Dtype::Float32)?.mean_all()
}

impl Objective {
    /// The loss and the figures of a batch of pairs.
    pub(super) fn preference(
        &self,
        losses: [&Array; 2],
        batch: &Batch,
        references: &References,
    ) -> Result<Vec<Array>> {
        let [chosen, rejected] = &batch.streams[..] else {
            return Err(Error::new("a pair has two streams"));
        };
        let (chosen_sum, chosen_count) = answer(losses[0], chosen)?;
        let (rejected_sum, rejected_count) = answer(losses[1], rejected)?;
        let means =
            || Ok::<_, Error>((chosen_sum.divide(&chosen_count)?, rejected_sum.divide(&rejected_count)?));
        let rewards = |beta: f32| match &references.sums[..] {
            [chosen, rejected] => Ok((
                chosen_sum.subtract(chosen)?.multiply_scalar(beta)?,
                rejected_sum.subtract(rejected)?.multiply_scalar(beta)?,
            )),
            _ => Err(Error::new("the untrained model's figures are missing")),
        };
        match *self {
            Self::Sft => Err(Error::new("sft does not learn from pairs")),
            Self::Dpo { beta } => {
                let (chosen, rejected) = rewards(beta)?;
                let margin = chosen.subtract(&rejected)?;
                let loss = minus_log_sigmoid(&margin)?.mean_all()?;
                Ok(vec![loss, share_above_zero(&margin)?, margin.mean_all()?])
            }
            Self::Simpo { beta, gamma } => {
                let (chosen, rejected) = means()?;
                let margin = chosen.subtract(&rejected)?.multiply_scalar(beta)?;
                let loss = minus_log_sigmoid(&margin.add_scalar(-gamma)?)?.mean_all()?;
                Ok(vec![loss, share_above_zero(&margin)?, margin.mean_all()?])
            }
            Self::Kto { beta, desirable, undesirable } => {
                let (chosen, rejected) = rewards(beta)?;
                let zero = Array::scalar(0.0, Dtype::Float32)?;
                // The point that rewards are measured from is an estimate, not something to learn.
                let point = |rewards: &Array| rewards.mean_all()?.maximum(&zero)?.stop_gradient();
                let one = Array::scalar(1.0, Dtype::Float32)?;
                let gain = one.subtract(&chosen.subtract(&point(&rejected)?)?.sigmoid()?)?;
                let pain = one.subtract(&point(&chosen)?.subtract(&rejected)?.sigmoid()?)?;
                let both = [gain.multiply_scalar(desirable)?, pain.multiply_scalar(undesirable)?];
                let margin = chosen.subtract(&rejected)?;
                let loss = Array::concatenate(&both, 0)?.mean_all()?;
                Ok(vec![loss, share_above_zero(&margin)?, margin.mean_all()?])
            }
            Self::Orpo { lambda, scope } => {
                let (better, worse) = means()?;
                let odds = better.subtract(&worse)?;
                let odds =
                    odds.subtract(&log_one_minus_exp(&better)?.subtract(&log_one_minus_exp(&worse)?)?)?;
                let penalty = minus_log_sigmoid(&odds)?.mean_all()?;
                let nll = match scope {
                    SftScope::Response => better.negative()?.mean_all()?,
                    SftScope::Full => {
                        let weights = chosen.mask.add(&chosen.prompt)?;
                        let sum = losses[0].astype(Dtype::Float32)?.multiply(&weights)?.sum(-1, false)?;
                        sum.divide(&weights.sum(-1, false)?)?.mean_all()?
                    }
                };
                let loss = nll.add(&penalty.multiply_scalar(lambda)?)?;
                let margin = better.subtract(&worse)?.mean_all()?;
                Ok(vec![loss, share_above_zero(&odds)?, margin, nll, penalty])
            }
        }
    }
}
