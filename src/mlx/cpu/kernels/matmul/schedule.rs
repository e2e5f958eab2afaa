//! Who multiplies what, and how the work is cut into tasks. No cut changes a result.

use super::{Gather, MatmulError};

/// One row of `x` and the row of `y` it becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pair {
    pub x: u32,
    pub y: u32,
}

/// The rows that one matrix multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    expert: usize,
    first: usize,
    last: usize,
}

/// All rows of a call, those of one matrix together.
#[derive(Debug)]
pub(super) struct Plan {
    pub pairs: Vec<Pair>,
    runs: Vec<Run>,
}

/// A rectangle of the result: some rows of one matrix's, some outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Task {
    pub expert: usize,
    /// Range of [`Plan::pairs`].
    pub first_pair: usize,
    pub last_pair: usize,
    /// Range of outputs.
    pub first: usize,
    pub last: usize,
}

fn index(value: usize) -> Result<u32, MatmulError> {
    u32::try_from(value).map_err(|_| MatmulError::TooLarge)
}

impl Plan {
    /// All rows, one matrix.
    pub(super) fn dense(rows: usize) -> Result<Self, MatmulError> {
        let pairs = (0..index(rows)?).map(|row| Pair { x: row, y: row }).collect();
        let runs = if rows == 0 { vec![] } else { vec![Run { expert: 0, first: 0, last: rows }] };
        Ok(Self { pairs, runs })
    }

    /// Rows sorted by matrix; every index is checked.
    pub(super) fn gathered(gather: &Gather<'_>, x_rows: usize, experts: usize) -> Result<Self, MatmulError> {
        let y_rows = gather.experts.len();
        index(y_rows)?;
        if let Some(rows) = gather.x_rows {
            if rows.len() != y_rows {
                return Err(MatmulError::Length { what: "x_rows", wanted: y_rows, actual: rows.len() });
            }
            if let Some(&row) = rows.iter().find(|row| **row as usize >= x_rows) {
                return Err(MatmulError::Index { what: "x row", index: row, count: x_rows });
            }
        } else if x_rows != y_rows {
            return Err(MatmulError::Length { what: "experts", wanted: x_rows, actual: y_rows });
        }
        if let Some(&expert) = gather.experts.iter().find(|expert| **expert as usize >= experts) {
            return Err(MatmulError::Index { what: "expert", index: expert, count: experts });
        }
        let mut order: Vec<u32> = (0..y_rows as u32).collect();
        order.sort_by_key(|row| gather.experts[*row as usize]);
        let expert = |row: u32| gather.experts[row as usize] as usize;
        let x_row = |row: u32| gather.x_rows.map_or(row, |rows| rows[row as usize]);
        let mut runs: Vec<Run> = Vec::new();
        for (position, &row) in order.iter().enumerate() {
            match runs.last_mut() {
                Some(run) if run.expert == expert(row) => run.last = position + 1,
                _ => runs.push(Run { expert: expert(row), first: position, last: position + 1 }),
            }
        }
        Ok(Self { pairs: order.into_iter().map(|row| Pair { x: x_row(row), y: row }).collect(), runs })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }

    /// Cuts the work: at most `block_rows` rows a task, outputs in multiples of `unit`, and a few tasks for each
    /// thread, none with fewer than about `least` products.
    pub(super) fn tasks(
        &self,
        outputs: usize,
        inputs: usize,
        threads: usize,
        block_rows: usize,
        unit: usize,
    ) -> Vec<Task> {
        /// Below this many products, handing out a task costs more than another thread gains.
        const LEAST: usize = 16 * 1024;
        /// Tasks for each thread: enough that a disturbed thread can leave some to the others.
        const SHARE: usize = 4;

        let total = self.pairs.len().saturating_mul(outputs);
        let wanted = total.div_ceil(if threads == 1 { 1 } else { threads * SHARE });
        let mut tasks = Vec::new();
        for run in &self.runs {
            let rows = run.last - run.first;
            let block = rows.div_ceil(rows.div_ceil(block_rows));
            for first_pair in (run.first..run.last).step_by(block) {
                let last_pair = run.last.min(first_pair + block);
                let rows = last_pair - first_pair;
                let least = LEAST.div_ceil(inputs.saturating_mul(rows));
                let step = wanted.div_ceil(rows).max(least).next_multiple_of(unit);
                for first in (0..outputs).step_by(step) {
                    let last = outputs.min(first + step);
                    tasks.push(Task { expert: run.expert, first_pair, last_pair, first, last });
                }
            }
        }
        tasks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gathered_rows_are_sorted_by_expert_and_keep_their_places() {
        let gather = Gather { x_rows: Some(&[0, 0, 1, 1]), experts: &[2, 0, 2, 1] };
        let plan = Plan::gathered(&gather, 2, 3).unwrap();
        let pairs: Vec<_> = plan.pairs.iter().map(|pair| (pair.x, pair.y)).collect();
        assert_eq!(pairs, [(0, 1), (1, 3), (0, 0), (1, 2)]);
        let runs: Vec<_> = plan.runs.iter().map(|run| (run.expert, run.first, run.last)).collect();
        assert_eq!(runs, [(0, 0, 1), (1, 1, 2), (2, 2, 4)]);
    }

    #[test]
    fn tasks_cover_every_output_once() {
        for (rows, outputs, threads) in [(1, 7, 1), (1, 1000, 8), (130, 100, 3), (400, 64, 64), (97, 33, 2)] {
            let plan = Plan::dense(rows).unwrap();
            let mut covered = vec![0u8; rows * outputs];
            for task in plan.tasks(outputs, 576, threads, 96, 32) {
                for pair in task.first_pair..task.last_pair {
                    for output in task.first..task.last {
                        covered[pair * outputs + output] += 1;
                    }
                }
            }
            assert!(covered.iter().all(|count| *count == 1), "{rows} {outputs} {threads}");
        }
    }
}
