//! The tasks of the integer matmul: few rows of x meet weights as they come, many meet panels of unpacked ones.
#![allow(unsafe_op_in_unsafe_fn, reason = "intrinsics throughout; callers hold AVX-512 with VNNI")]

use super::super::super::super::Pool;
use super::super::super::floats::Floats;
use super::super::matrix::{Matrix, Storage};
use super::super::output::Output;
use super::super::prepare::Scratch;
use super::super::schedule::{Plan, Task};
use super::super::simd::Avx512;
use super::super::{Matmul, MatmulError};
use super::few::{FEW, FEW_ROWS, Fetching};
use super::operand::Mode;
use super::rounding::{Activations, Packing, Rounded};
use super::scales::ScaleTable;
use super::tile::{PANEL, TILE_ROWS};

/// Rows of x that stay in cache while weights pass by.
pub(in super::super) const BLOCK_ROWS: usize = 288;

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

/// What the outputs of a task of so many rows come in multiples of.
pub(in super::super) fn unit(rows: usize) -> usize {
    if rows <= FEW_ROWS { FEW } else { PANEL }
}

/// Computes the product with integer products; an error if the weights have no integer kernels.
///
/// # Safety
/// The processor has AVX-512 with VNNI; `plan` and `output` were made for these operands.
pub(in super::super) unsafe fn run<M: Mode>(
    matmul: &Matmul<'_>,
    pool: &Pool,
    x: Floats<'_>,
    output: &Output<'_>,
    plan: &Plan,
) -> Result<(), MatmulError> {
    let matrix = &matmul.weights;
    let packing = packing(matrix)?;
    let mut x = Activations::round::<M>(pool, x, packing)?;
    let tasks = plan.tasks(matrix.rows, matrix.columns, pool.threads(), BLOCK_ROWS, unit(plan.pairs.len()));
    let kernel = Integer::new(matrix, x.view(), output, plan, &tasks)?;
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
    x: Rounded,
    output: &Output<'_>,
    plan: &Plan,
    task: Task,
) -> Result<(), MatmulError> {
    let tasks = [task];
    Integer::new(matrix, x, output, plan, &tasks)?.task::<M>(0);
    Ok(())
}

fn packing(matrix: &Matrix<'_>) -> Result<Packing, MatmulError> {
    let Some(quantization) = matrix.quantization() else { return Err(MatmulError::ScaleType) };
    let (bits, group) = (usize::from(quantization.bits), quantization.group_size as usize);
    Ok(Packing { inputs: matrix.columns, group, bits })
}

impl<'a> Integer<'a> {
    fn new(
        matrix: &Matrix<'_>,
        x: Rounded,
        output: &'a Output<'a>,
        plan: &'a Plan,
        tasks: &'a [Task],
    ) -> Result<Self, MatmulError> {
        let Storage::Packed { words, .. } = matrix.storage else { return Err(MatmulError::ScaleType) };
        let packing = packing(matrix)?;
        Ok(Self {
            words: words.as_ptr(),
            scales: ScaleTable::new(matrix)?,
            packing,
            outputs: matrix.rows,
            fetching: Fetching::new(packing.inputs * packing.bits / 8),
            x,
            output,
            plan,
            tasks,
        })
    }

    unsafe fn task<M: Mode>(&self, task: usize) {
        let task = self.tasks[task];
        if task.last_pair - task.first_pair <= FEW_ROWS {
            self.few::<M>(&task);
        } else if self.packing.bits == 4 {
            self.panels::<M, 2>(&task);
        } else {
            self.panels::<M, 1>(&task);
        }
    }

    /// Words of a row of weights.
    #[inline(always)]
    pub(super) fn row_words(&self) -> usize {
        self.packing.inputs * self.packing.bits / 32
    }

    /// `count` outputs of some rows of x, which lie `stride` apart at `values`.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")]
    pub(super) unsafe fn write(
        &self,
        task: &Task,
        (first, count): (usize, usize),
        (values, stride): (*mut f32, usize),
    ) {
        for (index, pair) in self.plan.pairs[task.first_pair..task.last_pair].iter().enumerate() {
            let values = std::slice::from_raw_parts_mut(values.add(index * stride), count);
            self.output.write::<Avx512>(*pair, task.expert, first, values);
        }
    }

    /// Sixteen rows of weights from output `first` on, counted through all stacked matrices; rows past the last repeat
    /// it.
    #[inline(always)]
    pub(super) fn sixteen(&self, task: &Task, first: usize) -> [usize; 16] {
        std::array::from_fn(|lane| task.expert * self.outputs + (first + lane).min(task.last - 1))
    }
}

/// Memory for a task.
pub(super) fn scratch(sizes: &[usize]) -> Scratch {
    Scratch::take(sizes.iter().sum())
}

const _: () = assert!(FEW_ROWS < TILE_ROWS);
