//! Weight matrices as inputs of a node: one dense array, or the packed words, scales and biases.

use super::operands::{Run, floats_of, nth, text};
use super::refuse;
use crate::checkpoint::QuantParams;
use crate::mlx::cpu::kernels::matmul::{Matrix, Scales};
use crate::mlx::dtype::Dtype;
use crate::mlx::kernel::View;
use crate::mlx::{Array, Result, dequantize};

/// A matrix `[rows, columns]`, or a stack of them, and how it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixKind {
    /// How the columns are packed; `None` for a dense matrix.
    pub params: Option<QuantParams>,
    /// Matrices stacked along the first axis; `None` for a single one without that axis.
    pub experts: Option<usize>,
    /// Outputs of a linear layer, or entries of an embedding.
    pub rows: usize,
    /// Inputs of a linear layer, or features of an embedding.
    pub columns: usize,
}

impl MatrixKind {
    /// One matrix of `rows` by `columns`.
    pub fn new(params: Option<QuantParams>, rows: i32, columns: i32) -> Self {
        Self { params, experts: None, rows: rows.max(0) as usize, columns: columns.max(0) as usize }
    }

    /// `experts` matrices of `rows` by `columns`.
    pub fn stacked(params: Option<QuantParams>, experts: i32, rows: i32, columns: i32) -> Self {
        Self { experts: Some(experts.max(0) as usize), ..Self::new(params, rows, columns) }
    }

    /// How many arrays it consists of.
    pub(super) fn parts(&self) -> usize {
        self.params.map_or(1, |params| 2 + usize::from(params.mode.has_biases()))
    }

    /// Checks the arrays' number, shapes and types.
    pub(super) fn check(&self, op: &str, arrays: &[&Array]) -> Result<()> {
        if arrays.len() != self.parts() {
            return refuse(op, format!("a weight of {} arrays, expected {}", arrays.len(), self.parts()));
        }
        let widths = match self.params {
            None => [self.columns, 0, 0],
            Some(params) => {
                let words = (self.columns as u64).saturating_mul(u64::from(params.bits)) / 32;
                let groups = self.columns as u64 / u64::from(params.group_size.max(1));
                [words as usize, groups as usize, groups as usize]
            }
        };
        for (array, width) in arrays.iter().zip(widths) {
            let wanted: Vec<usize> = self.experts.into_iter().chain([self.rows, width]).collect();
            if array.shape().iter().map(|&dim| dim as usize).ne(wanted.iter().copied()) {
                return refuse(op, format!("a weight of shape {:?}, expected {wanted:?}", array.shape()));
            }
        }
        let types = |types: &[Dtype], array: &Array| types.contains(&array.dtype());
        const FLOATS: &[Dtype] = &[Dtype::Float32, Dtype::Float16, Dtype::Bfloat16];
        let fits = match (self.params, arrays) {
            (None, [weight]) => types(FLOATS, weight),
            (Some(_), [words, scales]) => types(&[Dtype::Uint32], words) && types(&[Dtype::Uint8], scales),
            (Some(_), [words, scales, biases]) => {
                types(&[Dtype::Uint32], words) && types(FLOATS, scales) && biases.dtype() == scales.dtype()
            }
            _ => false,
        };
        if fits { Ok(()) } else { refuse(op, format!("a weight of types that do not fit: {arrays:?}")) }
    }

    /// The type in which values come out of it, as MLX dequantizes them.
    pub(super) fn dtype(&self, arrays: &[&Array]) -> Dtype {
        match (self.params, arrays) {
            (None, [weight, ..]) => weight.dtype(),
            (Some(params), [_, scales, ..]) if params.mode.has_biases() => scales.dtype(),
            _ => Dtype::Bfloat16,
        }
    }

    /// The matrix behind a node's inputs.
    pub(super) fn view<'a>(&self, inputs: &[View<'a>]) -> Run<Matrix<'a>> {
        let (experts, rows, columns) = (self.experts.unwrap_or(1), self.rows, self.columns);
        let matrix = match self.params {
            None => Matrix::dense(floats_of(nth(inputs, 0)?)?, experts, rows, columns),
            Some(params) => {
                let words = super::operands::dense::<u32>(nth(inputs, 0)?, Dtype::Uint32)?;
                let scales = if params.mode.has_biases() {
                    let (scales, biases) = (nth(inputs, 1)?, nth(inputs, 2)?);
                    Scales::Affine { scales: floats_of(scales)?, biases: floats_of(biases)? }
                } else {
                    Scales::Byte(super::operands::dense::<u8>(nth(inputs, 1)?, Dtype::Uint8)?)
                };
                Matrix::packed(words, scales, params, experts, rows, columns)
            }
        };
        matrix.map_err(text)
    }

    /// The matrix as MLX computes with it: dense.
    pub(super) fn dequantized(&self, arrays: &[Array]) -> Result<Array> {
        match (self.params, arrays) {
            (None, [weight, ..]) => Ok(weight.clone()),
            (Some(params), [words, scales, rest @ ..]) => {
                dequantize(words, scales, rest.first().filter(|_| params.mode.has_biases()), params)
            }
            _ => refuse("weight", "has too few arrays"),
        }
    }
}
