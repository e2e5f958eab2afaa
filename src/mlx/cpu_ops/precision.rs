//! How products with weights are computed, and in which phase of a generation.
//!
//! Bits of a row must not depend on how many rows share a call, or a draft model's proposals, a batch and a lone
//! request would disagree. So a mode that differs between prefill and decode is chosen by what the caller is doing
//! ([`in_prefill`]), never by the number of rows: checking eight proposed tokens at once, or decoding eight requests
//! together, is decode and computes as one token does; a prompt's chunks are prefill, whatever their lengths. The
//! prompt's last token, whose logits the first draw comes from, is fed in decode.

use std::cell::Cell;
use std::fmt;
use std::str::FromStr;

use crate::mlx::cpu::kernels::matmul::Precision;

/// Arithmetic of products with quantized weights. The integer modes need affine weights of 4 or 8 bits and a processor
/// with VNNI; elsewhere everything is exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CpuPrecision {
    /// What measures as good as exact: [`AUTO`].
    #[default]
    Auto,
    /// f32 arithmetic on dequantized weights.
    Exact,
    /// In prefill, activations rounded to 16 bits with a scale for each group of weights; exact in decode.
    Int16,
    /// In prefill, activations rounded to 8 bits with a scale for each group of weights; exact in decode, which is as
    /// fast: there the weights' way from memory is what takes time.
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

    /// What a product made now by this thread uses.
    pub(super) fn now(self) -> Precision {
        let mode = if self == Self::Auto { AUTO } else { self };
        match mode {
            Self::Int16 if PHASE.get() != Phase::Decode => Precision::Int16,
            Self::Int8 if PHASE.get() != Phase::Decode => Precision::Int8,
            _ => Precision::Exact,
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Prefill of which only what it leaves in the caches is used.
    Filling,
    Prefill,
    Decode,
}

thread_local! {
    static PHASE: Cell<Phase> = const { Cell::new(Phase::Decode) };
}

/// Runs `work`, in which this thread builds the graph of a prompt's chunk. Everything else is decode.
pub fn in_prefill<R>(work: impl FnOnce() -> R) -> R {
    in_phase(Phase::Prefill, work)
}

/// As [`in_prefill`], for a chunk whose logits nobody will ask for: where they would come from is not computed either.
pub fn filling_caches<R>(work: impl FnOnce() -> R) -> R {
    in_phase(Phase::Filling, work)
}

/// Whether a graph made now by this thread only fills caches.
pub(super) fn only_fills_caches() -> bool {
    PHASE.get() == Phase::Filling
}

fn in_phase<R>(phase: Phase, work: impl FnOnce() -> R) -> R {
    struct Restore(Phase);
    impl Drop for Restore {
        fn drop(&mut self) {
            PHASE.set(self.0);
        }
    }
    let _restore = Restore(PHASE.replace(phase));
    work()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_for_prefill() {
        let modes = |precision: CpuPrecision| {
            let prefill = in_prefill(|| precision.now());
            assert_eq!(filling_caches(|| precision.now()), prefill);
            (precision.now(), prefill)
        };
        assert_eq!(modes(CpuPrecision::Exact), (Precision::Exact, Precision::Exact));
        assert_eq!(modes(CpuPrecision::Int16), (Precision::Exact, Precision::Int16));
        assert_eq!(modes(CpuPrecision::Int8), (Precision::Exact, Precision::Int8));
        assert_eq!(modes(CpuPrecision::Auto), modes(AUTO));
    }

    #[test]
    fn a_panic_in_prefill_leaves_no_phase_behind() {
        let _ = std::panic::catch_unwind(|| in_prefill(|| panic!("stop")));
        assert_eq!(CpuPrecision::Int16.now(), Precision::Exact);
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
