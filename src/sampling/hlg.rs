//! HLG tone-curve sampling: temperature in the middle, a logarithmic shoulder above and toe below.
//!
//! Named after the hybrid log-gamma curve of television. It takes the place of every filter: near the pivot,
//! log-probabilities are scaled by `1 / temperature`; beyond `width` nats they roll off logarithmically, so
//! neither the head nor the tail of the distribution is cut.

use super::{RangeError, require};
use crate::mlx::{Array, Result};

/// Where the pivot is measured from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HlgBase {
    /// The most likely token.
    #[default]
    Top,
    /// The mean log-probability (minus the entropy).
    Entropy,
    /// The token at which half of the mass is reached.
    Median,
}

/// Parameters of the curve, in nats.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hlg {
    /// Half-width of the linear middle.
    pub width: f32,
    /// Scale of the roll-off above.
    pub shoulder: f32,
    /// Scale of the roll-off below.
    pub toe: f32,
    /// How far below the base the pivot lies.
    pub pivot_offset: f32,
    /// What the pivot is measured from.
    pub base: HlgBase,
}

impl Default for Hlg {
    fn default() -> Self {
        Self { width: 4.0, shoulder: 4.0, toe: 6.0, pivot_offset: 6.0, base: HlgBase::Top }
    }
}

impl Hlg {
    pub(super) fn validate(self) -> std::result::Result<(), RangeError> {
        let fields = [
            ("hlg width", self.width),
            ("hlg shoulder", self.shoulder),
            ("hlg toe", self.toe),
            ("hlg pivot_offset", self.pivot_offset),
        ];
        fields
            .into_iter()
            .try_for_each(|(name, value)| require((0.0..=100.0).contains(&value), name, "in [0, 100]", value))
    }
}

/// The curve applied to log-probabilities `[1, V]`; `gain` is `1 / temperature`.
pub(super) fn apply(logprobs: &Array, curve: Hlg, gain: f32) -> Result<Array> {
    let Hlg { width, shoulder, toe, .. } = curve;
    if width.is_infinite() || (shoulder <= 0.0 && toe <= 0.0) {
        return logprobs.multiply_scalar(gain);
    }
    let scalar = |value| Array::scalar(value, logprobs.dtype());
    let z = logprobs.subtract(&pivot(logprobs, curve)?)?;
    let linear = z.multiply_scalar(gain)?;
    let above = roll_off(&z.add_scalar(-width)?, shoulder)?.add_scalar(width)?.multiply_scalar(gain)?;
    let below =
        roll_off(&z.negative()?.add_scalar(-width)?, toe)?.add_scalar(width)?.multiply_scalar(-gain)?;
    let curved = z.greater_equal(&scalar(width)?)?.select(&above, &linear)?;
    let curved = z.less(&scalar(-width)?)?.select(&below, &curved)?;
    // A forbidden token stays forbidden whatever the toe makes of it.
    let forbidden = scalar(f32::NEG_INFINITY)?;
    logprobs.equal(&forbidden)?.select(&forbidden, &curved)
}

/// `scale * ln(1 + excess / scale)`; a scale of 0 is a hard limit.
fn roll_off(excess: &Array, scale: f32) -> Result<Array> {
    if scale <= 0.0 {
        return excess.multiply_scalar(0.0);
    }
    let inside = excess.multiply_scalar(1.0 / scale)?.add_scalar(1.0)?;
    inside.maximum(&Array::scalar(1e-9, excess.dtype())?)?.log()?.multiply_scalar(scale)
}

fn pivot(logprobs: &Array, curve: Hlg) -> Result<Array> {
    let base = match curve.base {
        HlgBase::Top => logprobs.max(-1, true)?,
        HlgBase::Entropy => {
            let zero = Array::scalar(0.0, logprobs.dtype())?;
            let probs = logprobs.exp()?;
            // 0 * -inf would be NaN.
            probs.greater(&zero)?.select(&probs.multiply(logprobs)?, &zero)?.sum(-1, true)?
        }
        HlgBase::Median => {
            let descending = logprobs.negative()?.sort(-1)?.negative()?;
            let reached = descending
                .exp()?
                .cumsum(-1, false, true)?
                .greater_equal(&Array::scalar(0.5, logprobs.dtype())?)?;
            let nothing = Array::scalar(f32::NEG_INFINITY, logprobs.dtype())?;
            reached.select(&descending, &nothing)?.max(-1, true)?
        }
    };
    base.add_scalar(-curve.pivot_offset)
}
