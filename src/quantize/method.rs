//! What the calibrated methods ([`awq`](super::awq), [`gptq`](super::gptq), [`dwq`](super::dwq),
//! [`dynamic_quant`](super::dynamic_quant)) share: their data, their errors, and how a reworked model is written.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::convert::ConvertError;
use super::numbers::FloatType;
use super::pack::quantize;
use super::source::SourceModel;
use crate::checkpoint::atomic_file::AtomicFileError;
use crate::checkpoint::tensor::TensorData;
use crate::checkpoint::{ElementType, QuantParams, Taken, Tensor, WeightTensors};
use crate::mlx::cpu::{Pool, PoolError};
use crate::mlx::{self, Array, random};
use crate::models::Model;
use crate::models::loader::LoadError;
use crate::models::pieces::Pieces;
use crate::tokenizer::{Tokenizer, TokenizerError};

/// Why a method failed.
#[derive(Debug, thiserror::Error)]
pub enum MethodError {
    /// The model.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A weight.
    #[error(transparent)]
    Weight(#[from] ConvertError),
    /// MLX failed.
    #[error(transparent)]
    Mlx(#[from] mlx::Error),
    /// The tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The threads.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// A file of results.
    #[error(transparent)]
    File(#[from] AtomicFileError),
    /// A model whose layers are not known one by one.
    #[error("the layers of this model cannot be run one by one, which the method needs")]
    NoPieces,
    /// A quantized source.
    #[error("the model is quantized already; the method starts from unquantized weights")]
    Packed,
    /// A file of GGUF.
    #[error("the method starts from a folder of unquantized weights, not from a .gguf file")]
    Gguf,
    /// Rows that groups do not divide.
    #[error("`{module}` has rows of {columns} numbers, which groups of {group_size} do not divide")]
    Undivided {
        /// The module.
        module: String,
        /// Numbers in a row.
        columns: i32,
        /// Numbers that share a scale.
        group_size: u32,
    },
    /// Widths that the method cannot pack.
    #[error("GPTQ packs 2, 4 or 8 bits, not {0}")]
    Bits(u8),
    /// Not enough text.
    #[error("the calibration text has {tokens} tokens, and a sequence takes {length}; give a longer one")]
    TooShort {
        /// Tokens in all.
        tokens: usize,
        /// Tokens of a sequence.
        length: usize,
    },
    /// Not enough rows.
    #[error("the rows are {rows}, and a batch takes {batch}; give more rows or a smaller --batch-size")]
    TooFewRows {
        /// Rows there are.
        rows: usize,
        /// Rows of a batch.
        batch: usize,
    },
    /// The caller wanted it to stop.
    #[error("interrupted")]
    Interrupted,
}

/// Hears steps done and in all; says whether to go on.
pub type OnStep<'a> = &'a mut dyn FnMut(usize, usize) -> ControlFlow<()>;

/// Calibration sequences as mlx-lm's `quant/utils.py`, `load_data`, draws them from a text: cut into pieces of `length`
/// tokens that do not overlap, `samples` of them (`None`: all) in an order that `seed` fixes. `[samples, length]` ids.
///
/// # Errors
/// When the text is shorter than one sequence.
pub fn calibration_batch(
    text: &str,
    tokenizer: &Tokenizer,
    samples: Option<usize>,
    length: usize,
    seed: u64,
) -> Result<Array, MethodError> {
    let tokens = tokenizer.encode(text, true)?;
    let count = tokens.len() / length.max(1);
    if count == 0 {
        return Err(MethodError::TooShort { tokens: tokens.len(), length });
    }
    let (_, key) = random::split(random::RandomState::from_seed(seed)?.key())?;
    let order: Vec<u32> = random::permutation(count as i32, &key)?.to_vec()?;
    let chosen: Vec<u32> = order
        .iter()
        .take(samples.unwrap_or(count))
        .flat_map(|&piece| tokens.iter().skip(piece as usize * length).take(length).copied())
        .collect();
    Ok(Array::from_slice(&chosen, &[(chosen.len() / length) as i32, length as i32])?)
}

/// What a method changes of a model.
#[derive(Debug, Default)]
pub struct Reworked {
    /// Weights by the path of their module.
    pub(super) weights: BTreeMap<String, WeightTensors>,
    /// Other tensors by name.
    pub(super) plain: BTreeMap<String, Tensor>,
    /// `quantization` of config.json.
    pub(super) quantization: Map<String, Value>,
}

impl SourceModel {
    /// The model with what a method made of it.
    #[must_use]
    pub fn reworked(mut self, mut reworked: Reworked) -> Self {
        for taken in &mut self.tensors {
            match taken {
                Taken::Weight { path, tensors } => {
                    if let Some(new) = reworked.weights.remove(path) {
                        *tensors = new;
                    }
                }
                Taken::Plain { name, tensor } => {
                    if let Some(new) = reworked.plain.remove(name) {
                        *tensor = new;
                    }
                }
            }
        }
        self.config.remove("quantization_config");
        self.config.insert("quantization".to_owned(), Value::Object(reworked.quantization));
        self
    }

    /// Whether norms are stored without the one that the family adds to them.
    pub(super) fn is_gemma(&self) -> bool {
        self.config.get("model_type").and_then(Value::as_str).is_some_and(|name| name.starts_with("gemma"))
    }

    /// The model's layers, with unquantized weights.
    pub(super) fn plain_pieces(&self) -> Result<(Box<dyn Model>, Pieces), MethodError> {
        if self.is_gguf() {
            return Err(MethodError::Gguf);
        }
        let packed =
            |taken: &Taken| matches!(taken, Taken::Weight { tensors: WeightTensors::Quantized { .. }, .. });
        if self.tensors.iter().any(packed) {
            return Err(MethodError::Packed);
        }
        let model = self.load()?;
        let pieces = model.pieces().ok_or(MethodError::NoPieces)?;
        Ok((model, pieces))
    }
}

/// `mx.dequantize(mx.quantize(weight))`.
pub(super) fn rounded(weight: &Array, params: QuantParams) -> mlx::Result<Array> {
    let (packed, scales, biases) = mlx::quantize(weight, params)?;
    mlx::dequantize(&packed, &scales, biases.as_ref(), params)
}

/// An error unless groups divide the rows of `weight`.
pub(super) fn check_divided(module: &str, weight: &Array, params: QuantParams) -> Result<(), MethodError> {
    let columns = weight.dim(-1);
    match params.groups(usize::try_from(columns).unwrap_or(0)) {
        Some(_) => Ok(()),
        None => {
            Err(MethodError::Undivided { module: module.to_owned(), columns, group_size: params.group_size })
        }
    }
}

/// A weight packed as `mx.quantize` packs it.
pub(super) fn packed(weight: &Array, params: QuantParams, pool: &Pool) -> Result<WeightTensors, MethodError> {
    let plain = weight.to_tensor()?;
    let Some(kind) = FloatType::of(plain.dtype) else { return Err(MethodError::Packed) };
    let packed = quantize(plain.bytes(), kind, params, pool)?;
    let columns = plain.shape.last().copied().unwrap_or(0);
    let part = |bytes: Vec<u8>, dtype, columns: Option<usize>| {
        let mut shape = plain.shape.clone();
        if let Some(last) = shape.last_mut() {
            *last = columns.unwrap_or(0);
        }
        Tensor { dtype, shape, data: TensorData::Owned(Arc::new(bytes)) }
    };
    let affine = params.mode.has_biases();
    let scale = if affine { plain.dtype } else { ElementType::U8 };
    let groups = params.groups(columns);
    Ok(WeightTensors::Quantized {
        weight: part(packed.weight, ElementType::U32, params.packed_columns(columns)),
        scales: part(packed.scales, scale, groups),
        biases: affine.then(|| part(packed.biases, scale, groups)),
        params,
    })
}
