//! `x · Wᵀ` with integer products, for affine weights of 4 and 8 bits on AVX-512 with VNNI and on AVX2.
//!
//! Each group of a row of x is rounded to 16 or 8 bits with a scale of its own. In a group everything is exact: an
//! integer sum of level times activation, and the integer sum of the activations for the bias term (taken from the
//! rounded activations, or the bias would multiply what the products have not seen). Then, for each output and
//! group in turn, two fused multiply-adds: `y += bias * sum_of_x`, `y += dot * (scale * scale_of_x)`. So all
//! instructions give the same bits.

use super::super::super::{Isa, Level};
use super::matrix::{Matrix, Storage};
use crate::coding::{QuantMode, QuantParams};

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod fetching;
#[cfg(target_arch = "x86_64")]
mod kernel;
#[cfg(target_arch = "x86_64")]
mod packing;
#[cfg(target_arch = "x86_64")]
mod panel;
#[cfg(target_arch = "x86_64")]
mod rounding;
#[cfg(target_arch = "x86_64")]
mod scales;

#[cfg(target_arch = "x86_64")]
pub(super) use kernel::{BLOCK_ROWS, part, run};
#[cfg(target_arch = "x86_64")]
pub(super) use packing::{Int8, Int16, Packing, Rounded};
#[cfg(target_arch = "x86_64")]
pub(super) use rounding::round_row;

/// Whether there are integer kernels for weights that are packed so.
pub fn takes_integers(quantization: QuantParams) -> bool {
    quantization.mode == QuantMode::Affine && matches!(quantization.bits, 4 | 8)
}

/// Whether there are integer kernels for these instructions. AVX-512 without VNNI has none: float32 is as fast there.
pub fn has_integers(isa: Isa) -> bool {
    cfg!(target_arch = "x86_64") && matches!(isa.level(), Level::Avx2 | Level::Avx512Vnni)
}

/// Whether there are integer kernels for the weights.
pub(super) fn supports(isa: Isa, matrix: &Matrix<'_>) -> bool {
    match matrix.storage {
        Storage::Packed { quantization, .. } => has_integers(isa) && takes_integers(quantization),
        Storage::Dense(_) => false,
    }
}

/// The instructions of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::kernels) enum Set {
    /// VNNI multiplies any level by any digit.
    Vnni,
    /// Products of bytes are added up in 16 bits, which hold those of nibbles. Levels of 8 bits meet whole activations
    /// of 16 bits instead, in either mode.
    Avx2,
}

impl Set {
    /// The set of instructions that [have integers](has_integers).
    pub(super) fn of(isa: Isa) -> Self {
        if isa.level() == Level::Avx2 { Self::Avx2 } else { Self::Vnni }
    }
}
