//! How the products of a phase are cut into tasks.

use std::cmp::Reverse;
use std::ops::Range;

use super::super::matmul::Arrangement;
use super::super::simd::LANES;

/// Tasks of a phase for each thread: enough that a disturbed thread can leave some to the others.
pub(super) const SHARE: usize = 4;

/// Below this many products, handing out a task costs more than another thread gains.
const LEAST: usize = 16 * 1024;

/// How products of the same rows are cut into tasks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    rows: usize,
    row_blocks: usize,
    rows_each: usize,
    outputs_each: usize,
}

impl Cut {
    /// Products with `outputs` outputs each. Of the sizes near the wanted one, tasks get that which leaves the busiest
    /// thread the least.
    pub(super) fn new(
        rows: usize,
        outputs: &[usize],
        inputs: usize,
        arrangement: Arrangement,
        threads: usize,
    ) -> Self {
        let rows_each = rows.div_ceil(rows.div_ceil(arrangement.most_rows()));
        let row_blocks = rows.div_ceil(rows_each);
        let unit = arrangement.unit(rows_each).max(LANES);
        let total: usize = outputs.iter().sum();
        let least = LEAST.div_ceil(inputs * rows_each).div_ceil(unit);
        let wanted = (row_blocks * total).div_ceil(threads * SHARE).div_ceil(unit).max(least);
        let busiest = |units: usize| {
            let tasks: usize = outputs.iter().map(|count| count.div_ceil(unit * units)).sum();
            (row_blocks * tasks).div_ceil(threads) * units
        };
        let sizes = least.max(wanted.div_ceil(2))..=wanted + wanted / 2;
        let units = sizes.min_by_key(|&units| (busiest(units), Reverse(units))).unwrap_or(wanted);
        Self { rows, row_blocks, rows_each, outputs_each: unit * units }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_every_output_once() {
        for (rows, threads) in [(1, 1), (1, 2), (8, 3), (256, 2), (97, 5)] {
            for outputs in [&[576, 192, 192][..], &[49_152], &[77]] {
                let cut = Cut::new(rows, outputs, 576, Arrangement::Nibbles, threads);
                for &count in outputs {
                    let mut seen = vec![0; rows * count];
                    for task in 0..cut.tasks(count) {
                        let (rows, range) = cut.part(count, task);
                        rows.for_each(|row| range.clone().for_each(|output| seen[row * count + output] += 1));
                    }
                    assert!(
                        seen.iter().all(|&times| times == 1),
                        "{rows} rows, {threads} threads, {outputs:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn two_threads_get_equal_shares_of_the_starter() {
        for (outputs, inputs) in [(&[576, 192, 192][..], 576), (&[576], 576), (&[1536], 576), (&[576], 1536)]
        {
            let cut = Cut::new(1, outputs, inputs, Arrangement::Nibbles, 2);
            let tasks: usize = outputs.iter().map(|&count| cut.tasks(count)).sum();
            let total: usize = outputs.iter().sum();
            assert_eq!(tasks.div_ceil(2) * cut.outputs_each * 2, total, "{outputs:?}");
        }
    }
}
