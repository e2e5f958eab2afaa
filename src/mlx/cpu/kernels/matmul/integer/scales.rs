//! Scales and biases of 16 rows of weights, a vector for each group.
#![allow(unsafe_op_in_unsafe_fn, reason = "intrinsics throughout; callers hold AVX-512 with VNNI")]

use std::arch::x86_64::*;

use super::super::MatmulError;
use super::super::matrix::{Matrix, Scales, Storage};
use super::operand::columns;
use crate::kernels::Floats;

/// Groups whose scales are transposed together: as many as there are halves in a vector.
pub(super) const MOST_GROUPS: usize = 32;

/// Cache lines that are asked for with the scales, or the biases, of 8 groups: about as many as memory answers meanwhile.
pub(super) const FETCHES: usize = 4;

#[derive(Clone, Copy)]
enum ScaleType {
    F32,
    F16,
    Bf16,
}

/// Where the scales and biases of a matrix lie, `[rows, groups]`.
#[derive(Clone, Copy)]
pub(super) struct ScaleTable {
    scales: *const u8,
    biases: *const u8,
    kind: ScaleType,
    groups: usize,
}

impl ScaleTable {
    /// Those of affine weights.
    pub(super) fn new(matrix: &Matrix<'_>) -> Result<Self, MatmulError> {
        let Storage::Packed { scales: Scales::Affine { scales, biases }, quantization, .. } = matrix.storage
        else {
            return Err(MatmulError::ScaleType);
        };
        let (kind, scales, biases): (_, *const u8, *const u8) = match (scales, biases) {
            (Floats::F32(s), Floats::F32(b)) => (ScaleType::F32, s.as_ptr().cast(), b.as_ptr().cast()),
            (Floats::F16(s), Floats::F16(b)) => (ScaleType::F16, s.as_ptr().cast(), b.as_ptr().cast()),
            (Floats::Bf16(s), Floats::Bf16(b)) => (ScaleType::Bf16, s.as_ptr().cast(), b.as_ptr().cast()),
            _ => return Err(MatmulError::ScaleType),
        };
        Ok(Self { scales, biases, kind, groups: matrix.columns / quantization.group_size as usize })
    }

    fn bytes(&self) -> usize {
        match self.kind {
            ScaleType::F32 => 4,
            ScaleType::F16 | ScaleType::Bf16 => 2,
        }
    }

    /// Groups of a row.
    #[inline(always)]
    pub(super) fn groups(&self) -> usize {
        self.groups
    }

    /// Writes the scales of `count` groups from `first` on, up to [`MOST_GROUPS`], of some rows as f32: lane `i` of
    /// those at `scales + group * stride` is row `i`'s. The biases likewise. Meanwhile, [`FETCHES`] cache lines for each 8
    /// groups of each are asked for, which follow each other at `coming` as the groups do.
    ///
    /// # Safety
    /// The processor has AVX-512 (F, BW, DQ, VL); rows and groups exist, and there is room for them.
    #[inline(always)]
    pub(super) unsafe fn transpose(
        &self,
        rows: &[usize; 16],
        (first, count): (usize, usize),
        (scales, biases): (*mut f32, *mut f32),
        stride: usize,
        coming: *const u8,
    ) {
        let each = if let ScaleType::F32 = self.kind { 4 } else { 8 };
        for (index, (table, to)) in [(self.scales, scales), (self.biases, biases)].into_iter().enumerate() {
            for at in (0..count).step_by(each) {
                let line = ((first + at) / 8 * 2 + index) * FETCHES;
                for line in line..line + FETCHES {
                    _mm_prefetch::<_MM_HINT_T1>(coming.wrapping_add(line * 64).cast());
                }
                let mut from = [std::ptr::null(); 16];
                for (from, row) in from.iter_mut().zip(rows) {
                    *from = table.add((row * self.groups + first + at) * self.bytes());
                }
                let (to, left) = (to.add(at * stride), (count - at).min(each));
                let last = left < each;
                match self.kind {
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

    /// Asks for the scales of 16 rows from `row` on, which need not exist.
    #[inline(always)]
    pub(super) unsafe fn fetch(&self, row: usize) {
        let (start, bytes) = (row * self.groups * self.bytes(), 16 * self.groups * self.bytes());
        for at in (start..start + bytes).step_by(64) {
            _mm_prefetch::<_MM_HINT_T0>(self.scales.wrapping_add(at).cast());
            _mm_prefetch::<_MM_HINT_T0>(self.biases.wrapping_add(at).cast());
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
