//! RMS and layer normalization over the last axis.

use std::sync::Arc;

use super::operands::{RowOperand, Run, floats_mut, floats_of, nth, promoted, text};
use super::{Kernels, refuse};
use crate::mlx::cpu::kernels::norm;
use crate::mlx::kernel::{Kernel, View, custom, custom_many};
use crate::mlx::{Array, Result, fast};

impl Kernels {
    /// `x / rms(x) * weight` in float32, rounded once. A weight shorter than the last axis, which it must divide,
    /// norms each part of that on its own: heads that lie beside each other.
    ///
    /// # Errors
    /// Shapes that do not fit together.
    pub fn rms_norm(&self, x: &Array, weight: &Array, eps: f32) -> Result<Array> {
        check("rms_norm", x, weight)?;
        let node = RmsNorm { kernels: self.clone(), eps };
        custom(c"rms_norm", Arc::new(node), &[x, weight], x.shape(), promoted([x.dtype(), weight.dtype()]))
    }

    /// `sum = x + residual` and `rms_norm(sum)`, the same bits as the two apart.
    ///
    /// # Errors
    /// Shapes or types that do not fit together.
    pub fn add_rms_norm(
        &self,
        x: &Array,
        residual: &Array,
        weight: &Array,
        eps: f32,
    ) -> Result<(Array, Array)> {
        const OP: &str = "add_rms_norm";
        check(OP, x, weight)?;
        if x.shape() != residual.shape() || x.dtype() != residual.dtype() {
            return refuse(OP, format!("{x:?} and {residual:?} are not alike"));
        }
        let normed = (x.shape(), promoted([x.dtype(), weight.dtype()]));
        let node = Arc::new(AddRmsNorm { kernels: self.clone(), eps });
        let outputs = [(x.shape(), x.dtype()), normed];
        let [sum, normed] = custom_many(c"add_rms_norm", node, &[x, residual, weight], outputs)?;
        Ok((sum, normed))
    }

    /// `(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias` in float32, rounded once.
    ///
    /// # Errors
    /// Shapes that do not fit together.
    pub fn layer_norm(
        &self,
        x: &Array,
        weight: Option<&Array>,
        bias: Option<&Array>,
        eps: f32,
    ) -> Result<Array> {
        const OP: &str = "layer_norm";
        for part in weight.into_iter().chain(bias) {
            if part.shape() != [x.dim(-1)] {
                return refuse(OP, format!("{part:?} does not fit the last axis of {x:?}"));
            }
        }
        let types = [x].into_iter().chain(weight).chain(bias).map(Array::dtype);
        let inputs: Vec<&Array> = [x].into_iter().chain(weight).chain(bias).collect();
        let node = LayerNorm { kernels: self.clone(), weight: weight.is_some(), bias: bias.is_some(), eps };
        custom(c"layer_norm", Arc::new(node), &inputs, x.shape(), promoted(types))
    }
}

fn check(op: &str, x: &Array, weight: &Array) -> Result<()> {
    if weight.ndim() == 1 && weight.dim(0) > 0 && x.dim(-1) > 0 && x.dim(-1) % weight.dim(0) == 0 {
        return Ok(());
    }
    refuse(op, format!("{weight:?} does not fit the last axis of {x:?}"))
}

/// Inputs: x, weight.
struct RmsNorm {
    kernels: Kernels,
    eps: f32,
}

impl Kernel for RmsNorm {
    fn run(&self, inputs: &[View], outputs: &[View]) -> Run<()> {
        let weight = floats_of(nth(inputs, 1)?)?;
        let x = RowOperand::new(nth(inputs, 0)?, weight.len())?;
        let out = floats_mut(nth(outputs, 0)?)?;
        let (isa, pool) = (self.kernels.isa(), self.kernels.pool());
        norm::rms_norm(isa, pool, &x.rows()?, Some(weight), self.eps, out).map_err(text)
    }

    fn stock(&self, inputs: &[Array]) -> Result<Vec<Array>> {
        stock_rms_norm(&inputs[0], &inputs[1], self.eps).map(|normed| vec![normed])
    }
}

fn stock_rms_norm(x: &Array, weight: &Array, eps: f32) -> Result<Array> {
    if x.dim(-1) == weight.dim(0) {
        return fast::rms_norm(x, Some(weight), eps);
    }
    let rows = x.reshape(&[-1, weight.dim(0)])?;
    fast::rms_norm(&rows, Some(weight), eps)?.reshape(x.shape())
}

/// Inputs: x, residual, weight. Outputs: the sum, the sum normed.
struct AddRmsNorm {
    kernels: Kernels,
    eps: f32,
}

impl Kernel for AddRmsNorm {
    fn run(&self, inputs: &[View], outputs: &[View]) -> Run<()> {
        let weight = floats_of(nth(inputs, 2)?)?;
        let x = RowOperand::new(nth(inputs, 0)?, weight.len())?;
        let residual = RowOperand::new(nth(inputs, 1)?, weight.len())?;
        let (sum, out) = (floats_mut(nth(outputs, 0)?)?, floats_mut(nth(outputs, 1)?)?);
        let (isa, pool) = (self.kernels.isa(), self.kernels.pool());
        norm::add_rms_norm(isa, pool, &x.rows()?, &residual.rows()?, Some(weight), self.eps, sum, out)
            .map_err(text)
    }

    fn stock(&self, inputs: &[Array]) -> Result<Vec<Array>> {
        let sum = inputs[0].add(&inputs[1])?;
        let normed = stock_rms_norm(&sum, &inputs[2], self.eps)?;
        Ok(vec![sum, normed])
    }
}

/// Inputs: x, perhaps a weight, perhaps a bias.
struct LayerNorm {
    kernels: Kernels,
    weight: bool,
    bias: bool,
    eps: f32,
}

impl Kernel for LayerNorm {
    fn run(&self, inputs: &[View], outputs: &[View]) -> Run<()> {
        let view = nth(inputs, 0)?;
        let x = RowOperand::new(view, view.shape.last().map_or(1, |&dim| dim as usize))?;
        let part = |present: bool, index| {
            if present { nth(inputs, index).and_then(floats_of).map(Some) } else { Ok(None) }
        };
        let (weight, bias) = (part(self.weight, 1)?, part(self.bias, 1 + usize::from(self.weight))?);
        let out = floats_mut(nth(outputs, 0)?)?;
        let (isa, pool) = (self.kernels.isa(), self.kernels.pool());
        norm::layer_norm(isa, pool, &x.rows()?, weight, bias, self.eps, out).map_err(text)
    }

    fn stock(&self, inputs: &[Array]) -> Result<Vec<Array>> {
        let weight = inputs.get(1).filter(|_| self.weight);
        let bias = inputs.get(1 + usize::from(self.weight)).filter(|_| self.bias);
        fast::layer_norm(&inputs[0], weight, bias, self.eps).map(|normed| vec![normed])
    }
}
