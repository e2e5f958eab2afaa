//! From stored tensors to layers: shapes checked, every tensor accounted for.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::ConfigError;
use super::layers::{Embedding, Linear, RmsNorm, Weight};
use crate::checkpoint::tensor::Tensor;
use crate::mlx::{self, Array, Dtype, Quantization};

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
    /// A config value.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// MLX failed.
    #[error(transparent)]
    Mlx(#[from] mlx::Error),
    /// A tensor.
    #[error("{0}")]
    Tensor(String),
}

/// Hands a checkpoint's tensors to a family.
pub struct Loader {
    config: Value,
    tensors: BTreeMap<String, Tensor>,
    compute_dtype: Option<Dtype>,
}

impl Loader {
    /// The family's arguments from the effective config.
    pub fn args<T: DeserializeOwned>(&self) -> Result<T, LoadError> {
        serde_json::from_value(self.config.clone()).map_err(|e| LoadError::Tensor(e.to_string()))
    }

    /// Leaves tensors aside that the family knows and does not use.
    pub fn ignore(&mut self, unused: impl Fn(&str) -> bool) {
        self.tensors.retain(|name, _| !unused(name));
    }

    /// Whether the checkpoint has a tensor.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    fn take(&mut self, name: &str) -> Result<Tensor, LoadError> {
        self.tensors.remove(name).ok_or_else(|| LoadError::Tensor(format!("tensor `{name}` is missing")))
    }

    /// A floating-point tensor of a shape, in the compute type.
    fn floating(&mut self, name: &str, shape: &[i32]) -> Result<Array, LoadError> {
        let array = Array::from_tensor(&self.take(name)?)?;
        if array.shape() != shape {
            return Err(LoadError::Tensor(format!(
                "tensor `{name}` has shape {:?}, expected {shape:?}",
                array.shape()
            )));
        }
        match self.compute_dtype {
            Some(dtype) if array.dtype().is_floating() && array.dtype() != dtype => Ok(array.astype(dtype)?),
            _ => Ok(array),
        }
    }

    fn weight(&mut self, path: &str, output: i32, input: i32) -> Result<Weight, LoadError> {
        let _: Option<Quantization> = None;
        Ok(Weight::Dense(self.floating(&format!("{path}.weight"), &[output, input])?))
    }

    /// A linear layer `[input] -> [output]`, quantized if the checkpoint's is.
    pub fn linear(&mut self, path: &str, input: i32, output: i32, bias: bool) -> Result<Linear, LoadError> {
        let weight = self.weight(path, output, input)?;
        let bias = if bias { Some(self.floating(&format!("{path}.bias"), &[output])?) } else { None };
        Ok(Linear::new(weight, bias))
    }

    /// An embedding of `count` vectors, quantized if the checkpoint's is.
    pub fn embedding(&mut self, path: &str, count: i32, dims: i32) -> Result<Embedding, LoadError> {
        Ok(Embedding::new(self.weight(path, count, dims)?))
    }

    /// A norm over `dims` features.
    pub fn norm(&mut self, path: &str, dims: i32, kind: NormKind) -> Result<RmsNorm, LoadError> {
        let weight = self.floating(&format!("{path}.weight"), &[dims])?;
        Ok(match kind {
            NormKind::Rms { eps } => RmsNorm::new(weight, eps),
            NormKind::GemmaRms { eps } => RmsNorm::new(weight.add_scalar(1.0)?, eps),
        })
    }
}
