//! A tensor as a checkpoint stores it: element type, shape and bytes, mapped from a file or owned.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::mapping::MappedFile;

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

    /// Bytes a tensor of this shape takes; `None` when they cannot be counted.
    pub fn bytes_of(self, shape: &[usize]) -> Option<usize> {
        shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size))?.checked_mul(self.size())
    }

    /// The type that a safetensors header calls `name`; `None` for types that MLX does not compute with.
    pub fn from_safetensors(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.safetensors_name() == name)
    }

    /// How a safetensors header spells the type.
    pub fn safetensors_name(self) -> &'static str {
        match self {
            Self::Bool => "BOOL",
            Self::U8 => "U8",
            Self::U16 => "U16",
            Self::U32 => "U32",
            Self::U64 => "U64",
            Self::I8 => "I8",
            Self::I16 => "I16",
            Self::I32 => "I32",
            Self::I64 => "I64",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::F32 => "F32",
        }
    }

    /// Every element type.
    pub const ALL: [Self; 12] = [
        Self::Bool,
        Self::U8,
        Self::U16,
        Self::U32,
        Self::U64,
        Self::I8,
        Self::I16,
        Self::I32,
        Self::I64,
        Self::F16,
        Self::BF16,
        Self::F32,
    ];
}

impl fmt::Display for ElementType {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str(self.safetensors_name())
    }
}

/// The bytes of a tensor, little-endian, row-major.
#[derive(Clone, Debug)]
pub enum TensorData {
    /// A range of a mapped file; nothing is read before it is touched.
    Mapped {
        /// The whole file.
        file: MappedFile,
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

impl TensorData {
    /// Gives the memory of a mapped tensor back; it is read again when it is used again. Owned bytes stay.
    pub fn release(&self) {
        if let Self::Mapped { file, range } = self {
            #[cfg(unix)]
            // SAFETY: the pages are those of a file that is only read here; dropping them loses nothing, and a
            // later access reads them anew. A failure leaves them resident.
            let _ = unsafe {
                file.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, range.start, range.len())
            };
            #[cfg(not(unix))]
            let _ = (file, range);
        }
    }
}
