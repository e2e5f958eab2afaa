//! `x · Wᵀ` with integer products, for affine weights of 4 and 8 bits on AVX-512 with VNNI.
//!
//! Each group of a row of x is rounded to 16 or 8 bits with a scale of its own. In a group everything is exact: an
//! integer sum of level times activation, and the integer sum of the activations for the bias term (taken from the
//! rounded activations, or the bias would multiply what the products have not seen). Then, for each output and
//! group in turn, two fused multiply-adds: `y += bias * sum_of_x`, `y += dot * (scale * scale_of_x)`.
//!
//! Lanes run along the outputs: 16 rows of weights are transposed word by word in registers, and the words are spread
//! to the operands of the dot-product instruction in first-level cache.

use super::matrix::{Matrix, Storage};
use crate::coding::{QuantMode, QuantParams};

#[cfg(target_arch = "x86_64")]
mod kernel;
#[cfg(target_arch = "x86_64")]
mod operand;

#[cfg(target_arch = "x86_64")]
pub(super) use kernel::{BLOCK_ROWS, PANEL, Rounded, part, round_range, run};
#[cfg(target_arch = "x86_64")]
pub(super) use operand::{Int8, Int16};

/// Whether there are integer kernels for weights that are packed so.
pub fn takes_integers(quantization: QuantParams) -> bool {
    quantization.mode == QuantMode::Affine && matches!(quantization.bits, 4 | 8)
}

/// Whether there are integer kernels for the weights.
pub(super) fn supports(matrix: &Matrix<'_>) -> bool {
    match matrix.storage {
        Storage::Packed { quantization, .. } => takes_integers(quantization),
        Storage::Dense(_) => false,
    }
}
