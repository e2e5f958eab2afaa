//! Norms.

use std::cell::OnceCell;

use crate::mlx::composed::ComposedRmsNorm;
use crate::mlx::cpu_ops::{self, Kernels};
use crate::mlx::{Array, DeviceKind, Result, default_device, fast};

/// Root-mean-square norm over the last axis (`nn.RMSNorm`; Gemma's adds 1 to the stored weight before).
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: Array,
    /// The weight as it is stored, where one is added to it.
    stored: Option<Array>,
    eps: f32,
    implementation: Implementation,
}

/// What computes a norm.
#[derive(Clone, Debug)]
enum Implementation {
    /// Our CPU kernel.
    Kernels(Kernels),
    /// MLX's composition for CPUs; made for the first input.
    Composed(OnceCell<ComposedRmsNorm>),
    /// The device's kernel.
    Fast,
}

impl RmsNorm {
    /// A norm over its loaded weight.
    pub fn new(weight: Array, eps: f32) -> Self {
        let implementation = match cpu_ops::kernels() {
            Some(kernels) => Implementation::Kernels(kernels),
            None if default_device() == DeviceKind::Cpu => Implementation::Composed(OnceCell::new()),
            None => Implementation::Fast,
        };
        Self { weight, stored: None, eps, implementation }
    }

    /// Gemma's, which adds one to what is stored.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn gemma(stored: Array, eps: f32) -> Result<Self> {
        Ok(Self { stored: Some(stored.clone()), ..Self::new(stored.add_scalar(1.0)?, eps) })
    }

    /// The same norm over another weight, as it would be stored.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn with_stored(&self, stored: Array) -> Result<Self> {
        match self.stored {
            Some(_) => Self::gemma(stored, self.eps),
            None => Ok(Self::new(stored, self.eps)),
        }
    }

    /// The weight as a checkpoint stores it, `[dims]`.
    pub fn stored(&self) -> &Array {
        self.stored.as_ref().unwrap_or(&self.weight)
    }

    /// Same shape as `x`.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        match &self.implementation {
            Implementation::Kernels(kernels) => kernels.rms_norm(x, &self.weight, self.eps),
            Implementation::Composed(cell) => {
                let composed = match cell.get() {
                    Some(composed) => composed,
                    None => {
                        let composed = ComposedRmsNorm::new(&self.weight, self.eps, x.ndim())?;
                        cell.get_or_init(|| composed)
                    }
                };
                if composed.ndim() == x.ndim() {
                    composed.forward(x)
                } else {
                    fast::rms_norm(x, Some(&self.weight), self.eps)
                }
            }
            Implementation::Fast => fast::rms_norm(x, Some(&self.weight), self.eps),
        }
    }

    /// `x + residual`, and that normed.
    pub fn forward_sum(&self, x: &Array, residual: &Array) -> Result<(Array, Array)> {
        match &self.implementation {
            Implementation::Kernels(kernels) if x.dtype() == residual.dtype() => {
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
