//! Element types of arrays.

use mlx_sys as ffi;

use crate::checkpoint::tensor::ElementType;

/// Element type of an [`Array`](super::Array).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Dtype {
    /// Boolean, one byte.
    Bool = ffi::mlx_dtype__MLX_BOOL,
    /// Unsigned 8 bits.
    Uint8 = ffi::mlx_dtype__MLX_UINT8,
    /// Unsigned 16 bits.
    Uint16 = ffi::mlx_dtype__MLX_UINT16,
    /// Unsigned 32 bits.
    Uint32 = ffi::mlx_dtype__MLX_UINT32,
    /// Unsigned 64 bits.
    Uint64 = ffi::mlx_dtype__MLX_UINT64,
    /// Signed 8 bits.
    Int8 = ffi::mlx_dtype__MLX_INT8,
    /// Signed 16 bits.
    Int16 = ffi::mlx_dtype__MLX_INT16,
    /// Signed 32 bits.
    Int32 = ffi::mlx_dtype__MLX_INT32,
    /// Signed 64 bits.
    Int64 = ffi::mlx_dtype__MLX_INT64,
    /// IEEE half precision.
    Float16 = ffi::mlx_dtype__MLX_FLOAT16,
    /// IEEE single precision.
    Float32 = ffi::mlx_dtype__MLX_FLOAT32,
    /// IEEE double precision; CPU only.
    Float64 = ffi::mlx_dtype__MLX_FLOAT64,
    /// bfloat16.
    Bfloat16 = ffi::mlx_dtype__MLX_BFLOAT16,
    /// Two float32.
    Complex64 = ffi::mlx_dtype__MLX_COMPLEX64,
}

impl Dtype {
    pub(super) fn from_raw(raw: ffi::mlx_dtype) -> Self {
        use Dtype::*;
        const ALL: [Dtype; 14] = [
            Bool, Uint8, Uint16, Uint32, Uint64, Int8, Int16, Int32, Int64, Float16, Float32, Float64,
            Bfloat16, Complex64,
        ];
        ALL[raw as usize]
    }

    pub(super) fn raw(self) -> ffi::mlx_dtype {
        self as ffi::mlx_dtype
    }

    /// Whether the type is a real floating-point type.
    pub fn is_floating(self) -> bool {
        matches!(self, Self::Float16 | Self::Float32 | Self::Float64 | Self::Bfloat16)
    }

    /// Bytes an element takes.
    pub fn size(self) -> usize {
        match self {
            Self::Bool | Self::Uint8 | Self::Int8 => 1,
            Self::Uint16 | Self::Int16 | Self::Float16 | Self::Bfloat16 => 2,
            Self::Uint32 | Self::Int32 | Self::Float32 => 4,
            Self::Uint64 | Self::Int64 | Self::Float64 | Self::Complex64 => 8,
        }
    }

    /// The name `mlx.core` gives the type, as in `bfloat16`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bool => "bool",
            Self::Uint8 => "uint8",
            Self::Uint16 => "uint16",
            Self::Uint32 => "uint32",
            Self::Uint64 => "uint64",
            Self::Int8 => "int8",
            Self::Int16 => "int16",
            Self::Int32 => "int32",
            Self::Int64 => "int64",
            Self::Float16 => "float16",
            Self::Float32 => "float32",
            Self::Float64 => "float64",
            Self::Bfloat16 => "bfloat16",
            Self::Complex64 => "complex64",
        }
    }

    /// The most negative finite value (`mx.finfo(dtype).min`), exact in f32 for the types models use.
    pub fn finite_min(self) -> f32 {
        match self {
            Self::Float16 => f32::from(half::f16::MIN),
            Self::Bfloat16 => f32::from(half::bf16::MIN),
            _ => f32::MIN,
        }
    }
}

impl From<ElementType> for Dtype {
    fn from(stored: ElementType) -> Self {
        match stored {
            ElementType::Bool => Self::Bool,
            ElementType::U8 => Self::Uint8,
            ElementType::U16 => Self::Uint16,
            ElementType::U32 => Self::Uint32,
            ElementType::U64 => Self::Uint64,
            ElementType::I8 => Self::Int8,
            ElementType::I16 => Self::Int16,
            ElementType::I32 => Self::Int32,
            ElementType::I64 => Self::Int64,
            ElementType::F16 => Self::Float16,
            ElementType::BF16 => Self::Bfloat16,
            ElementType::F32 => Self::Float32,
        }
    }
}

impl Dtype {
    /// How a checkpoint file stores this type; `None` for types that files do not hold.
    pub fn stored(self) -> Option<ElementType> {
        Some(match self {
            Self::Bool => ElementType::Bool,
            Self::Uint8 => ElementType::U8,
            Self::Uint16 => ElementType::U16,
            Self::Uint32 => ElementType::U32,
            Self::Uint64 => ElementType::U64,
            Self::Int8 => ElementType::I8,
            Self::Int16 => ElementType::I16,
            Self::Int32 => ElementType::I32,
            Self::Int64 => ElementType::I64,
            Self::Float16 => ElementType::F16,
            Self::Bfloat16 => ElementType::BF16,
            Self::Float32 => ElementType::F32,
            Self::Float64 | Self::Complex64 => return None,
        })
    }
}
