//! DWQ (mlx-lm `quant/dwq.py`): scales and biases of a quantized model, and its norms, are trained until it predicts what
//! the unquantized one does.

use super::dynamic_quant::divergence;
use super::method::{MethodError, OnStep, Reworked, check_divided, packed};
use super::source::{SourceModel, quantization_block};
use crate::checkpoint::{QuantParams, WeightTensors};
use crate::mlx::autograd::value_and_grad;
use crate::mlx::cpu::Pool;
use crate::mlx::{self, Array, Dtype, Result};
use crate::models::layers::Weight;
use crate::models::pieces::Pieces;
use crate::perplexity::RandomState;
use crate::train::optimizers::{Adam, Kind, Optimizer, Schedule};

/// What logits are divided by before they are compared.
const TEMPERATURE: f32 = 2.0;
/// Sequences are padded to one more than a multiple of this.
const PADDING: usize = 32;
/// Widths from this on are not trained.
const WIDE: u8 = 8;

/// How to train.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DwqOptions {
    /// The student's coding, affine.
    pub params: QuantParams,
    /// Adam's.
    pub learning_rate: f32,
    /// Rows of a step.
    pub batch_size: usize,
    /// Tokens of a row, at most.
    pub max_length: usize,
    /// Decides the order of the batches.
    pub seed: u32,
    /// The type that scales and biases have in the student.
    pub dtype: Dtype,
}

/// What became of the loss on the rows that were not trained on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DwqResult {
    /// Before training.
    pub before: f64,
    /// After it; when it is larger, quality is likely lost.
    pub after: f64,
}

/// Quantizes the model and trains it once over `train` (token rows); `valid` says whether that helped.
///
/// # Errors
/// When the model cannot be run, or there are fewer rows than a batch takes.
pub fn dwq(
    source: &SourceModel,
    train: &[Vec<u32>],
    valid: &[Vec<u32>],
    options: DwqOptions,
    on_step: OnStep,
) -> std::result::Result<(Reworked, DwqResult), MethodError> {
    let (_model, teacher) = source.plain_pieces()?;
    let pool = Pool::new(mlx::cpu::pool::default_threads())?;
    let mut reworked = Reworked { quantization: quantization_block(options.params), ..Reworked::default() };
    let mut student = teacher.clone();
    let mut trained = Vec::new();
    for (path, weight) in teacher.weights() {
        let weight = weight.unpacked()?;
        check_divided(&path, &weight, options.params)?;
        let tensors = packed(&weight, options.params, &pool)?;
        if let WeightTensors::Quantized { scales, biases: Some(biases), .. } = &tensors {
            trained.push(Array::from_tensor(scales)?.astype(Dtype::Float32)?);
            trained.push(Array::from_tensor(biases)?.astype(Dtype::Float32)?);
        }
        reworked.weights.insert(path, tensors);
    }
    student.visit(&mut |path, plain| match reworked.weights.get(path) {
        Some(WeightTensors::Quantized { weight, scales, biases, params }) => {
            let input = plain.unpacked()?.dim(-1);
            let biases = biases.as_ref().map(Array::from_tensor).transpose()?;
            let (weight, scales) = (Array::from_tensor(weight)?, Array::from_tensor(scales)?);
            Ok(Weight::quantized(weight, scales, biases, *params, input))
        }
        _ => Ok(plain),
    })?;
    if options.params.bits >= WIDE {
        trained.clear();
    }
    let scales = trained.len();
    let mut norms = Vec::new();
    student.visit_norms(&mut |path, norm| {
        norms.push(path.to_owned());
        trained.push(norm.stored().astype(Dtype::Float32)?);
        Ok(norm.clone())
    })?;
    let trainer = Trainer { student, teacher, options, scales };
    let train = batches(train, &options)?;
    let valid = batches(valid, &options)?;
    let before = trainer.validate(&valid, &trained)?;
    let adam = Kind::Adam(Adam { bias_correction: true, ..Adam::default() });
    let rate = Schedule::constant(f64::from(options.learning_rate));
    let mut optimizer = Optimizer::new(adam, rate, &trained)?;
    let gradient = trainer.gradient(trained.len())?;
    for (done, batch) in train.iter().enumerate() {
        if on_step(done, train.len()).is_break() {
            return Err(MethodError::Interrupted);
        }
        let targets = trainer.teacher.forward(&batch.inputs)?;
        targets.eval()?;
        if let Some(gradient) = &gradient {
            let (_, gradients) =
                gradient.call(trained.iter().chain([&batch.inputs, &targets, &batch.lengths]))?;
            trained = optimizer.step(&trained, &gradients)?;
        }
    }
    let after = trainer.validate(&valid, &trained)?;
    let (pairs, new_norms) = trained.split_at(scales);
    for (path, weight) in norms.iter().zip(new_norms) {
        reworked.plain.insert(format!("{path}.weight"), weight.astype(options.dtype)?.to_tensor()?);
    }
    let mut pairs = pairs.chunks_exact(2);
    for (path, _) in trainer.teacher.weights() {
        let (Some(WeightTensors::Quantized { scales, biases, .. }), Some([new_scales, new_biases])) =
            (reworked.weights.get_mut(&path), pairs.next())
        else {
            continue;
        };
        *scales = new_scales.astype(options.dtype)?.to_tensor()?;
        *biases = Some(new_biases.astype(options.dtype)?.to_tensor()?);
    }
    let _ = on_step(train.len(), train.len());
    Ok((reworked, DwqResult { before, after }))
}

struct Trainer {
    student: Pieces,
    teacher: Pieces,
    options: DwqOptions,
    /// How many of what is trained are scales and biases; norms follow.
    scales: usize,
}

impl Trainer {
    /// The student with these scales, biases and norms.
    fn student(student: &Pieces, trained: &[Array], scales: usize, dtype: Dtype) -> Result<Pieces> {
        let mut network = student.clone();
        let (scales, norms) = trained.split_at(scales.min(trained.len()));
        let (mut pairs, mut norms) = (scales.chunks_exact(2), norms.iter());
        network.visit(&mut |_, weight| match pairs.next() {
            Some([scales, biases]) => Ok(weight.with_scales(scales.astype(dtype)?, biases.astype(dtype)?)),
            _ => Ok(weight),
        })?;
        network.visit_norms(&mut |_, norm| match norms.next() {
            Some(weight) => norm.with_stored(weight.astype(dtype)?),
            None => Ok(norm.clone()),
        })?;
        Ok(network)
    }
}

/// Mean divergence over the tokens of rows, and how many there are.
fn loss(logits: &Array, targets: &Array, lengths: &Array) -> Result<(Array, Array)> {
    let scale = 1.0 / TEMPERATURE;
    let losses = divergence(&logits.multiply_scalar(scale)?, &targets.multiply_scalar(scale)?)?;
    let positions = Array::arange(1.0, f64::from(targets.dim(1)) + 1.0, 1.0, Dtype::Int32)?;
    let mask = positions.less(lengths)?;
    let count = mask.astype(Dtype::Int32)?.sum_all()?;
    let sum = mask.astype(losses.dtype())?.multiply(&losses)?.sum_all()?;
    Ok((sum.divide(&count.astype(sum.dtype())?)?, count))
}

impl Trainer {
    fn gradient(&self, count: usize) -> Result<Option<mlx::autograd::ValueAndGrad>> {
        if count == 0 {
            return Ok(None);
        }
        let (student, dtype) = (self.student.clone(), self.options.dtype);
        let scales = self.scales;
        let numbers: Vec<i32> = (0..count as i32).collect();
        let function = move |arguments: &[Array]| {
            let (trained, rest) = arguments.split_at(count);
            let [inputs, targets, lengths] = rest else { return Ok(Vec::new()) };
            let student = Self::student(&student, trained, scales, dtype)?;
            let (loss, _) = loss(&student.forward(inputs)?, targets, lengths)?;
            Ok(vec![loss])
        };
        value_and_grad(function, &numbers).map(Some)
    }

    fn validate(&self, batches: &[Batch], trained: &[Array]) -> Result<f64> {
        let (mut sum, mut tokens) = (0.0, 0.0);
        for batch in batches {
            let targets = self.teacher.forward(&batch.inputs)?;
            targets.eval()?;
            let student = Self::student(&self.student, trained, self.scales, self.options.dtype)?;
            let (loss, count) = loss(&student.forward(&batch.inputs)?, &targets, &batch.lengths)?;
            let first = |array: Array| {
                Ok::<_, mlx::Error>(array.to_f32_vec()?.first().copied().map_or(0.0, f64::from))
            };
            let (loss, count) = (first(loss)?, first(count)?);
            sum += loss * count;
            tokens += count;
        }
        Ok(if tokens > 0.0 { sum / tokens } else { f64::NAN })
    }
}

/// Rows of a step.
struct Batch {
    /// `[B, L]` ids, the last of each row left out.
    inputs: Array,
    /// `[B, 1]` tokens of the rows.
    lengths: Array,
}

/// Batches of rows of about the same length, padded, in an order that the seed fixes (mlx-lm `tuner/trainer.py`,
/// `iterate_batches`).
fn batches(rows: &[Vec<u32>], options: &DwqOptions) -> std::result::Result<Vec<Batch>, MethodError> {
    let size = options.batch_size.max(1);
    if rows.len() < size {
        return Err(MethodError::TooFewRows { rows: rows.len(), batch: size });
    }
    let mut order: Vec<usize> = (0..rows.len()).collect();
    order.sort_by_key(|row| rows.get(*row).map_or(0, Vec::len));
    let groups: Vec<&[usize]> = order.chunks_exact(size).collect();
    let shuffled =
        RandomState::from_seed(options.seed).permutation(u32::try_from(groups.len()).unwrap_or(u32::MAX));
    let mut batches = Vec::new();
    for group in shuffled.into_iter().filter_map(|index| groups.get(index as usize)) {
        let rows: Vec<&Vec<u32>> = group.iter().filter_map(|row| rows.get(*row)).collect();
        let longest = rows.iter().map(|row| row.len()).max().unwrap_or(0);
        let width = (1 + longest.next_multiple_of(PADDING)).min(options.max_length);
        let mut ids = vec![0u32; rows.len() * width];
        let mut lengths = Vec::new();
        for (row, place) in rows.iter().zip(ids.chunks_exact_mut(width.max(1))) {
            let kept = row.len().min(width);
            place[..kept].copy_from_slice(&row[..kept]);
            lengths.push(row.len().min(options.max_length) as i32);
        }
        let ids = Array::from_slice(&ids, &[rows.len() as i32, width as i32])?;
        batches.push(Batch {
            inputs: ids.slice(1, 0, width as i32 - 1)?,
            lengths: Array::from_slice(&lengths, &[rows.len() as i32, 1])?,
        });
    }
    Ok(batches)
}
