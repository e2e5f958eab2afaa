//! Norms.

use std::cell::OnceCell;

use crate::mlx::{Array, DeviceKind, Dtype, Result, default_device, fast};

/// Root-mean-square norm over the last axis (`nn.RMSNorm`; Gemma's adds 1 to the stored weight before).
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: Array,
    eps: f32,
    /// On a CPU, where MLX composes the norm of other operations; made for the first input.
    composed: Option<OnceCell<Composed>>,
}

/// The constants of MLX's composition (`mlx/fast.cpp`), kept in the shape that a single row needs: MLX makes them
/// anew, and a broadcast of each, for every norm of every step.
#[derive(Clone, Debug)]
struct Composed {
    /// `[1, …, 1]`.
    eps: Array,
    /// `1 / features`, `[1, …, 1]`.
    inverse_count: Array,
    /// `[1, …, features]`.
    weight: Array,
}

impl Composed {
    fn new(weight: &Array, eps: f32, ndim: usize) -> Result<Self> {
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

    fn ndim(&self) -> usize {
        self.weight.ndim()
    }

    fn forward(&self, x: &Array) -> Result<Array> {
        let dtype = x.dtype();
        let widened;
        let x = if dtype == Dtype::Float32 {
            x
        } else {
            widened = x.astype(Dtype::Float32)?;
            &widened
        };
        let mean = x.square()?.sum(-1, true)?.multiply(&self.inverse_count)?;
        let normed = x.multiply(&mean.add(&self.eps)?.rsqrt()?)?;
        if dtype == Dtype::Float32 { normed } else { normed.astype(dtype)? }.multiply(&self.weight)
    }
}

impl RmsNorm {
    /// A norm over its loaded weight.
    pub fn new(weight: Array, eps: f32) -> Self {
        Self { weight, eps, composed: (default_device() == DeviceKind::Cpu).then(OnceCell::new) }
    }

    /// Same shape as `x`.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        match self.composed_for(x.ndim())? {
            Some(composed) => composed.forward(x),
            None => fast::rms_norm(x, Some(&self.weight), self.eps),
        }
    }

    fn composed_for(&self, ndim: usize) -> Result<Option<&Composed>> {
        let Some(cell) = &self.composed else { return Ok(None) };
        let composed = match cell.get() {
            Some(composed) => composed,
            None => {
                let composed = Composed::new(&self.weight, self.eps, ndim)?;
                cell.get_or_init(|| composed)
            }
        };
        Ok((composed.ndim() == ndim).then_some(composed))
    }
}
