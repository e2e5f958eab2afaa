//! Sixteen float32 lanes on every CPU.
//!
//! A kernel is written once over [`Simd`] and compiled for each instruction set. A vector has 16 lanes everywhere
//! (one AVX-512 register, two AVX2, four NEON, an array in [`Portable`]), every product-and-sum is fused, and sums
//! across lanes follow one fixed tree, so all instruction sets give the same bits. That makes [`Portable`] the
//! yardstick of the others and keeps results the same from machine to machine.
//!
//! Functions between [`run`] and the intrinsics must be `#[inline(always)]`: only then are they compiled with the
//! instruction set's features.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod element;
pub(crate) mod math;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
#[cfg(test)]
mod tests;

pub(crate) use element::{Element, from_f32, load_part, store_part, to_f32};
pub(crate) use portable::Portable;

use half::{bf16, f16};

use crate::Isa;

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// An instruction set; a value of the type proves that this CPU has it.
///
/// Comparisons follow x86: `max(a, b)` is `a` where `a > b` and `b` otherwise, so a NaN in `b` is kept and a NaN
/// in `a` is dropped; `min` likewise.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// A vector of 16 float32 lanes.
    type V: Copy;
    /// Rows an attention tile holds in registers.
    const TILE_ROWS: usize;
    /// Keys an attention tile multiplies at a time: 2 or 4.
    const TILE_KEYS: usize;
    /// Vectors of a row an attention tile holds in registers.
    const TILE_VECTORS: usize;

    /// Runs `kernel` as a function of its own, compiled with these instructions.
    fn enter<K: Kernel>(self, kernel: K) -> K::Output;

    fn splat(self, x: f32) -> Self::V;
    fn load(self, from: &[f32; LANES]) -> Self::V;
    fn store(self, to: &mut [f32; LANES], v: Self::V);
    fn load_f16(self, from: &[f16; LANES]) -> Self::V;
    fn store_f16(self, to: &mut [f16; LANES], v: Self::V);
    fn load_bf16(self, from: &[bf16; LANES]) -> Self::V;
    fn store_bf16(self, to: &mut [bf16; LANES], v: Self::V);
    /// Bytes as numbers, the low one of a word first.
    fn load_u8(self, from: &[u32; LANES / 4]) -> Self::V;
    /// Nibbles as numbers, the low one of a word first.
    fn load_u4(self, from: &[u32; LANES / 8]) -> Self::V;

    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once.
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `c - a * b`, rounded once.
    fn neg_mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    fn abs(self, v: Self::V) -> Self::V;
    /// The magnitude of `v` with the sign of `sign`.
    fn copysign(self, v: Self::V, sign: Self::V) -> Self::V;
    /// To the nearest integer, ties to even.
    fn round(self, v: Self::V) -> Self::V;
    fn floor(self, v: Self::V) -> Self::V;
    /// `v * 2^n` for `v` near 1 and integral `n` from -250 to 250, rounded once.
    fn scale2(self, v: Self::V, n: Self::V) -> Self::V;
    /// `yes` where `a < b`, else `no`.
    fn select_lt(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V;
    /// `v` in the lanes `low..high`, `fill` elsewhere.
    fn keep_lanes(self, v: Self::V, low: usize, high: usize, fill: Self::V) -> Self::V;

    /// Even and odd elements of 32 consecutive ones.
    fn deinterleave(self, a: Self::V, b: Self::V) -> (Self::V, Self::V);
    /// The inverse of [`Simd::deinterleave`].
    fn interleave(self, even: Self::V, odd: Self::V) -> (Self::V, Self::V);

    /// Folds four vectors to four lanes each (lane `i` + `i + 8`, then `i` + `i + 4`), for [`Simd::merge_folded`].
    fn fold(self, v: [Self::V; 4]) -> Self::V;
    /// Ends the sums of 16 vectors: fold `q` holds the vectors `q`, `q + 4`, `q + 8`, `q + 12`; lane `i` of the
    /// result is the sum of vector `i`, equal in bits to [`Simd::sum`] of it.
    fn merge_folded(self, folds: [Self::V; 4]) -> Self::V;
    /// The sum of all lanes: halves are added until one lane is left.
    fn sum(self, v: Self::V) -> f32;
    /// Asks for the cache line `bytes` after a place, which need not be memory.
    #[inline(always)]
    fn prefetch<T>(self, from: &[T], bytes: usize) {
        let _ = (from, bytes);
    }
    /// The largest lane.
    fn largest(self, v: Self::V) -> f32;
}

/// Work to be compiled for every instruction set.
pub(crate) trait Kernel {
    type Output;
    /// Implementations are `#[inline(always)]`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Runs `kernel` with the instructions that `isa` licenses.
pub(crate) fn run<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    if let Some(simd) = avx512::Avx512::new(isa) {
        return simd.enter(kernel);
    }
    #[cfg(target_arch = "x86_64")]
    if let Some(simd) = avx2::Avx2::new(isa) {
        return simd.enter(kernel);
    }
    #[cfg(target_arch = "aarch64")]
    if let Some(simd) = neon::Neon::new(isa) {
        return simd.enter(kernel);
    }
    let _ = isa;
    Portable.enter(kernel)
}
