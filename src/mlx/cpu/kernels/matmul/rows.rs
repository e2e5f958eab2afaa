//! `x · Wᵀ`: each output is the dot product of a row of x with a row of weights. Lanes run along K.
//!
//! Few rows of x meet weights in [`registers`]. More rows: a tile of rows of weights is unpacked to f32 in first-level
//! cache, then meets all rows of x, three at a time. Both keep the one order of summation (see the module above): what
//! is unpacked, and the chain of fused multiply-adds of each lane, are the same.

use super::super::super::Pool;
use super::super::floats::Floats;
use super::MatmulError;
use super::ahead::{Ahead, Coming};
use super::matrix::Matrix;
use super::output::Output;
use super::prepare::{Scratch, widen};
use super::registers::{QUAD, Registers};
use super::schedule::{Plan, Task};
use super::simd::{BLOCK, Kernel, Simd};
use super::source::{SEGMENT, Source, Visitor, WideScales, dispatch};

/// Rows of x that stay in second-level cache while weights pass by.
pub(super) const BLOCK_ROWS: usize = 128;
/// Outputs whose sums are kept between segments of K.
const BLOCK_OUTPUTS: usize = 32;
/// Rows of x in a tile.
const TILE_ROWS: usize = 3;
/// Up to so many rows of x are multiplied in registers; the sums of many more would not fit into them.
const FEW: usize = 8;
/// Outputs of a row of x are this far apart; sums of a partial four reach past the last.
pub(super) const STRIDE: usize = BLOCK_OUTPUTS + QUAD;
/// Cache lines that the processor can wait for at once.
const LINES: usize = 16;
/// f32 that unpacked weights take, or the scales of those that are unpacked in registers.
const PANEL: usize =
    if WideScales::SIZE > 8 * SEGMENT { WideScales::SIZE.next_multiple_of(16) } else { 8 * SEGMENT };

struct Dot<'a, W> {
    source: W,
    outputs: usize,
    inputs: usize,
    padded: usize,
    ahead: Ahead,
    x: *const f32,
    output: &'a Output<'a>,
    plan: &'a Plan,
    tasks: &'a [Task],
}

// SAFETY: x is only read, and each task writes its own part of the output.
unsafe impl<W: Sync> Sync for Dot<'_, W> {}

impl<'a, W> Dot<'a, W> {
    fn new<S: Simd>(
        source: W,
        matrix: &Matrix<'_>,
        x: *const f32,
        output: &'a Output<'a>,
        plan: &'a Plan,
        tasks: &'a [Task],
    ) -> Self
    where
        W: Source<S>,
    {
        let (outputs, inputs) = (matrix.rows, matrix.columns);
        let ahead = Ahead::new(source.bytes(inputs), QUAD);
        let padded = inputs.next_multiple_of(BLOCK);
        Self { source, outputs, inputs, padded, ahead, x, output, plan, tasks }
    }
}

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
        let tasks = plan.tasks(outputs, inputs, pool.threads(), BLOCK_ROWS, unit(plan.pairs.len()));
        let kernel = Dot::new(source, matrix, x.as_ptr(), output, plan, &tasks);
        // SAFETY: the caller's promise.
        pool.run(tasks.len(), &|task| unsafe { S::enter(&kernel, task) })?;
        Ok(())
    }
}

/// What the outputs of a task come in multiples of.
pub(super) fn unit(rows: usize) -> usize {
    if rows > FEW { BLOCK_OUTPUTS } else { QUAD }
}

/// One task of a product whose rows of x were prepared before.
pub(super) struct Part<'a> {
    pub matrix: &'a Matrix<'a>,
    /// Rows as [`widen`] leaves them.
    pub x: *const f32,
    pub output: &'a Output<'a>,
    pub plan: &'a Plan,
    pub task: Task,
}

impl<S: Simd> Visitor<S> for Part<'_> {
    unsafe fn visit<W: Source<S>>(self, source: W) -> Result<(), MatmulError> {
        let tasks = [self.task];
        let kernel = Dot::new(source, self.matrix, self.x, self.output, self.plan, &tasks);
        // SAFETY: the caller's promise.
        unsafe { S::enter(&kernel, 0) };
        Ok(())
    }
}

impl<S: Simd, W: Source<S>> Kernel<S> for Dot<'_, W> {
    #[inline(always)]
    unsafe fn run(&self, task: usize) {
        let task = self.tasks[task];
        let pairs = task.last_pair - task.first_pair;
        let kept = if self.inputs > SEGMENT { pairs * BLOCK_OUTPUTS * S::LANES } else { 0 };
        let mut scratch = Scratch::take(PANEL + pairs * STRIDE + kept);
        let panel = scratch.as_mut_ptr();
        // SAFETY: the three parts of the scratch memory, as sized above.
        let (values, sums) = unsafe { (panel.add(PANEL), panel.add(PANEL + pairs * STRIDE)) };
        for first in (task.first..task.last).step_by(BLOCK_OUTPUTS) {
            let strip = Strip {
                first_pair: task.first_pair,
                pairs,
                row: task.expert * self.outputs + first,
                count: BLOCK_OUTPUTS.min(task.last - first),
                panel,
                sums,
                values,
            };
            // SAFETY: the caller's promise; S::TILE is 4 or 8.
            unsafe {
                match pairs {
                    1 => self.registers::<S, 1, 4>(&strip),
                    2 => self.registers::<S, 2, 4>(&strip),
                    3 => self.registers::<S, 3, 2>(&strip),
                    4 => self.registers::<S, 4, 2>(&strip),
                    5 | 6 if S::TILE == 8 => self.registers::<S, 6, 2>(&strip),
                    7 | 8 if S::TILE == 8 => self.registers::<S, 8, 2>(&strip),
                    _ if S::TILE == 8 => self.panels::<S, 8>(&strip),
                    _ => self.panels::<S, 4>(&strip),
                }
                for pair in 0..pairs {
                    let values = std::slice::from_raw_parts_mut(values.add(pair * STRIDE), strip.count);
                    let pair = self.plan.pairs[task.first_pair + pair];
                    self.output.write::<S>(pair, task.expert, first, values);
                }
            }
        }
    }
}

/// Up to [`BLOCK_OUTPUTS`] outputs of some rows of x.
struct Strip {
    first_pair: usize,
    pairs: usize,
    /// The first row of weights, counted through all stacked matrices, and how many.
    row: usize,
    count: usize,
    /// `[TILE, SEGMENT]` unpacked weights, or wide scales.
    panel: *mut f32,
    /// `[BLOCK_OUTPUTS / TILE, pairs, TILE]` vectors, if K has more than one segment.
    sums: *mut f32,
    /// `[pairs, STRIDE]` outputs.
    values: *mut f32,
}

impl<W> Dot<'_, W> {
    #[inline(always)]
    fn x_row(&self, pair: usize) -> *const f32 {
        // In bounds: the plan checked every row of x.
        self.x.wrapping_add(self.plan.pairs[pair].x as usize * self.padded)
    }

    /// Up to `M` rows of x with `R` rows of weights at a time.
    #[inline(always)]
    unsafe fn registers<S: Simd, const M: usize, const R: usize>(&self, strip: &Strip)
    where
        W: Source<S>,
    {
        let rows = strip.row..strip.row + strip.count;
        let (source, ahead, inputs, scales) = (self.source, self.ahead, self.inputs, WideScales(strip.panel));
        // SAFETY: the rows lie in the matrix; there is room for four values at any place of the outputs.
        unsafe {
            if strip.count < QUAD {
                for m in 0..strip.pairs {
                    let (x, values) = ([self.x_row(strip.first_pair + m)], strip.values.add(m * STRIDE));
                    let few = Registers { source, ahead, inputs, rows: rows.clone(), x, scales, values };
                    few.enter::<S, 1>(1);
                }
            } else {
                let (mut x, values) = ([self.x; M], strip.values);
                for (m, x) in x.iter_mut().enumerate() {
                    // Rows past the last repeat it.
                    *x = self.x_row(strip.first_pair + m.min(strip.pairs - 1));
                }
                let all = Registers { source, ahead, inputs, rows, x, scales, values };
                all.enter::<S, R>(strip.pairs);
            }
        }
    }

    /// `T` rows of weights at a time, unpacked, then all rows of x.
    #[inline(always)]
    unsafe fn panels<S: Simd, const T: usize>(&self, strip: &Strip)
    where
        W: Source<S>,
    {
        let Strip { pairs, panel, .. } = *strip;
        for start in (0..self.inputs).step_by(SEGMENT) {
            let length = SEGMENT.min(self.inputs - start);
            for tile in (0..strip.count).step_by(T) {
                // SAFETY: rows past the last repeat it, so all lie in the matrix; sums of a tile have a place
                // for each of its outputs and rows of x.
                unsafe {
                    for t in 0..T {
                        let row = strip.row + (tile + t).min(strip.count - 1);
                        self.unpack::<S>(row, start, length, panel.add(t * SEGMENT));
                    }
                    let sums = strip.sums.wrapping_add(tile * pairs * S::LANES);
                    let step = Step {
                        panel,
                        length: length.next_multiple_of(BLOCK),
                        first: start == 0,
                        last: start + length == self.inputs,
                    };
                    let mut coming = self.coming::<S>(strip, start, tile + T);
                    let lines = LINES.max((T * coming.lines).div_ceil(pairs.div_ceil(TILE_ROWS)));
                    for pair in (0..pairs).step_by(TILE_ROWS) {
                        coming.fetch::<S, T>(lines);
                        let x = [0, 1, 2].map(|m| {
                            self.x_row(strip.first_pair + (pair + m).min(pairs - 1)).wrapping_add(start)
                        });
                        let sums = sums.wrapping_add(pair * T * S::LANES);
                        let values = strip.values.add(pair * STRIDE + tile);
                        match pairs - pair {
                            1 => step.tile::<S, 1, T>([x[0]], sums, values),
                            2 => step.tile::<S, 2, T>([x[0], x[1]], sums, values),
                            _ => step.tile::<S, TILE_ROWS, T>(x, sums, values),
                        }
                    }
                }
            }
        }
    }

    /// The weights that follow in the order of [`panels`](Self::panels): outputs from `tile` on of this segment, or
    /// the first of the next segment, or the next strip.
    #[inline(always)]
    fn coming<S: Simd>(&self, strip: &Strip, start: usize, tile: usize) -> Coming
    where
        W: Source<S>,
    {
        let (row, start) = match (tile < strip.count, start + SEGMENT < self.inputs) {
            (true, _) => (strip.row + tile, start),
            (false, true) => (strip.row, start + SEGMENT),
            (false, false) => (strip.row + strip.count, 0),
        };
        Coming {
            from: self.source.address(row, start),
            row_bytes: self.source.bytes(self.inputs),
            lines: self.source.bytes(SEGMENT.min(self.inputs - start)).div_ceil(64),
            done: 0,
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
            self.source.open(row, start, length, 0, &mut segment);
            let blocks = length / BLOCK;
            let mut index = 0;
            while self.source.pairs() && index + 2 <= blocks {
                let group = self.source.group(&segment, index);
                S::block_store(to.add(index * BLOCK), self.source.block::<false>(&segment, group, index));
                index += 1;
                S::block_store(to.add(index * BLOCK), self.source.block::<false>(&segment, group, index));
                index += 1;
            }
            while index < blocks {
                let group = self.source.group(&segment, index);
                S::block_store(to.add(index * BLOCK), self.source.block::<false>(&segment, group, index));
                index += 1;
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
    /// ([`STRIDE`] apart for each row of x) after the last segment.
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
                        S::sum4(four, values.add(m * STRIDE + t));
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
