//! Linear and embedding layers, dense or quantized.

use crate::checkpoint::QuantParams;
use crate::mlx::{Array, Result, dequantize, quantized_matmul};

/// A weight matrix `[out, in]`, as it lies in the checkpoint.
#[derive(Clone, Debug)]
pub enum Weight {
    /// In a floating-point type.
    Dense {
        /// `[out, in]`.
        weight: Array,
        /// The same, seen as `[in, out]`; made once, since each step would otherwise make it again.
        transposed: Array,
    },
    /// Packed along the input axis.
    Quantized {
        /// `uint32`, `[out, in * bits / 32]`.
        weight: Array,
        /// `[out, in / group_size]`.
        scales: Array,
        /// As the scales; affine mode only.
        biases: Option<Array>,
        /// The coding.
        params: QuantParams,
    },
}

impl Weight {
    /// A matrix in a floating-point type.
    pub fn dense(weight: Array) -> Result<Self> {
        Ok(Self::Dense { transposed: weight.t()?, weight })
    }

    /// `x @ weight.T`.
    pub fn project(&self, x: &Array) -> Result<Array> {
        match self {
            Self::Dense { transposed, .. } => x.matmul(transposed),
            Self::Quantized { weight, scales, biases, params } => {
                quantized_matmul(x, weight, scales, biases.as_ref(), true, *params)
            }
        }
    }

    /// The arrays it is made of.
    pub fn arrays(&self) -> Vec<&Array> {
        match self {
            Self::Dense { weight, .. } => vec![weight],
            Self::Quantized { weight, scales, biases, .. } => {
                [weight, scales].into_iter().chain(biases.as_ref()).collect()
            }
        }
    }
}

/// `x @ weight.T + bias` (`nn.Linear`, `nn.QuantizedLinear`).
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Weight,
    bias: Option<Array>,
}

impl Linear {
    /// A layer over loaded arrays.
    pub fn new(weight: Weight, bias: Option<Array>) -> Self {
        Self { weight, bias }
    }

    /// `[…, in]` to `[…, out]`.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        match (&self.weight, &self.bias) {
            (weight, None) => weight.project(x),
            (Weight::Dense { transposed, .. }, Some(bias)) => bias.addmm(x, transposed),
            (weight, Some(bias)) => weight.project(x)?.add(bias),
        }
    }
}

/// Token ids to vectors, and back when the head is tied (`nn.Embedding`, `nn.QuantizedEmbedding`).
#[derive(Clone, Debug)]
pub struct Embedding {
    weight: Weight,
}

impl Embedding {
    /// A layer over loaded arrays.
    pub fn new(weight: Weight) -> Self {
        Self { weight }
    }

    /// `[B, L]` ids to `[B, L, dims]`.
    pub fn forward(&self, ids: &Array) -> Result<Array> {
        match &self.weight {
            Weight::Dense { weight, .. } => weight.take(ids, 0),
            Weight::Quantized { weight, scales, biases, params } => {
                let biases = biases.as_ref().map(|biases| biases.take(ids, 0)).transpose()?;
                dequantize(&weight.take(ids, 0)?, &scales.take(ids, 0)?, biases.as_ref(), *params)
            }
        }
    }

    /// `[…, dims]` to `[…, vocab]`: the tied head.
    pub fn as_linear(&self, x: &Array) -> Result<Array> {
        self.weight.project(x)
    }
}
