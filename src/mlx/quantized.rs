//! Quantized matrices: MLX's four modes.

use std::ffi::CStr;

use mlx_sys as ffi;

use super::array::{Array, optional, take_vector};
use super::device::stream;
use super::error::{Error, Result, check};

/// How groups of weights are coded (`mode` of `mx.quantize`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QuantMode {
    /// `q * scale + bias` for each group.
    Affine,
    /// OCP microscaling, 4-bit floats in groups of 32 with a power-of-two scale.
    Mxfp4,
    /// NVIDIA's 4-bit floats in groups of 16 with an 8-bit float scale.
    Nvfp4,
    /// OCP microscaling, 8-bit floats in groups of 32 with a power-of-two scale.
    Mxfp8,
}

impl QuantMode {
    /// The name in configs and in `mlx.core`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Affine => "affine",
            Self::Mxfp4 => "mxfp4",
            Self::Nvfp4 => "nvfp4",
            Self::Mxfp8 => "mxfp8",
        }
    }

    fn c_name(self) -> &'static CStr {
        match self {
            Self::Affine => c"affine",
            Self::Mxfp4 => c"mxfp4",
            Self::Nvfp4 => c"nvfp4",
            Self::Mxfp8 => c"mxfp8",
        }
    }
}

/// How one matrix is quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quantization {
    /// Bits a weight.
    pub bits: i32,
    /// Weights that share a scale.
    pub group_size: i32,
    /// The coding.
    pub mode: QuantMode,
}

impl Quantization {
    fn group(self) -> ffi::mlx_optional_int {
        ffi::mlx_optional_int { value: self.group_size, has_value: true }
    }

    fn width(self) -> ffi::mlx_optional_int {
        ffi::mlx_optional_int { value: self.bits, has_value: true }
    }
}

/// `x @ w.T` (`transpose`) or `x @ w` with a packed `w`. `x` is `[…, M, K]`, the result `[…, M, N]`.
pub fn quantized_matmul(
    x: &Array,
    w: &Array,
    scales: &Array,
    biases: Option<&Array>,
    transpose: bool,
    quantization: Quantization,
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
            quantization.group(),
            quantization.width(),
            quantization.mode.c_name().as_ptr(),
            stream,
        )
    })
}

/// The matrix a packed one stands for, in the type of the scales (bfloat16 for the float modes).
pub fn dequantize(
    w: &Array,
    scales: &Array,
    biases: Option<&Array>,
    quantization: Quantization,
) -> Result<Array> {
    let dtype = ffi::mlx_optional_dtype { value: 0, has_value: false };
    // SAFETY: handles are valid for the call; the mode is a static C string.
    Array::from_op(|out, stream| unsafe {
        ffi::mlx_dequantize(
            out,
            w.raw,
            scales.raw,
            optional(biases),
            quantization.group(),
            quantization.width(),
            quantization.mode.c_name().as_ptr(),
            optional(None),
            dtype,
            stream,
        )
    })
}

/// Packs `w` along its last axis. Returns weights, scales and, for the affine mode, biases.
pub fn quantize(w: &Array, quantization: Quantization) -> Result<(Array, Array, Option<Array>)> {
    let stream = stream();
    // SAFETY: handles are valid for the call; `take_vector` frees the vector.
    let parts = unsafe {
        let mut vector = ffi::mlx_vector_array_new();
        let status = ffi::mlx_quantize(
            &mut vector,
            w.raw,
            quantization.group(),
            quantization.width(),
            quantization.mode.c_name().as_ptr(),
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
