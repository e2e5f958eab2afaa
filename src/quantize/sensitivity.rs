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
use super::source::{SourceModel, block_index};
use super::step::Dense;
use super::sweep_results::SweepResults;
use super::unpack::fake_quantize;
use crate::checkpoint::atomic_file::AtomicFileError;
use crate::checkpoint::tensor::TensorData;
use crate::checkpoint::{QuantMode, QuantParams, Taken, Tensor, WeightTensors};
use crate::mlx::cpu::Pool;
use crate::mlx::{self, Array, Dtype, eval};
use crate::models::layers::Weight;
use crate::models::loader::LoadError;
use crate::models::pieces::Pieces;
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
    let mut prober = None;
    let mut sensitivities = Vec::new();
    for (done, (path, weight)) in probed.iter().enumerate() {
        if on_progress(done, probed.len()).is_break() {
            return Err(SweepError::Interrupted);
        }
        let shape = weight.shape();
        if results.get(path).is_none() {
            let prober = match &prober {
                Some(prober) => prober,
                None => prober.insert(Prober::new(source, &batch)?),
            };
            let mut divergences = BTreeMap::new();
            for &bits in &options.candidates {
                let params = QuantParams { bits, group_size: options.group_size, mode: QuantMode::Affine };
                let kind = weight.kind();
                let numbers = fake_quantize(&weight.numbers(path, kind)?, kind, &shape, params, &pool)?;
                let data = TensorData::Owned(Arc::new(numbers));
                let rounded = Tensor { dtype: kind.element(), shape: shape.clone(), data };
                divergences.insert(bits, prober.divergence(path, Array::from_tensor(&rounded)?)?);
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

/// The untouched model on the sequences. Layers before the one that is probed are not computed again.
struct Prober {
    pieces: Pieces,
    /// What each layer takes.
    hidden: Vec<Array>,
    /// Log-probabilities and probabilities of the predictions.
    reference: (Array, Array),
}

impl Prober {
    fn new(source: &SourceModel, batch: &Array) -> Result<Self, SweepError> {
        let pieces = source.load()?.pieces().ok_or(SweepError::NoModules)?;
        let mut h = pieces.embed(batch)?;
        let mut hidden = Vec::new();
        for (index, block) in pieces.blocks.iter().enumerate() {
            let next = block.forward(&h, &pieces.mask(index, &h)?)?;
            eval([&h, &next])?;
            hidden.push(std::mem::replace(&mut h, next));
        }
        let logits = pieces.logits(&h)?.astype(Dtype::Float32)?;
        let log = logits.subtract(&logits.logsumexp(-1, true)?)?;
        let reference = (log.clone(), log.exp()?);
        eval([&reference.0, &reference.1])?;
        Ok(Self { pieces, hidden, reference })
    }

    /// Mean KL divergence of the predictions with this weight in one module from those without.
    fn divergence(&self, path: &str, weight: Array) -> mlx::Result<f64> {
        let changed = block_index(path).unwrap_or(0);
        let mut h = match self.hidden.get(changed) {
            Some(h) => h.clone(),
            None => return Ok(0.0),
        };
        let mut weight = Some(Weight::dense(weight)?);
        for (index, block) in self.pieces.blocks.iter().enumerate().skip(changed) {
            let mut block = block.clone();
            if let Some(weight) = weight.take() {
                for (name, linear) in block.linears() {
                    if path.ends_with(name) {
                        *linear = linear.clone().with_weight(weight.clone());
                    }
                }
            }
            h = block.forward(&h, &self.pieces.mask(index, &h)?)?;
        }
        let logits = self.pieces.logits(&h)?.astype(Dtype::Float32)?;
        let log = logits.subtract(&logits.logsumexp(-1, true)?)?;
        let (reference, probabilities) = &self.reference;
        mean(&probabilities.multiply(&reference.subtract(&log)?)?.sum(-1, false)?)
    }
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

pub(super) fn mean_divergence(reference: &Array, logits: &Array) -> mlx::Result<f64> {
    mean(&divergence(reference, logits)?)
}

fn mean(values: &Array) -> mlx::Result<f64> {
    let values = values.to_f32_vec()?;
    Ok(values.iter().map(|value| f64::from(*value)).sum::<f64>() / values.len().max(1) as f64)
}
