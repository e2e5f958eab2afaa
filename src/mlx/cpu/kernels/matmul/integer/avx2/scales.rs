//! Scales and biases of 8 rows of weights, a vector for each group.
#![allow(unsafe_op_in_unsafe_fn, reason = "intrinsics throughout; callers hold AVX2")]

use std::arch::x86_64::*;

use super::super::scales::{ScaleTable, ScaleType};
use super::vectors::{load, transpose as transpose_words};

/// Writes the scales of `count` groups from `first` on of some rows as f32: lane `i` of those at
/// `scales + group * stride` is row `i`'s. The biases likewise.
///
/// # Safety
/// The processor has AVX2 and F16C; rows and groups exist, and there is room for them.
#[inline(always)]
pub(super) unsafe fn transpose(
    table: &ScaleTable,
    rows: &[usize; 8],
    (first, count): (usize, usize),
    (scales, biases): (*mut f32, *mut f32),
    stride: usize,
) {
    for (base, to) in [(table.scales, scales), (table.biases, biases)] {
        for at in (0..count).step_by(8) {
            // The last eight again, if they are not whole.
            let (at, left) = if count < 8 { (at, count) } else { (at.min(count - 8), 8) };
            let mut wide = [_mm256_setzero_si256(); 8];
            for (wide, row) in wide.iter_mut().zip(rows) {
                let from = base.add(table.place(*row, first + at));
                *wide = match table.kind {
                    ScaleType::F32 => load::<false>(from, left),
                    ScaleType::F16 => _mm256_castps_si256(_mm256_cvtph_ps(halves(from, left))),
                    ScaleType::Bf16 => _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves(from, left))),
                };
            }
            for (group, column) in transpose_words(wide).into_iter().enumerate().take(left) {
                _mm256_storeu_si256(to.add((at + group) * stride).cast(), column);
            }
        }
    }
}

/// Eight halves, of which `count` exist; the others are 0.
#[inline(always)]
unsafe fn halves(from: *const u8, count: usize) -> __m128i {
    if count == 8 {
        return _mm_loadu_si128(from.cast());
    }
    let mut copy = [0u16; 8];
    for (index, half) in copy.iter_mut().enumerate().take(count) {
        *half = from.cast::<u16>().add(index).read_unaligned();
    }
    _mm_loadu_si128(copy.as_ptr().cast())
}
