//! `x · W`: each output sums over the rows of W. Lanes run along the outputs, each a chain in the order of K.
//!
//! Few rows of x: weights are unpacked in registers and used at once. More: some rows of a strip of W are unpacked to
//! f32 in first-level cache, then meet all rows of x, three at a time.

use super::super::super::Pool;
use super::super::floats::Floats;
use super::MatmulError;
use super::matrix::Matrix;
use super::output::Output;
use super::prepare::{Aligned, Scratch, widen};
use super::schedule::{Plan, Task};
use super::simd::{BLOCK, Kernel, Simd};
use super::source::{Source, Visitor, dispatch};

/// Rows of x in a tile.
const TILE_ROWS: usize = 3;
/// Rows of x that stay in cache while weights pass by.
const BLOCK_ROWS: usize = 96;
/// Rows of W that are unpacked at once.
const DEPTH: usize = 48;
/// How many rows ahead weights are asked for.
const AHEAD: usize = 16;

struct Outer<'a, W> {
    source: W,
    inputs: usize,
    x: *const f32,
    /// Bytes between a row of weights and one to be asked for while it is read.
    ahead: usize,
    output: &'a Output<'a>,
    plan: &'a Plan,
    tasks: Vec<Task>,
}

// SAFETY: x is only read, and each task writes its own part of the output.
unsafe impl<W: Sync> Sync for Outer<'_, W> {}

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
        let (outputs, inputs) = (matrix.columns, matrix.rows);
        let widened: Aligned;
        let x = if let Floats::F32(x) = x {
            x.as_ptr()
        } else {
            // SAFETY: the caller's promise.
            widened = unsafe { widen::<S>(pool, x, inputs, inputs, false)? };
            widened.as_ptr()
        };
        let strip = S::COLUMN_BLOCKS * BLOCK;
        let tasks = plan.tasks(outputs, inputs, pool.threads(), BLOCK_ROWS, strip);
        let count = tasks.len();
        let ahead = AHEAD * source.bytes(outputs);
        let kernel = Outer { source, inputs, x, ahead, output, plan, tasks };
        // SAFETY: the caller's promise.
        pool.run(count, &|task| unsafe { S::enter(&kernel, task) })?;
        Ok(())
    }
}

impl<S: Simd, W: Source<S>> Kernel<S> for Outer<'_, W> {
    #[inline(always)]
    unsafe fn run(&self, task: usize) {
        let task = self.tasks[task];
        // SAFETY: the caller's promise; a strip has as many vectors as S::TILE says, 4 or 8.
        unsafe {
            match (task.last_pair - task.first_pair, S::TILE) {
                (1, 8) => self.direct::<S, 1, 8>(&task),
                (2, 8) => self.direct::<S, 2, 8>(&task),
                (3, 8) => self.direct::<S, 3, 8>(&task),
                (1, _) => self.direct::<S, 1, 4>(&task),
                (2, _) => self.direct::<S, 2, 4>(&task),
                (3, _) => self.direct::<S, 3, 4>(&task),
                (_, 8) => self.panels::<S, 8>(&task),
                _ => self.panels::<S, 4>(&task),
            }
        }
    }
}

impl<W> Outer<'_, W> {
    #[inline(always)]
    fn x_row(&self, pair: usize) -> *const f32 {
        // In bounds: the plan checked every row of x.
        self.x.wrapping_add(self.plan.pairs[pair].x as usize * self.inputs)
    }

    /// All rows of W with `M` rows of x; `T` vectors make up a strip of outputs.
    #[inline(always)]
    unsafe fn direct<S: Simd, const M: usize, const T: usize>(&self, task: &Task)
    where
        W: Source<S>,
    {
        let mut x = [self.x; M];
        for (m, x) in x.iter_mut().enumerate() {
            *x = self.x_row(task.first_pair + m);
        }
        let strip = S::COLUMN_BLOCKS * BLOCK;
        for first in (task.first..task.last).step_by(strip) {
            let count = strip.min(task.last - first);
            // SAFETY: the columns lie in the matrix, whose last strip may end in a part of a block.
            unsafe {
                let mut sums = [[S::zero(); T]; M];
                let mut segment = W::unopened();
                for k in 0..self.inputs {
                    let row = task.expert * self.inputs + k;
                    self.source.open(row, first, count, self.ahead, &mut segment);
                    let mut splat = [S::zero(); M];
                    for m in 0..M {
                        splat[m] = S::splat(*x[m].add(k));
                    }
                    for index in 0..S::COLUMN_BLOCKS {
                        let left = count.saturating_sub(index * BLOCK);
                        if left == 0 {
                            break;
                        }
                        let block = if left >= BLOCK {
                            let group = self.source.group(&segment, index);
                            self.source.block::<true>(&segment, group, index)
                        } else {
                            self.source.tail(&segment, index, left)
                        };
                        for m in 0..M {
                            let sums = sums[m].as_mut_ptr().add(index * BLOCK / S::LANES);
                            S::block_axpy(block, splat[m], sums);
                        }
                    }
                }
                for m in 0..M {
                    self.write::<S, T>(task, m, first, count, sums[m]);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn panels<S: Simd, const T: usize>(&self, task: &Task)
    where
        W: Source<S>,
    {
        let pairs = task.last_pair - task.first_pair;
        let strip = S::COLUMN_BLOCKS * BLOCK;
        let mut scratch = Scratch::take(DEPTH * strip + pairs * strip);
        let panel = scratch.as_mut_ptr();
        // SAFETY: the two parts of the scratch memory, as sized above.
        let sums = unsafe { panel.add(DEPTH * strip) };
        for first in (task.first..task.last).step_by(strip) {
            let count = strip.min(task.last - first);
            for start in (0..self.inputs).step_by(DEPTH) {
                let depth = DEPTH.min(self.inputs - start);
                // SAFETY: rows and columns lie in the matrix; what a short last strip leaves unset of the panel
                // only meets outputs that do not exist.
                unsafe {
                    for k in 0..depth {
                        let row = task.expert * self.inputs + start + k;
                        self.unpack::<S>(row, first, count, panel.add(k * strip));
                    }
                    let mut pair = 0;
                    while pair < pairs {
                        let x = [0, 1, 2].map(|m| {
                            self.x_row(task.first_pair + (pair + m).min(pairs - 1)).wrapping_add(start)
                        });
                        let sums = sums.add(pair * strip);
                        match pairs - pair {
                            1 => tile::<S, 1, T>(panel, depth, [x[0]], start == 0, sums),
                            2 => tile::<S, 2, T>(panel, depth, [x[0], x[1]], start == 0, sums),
                            _ => tile::<S, 3, T>(panel, depth, x, start == 0, sums),
                        }
                        pair += TILE_ROWS;
                    }
                }
            }
            for pair in 0..pairs {
                // SAFETY: the sums of this row were set by the tiles.
                unsafe {
                    let mut vectors = [S::zero(); T];
                    for (t, vector) in vectors.iter_mut().enumerate() {
                        *vector = S::load(sums.add(pair * strip + t * S::LANES));
                    }
                    self.write::<S, T>(task, pair, first, count, vectors);
                }
            }
        }
    }

    /// Part of a row of W as f32.
    #[inline(always)]
    unsafe fn unpack<S: Simd>(&self, row: usize, first: usize, count: usize, to: *mut f32)
    where
        W: Source<S>,
    {
        // SAFETY: the caller's promise.
        unsafe {
            let mut segment = W::unopened();
            self.source.open(row, first, count, self.ahead, &mut segment);
            for index in 0..count / BLOCK {
                let group = self.source.group(&segment, index);
                S::block_store(to.add(index * BLOCK), self.source.block::<true>(&segment, group, index));
            }
            if !count.is_multiple_of(BLOCK) {
                let index = count / BLOCK;
                let block = self.source.tail(&segment, index, count % BLOCK);
                S::block_store(to.add(index * BLOCK), block);
            }
        }
    }

    /// Puts the outputs of a strip into the order of the columns and writes them.
    #[inline(always)]
    unsafe fn write<S: Simd, const T: usize>(
        &self,
        task: &Task,
        pair: usize,
        first: usize,
        count: usize,
        sums: [S::F; T],
    ) where
        W: Source<S>,
    {
        const STRIP: usize = 4 * BLOCK;
        let mut positions = [0f32; STRIP];
        let mut values = [0f32; STRIP];
        for (t, sum) in sums.into_iter().enumerate() {
            // SAFETY: a strip has at most four blocks.
            unsafe { S::store(positions.as_mut_ptr().add(t * S::LANES), sum) };
        }
        for (position, &value) in positions.iter().enumerate() {
            let element = if W::NIBBLES {
                let element = usize::from(S::NIBBLE_ORDER[position % BLOCK]);
                position - position % BLOCK + element
            } else {
                position
            };
            values[element] = value;
        }
        let pair = self.plan.pairs[task.first_pair + pair];
        // SAFETY: the caller's promise.
        unsafe { self.output.write::<S>(pair, task.expert, first, &mut values[..count]) };
    }
}

/// Adds `depth` rows of the panel, each times its value of x, to the sums of `M` rows of x.
#[inline(always)]
unsafe fn tile<S: Simd, const M: usize, const T: usize>(
    panel: *const f32,
    depth: usize,
    x: [*const f32; M],
    fresh: bool,
    kept: *mut f32,
) {
    let strip = T * S::LANES;
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = [[S::zero(); T]; M];
        if !fresh {
            for m in 0..M {
                for t in 0..T {
                    sums[m][t] = S::load(kept.add(m * strip + t * S::LANES));
                }
            }
        }
        for k in 0..depth {
            let mut splat = [S::zero(); M];
            for m in 0..M {
                splat[m] = S::splat(*x[m].add(k));
            }
            for t in 0..T {
                let weights = S::load(panel.add(k * strip + t * S::LANES));
                for m in 0..M {
                    sums[m][t] = S::fma(weights, splat[m], sums[m][t]);
                }
            }
        }
        for m in 0..M {
            for t in 0..T {
                S::store(kept.add(m * strip + t * S::LANES), sums[m][t]);
            }
        }
    }
}
