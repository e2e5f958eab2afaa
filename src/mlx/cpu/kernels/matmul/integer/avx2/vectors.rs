//! Levels and activations multiplied, and sums and columns of vectors.
#![allow(unsafe_op_in_unsafe_fn, reason = "each function is a few intrinsics; callers hold AVX2")]

use std::arch::x86_64::*;

use super::super::packing::{LINE, Mode};

/// Bytes of a part of a line.
pub(super) const PART: usize = LINE * 4;

/// Vectors of activations that meet a part of a line: the digits that are bytes, or one of whole numbers.
pub(super) const fn planes<M: Mode, const BITS: usize>() -> usize {
    if BITS == 4 { M::PLANES } else { 1 }
}

/// The two parts of some words of levels: the low and the high nibbles of the bytes, or the even and the odd bytes as
/// halves.
#[inline(always)]
pub(super) unsafe fn unpack<const BITS: usize>(words: __m256i) -> [__m256i; 2] {
    if BITS == 4 {
        let mask = _mm256_set1_epi8(15);
        [_mm256_and_si256(words, mask), _mm256_and_si256(_mm256_srli_epi16::<4>(words), mask)]
    } else {
        [_mm256_and_si256(words, _mm256_set1_epi16(255)), _mm256_srli_epi16::<8>(words)]
    }
}

/// What the pairs of 16-bit sums are multiplied with when they are added up: the weight of a digit.
#[inline(always)]
pub(super) unsafe fn weight<M: Mode>(plane: usize) -> __m256i {
    _mm256_set1_epi16(if plane + 1 < M::PLANES { 256 } else { 1 })
}

/// The sums of each word's products with the activations at `x`, of which planes lie two parts apart.
#[inline(always)]
pub(super) unsafe fn dot<M: Mode, const BITS: usize>(levels: [__m256i; 2], x: *const u8) -> __m256i {
    let mut sum = _mm256_setzero_si256();
    for plane in 0..planes::<M, BITS>() {
        let x = x.add(plane * 2 * PART);
        let first = _mm256_loadu_si256(x.cast());
        let second = _mm256_loadu_si256(x.add(PART).cast());
        if BITS == 4 {
            // Twice two products of at most 15 and 128.
            let pairs = _mm256_add_epi16(
                _mm256_maddubs_epi16(levels[0], first),
                _mm256_maddubs_epi16(levels[1], second),
            );
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, weight::<M>(plane)));
        } else {
            let both =
                _mm256_add_epi32(_mm256_madd_epi16(levels[0], first), _mm256_madd_epi16(levels[1], second));
            sum = _mm256_add_epi32(sum, both);
        }
    }
    sum
}

/// Lane `4 * i + j` of the result is the sum of the four lanes of `rows[j]` from `4 * i` on.
#[inline(always)]
pub(super) unsafe fn sum_fours([a, b, c, d]: [__m256i; 4]) -> __m256i {
    let ab = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    let cd = _mm256_add_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
    _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd))
}

/// Row `i` of the result has element `i` of each row: an 8 by 8 transpose of 32-bit values.
#[inline(always)]
pub(super) unsafe fn transpose(rows: [__m256i; 8]) -> [__m256i; 8] {
    let mut fours = rows;
    for half in [0, 4] {
        let [a, b, c, d] = [rows[half], rows[half + 1], rows[half + 2], rows[half + 3]];
        let (low_ab, high_ab) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
        let (low_cd, high_cd) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
        fours[half] = _mm256_unpacklo_epi64(low_ab, low_cd);
        fours[half + 1] = _mm256_unpackhi_epi64(low_ab, low_cd);
        fours[half + 2] = _mm256_unpacklo_epi64(high_ab, high_cd);
        fours[half + 3] = _mm256_unpackhi_epi64(high_ab, high_cd);
    }
    let mut columns = fours;
    for i in 0..4 {
        columns[i] = _mm256_permute2x128_si256::<0x20>(fours[i], fours[4 + i]);
        columns[4 + i] = _mm256_permute2x128_si256::<0x31>(fours[i], fours[4 + i]);
    }
    columns
}

/// Eight words, of which without `ALL` only `count` exist; the others are 0.
#[inline(always)]
pub(super) unsafe fn load<const ALL: bool>(from: *const u8, count: usize) -> __m256i {
    if ALL {
        return _mm256_loadu_si256(from.cast());
    }
    let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    _mm256_maskload_epi32(from.cast(), _mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), lanes))
}
