//! The `k` most likely tokens (`apply_top_k`).

use crate::mlx::{Array, Compiled, Result};

/// Keeps `top_k` tokens, `0 < top_k < vocabulary`; which of equals stay is the partition's choice.
pub(super) fn compile(top_k: i32) -> Result<Compiled> {
    Compiled::new(move |inputs| Ok(vec![apply(&inputs[0], top_k)?]), false)
}

fn apply(logprobs: &Array, top_k: i32) -> Result<Array> {
    let order = logprobs.negative()?.argpartition(top_k - 1, -1)?;
    let rest = order.slice(-1, top_k, logprobs.dim(-1))?;
    logprobs.put_along_axis(&rest, &Array::scalar(f32::NEG_INFINITY, logprobs.dtype())?, -1)
}
