//! Which vector instructions the kernels may use: found out once at run time, or forced lower.

use std::fmt;

/// A set of vector instructions that kernels are written for. A later level of the same processor family
/// includes the earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Plain Rust, whatever the compiler makes of it.
    Plain,
    /// 128-bit vectors of 64-bit Arm.
    Neon,
    /// AVX2 with FMA, F16C and BMI2: x86-64 of 2013 and later.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AVX-512 with VNNI's 8- and 16-bit dot products.
    Avx512Vnni,
}

impl Level {
    /// All levels, lowest first.
    pub const ALL: [Self; 5] = [Self::Plain, Self::Neon, Self::Avx2, Self::Avx512, Self::Avx512Vnni];

    /// The name that settings use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Neon => "neon",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Vnni => "avx512-vnni",
        }
    }

    fn is_present(self) -> bool {
        match self {
            Self::Plain => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
                    && is_x86_feature_detected!("bmi2")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_present()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => Self::Avx512.is_present() && is_x86_feature_detected!("avx512vnni"),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            _ => false,
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A setting that this processor cannot follow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IsaError {
    /// The name is none of [`Level::ALL`].
    #[error("`{name}` is no instruction set; use auto, {}", known())]
    Unknown {
        /// What was asked for.
        name: String,
    },
    /// The processor lacks the instructions.
    #[error("this processor has no {asked}; the best it has is {best}")]
    Absent {
        /// What was asked for.
        asked: Level,
        /// What [`Isa::detect`] finds.
        best: Level,
    },
}

fn known() -> String {
    Level::ALL.map(Level::name).join(", ")
}

/// Instructions that the processor has, verified: a value of this type is the licence to execute them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Isa {
    level: Level,
    bf16: bool,
}

impl Isa {
    /// Plain Rust only.
    pub const PLAIN: Self = Self { level: Level::Plain, bf16: false };

    /// The best this processor has.
    pub fn detect() -> Self {
        let level = Level::ALL.into_iter().rev().find(|level| level.is_present()).unwrap_or(Level::Plain);
        Self::at(level)
    }

    /// Every level this processor has, lowest first.
    pub fn available() -> Vec<Self> {
        Level::ALL.into_iter().filter(|level| level.is_present()).map(Self::at).collect()
    }

    /// One level, if the processor has it.
    pub fn forced(level: Level) -> Result<Self, IsaError> {
        if level.is_present() {
            Ok(Self::at(level))
        } else {
            Err(IsaError::Absent { asked: level, best: Self::detect().level })
        }
    }

    /// What a setting such as `MLX_BUN_CPU_ISA` asks for: `None`, the empty string and `auto` mean the best; case does
    /// not matter.
    pub fn from_setting(setting: Option<&str>) -> Result<Self, IsaError> {
        match setting.map(str::trim) {
            None | Some("") => Ok(Self::detect()),
            Some(name) if name.eq_ignore_ascii_case("auto") => Ok(Self::detect()),
            Some(name) => Level::ALL
                .into_iter()
                .find(|level| level.name().eq_ignore_ascii_case(name))
                .ok_or_else(|| IsaError::Unknown { name: name.to_owned() })
                .and_then(Self::forced),
        }
    }

    fn at(level: Level) -> Self {
        Self { level, bf16: level >= Level::Avx512 && has_bf16() }
    }

    /// The level that kernels choose by.
    pub fn level(self) -> Level {
        self.level
    }

    /// Whether AVX-512's bfloat16 instructions may be used.
    pub fn has_bf16(self) -> bool {
        self.bf16
    }
}

#[cfg(target_arch = "x86_64")]
fn has_bf16() -> bool {
    is_x86_feature_detected!("avx512bf16")
}

#[cfg(not(target_arch = "x86_64"))]
fn has_bf16() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_is_the_best_available() {
        let best = Isa::available().last().copied().unwrap();
        for setting in [None, Some(""), Some("auto"), Some(" auto "), Some("AUTO")] {
            assert_eq!(Isa::from_setting(setting), Ok(best));
        }
        assert_eq!(Isa::detect(), best);
    }

    #[test]
    fn every_available_level_can_be_forced_by_name() {
        for isa in Isa::available() {
            let name = isa.level().name();
            assert_eq!(Isa::from_setting(Some(name)), Ok(isa));
            assert_eq!(Isa::from_setting(Some(&name.to_uppercase())), Ok(isa));
        }
        assert_eq!(Isa::from_setting(Some("plain")), Ok(Isa::PLAIN));
    }

    #[test]
    fn a_level_that_is_absent_or_unknown_is_refused() {
        let absent = if cfg!(target_arch = "x86_64") { Level::Neon } else { Level::Avx2 };
        assert!(
            matches!(Isa::from_setting(Some(absent.name())), Err(IsaError::Absent { asked, .. }) if asked == absent)
        );
        let error = Isa::from_setting(Some("sse9")).unwrap_err();
        assert_eq!(
            error.to_string(),
            "`sse9` is no instruction set; use auto, plain, neon, avx2, avx512, avx512-vnni"
        );
    }
}
