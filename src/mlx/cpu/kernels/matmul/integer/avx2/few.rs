//! Few rows of x: halves of lines of 8 rows of weights are unpacked in registers and used at once. As with AVX-512, lanes
//! run along K until the sums of a group are brought together.
#![allow(unsafe_op_in_unsafe_fn, reason = "intrinsics throughout; callers hold AVX2")]

use std::arch::x86_64::*;

use super::super::super::prepare::Scratch;
use super::super::super::schedule::Task;
use super::super::super::simd::Avx2;
use super::super::kernel::{Integer, Row};
use super::super::packing::{LINE, Mode};
use super::super::scales::MOST_GROUPS;
use super::scales::transpose;
use super::vectors::{PART, dot, load, planes, sum_fours, unpack};

/// Rows of weights that are multiplied together, and outputs of a vector.
pub(in super::super) const FEW: usize = 8;
/// The most rows of x for which unpacking weights anew is cheaper than a panel of them.
pub(in super::super) const FEW_ROWS: usize = 2;
/// Words that are unpacked at a time.
const HALF: usize = 8;

impl Integer<'_> {
    /// All outputs of a task of at most [`FEW_ROWS`] rows.
    ///
    /// # Safety
    /// The processor has AVX2 with FMA and F16C.
    pub(in super::super) unsafe fn few_avx2<M: Mode>(&self, task: &Task) {
        match (self.packing.bits, self.packing.group) {
            (4, 32) => self.few_eights::<M, 4, 4>(task),
            (4, 64) => self.few_eights::<M, 4, 8>(task),
            (4, _) => self.few_eights::<M, 4, 16>(task),
            (_, 32) => self.few_eights::<M, 8, 8>(task),
            (_, 64) => self.few_eights::<M, 8, 16>(task),
            _ => self.few_eights::<M, 8, 32>(task),
        }
    }

    /// `WORDS`: words of a group.
    unsafe fn few_eights<M: Mode, const BITS: usize, const WORDS: usize>(&self, task: &Task) {
        match task.last_pair - task.first_pair {
            1 => self.eights::<M, BITS, WORDS, 1>(task),
            _ => self.eights::<M, BITS, WORDS, FEW_ROWS>(task),
        }
    }

    #[target_feature(enable = "avx2,fma,f16c,bmi2")]
    unsafe fn eights<M: Mode, const BITS: usize, const WORDS: usize, const R: usize>(&self, task: &Task) {
        let mut scratch = Scratch::take(2 * MOST_GROUPS * FEW + R * FEW);
        let scales = scratch.as_mut_ptr();
        let values = scales.add(2 * MOST_GROUPS * FEW);
        let row_words = self.packing.row_words();
        let x = self.x_rows::<M, R>(task.first_pair);
        for first in (task.first..task.last).step_by(FEW) {
            let rows: [usize; FEW] = self.rows(task, first);
            let mut from = [std::ptr::null(); FEW];
            for (from, row) in from.iter_mut().zip(&rows) {
                *from = self.words.add(row * row_words).cast::<u8>();
            }
            self.fetching.fetch_scales(&self.scales, rows[0]);
            let mut totals = [_mm256_setzero_ps(); R];
            for group in (0..self.scales.groups).step_by(MOST_GROUPS) {
                let count = MOST_GROUPS.min(self.scales.groups - group);
                let biases = scales.add(MOST_GROUPS * FEW);
                transpose(&self.scales, &rows, (group, count), (scales, biases), FEW);
                let mut open = [_mm256_setzero_si256(); R];
                for word in (group * WORDS..(group + count) * WORDS).step_by(HALF) {
                    let dots = if word + HALF <= row_words {
                        self.half::<M, BITS, R, true>(&from, &x, word)
                    } else {
                        self.half::<M, BITS, R, false>(&from, &x, word)
                    };
                    let at = word / WORDS - group;
                    for r in 0..R {
                        let [a, b] = dots[r];
                        let first = _mm256_permute2x128_si256::<0x20>(a, b);
                        let second = _mm256_permute2x128_si256::<0x31>(a, b);
                        let (total, x_group) = (&mut totals[r], x[r].group + group);
                        if WORDS == HALF / 2 {
                            self.add_eight(total, first, (scales, at), x_group);
                            if at + 1 < count {
                                self.add_eight(total, second, (scales, at + 1), x_group);
                            }
                            continue;
                        }
                        open[r] = _mm256_add_epi32(open[r], _mm256_add_epi32(first, second));
                        if (word + HALF).is_multiple_of(WORDS) {
                            self.add_eight(total, open[r], (scales, at), x_group);
                            open[r] = _mm256_setzero_si256();
                        }
                    }
                }
            }
            for r in 0..R {
                _mm256_storeu_ps(values.add(r * FEW), totals[r]);
            }
            self.write::<Avx2>(task, (first, FEW.min(task.last - first)), (values, FEW));
        }
    }

    /// Adds a group to the outputs: its bias, then its products.
    #[inline(always)]
    unsafe fn add_eight(
        &self,
        total: &mut __m256,
        dot: __m256i,
        (scales, index): (*const f32, usize),
        group: usize,
    ) {
        let scale = _mm256_loadu_ps(scales.add(index * FEW));
        let bias = _mm256_loadu_ps(scales.add((MOST_GROUPS + index) * FEW));
        let x_scale = _mm256_set1_ps(*self.x.scales.add(group + index));
        let x_sum = _mm256_set1_ps(*self.x.sums.add(group + index));
        let biased = _mm256_fmadd_ps(bias, x_sum, *total);
        *total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_mul_ps(scale, x_scale), biased);
    }

    /// The products of half a line of 8 rows of weights with `R` rows of x. Vector `i` of each holds the sums of rows
    /// `4 * i` to `4 * i + 3`: in each 128-bit lane, over the four words of that lane.
    #[inline(always)]
    unsafe fn half<M: Mode, const BITS: usize, const R: usize, const ALL: bool>(
        &self,
        rows: &[*const u8; FEW],
        x: &[Row; R],
        word: usize,
    ) -> [[__m256i; 2]; R] {
        let place = word / LINE * planes::<M, BITS>() * 2 * PART + word % LINE * 4;
        let mut fours = [[_mm256_setzero_si256(); 2]; R];
        if word.is_multiple_of(LINE) {
            for index in 0..FEW {
                let (line, from) = (word / LINE, rows[index].wrapping_add(word * 4));
                self.fetching.fetch((rows[0], from), (line, index), (0, self.packing.lines()));
            }
        }
        for four in 0..2 {
            let mut dots = [[_mm256_setzero_si256(); 4]; R];
            for index in 0..4 {
                // A group is four words at least.
                let levels = unpack::<BITS>(load::<ALL>(rows[4 * four + index].add(word * 4), HALF / 2));
                for r in 0..R {
                    dots[r][index] = dot::<M, BITS>(levels, x[r].values.add(place));
                }
            }
            for r in 0..R {
                fours[r][four] = sum_fours(dots[r]);
            }
        }
        fours
    }
}
