//! Matrix products with the weights as MLX stores them: quantized or dense, one matrix or a stack of experts,
//! transposed or not.
//!
//! # One order of summation
//! The result of a row must not depend on what else shares the call. So each instruction set and [`Precision`] has
//! one order in which the products of an output are added up, kept by every kernel of that set, whether it computes
//! one row or thousands, and wherever the work is cut among threads:
//! - `x · Wᵀ`, [`rows`]: K is cut into blocks of 32 (zero-padded; 4-bit blocks in the order in which the nibbles come
//!   out of the registers). One vector accumulator; each block is added to it by fused multiply-adds, lowest position
//!   first; at the end the lanes are added as a balanced tree (lane `i` to lane `i + half`).
//! - `x · W`, [`columns`]: one scalar chain an output, in the order of K.
//! - Integer modes, [`integer`]: exact integer sums in a group of weights, then one scalar chain over the groups.
//!
//! Exact precision multiplies f32 activations with weights dequantized to f32; nothing else is rounded but the sums
//! and, at the end, the result. [`mod@reference`] is the slow and obvious definition that all kernels are tested against.
#![allow(
    clippy::needless_range_loop,
    reason = "a tile's loops all run over the same few registers, by index"
)]

mod ahead;
mod codes;
mod columns;
mod dense;
mod integer;
mod matrix;
mod output;
mod prepare;
pub mod reference;
mod registers;
mod rows;
mod schedule;
mod simd;
mod source;
mod staged;

pub use integer::{has_integers, takes_integers};
pub(super) use matrix::Storage;
pub use matrix::{Matrix, Scales};
pub(super) use staged::{Arranged, Arrangement, Operand, Part, RowList};

use super::super::{Isa, Level, Pool, PoolError};
use super::floats::{Floats, FloatsMut};
use crate::coding::QuantParams;
use output::Output;
use schedule::Plan;

/// How products are computed. Integer modes exist for affine weights of 4 and 8 bits, in `x · Wᵀ`, for the instructions
/// that [have them](has_integers); everything else is computed exactly whatever is asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// f32 arithmetic on dequantized weights.
    #[default]
    Exact,
    /// Activations rounded to 16 bits with one scale for each group of weights.
    Int16,
    /// Activations rounded to 8 bits with one scale for each group of weights.
    Int8,
}

/// A shape, a length or an index that does not fit, or a failure inside the work.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum MatmulError {
    /// A slice of the wrong length.
    #[error("matmul: {what} should have {wanted} elements, but has {actual}")]
    Length {
        /// Which operand.
        what: &'static str,
        /// What its shape says.
        wanted: usize,
        /// Its length.
        actual: usize,
    },
    /// A dimension is zero.
    #[error("matmul: {what} has a dimension of 0")]
    Empty {
        /// Which operand.
        what: &'static str,
    },
    /// A product of dimensions overflows.
    #[error("matmul: the dimensions are too large for this machine")]
    TooLarge,
    /// Not one of MLX's quantizations.
    #[error("matmul: MLX has no {} quantization of {} bits in groups of {}", quantization.mode.name(), quantization.bits, quantization.group_size)]
    Quantization {
        /// What was asked for.
        quantization: QuantParams,
    },
    /// Rows do not consist of whole groups.
    #[error("matmul: {columns} columns are no multiple of the group of {group}")]
    Group {
        /// Columns of the matrix.
        columns: usize,
        /// The size they must divide by.
        group: usize,
    },
    /// Scales of a type that the mode does not use.
    #[error(
        "matmul: the affine mode takes float scales and biases of one type, the float modes 8-bit scales"
    )]
    ScaleType,
    /// An index of a gather is out of range.
    #[error("matmul: {what} index {index} is out of range, there are {count}")]
    Index {
        /// Which list.
        what: &'static str,
        /// The index.
        index: u32,
        /// How many things it chooses from.
        count: usize,
    },
    /// A stack of experts needs indices.
    #[error("matmul: {experts} stacked matrices need a gather that says which rows they multiply")]
    Experts {
        /// How many matrices are stacked.
        experts: usize,
    },
    /// The work failed.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// Which matrix multiplies which row, as `mx.gather_mm` and `mx.gather_qmm` have it for single rows: row `i` of the
/// result is row `x_rows[i]` of `x` times matrix `experts[i]`.
#[derive(Clone, Copy, Debug)]
pub struct Gather<'a> {
    /// A row of `x` for each row of the result; `None` takes row `i` for row `i`.
    pub x_rows: Option<&'a [u32]>,
    /// A matrix for each row of the result.
    pub experts: &'a [u32],
}

/// A product `y = x · Wᵀ` (`transpose`: the matrices are `[N, K]`) or `y = x · W` (they are `[K, N]`).
#[derive(Clone, Copy, Debug)]
pub struct Matmul<'a> {
    /// W.
    pub weights: Matrix<'a>,
    /// Whether the columns of W are summed over.
    pub transpose: bool,
    /// `[N]` values added to each row before it is rounded to the type of `y`; `[experts, N]` with a gather.
    pub bias: Option<Floats<'a>>,
    /// Rows and matrices to combine; `None` multiplies all rows with the only matrix.
    pub gather: Option<Gather<'a>>,
    /// How products are computed.
    pub precision: Precision,
}

impl<'a> Matmul<'a> {
    /// `x · Wᵀ`, exact, without bias or gather.
    pub fn transposed(weights: Matrix<'a>) -> Self {
        Self { weights, transpose: true, bias: None, gather: None, precision: Precision::Exact }
    }

    /// `x · W`, exact, without bias or gather.
    pub fn plain(weights: Matrix<'a>) -> Self {
        Self { transpose: false, ..Self::transposed(weights) }
    }

    /// K: the length of a row of `x`.
    pub fn inputs(&self) -> usize {
        if self.transpose { self.weights.columns } else { self.weights.rows }
    }

    /// N: the length of a row of `y`.
    pub fn outputs(&self) -> usize {
        if self.transpose { self.weights.rows } else { self.weights.columns }
    }

    /// The precision that [`run`](Self::run) will use on `isa`.
    pub fn effective_precision(&self, isa: Isa) -> Precision {
        if self.transpose && integer::supports(isa, &self.weights) {
            self.precision
        } else {
            Precision::Exact
        }
    }

    /// Computes `y` (`[M, N]`) from `x` (`[M, K]`; with a gather any whole number of rows). A row of `y` has the
    /// same bits whatever M, the other rows and the pool are.
    ///
    /// # Errors
    /// When lengths, indices or shapes do not fit together; `y` is then untouched. When a worker fails.
    pub fn run(&self, isa: Isa, pool: &Pool, x: Floats<'_>, y: FloatsMut<'_>) -> Result<(), MatmulError> {
        let plan = self.plan(&x, &y)?;
        if plan.is_empty() {
            return Ok(());
        }
        let output = Output::new(y, self.outputs(), self.bias, self.gather.is_some());
        #[cfg(target_arch = "x86_64")]
        match self.effective_precision(isa) {
            // SAFETY: `isa` is proof of the instructions; `plan` checked all shapes.
            Precision::Int8 => unsafe {
                return integer::run::<integer::Int8>(self, integer::Set::of(isa), pool, x, &output, &plan);
            },
            // SAFETY: as above.
            Precision::Int16 => unsafe {
                return integer::run::<integer::Int16>(self, integer::Set::of(isa), pool, x, &output, &plan);
            },
            Precision::Exact => {}
        }
        match isa.level() {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `isa` is proof that the processor has AVX-512; `plan` checked all shapes.
            Level::Avx512 | Level::Avx512Vnni => unsafe {
                self.exact::<simd::Avx512>(pool, x, &output, &plan)
            },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `isa` is proof that the processor has AVX2, FMA and F16C; `plan` checked all shapes.
            Level::Avx2 => unsafe { self.exact::<simd::Avx2>(pool, x, &output, &plan) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: `isa` is proof that the processor has NEON; `plan` checked all shapes.
            Level::Neon => unsafe { self.exact::<simd::Neon>(pool, x, &output, &plan) },
            // SAFETY: plain Rust runs everywhere; `plan` checked all shapes.
            _ => unsafe { self.exact::<simd::Plain>(pool, x, &output, &plan) },
        }
    }

    /// # Safety
    /// The processor has the instructions of `S`, and `plan` was made for these operands.
    unsafe fn exact<S: simd::Simd>(
        &self,
        pool: &Pool,
        x: Floats<'_>,
        output: &Output<'_>,
        plan: &Plan,
    ) -> Result<(), MatmulError> {
        // SAFETY: the caller's promise.
        unsafe {
            if self.transpose {
                rows::run::<S>(&self.weights, pool, x, output, plan)
            } else {
                columns::run::<S>(&self.weights, pool, x, output, plan)
            }
        }
    }

    /// Checks everything that the kernels rely on, and sorts the rows by matrix.
    fn plan(&self, x: &Floats, y: &FloatsMut) -> Result<Plan, MatmulError> {
        let (inputs, outputs, experts) = (self.inputs(), self.outputs(), self.weights.experts);
        if !x.len().is_multiple_of(inputs) {
            let wanted = x.len().next_multiple_of(inputs);
            return Err(MatmulError::Length { what: "x (whole rows)", wanted, actual: x.len() });
        }
        let x_rows = x.len() / inputs;
        let y_rows = self.gather.map_or(x_rows, |gather| gather.experts.len());
        let wanted = y_rows.checked_mul(outputs).ok_or(MatmulError::TooLarge)?;
        if y.len() != wanted {
            return Err(MatmulError::Length { what: "y", wanted, actual: y.len() });
        }
        if let Some(bias) = &self.bias {
            let stack = if self.gather.is_some() { experts } else { 1 };
            matrix::expect("bias", bias.len(), &[stack, outputs])?;
        }
        match self.gather {
            None if experts != 1 => Err(MatmulError::Experts { experts }),
            None => Plan::dense(x_rows),
            Some(gather) => Plan::gathered(&gather, x_rows, experts),
        }
    }
}

#[cfg(test)]
mod test_weights;
#[cfg(test)]
mod tests;
