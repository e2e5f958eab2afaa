//! Turns stored tensors into those MLX loads, in parallel over runs of rows.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::affine;
use super::blocks::dequantize;
use super::ggml_type::GgmlType;
use super::header::TensorInfo;
use super::permute::RowOrder;
use crate::checkpoint::mapping::MappedFile;
use crate::checkpoint::tensor::{ElementType, Tensor, TensorData};

/// Stored bytes that one thread takes at a time.
const RUN_BYTES: usize = 1 << 20;

/// What to make of a stored tensor.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// The stored tensor.
    pub info: TensorInfo,
    /// The order of its rows.
    pub order: RowOrder,
    /// Keep it quantized if the affine layout can hold it.
    pub affine: bool,
    /// Subtract one from each element (the result is single precision).
    pub minus_one: bool,
}

/// A converted tensor.
#[derive(Debug)]
pub enum Converted {
    /// Plain numbers.
    Dense(Tensor),
    /// Packed integers with their scales and biases.
    Affine {
        /// Bits an integer takes.
        bits: usize,
        /// `[rows, columns * bits / 32]`, `U32`.
        weight: Tensor,
        /// `[rows, columns / 32]`, `F16`.
        scales: Tensor,
        /// As `scales`.
        biases: Tensor,
    },
}

/// Converts tensors of `file`, in the order of `recipes`. What needs no change stays mapped.
pub fn convert(file: &MappedFile, recipes: &[Recipe]) -> Vec<Converted> {
    let mut outputs: Vec<Output> = recipes.iter().map(Output::prepare).collect();
    fill(file, recipes, &mut outputs);

    // A block whose bias overflows half precision is rare enough to start that tensor over.
    let mut again: Vec<usize> = Vec::new();
    for (index, output) in outputs.iter_mut().enumerate() {
        if let Output::Affine { inexact, .. } = output
            && *inexact.get_mut()
        {
            again.push(index);
        }
    }
    if !again.is_empty() {
        let dense: Vec<Recipe> =
            again.iter().map(|&index| Recipe { affine: false, ..recipes[index].clone() }).collect();
        let mut replacements: Vec<Output> = dense.iter().map(Output::prepare).collect();
        fill(file, &dense, &mut replacements);
        for (index, replacement) in again.into_iter().zip(replacements) {
            outputs[index] = replacement;
        }
    }
    recipes.iter().zip(outputs).map(|(recipe, output)| output.finish(file, &recipe.info)).collect()
}

/// Buffers that a conversion fills.
enum Output {
    Mapped(ElementType),
    Dense { dtype: ElementType, bytes: Vec<u8> },
    Affine { bits: usize, weight: Vec<u8>, scales: Vec<u8>, biases: Vec<u8>, inexact: AtomicBool },
}

impl Output {
    fn prepare(recipe: &Recipe) -> Self {
        let info = &recipe.info;
        let elements: usize = info.shape.iter().product();
        if recipe.affine
            && let Some(bits) = affine::bits(info.kind)
        {
            let (weight, scales) = (elements / 8 * bits, elements / affine::GROUP * 2);
            let inexact = AtomicBool::new(false);
            return Self::Affine {
                bits,
                weight: vec![0; weight],
                scales: vec![0; scales],
                biases: vec![0; scales],
                inexact,
            };
        }
        match native(info.kind).filter(|_| !recipe.minus_one) {
            Some(dtype)
                if recipe.order == RowOrder::Stored && info.range.start.is_multiple_of(dtype.size()) =>
            {
                Self::Mapped(dtype)
            }
            Some(dtype) => Self::Dense { dtype, bytes: vec![0; elements * dtype.size()] },
            None => Self::Dense { dtype: ElementType::F32, bytes: vec![0; elements * 4] },
        }
    }

    fn finish(self, file: &MappedFile, info: &TensorInfo) -> Converted {
        let owned = |dtype, shape, bytes| Tensor { dtype, shape, data: TensorData::Owned(Arc::new(bytes)) };
        match self {
            Self::Mapped(dtype) => {
                let data = TensorData::Mapped { file: Arc::clone(file), range: info.range.clone() };
                Converted::Dense(Tensor { dtype, shape: info.shape.clone(), data })
            }
            Self::Dense { dtype, bytes } => Converted::Dense(owned(dtype, info.shape.clone(), bytes)),
            Self::Affine { bits, weight, scales, biases, .. } => {
                let with_columns = |columns| {
                    let mut shape = info.shape.clone();
                    if let Some(last) = shape.last_mut() {
                        *last = columns;
                    }
                    shape
                };
                let groups = with_columns(info.columns() / affine::GROUP);
                Converted::Affine {
                    bits,
                    weight: owned(ElementType::U32, with_columns(info.columns() / 32 * bits), weight),
                    scales: owned(ElementType::F16, groups.clone(), scales),
                    biases: owned(ElementType::F16, groups, biases),
                }
            }
        }
    }
}

/// The element type of a stored type that needs no conversion.
fn native(kind: GgmlType) -> Option<ElementType> {
    match kind {
        GgmlType::F32 => Some(ElementType::F32),
        GgmlType::F16 => Some(ElementType::F16),
        GgmlType::BF16 => Some(ElementType::BF16),
        _ => None,
    }
}

/// A run of rows: what one thread converts at a time.
struct Run<'a> {
    recipe: &'a Recipe,
    source: &'a [u8],
    row_bytes: usize,
    first: usize,
    rows: usize,
    target: Target<'a>,
}

enum Target<'a> {
    Dense { bytes: &'a mut [u8], copy: bool },
    Affine { target: affine::Target<'a>, inexact: &'a AtomicBool },
}

fn fill(file: &[u8], recipes: &[Recipe], outputs: &mut [Output]) {
    let mut runs = Vec::new();
    for (recipe, output) in recipes.iter().zip(outputs) {
        split(file, recipe, output, &mut runs);
    }
    let stored: usize = runs.iter().map(|run| run.rows * run.row_bytes).sum();
    if stored < 2 * RUN_BYTES {
        return runs.into_iter().for_each(Run::convert);
    }
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let queue = Mutex::new(runs.into_iter());
    let take = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        while let Some(run) = take() {
            run.convert();
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            // Where the system has no more threads, fewer do the work.
            let _ = std::thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
}

/// Cuts a tensor's conversion into runs.
fn split<'a>(file: &'a [u8], recipe: &'a Recipe, output: &'a mut Output, runs: &mut Vec<Run<'a>>) {
    let info = &recipe.info;
    let source = &file[info.range.clone()];
    // A permuted bias is a column: each of its elements is a row.
    let columns = match (recipe.order, info.shape.len()) {
        (RowOrder::Heads(_), 1) => 1,
        _ => info.columns(),
    };
    let row_bytes = columns / info.kind.block_elements() * info.kind.block_bytes();
    let run_rows = (RUN_BYTES / row_bytes).max(1);
    let rows = source.len() / row_bytes;
    let firsts = (0..rows).step_by(run_rows);
    let mut push = |first: usize, target| {
        let rows = run_rows.min(rows - first);
        runs.push(Run { recipe, source, row_bytes, first, rows, target });
    };
    match output {
        Output::Mapped(_) => {}
        Output::Dense { dtype, bytes } => {
            let copy = native(info.kind) == Some(*dtype) && !recipe.minus_one;
            for (first, bytes) in firsts.zip(bytes.chunks_mut(run_rows * columns * dtype.size())) {
                push(first, Target::Dense { bytes, copy });
            }
        }
        Output::Affine { bits, weight, scales, biases, inexact } => {
            let group_bytes = columns / affine::GROUP * 2;
            let chunks = weight
                .chunks_mut(run_rows * columns / 8 * *bits)
                .zip(scales.chunks_mut(run_rows * group_bytes))
                .zip(biases.chunks_mut(run_rows * group_bytes));
            for (first, ((weight, scales), biases)) in firsts.zip(chunks) {
                push(first, Target::Affine { target: affine::Target { weight, scales, biases }, inexact });
            }
        }
    }
}

impl Run<'_> {
    fn convert(self) {
        let Self { recipe, source, row_bytes, first, rows, target } = self;
        let kind = recipe.info.kind;
        // Rows in stored order are one stretch; permuted ones are gathered first.
        let mut gathered = Vec::new();
        let stored = match recipe.order {
            RowOrder::Stored => &source[first * row_bytes..(first + rows) * row_bytes],
            order => {
                gathered.reserve_exact(rows * row_bytes);
                for row in first..first + rows {
                    let start = order.stored_row(row) * row_bytes;
                    gathered.extend_from_slice(&source[start..start + row_bytes]);
                }
                &gathered
            }
        };
        match target {
            Target::Dense { bytes, copy: true } => bytes.copy_from_slice(stored),
            Target::Dense { bytes, copy: false } => {
                dequantize(kind, stored, bytes);
                if recipe.minus_one {
                    for value in bytes.as_chunks_mut::<4>().0 {
                        *value = (f32::from_le_bytes(*value) - 1.0).to_le_bytes();
                    }
                }
            }
            Target::Affine { target, inexact } => {
                if !affine::repack(kind, stored, target) {
                    inexact.store(true, Ordering::Relaxed);
                }
            }
        }
    }
}
