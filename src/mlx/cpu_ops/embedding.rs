//! Rows of an embedding table, dense or packed.

use std::sync::Arc;

use super::experts::indices;
use super::matrix::MatrixKind;
use super::operands::{Run, floats_mut, nth, text};
use super::{Kernels, refuse};
use crate::mlx::cpu::kernels::embedding::embedding;
use crate::mlx::kernel::{Kernel, View, custom};
use crate::mlx::{Array, Dtype, Result, dequantize};

impl Kernels {
    /// The rows `ids` (`uint32` or `int32`, any shape) of a table: `[…, columns]` in the type that MLX dequantizes it
    /// to.
    ///
    /// # Errors
    /// Shapes and types that do not fit together; on evaluation, an id outside the table.
    pub fn embedding(&self, ids: &Array, kind: MatrixKind, weight: &[&Array]) -> Result<Array> {
        self.embedding_as(ids, kind, weight, None)
    }

    /// As [`embedding`](Self::embedding), in a floating-point type of the caller's choice.
    ///
    /// # Errors
    /// As there.
    pub fn embedding_as(
        &self,
        ids: &Array,
        kind: MatrixKind,
        weight: &[&Array],
        dtype: Option<Dtype>,
    ) -> Result<Array> {
        const OP: &str = "embedding";
        kind.check(OP, weight)?;
        if !matches!(ids.dtype(), Dtype::Uint32 | Dtype::Int32) || kind.experts.is_some() {
            return refuse(OP, format!("{ids:?} are no rows of one table"));
        }
        let inputs: Vec<&Array> = [ids].into_iter().chain(weight.iter().copied()).collect();
        let shape: Vec<i32> = ids.shape().iter().copied().chain([kind.columns as i32]).collect();
        let node = Embedding { kernels: self.clone(), kind };
        custom(c"embedding", Arc::new(node), &inputs, &shape, dtype.unwrap_or_else(|| kind.dtype(weight)))
    }
}

/// Inputs: the ids, the table's arrays.
struct Embedding {
    kernels: Kernels,
    kind: MatrixKind,
}

impl Kernel for Embedding {
    fn run(&self, inputs: &[View], outputs: &[View]) -> Run<()> {
        let ids = indices(nth(inputs, 0)?)?;
        let table = self.kind.view(&inputs[1..])?;
        let out = floats_mut(nth(outputs, 0)?)?;
        embedding(self.kernels.isa(), self.kernels.pool(), &table, &ids, out).map_err(text)
    }

    fn stock(&self, inputs: &[Array]) -> Result<Vec<Array>> {
        let rows: Vec<Array> =
            inputs[1..].iter().map(|array| array.take(&inputs[0], 0)).collect::<Result<_>>()?;
        Ok(vec![match (self.kind.params, rows.as_slice()) {
            (Some(params), [words, scales, biases @ ..]) => {
                dequantize(words, scales, biases.first(), params)?
            }
            _ => rows[0].clone(),
        }])
    }
}
