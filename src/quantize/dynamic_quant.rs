//! Two widths by sensitivity (mlx-lm `quant/dynamic_quant.py`): the gradient of the divergence that rounding causes tells
//! how much each module would gain from more bits.

use std::collections::BTreeMap;

use super::convert::{Action, ConvertError, ConvertOptions, planned_size};
use super::method::{MethodError, OnStep, check_divided, rounded};
use super::numbers::FloatType;
use super::recipe::Predicate;
use super::source::SourceModel;
use crate::checkpoint::QuantParams;
use crate::mlx::autograd::value_and_grad;
use crate::mlx::{Array, Dtype, Result, eval};
use crate::models::layers::Weight;

/// Sequences that are run at a time.
const BATCH: i32 = 4;
/// Where the search for the threshold stops, as a share of all there are.
const TOLERANCE: f64 = 1e-3;

/// The two widths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DynamicOptions {
    /// Of most modules.
    pub low: QuantParams,
    /// Of sensitive ones.
    pub high: QuantParams,
}

/// How much each module would gain from the higher width, a million weights, on calibration ids `[samples, length]`.
///
/// # Errors
/// When the model cannot be run or its rows not be divided.
pub fn dynamic_sensitivities(
    source: &SourceModel,
    data: &Array,
    options: DynamicOptions,
    on_step: OnStep,
) -> std::result::Result<BTreeMap<String, f64>, MethodError> {
    let (_model, pieces) = source.plain_pieces()?;
    let mut originals = Vec::new();
    let mut low = Vec::new();
    for (path, weight) in pieces.weights() {
        let weight = weight.unpacked()?;
        check_divided(&path, &weight, options.low)?;
        check_divided(&path, &weight, options.high)?;
        low.push(rounded(&weight, options.low)?);
        originals.push((path, weight));
    }
    eval(&low)?;
    let count = low.len();
    let network = pieces.clone();
    let loss = move |arguments: &[Array]| -> Result<Vec<Array>> {
        let (weights, rest) = arguments.split_at(count);
        let mut network = network.clone();
        let mut weights = weights.iter();
        network
            .visit(&mut |_, kept| weights.next().map_or(Ok(kept), |weight| Weight::dense(weight.clone())))?;
        let [batch, targets] = rest else { return Ok(Vec::new()) };
        Ok(vec![divergence(&network.forward(batch)?, targets)?.mean_all()?])
    };
    let numbers: Vec<i32> = (0..count as i32).collect();
    let gradient = value_and_grad(loss, &numbers)?;

    let batches = (data.dim(0) + BATCH - 1) / BATCH;
    let mut sums =
        low.iter().map(|weight| Array::zeros(weight.shape(), Dtype::Float32)).collect::<Result<Vec<_>>>()?;
    for (done, start) in (0..data.dim(0)).step_by(BATCH as usize).enumerate() {
        if on_step(done, batches as usize).is_break() {
            return Err(MethodError::Interrupted);
        }
        let batch = data.slice(0, start, (start + BATCH).min(data.dim(0)))?;
        let targets = pieces.forward(&batch)?;
        targets.eval()?;
        let (_, gradients) = gradient.call(low.iter().chain([&batch, &targets]))?;
        for (sum, gradient) in sums.iter_mut().zip(&gradients) {
            *sum = sum.add(gradient)?;
        }
        eval(&sums)?;
    }
    let mut sensitivities = BTreeMap::new();
    for ((sum, low), (path, original)) in sums.iter().zip(&low).zip(&originals) {
        let gradient = sum.divide(&Array::scalar(batches as f32, Dtype::Float32)?)?;
        let change = low.subtract(&rounded(original, options.high)?)?;
        let size = (original.size() as f64 / 1e6) as f32;
        let alignment = gradient.multiply(&change)?.sum_all()?;
        let value = alignment.divide(&Array::scalar(size, alignment.dtype())?)?.to_f32_vec()?;
        sensitivities.insert(path.clone(), value.first().copied().map_or(f64::NAN, f64::from));
    }
    let _ = on_step(batches as usize, batches as usize);
    Ok(sensitivities)
}

/// `kl_div_loss` of mlx-lm's `tuner/losses.py` where there is no Metal: KL(targets || logits) at each position.
pub(super) fn divergence(logits: &Array, targets: &Array) -> Result<Array> {
    let logits = logits.subtract(&logits.logsumexp(-1, true)?)?;
    let targets = targets.subtract(&targets.logsumexp(-1, true)?)?;
    targets.exp()?.multiply(&targets.subtract(&logits)?)?.sum(-1, false)
}

/// The modules that get the higher width, so that the whole file has about `target` bits a weight: those above a
/// threshold found by bisection. `dtype` as in [`ConvertOptions`].
///
/// # Errors
/// As converting the model, as far as that shows without weights.
pub fn dynamic_allocation(
    source: &SourceModel,
    sensitivities: &BTreeMap<String, f64>,
    options: DynamicOptions,
    target: f64,
    dtype: Option<FloatType>,
) -> std::result::Result<BTreeMap<String, QuantParams>, ConvertError> {
    let above = |threshold: f64| -> BTreeMap<String, QuantParams> {
        let chosen = sensitivities.iter().filter(|(_, value)| **value > threshold);
        chosen.map(|(path, _)| (path.clone(), options.high)).collect()
    };
    let (mut least, mut most) =
        sensitivities.values().fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), value| {
            (least.min(*value), most.max(*value))
        });
    let tolerance = TOLERANCE * (most - least);
    while most - least > tolerance {
        let middle = (most + least) / 2.0;
        let predicate = Predicate::Listed(above(middle));
        let action = Action::Quantize { params: options.low, predicate, again: false };
        let (bytes, parameters) = planned_size(source, &ConvertOptions { dtype, action, kv_config: None })?;
        if bytes as f64 * 8.0 / (parameters as f64).max(1.0) > target {
            least = middle;
        } else {
            most = middle;
        }
    }
    Ok(above((most + least) / 2.0))
}
