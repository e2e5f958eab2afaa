//! How the products of a phase are cut into tasks.

use std::ops::Range;

use super::super::matmul::Arrangement;
use super::super::simd::LANES;

/// Tasks of a phase for each thread: enough that a disturbed thread can leave some to the others.
pub(super) const SHARE: usize = 4;

/// Below this many products, handing out a task costs more than another thread gains.
const LEAST: usize = 16 * 1024;

/// How a product is cut into tasks.
#[derive(Clone, Copy)]
pub(super) struct Cut {
    rows: usize,
    row_blocks: usize,
    rows_each: usize,
    outputs_each: usize,
}

impl Cut {
    /// A phase of `total` outputs.
    pub(super) fn new(
        rows: usize,
        total: usize,
        inputs: usize,
        arrangement: Arrangement,
        threads: usize,
    ) -> Self {
        let row_blocks = rows.div_ceil(arrangement.most_rows());
        let rows_each = rows.div_ceil(row_blocks);
        let wanted = (rows * total).div_ceil(threads * SHARE);
        let least = LEAST.div_ceil(inputs * rows_each);
        let unit = arrangement.unit(rows_each).max(LANES);
        let outputs_each = wanted.div_ceil(rows_each).max(least).next_multiple_of(unit);
        Self { rows, row_blocks: rows.div_ceil(rows_each), rows_each, outputs_each }
    }

    pub(super) fn tasks(&self, outputs: usize) -> usize {
        self.row_blocks * outputs.div_ceil(self.outputs_each)
    }

    pub(super) fn part(&self, outputs: usize, task: usize) -> (Range<usize>, Range<usize>) {
        let across = outputs.div_ceil(self.outputs_each);
        let (first_row, first) = (task / across * self.rows_each, task % across * self.outputs_each);
        (first_row..self.rows.min(first_row + self.rows_each), first..outputs.min(first + self.outputs_each))
    }
}
