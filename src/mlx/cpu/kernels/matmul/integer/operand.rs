//! How levels and activations meet in the dot-product instruction of each mode.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "each function is a few intrinsics; callers hold AVX-512 with VNNI"
)]

use std::arch::x86_64::*;

/// An integer mode: operands are 16 lanes of 32 bits, each with 4 bytes or 2 halves of a row of weights.
///
/// # Safety
/// All functions: the processor has AVX-512 (F, BW, DQ, VL) with VNNI.
pub(in super::super) trait Mode: Copy + Send + Sync + 'static {
    /// The largest magnitude of a rounded activation.
    const LIMIT: f32;
    /// Weights that one lane of an operand holds.
    const WIDTH: usize;
    /// Activations of a segment of K: the operands of 32 rows of weights fit in 24 KB.
    const SEGMENT: usize;

    /// The order in which activations meet levels that came from words of `BITS` bits: for each place among 8, the
    /// element.
    fn order(bits: usize) -> [u8; 8];
    /// Stores 16 rounded activations, already in order.
    unsafe fn store(to: *mut u8, values: __m512i);
    /// Spreads 16 rows' words of 4-bit levels to `8 / WIDTH` operands, `stride` bytes apart.
    unsafe fn spread4(words: __m512i, to: *mut u8, stride: usize);
    /// Spreads 16 rows' words of 8-bit levels to `4 / WIDTH` operands, `stride` bytes apart.
    unsafe fn spread8(words: __m512i, to: *mut u8, stride: usize);
    /// Adds the products of each lane.
    unsafe fn dot(sums: __m512i, levels: __m512i, activations: __m512i) -> __m512i;
}

/// Bytes: 4 products a lane.
#[derive(Clone, Copy)]
pub(in super::super) struct Int8;

impl Mode for Int8 {
    const LIMIT: f32 = 127.0;
    const WIDTH: usize = 4;
    const SEGMENT: usize = 768;

    fn order(bits: usize) -> [u8; 8] {
        if bits == 4 { [0, 2, 4, 6, 1, 3, 5, 7] } else { [0, 1, 2, 3, 4, 5, 6, 7] }
    }

    #[inline(always)]
    unsafe fn store(to: *mut u8, values: __m512i) {
        _mm_storeu_si128(to.cast(), _mm512_cvtsepi32_epi8(values));
    }

    #[inline(always)]
    unsafe fn spread4(words: __m512i, to: *mut u8, stride: usize) {
        let mask = _mm512_set1_epi8(15);
        _mm512_storeu_si512(to.cast(), _mm512_and_si512(words, mask));
        let odd = _mm512_and_si512(_mm512_srli_epi32::<4>(words), mask);
        _mm512_storeu_si512(to.add(stride).cast(), odd);
    }

    #[inline(always)]
    unsafe fn spread8(words: __m512i, to: *mut u8, _stride: usize) {
        _mm512_storeu_si512(to.cast(), words);
    }

    #[inline(always)]
    unsafe fn dot(sums: __m512i, levels: __m512i, activations: __m512i) -> __m512i {
        _mm512_dpbusd_epi32(sums, levels, activations)
    }
}

/// Halves: 2 products a lane.
#[derive(Clone, Copy)]
pub(in super::super) struct Int16;

impl Mode for Int16 {
    const LIMIT: f32 = 32767.0;
    const WIDTH: usize = 2;
    const SEGMENT: usize = 384;

    fn order(bits: usize) -> [u8; 8] {
        if bits == 4 { [0, 4, 1, 5, 2, 6, 3, 7] } else { [0, 2, 1, 3, 4, 6, 5, 7] }
    }

    #[inline(always)]
    unsafe fn store(to: *mut u8, values: __m512i) {
        _mm256_storeu_si256(to.cast(), _mm512_cvtsepi32_epi16(values));
    }

    #[inline(always)]
    unsafe fn spread4(words: __m512i, to: *mut u8, stride: usize) {
        let mask = _mm512_set1_epi32(0x000f_000f);
        _mm512_storeu_si512(to.cast(), _mm512_and_si512(words, mask));
        let second = _mm512_and_si512(_mm512_srli_epi32::<4>(words), mask);
        _mm512_storeu_si512(to.add(stride).cast(), second);
        let third = _mm512_and_si512(_mm512_srli_epi32::<8>(words), mask);
        _mm512_storeu_si512(to.add(2 * stride).cast(), third);
        let fourth = _mm512_and_si512(_mm512_srli_epi32::<12>(words), mask);
        _mm512_storeu_si512(to.add(3 * stride).cast(), fourth);
    }

    #[inline(always)]
    unsafe fn spread8(words: __m512i, to: *mut u8, stride: usize) {
        let mask = _mm512_set1_epi32(0x00ff_00ff);
        _mm512_storeu_si512(to.cast(), _mm512_and_si512(words, mask));
        let odd = _mm512_and_si512(_mm512_srli_epi32::<8>(words), mask);
        _mm512_storeu_si512(to.add(stride).cast(), odd);
    }

    #[inline(always)]
    unsafe fn dot(sums: __m512i, levels: __m512i, activations: __m512i) -> __m512i {
        _mm512_dpwssd_epi32(sums, levels, activations)
    }
}

/// Row `i` of the result has element `i` of each row: a 16 by 16 transpose of 32-bit values.
#[inline(always)]
pub(super) unsafe fn transpose(rows: [__m512i; 16]) -> [__m512i; 16] {
    let mut pairs = rows;
    for i in (0..16).step_by(2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    // `fours[4 * i + j]`: in each 128-bit lane, element `4 * lane + j` of rows `4 * i` to `4 * i + 3`.
    let mut fours = pairs;
    for i in (0..16).step_by(4) {
        fours[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    let mut columns = fours;
    for j in 0..4 {
        let (a, b, c, d) = (fours[j], fours[4 + j], fours[8 + j], fours[12 + j]);
        let low_ab = _mm512_shuffle_i32x4::<0x88>(a, b);
        let high_ab = _mm512_shuffle_i32x4::<0xdd>(a, b);
        let low_cd = _mm512_shuffle_i32x4::<0x88>(c, d);
        let high_cd = _mm512_shuffle_i32x4::<0xdd>(c, d);
        columns[j] = _mm512_shuffle_i32x4::<0x88>(low_ab, low_cd);
        columns[4 + j] = _mm512_shuffle_i32x4::<0x88>(high_ab, high_cd);
        columns[8 + j] = _mm512_shuffle_i32x4::<0xdd>(low_ab, low_cd);
        columns[12 + j] = _mm512_shuffle_i32x4::<0xdd>(high_ab, high_cd);
    }
    columns
}
