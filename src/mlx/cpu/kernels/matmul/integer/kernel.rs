//! The tasks of the integer matmul: few rows of x meet weights as they come, many meet panels of unpacked ones.

use super::super::super::super::Pool;
use super::super::super::floats::Floats;
use super::super::ahead::Coming;
use super::super::matrix::{Matrix, Storage};
use super::super::output::Output;
use super::super::schedule::{Plan, Task};
use super::super::simd::Simd;
use super::super::{Matmul, MatmulError};
use super::fetching::Fetching;
use super::packing::{Mode, Packing, Rounded};
use super::rounding::Activations;
use super::scales::ScaleTable;
use super::{Set, avx2, avx512};

/// Rows of x that stay in cache while weights pass by.
pub(in super::super) const BLOCK_ROWS: usize = 512;

pub(super) struct Integer<'a> {
    pub(super) words: *const u32,
    pub(super) scales: ScaleTable,
    pub(super) packing: Packing,
    pub(super) outputs: usize,
    pub(super) fetching: Fetching,
    pub(super) x: Rounded,
    pub(super) output: &'a Output<'a>,
    pub(super) plan: &'a Plan,
    pub(super) tasks: &'a [Task],
}

// SAFETY: operands are only read, and each task writes its own part of the output.
unsafe impl Sync for Integer<'_> {}

impl Set {
    /// The most rows of x that meet weights as they come, how many rows of weights those meet together, and the outputs
    /// of a panel.
    fn sizes(self) -> (usize, usize, usize) {
        match self {
            Self::Vnni => (avx512::FEW_ROWS, avx512::FEW, avx512::PANEL),
            Self::Avx2 => (avx2::FEW_ROWS, avx2::FEW, avx2::PANEL),
        }
    }

    /// What the outputs of a task of so many rows come in multiples of.
    pub(in super::super) fn unit(self, rows: usize) -> usize {
        let (few_rows, few, panel) = self.sizes();
        if rows <= few_rows { few } else { panel }
    }
}

/// Computes the product with integer products; an error if the weights have no integer kernels.
///
/// # Safety
/// The processor has the instructions of `set`; `plan` and `output` were made for these operands.
pub(in super::super) unsafe fn run<M: Mode>(
    matmul: &Matmul<'_>,
    set: Set,
    pool: &Pool,
    x: Floats<'_>,
    output: &Output<'_>,
    plan: &Plan,
) -> Result<(), MatmulError> {
    let matrix = &matmul.weights;
    let packing = Packing::new(set, matrix)?;
    // SAFETY: the caller's promise.
    let mut x = unsafe { Activations::round::<M>(pool, x, packing)? };
    let unit = set.unit(plan.pairs.len());
    let tasks = plan.tasks(matrix.rows, matrix.columns, pool.threads(), BLOCK_ROWS, unit);
    let kernel = Integer::new(matrix, packing, x.view(), output, plan, &tasks)?;
    // SAFETY: the caller's promise.
    pool.run(tasks.len(), &|task| unsafe { kernel.task::<M>(task) })?;
    Ok(())
}

/// One task of a product whose rows of x were rounded before.
///
/// # Safety
/// As for [`run`]; `x` holds the rows of `plan`.
pub(in super::super) unsafe fn part<M: Mode>(
    matrix: &Matrix<'_>,
    set: Set,
    x: Rounded,
    output: &Output<'_>,
    plan: &Plan,
    task: Task,
) -> Result<(), MatmulError> {
    let tasks = [task];
    let kernel = Integer::new(matrix, Packing::new(set, matrix)?, x, output, plan, &tasks)?;
    // SAFETY: the caller's promise.
    unsafe { kernel.task::<M>(0) };
    Ok(())
}

impl<'a> Integer<'a> {
    fn new(
        matrix: &Matrix<'_>,
        packing: Packing,
        x: Rounded,
        output: &'a Output<'a>,
        plan: &'a Plan,
        tasks: &'a [Task],
    ) -> Result<Self, MatmulError> {
        let Storage::Packed { words, .. } = matrix.storage else { return Err(MatmulError::ScaleType) };
        let (_, together, _) = packing.set.sizes();
        Ok(Self {
            words: words.as_ptr(),
            scales: ScaleTable::new(matrix)?,
            packing,
            outputs: matrix.rows,
            fetching: Fetching::new(packing.row_words(), together),
            x,
            output,
            plan,
            tasks,
        })
    }

    unsafe fn task<M: Mode>(&self, task: usize) {
        let task = self.tasks[task];
        let (few_rows, ..) = self.packing.set.sizes();
        let few = task.last_pair - task.first_pair <= few_rows;
        // SAFETY: the caller's promise.
        unsafe {
            match (self.packing.set, few) {
                (Set::Vnni, true) => self.few_vnni::<M>(&task),
                (Set::Vnni, false) => self.many_vnni::<M>(&task),
                (Set::Avx2, true) => self.few_avx2::<M>(&task),
                (Set::Avx2, false) => self.many_avx2::<M>(&task),
            }
        }
    }

    /// `count` outputs of some rows of x, which lie `stride` apart at `values`.
    ///
    /// # Safety
    /// The processor has the instructions of `S`; outputs and values exist.
    #[inline(always)]
    pub(super) unsafe fn write<S: Simd>(
        &self,
        task: &Task,
        (first, count): (usize, usize),
        (values, stride): (*mut f32, usize),
    ) {
        for (index, pair) in self.plan.pairs[task.first_pair..task.last_pair].iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe {
                let values = std::slice::from_raw_parts_mut(values.add(index * stride), count);
                self.output.write::<S>(*pair, task.expert, first, values);
            }
        }
    }

    /// `R` rows of x, from `first` among the plan's pairs on.
    ///
    /// # Safety
    /// They exist.
    #[inline(always)]
    pub(super) unsafe fn x_rows<M: Mode, const R: usize>(&self, first: usize) -> [Row; R] {
        let mut rows = [Row { values: std::ptr::null(), group: 0 }; R];
        for (r, place) in rows.iter_mut().enumerate() {
            let row = self.plan.pairs[first + r].x as usize;
            // SAFETY: the caller's promise.
            place.values = unsafe { self.x.values.add(4 * row * self.packing.rounded_words::<M>()) };
            place.group = row * self.scales.groups;
        }
        rows
    }

    /// Rows of weights from output `first` on, counted through all stacked matrices; rows past the last repeat it.
    #[inline(always)]
    pub(super) fn rows<const COUNT: usize>(&self, task: &Task, first: usize) -> [usize; COUNT] {
        let mut rows = [0; COUNT];
        for (lane, row) in rows.iter_mut().enumerate() {
            *row = task.expert * self.outputs + (first + lane).min(task.last - 1);
        }
        rows
    }

    /// The weights that follow those of a panel: its next segment, or the next panel's first.
    #[inline(always)]
    pub(super) fn coming(
        &self,
        task: &Task,
        (first, panel): (usize, usize),
        (start, segment): (usize, usize),
    ) -> Coming {
        let Packing { inputs, bits, .. } = self.packing;
        let row_words = self.packing.row_words();
        let (row, next) =
            if start + segment < inputs { (first, start + segment) } else { (first + panel, 0) };
        let row: *const u8 = self.words.wrapping_add((task.expert * self.outputs + row) * row_words).cast();
        Coming {
            from: row.wrapping_add(next * bits / 8),
            row_bytes: row_words * 4,
            lines: (segment.min(inputs - next) * bits / 8).div_ceil(64),
            done: 0,
        }
    }
}

/// What a row of x is to a task: its rounded activations, and the place of its first group's scale and sum.
#[derive(Clone, Copy)]
pub(super) struct Row {
    pub(super) values: *const u8,
    pub(super) group: usize,
}
