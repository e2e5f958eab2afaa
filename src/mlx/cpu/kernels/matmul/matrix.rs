//! The weights of a matmul as they lie in memory: packed by `mx.quantize`, or dense.

use super::super::floats::Floats;
use super::MatmulError;
use crate::coding::{QuantMode, QuantParams};

/// Scales of a packed matrix, one for each group of weights.
#[derive(Clone, Copy, Debug)]
pub enum Scales<'a> {
    /// The affine mode: `weight = level * scale + bias`.
    Affine {
        /// `[experts, rows, columns / group_size]`.
        scales: Floats<'a>,
        /// As `scales`, of the same type.
        biases: Floats<'a>,
    },
    /// The float modes: an exponent (e8m0) for the MX modes, an 8-bit float (e4m3) for nvfp4.
    Byte(&'a [u8]),
}

#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Storage<'a> {
    Dense(Floats<'a>),
    Packed { words: &'a [u32], scales: Scales<'a>, quantization: QuantParams },
}

/// A stack of `experts` matrices of `rows` by `columns`, row-major, checked to fill its slices exactly.
///
/// Packed rows are streams of little-endian bits, as `mx.quantize` (MLX 0.32) writes them: weight `i` of a row is
/// bits `i * bits` to `(i + 1) * bits`, whatever the word borders.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    pub(in super::super) storage: Storage<'a>,
    pub(in super::super) experts: usize,
    pub(in super::super) rows: usize,
    pub(in super::super) columns: usize,
}

impl<'a> Matrix<'a> {
    /// Dense weights: `[experts, rows, columns]` values.
    ///
    /// # Errors
    /// When a dimension is 0 or the values do not fill the shape.
    pub fn dense(
        values: Floats<'a>,
        experts: usize,
        rows: usize,
        columns: usize,
    ) -> Result<Self, MatmulError> {
        expect("weights", values.len(), &[experts, rows, columns])?;
        Ok(Self { storage: Storage::Dense(values), experts, rows, columns })
    }

    /// Quantized weights: `words` is `[experts, rows, columns * bits / 32]`, the scales are
    /// `[experts, rows, columns / group_size]`.
    ///
    /// # Errors
    /// When MLX has no such quantization, when a dimension is 0 or `columns` is no multiple of the group, or when a
    /// slice does not fill its shape.
    pub fn packed(
        words: &'a [u32],
        scales: Scales<'a>,
        quantization: QuantParams,
        experts: usize,
        rows: usize,
        columns: usize,
    ) -> Result<Self, MatmulError> {
        let unsupported = || MatmulError::Quantization { quantization };
        let (bits, group) = match (quantization.mode, quantization.bits, quantization.group_size) {
            (QuantMode::Affine, bits @ (2 | 3 | 4 | 5 | 6 | 8), group @ (32 | 64 | 128)) => (bits, group),
            (QuantMode::Mxfp4, 4, 32) | (QuantMode::Nvfp4, 4, 16) | (QuantMode::Mxfp8, 8, 32) => {
                (quantization.bits, quantization.group_size)
            }
            _ => return Err(unsupported()),
        };
        let bits = usize::from(bits);
        let group = usize::try_from(group).map_err(|_| unsupported())?;
        if !columns.is_multiple_of(group) {
            return Err(MatmulError::Group { columns, group });
        }
        let row_bits = columns.checked_mul(bits).ok_or(MatmulError::TooLarge)?;
        if !row_bits.is_multiple_of(32) {
            return Err(MatmulError::Group { columns, group: 32 });
        }
        expect("packed weights", words.len(), &[experts, rows, row_bits / 32])?;
        let groups = [experts, rows, columns / group];
        match (quantization.mode, &scales) {
            (QuantMode::Affine, Scales::Affine { scales, biases }) => {
                if std::mem::discriminant(scales) != std::mem::discriminant(biases) {
                    return Err(MatmulError::ScaleType);
                }
                expect("scales", scales.len(), &groups)?;
                expect("biases", biases.len(), &groups)?;
            }
            (QuantMode::Mxfp4 | QuantMode::Nvfp4 | QuantMode::Mxfp8, Scales::Byte(scales)) => {
                expect("scales", scales.len(), &groups)?;
            }
            _ => return Err(MatmulError::ScaleType),
        }
        Ok(Self { storage: Storage::Packed { words, scales, quantization }, experts, rows, columns })
    }

    /// How the weights are packed; `None` for dense ones.
    pub fn quantization(&self) -> Option<QuantParams> {
        match self.storage {
            Storage::Packed { quantization, .. } => Some(quantization),
            Storage::Dense(_) => None,
        }
    }

    /// How many matrices are stacked.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Rows of each.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of each.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Bytes that the weights and their scales take.
    pub fn bytes(&self) -> usize {
        let floats = |values: &Floats| match values {
            Floats::F32(values) => size_of_val(*values),
            Floats::F16(values) => size_of_val(*values),
            Floats::Bf16(values) => size_of_val(*values),
        };
        match &self.storage {
            Storage::Dense(values) => floats(values),
            Storage::Packed { words, scales: Scales::Affine { scales, biases }, .. } => {
                size_of_val(*words) + floats(scales) + floats(biases)
            }
            Storage::Packed { words, scales: Scales::Byte(scales), .. } => {
                size_of_val(*words) + size_of_val(*scales)
            }
        }
    }
}

/// Checks that `actual` is the product of `shape`, none of whose parts is 0.
pub(super) fn expect(what: &'static str, actual: usize, shape: &[usize]) -> Result<(), MatmulError> {
    let wanted = shape.iter().try_fold(1usize, |product, dim| product.checked_mul(*dim));
    match wanted {
        None => Err(MatmulError::TooLarge),
        Some(0) => Err(MatmulError::Empty { what }),
        Some(wanted) if wanted == actual => Ok(()),
        Some(wanted) => Err(MatmulError::Length { what, wanted, actual }),
    }
}
