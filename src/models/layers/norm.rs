//! Norms.

use crate::mlx::{Array, Result, fast};

/// Root-mean-square norm over the last axis (`nn.RMSNorm`; Gemma's adds 1 to the stored weight before).
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: Array,
    eps: f32,
}

impl RmsNorm {
    /// A norm over its loaded weight.
    pub fn new(weight: Array, eps: f32) -> Self {
        Self { weight, eps }
    }

    /// Same shape as `x`.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        fast::rms_norm(x, Some(&self.weight), self.eps)
    }
}
