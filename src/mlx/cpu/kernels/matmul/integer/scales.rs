//! Where the scales and biases of the weights lie.

use super::super::MatmulError;
use super::super::matrix::{Matrix, Scales, Storage};
use crate::kernels::Floats;

/// Groups whose scales are made wide together.
pub(super) const MOST_GROUPS: usize = 32;

#[derive(Clone, Copy)]
pub(super) enum ScaleType {
    F32,
    F16,
    Bf16,
}

impl ScaleType {
    #[inline(always)]
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// The scales and biases of a matrix, `[rows, groups]`.
#[derive(Clone, Copy)]
pub(super) struct ScaleTable {
    pub(super) scales: *const u8,
    pub(super) biases: *const u8,
    pub(super) kind: ScaleType,
    /// Groups of a row.
    pub(super) groups: usize,
}

impl ScaleTable {
    /// Those of affine weights.
    pub(super) fn new(matrix: &Matrix<'_>) -> Result<Self, MatmulError> {
        let Storage::Packed { scales: Scales::Affine { scales, biases }, quantization, .. } = matrix.storage
        else {
            return Err(MatmulError::ScaleType);
        };
        let (kind, scales, biases): (_, *const u8, *const u8) = match (scales, biases) {
            (Floats::F32(s), Floats::F32(b)) => (ScaleType::F32, s.as_ptr().cast(), b.as_ptr().cast()),
            (Floats::F16(s), Floats::F16(b)) => (ScaleType::F16, s.as_ptr().cast(), b.as_ptr().cast()),
            (Floats::Bf16(s), Floats::Bf16(b)) => (ScaleType::Bf16, s.as_ptr().cast(), b.as_ptr().cast()),
            _ => return Err(MatmulError::ScaleType),
        };
        Ok(Self { scales, biases, kind, groups: matrix.columns / quantization.group_size as usize })
    }

    /// Bytes from the start of a table to a group's place.
    #[inline(always)]
    pub(super) fn place(&self, row: usize, group: usize) -> usize {
        (row * self.groups + group) * self.kind.bytes()
    }
}
