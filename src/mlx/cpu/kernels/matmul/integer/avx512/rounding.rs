//! Activations rounded to integers, each group of a row with a scale of its own.
#![allow(unsafe_op_in_unsafe_fn, reason = "intrinsics throughout; callers hold AVX-512 with VNNI")]

use std::arch::x86_64::*;

use super::super::packing::{LINE, Mode, Packing, Rounded};
use super::vectors::{sum_all, transpose_lanes};

/// Groups that are rounded together.
const TOGETHER: usize = 16;

/// Rounds row `row` of x, whose values are at `from`.
///
/// # Safety
/// The processor has AVX-512 with VNNI; there are as many values as `packing` says, and room in `to`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")]
pub(in super::super) unsafe fn round_row<M: Mode>(
    from: *const f32,
    packing: Packing,
    row: usize,
    to: Rounded,
) {
    let Packing { inputs, group, bits, .. } = packing;
    let values = to.values.add(4 * row * packing.rounded_words::<M>());
    let (groups, limit) = (inputs / group, _mm512_set1_ps(M::LIMIT));
    for first in (0..groups).step_by(TOGETHER) {
        let count = (groups - first).min(TOGETHER);
        let mut largest = [_mm512_setzero_si512(); TOGETHER];
        let mut unordered: u16 = 0;
        for index in 0..count {
            let from = from.add((first + index) * group);
            let mut most = _mm512_setzero_ps();
            let mut not_numbers = 0;
            for at in (0..group).step_by(16) {
                let values = _mm512_loadu_ps(from.add(at));
                not_numbers |= _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values);
                most = _mm512_max_ps(most, _mm512_abs_ps(values));
            }
            unordered |= u16::from(not_numbers != 0) << index;
            largest[index] = _mm512_castps_si512(most);
        }
        let largest = largest_all(largest);
        let scales = _mm512_div_ps(largest, limit);
        let some = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(largest, _mm512_setzero_ps());
        let mut inverses = [0f32; TOGETHER];
        _mm512_storeu_ps(inverses.as_mut_ptr(), _mm512_maskz_div_ps(some, limit, largest));
        let mut totals = [_mm512_setzero_si512(); TOGETHER];
        for index in 0..count {
            let column = (first + index) * group;
            let inverse = _mm512_set1_ps(inverses[index]);
            let mut total = _mm512_setzero_si512();
            for at in (column..column + group).step_by(16) {
                let scaled = _mm512_mul_ps(_mm512_loadu_ps(from.add(at)), inverse);
                // Infinity times 0 is no number, for which the minimum is the limit.
                let rounded = _mm512_cvtps_epi32(_mm512_min_ps(scaled, limit));
                total = _mm512_add_epi32(total, rounded);
                if bits == 4 {
                    store_nibbles::<M>(values, at, rounded);
                } else {
                    store_bytes::<M>(values, at, rounded);
                }
            }
            totals[index] = total;
        }
        let scales = _mm512_mask_mov_ps(scales, unordered, _mm512_set1_ps(f32::NAN));
        let sums = _mm512_mul_ps(_mm512_cvtepi32_ps(sum_all(totals)), scales);
        let mask = if count == TOGETHER { !0 } else { (1 << count) - 1 };
        _mm512_mask_storeu_ps(to.scales.add(row * groups + first), mask, scales);
        _mm512_mask_storeu_ps(to.sums.add(row * groups + first), mask, sums);
    }
}

/// Lane `i` of the result is the largest lane of row `i`, which are bits of f32 that are not negative: their order is
/// that of integers.
#[inline(always)]
unsafe fn largest_all(rows: [__m512i; TOGETHER]) -> __m512 {
    let mut fours = [rows[0]; 4];
    for (i, four) in fours.iter_mut().enumerate() {
        let [a, b, c, d] = [rows[4 * i], rows[4 * i + 1], rows[4 * i + 2], rows[4 * i + 3]];
        let ab = _mm512_max_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let cd = _mm512_max_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        *four = _mm512_max_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    }
    let [a, b, c, d] = transpose_lanes(fours);
    _mm512_castsi512_ps(_mm512_max_epi32(_mm512_max_epi32(a, b), _mm512_max_epi32(c, d)))
}

/// The digits of 16 activations.
#[inline(always)]
unsafe fn digit<M: Mode>(values: __m512i, plane: usize) -> __m128i {
    if plane + 1 == M::PLANES {
        return _mm512_cvtepi32_epi8(values);
    }
    let half = _mm512_set1_epi32(128);
    _mm512_cvtepi32_epi8(_mm512_srai_epi32::<8>(_mm512_add_epi32(values, half)))
}

/// Puts 16 activations from `column` on where levels of 8 bits meet them.
#[inline(always)]
unsafe fn store_bytes<M: Mode>(row: *mut u8, column: usize, values: __m512i) {
    const COLUMNS: usize = LINE * 4;
    let line = row.add(column / COLUMNS * M::PLANES * COLUMNS + column % COLUMNS);
    for plane in 0..M::PLANES {
        _mm_storeu_si128(line.add(plane * COLUMNS).cast(), digit::<M>(values, plane));
    }
}

/// Puts 16 activations from `column` on where nibbles meet them: those of even columns, and those of odd ones.
#[inline(always)]
unsafe fn store_nibbles<M: Mode>(row: *mut u8, column: usize, values: __m512i) {
    const PART: usize = LINE * 4;
    const COLUMNS: usize = 2 * PART;
    let order = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    let values = _mm512_permutexvar_epi32(order, values);
    let line = row.add(column / COLUMNS * M::PLANES * COLUMNS + column % COLUMNS / 2);
    for plane in 0..M::PLANES {
        let digits = digit::<M>(values, plane);
        let to = line.add(plane * COLUMNS);
        _mm_storel_epi64(to.cast(), digits);
        _mm_storel_epi64(to.add(PART).cast(), _mm_unpackhi_epi64(digits, digits));
    }
}
