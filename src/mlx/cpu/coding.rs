//! How numbers of a few bits stand for real ones, and how they are packed.

use std::fmt;

/// Packed weights are rows of 32-bit words.
pub const WORD_BITS: usize = 32;

/// How quantized numbers stand for real ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QuantMode {
    /// Unsigned integers with a scale and a bias a group.
    Affine,
    /// 4-bit floats with a shared power-of-two exponent a group of 32.
    Mxfp4,
    /// 4-bit floats with an 8-bit float scale a group of 16.
    Nvfp4,
    /// 8-bit floats with a shared power-of-two exponent a group of 32.
    Mxfp8,
}

impl QuantMode {
    const ALL: [Self; 4] = [Self::Affine, Self::Mxfp4, Self::Nvfp4, Self::Mxfp8];

    /// The name in config files and in MLX's calls.
    pub fn name(self) -> &'static str {
        match self {
            Self::Affine => "affine",
            Self::Mxfp4 => "mxfp4",
            Self::Nvfp4 => "nvfp4",
            Self::Mxfp8 => "mxfp8",
        }
    }

    /// The mode of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.name() == name)
    }

    /// Bits and group size when none are given (MLX `nn/layers/quantized.py`, `_defaults_for_mode`).
    pub fn defaults(self) -> QuantParams {
        let (bits, group_size) = match self {
            Self::Affine => (4, 64),
            Self::Mxfp4 => (4, 32),
            Self::Nvfp4 => (4, 16),
            Self::Mxfp8 => (8, 32),
        };
        QuantParams { bits, group_size, mode: self }
    }

    /// Whether a group has a bias beside its scale.
    pub fn has_biases(self) -> bool {
        self == Self::Affine
    }
}

impl fmt::Display for QuantMode {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// How one weight is quantized; a pair of sizes that MLX has kernels for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuantParams {
    /// Bits a number.
    pub bits: u8,
    /// Numbers that share a scale.
    pub group_size: u32,
    /// What the numbers mean.
    pub mode: QuantMode,
}

impl QuantParams {
    /// Checked parameters.
    ///
    /// # Errors
    /// When the mode does not go with these sizes.
    pub fn new(mode: QuantMode, bits: u64, group_size: u64) -> Result<Self, NoSuchCoding> {
        let fits = match mode {
            QuantMode::Affine => matches!(bits, 2 | 3 | 4 | 5 | 6 | 8) && matches!(group_size, 32 | 64 | 128),
            _ => {
                let only = mode.defaults();
                bits == u64::from(only.bits) && group_size == u64::from(only.group_size)
            }
        };
        match (u8::try_from(bits), u32::try_from(group_size)) {
            (Ok(bits), Ok(group_size)) if fits => Ok(Self { bits, group_size, mode }),
            _ => Err(NoSuchCoding { mode, bits, group_size }),
        }
    }

    /// 32-bit words that a row of `columns` numbers is packed into; `None` when it does not fill them.
    pub fn packed_columns(&self, columns: usize) -> Option<usize> {
        let bits = columns.checked_mul(usize::from(self.bits))?;
        bits.is_multiple_of(WORD_BITS).then_some(bits / WORD_BITS)
    }

    /// Groups in a row of `columns` numbers; `None` when the last would not be full.
    pub fn groups(&self, columns: usize) -> Option<usize> {
        let size = self.group_size as usize;
        columns.is_multiple_of(size).then_some(columns / size)
    }
}

impl fmt::Display for QuantParams {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        write!(formatter, "{} {}-bit in groups of {}", self.mode, self.bits, self.group_size)
    }
}

/// Bits and group size that no kernel exists for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{mode} quantization with {bits} bits in groups of {group_size} does not exist; {}",
    allowed_sizes(*mode)
)]
pub struct NoSuchCoding {
    /// The mode.
    pub mode: QuantMode,
    /// Bits a number.
    pub bits: u64,
    /// Numbers a group.
    pub group_size: u64,
}

fn allowed_sizes(mode: QuantMode) -> String {
    match mode {
        QuantMode::Affine => "it takes 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128".to_owned(),
        _ => {
            let QuantParams { bits, group_size, .. } = mode.defaults();
            format!("it takes {bits} bits in groups of {group_size}")
        }
    }
}
