//! Compositions of `mlx/fast.cpp`, which is what `mx.fast` computes on a CPU, with their constants kept.

use super::array::Array;
use super::dtype::Dtype;
use super::error::Result;

/// `mx.fast.rms_norm` of one weight, operation for operation.
///
/// MLX makes the constants anew, and a broadcast of each, for every norm of every step; here they lie ready in the
/// shape that a single row needs.
#[derive(Clone, Debug)]
pub struct ComposedRmsNorm {
    /// `[1, …, 1]`.
    eps: Array,
    /// `1 / features`, `[1, …, 1]`.
    inverse_count: Array,
    /// `[1, …, features]`.
    weight: Array,
}

impl ComposedRmsNorm {
    /// A norm of inputs with `ndim` axes by `weight`, `[features]`.
    pub fn new(weight: &Array, eps: f32, ndim: usize) -> Result<Self> {
        let features = weight.dim(-1);
        let ones = vec![1; ndim];
        let mut spread = ones.clone();
        if let Some(last) = spread.last_mut() {
            *last = features;
        }
        let constant = |value: f32| Array::from_slice(&[value], &ones);
        let inverse_count = constant((1.0 / f64::from(features)) as f32)?;
        Ok(Self { eps: constant(eps)?, inverse_count, weight: weight.reshape(&spread)? })
    }

    /// Axes of the inputs it was made for.
    pub fn ndim(&self) -> usize {
        self.weight.ndim()
    }

    /// Same shape as `x`, which has [`ndim`](Self::ndim) axes.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        let dtype = x.dtype();
        if dtype != Dtype::Float32 {
            return self.scale(&x.astype(Dtype::Float32)?)?.astype(dtype)?.multiply(&self.weight);
        }
        self.scale(x)?.multiply(&self.weight)
    }

    /// `x * rsqrt(mean(x * x) + eps)`.
    fn scale(&self, x: &Array) -> Result<Array> {
        let mean = x.square()?.sum(-1, true)?.multiply(&self.inverse_count)?;
        x.multiply(&mean.add(&self.eps)?.rsqrt()?)
    }
}
