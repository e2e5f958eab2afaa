//! Quantized matrices: MLX's four modes.

use std::ffi::CStr;

use mlx_sys as ffi;

use super::array::{Array, optional, take_vector};
use super::device::stream;
use super::error::{Error, Result, check};
use crate::checkpoint::{QuantMode, QuantParams};

pub(super) trait Raw {
    fn group(&self) -> ffi::mlx_optional_int;
    fn width(&self) -> ffi::mlx_optional_int;
    fn mode(&self) -> &'static CStr;
}

impl Raw for QuantParams {
    fn group(&self) -> ffi::mlx_optional_int {
        ffi::mlx_optional_int { value: self.group_size as i32, has_value: true }
    }

    fn width(&self) -> ffi::mlx_optional_int {
        ffi::mlx_optional_int { value: i32::from(self.bits), has_value: true }
    }

    fn mode(&self) -> &'static CStr {
        match self.mode {
            QuantMode::Affine => c"affine",
            QuantMode::Mxfp4 => c"mxfp4",
            QuantMode::Nvfp4 => c"nvfp4",
            QuantMode::Mxfp8 => c"mxfp8",
        }
    }
}

/// `x @ w.T` (`transpose`) or `x @ w` with a packed `w`. `x` is `[…, M, K]`, the result `[…, M, N]`.
pub fn quantized_matmul(
    x: &Array,
    w: &Array,
    scales: &Array,
    biases: Option<&Array>,
    transpose: bool,
    params: QuantParams,
) -> Result<Array> {
    // SAFETY: handles are valid for the call; the mode is a static C string.
    Array::from_op(|out, stream| unsafe {
        ffi::mlx_quantized_matmul(
            out,
            x.raw,
            w.raw,
            scales.raw,
            optional(biases),
            transpose,
            params.group(),
            params.width(),
            params.mode().as_ptr(),
            stream,
        )
    })
}

/// The matrix a packed one stands for, in the type of the scales (bfloat16 for the float modes).
pub fn dequantize(w: &Array, scales: &Array, biases: Option<&Array>, params: QuantParams) -> Result<Array> {
    let dtype = ffi::mlx_optional_dtype { value: 0, has_value: false };
    // SAFETY: handles are valid for the call; the mode is a static C string.
    Array::from_op(|out, stream| unsafe {
        ffi::mlx_dequantize(
            out,
            w.raw,
            scales.raw,
            optional(biases),
            params.group(),
            params.width(),
            params.mode().as_ptr(),
            optional(None),
            dtype,
            stream,
        )
    })
}

/// Packs `w` along its last axis. Returns weights, scales and, for the affine mode, biases.
pub fn quantize(w: &Array, params: QuantParams) -> Result<(Array, Array, Option<Array>)> {
    let stream = stream();
    // SAFETY: handles are valid for the call; `take_vector` frees the vector.
    let parts = unsafe {
        let mut vector = ffi::mlx_vector_array_new();
        let status = ffi::mlx_quantize(
            &mut vector,
            w.raw,
            params.group(),
            params.width(),
            params.mode().as_ptr(),
            optional(None),
            stream,
        );
        let parts = take_vector(vector);
        check(status)?;
        parts?
    };
    let mut parts = parts.into_iter();
    match (parts.next(), parts.next()) {
        (Some(weight), Some(scales)) => Ok((weight, scales, parts.next())),
        _ => Err(Error::new("mx.quantize returned fewer arrays than it promises")),
    }
}
