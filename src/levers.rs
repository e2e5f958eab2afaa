//! The engine's levers: every setting that trades speed, memory or bits, in one table.
//!
//! A lever that changes what is computed needs evidence before it becomes a default: a paired comparison (`mlx-bun ab`)
//! that shows the gain, and a quality gate. The table says which flag and which variable set it, what it is without
//! them, what it does to the output, and where the evidence stands. Measuring verbs record the levers that are set.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::Serialize;

/// What a lever does to the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Effect {
    /// The same bits, sooner or in less memory.
    None,
    /// Other roundings of the same sums: the last bits of logits, and texts where two tokens are nearly equally likely.
    Rounding,
    /// Less precise arithmetic or a smaller memory: other logits.
    Approximation,
}

impl Effect {
    /// As tables show it.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Rounding => "rounding",
            Self::Approximation => "approximation",
        }
    }
}

/// A setting of the engine.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Lever {
    /// Its name: that of its flag without dashes, or of its variable.
    pub name: &'static str,
    /// The flag, with dashes.
    pub flag: Option<&'static str>,
    /// The variable that stands in for the flag.
    pub env: Option<&'static str>,
    /// Its values.
    pub values: &'static str,
    /// What it is when nothing is said.
    pub default: &'static str,
    /// What it does to the output, against the default.
    pub effect: Effect,
    /// Where its gain and its cost are measured.
    pub evidence: &'static str,
}

impl Lever {
    /// Whether the output may differ from that of the default.
    pub fn changes_output(&self) -> bool {
        self.effect != Effect::None
    }
}

/// The variable that slows down decode steps, for tests of the verbs that measure.
pub const STEP_DELAY: &str = "MLX_BUN_DEBUG_STEP_DELAY_MS";

/// All of them.
pub const LEVERS: &[Lever] = &[
    Lever {
        name: "l1",
        flag: Some("--l1"),
        env: None,
        values: "off, on",
        default: "off",
        effect: Effect::Rounding,
        evidence: "docs/performance.md, \"The starter model on a CPU\" and \"Against mlx-lm in float32\"",
    },
    Lever {
        name: "cpu-kernels",
        flag: Some("--cpu-kernels"),
        env: Some("MLX_BUN_CPU_KERNELS"),
        values: "on, off",
        default: "on",
        effect: Effect::Rounding,
        evidence: "docs/performance.md, \"Against mlx-lm in float32\"",
    },
    Lever {
        name: "cpu-precision",
        flag: Some("--cpu-precision"),
        env: Some("MLX_BUN_CPU_PRECISION"),
        values: "auto, exact, int16, int8",
        default: "auto",
        effect: Effect::Approximation,
        evidence: "docs/performance.md, \"What integer products change\"",
    },
    Lever {
        name: "cpu-isa",
        flag: None,
        env: Some("MLX_BUN_CPU_ISA"),
        values: "auto, plain, avx2, avx512, avx512-vnni, neon",
        default: "auto",
        effect: Effect::Rounding,
        evidence: "docs/performance.md, \"The starter model on a CPU\" (AVX2)",
    },
    Lever {
        name: "compiled-activations",
        flag: Some("--compiled-activations"),
        env: None,
        values: "on, off",
        default: "on with --l1 or a GPU, else off",
        effect: Effect::Rounding,
        evidence: "goldens: mlx-lm's bits with it, the last bit without",
    },
    Lever {
        name: "threads",
        flag: Some("--threads"),
        env: Some("MLX_BUN_THREADS"),
        values: "1 to 64",
        default: "the physical cores",
        effect: Effect::None,
        evidence: "tests of the kernels: the same bits with any number",
    },
    Lever {
        name: "kv-quant",
        flag: Some("--kv-quant"),
        env: None,
        values: "off, 4, 8",
        default: "off",
        effect: Effect::Approximation,
        evidence: "none here yet: `bench-matrix modes` for speed, `ab --gate kl<X` for its cost",
    },
    Lever {
        name: "kv-bits",
        flag: Some("--kv-bits"),
        env: None,
        values: "2, 3, 4, 5, 6, 8",
        default: "unpacked",
        effect: Effect::Approximation,
        evidence: "as kv-quant; mlx-lm's flag",
    },
    Lever {
        name: "kv-group-size",
        flag: Some("--kv-group-size"),
        env: None,
        values: "32, 64, 128",
        default: "64",
        effect: Effect::Approximation,
        evidence: "as kv-quant; mlx-lm's flag",
    },
    Lever {
        name: "quantized-kv-start",
        flag: Some("--quantized-kv-start"),
        env: None,
        values: "positions",
        default: "5000 with --kv-bits, 0 with --kv-quant",
        effect: Effect::Approximation,
        evidence: "as kv-quant; mlx-lm's flag",
    },
    Lever {
        name: "max-kv-size",
        flag: Some("--max-kv-size"),
        env: None,
        values: "positions",
        default: "unbounded",
        effect: Effect::Approximation,
        evidence: "bounds memory, not time; mlx-lm's flag",
    },
    Lever {
        name: "prefill-step-size",
        flag: Some("--prefill-step-size"),
        env: None,
        values: "tokens",
        default: "2048; 512 with our CPU kernels",
        effect: Effect::Rounding,
        evidence: "with our CPU kernels the same bits (tests of the scheduler); mlx-lm's flag",
    },
    Lever {
        name: "batch",
        flag: Some("--batch"),
        env: None,
        values: "1 to 256",
        default: "8",
        effect: Effect::Rounding,
        evidence: "with our CPU kernels the same bits (tests of the scheduler); docs/performance.md, \"The server\"",
    },
    Lever {
        name: "prompt-cache",
        flag: Some("--prompt-cache"),
        env: None,
        values: "GiB",
        default: "8",
        effect: Effect::Rounding,
        evidence: "with our CPU kernels the same bits (tests of the scheduler)",
    },
    Lever {
        name: "debug-step-delay",
        flag: None,
        env: Some(STEP_DELAY),
        values: "milliseconds",
        default: "0",
        effect: Effect::None,
        evidence: "for tests of the verbs that measure: sleeps at each decode step",
    },
];

static DELAY_MICROSECONDS: AtomicU64 = AtomicU64::new(0);

/// Lets every decode step of this process take so much longer, so that verbs that measure can be shown to notice.
pub fn set_step_delay(delay: Duration) {
    let micros = u64::try_from(delay.as_micros()).unwrap_or(u64::MAX);
    DELAY_MICROSECONDS.store(micros, Ordering::Relaxed);
}

/// Sleeps as long as [`set_step_delay`] said.
pub(crate) fn delay_step() {
    let micros = DELAY_MICROSECONDS.load(Ordering::Relaxed);
    if micros > 0 {
        std::thread::sleep(Duration::from_micros(micros));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_every_lever_can_be_set() {
        let mut names: Vec<_> = LEVERS.iter().map(|lever| lever.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), LEVERS.len());
        for lever in LEVERS {
            assert!(lever.flag.is_some() || lever.env.is_some(), "{}", lever.name);
            assert!(!lever.evidence.is_empty(), "{}", lever.name);
            if let Some(flag) = lever.flag {
                assert_eq!(flag.strip_prefix("--"), Some(lever.name));
            }
        }
    }
}
