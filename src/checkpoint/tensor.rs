//! A tensor as a checkpoint stores it: element type, shape and bytes, mapped from a file or owned.

use std::ops::Range;
use std::sync::Arc;

use memmap2::Mmap;

/// Element types that checkpoints store and MLX can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// One byte, 0 or 1.
    Bool,
    /// Unsigned 8 bits.
    U8,
    /// Unsigned 16 bits.
    U16,
    /// Unsigned 32 bits; packed quantized weights.
    U32,
    /// Unsigned 64 bits.
    U64,
    /// Signed 8 bits.
    I8,
    /// Signed 16 bits.
    I16,
    /// Signed 32 bits.
    I32,
    /// Signed 64 bits.
    I64,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    BF16,
    /// IEEE single precision.
    F32,
}

impl ElementType {
    /// Bytes an element takes.
    pub fn size(self) -> usize {
        match self {
            Self::Bool | Self::U8 | Self::I8 => 1,
            Self::U16 | Self::I16 | Self::F16 | Self::BF16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 => 8,
        }
    }
}

/// The bytes of a tensor, little-endian, row-major.
#[derive(Clone, Debug)]
pub enum TensorData {
    /// A range of a mapped file; nothing is read before it is touched.
    Mapped {
        /// The whole file.
        file: Arc<Mmap>,
        /// Where the tensor lies in it. Whoever builds this has checked it against the file's length.
        range: Range<usize>,
    },
    /// Bytes made in memory (dequantized or repacked).
    Owned(Arc<Vec<u8>>),
}

/// One stored tensor. Invariant: `bytes().len()` is the shape's product times the element size.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Element type.
    pub dtype: ElementType,
    /// Dimensions, outermost first; empty for a scalar.
    pub shape: Vec<usize>,
    /// The bytes.
    pub data: TensorData,
}

impl Tensor {
    /// The raw bytes, little-endian, row-major.
    pub fn bytes(&self) -> &[u8] {
        match &self.data {
            TensorData::Mapped { file, range } => &file[range.clone()],
            TensorData::Owned(bytes) => bytes,
        }
    }
}
