//! Products with weights: linear layers and heads.

use std::sync::Arc;

use super::matrix::MatrixKind;
use super::operands::{Ordered, Run, floats_mut, floats_of, nth, promoted, text};
use super::{Kernels, refuse};
use crate::mlx::cpu::kernels::matmul::{Matmul, Precision};
use crate::mlx::kernel::{Kernel, View, custom};
use crate::mlx::{Array, Dtype, Result, quantized_matmul};

impl Kernels {
    /// `x @ weight.T + bias`: `x` is `[…, columns]`, the result `[…, rows]`. The type is the one MLX promotes to.
    ///
    /// # Errors
    /// Shapes and types that do not fit together.
    pub fn linear(
        &self,
        x: &Array,
        kind: MatrixKind,
        weight: &[&Array],
        bias: Option<&Array>,
    ) -> Result<Array> {
        const OP: &str = "linear";
        kind.check(OP, weight)?;
        if kind.experts.is_some() {
            return refuse(OP, "stacked matrices need `experts`");
        }
        if x.ndim() == 0 || x.dim(-1) as usize != kind.columns {
            return refuse(OP, format!("{x:?} does not end in the weight's {} columns", kind.columns));
        }
        if let Some(bias) = bias.filter(|bias| bias.shape() != [kind.rows as i32]) {
            return refuse(OP, format!("{bias:?} is no bias of {} outputs", kind.rows));
        }
        let weight_type = if kind.params.is_none_or(|params| params.mode.has_biases()) {
            kind.dtype(weight)
        } else {
            x.dtype()
        };
        let dtype = promoted([x.dtype(), weight_type].into_iter().chain(bias.map(Array::dtype)));
        let inputs: Vec<&Array> = [x].into_iter().chain(weight.iter().copied()).chain(bias).collect();
        let shape = with_last(x, kind.rows);
        let node = Linear { kernels: self.clone(), kind, precision: self.precision.of_kernels() };
        custom(c"linear", Arc::new(node), &inputs, &shape, dtype)
    }
}

/// The shape of `x` with another last dimension.
fn with_last(x: &Array, last: usize) -> Vec<i32> {
    let mut shape = x.shape().to_vec();
    if let Some(dim) = shape.last_mut() {
        *dim = last as i32;
    }
    shape
}

/// Inputs: x, the weight's arrays, perhaps a bias.
struct Linear {
    kernels: Kernels,
    kind: MatrixKind,
    precision: Precision,
}

impl Kernel for Linear {
    fn run(&self, inputs: &[View], outputs: &[View]) -> Run<()> {
        let x = Ordered::new(nth(inputs, 0)?)?;
        let mut product = Matmul::transposed(self.kind.view(&inputs[1..])?);
        product.precision = self.precision;
        product.bias = inputs.get(1 + self.kind.parts()).map(floats_of).transpose()?;
        let y = floats_mut(nth(outputs, 0)?)?;
        product.run(self.kernels.isa(), self.kernels.pool(), x.floats(), y).map_err(text)
    }

    fn stock(&self, inputs: &[Array]) -> Result<Vec<Array>> {
        let (x, weight) = (&inputs[0], &inputs[1..1 + self.kind.parts()]);
        let product = match self.kind.params {
            Some(params) => quantized_matmul(x, &weight[0], &weight[1], weight.get(2), true, params)?,
            None => x.matmul(&weight[0].t()?)?,
        };
        Ok(vec![match inputs.get(1 + self.kind.parts()) {
            Some(bias) => product.add(bias)?,
            None => product,
        }])
    }

    /// `dx = dy @ W`, `dW = dy.T @ x` and `db = sum(dy)`; scales and biases of packed weights are left to MLX.
    fn vjp(&self, inputs: &[Array], cotangents: &[Array], wrt: &[usize]) -> Option<Result<Vec<Array>>> {
        let (bias, dense) = (1 + self.kind.parts(), self.kind.params.is_none());
        if !wrt.iter().all(|&index| index == 0 || index == bias || (index == 1 && dense)) {
            return None;
        }
        let dy = cotangents.first()?;
        let rows = |array: &Array| array.reshape(&[-1, array.dim(-1)]);
        let gradient = |index: usize| {
            if index == 0 {
                let weight: Vec<&Array> = inputs[1..bias].iter().collect();
                self.kernels.linear_backward(dy, self.kind, &weight, inputs[0].dtype())
            } else if index == bias {
                rows(dy)?.sum(0, false)?.astype(inputs[bias].dtype())
            } else {
                rows(dy)?.t()?.matmul(&rows(&inputs[0])?)?.astype(inputs[1].dtype())
            }
        };
        Some(wrt.iter().map(|&index| gradient(index)).collect())
    }
}

impl Kernels {
    /// `dy @ weight`, exact: `[…, rows]` to `[…, columns]`.
    fn linear_backward(
        &self,
        dy: &Array,
        kind: MatrixKind,
        weight: &[&Array],
        dtype: Dtype,
    ) -> Result<Array> {
        let inputs: Vec<&Array> = [dy].into_iter().chain(weight.iter().copied()).collect();
        let node = Backward { kernels: self.clone(), kind };
        custom(c"linear_backward", Arc::new(node), &inputs, &with_last(dy, kind.columns), dtype)
    }
}

/// Inputs: the gradient of the product, the weight's arrays.
struct Backward {
    kernels: Kernels,
    kind: MatrixKind,
}

impl Kernel for Backward {
    fn run(&self, inputs: &[View], outputs: &[View]) -> Run<()> {
        let dy = Ordered::new(nth(inputs, 0)?)?;
        let product = Matmul::plain(self.kind.view(&inputs[1..])?);
        let dx = floats_mut(nth(outputs, 0)?)?;
        product.run(self.kernels.isa(), self.kernels.pool(), dy.floats(), dx).map_err(text)
    }

    fn stock(&self, inputs: &[Array]) -> Result<Vec<Array>> {
        inputs[0].matmul(&self.kind.dequantized(&inputs[1..])?).map(|product| vec![product])
    }
}
