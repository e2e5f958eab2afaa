//! Rounding a row of activations.
#![allow(unsafe_op_in_unsafe_fn, reason = "intrinsics throughout; callers hold AVX2")]

use std::arch::x86_64::*;

use super::super::packing::{LINE, Mode, Packing, Rounded};
use super::vectors::PART;

/// Columns that are rounded together: no group has fewer.
const TOGETHER: usize = 32;

/// Rounds row `row` of x, whose values are at `from`.
///
/// # Safety
/// The processor has AVX2; there are as many values as `packing` says, and room in `to`.
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
pub(in super::super) unsafe fn round_row<M: Mode>(
    from: *const f32,
    packing: Packing,
    row: usize,
    to: Rounded,
) {
    let Packing { inputs, group, bits, .. } = packing;
    let groups = inputs / group;
    let digits = to.values.add(4 * row * packing.rounded_words::<M>());
    let limit = _mm256_set1_ps(M::LIMIT);
    for index in 0..groups {
        let first = index * group;
        let magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(i32::MAX));
        let (mut largest, mut unordered) = (_mm256_setzero_ps(), _mm256_setzero_ps());
        for column in (first..first + group).step_by(8) {
            let values = _mm256_loadu_ps(from.add(column));
            unordered = _mm256_or_ps(unordered, _mm256_cmp_ps::<_CMP_UNORD_Q>(values, values));
            largest = _mm256_max_ps(largest, _mm256_and_ps(values, magnitude));
        }
        let largest = largest_lane(largest);
        let numbers = _mm256_movemask_ps(unordered) == 0;
        let scale = if numbers { largest / M::LIMIT } else { f32::NAN };
        let inverse = _mm256_set1_ps(if largest > 0.0 { M::LIMIT / largest } else { 0.0 });
        let mut total = _mm256_setzero_si256();
        for column in (first..first + group).step_by(TOGETHER) {
            let mut rounded = [_mm256_setzero_si256(); 4];
            for (part, rounded) in rounded.iter_mut().enumerate() {
                let scaled = _mm256_mul_ps(_mm256_loadu_ps(from.add(column + 8 * part)), inverse);
                // Infinity times 0 is no number, for which the minimum is the limit.
                *rounded = _mm256_cvtps_epi32(_mm256_min_ps(scaled, limit));
                total = _mm256_add_epi32(total, *rounded);
            }
            if bits == 4 {
                store_nibbles::<M>(digits, column, rounded);
            } else {
                store_halves(digits, column, rounded);
            }
        }
        let mut lanes = [0i32; 8];
        _mm256_storeu_si256(lanes.as_mut_ptr().cast(), total);
        *to.scales.add(row * groups + index) = scale;
        *to.sums.add(row * groups + index) = lanes.iter().sum::<i32>() as f32 * scale;
    }
}

#[inline(always)]
unsafe fn largest_lane(values: __m256) -> f32 {
    let four = _mm_max_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps::<1>(values));
    let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
}

/// 32 numbers of 16 bits in two vectors, each with its columns in order.
#[inline(always)]
unsafe fn narrow([a, b, c, d]: [__m256i; 4]) -> [__m256i; 2] {
    // Packing works in 128-bit lanes, whose quarters are then put in order.
    [
        _mm256_permute4x64_epi64::<0xd8>(_mm256_packs_epi32(a, b)),
        _mm256_permute4x64_epi64::<0xd8>(_mm256_packs_epi32(c, d)),
    ]
}

/// Puts the digits of 32 numbers from `column` on where nibbles meet them: those of even columns, and those of odd ones.
#[inline(always)]
unsafe fn store_nibbles<M: Mode>(row: *mut u8, column: usize, values: [__m256i; 4]) {
    let values = narrow(values);
    let line = row.add(column / (2 * PART) * M::PLANES * 2 * PART + column % (2 * PART) / 2);
    let order =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
    for plane in 0..M::PLANES {
        let digit = |values: __m256i| {
            if plane + 1 < M::PLANES {
                _mm256_srai_epi16::<8>(_mm256_add_epi16(values, _mm256_set1_epi16(128)))
            } else {
                // The low byte with its sign.
                _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(values))
            }
        };
        let bytes = _mm256_packs_epi16(digit(values[0]), digit(values[1]));
        let bytes = _mm256_permute4x64_epi64::<0xd8>(bytes);
        // In each half: 8 bytes of even columns, 8 of odd ones.
        let bytes = _mm256_permute4x64_epi64::<0xd8>(_mm256_shuffle_epi8(bytes, order));
        let to = line.add(plane * 2 * PART);
        _mm_storeu_si128(to.cast(), _mm256_castsi256_si128(bytes));
        _mm_storeu_si128(to.add(PART).cast(), _mm256_extracti128_si256::<1>(bytes));
    }
}

/// Puts 32 numbers of 16 bits from `column` on where bytes meet them: in pairs of even columns, and of odd ones.
#[inline(always)]
unsafe fn store_halves(row: *mut u8, column: usize, values: [__m256i; 4]) {
    const COLUMNS: usize = LINE * 4;
    let line = row.add(column / COLUMNS * 2 * PART + column % COLUMNS);
    for (index, values) in narrow(values).into_iter().enumerate() {
        let order =
            _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
        let pairs = _mm256_permute4x64_epi64::<0xd8>(_mm256_shuffle_epi8(values, order));
        let to = line.add(index * 16);
        _mm_storeu_si128(to.cast(), _mm256_castsi256_si128(pairs));
        _mm_storeu_si128(to.add(PART).cast(), _mm256_extracti128_si256::<1>(pairs));
    }
}
