//! Products in which each row has a matrix of its own: experts of a mixture.

use std::borrow::Cow;
use std::sync::Arc;

use super::matrix::MatrixKind;
use super::operands::{Ordered, Run, floats_mut, floats_of, nth, ordered, promoted, text};
use super::{Kernels, refuse};
use crate::mlx::cpu::kernels::matmul::{Gather, Matmul, Precision};
use crate::mlx::kernel::{Kernel, View, custom};
use crate::mlx::{Array, Dtype, Result, gather_mm, gather_qmm};

impl Kernels {
    /// `x @ weight[expert].T + bias[expert]` for each expert that `indices`, `[…, k]`, names (`mx.gather_qmm` and
    /// `mx.gather_mm` as `SwitchLinear` of mlx-lm calls them). The result is `[…, k, rows]`.
    ///
    /// `x` is `[…, columns]`, one row for all `k` experts of a token, or `[…, k, columns]`, a row for each. `bias` is
    /// `[experts, rows]`.
    ///
    /// # Errors
    /// Shapes and types that do not fit together; on evaluation, an index that names no expert.
    pub fn experts(
        &self,
        x: &Array,
        indices: &Array,
        kind: MatrixKind,
        weight: &[&Array],
        bias: Option<&Array>,
    ) -> Result<Array> {
        const OP: &str = "experts";
        kind.check(OP, weight)?;
        let Some(experts) = kind.experts else { return refuse(OP, "one matrix needs `linear`") };
        let (tokens, chosen) = match indices.shape().split_last() {
            Some((&chosen, tokens)) if matches!(indices.dtype(), Dtype::Uint32 | Dtype::Int32) => {
                (tokens, chosen)
            }
            _ => return refuse(OP, format!("{indices:?} names no experts")),
        };
        let shared = x.shape().split_last() == Some((&(kind.columns as i32), tokens));
        if !shared && x.shape().split_last() != Some((&(kind.columns as i32), indices.shape())) {
            return refuse(OP, format!("{x:?} does not fit {indices:?} and {} columns", kind.columns));
        }
        if let Some(bias) = bias.filter(|bias| bias.shape() != [experts as i32, kind.rows as i32]) {
            return refuse(OP, format!("{bias:?} is no bias of {experts} experts' {} outputs", kind.rows));
        }
        let weight_type = if kind.params.is_none_or(|params| params.mode.has_biases()) {
            kind.dtype(weight)
        } else {
            x.dtype()
        };
        let dtype = promoted([x.dtype(), weight_type].into_iter().chain(bias.map(Array::dtype)));
        let inputs: Vec<&Array> =
            [x, indices].into_iter().chain(weight.iter().copied()).chain(bias).collect();
        let shape: Vec<i32> = indices.shape().iter().copied().chain([kind.rows as i32]).collect();
        let rows_each = if shared { chosen.max(1) as usize } else { 1 };
        let node = Experts { kernels: self.clone(), kind, precision: self.precision.of_kernels(), rows_each };
        custom(c"experts", Arc::new(node), &inputs, &shape, dtype)
    }
}

/// Inputs: x, the indices, the weight's arrays, perhaps a bias.
struct Experts {
    kernels: Kernels,
    kind: MatrixKind,
    precision: Precision,
    /// Results that share a row of x.
    rows_each: usize,
}

impl Kernel for Experts {
    fn run(&self, inputs: &[View], outputs: &[View]) -> Run<()> {
        let x = Ordered::new(nth(inputs, 0)?)?;
        let experts = indices(nth(inputs, 1)?)?;
        let x_rows: Vec<u32> = (0..experts.len()).map(|row| (row / self.rows_each) as u32).collect();
        let mut product = Matmul::transposed(self.kind.view(&inputs[2..])?);
        product.precision = self.precision;
        product.bias = inputs.get(2 + self.kind.parts()).map(floats_of).transpose()?;
        product.gather = Some(Gather { x_rows: Some(&x_rows), experts: &experts });
        let y = floats_mut(nth(outputs, 0)?)?;
        product.run(self.kernels.isa(), self.kernels.pool(), x.floats(), y).map_err(text)
    }

    fn stock(&self, inputs: &[Array]) -> Result<Vec<Array>> {
        let (x, indices, weight) = (&inputs[0], &inputs[1], &inputs[2..2 + self.kind.parts()]);
        let mut x = x.expand_dims(-2)?;
        if x.ndim() == indices.ndim() + 1 {
            x = x.expand_dims(-2)?;
        }
        let product = match self.kind.params {
            Some(params) => gather_qmm(&x, &weight[0], &weight[1], weight.get(2), indices, params)?,
            None => gather_mm(&x, &weight[0].transpose(&[0, 2, 1])?, indices)?,
        };
        let product = product.squeeze(-2)?;
        Ok(vec![match inputs.get(2 + self.kind.parts()) {
            Some(bias) => product.add(&bias.take(indices, 0)?)?,
            None => product,
        }])
    }
}

/// Indices as kernels take them. MLX counts negative ones from the end; here nobody means that.
pub(super) fn indices<'a>(view: &View<'a>) -> Run<Cow<'a, [u32]>> {
    match view.dtype {
        Dtype::Uint32 => ordered::<u32>(view, Dtype::Uint32),
        Dtype::Int32 => ordered::<i32>(view, Dtype::Int32)?
            .iter()
            .map(|&index| u32::try_from(index).map_err(|_| format!("index {index} is negative")))
            .collect::<Run<Vec<u32>>>()
            .map(Cow::Owned),
        other => Err(format!("expected uint32 or int32 indices, got {}", other.name())),
    }
}
