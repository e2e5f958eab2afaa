//! From stored tensors to layers: shapes checked, every tensor accounted for.

use serde::de::{Deserialize, DeserializeOwned, Deserializer, Error as _};

use super::ConfigError;
use super::layers::{Embedding, Linear, RmsNorm, Weight};
use crate::checkpoint::{AuditError, CheckpointError, Config, Taken, Tensor, TensorSource, WeightTensors};
use crate::lora::{AdapterError, Adapters};
use crate::mlx::{self, Array, Dtype, cpu_ops};

/// Layers a config may name; more is a broken file, not a model.
const MAX_LAYERS: usize = 4096;

/// Reads `num_hidden_layers`, for serde.
pub fn layer_count<'de, D: Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
    let count = usize::deserialize(deserializer)?;
    if (1..=MAX_LAYERS).contains(&count) {
        Ok(count)
    } else {
        Err(D::Error::custom(format!("must be in [1, {MAX_LAYERS}], but is {count}")))
    }
}

/// Which norm a family uses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NormKind {
    /// `weight * x / rms(x)`.
    Rms {
        /// Added to the mean square.
        eps: f32,
    },
    /// `(1 + weight) * x / rms(x)`.
    GemmaRms {
        /// Added to the mean square.
        eps: f32,
    },
}

/// Why a family cannot be built from a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// No file of ours for this `model_type`.
    #[error("model type `{family}` is not supported (supported: {supported})")]
    UnknownFamily {
        /// What the config says.
        family: String,
        /// What there is.
        supported: String,
    },
    /// A config value that the family cannot use.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A file, a tensor or a field.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// MLX failed.
    #[error(transparent)]
    Mlx(#[from] mlx::Error),
    /// The adapter.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
}

impl From<AuditError> for LoadError {
    fn from(error: AuditError) -> Self {
        Self::Checkpoint(error.into())
    }
}

/// Hands a checkpoint's tensors to a family.
pub struct Loader<'a> {
    config: &'a Config,
    tensors: TensorSource,
    compute_dtype: Option<Dtype>,
    adapters: Adapters,
    /// Whether arrays hold nothing.
    hollow: bool,
}

impl<'a> Loader<'a> {
    /// `compute_dtype` casts every floating-point tensor; `None` keeps the checkpoint's types.
    pub fn new(config: &'a Config, tensors: TensorSource, compute_dtype: Option<Dtype>) -> Self {
        Self { config, tensors, compute_dtype, adapters: Adapters::default(), hollow: false }
    }

    /// Gives layers zeros that are never computed instead of the weights: for those who only ask what is taken.
    pub fn without_weights(self) -> Self {
        Self { hollow: true, ..self }
    }

    /// What adapters may be put on: the linear layers and embeddings that were taken.
    pub fn adapters(&self) -> Adapters {
        self.adapters.clone()
    }

    /// The family's arguments from the effective config.
    pub fn args<T: DeserializeOwned>(&self) -> Result<T, LoadError> {
        Ok(self.config.parse_text()?)
    }

    /// Leaves tensors aside that the family knows and does not use.
    pub fn ignore(&mut self, unused: impl Fn(&str) -> bool) {
        self.tensors.retain(|name| !unused(name));
    }

    /// Whether the checkpoint has a tensor.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains(name)
    }

    /// The tensors that the family took, in the order in which it took them.
    pub fn taken(&mut self) -> Vec<Taken> {
        self.tensors.taken()
    }

    /// Ends loading: nothing may be left over.
    pub fn finish(self, family: &str) -> Result<(), LoadError> {
        Ok(self.tensors.finish(family)?)
    }

    /// A linear layer `[input] -> [output]`, quantized if the checkpoint's is.
    pub fn linear(&mut self, path: &str, input: i32, output: i32, bias: bool) -> Result<Linear, LoadError> {
        let weight = self.weight(path, output, input)?;
        let bias = if bias { Some(self.floating(&format!("{path}.bias"), &[output])?) } else { None };
        Ok(Linear::new(weight, bias).with_adapters(self.adapters.module(path, input, output)))
    }

    /// An embedding of `count` vectors, quantized if the checkpoint's is.
    pub fn embedding(&mut self, path: &str, count: i32, dims: i32) -> Result<Embedding, LoadError> {
        let weight = self.weight(path, count, dims)?;
        let adapters = self.adapters.embedding(path, count, dims);
        Ok(Embedding::new(weight).with_dtype(self.compute_dtype).with_adapters(adapters))
    }

    /// A norm over `dims` features.
    pub fn norm(&mut self, path: &str, dims: i32, kind: NormKind) -> Result<RmsNorm, LoadError> {
        let weight = self.floating(&format!("{path}.weight"), &[dims])?;
        Ok(match kind {
            NormKind::Rms { eps } => RmsNorm::new(weight, eps),
            NormKind::GemmaRms { eps } => RmsNorm::gemma(weight, eps)?,
        })
    }

    fn weight(&mut self, path: &str, output: i32, input: i32) -> Result<Weight, LoadError> {
        match self.tensors.take_weight(path, &sizes(&[output, input])?)? {
            WeightTensors::Dense(weight) => Ok(Weight::dense(self.cast(&weight)?)?),
            WeightTensors::Quantized { weight, scales, biases, params } => {
                let (scales, biases) = if cpu_ops::enabled() {
                    // Our kernels read them in any type; a cast would take twice the memory and bandwidth.
                    (self.array(&scales)?, biases.map(|biases| self.array(&biases)).transpose()?)
                } else {
                    (self.cast(&scales)?, biases.map(|biases| self.cast(&biases)).transpose()?)
                };
                Ok(Weight::quantized(self.array(&weight)?, scales, biases, params, input))
            }
        }
    }

    fn floating(&mut self, name: &str, shape: &[i32]) -> Result<Array, LoadError> {
        let tensor = self.tensors.take(name, &sizes(shape)?)?;
        self.cast(&tensor)
    }

    fn array(&self, tensor: &Tensor) -> Result<Array, LoadError> {
        if !self.hollow {
            return Ok(Array::from_tensor(tensor)?);
        }
        // The shape was asked for as `i32`s.
        let shape: Vec<i32> =
            tensor.shape.iter().map(|&size| i32::try_from(size).unwrap_or(i32::MAX)).collect();
        Ok(Array::zeros(&shape, Dtype::from(tensor.dtype))?)
    }

    fn cast(&self, tensor: &Tensor) -> Result<Array, LoadError> {
        let array = self.array(tensor)?;
        match self.compute_dtype {
            Some(dtype) if array.dtype().is_floating() && array.dtype() != dtype => Ok(array.astype(dtype)?),
            _ => Ok(array),
        }
    }
}

fn sizes(shape: &[i32]) -> Result<Vec<usize>, ConfigError> {
    let size = |&dim: &i32| usize::try_from(dim).ok().filter(|&dim| dim > 0);
    let wrong = || ConfigError::new("hidden_size", format!("and its like give a tensor of shape {shape:?}"));
    shape.iter().map(size).collect::<Option<_>>().ok_or_else(wrong)
}
