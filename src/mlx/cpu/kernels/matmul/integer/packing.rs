//! How rounded activations lie in memory.

use super::super::{MatmulError, Matrix, Precision};
use super::Set;
use crate::coding::QuantParams;

/// Words of a row of weights that fill a cache line: a line.
pub(super) const LINE: usize = 16;

/// How many signed bytes an activation becomes. Two are the digits of a 16-bit number in base 256, the high one first,
/// each from -128 to 127: so both modes multiply bytes with bytes, and the sums of the high digits are shifted before
/// those of the low ones are added to them.
pub(in super::super) trait Mode: Copy + Send + Sync + 'static {
    /// The largest magnitude of a rounded activation.
    const LIMIT: f32;
    /// Digits of an activation.
    const PLANES: usize;
}

/// One digit.
#[derive(Clone, Copy)]
pub(in super::super) struct Int8;

impl Mode for Int8 {
    const LIMIT: f32 = 127.0;
    const PLANES: usize = 1;
}

/// Two digits: 127 · 256 + 127 is the largest number that they can write.
#[derive(Clone, Copy)]
pub(in super::super) struct Int16;

impl Mode for Int16 {
    const LIMIT: f32 = 32639.0;
    const PLANES: usize = 2;
}

/// How weights are packed, how long their rows are, and what multiplies them.
///
/// Lines of activations follow those of the weights, `[lines, planes, parts, 16]` words of 4 bytes: lane `i` of a part
/// holds the activations that meet the levels in lane `i` of the unpacked line. The last line may be longer than the row.
#[derive(Clone, Copy)]
pub(in super::super) struct Packing {
    pub set: Set,
    pub inputs: usize,
    pub group: usize,
    pub bits: usize,
}

impl Packing {
    pub(super) fn new(set: Set, matrix: &Matrix<'_>) -> Result<Self, MatmulError> {
        let quantization = matrix.quantization().ok_or(MatmulError::ScaleType)?;
        Ok(Self::of(set, quantization, matrix.columns))
    }

    pub(in super::super) fn of(set: Set, quantization: QuantParams, inputs: usize) -> Self {
        let (bits, group) = (usize::from(quantization.bits), quantization.group_size as usize);
        Self { set, inputs, group, bits }
    }

    /// Lines of a row, the last of which may be partly empty.
    #[inline(always)]
    pub(super) fn lines(self) -> usize {
        self.row_words().div_ceil(LINE)
    }

    /// Words of a row of weights.
    #[inline(always)]
    pub(super) fn row_words(self) -> usize {
        self.inputs * self.bits / 32
    }

    /// Words that a rounded row takes.
    #[inline(always)]
    pub(super) fn rounded_words<M: Mode>(self) -> usize {
        let vectors = match (self.set, self.bits) {
            (Set::Vnni, 8) => M::PLANES,
            (Set::Avx2, 8) => 2,
            _ => 2 * M::PLANES,
        };
        self.lines() * vectors * LINE
    }

    /// f32 of memory that a row takes when it is rounded.
    pub(in super::super) fn row_size(self, precision: Precision) -> usize {
        match precision {
            Precision::Int8 => self.rounded_words::<Int8>(),
            _ => self.rounded_words::<Int16>(),
        }
    }
}

/// Where rounded rows of x lie.
#[derive(Clone, Copy)]
pub(in super::super) struct Rounded {
    /// Digits, as [`Packing`] has them.
    pub values: *mut u8,
    /// `[rows, groups]`: the scale.
    pub scales: *mut f32,
    /// `[rows, groups]`: the scale times the sum of the rounded values.
    pub sums: *mut f32,
}
