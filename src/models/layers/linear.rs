//! Linear and embedding layers, dense or quantized.

use std::borrow::Cow;

use crate::checkpoint::QuantParams;
use crate::lora::{LowRank, ModuleAdapters};
use crate::mlx::cpu_ops::{self, Kernels, MatrixKind};
use crate::mlx::{Array, Dtype, Result, dequantize, quantized_matmul};

/// A weight matrix `[out, in]`, and what multiplies it.
#[derive(Clone, Debug)]
pub struct Weight {
    stored: Stored,
    kind: MatrixKind,
    /// Our own product, where it is used.
    kernels: Option<Kernels>,
}

/// A matrix as it lies in the checkpoint.
#[derive(Clone, Debug)]
enum Stored {
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
    /// A matrix `[out, in]` in a floating-point type.
    pub fn dense(weight: Array) -> Result<Self> {
        let kind = MatrixKind::new(None, weight.dim(0), weight.dim(1));
        let stored = Stored::Dense { transposed: weight.t()?, weight };
        Ok(Self { stored, kind, kernels: cpu_ops::kernels() })
    }

    /// A packed matrix of `input` columns: words, scales and, in affine mode, biases.
    pub fn quantized(
        weight: Array,
        scales: Array,
        biases: Option<Array>,
        params: QuantParams,
        input: i32,
    ) -> Self {
        let kind = MatrixKind::new(Some(params), weight.dim(0), input);
        Self {
            stored: Stored::Quantized { weight, scales, biases, params },
            kind,
            kernels: cpu_ops::kernels(),
        }
    }

    /// `x @ weight.T + bias`.
    fn project(&self, x: &Array, bias: Option<&Array>) -> Result<Array> {
        if let Some(kernels) = &self.kernels {
            return kernels.linear(x, self.kind, &self.arrays(), bias);
        }
        match (&self.stored, bias) {
            (Stored::Dense { transposed, .. }, None) => x.matmul(transposed),
            (Stored::Dense { transposed, .. }, Some(bias)) => bias.addmm(x, transposed),
            (Stored::Quantized { weight, scales, biases, params }, bias) => {
                let product = quantized_matmul(x, weight, scales, biases.as_ref(), true, *params)?;
                match bias {
                    Some(bias) => product.add(bias),
                    None => Ok(product),
                }
            }
        }
    }

    /// The matrix in a floating-point type, unpacked if it is packed.
    pub(crate) fn unpacked(&self) -> Result<Array> {
        match &self.stored {
            Stored::Dense { weight, .. } => Ok(weight.clone()),
            Stored::Quantized { weight, scales, biases, params } => {
                dequantize(weight, scales, biases.as_ref(), *params)
            }
        }
    }

    /// The coding; `None` for a matrix in a floating-point type.
    pub fn params(&self) -> Option<QuantParams> {
        match &self.stored {
            Stored::Dense { .. } => None,
            Stored::Quantized { params, .. } => Some(*params),
        }
    }

    /// The same packed words with other scales and biases. A matrix that is not packed in affine mode stays as it is.
    #[must_use]
    pub fn with_scales(self, new_scales: Array, new_biases: Array) -> Self {
        match self.stored {
            Stored::Quantized { weight, biases: Some(_), params, .. } => {
                let stored =
                    Stored::Quantized { weight, scales: new_scales, biases: Some(new_biases), params };
                Self { stored, ..self }
            }
            stored => Self { stored, ..self },
        }
    }

    /// Its shape and coding.
    pub fn kind(&self) -> MatrixKind {
        self.kind
    }

    /// The arrays it is made of: one, or packed words, scales and, in affine mode, biases.
    pub fn arrays(&self) -> Vec<&Array> {
        match &self.stored {
            Stored::Dense { weight, .. } => vec![weight],
            Stored::Quantized { weight, scales, biases, .. } => {
                [weight, scales].into_iter().chain(biases.as_ref()).collect()
            }
        }
    }
}

/// `x @ weight.T + bias` (`nn.Linear`, `nn.QuantizedLinear`), perhaps adapted (mlx-lm's `LoRALinear`, `DoRALinear`).
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Weight,
    bias: Option<Array>,
    adapters: Option<ModuleAdapters>,
}

impl Linear {
    /// A layer over loaded arrays.
    pub fn new(weight: Weight, bias: Option<Array>) -> Self {
        Self { weight, bias, adapters: None }
    }

    /// The layer with what its model's adapters put on it.
    pub fn with_adapters(self, adapters: ModuleAdapters) -> Self {
        Self { adapters: Some(adapters), ..self }
    }

    /// The layer with another matrix.
    #[must_use]
    pub fn with_weight(self, weight: Weight) -> Self {
        Self { weight, ..self }
    }

    /// The layer with another bias.
    #[must_use]
    pub fn with_bias(self, bias: Option<Array>) -> Self {
        Self { bias, ..self }
    }

    /// `[…, in]` to `[…, out]`.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        let parts = self.adapters.as_ref().map(ModuleAdapters::parts).unwrap_or_default();
        if let [part] = &parts[..]
            && part.magnitude.is_some()
        {
            return self.forward_with_magnitude(x, part);
        }
        let out = self.weight.project(x, self.bias.as_ref())?;
        parts.iter().try_fold(out, |out, part| out.add(&part.product(x)?))
    }

    fn forward_with_magnitude(&self, x: &Array, part: &LowRank) -> Result<Array> {
        let weight = self.weight.unpacked()?;
        let out = x.matmul(&weight.t()?)?.add(&part.product(x)?)?;
        let out = match part.row_factors(&weight)? {
            Some(factors) => factors.astype(x.dtype())?.multiply(&out)?,
            None => out,
        };
        match &self.bias {
            Some(bias) => out.add(bias),
            None => Ok(out),
        }
    }

    /// `x` as this layer multiplies it best, `[…, in]` or `[rows, in]`: MLX flattens and unflattens the operand of
    /// every dense product, which a block that does it once for all its products saves.
    pub(super) fn rows<'a>(&self, x: &'a Array) -> Result<Cow<'a, Array>> {
        match (&self.weight.stored, &self.weight.kernels) {
            (Stored::Dense { .. }, None) if x.ndim() > 2 => x.reshape(&[-1, x.dim(-1)]).map(Cow::Owned),
            _ => Ok(Cow::Borrowed(x)),
        }
    }

    /// The matrix.
    pub fn weight(&self) -> &Weight {
        &self.weight
    }

    /// What is added to each output.
    pub fn bias(&self) -> Option<&Array> {
        self.bias.as_ref()
    }
}

/// Token ids to vectors, and back when the head is tied (`nn.Embedding`, `nn.QuantizedEmbedding`), perhaps adapted
/// (mlx-lm's `LoRAEmbedding`, `DoRAEmbedding`).
#[derive(Clone, Debug)]
pub struct Embedding {
    weight: Weight,
    /// What our kernels make of packed vectors; `None` for the type of their scales.
    dtype: Option<Dtype>,
    adapters: Option<ModuleAdapters>,
}

impl Embedding {
    /// A layer over loaded arrays.
    pub fn new(weight: Weight) -> Self {
        Self { weight, dtype: None, adapters: None }
    }

    /// The layer with what its model's adapters put on it.
    #[must_use]
    pub fn with_adapters(self, adapters: ModuleAdapters) -> Self {
        Self { adapters: Some(adapters), ..self }
    }

    /// The layer with another matrix.
    #[must_use]
    pub fn with_weight(self, weight: Weight) -> Self {
        Self { weight, ..self }
    }

    /// Gives vectors of `dtype`, where our kernels unpack them.
    #[must_use]
    pub fn with_dtype(self, dtype: Option<Dtype>) -> Self {
        Self { dtype, ..self }
    }

    /// `[B, L]` ids to `[B, L, dims]`.
    pub fn forward(&self, ids: &Array) -> Result<Array> {
        let out = self.look_up(ids)?;
        self.parts().iter().try_fold(out, |out, part| {
            let z = part.rows(ids)?;
            let adapted = out.add(&z.astype(out.dtype())?)?;
            match part.rows_factors(ids, &out.add(&z)?)? {
                Some(factors) => factors.multiply(&adapted),
                None => Ok(adapted),
            }
        })
    }

    fn parts(&self) -> Vec<LowRank> {
        self.adapters.as_ref().map(ModuleAdapters::parts).unwrap_or_default()
    }

    fn look_up(&self, ids: &Array) -> Result<Array> {
        if let Some(kernels) = &self.weight.kernels {
            return kernels.embedding_as(ids, self.weight.kind, &self.weight.arrays(), self.dtype);
        }
        match &self.weight.stored {
            Stored::Dense { weight, .. } => weight.take(ids, 0),
            Stored::Quantized { weight, scales, biases, params } => {
                let biases = biases.as_ref().map(|biases| biases.take(ids, 0)).transpose()?;
                dequantize(&weight.take(ids, 0)?, &scales.take(ids, 0)?, biases.as_ref(), *params)
            }
        }
    }

    /// `[…, dims]` to `[…, vocab]`: the tied head.
    pub fn as_linear(&self, x: &Array) -> Result<Array> {
        let out = self.weight.project(x, None)?;
        self.parts().iter().try_fold(out, |out, part| {
            let out = out.add(&part.product(x)?)?;
            match part.row_factors(&self.weight.unpacked()?)? {
                Some(factors) => factors.multiply(&out),
                None => Ok(out),
            }
        })
    }

    /// The matrix.
    pub fn weight(&self) -> &Weight {
        &self.weight
    }
}
