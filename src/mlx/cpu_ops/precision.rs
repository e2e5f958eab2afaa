//! How products with weights are computed.
//!
//! A mode holds for all of a generation. So a row's bits depend neither on how many rows share a call, nor on whether it
//! comes with a prompt, with a draft model's proposals, with other requests or alone.

use std::fmt;
use std::str::FromStr;

use crate::mlx::cpu::kernels::matmul::Precision;

/// Arithmetic of products with quantized weights. The integer modes need affine weights of 4 or 8 bits and a processor
/// with AVX2 or AVX-512 with VNNI, which give the same bits; elsewhere everything is exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CpuPrecision {
    /// What measures as good as exact: [`AUTO`].
    #[default]
    Auto,
    /// f32 arithmetic on dequantized weights.
    Exact,
    /// Activations rounded to 16 bits with a scale for each group of weights.
    Int16,
    /// Activations rounded to 8 bits with a scale for each group of weights.
    Int8,
}

/// What [`CpuPrecision::Auto`] stands for.
pub const AUTO: CpuPrecision = CpuPrecision::Int16;

impl CpuPrecision {
    /// All, with the names that settings use.
    pub const ALL: [(Self, &'static str); 4] =
        [(Self::Auto, "auto"), (Self::Exact, "exact"), (Self::Int16, "int16"), (Self::Int8, "int8")];

    /// The name that settings use.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(mode, _)| *mode == self).map_or("auto", |(_, name)| name)
    }

    /// What kernels are asked for.
    pub(super) fn of_kernels(self) -> Precision {
        let mode = if self == Self::Auto { AUTO } else { self };
        match mode {
            Self::Int16 => Precision::Int16,
            Self::Int8 => Precision::Int8,
            Self::Exact | Self::Auto => Precision::Exact,
        }
    }
}

impl fmt::Display for CpuPrecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is none of [`CpuPrecision::ALL`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no CPU precision; use auto, exact, int16 or int8")]
pub struct PrecisionError(String);

impl FromStr for CpuPrecision {
    type Err = PrecisionError;

    fn from_str(name: &str) -> Result<Self, PrecisionError> {
        let found = Self::ALL.iter().find(|(_, known)| *known == name);
        found.map(|(mode, _)| *mode).ok_or_else(|| PrecisionError(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_ask_kernels_for_what_they_are_called() {
        assert_eq!(CpuPrecision::Exact.of_kernels(), Precision::Exact);
        assert_eq!(CpuPrecision::Int16.of_kernels(), Precision::Int16);
        assert_eq!(CpuPrecision::Int8.of_kernels(), Precision::Int8);
        assert_eq!(CpuPrecision::Auto.of_kernels(), AUTO.of_kernels());
    }

    #[test]
    fn names_are_read_back() {
        for (mode, name) in CpuPrecision::ALL {
            assert_eq!((name.parse(), mode.to_string().as_str()), (Ok(mode), name));
        }
        let error = "fp8".parse::<CpuPrecision>().unwrap_err();
        assert_eq!(error.to_string(), "`fp8` is no CPU precision; use auto, exact, int16 or int8");
    }
}
