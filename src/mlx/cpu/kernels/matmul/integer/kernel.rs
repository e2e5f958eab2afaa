//! The two steps of the integer matmul: activations are rounded, then tasks multiply.
#![allow(unsafe_op_in_unsafe_fn, reason = "intrinsics throughout; callers hold AVX-512 with VNNI")]

use std::arch::x86_64::*;

use super::super::super::super::Pool;
use super::super::super::floats::Floats;
use super::super::matrix::{Scales, Storage};
use super::super::output::Output;
use super::super::prepare::{Aligned, Scratch, widen};
use super::super::schedule::{Plan, Task};
use super::super::simd::{Avx512, Simd};
use super::super::{Matmul, MatmulError, Matrix};
use super::operand::{Mode, transpose};

/// Outputs of a panel: two vectors.
pub(in super::super) const PANEL: usize = 32;
/// Rows of x in a tile.
const TILE_ROWS: usize = 6;
/// Rows of x that stay in cache while weights pass by.
pub(in super::super) const BLOCK_ROWS: usize = 288;
/// The smallest group.
const SMALLEST_GROUP: usize = 32;

/// Rounded rows of x.
struct Activations {
    values: Aligned,
    scales: Aligned,
    sums: Aligned,
}

/// Where rounded rows of x lie.
#[derive(Clone, Copy)]
pub(in super::super) struct Rounded {
    /// `[rows, inputs]`, `4 / WIDTH` bytes each, in the order in which they meet the levels.
    pub values: *mut u8,
    /// `[rows, groups]`: the scale.
    pub scales: *mut f32,
    /// `[rows, groups]`: the scale times the sum of the rounded values.
    pub sums: *mut f32,
}

/// Rounds the rows `first..last` of x.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")]
unsafe fn round_rows<M: Mode>(
    x: *const f32,
    (inputs, group): (usize, usize),
    order: __m512i,
    (first, last): (usize, usize),
    (to, scales, sums): (*mut u8, *mut f32, *mut f32),
) {
    let bytes = 4 / M::WIDTH;
    for row in first..last {
        for index in 0..inputs / group {
            let from = x.add(row * inputs + index * group);
            let mut largest = _mm512_setzero_ps();
            let mut unordered = 0;
            for at in (0..group).step_by(16) {
                let values = _mm512_loadu_ps(from.add(at));
                unordered |= _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values);
                largest = _mm512_max_ps(largest, _mm512_abs_ps(values));
            }
            let largest = _mm512_reduce_max_ps(largest);
            let scale = if unordered == 0 { largest / M::LIMIT } else { f32::NAN };
            let inverse = _mm512_set1_ps(if largest > 0.0 { M::LIMIT / largest } else { 0.0 });
            let limit = _mm512_set1_ps(M::LIMIT);
            let mut total = _mm512_setzero_si512();
            for at in (0..group).step_by(16) {
                let scaled = _mm512_mul_ps(_mm512_loadu_ps(from.add(at)), inverse);
                let rounded = _mm512_cvtps_epi32(_mm512_min_ps(scaled, limit));
                total = _mm512_add_epi32(total, rounded);
                let position = (row * inputs + index * group + at) * bytes;
                M::store(to.add(position), _mm512_permutexvar_epi32(order, rounded));
            }
            *scales.add(row * (inputs / group) + index) = scale;
            *sums.add(row * (inputs / group) + index) = _mm512_reduce_add_epi32(total) as f32 * scale;
        }
    }
}

impl Activations {
    fn view(&mut self) -> Rounded {
        Rounded {
            values: self.values.as_mut_ptr().cast(),
            scales: self.scales.as_mut_ptr(),
            sums: self.sums.as_mut_ptr(),
        }
    }
}

struct Targets(Rounded);

// SAFETY: tasks write disjoint rows.
unsafe impl Sync for Targets {}

impl Targets {
    fn get(&self) -> Rounded {
        self.0
    }
}

/// Rounds the rows `first..last` of x, for weights of `bits` in groups.
///
/// # Safety
/// The processor has AVX-512 with VNNI; the rows lie in x and there is room for them in `to`; rows are whole groups.
pub(in super::super) unsafe fn round_range<M: Mode>(
    x: *const f32,
    (inputs, group, bits): (usize, usize, usize),
    range: (usize, usize),
    to: Rounded,
) {
    let eight = M::order(bits);
    let mut order = [0i32; 16];
    for (place, element) in order.iter_mut().enumerate() {
        *element = (place / 8 * 8) as i32 + i32::from(eight[place % 8]);
    }
    let order = std::ptr::read_unaligned(order.as_ptr().cast());
    round_rows::<M>(x, (inputs, group), order, range, (to.values, to.scales, to.sums));
}

/// # Safety
/// The processor has AVX-512 with VNNI; x has whole rows, which are whole groups.
unsafe fn round<M: Mode>(
    pool: &Pool,
    x: Floats<'_>,
    inputs: usize,
    group: usize,
    bits: usize,
) -> Result<Activations, MatmulError> {
    let rows = x.len() / inputs;
    let wide = widen::<Avx512>(pool, x, inputs, inputs, false)?;
    let mut rounded = Activations {
        values: Aligned::new(rows * inputs / M::WIDTH + 16),
        scales: Aligned::new(rows * (inputs / group)),
        sums: Aligned::new(rows * (inputs / group)),
    };
    let targets = Targets(rounded.view());
    let chunk = (16 * 1024usize).div_ceil(inputs);
    let from = Source(wide.as_ptr());
    pool.run_ranges(rows, chunk, &|range| {
        // SAFETY: the caller's promise; each range has its own rows of the targets.
        unsafe {
            round_range::<M>(from.get(), (inputs, group, bits), (range.start, range.end), targets.get());
        }
    })?;
    Ok(rounded)
}

struct Source(*const f32);

// SAFETY: only read.
unsafe impl Sync for Source {}

impl Source {
    fn get(&self) -> *const f32 {
        self.0
    }
}

#[derive(Clone, Copy)]
enum ScaleType {
    F32,
    F16,
    Bf16,
}

struct Integer<'a> {
    words: *const u32,
    scales: *const u8,
    biases: *const u8,
    scale_type: ScaleType,
    bits: usize,
    group: usize,
    inputs: usize,
    outputs: usize,
    x: Rounded,
    output: &'a Output<'a>,
    plan: &'a Plan,
    tasks: &'a [Task],
}

// SAFETY: operands are only read, and each task writes its own part of the output.
unsafe impl Sync for Integer<'_> {}

/// Computes the product with integer products; exactly nothing if the weights have no integer kernels.
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
    let (inputs, outputs) = (matrix.columns, matrix.rows);
    let Some(quantization) = matrix.quantization() else { return Err(MatmulError::ScaleType) };
    let (bits, group) = (quantization.bits as usize, quantization.group_size as usize);
    let mut x = round::<M>(pool, x, inputs, group, bits)?;
    let tasks = plan.tasks(outputs, inputs, pool.threads(), BLOCK_ROWS, PANEL);
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

impl<'a> Integer<'a> {
    fn new(
        matrix: &Matrix<'_>,
        x: Rounded,
        output: &'a Output<'a>,
        plan: &'a Plan,
        tasks: &'a [Task],
    ) -> Result<Self, MatmulError> {
        let Storage::Packed { words, scales: Scales::Affine { scales, biases }, quantization } =
            matrix.storage
        else {
            return Err(MatmulError::ScaleType);
        };
        let (scale_type, scales, biases): (_, *const u8, *const u8) = match (scales, biases) {
            (Floats::F32(s), Floats::F32(b)) => (ScaleType::F32, s.as_ptr().cast(), b.as_ptr().cast()),
            (Floats::F16(s), Floats::F16(b)) => (ScaleType::F16, s.as_ptr().cast(), b.as_ptr().cast()),
            (Floats::Bf16(s), Floats::Bf16(b)) => (ScaleType::Bf16, s.as_ptr().cast(), b.as_ptr().cast()),
            _ => return Err(MatmulError::ScaleType),
        };
        Ok(Self {
            words: words.as_ptr(),
            scales,
            biases,
            scale_type,
            bits: quantization.bits as usize,
            group: quantization.group_size as usize,
            inputs: matrix.columns,
            outputs: matrix.rows,
            x,
            output,
            plan,
            tasks,
        })
    }
}

impl Integer<'_> {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")]
    unsafe fn task<M: Mode>(&self, task: usize) {
        let task = self.tasks[task];
        let pairs = task.last_pair - task.first_pair;
        let panel_size = M::SEGMENT / M::WIDTH * PANEL;
        let scale_size = M::SEGMENT / SMALLEST_GROUP * PANEL;
        let mut scratch = Scratch::take(panel_size + 2 * scale_size + pairs * PANEL);
        let panel = scratch.as_mut_ptr();
        let scales = panel.add(panel_size);
        let biases = scales.add(scale_size);
        let values = biases.add(scale_size);
        for first in (task.first..task.last).step_by(PANEL) {
            let count = PANEL.min(task.last - first);
            for start in (0..self.inputs).step_by(M::SEGMENT) {
                let length = M::SEGMENT.min(self.inputs - start);
                for half in 0..2 {
                    // Rows past the last repeat it.
                    let base = task.expert * self.outputs;
                    let mut rows = [0; 16];
                    for (lane, row) in rows.iter_mut().enumerate() {
                        *row = base + (first + half * 16 + lane).min(task.last - 1);
                    }
                    self.spread::<M>(&rows, start, length, panel.add(half * 16).cast());
                    self.transpose_scales(self.scales, &rows, start, length, scales.add(half * 16));
                    self.transpose_scales(self.biases, &rows, start, length, biases.add(half * 16));
                }
                let step = Step { panel: panel.cast(), scales, biases, start, length };
                let mut pair = 0;
                while pair < pairs {
                    let values = values.add(pair * PANEL);
                    let at = task.first_pair + pair;
                    match pairs - pair {
                        1 => self.tile::<M, 1>(&step, at, values),
                        2 => self.tile::<M, 2>(&step, at, values),
                        3 => self.tile::<M, 3>(&step, at, values),
                        4 => self.tile::<M, 4>(&step, at, values),
                        5 => self.tile::<M, 5>(&step, at, values),
                        _ => self.tile::<M, TILE_ROWS>(&step, at, values),
                    }
                    pair += TILE_ROWS;
                }
            }
            for pair in 0..pairs {
                let values = std::slice::from_raw_parts_mut(values.add(pair * PANEL), count);
                let pair = self.plan.pairs[task.first_pair + pair];
                self.output.write::<Avx512>(pair, task.expert, first, values);
            }
        }
    }

    /// Operands of 16 rows of weights, for the columns `start` to `start + length`: `[length / WIDTH][32]` lanes of
    /// which this fills 16.
    #[inline(always)]
    unsafe fn spread<M: Mode>(&self, rows: &[usize; 16], start: usize, length: usize, to: *mut u8) {
        const STRIDE: usize = PANEL * 4;
        let a_word = 32 / self.bits;
        let row_words = self.inputs / a_word;
        let operands = a_word / M::WIDTH;
        let words = length / a_word;
        for at in (0..words).step_by(16) {
            let count = (words - at).min(16);
            let mask = if count == 16 { !0 } else { (1 << count) - 1 };
            let mut block = [_mm512_setzero_si512(); 16];
            for (words, row) in block.iter_mut().zip(rows) {
                let from = self.words.add(row * row_words + start / a_word + at);
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(16).cast());
                *words = _mm512_maskz_loadu_epi32(mask, from.cast());
            }
            let columns = transpose(block);
            for (index, column) in columns.into_iter().enumerate().take(count) {
                let to = to.add((at + index) * operands * STRIDE);
                if self.bits == 4 {
                    M::spread4(column, to, STRIDE);
                } else {
                    M::spread8(column, to, STRIDE);
                }
            }
        }
    }

    /// Scales or biases of 16 rows as f32, `[groups][32]` of which this fills 16.
    #[inline(always)]
    unsafe fn transpose_scales(
        &self,
        base: *const u8,
        rows: &[usize; 16],
        start: usize,
        length: usize,
        to: *mut f32,
    ) {
        let groups = self.inputs / self.group;
        let all = length / self.group;
        for at in (0..all).step_by(16) {
            let count = (all - at).min(16);
            let mut block = [_mm512_setzero_si512(); 16];
            for (values, row) in block.iter_mut().zip(rows) {
                let first = row * groups + start / self.group + at;
                let mut wide = [0f32; 16];
                match self.scale_type {
                    ScaleType::F32 => {
                        let from = base.cast::<f32>().add(first);
                        std::ptr::copy_nonoverlapping(from, wide.as_mut_ptr(), count);
                    }
                    ScaleType::F16 => {
                        Avx512::widen_f16(base.cast::<u16>().add(first), count, wide.as_mut_ptr());
                    }
                    ScaleType::Bf16 => {
                        Avx512::widen_bf16(base.cast::<u16>().add(first), count, wide.as_mut_ptr());
                    }
                }
                *values = _mm512_loadu_si512(wide.as_ptr().cast());
            }
            let columns = transpose(block);
            for (index, column) in columns.into_iter().enumerate().take(count) {
                _mm512_storeu_si512(to.add((at + index) * PANEL).cast(), column);
            }
        }
    }

    /// A segment of `R` rows of x times the panel, added to `values` (`[R][32]`), which the first segment sets.
    #[inline(always)]
    unsafe fn tile<M: Mode, const R: usize>(&self, step: &Step, at: usize, values: *mut f32) {
        let groups = self.inputs / self.group;
        let operands = self.group / M::WIDTH;
        let mut x = [std::ptr::null::<i32>(); R];
        let mut x_groups = [0; R];
        let mut totals = [[_mm512_setzero_ps(); 2]; R];
        for r in 0..R {
            let row = self.plan.pairs[at + r].x as usize;
            let from = start_bytes::<M>(row * self.inputs + step.start);
            x[r] = self.x.values.add(from).cast();
            x_groups[r] = row * groups + step.start / self.group;
            if step.start > 0 {
                totals[r][0] = _mm512_loadu_ps(values.add(r * PANEL));
                totals[r][1] = _mm512_loadu_ps(values.add(r * PANEL + 16));
            }
        }
        for index in 0..step.length / self.group {
            let mut sums = [[_mm512_setzero_si512(); 2]; R];
            for operand in index * operands..(index + 1) * operands {
                let from = step.panel.add(operand * PANEL);
                let first = _mm512_loadu_si512(from.cast());
                let second = _mm512_loadu_si512(from.add(16).cast());
                for r in 0..R {
                    let activations = _mm512_set1_epi32(x[r].add(operand).read_unaligned());
                    sums[r][0] = M::dot(sums[r][0], first, activations);
                    sums[r][1] = M::dot(sums[r][1], second, activations);
                }
            }
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
}

/// Bytes that the rounded activations before column `start` take.
#[inline(always)]
fn start_bytes<M: Mode>(start: usize) -> usize {
    start * 4 / M::WIDTH
}

/// Operands and scales for a segment of K and 32 outputs.
struct Step {
    panel: *const u32,
    scales: *const f32,
    biases: *const f32,
    start: usize,
    length: usize,
}
