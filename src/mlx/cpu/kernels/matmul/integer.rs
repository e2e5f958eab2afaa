//! `x · Wᵀ` with integer products, for affine weights of 4 and 8 bits on AVX-512 with VNNI.
//!
//! Each group of a row of x is rounded to 16 or 8 bits with a scale of its own. In a group everything is exact: an
//! integer sum of level times activation, and the integer sum of the activations for the bias term (taken from the
//! rounded activations, or the bias would multiply what the products have not seen). Then, for each output and
//! group in turn, two fused multiply-adds: `y += bias * sum_of_x`, `y += dot * (scale * scale_of_x)`.

use super::matrix::{Matrix, Storage};
use crate::coding::{QuantMode, QuantParams};

#[cfg(target_arch = "x86_64")]
mod few;
#[cfg(target_arch = "x86_64")]
mod kernel;
#[cfg(target_arch = "x86_64")]
mod operand;
#[cfg(target_arch = "x86_64")]
mod rounding;
#[cfg(target_arch = "x86_64")]
mod scales;
#[cfg(target_arch = "x86_64")]
mod tile;

#[cfg(target_arch = "x86_64")]
pub(super) use kernel::{BLOCK_ROWS, part, run, unit};
#[cfg(target_arch = "x86_64")]
pub(super) use operand::{Int8, Int16, row_size};
#[cfg(target_arch = "x86_64")]
pub(super) use rounding::{Packing, Rounded, round_row};

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
