//! The composed operations of `mx.fast`: rope, norms, attention.

use mlx_sys as ffi;

use super::array::{Array, optional};
use super::error::Result;

/// What a query may attend to.
#[derive(Clone, Debug)]
pub enum Mask {
    /// Everything.
    None,
    /// Keys up to the query's own position, the last query standing at the last key.
    Causal,
    /// Boolean (true = attend) or additive, broadcastable to `[B, heads, L, T]`.
    Array(Array),
}

/// Rotary position embedding of the first `dims` features of `x`, `[…, L, D]`.
///
/// Either `base` or `freqs` (the `dims / 2` inverse frequencies) is given; positions are
/// `scale * (offset + 0..L)`.
pub fn rope(
    x: &Array,
    dims: i32,
    traditional: bool,
    base: Option<f32>,
    scale: f32,
    offset: i32,
    freqs: Option<&Array>,
) -> Result<Array> {
    let base = ffi::mlx_optional_float { value: base.unwrap_or(0.0), has_value: base.is_some() };
    // SAFETY: handles are valid for the call.
    Array::from_op(|out, stream| unsafe {
        ffi::mlx_fast_rope(out, x.raw, dims, traditional, base, scale, offset, optional(freqs), stream)
    })
}

/// As [`rope`] of `x`, `[B, …, L, D]`, whose rows have places of their own: `offsets` is `int32 [B]`.
pub fn rope_at(
    x: &Array,
    dims: i32,
    traditional: bool,
    base: Option<f32>,
    scale: f32,
    offsets: &Array,
    freqs: Option<&Array>,
) -> Result<Array> {
    let base = ffi::mlx_optional_float { value: base.unwrap_or(0.0), has_value: base.is_some() };
    // SAFETY: handles are valid for the call.
    Array::from_op(|out, stream| unsafe {
        let (offsets, freqs) = (offsets.raw, optional(freqs));
        ffi::mlx_fast_rope_dynamic(out, x.raw, dims, traditional, base, scale, offsets, freqs, stream)
    })
}

/// `x / rms(x) * weight` over the last axis, accumulated in f32.
pub fn rms_norm(x: &Array, weight: Option<&Array>, eps: f32) -> Result<Array> {
    // SAFETY: handles are valid for the call.
    Array::from_op(|out, stream| unsafe { ffi::mlx_fast_rms_norm(out, x.raw, optional(weight), eps, stream) })
}

/// Layer normalization over the last axis.
pub fn layer_norm(x: &Array, weight: Option<&Array>, bias: Option<&Array>, eps: f32) -> Result<Array> {
    // SAFETY: handles are valid for the call.
    Array::from_op(|out, stream| unsafe {
        ffi::mlx_fast_layer_norm(out, x.raw, optional(weight), optional(bias), eps, stream)
    })
}

/// `softmax(q k^T * scale + mask) v`. `q` is `[B, H, L, D]`, `k` and `v` `[B, H_kv, T, D]` with `H` a multiple of
/// `H_kv`.
pub fn scaled_dot_product_attention(
    queries: &Array,
    keys: &Array,
    values: &Array,
    scale: f32,
    mask: &Mask,
    sinks: Option<&Array>,
) -> Result<Array> {
    let (mode, mask) = match mask {
        Mask::None => (c"", None),
        Mask::Causal => (c"causal", None),
        Mask::Array(mask) => (c"array", Some(mask)),
    };
    // SAFETY: handles are valid for the call; the mode is a static C string.
    Array::from_op(|out, stream| unsafe {
        ffi::mlx_fast_scaled_dot_product_attention(
            out,
            queries.raw,
            keys.raw,
            values.raw,
            scale,
            mode.as_ptr(),
            optional(mask),
            optional(sinks),
            false,
            stream,
        )
    })
}
