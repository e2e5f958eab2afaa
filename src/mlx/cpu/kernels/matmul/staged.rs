//! A product in two steps, for callers that are parallel themselves: rows of x are arranged, then parts of the result
//! are computed. The bits are those of [`Matmul::run`](super::Matmul::run).

use std::ops::Range;

use super::super::super::{Isa, Level};
use super::super::floats::Floats;
use super::output::Output;
use super::prepare::{Aligned, arrange};
use super::schedule::{Plan, Task};
use super::simd::{self, BLOCK, Kernel, Simd};
use super::source::dispatch;
use super::{MatmulError, Matrix, Precision, integer, rows};
use crate::coding::{QuantMode, QuantParams};

/// How a matrix wants the rows of x. Matrices of one arrangement and one width can share them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Arrangement {
    /// f32 in the order of the columns.
    Plain,
    /// f32 in [`Simd::NIBBLE_ORDER`].
    Nibbles,
    /// Integers with a scale a group of the weights.
    Rounded(Precision, QuantParams, integer::Set),
}

impl Arrangement {
    /// What `matrix` wants when `precision` is asked for.
    pub fn new(isa: Isa, matrix: &Matrix<'_>, precision: Precision) -> Self {
        let Some(quantization) = matrix.quantization() else { return Self::Plain };
        if precision != Precision::Exact && integer::supports(isa, matrix) {
            return Self::Rounded(precision, quantization, integer::Set::of(isa));
        }
        match (quantization.mode, quantization.bits) {
            (QuantMode::Affine, 4) | (QuantMode::Mxfp4 | QuantMode::Nvfp4, _) => Self::Nibbles,
            _ => Self::Plain,
        }
    }

    /// The most rows a part should have: those that stay in cache while weights pass by.
    pub fn most_rows(self) -> usize {
        #[cfg(target_arch = "x86_64")]
        if let Self::Rounded(..) = self {
            return integer::BLOCK_ROWS;
        }
        rows::BLOCK_ROWS
    }

    /// What the outputs of a part of `rows` rows should come in multiples of.
    pub fn unit(self, rows: usize) -> usize {
        #[cfg(target_arch = "x86_64")]
        if let Self::Rounded(.., set) = self {
            return set.unit(rows);
        }
        rows::unit(rows)
    }

    fn padded(self, columns: usize) -> usize {
        columns.next_multiple_of(BLOCK)
    }

    /// f32 that a row takes.
    fn row_size(self, columns: usize) -> usize {
        #[cfg(target_arch = "x86_64")]
        if let Self::Rounded(precision, quantization, set) = self {
            return integer::Packing::of(set, quantization, columns).row_size(precision);
        }
        self.padded(columns)
    }

    fn groups(self, columns: usize) -> usize {
        match self {
            Self::Rounded(_, quantization, _) => columns / quantization.group_size as usize,
            _ => 0,
        }
    }
}

/// Memory for arranged rows of x.
pub(in super::super) struct Operand {
    arrangement: Arrangement,
    columns: usize,
    values: Aligned,
    scales: Aligned,
    sums: Aligned,
}

/// Where arranged rows lie.
#[derive(Clone, Copy)]
pub(in super::super) struct Arranged {
    arrangement: Arrangement,
    columns: usize,
    values: *mut f32,
    // Only x86-64 has integer kernels.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code))]
    scales: *mut f32,
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code))]
    sums: *mut f32,
}

// SAFETY: the functions that use the pointers say who may write what.
unsafe impl Send for Arranged {}
// SAFETY: as above.
unsafe impl Sync for Arranged {}

impl Operand {
    /// Room for `rows` rows of `columns`.
    pub fn new(arrangement: Arrangement, rows: usize, columns: usize) -> Self {
        let groups = rows * arrangement.groups(columns);
        Self {
            arrangement,
            columns,
            values: Aligned::new(rows * arrangement.row_size(columns)),
            scales: Aligned::new(groups),
            sums: Aligned::new(groups),
        }
    }

    /// The rows, to be written and read while this is borrowed by nobody else.
    pub fn view(&mut self) -> Arranged {
        Arranged {
            arrangement: self.arrangement,
            columns: self.columns,
            values: self.values.as_mut_ptr(),
            scales: self.scales.as_mut_ptr(),
            sums: self.sums.as_mut_ptr(),
        }
    }
}

struct Arrange<'a> {
    to: &'a Arranged,
    x: *const f32,
    row: usize,
}

// SAFETY: used by the thread that makes it.
unsafe impl Sync for Arrange<'_> {}

impl<S: Simd> Kernel<S> for Arrange<'_> {
    #[inline(always)]
    unsafe fn run(&self, _task: usize) {
        let Arranged { arrangement, columns, values, .. } = *self.to;
        let padded = arrangement.padded(columns);
        // SAFETY: the promises of `Arranged::set`.
        unsafe {
            let nibbles = arrangement == Arrangement::Nibbles;
            arrange::<S>(self.x, columns, padded, nibbles, values.add(self.row * padded));
        }
    }
}

impl Arranged {
    /// Arranges a row.
    ///
    /// # Safety
    /// The operand was made for `isa`, is alive and has the row; nobody else uses the row; `x` holds its columns.
    pub unsafe fn set(&self, isa: Isa, row: usize, x: *const f32) {
        #[cfg(target_arch = "x86_64")]
        if let Arrangement::Rounded(precision, quantization, set) = self.arrangement {
            let packing = integer::Packing::of(set, quantization, self.columns);
            // SAFETY: `Arrangement::new` saw the instructions; the caller's promise for the rest.
            unsafe {
                match precision {
                    Precision::Int8 => integer::round_row::<integer::Int8>(x, packing, row, self.rounded()),
                    _ => integer::round_row::<integer::Int16>(x, packing, row, self.rounded()),
                }
            }
            return;
        }
        let kernel = Arrange { to: self, x, row };
        // SAFETY: `isa` is proof of the instructions.
        unsafe {
            match isa.level() {
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 | Level::Avx512Vnni => simd::Avx512::enter(&kernel, 0),
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => simd::Avx2::enter(&kernel, 0),
                #[cfg(target_arch = "aarch64")]
                Level::Neon => simd::Neon::enter(&kernel, 0),
                _ => simd::Plain::enter(&kernel, 0),
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn rounded(&self) -> integer::Rounded {
        integer::Rounded { values: self.values.cast(), scales: self.scales, sums: self.sums }
    }
}

/// The rows of an operand, each to be multiplied by the same matrix.
#[derive(Debug)]
pub(in super::super) struct RowList(Plan);

impl RowList {
    /// All of `rows`.
    ///
    /// # Errors
    /// When there are more than 2^32.
    pub fn new(rows: usize) -> Result<Self, MatmulError> {
        Plan::dense(rows).map(Self)
    }
}

/// A rectangle of `x · Wᵀ + bias`.
pub(in super::super) struct Part<'a> {
    /// W, a single matrix.
    pub matrix: &'a Matrix<'a>,
    /// `[N]`.
    pub bias: Option<Floats<'a>>,
    /// Arranged for the matrix.
    pub x: Arranged,
    /// All rows of x.
    pub all: &'a RowList,
    /// Rows of the part, not empty.
    pub rows: Range<usize>,
    /// Outputs of the part, not empty.
    pub outputs: Range<usize>,
}

impl Part<'_> {
    /// Writes output `outputs.start + i` of row `rows.start + r` to `to[r * stride + i]`.
    ///
    /// # Errors
    /// Never, for operands that fit together.
    ///
    /// # Safety
    /// `x` was arranged for `matrix` and `isa`; rows and outputs exist; there is room at `to`, which nobody else uses.
    pub unsafe fn run(&self, isa: Isa, to: *mut f32, stride: usize) -> Result<(), MatmulError> {
        let base = to.wrapping_sub(self.rows.start * stride + self.outputs.start);
        let output = Output::at(base, stride, self.bias);
        let task = Task {
            expert: 0,
            first_pair: self.rows.start,
            last_pair: self.rows.end,
            first: self.outputs.start,
            last: self.outputs.end,
        };
        let (matrix, plan) = (self.matrix, &self.all.0);
        #[cfg(target_arch = "x86_64")]
        if let Arrangement::Rounded(precision, _, set) = self.x.arrangement {
            let x = self.x.rounded();
            // SAFETY: `Arrangement::new` saw the instructions; the caller's promise for the rest.
            return unsafe {
                match precision {
                    Precision::Int8 => integer::part::<integer::Int8>(matrix, set, x, &output, plan, task),
                    _ => integer::part::<integer::Int16>(matrix, set, x, &output, plan, task),
                }
            };
        }
        let part = rows::Part { matrix, x: self.x.values, output: &output, plan, task };
        // SAFETY: `isa` is proof of the instructions; the caller's promise for the rest.
        unsafe {
            match isa.level() {
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 | Level::Avx512Vnni => dispatch::<simd::Avx512, _>(matrix, part),
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => dispatch::<simd::Avx2, _>(matrix, part),
                #[cfg(target_arch = "aarch64")]
                Level::Neon => dispatch::<simd::Neon, _>(matrix, part),
                _ => dispatch::<simd::Plain, _>(matrix, part),
            }
        }
    }
}
