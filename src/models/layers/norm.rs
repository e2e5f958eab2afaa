//! Norms.

use crate::mlx::cpu_ops::{self, Kernels};
use crate::mlx::{Array, Result, fast};

/// Root-mean-square norm over the last axis (`nn.RMSNorm`; Gemma's adds 1 to the stored weight before).
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: Array,
    eps: f32,
    /// Our own norm, where it is used.
    kernels: Option<Kernels>,
}

impl RmsNorm {
    /// A norm over its loaded weight.
    pub fn new(weight: Array, eps: f32) -> Self {
        Self { weight, eps, kernels: cpu_ops::kernels() }
    }

    /// Same shape as `x`.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        match &self.kernels {
            Some(kernels) => kernels.rms_norm(x, &self.weight, self.eps),
            None => fast::rms_norm(x, Some(&self.weight), self.eps),
        }
    }

    /// `x + residual`, and that normed.
    pub fn forward_sum(&self, x: &Array, residual: &Array) -> Result<(Array, Array)> {
        match &self.kernels {
            Some(kernels) if x.dtype() == residual.dtype() => {
                kernels.add_rms_norm(x, residual, &self.weight, self.eps)
            }
            _ => {
                let sum = x.add(residual)?;
                let normed = self.forward(&sum)?;
                Ok((sum, normed))
            }
        }
    }

    /// The factor of each feature, `[dims]`.
    pub fn weight(&self) -> &Array {
        &self.weight
    }

    /// What is added to the mean square.
    pub fn eps(&self) -> f32 {
        self.eps
    }
}
