//! How much a model's answers change when one module gets fewer bits.
//!
//! One module at a time is rounded to each candidate width while the rest of the model stays as it is; what is
//! measured is the KL divergence of the model's predictions from those of the untouched model.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::allocator::Sensitivity;
use super::convert::ConvertError;
use super::numbers::FloatType;
use super::source::SourceModel;
use super::step::Dense;
use super::sweep_results::SweepResults;
use super::unpack::fake_quantize;
use crate::checkpoint::atomic_file::AtomicFileError;
use crate::checkpoint::tensor::TensorData;
use crate::checkpoint::{QuantMode, QuantParams, Taken, Tensor, WeightTensors};
use crate::mlx::cpu::Pool;
use crate::mlx::{self, Array, Dtype};
use crate::models::Model;
use crate::models::loader::LoadError;
use crate::perplexity::divergence;

/// Names of the modules that are probed, those that adapters usually go to; all others keep the default bits.
const PROBED: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

/// Why a sweep failed.
#[derive(Debug, thiserror::Error)]
pub enum SweepError {
    /// The model.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A weight.
    #[error(transparent)]
    Weight(#[from] ConvertError),
    /// MLX failed.
    #[error(transparent)]
    Mlx(#[from] mlx::Error),
    /// The file of results.
    #[error(transparent)]
    File(#[from] AtomicFileError),
    /// Nothing to probe.
    #[error("the model has no modules that can be probed ({}), so --target-bpw cannot mix their bits", PROBED.join(", "))]
    NoModules,
    /// No cache to pack.
    #[error("no layer of the model has a key-value cache that can be packed")]
    NoCaches,
    /// A quantized source.
    #[error("the model is quantized already; --target-bpw starts from unquantized weights or a .gguf file")]
    Packed,
    /// The caller wanted it to stop.
    #[error("interrupted")]
    Interrupted,
}

/// What to probe with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SweepOptions {
    /// Widths to try, ascending.
    pub candidates: Vec<u8>,
    /// Numbers that share a scale.
    pub group_size: u32,
    /// Token sequences of one length.
    pub sequences: Vec<Vec<u32>>,
}

/// Probes every module. Results are kept in `file` as they come, and what it has of the same sweep is not computed
/// again; `model` names the weights there. `on_progress` hears modules done and in all.
///
/// # Errors
/// When the model cannot be run or the file not be written.
pub fn sweep(
    source: &SourceModel,
    options: &SweepOptions,
    file: &Path,
    model: &str,
    on_progress: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Vec<Sensitivity>, SweepError> {
    let probed = probed(source, options.group_size)?;
    let mut results = SweepResults::open(file, model, options);
    let pool = Pool::new(mlx::cpu::pool::default_threads()).map_err(ConvertError::from)?;
    let batch = batch(&options.sequences)?;
    let mut reference = None;
    let mut sensitivities = Vec::new();
    for (done, (path, weight)) in probed.iter().enumerate() {
        if on_progress(done, probed.len()).is_break() {
            return Err(SweepError::Interrupted);
        }
        let shape = weight.shape();
        if results.get(path).is_none() {
            let reference = match &reference {
                Some(reference) => reference,
                None => reference.insert(logits(&*source.load(None)?, &batch)?),
            };
            let mut divergences = BTreeMap::new();
            for &bits in &options.candidates {
                let params = QuantParams { bits, group_size: options.group_size, mode: QuantMode::Affine };
                let kind = weight.kind();
                let numbers = fake_quantize(&weight.numbers(path, kind)?, kind, &shape, params, &pool)?;
                let data = TensorData::Owned(Arc::new(numbers));
                let rounded = Tensor { dtype: kind.element(), shape: shape.clone(), data };
                let logits = logits(&*source.load(Some((path, rounded)))?, &batch)?;
                divergences.insert(bits, mean_divergence(reference, &logits)?);
            }
            results.put(path, divergences)?;
        }
        sensitivities.push(Sensitivity {
            module: (*path).to_owned(),
            divergences: results.get(path).cloned().unwrap_or_default(),
            parameters: shape.iter().map(|&size| size as u64).product(),
        });
    }
    let _ = on_progress(probed.len(), probed.len());
    Ok(sensitivities)
}

fn probed(source: &SourceModel, group_size: u32) -> Result<Vec<(&str, Dense<'_>)>, SweepError> {
    let mut probed = Vec::new();
    for taken in &source.tensors {
        let Taken::Weight { path, tensors } = taken else { continue };
        let dense = match tensors {
            WeightTensors::Dense(weight) => Dense::Stored(weight),
            WeightTensors::Quantized { .. } if !source.is_gguf() => return Err(SweepError::Packed),
            WeightTensors::Quantized { weight, scales, biases, params } => {
                let biases = biases.as_ref();
                Dense::Packed { weight, scales, biases, params: *params, via: FloatType::Float32 }
            }
        };
        let name = path.rsplit('.').next().unwrap_or(path);
        let divided = dense.shape().last().is_some_and(|columns| columns.is_multiple_of(group_size as usize));
        if PROBED.contains(&name) && divided {
            probed.push((path.as_str(), dense));
        }
    }
    if probed.is_empty() { Err(SweepError::NoModules) } else { Ok(probed) }
}

pub(super) fn batch(sequences: &[Vec<u32>]) -> mlx::Result<Array> {
    let length = sequences.first().map_or(0, Vec::len);
    Array::from_slice(&sequences.concat(), &[sequences.len() as i32, length as i32])
}

fn logits(model: &dyn Model, batch: &Array) -> mlx::Result<Array> {
    let logits = model.forward(batch, None)?.astype(Dtype::Float32)?;
    logits.eval()?;
    Ok(logits)
}

pub(super) fn mean_divergence(reference: &Array, logits: &Array) -> mlx::Result<f64> {
    let values = divergence(reference, logits)?.to_f32_vec()?;
    Ok(values.iter().map(|value| f64::from(*value)).sum::<f64>() / values.len().max(1) as f64)
}
