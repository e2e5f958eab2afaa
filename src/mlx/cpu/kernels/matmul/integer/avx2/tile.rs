//! Many rows of x: 16 rows of weights are unpacked and transposed into first-level cache, then meet all rows of x.
#![allow(unsafe_op_in_unsafe_fn, reason = "intrinsics throughout; callers hold AVX2")]

use std::arch::x86_64::*;

use super::super::super::ahead::Coming;
use super::super::super::schedule::Task;
use super::super::super::simd::Avx2;
use super::super::kernel::{Integer, Row};
use super::super::packing::{LINE, Mode};
use super::super::panel::{Room, SEGMENT, Step, tile_rows};
use super::scales::transpose as transpose_scales;
use super::vectors::{load, planes, transpose, unpack, weight};

/// Outputs of a panel: two vectors.
pub(in super::super) const PANEL: usize = 16;
/// Rows of x in a tile, times the digits of each.
const TILE_ROWS: usize = 4;
/// Words of nibbles whose products can be added up in 16 bits: 8 pairs of products of at most 15 and 128.
const NARROW: usize = 4;

impl Integer<'_> {
    /// All outputs of a task.
    ///
    /// # Safety
    /// The processor has AVX2 with FMA and F16C.
    pub(in super::super) unsafe fn many_avx2<M: Mode>(&self, task: &Task) {
        if self.packing.bits == 4 {
            self.small_panels::<M, 4>(task);
        } else {
            self.small_panels::<M, 8>(task);
        }
    }

    #[target_feature(enable = "avx2,fma,f16c,bmi2")]
    unsafe fn small_panels<M: Mode, const BITS: usize>(&self, task: &Task) {
        let pairs = task.last_pair - task.first_pair;
        let (inputs, group) = (self.packing.inputs, self.packing.group);
        let room = Room::new(PANEL, 2, pairs);
        let Room { panel, scales, biases, values, .. } = room;
        let tile_rows = tile_rows(pairs, TILE_ROWS / planes::<M, BITS>());
        for first in (task.first..task.last).step_by(PANEL) {
            for start in (0..inputs).step_by(SEGMENT) {
                let length = SEGMENT.min(inputs - start);
                for half in [0, 8] {
                    let rows: [usize; 8] = self.rows(task, first + half);
                    self.spread_eight::<BITS>(&rows, start, length, panel.add(half));
                    let (scales, biases) = (scales.add(half), biases.add(half));
                    transpose_scales(
                        &self.scales,
                        &rows,
                        (start / group, length / group),
                        (scales, biases),
                        PANEL,
                    );
                }
                let step = Step { panel, scales, biases, start, length };
                let mut coming = self.coming(task, (first, PANEL), (start, SEGMENT));
                let groups = pairs.div_ceil(tile_rows) * (length / group);
                let lines = (PANEL * coming.lines).div_ceil(groups);
                for pair in (0..pairs).step_by(tile_rows) {
                    let values = values.add(pair * PANEL);
                    let at = task.first_pair + pair;
                    match tile_rows.min(pairs - pair) {
                        1 => self.small_tile::<M, BITS, 1>(&step, at, values, &mut coming, lines),
                        2 => self.small_tile::<M, BITS, 2>(&step, at, values, &mut coming, lines),
                        3 => self.small_tile::<M, BITS, 3>(&step, at, values, &mut coming, lines),
                        _ => self.small_tile::<M, BITS, TILE_ROWS>(&step, at, values, &mut coming, lines),
                    }
                }
            }
            self.write::<Avx2>(task, (first, PANEL.min(task.last - first)), (values, PANEL));
        }
    }

    /// Levels of 8 rows of weights, for the columns `start` to `start + length`: `[words, 2, 16]` lanes of which this
    /// fills 8.
    #[inline(always)]
    unsafe fn spread_eight<const BITS: usize>(
        &self,
        rows: &[usize; 8],
        start: usize,
        length: usize,
        to: *mut u32,
    ) {
        let words = length * BITS / 32;
        for at in (0..words).step_by(8) {
            let mut block = [_mm256_setzero_si256(); 8];
            for (block, row) in block.iter_mut().zip(rows) {
                let from = self.words.add(row * self.packing.row_words() + start * BITS / 32 + at);
                // A group is four words at least.
                *block = if at + 8 <= words {
                    load::<true>(from.cast(), 8)
                } else {
                    load::<false>(from.cast(), 4)
                };
            }
            for (index, column) in transpose(block).into_iter().enumerate().take(words - at) {
                let to = to.add((at + index) * 2 * PANEL);
                let [first, second] = unpack::<BITS>(column);
                _mm256_storeu_si256(to.cast(), first);
                _mm256_storeu_si256(to.add(PANEL).cast(), second);
            }
        }
    }

    /// A segment of `R` rows of x times the panel, added to `values` (`[R][16]`), which the first segment sets. Asks for
    /// so many lines of what is coming with each group.
    #[inline(always)]
    unsafe fn small_tile<M: Mode, const BITS: usize, const R: usize>(
        &self,
        step: &Step,
        at: usize,
        values: *mut f32,
        coming: &mut Coming,
        lines: usize,
    ) {
        let packing = self.packing;
        let group_words = packing.group * BITS / 32;
        let line_words = planes::<M, BITS>() * 2 * LINE;
        let mut x = [std::ptr::null::<i32>(); R];
        let mut x_groups = [0; R];
        let mut totals = [[_mm256_setzero_ps(); 2]; R];
        for (r, Row { values: from, group }) in self.x_rows::<M, R>(at).into_iter().enumerate() {
            x[r] = from.cast::<i32>().add(step.start * BITS / 32 / LINE * line_words);
            x_groups[r] = group + step.start / packing.group;
            if step.start > 0 {
                totals[r] =
                    [_mm256_loadu_ps(values.add(r * PANEL)), _mm256_loadu_ps(values.add(r * PANEL + 8))];
            }
        }
        for index in 0..step.length / packing.group {
            coming.fetch::<Avx2, PANEL>(lines);
            let mut sums = [[_mm256_setzero_si256(); 2]; R];
            for word in (index * group_words..(index + 1) * group_words).step_by(NARROW) {
                let place = word / LINE * line_words + word % LINE;
                let mut narrow = [[[_mm256_setzero_si256(); 2]; 2]; R];
                for at in 0..NARROW {
                    for part in 0..2 {
                        let from = step.panel.add(((word + at) * 2 + part) * PANEL);
                        let levels =
                            [_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(8).cast())];
                        for r in 0..R {
                            for plane in 0..planes::<M, BITS>() {
                                let place = place + (plane * 2 + part) * LINE + at;
                                let activations = _mm256_set1_epi32(*x[r].add(place));
                                for half in 0..2 {
                                    if BITS == 4 {
                                        let pairs = _mm256_maddubs_epi16(levels[half], activations);
                                        let narrow = &mut narrow[r][plane][half];
                                        *narrow = _mm256_add_epi16(*narrow, pairs);
                                    } else {
                                        let pairs = _mm256_madd_epi16(levels[half], activations);
                                        sums[r][half] = _mm256_add_epi32(sums[r][half], pairs);
                                    }
                                }
                            }
                        }
                    }
                }
                if BITS == 4 {
                    for r in 0..R {
                        for plane in 0..M::PLANES {
                            for half in 0..2 {
                                let wide = _mm256_madd_epi16(narrow[r][plane][half], weight::<M>(plane));
                                sums[r][half] = _mm256_add_epi32(sums[r][half], wide);
                            }
                        }
                    }
                }
            }
            for half in 0..2 {
                let scale = _mm256_loadu_ps(step.scales.add(index * PANEL + half * 8));
                let bias = _mm256_loadu_ps(step.biases.add(index * PANEL + half * 8));
                for r in 0..R {
                    let x_scale = _mm256_set1_ps(*self.x.scales.add(x_groups[r] + index));
                    let x_sum = _mm256_set1_ps(*self.x.sums.add(x_groups[r] + index));
                    let total = _mm256_fmadd_ps(bias, x_sum, totals[r][half]);
                    let dot = _mm256_cvtepi32_ps(sums[r][half]);
                    totals[r][half] = _mm256_fmadd_ps(dot, _mm256_mul_ps(scale, x_scale), total);
                }
            }
        }
        for r in 0..R {
            _mm256_storeu_ps(values.add(r * PANEL), totals[r][0]);
            _mm256_storeu_ps(values.add(r * PANEL + 8), totals[r][1]);
        }
    }
}
