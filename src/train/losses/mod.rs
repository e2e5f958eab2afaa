//! What training makes small: functions of the loss of each target.

mod preference;

pub use preference::References;

use super::batches::Batch;
use crate::mlx::{Array, Dtype, Error, Result};

/// `-log p(target)` of each position, `[B, L]`, from logits `[B, L, vocabulary]` (`nn.losses.cross_entropy`).
///
/// # Errors
/// When MLX fails.
pub fn cross_entropy(logits: &Array, targets: &Array) -> Result<Array> {
    let logits = logits.subtract(&logits.max(-1, true)?.stop_gradient()?)?;
    let score = logits.take_along_axis(&targets.expand_dims(-1)?, -1)?.squeeze(-1)?;
    logits.logsumexp(-1, false)?.subtract(&score)
}

/// What of the preferred sequence the likelihood part of ORPO sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SftScope {
    /// Prompt and answer, as in the paper.
    Full,
    /// The answer.
    Response,
}

/// What is made small.
#[derive(Clone, Debug, PartialEq)]
pub enum Objective {
    /// The mean loss of what is learned (mlx-lm's `default_loss`).
    Sft,
    /// Direct preference optimization (Rafailov et al. 2023, equation 7).
    Dpo {
        /// How far the model may stray from what it was.
        beta: f32,
    },
    /// Odds ratio preference optimization (Hong et al. 2024, equations 6 and 7).
    Orpo {
        /// Weight of the odds.
        lambda: f32,
        /// What the likelihood part sees.
        scope: SftScope,
    },
    /// Simple preference optimization (Meng et al. 2024, equation 6).
    Simpo {
        /// Scale of the rewards.
        beta: f32,
        /// Margin that is asked for.
        gamma: f32,
    },
    /// Kahneman-Tversky optimization over pairs (Ethayarajh et al. 2024, equation 8; the reference point is the mean of
    /// the other side's rewards in the batch, as their `kto-pair`).
    Kto {
        /// How far the model may stray from what it was.
        beta: f32,
        /// Weight of preferred answers.
        desirable: f32,
        /// Weight of the others.
        undesirable: f32,
    },
}

impl Objective {
    /// Its name on the command line.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Sft => "sft",
            Self::Dpo { .. } => "dpo",
            Self::Orpo { .. } => "orpo",
            Self::Simpo { .. } => "simpo",
            Self::Kto { .. } => "kto",
        }
    }

    /// Whether it learns from pairs.
    pub fn takes_pairs(&self) -> bool {
        *self != Self::Sft
    }

    /// Whether it compares with the untrained model.
    pub fn needs_reference(&self) -> bool {
        matches!(self, Self::Dpo { .. } | Self::Kto { .. })
    }

    /// Names of the figures that follow the loss in [`loss`](Self::loss)'s results, all means over the batch.
    pub fn figures(&self) -> &'static [&'static str] {
        match self {
            Self::Sft => &[],
            Self::Orpo { .. } => &["accuracy", "margin", "nll", "odds"],
            Self::Dpo { .. } | Self::Simpo { .. } | Self::Kto { .. } => &["accuracy", "margin"],
        }
    }

    /// Whether the loss of a prompt's tokens counts.
    pub(super) fn looks_at_prompts(&self) -> bool {
        matches!(self, Self::Orpo { scope: SftScope::Full, .. })
    }

    /// Whether the weight of each target's loss is known before the losses are.
    pub(super) fn is_linear(&self) -> bool {
        *self == Self::Sft
    }

    /// The loss and the figures, float32 scalars, from the loss of each target, `[B, L]` a stream.
    ///
    /// # Errors
    /// When MLX fails, or a batch of the wrong kind is given.
    pub fn loss(&self, losses: &[Array], batch: &Batch, references: &References) -> Result<Vec<Array>> {
        match (self, losses, &batch.streams[..]) {
            (Self::Sft, [losses], [stream]) => {
                let sum = losses.multiply(&stream.mask)?.astype(Dtype::Float32)?.sum_all()?;
                Ok(vec![sum.divide(&Array::scalar(batch.tokens as f32, Dtype::Float32)?)?])
            }
            (_, [chosen, rejected], [_, _]) => self.preference([chosen, rejected], batch, references),
            _ => Err(Error::new(format!("{} cannot learn from {} streams", self.name(), losses.len()))),
        }
    }
}
