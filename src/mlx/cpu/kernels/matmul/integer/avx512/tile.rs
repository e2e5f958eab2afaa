//! Many rows of x: 32 rows of weights are unpacked and transposed into first-level cache, then meet all rows of x.
#![allow(unsafe_op_in_unsafe_fn, reason = "intrinsics throughout; callers hold AVX-512 with VNNI")]

use std::arch::x86_64::*;

use super::super::super::ahead::Coming;
use super::super::super::schedule::Task;
use super::super::super::simd::Avx512;
use super::super::kernel::{Integer, Row};
use super::super::packing::{LINE, Mode};
use super::super::panel::{Room, SEGMENT, Step, tile_rows};
use super::scales::transpose;
use super::vectors::{columns, unpack};

/// Outputs of a panel: two vectors.
pub(in super::super) const PANEL: usize = 32;
/// Rows of x in a tile.
const TILE_ROWS: usize = 6;
/// Up to so many rows of x, there are registers for each sum in two parts.
const APART: usize = 4;
impl Integer<'_> {
    /// All outputs of a task.
    ///
    /// # Safety
    /// The processor has AVX-512 with VNNI.
    pub(in super::super) unsafe fn many_vnni<M: Mode>(&self, task: &Task) {
        if self.packing.bits == 4 {
            self.panels::<M, 2>(task);
        } else {
            self.panels::<M, 1>(task);
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")]
    unsafe fn panels<M: Mode, const PARTS: usize>(&self, task: &Task) {
        let pairs = task.last_pair - task.first_pair;
        let (inputs, group) = (self.packing.inputs, self.packing.group);
        let room = Room::new(PANEL, 4, pairs);
        let Room { panel, scales, biases, values, .. } = room;
        let tile_rows = tile_rows(pairs, TILE_ROWS);
        for first in (task.first..task.last).step_by(PANEL) {
            for start in (0..inputs).step_by(SEGMENT) {
                let length = SEGMENT.min(inputs - start);
                for half in [0, 16] {
                    let rows = self.rows(task, first + half);
                    self.spread::<PARTS>(&rows, start, length, panel.add(half));
                    let groups = (start / group, length / group);
                    let (scales, biases) = (scales.add(half), biases.add(half));
                    transpose(&self.scales, &rows, groups, (scales, biases), PANEL, None);
                }
                let step = Step { panel, scales, biases, start, length };
                let mut coming = self.coming(task, (first, PANEL), (start, SEGMENT));
                let groups = pairs.div_ceil(tile_rows) * (length / group);
                let lines = (PANEL * coming.lines).div_ceil(groups);
                for pair in (0..pairs).step_by(tile_rows) {
                    let values = values.add(pair * PANEL);
                    let at = task.first_pair + pair;
                    match tile_rows.min(pairs - pair) {
                        1 => self.tile::<M, PARTS, 1>(&step, at, values, &mut coming, lines),
                        2 => self.tile::<M, PARTS, 2>(&step, at, values, &mut coming, lines),
                        3 => self.tile::<M, PARTS, 3>(&step, at, values, &mut coming, lines),
                        4 => self.tile::<M, PARTS, 4>(&step, at, values, &mut coming, lines),
                        5 => self.tile::<M, PARTS, 5>(&step, at, values, &mut coming, lines),
                        _ => self.tile::<M, PARTS, TILE_ROWS>(&step, at, values, &mut coming, lines),
                    }
                }
            }
            self.write::<Avx512>(task, (first, PANEL.min(task.last - first)), (values, PANEL));
        }
    }

    /// Levels of 16 rows of weights, for the columns `start` to `start + length`: `[words, parts, 32]` lanes of which
    /// this fills 16.
    #[inline(always)]
    unsafe fn spread<const PARTS: usize>(
        &self,
        rows: &[usize; 16],
        start: usize,
        length: usize,
        to: *mut u32,
    ) {
        let a_word = 4 * PARTS;
        let words = length / a_word;
        let mut from = [std::ptr::null(); 16];
        for (from, row) in from.iter_mut().zip(rows) {
            *from = self.words.add(row * self.packing.row_words() + start / a_word).cast::<u8>();
        }
        // A group is four words at least.
        for at in (0..words).step_by(4) {
            let mut place = [std::ptr::null(); 16];
            for (place, from) in place.iter_mut().zip(from) {
                *place = from.add(at * 4);
                if at % LINE == 0 {
                    _mm_prefetch::<_MM_HINT_T0>(place.wrapping_add(LINE * 4).cast());
                }
            }
            for (index, column) in columns::<true>(place, 0).into_iter().enumerate() {
                let to = to.add((at + index) * PARTS * PANEL);
                for (part, levels) in unpack::<PARTS>(column).into_iter().enumerate() {
                    _mm512_storeu_si512(to.add(part * PANEL).cast(), levels);
                }
            }
        }
    }

    /// A segment of `R` rows of x times the panel, added to `values` (`[R][32]`), which the first segment sets. Asks for
    /// so many lines of what is coming with each group.
    #[inline(always)]
    unsafe fn tile<M: Mode, const PARTS: usize, const R: usize>(
        &self,
        step: &Step,
        at: usize,
        values: *mut f32,
        coming: &mut Coming,
        lines: usize,
    ) {
        let packing = self.packing;
        let group_words = packing.group / (4 * PARTS);
        let line_words = M::PLANES * PARTS * LINE;
        let start_line = step.start / (4 * PARTS) / LINE;
        let mut x = [std::ptr::null::<i32>(); R];
        let mut x_groups = [0; R];
        let mut totals = [[_mm512_setzero_ps(); 2]; R];
        for (r, Row { values: from, group }) in self.x_rows::<M, R>(at).into_iter().enumerate() {
            x[r] = from.cast::<i32>().add(start_line * line_words);
            x_groups[r] = group + step.start / packing.group;
            if step.start > 0 {
                totals[r][0] = _mm512_loadu_ps(values.add(r * PANEL));
                totals[r][1] = _mm512_loadu_ps(values.add(r * PANEL + 16));
            }
        }
        for index in 0..step.length / packing.group {
            coming.fetch::<Avx512, PANEL>(lines);
            let words = (index * group_words, group_words);
            let sums = if R <= APART {
                self.products_apart::<M, PARTS, R>(step.panel, &x, words)
            } else {
                self.products::<M, PARTS, R>(step.panel, &x, words)
            };
            for half in 0..2 {
                let scale = _mm512_loadu_ps(step.scales.add(index * PANEL + half * 16));
                let bias = _mm512_loadu_ps(step.biases.add(index * PANEL + half * 16));
                for r in 0..R {
                    let x_scale = _mm512_set1_ps(*self.x.scales.add(x_groups[r] + index));
                    let x_sum = _mm512_set1_ps(*self.x.sums.add(x_groups[r] + index));
                    let total = _mm512_fmadd_ps(bias, x_sum, totals[r][half]);
                    let dot = _mm512_cvtepi32_ps(sums[r][half]);
                    totals[r][half] = _mm512_fmadd_ps(dot, _mm512_mul_ps(scale, x_scale), total);
                }
            }
        }
        for r in 0..R {
            _mm512_storeu_ps(values.add(r * PANEL), totals[r][0]);
            _mm512_storeu_ps(values.add(r * PANEL + 16), totals[r][1]);
        }
    }

    /// Sums of products over a group, one digit of the activations after the other.
    #[inline(always)]
    unsafe fn products<M: Mode, const PARTS: usize, const R: usize>(
        &self,
        panel: *const u32,
        x: &[*const i32; R],
        (first, count): (usize, usize),
    ) -> [[__m512i; 2]; R] {
        let mut sums = [[_mm512_setzero_si512(); 2]; R];
        for plane in 0..M::PLANES {
            if plane > 0 {
                for r in 0..R {
                    for half in 0..2 {
                        sums[r][half] = _mm512_slli_epi32::<8>(sums[r][half]);
                    }
                }
            }
            for start in (first..first + count).step_by(LINE) {
                let place = place::<M, PARTS>(start, plane);
                for at in 0..count.min(LINE) {
                    for part in 0..PARTS {
                        let from = panel.add(((start + at) * PARTS + part) * PANEL);
                        let levels =
                            [_mm512_loadu_si512(from.cast()), _mm512_loadu_si512(from.add(16).cast())];
                        for r in 0..R {
                            let activations = _mm512_set1_epi32(*x[r].add(place + part * LINE + at));
                            for half in 0..2 {
                                sums[r][half] = _mm512_dpbusd_epi32(sums[r][half], levels[half], activations);
                            }
                        }
                    }
                }
            }
        }
        sums
    }

    /// As [`products`](Self::products), each sum in two parts, so that there are enough of them to keep the multipliers
    /// busy: one for each digit, or one for each other vector of levels.
    #[inline(always)]
    unsafe fn products_apart<M: Mode, const PARTS: usize, const R: usize>(
        &self,
        panel: *const u32,
        x: &[*const i32; R],
        (first, count): (usize, usize),
    ) -> [[__m512i; 2]; R] {
        let mut sums = [[[_mm512_setzero_si512(); 2]; R]; 2];
        for start in (first..first + count).step_by(LINE) {
            for at in (0..count.min(LINE)).step_by(2 / PARTS) {
                for other in 0..2 {
                    let (at, part) = if PARTS == 2 { (at, other) } else { (at + other, 0) };
                    let from = panel.add(((start + at) * PARTS + part) * PANEL);
                    let levels = [_mm512_loadu_si512(from.cast()), _mm512_loadu_si512(from.add(16).cast())];
                    for r in 0..R {
                        for plane in 0..M::PLANES {
                            let place = place::<M, PARTS>(start, plane) + part * LINE + at;
                            let activations = _mm512_set1_epi32(*x[r].add(place));
                            let sums = &mut sums[if M::PLANES == 2 { plane } else { other }][r];
                            for half in 0..2 {
                                sums[half] = _mm512_dpbusd_epi32(sums[half], levels[half], activations);
                            }
                        }
                    }
                }
            }
        }
        let [mut firsts, seconds] = sums;
        for r in 0..R {
            for half in 0..2 {
                let sum = &mut firsts[r][half];
                if M::PLANES == 2 {
                    *sum = _mm512_slli_epi32::<8>(*sum);
                }
                *sum = _mm512_add_epi32(*sum, seconds[r][half]);
            }
        }
        firsts
    }
}

/// Where the activations of a word of a line begin, in words.
#[inline(always)]
fn place<M: Mode, const PARTS: usize>(word: usize, plane: usize) -> usize {
    (word / LINE * M::PLANES + plane) * PARTS * LINE + word % LINE
}
