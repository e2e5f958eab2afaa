//! Products in which indices choose the matrix for each row: experts of a mixture.

use mlx_sys as ffi;

use super::array::{Array, optional};
use super::error::Result;
use super::quantized::Raw;
use crate::checkpoint::QuantParams;

/// `x[i] @ w[indices[i]]`, `x` being `[…, M, K]`, `w` `[experts, K, N]`; the leading dimensions of `x` and `indices`
/// broadcast.
pub fn gather_mm(x: &Array, w: &Array, indices: &Array) -> Result<Array> {
    // SAFETY: handles are valid for the call.
    Array::from_op(|out, stream| unsafe {
        ffi::mlx_gather_mm(out, x.raw, w.raw, optional(None), indices.raw, false, stream)
    })
}

/// `x[i] @ w[indices[i]].T` with packed matrices `[experts, N, K]`; shapes as in [`gather_mm`].
pub fn gather_qmm(
    x: &Array,
    w: &Array,
    scales: &Array,
    biases: Option<&Array>,
    indices: &Array,
    params: QuantParams,
) -> Result<Array> {
    // SAFETY: handles are valid for the call; the mode is a static C string.
    Array::from_op(|out, stream| unsafe {
        ffi::mlx_gather_qmm(
            out,
            x.raw,
            w.raw,
            scales.raw,
            optional(biases),
            optional(None),
            indices.raw,
            true,
            params.group(),
            params.width(),
            params.mode().as_ptr(),
            false,
            stream,
        )
    })
}
