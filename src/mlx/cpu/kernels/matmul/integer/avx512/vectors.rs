//! Levels as the dot-product instruction takes them, and sums and columns of vectors.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "each function is a few intrinsics; callers hold AVX-512 with VNNI"
)]

use std::arch::x86_64::*;

/// The parts of a line of levels: the line itself for 8 bits, or the low and the high nibbles.
#[inline(always)]
pub(super) unsafe fn unpack<const PARTS: usize>(words: __m512i) -> [__m512i; PARTS] {
    let mut levels = [words; PARTS];
    if PARTS == 2 {
        let mask = _mm512_set1_epi8(15);
        levels[0] = _mm512_and_si512(words, mask);
        levels[PARTS - 1] = _mm512_and_si512(_mm512_srli_epi32::<4>(words), mask);
    }
    levels
}

/// The first four words of 16 rows, each a vector with a lane for each row. Of the eight halves of the words, only those
/// in `mask` are read; the others are 0.
///
/// Vectors are put together from memory, which leaves the one port that shuffles with half of a transpose.
#[inline(always)]
pub(super) unsafe fn columns<const ALL: bool>(rows: [*const u8; 16], mask: u8) -> [__m512i; 4] {
    let mut fours = [_mm512_setzero_si512(); 4];
    for j in 0..4 {
        let mut words = [_mm_setzero_si128(); 4];
        for (lane, words) in words.iter_mut().enumerate() {
            let from = rows[j + 4 * lane];
            *words =
                if ALL { _mm_loadu_si128(from.cast()) } else { _mm_maskz_loadu_epi16(mask, from.cast()) };
        }
        let four = _mm512_castsi128_si512(words[0]);
        let four = _mm512_inserti32x4::<1>(four, words[1]);
        let four = _mm512_inserti32x4::<2>(four, words[2]);
        fours[j] = _mm512_inserti32x4::<3>(four, words[3]);
    }
    let [a, b, c, d] = fours;
    let (low_ab, high_ab) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let (low_cd, high_cd) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    [
        _mm512_unpacklo_epi64(low_ab, low_cd),
        _mm512_unpackhi_epi64(low_ab, low_cd),
        _mm512_unpacklo_epi64(high_ab, high_cd),
        _mm512_unpackhi_epi64(high_ab, high_cd),
    ]
}

/// Row `i` of the result has 128-bit lane `i` of each row.
#[inline(always)]
pub(super) unsafe fn transpose_lanes([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    let (even_ab, odd_ab) = (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b));
    let (even_cd, odd_cd) = (_mm512_shuffle_i32x4::<0x88>(c, d), _mm512_shuffle_i32x4::<0xdd>(c, d));
    [
        _mm512_shuffle_i32x4::<0x88>(even_ab, even_cd),
        _mm512_shuffle_i32x4::<0x88>(odd_ab, odd_cd),
        _mm512_shuffle_i32x4::<0xdd>(even_ab, even_cd),
        _mm512_shuffle_i32x4::<0xdd>(odd_ab, odd_cd),
    ]
}

/// Lane `4 * i + j` of the result is the sum of the four lanes of `rows[j]` from `4 * i` on.
#[inline(always)]
pub(super) unsafe fn sum_fours([a, b, c, d]: [__m512i; 4]) -> __m512i {
    let ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd))
}

/// Lane `i` of the result is the sum of the lanes of `rows[i]`.
#[inline(always)]
pub(super) unsafe fn sum_all(rows: [__m512i; 16]) -> __m512i {
    let mut fours = [rows[0]; 4];
    for (i, four) in fours.iter_mut().enumerate() {
        *four = sum_fours([rows[4 * i], rows[4 * i + 1], rows[4 * i + 2], rows[4 * i + 3]]);
    }
    let [a, b, c, d] = transpose_lanes(fours);
    _mm512_add_epi32(_mm512_add_epi32(a, b), _mm512_add_epi32(c, d))
}
