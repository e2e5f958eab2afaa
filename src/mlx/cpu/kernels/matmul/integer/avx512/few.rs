//! Few rows of x: lines of 16 rows of weights are unpacked in registers and used at once.
//!
//! Lanes run along K here. Sums of integers are exact in any order, so those of a group may be taken over its lanes and
//! brought to the place where the tile has them; from there on the order is the same.
#![allow(unsafe_op_in_unsafe_fn, reason = "intrinsics throughout; callers hold AVX-512 with VNNI")]

use std::arch::x86_64::*;

use super::super::super::prepare::Scratch;
use super::super::super::schedule::Task;
use super::super::super::simd::Avx512;
use super::super::kernel::{Integer, Row};
use super::super::packing::{LINE, Mode};
use super::super::scales::MOST_GROUPS;
use super::scales::transpose;
use super::vectors::{sum_fours, transpose_lanes, unpack};

/// Rows of weights that are multiplied together, and outputs of a vector.
pub(in super::super) const FEW: usize = 16;
/// The most rows of x for which unpacking weights anew is cheaper than a panel of them.
pub(in super::super) const FEW_ROWS: usize = 3;

/// 16 rows of weights.
struct Sixteen {
    rows: [usize; FEW],
    /// Where they begin.
    from: *const u8,
    /// How many of their lines the scales' transpose has asked for: those of others are so much further ahead.
    fetched: usize,
}

impl Integer<'_> {
    /// All outputs of a task of at most [`FEW_ROWS`] rows.
    ///
    /// # Safety
    /// The processor has AVX-512 with VNNI.
    pub(in super::super) unsafe fn few_vnni<M: Mode>(&self, task: &Task) {
        match (self.packing.bits, self.packing.group) {
            (4, 32) => self.few_rows::<M, 2, 4>(task),
            (4, 64) => self.few_rows::<M, 2, 8>(task),
            (4, _) => self.few_rows::<M, 2, 16>(task),
            (_, 32) => self.few_rows::<M, 1, 8>(task),
            (_, 64) => self.few_rows::<M, 1, 16>(task),
            _ => self.few_rows::<M, 1, 32>(task),
        }
    }

    /// `WORDS`: words of a group.
    unsafe fn few_rows<M: Mode, const PARTS: usize, const WORDS: usize>(&self, task: &Task) {
        match task.last_pair - task.first_pair {
            1 => self.sixteens::<M, PARTS, WORDS, 1>(task),
            2 => self.sixteens::<M, PARTS, WORDS, 2>(task),
            _ => self.sixteens::<M, PARTS, WORDS, FEW_ROWS>(task),
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")]
    unsafe fn sixteens<M: Mode, const PARTS: usize, const WORDS: usize, const R: usize>(&self, task: &Task) {
        let mut scratch = Scratch::take(2 * MOST_GROUPS * FEW + R * FEW);
        let scales = scratch.as_mut_ptr();
        let values = scales.add(2 * MOST_GROUPS * FEW);
        let x = self.x_rows::<M, R>(task.first_pair);
        for first in (task.first..task.last).step_by(FEW) {
            let rows = self.rows(task, first);
            let from: *const u8 = self.words.add(rows[0] * self.packing.row_words()).cast();
            let fetched = self.packing.lines() / WORDS;
            let sixteen = Sixteen { rows, from, fetched };
            let coming = self.fetching.with_scales(from);
            self.fetching.fetch_scales(&self.scales, rows[0]);
            let mut totals = [_mm512_setzero_ps(); R];
            for group in (0..self.scales.groups).step_by(MOST_GROUPS) {
                let count = MOST_GROUPS.min(self.scales.groups - group);
                let biases = scales.add(MOST_GROUPS * FEW);
                transpose(&self.scales, &sixteen.rows, (group, count), (scales, biases), FEW, Some(coming));
                let mut open = [_mm512_setzero_si512(); R];
                let last = ((group + count) * WORDS).div_ceil(LINE);
                for line in group * WORDS / LINE..last {
                    let dots = self.line::<M, PARTS, R>(&sixteen, &x, line);
                    for r in 0..R {
                        // Where the line's first group begins, counted from the first of these scales.
                        let at = line * LINE / WORDS - group;
                        let fours = dots[r];
                        let total = &mut totals[r];
                        if WORDS == 4 {
                            let dots = transpose_lanes(fours);
                            for (index, dot) in dots.into_iter().enumerate() {
                                if at + index < count {
                                    self.add(total, dot, (scales, at + index), x[r].group + group);
                                }
                            }
                            continue;
                        }
                        let [a, b, c, d] = fours;
                        let ab = _mm512_add_epi32(
                            _mm512_shuffle_i32x4::<0x88>(a, b),
                            _mm512_shuffle_i32x4::<0xdd>(a, b),
                        );
                        let cd = _mm512_add_epi32(
                            _mm512_shuffle_i32x4::<0x88>(c, d),
                            _mm512_shuffle_i32x4::<0xdd>(c, d),
                        );
                        let first = _mm512_shuffle_i32x4::<0x88>(ab, cd);
                        let second = _mm512_shuffle_i32x4::<0xdd>(ab, cd);
                        if WORDS == 8 {
                            self.add(total, first, (scales, at), x[r].group + group);
                            if at + 1 < count {
                                self.add(total, second, (scales, at + 1), x[r].group + group);
                            }
                            continue;
                        }
                        let whole = _mm512_add_epi32(first, second);
                        if WORDS == LINE {
                            self.add(total, whole, (scales, at), x[r].group + group);
                        } else if line % 2 == 0 {
                            open[r] = whole;
                        } else {
                            let dot = _mm512_add_epi32(open[r], whole);
                            self.add(total, dot, (scales, at), x[r].group + group);
                        }
                    }
                }
            }
            for r in 0..R {
                _mm512_storeu_ps(values.add(r * FEW), totals[r]);
            }
            self.write::<Avx512>(task, (first, FEW.min(task.last - first)), (values, FEW));
        }
    }

    /// Adds a group to the outputs: its bias, then its products.
    #[inline(always)]
    unsafe fn add(
        &self,
        total: &mut __m512,
        dot: __m512i,
        (scales, index): (*const f32, usize),
        group: usize,
    ) {
        let scale = _mm512_loadu_ps(scales.add(index * FEW));
        let bias = _mm512_loadu_ps(scales.add((MOST_GROUPS + index) * FEW));
        let x_scale = _mm512_set1_ps(*self.x.scales.add(group + index));
        let x_sum = _mm512_set1_ps(*self.x.sums.add(group + index));
        let biased = _mm512_fmadd_ps(bias, x_sum, *total);
        *total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(scale, x_scale), biased);
    }

    /// The products of a line of 16 rows of weights with `R` rows of x. Vector `i` of each holds the sums of rows
    /// `4 * i` to `4 * i + 3`: in each 128-bit lane, over the four words of that lane.
    #[inline(always)]
    unsafe fn line<M: Mode, const PARTS: usize, const R: usize>(
        &self,
        sixteen: &Sixteen,
        x: &[Row; R],
        line: usize,
    ) -> [[__m512i; 4]; R] {
        let left = self.packing.row_words() - line * LINE;
        let mask = if left >= LINE { !0 } else { (1 << left) - 1 };
        let mut fours = [[_mm512_setzero_si512(); 4]; R];
        for four in 0..4 {
            let mut dots = [[_mm512_setzero_si512(); 4]; R];
            for index in 0..4 {
                // Kept addresses of 16 rows would not leave enough registers.
                let row = sixteen.rows[4 * four + index];
                let from: *const u8 = self.words.add(row * self.packing.row_words() + line * LINE).cast();
                let fetched = (sixteen.fetched, self.packing.lines());
                self.fetching.fetch((sixteen.from, from), (line, 4 * four + index), fetched);
                let levels = unpack::<PARTS>(_mm512_maskz_loadu_epi32(mask, from.cast()));
                for r in 0..R {
                    let x = x[r].values.add(line * M::PLANES * PARTS * LINE * 4);
                    let mut dot = _mm512_setzero_si512();
                    for plane in 0..M::PLANES {
                        if plane > 0 {
                            dot = _mm512_slli_epi32::<8>(dot);
                        }
                        for part in 0..PARTS {
                            let from = x.add((plane * PARTS + part) * LINE * 4);
                            dot = _mm512_dpbusd_epi32(dot, levels[part], _mm512_loadu_si512(from.cast()));
                        }
                    }
                    dots[r][index] = dot;
                }
            }
            for r in 0..R {
                fours[r][four] = sum_fours(dots[r]);
            }
        }
        fours
    }
}
