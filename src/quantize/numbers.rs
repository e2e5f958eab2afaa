//! Floating-point tensors as bytes: reading, rounding and casting them as MLX does.

use half::slice::HalfFloatSliceExt;
use half::vec::HalfFloatVecExt;
use half::{bf16, f16};

use crate::checkpoint::ElementType;

/// A floating-point type of tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FloatType {
    /// IEEE half precision.
    Float16,
    /// bfloat16.
    Bfloat16,
    /// IEEE single precision.
    Float32,
}

impl FloatType {
    /// Every one.
    pub const ALL: [Self; 3] = [Self::Float16, Self::Bfloat16, Self::Float32];

    /// The type of stored elements; `None` when they are no floats.
    pub fn of(dtype: ElementType) -> Option<Self> {
        match dtype {
            ElementType::F16 => Some(Self::Float16),
            ElementType::BF16 => Some(Self::Bfloat16),
            ElementType::F32 => Some(Self::Float32),
            _ => None,
        }
    }

    /// As the checkpoint stores it.
    pub fn element(self) -> ElementType {
        match self {
            Self::Float16 => ElementType::F16,
            Self::Bfloat16 => ElementType::BF16,
            Self::Float32 => ElementType::F32,
        }
    }

    /// The name in configs and in mlx.
    pub fn name(self) -> &'static str {
        match self {
            Self::Float16 => "float16",
            Self::Bfloat16 => "bfloat16",
            Self::Float32 => "float32",
        }
    }

    /// The type of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Rounds to the nearest value of the type, ties to even.
    #[inline(always)]
    pub(super) fn round(self, value: f32) -> f32 {
        match self {
            Self::Float16 => f16::from_f32(value).to_f32(),
            Self::Bfloat16 => bf16::from_f32(value).to_f32(),
            Self::Float32 => value,
        }
    }

    /// The values that little-endian bytes stand for.
    pub fn decode(self, bytes: &[u8]) -> Vec<f32> {
        let mut values = vec![0.0; bytes.len() / self.element().size()];
        self.decode_into(bytes, &mut values);
        values
    }

    /// [`FloatType::decode`] into a slice of as many values.
    pub(super) fn decode_into(self, bytes: &[u8], values: &mut [f32]) {
        match self {
            Self::Float16 => {
                let halves: Vec<f16> =
                    bytes.as_chunks::<2>().0.iter().map(|bytes| f16::from_le_bytes(*bytes)).collect();
                let count = halves.len().min(values.len());
                halves[..count].convert_to_f32_slice(&mut values[..count]);
            }
            Self::Bfloat16 => {
                for (bytes, value) in bytes.as_chunks::<2>().0.iter().zip(values) {
                    *value = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
                }
            }
            Self::Float32 => {
                for (bytes, value) in bytes.as_chunks::<4>().0.iter().zip(values) {
                    *value = f32::from_le_bytes(*bytes);
                }
            }
        }
    }

    /// Little-endian bytes of the values, each rounded to nearest, ties to even.
    pub fn encode(self, values: &[f32]) -> Vec<u8> {
        match self {
            Self::Float16 => {
                Vec::<f16>::from_f32_slice(values).iter().flat_map(|value| value.to_le_bytes()).collect()
            }
            Self::Bfloat16 => values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect(),
            Self::Float32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        }
    }

    /// Writes one value at element `index` of `bytes`.
    pub(super) fn put(self, value: f32, bytes: &mut [u8], index: usize) {
        let size = self.element().size();
        let Some(place) = bytes.get_mut(index * size..(index + 1) * size) else { return };
        match self {
            Self::Float16 => place.copy_from_slice(&f16::from_f32(value).to_le_bytes()),
            Self::Bfloat16 => place.copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
            Self::Float32 => place.copy_from_slice(&value.to_le_bytes()),
        }
    }

    /// Whether every value is a number: neither NaN nor infinite.
    pub fn all_finite(self, bytes: &[u8]) -> bool {
        let any16 = |exponent: u16| {
            let halves = bytes.as_chunks::<2>().0;
            halves.iter().fold(false, |any, bytes| any | (u16::from_le_bytes(*bytes) & exponent == exponent))
        };
        !match self {
            Self::Float16 => any16(0x7c00),
            Self::Bfloat16 => any16(0x7f80),
            Self::Float32 => bytes
                .as_chunks::<4>()
                .0
                .iter()
                .fold(false, |any, bytes| any | (u32::from_le_bytes(*bytes) & 0x7f80_0000 == 0x7f80_0000)),
        }
    }

    /// Casts bytes of this type to another, as `astype` does.
    pub fn cast(self, bytes: &[u8], to: Self) -> Vec<u8> {
        if self == to { bytes.to_vec() } else { to.encode(&self.decode(bytes)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn casts_round_to_nearest_even_and_keep_what_is_exact() {
        let values = [0.0f32, -0.0, 1.0, 1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, 65504.0, 1e-7, -3.5];
        let single = FloatType::Float32.encode(&values);
        let decoded = |kind: FloatType| kind.decode(&FloatType::Float32.cast(&single, kind));
        assert_eq!(decoded(FloatType::Bfloat16)[3..5], [1.0, 1.015_625]);
        assert_eq!(decoded(FloatType::Float16)[5..], [65504.0, 1.192_092_9e-7, -3.5]);
        for kind in FloatType::ALL {
            let bytes = FloatType::Float32.cast(&single, kind);
            assert_eq!(kind.encode(&kind.decode(&bytes)), bytes);
            let mut put = vec![0; bytes.len()];
            for (index, value) in values.iter().enumerate() {
                kind.put(*value, &mut put, index);
            }
            assert_eq!(put, bytes);
        }
    }

    #[test]
    fn nan_and_infinity_are_seen() {
        for kind in FloatType::ALL {
            assert!(kind.all_finite(&kind.encode(&[0.0, -1.0, 60000.0])));
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                assert!(!kind.all_finite(&kind.encode(&[0.0, bad])));
            }
        }
    }
}
