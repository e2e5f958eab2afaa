//! Scales and biases of 16 rows of weights, a vector for each group.
#![allow(unsafe_op_in_unsafe_fn, reason = "intrinsics throughout; callers hold AVX-512 with VNNI")]

use std::arch::x86_64::*;

use super::super::scales::{ScaleTable, ScaleType};
use super::vectors::columns;

/// Cache lines that are asked for with the scales, or the biases, of 8 groups: about as many as memory answers meanwhile.
pub(super) const FETCHES: usize = 4;

/// Writes the scales of `count` groups from `first` on of some rows as f32: lane `i` of
/// those at `scales + group * stride` is row `i`'s. The biases likewise. Meanwhile, [`FETCHES`] cache lines for each 8
/// groups of each are asked for, which follow each other from `coming` on as the groups do.
///
/// # Safety
/// The processor has AVX-512 (F, BW, DQ, VL); rows and groups exist, and there is room for them.
#[inline(always)]
pub(super) unsafe fn transpose(
    table: &ScaleTable,
    rows: &[usize; 16],
    (first, count): (usize, usize),
    (scales, biases): (*mut f32, *mut f32),
    stride: usize,
    coming: Option<*const u8>,
) {
    let each = if let ScaleType::F32 = table.kind { 4 } else { 8 };
    for (index, (base, to)) in [(table.scales, scales), (table.biases, biases)].into_iter().enumerate() {
        for at in (0..count).step_by(each) {
            if let Some(coming) = coming {
                let line = ((first + at) / 8 * 2 + index) * FETCHES;
                for line in line..line + FETCHES {
                    _mm_prefetch::<_MM_HINT_T1>(coming.wrapping_add(line * 64).cast());
                }
            }
            let mut from = [std::ptr::null(); 16];
            for (from, row) in from.iter_mut().zip(rows) {
                *from = base.add(table.place(*row, first + at));
            }
            let (to, left) = (to.add(at * stride), (count - at).min(each));
            let last = left < each;
            match table.kind {
                ScaleType::F32 => {
                    let words = if last {
                        columns::<false>(from, (1 << (2 * left)) - 1)
                    } else {
                        columns::<true>(from, 0)
                    };
                    for (group, column) in words.into_iter().enumerate().take(left) {
                        _mm512_storeu_si512(to.add(group * stride).cast(), column);
                    }
                }
                ScaleType::F16 if last => halves::<true, false>(from, left, to, stride),
                ScaleType::F16 => halves::<true, true>(from, left, to, stride),
                ScaleType::Bf16 if last => halves::<false, false>(from, left, to, stride),
                ScaleType::Bf16 => halves::<false, true>(from, left, to, stride),
            }
        }
    }
}

/// 8 groups of 16 rows of f16, or of bf16, or without `ALL` fewer.
#[inline(always)]
unsafe fn halves<const F16: bool, const ALL: bool>(
    from: [*const u8; 16],
    count: usize,
    to: *mut f32,
    stride: usize,
) {
    let mask = if ALL { 0 } else { (1 << count) - 1 };
    let pairs = if ALL { 4 } else { count.div_ceil(2) };
    for (pair, column) in columns::<ALL>(from, mask).into_iter().enumerate().take(pairs) {
        let to = to.add(2 * pair * stride);
        let (even, odd) = if F16 {
            let order = _mm512_set_epi16(
                31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 30, 28, 26, 24, 22, 20, 18, 16,
                14, 12, 10, 8, 6, 4, 2, 0,
            );
            let both = _mm512_permutexvar_epi16(order, column);
            let odd = _mm512_extracti64x4_epi64::<1>(both);
            (_mm512_cvtph_ps(_mm512_castsi512_si256(both)), _mm512_cvtph_ps(odd))
        } else {
            let odd = _mm512_and_si512(column, _mm512_set1_epi32(!0xffff));
            (_mm512_castsi512_ps(_mm512_slli_epi32::<16>(column)), _mm512_castsi512_ps(odd))
        };
        _mm512_storeu_ps(to, even);
        if ALL || 2 * pair + 1 < count {
            _mm512_storeu_ps(to.add(stride), odd);
        }
    }
}
