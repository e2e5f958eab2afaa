//! Minimum relative probability (`apply_min_p`): <https://arxiv.org/abs/2407.01082>.

use super::{RangeError, require};
use crate::mlx::{Array, Compiled, Dtype, Result};

/// Parameters of the filter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MinP {
    /// Probability, relative to the most likely token's, below which a token goes.
    pub p: f64,
    /// Tokens that stay whatever their probability; at least 1.
    pub min_tokens_to_keep: i32,
}

impl MinP {
    pub(super) fn validate(self) -> std::result::Result<(), RangeError> {
        require((0.0..=1.0).contains(&self.p), "min_p", "in [0, 1]", self.p)?;
        require(self.min_tokens_to_keep >= 1, "min_tokens_to_keep", ">= 1", self.min_tokens_to_keep)
    }
}

pub(super) fn compile(params: MinP) -> Result<Compiled> {
    Compiled::new(move |inputs| Ok(vec![apply(&inputs[0], params)?]), false)
}

fn apply(logprobs: &Array, params: MinP) -> Result<Array> {
    let top = logprobs.max(-1, true)?;
    let threshold = top.add_scalar(params.p.ln() as f32)?;
    let mut removed = logprobs.less(&threshold)?;
    let keep = params.min_tokens_to_keep.min(logprobs.dim(-1));
    if keep > 1 {
        let order = logprobs.argpartition(-keep, -1)?;
        let vocab = logprobs.dim(-1);
        let top_indices = order.slice(-1, vocab - keep, vocab)?;
        removed = removed.put_along_axis(&top_indices, &Array::scalar(0.0, Dtype::Bool)?, -1)?;
    }
    removed.select(&Array::scalar(f32::NEG_INFINITY, logprobs.dtype())?, logprobs)
}
