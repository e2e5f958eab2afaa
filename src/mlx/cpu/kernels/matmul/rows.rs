//! `x · Wᵀ`: each output is the dot product of a row of x with a row of weights. Lanes run along K.
//!
//! Few rows of x ([`FUSED`]): weights are unpacked in registers and used at once, four rows of them together, at the
//! speed of memory. More rows: a tile of rows of weights is unpacked to f32 in first-level cache, then meets all rows
//! of x, three at a time. Both keep the one order of summation (see the module above): what is unpacked, and the
//! chain of fused multiply-adds of each lane, are the same.

use super::super::super::Pool;
use super::super::floats::Floats;
use super::MatmulError;
use super::matrix::Matrix;
use super::output::Output;
use super::prepare::{Scratch, widen};
use super::schedule::{Plan, Task};
use super::simd::{BLOCK, Kernel, Simd};
use super::source::{SEGMENT, Source, Visitor, dispatch};

/// Up to this many rows of x are multiplied while weights are unpacked.
const FUSED: usize = 2;
/// Rows of weights in flight in the fused kernel.
const FUSED_ROWS: usize = 4;
/// Rows of x that stay in second-level cache while weights pass by.
const BLOCK_ROWS: usize = 96;
/// Outputs whose sums are kept between segments of K.
const BLOCK_OUTPUTS: usize = 32;
/// Rows of x in a tile.
const TILE_ROWS: usize = 3;

struct Dot<'a, W> {
    source: W,
    outputs: usize,
    inputs: usize,
    padded: usize,
    x: *const f32,
    output: &'a Output<'a>,
    plan: &'a Plan,
    tasks: Vec<Task>,
}

// SAFETY: x is only read, and each task writes its own part of the output.
unsafe impl<W: Sync> Sync for Dot<'_, W> {}

struct Run<'a> {
    matrix: &'a Matrix<'a>,
    pool: &'a Pool,
    x: Floats<'a>,
    output: &'a Output<'a>,
    plan: &'a Plan,
}

/// # Safety
/// The processor has the instructions of `S`; `plan` and `output` were made for these operands.
pub(super) unsafe fn run<S: Simd>(
    matrix: &Matrix<'_>,
    pool: &Pool,
    x: Floats<'_>,
    output: &Output<'_>,
    plan: &Plan,
) -> Result<(), MatmulError> {
    // SAFETY: the caller's promise.
    unsafe { dispatch::<S, _>(matrix, Run { matrix, pool, x, output, plan }) }
}

impl<S: Simd> Visitor<S> for Run<'_> {
    unsafe fn visit<W: Source<S>>(self, source: W) -> Result<(), MatmulError> {
        let Self { matrix, pool, x, output, plan } = self;
        let (outputs, inputs) = (matrix.rows, matrix.columns);
        let padded = inputs.next_multiple_of(BLOCK);
        // SAFETY: the caller's promise.
        let x = unsafe { widen::<S>(pool, x, inputs, padded, W::NIBBLES)? };
        let unit = if plan.pairs.len() > FUSED { BLOCK_OUTPUTS } else { FUSED_ROWS };
        let tasks = plan.tasks(outputs, inputs, pool.threads(), BLOCK_ROWS, unit);
        let count = tasks.len();
        let kernel = Dot { source, outputs, inputs, padded, x: x.as_ptr(), output, plan, tasks };
        // SAFETY: the caller's promise.
        pool.run(count, &|task| unsafe { S::enter(&kernel, task) })?;
        Ok(())
    }
}

impl<S: Simd, W: Source<S>> Kernel<S> for Dot<'_, W> {
    #[inline(always)]
    unsafe fn run(&self, task: usize) {
        let task = self.tasks[task];
        // SAFETY: the caller's promise; S::TILE is 4 or 8.
        unsafe {
            match (task.last_pair - task.first_pair, S::TILE) {
                (1, _) => self.fused::<S, 1>(&task),
                (FUSED, _) => self.fused::<S, FUSED>(&task),
                (_, 8) => self.panels::<S, 8>(&task),
                _ => self.panels::<S, 4>(&task),
            }
        }
    }
}

impl<W> Dot<'_, W> {
    #[inline(always)]
    fn x_row(&self, pair: usize) -> *const f32 {
        // In bounds: the plan checked every row of x.
        self.x.wrapping_add(self.plan.pairs[pair].x as usize * self.padded)
    }

    #[inline(always)]
    unsafe fn fused<S: Simd, const M: usize>(&self, task: &Task)
    where
        W: Source<S>,
    {
        const STRIP: usize = 64;
        let mut x = [self.x; M];
        for (m, x) in x.iter_mut().enumerate() {
            *x = self.x_row(task.first_pair + m);
        }
        let mut values = [[0f32; STRIP + FUSED_ROWS]; M];
        let mut first = task.first;
        while first < task.last {
            let count = STRIP.min(task.last - first);
            let row = task.expert * self.outputs + first;
            let mut done = 0;
            // SAFETY: the rows lie in the matrix; a strip has room for four values at any of its places.
            unsafe {
                while done + FUSED_ROWS <= count {
                    self.dots::<S, M, FUSED_ROWS>(row + done, x, &mut values, done);
                    done += FUSED_ROWS;
                }
                while done < count {
                    self.dots::<S, M, 1>(row + done, x, &mut values, done);
                    done += 1;
                }
                for (m, values) in values.iter_mut().enumerate() {
                    let pair = self.plan.pairs[task.first_pair + m];
                    self.output.write::<S>(pair, task.expert, first, &mut values[..count]);
                }
            }
            first += count;
        }
    }

    /// Rows `row` to `row + R` of the weights with `M` rows of x, to `values[..][at..]`.
    #[inline(always)]
    unsafe fn dots<S: Simd, const M: usize, const R: usize>(
        &self,
        row: usize,
        x: [*const f32; M],
        values: &mut [[f32; 68]; M],
        at: usize,
    ) where
        W: Source<S>,
    {
        // SAFETY: the caller's promise; x is padded to whole blocks.
        unsafe {
            let mut sums = [[S::zero(); FUSED_ROWS]; M];
            let mut segments = [W::unopened(); R];
            let mut start = 0;
            while start < self.inputs {
                let length = SEGMENT.min(self.inputs - start);
                for (r, segment) in segments.iter_mut().enumerate() {
                    self.source.open(row + r, start, length, segment);
                }
                for index in 0..length / BLOCK {
                    for r in 0..R {
                        let block = self.source.block(&segments[r], index);
                        for m in 0..M {
                            sums[m][r] = S::block_dot(block, x[m].add(start + index * BLOCK), sums[m][r]);
                        }
                    }
                }
                if !length.is_multiple_of(BLOCK) {
                    let index = length / BLOCK;
                    for r in 0..R {
                        let block = self.source.tail(&segments[r], index, length % BLOCK);
                        for m in 0..M {
                            sums[m][r] = S::block_dot(block, x[m].add(start + index * BLOCK), sums[m][r]);
                        }
                    }
                }
                start += length;
            }
            for m in 0..M {
                S::sum4(sums[m], values[m].as_mut_ptr().add(at));
            }
        }
    }

    #[inline(always)]
    unsafe fn panels<S: Simd, const T: usize>(&self, task: &Task)
    where
        W: Source<S>,
    {
        let pairs = task.last_pair - task.first_pair;
        let segments = self.inputs.div_ceil(SEGMENT);
        let kept = if segments > 1 { pairs * BLOCK_OUTPUTS * S::LANES } else { 0 };
        let mut scratch = Scratch::take(T * SEGMENT + pairs * BLOCK_OUTPUTS + kept);
        let panel = scratch.as_mut_ptr();
        // SAFETY: the three parts of the scratch memory, as sized above.
        let (values, sums) =
            unsafe { (panel.add(T * SEGMENT), panel.add(T * SEGMENT + pairs * BLOCK_OUTPUTS)) };
        let mut first = task.first;
        while first < task.last {
            let count = BLOCK_OUTPUTS.min(task.last - first);
            for segment in 0..segments {
                let start = segment * SEGMENT;
                let length = SEGMENT.min(self.inputs - start);
                for tile in (0..count).step_by(T) {
                    // SAFETY: rows past the last repeat it, so all lie in the matrix; sums of a tile have a place
                    // for each of its outputs and rows of x.
                    unsafe {
                        for t in 0..T {
                            let row = task.expert * self.outputs + (first + tile + t).min(task.last - 1);
                            self.unpack::<S>(row, start, length, panel.add(t * SEGMENT));
                        }
                        let sums = sums.add(tile * pairs * S::LANES);
                        let step = Step {
                            panel,
                            length: length.next_multiple_of(BLOCK),
                            first: segment == 0,
                            last: segment + 1 == segments,
                        };
                        let mut pair = 0;
                        while pair < pairs {
                            let x = [0, 1, 2].map(|m| {
                                self.x_row(task.first_pair + (pair + m).min(pairs - 1)).wrapping_add(start)
                            });
                            let sums = sums.wrapping_add(pair * T * S::LANES);
                            let values = values.add(pair * BLOCK_OUTPUTS + tile);
                            match pairs - pair {
                                1 => step.tile::<S, 1, T>([x[0]], sums, values),
                                2 => step.tile::<S, 2, T>([x[0], x[1]], sums, values),
                                _ => step.tile::<S, 3, T>(x, sums, values),
                            }
                            pair += TILE_ROWS;
                        }
                    }
                }
            }
            for pair in 0..pairs {
                // SAFETY: each row of x has `BLOCK_OUTPUTS` values, set by the tiles.
                unsafe {
                    let values = std::slice::from_raw_parts_mut(values.add(pair * BLOCK_OUTPUTS), count);
                    let pair = self.plan.pairs[task.first_pair + pair];
                    self.output.write::<S>(pair, task.expert, first, values);
                }
            }
            first += count;
        }
    }

    /// Part of a row of weights as f32, padded with zeros to whole blocks.
    #[inline(always)]
    unsafe fn unpack<S: Simd>(&self, row: usize, start: usize, length: usize, to: *mut f32)
    where
        W: Source<S>,
    {
        // SAFETY: the caller's promise.
        unsafe {
            let mut segment = W::unopened();
            self.source.open(row, start, length, &mut segment);
            for index in 0..length / BLOCK {
                S::block_store(to.add(index * BLOCK), self.source.block(&segment, index));
            }
            if !length.is_multiple_of(BLOCK) {
                let index = length / BLOCK;
                let block = self.source.tail(&segment, index, length % BLOCK);
                S::block_store(to.add(index * BLOCK), block);
            }
        }
    }
}

/// One segment of K for a tile of unpacked weights.
struct Step {
    panel: *const f32,
    length: usize,
    first: bool,
    last: bool,
}

impl Step {
    /// Adds `T` rows of the panel times `M` rows of x to the sums, which are kept in `kept`, or put into `values`
    /// (`BLOCK_OUTPUTS` a row of x) after the last segment.
    #[inline(always)]
    unsafe fn tile<S: Simd, const M: usize, const T: usize>(
        &self,
        x: [*const f32; M],
        kept: *mut f32,
        values: *mut f32,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut sums = [[S::zero(); T]; M];
            if !self.first {
                for m in 0..M {
                    for t in 0..T {
                        sums[m][t] = S::load(kept.add((m * T + t) * S::LANES));
                    }
                }
            }
            let mut at = 0;
            while at < self.length {
                let mut x_lanes = [S::zero(); M];
                for m in 0..M {
                    x_lanes[m] = S::load(x[m].add(at));
                }
                for t in 0..T {
                    let weights = S::load(self.panel.add(t * SEGMENT + at));
                    for m in 0..M {
                        sums[m][t] = S::fma(weights, x_lanes[m], sums[m][t]);
                    }
                }
                at += S::LANES;
            }
            for m in 0..M {
                if self.last {
                    for t in (0..T).step_by(4) {
                        let four = [sums[m][t], sums[m][t + 1], sums[m][t + 2], sums[m][t + 3]];
                        S::sum4(four, values.add(m * BLOCK_OUTPUTS + t));
                    }
                } else {
                    for t in 0..T {
                        S::store(kept.add((m * T + t) * S::LANES), sums[m][t]);
                    }
                }
            }
        }
    }
}
