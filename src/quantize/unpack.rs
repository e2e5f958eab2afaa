//! Dequantizing a weight with MLX, some rows at a time.

use std::sync::Arc;

use super::convert::ConvertError;
use super::numbers::FloatType;
use super::pack::quantize;
use crate::checkpoint::tensor::TensorData;
use crate::checkpoint::{ElementType, QuantParams, Tensor};
use crate::mlx::cpu::Pool;
use crate::mlx::{self, Array, Dtype};

/// Numbers that are unpacked at a time; MLX's CPU graph holds several copies of them.
const NUMBERS_AT_A_TIME: usize = 1 << 21;

/// The numbers of a packed weight, as `mx.dequantize` gives them with scales cast to `via` (the float modes have
/// scales of their own and give bfloat16). Returns little-endian bytes and their type.
///
/// # Errors
/// When MLX refuses the tensors.
pub fn dequantize(
    weight: &Tensor,
    scales: &Tensor,
    biases: Option<&Tensor>,
    params: QuantParams,
    via: FloatType,
) -> mlx::Result<(Vec<u8>, FloatType)> {
    let columns = weight.shape.last().copied().unwrap_or(0).saturating_mul(32) / usize::from(params.bits);
    let rows: usize = weight.shape.iter().rev().skip(1).product();
    let step = (NUMBERS_AT_A_TIME / columns.max(1)).max(1);
    let kind = if params.mode.has_biases() { via } else { FloatType::Bfloat16 };
    let mut numbers = Vec::with_capacity(rows * columns * kind.element().size());
    for start in (0..rows).step_by(step) {
        let count = step.min(rows - start);
        let part = |tensor: &Tensor| Array::from_tensor(&some_rows(tensor, rows, start, count));
        let floats = |tensor: &Tensor| match params.mode.has_biases() {
            true => part(tensor)?.astype(dtype(via)),
            false => part(tensor),
        };
        let biases = biases.map(floats).transpose()?;
        let part = mlx::dequantize(&part(weight)?, &floats(scales)?, biases.as_ref(), params)?;
        numbers.extend(part.astype(dtype(kind))?.to_bytes()?);
    }
    Ok((numbers, kind))
}

/// What is left of numbers after packing and unpacking them: bytes of the same type.
///
/// # Errors
/// When MLX refuses the tensors.
pub(super) fn fake_quantize(
    numbers: &[u8],
    kind: FloatType,
    shape: &[usize],
    params: QuantParams,
    pool: &Pool,
) -> Result<Vec<u8>, ConvertError> {
    let packed = quantize(numbers, kind, params, pool)?;
    let columns = shape.last().copied().unwrap_or(0);
    let rows: usize = shape.iter().rev().skip(1).product();
    let tensor = |bytes: Vec<u8>, dtype: ElementType, columns: Option<usize>| Tensor {
        dtype,
        shape: vec![rows, columns.unwrap_or(0)],
        data: TensorData::Owned(Arc::new(bytes)),
    };
    let scale = if params.mode.has_biases() { kind.element() } else { ElementType::U8 };
    let groups = params.groups(columns);
    let weight = tensor(packed.weight, ElementType::U32, params.packed_columns(columns));
    let scales = tensor(packed.scales, scale, groups);
    let biases = params.mode.has_biases().then(|| tensor(packed.biases, scale, groups));
    let (numbers, unpacked) = dequantize(&weight, &scales, biases.as_ref(), params, kind)?;
    Ok(unpacked.cast(&numbers, kind))
}

/// The type in MLX.
pub(crate) fn dtype(kind: FloatType) -> Dtype {
    Dtype::from(kind.element())
}

/// Rows `start..start + count` of a tensor of `rows` rows, as a copy.
pub(super) fn some_rows(tensor: &Tensor, rows: usize, start: usize, count: usize) -> Tensor {
    let columns = tensor.shape.last().copied().unwrap_or(0);
    let row = tensor.bytes().len() / rows.max(1);
    let bytes = tensor.bytes()[start * row..(start + count) * row].to_vec();
    Tensor { dtype: tensor.dtype, shape: vec![count, columns], data: TensorData::Owned(Arc::new(bytes)) }
}
