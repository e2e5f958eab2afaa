//! Nucleus filter (`apply_top_p`): <https://arxiv.org/abs/1904.09751>.

use crate::mlx::{Array, Compiled, Dtype, Result};

/// Keeps the smallest set of most likely tokens whose mass reaches `top_p` of the total; ties at the threshold
/// are kept.
pub(super) fn compile(top_p: f32) -> Result<Compiled> {
    Compiled::new(move |inputs| Ok(vec![apply(&inputs[0], top_p)?]), false)
}

fn apply(logprobs: &Array, top_p: f32) -> Result<Array> {
    let sorted = logprobs.sort(-1)?;
    let probs = sorted.astype(Dtype::Float32)?.exp()?;
    let mass_above = probs.cumsum(-1, true, false)?;
    let total = mass_above.slice(-1, 0, 1)?.add(&probs.slice(-1, 0, 1)?)?;
    let dropped =
        mass_above.greater_equal(&Array::scalar(top_p, Dtype::Float32)?.multiply(&total)?)?.sum(-1, true)?;
    let threshold = sorted.take_along_axis(&dropped, -1)?;
    let nothing = Array::scalar(f32::NEG_INFINITY, logprobs.dtype())?;
    logprobs.less(&threshold)?.select(&nothing, logprobs)
}
