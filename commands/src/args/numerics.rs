//! Whose arithmetic: mlx-lm's bit for bit, or ours.

use mlx_bun::mlx::cpu_ops::CpuPrecision;

use super::{Switch, Warnings, range};
use crate::env;

/// Flags that may change bits, and the threads.
#[derive(Clone, Copy, Debug, clap::Args)]
#[command(next_help_heading = "Numerics")]
pub struct NumericsArgs {
    #[command(flatten)]
    pub levers: LeverArgs,

    #[arg(long, value_name = "N", help = range::THREADS.help("Threads of our CPU kernels [default: the physical cores]"), value_parser = range::THREADS.parser(), env = env::MLX_BUN_THREADS, hide_env = true, hide_short_help = true)]
    pub threads: Option<usize>,
}

/// Flags that may change bits.
#[derive(Clone, Copy, Debug, clap::Args)]
#[command(next_help_heading = "Numerics")]
pub struct LeverArgs {
    /// Compute bit for bit as mlx-lm does: only MLX's own kernels (slower on a Linux CPU)
    #[arg(long)]
    pub l1: bool,

    /// Fuse activation functions as mlx-lm does [default: on with --l1 or a GPU]
    ///
    /// `off` rounds between their parts. On a Linux CPU, fusing runs g++ the first time. Our CPU kernels have their
    /// own, which round once.
    #[arg(long, value_name = "ON|OFF", value_enum, hide_short_help = true)]
    pub compiled_activations: Option<Switch>,

    /// Use our own kernels on a CPU; `off` leaves all arithmetic to MLX, as --l1 does [default: on]
    #[arg(long, value_name = "ON|OFF", value_enum, env = env::MLX_BUN_CPU_KERNELS, hide_env = true, hide_short_help = true)]
    pub cpu_kernels: Option<Switch>,

    /// Arithmetic of our CPU kernels' products with quantized weights
    ///
    /// `exact` computes in float32. `int16` rounds activations to 16 bits, which is faster and changes next to nothing.
    /// `int8` rounds them to 8 bits, which is fastest and changes replies. `auto` is what measures as good as exact.
    /// The integer modes need weights of 4 or 8 bits and a processor with AVX-512 VNNI, or AVX2 and no AVX-512; the
    /// rest stays exact.
    /// [default: auto]
    #[arg(long, value_name = "MODE", value_enum, env = env::MLX_BUN_CPU_PRECISION, hide_env = true, hide_short_help = true)]
    pub cpu_precision: Option<Precision>,
}

/// `--cpu-precision`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Precision {
    /// What measures as good as exact
    Auto,
    /// Float32
    Exact,
    /// 16-bit activations
    Int16,
    /// 8-bit activations
    Int8,
}

impl From<Precision> for CpuPrecision {
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::Auto => Self::Auto,
            Precision::Exact => Self::Exact,
            Precision::Int16 => Self::Int16,
            Precision::Int8 => Self::Int8,
        }
    }
}

/// Which arithmetic the engine uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numerics {
    /// Only MLX's own kernels.
    pub l1: bool,
    /// Activations as one compiled function each; `None` where mlx-lm's bits are asked for or come for free.
    pub compiled_activations: Option<bool>,
    /// Our own kernels on a CPU.
    pub cpu_kernels: bool,
    /// Arithmetic of their products with quantized weights.
    pub cpu_precision: CpuPrecision,
    /// Their threads; `None` for the physical cores.
    pub threads: Option<usize>,
}

impl NumericsArgs {
    /// What was asked for; flags without an effect become warnings.
    pub fn resolve(&self, warnings: &mut Warnings) -> Numerics {
        self.levers.resolve(self.threads, warnings)
    }
}

impl LeverArgs {
    /// What was asked for, with so many threads; flags without an effect become warnings.
    pub fn resolve(&self, threads: Option<usize>, warnings: &mut Warnings) -> Numerics {
        let cpu_kernels = self.cpu_kernels.is_none_or(Switch::is_on);
        let without = match (self.l1, cpu_kernels) {
            (true, _) => Some("--l1"),
            (false, false) => Some("--cpu-kernels off"),
            (false, true) => None,
        };
        if let Some(without) = without {
            let flags = [
                ("--cpu-kernels on", self.cpu_kernels == Some(Switch::On)),
                ("--cpu-precision", self.cpu_precision.is_some()),
                ("--threads", threads.is_some()),
            ];
            for (flag, _) in flags.iter().filter(|(_, given)| *given) {
                warnings.push(format!("`{flag}` does nothing with `{without}`"));
            }
        }
        Numerics {
            l1: self.l1,
            compiled_activations: self.compiled_activations.map(Switch::is_on),
            cpu_kernels: cpu_kernels && !self.l1,
            cpu_precision: self.cpu_precision.unwrap_or(Precision::Auto).into(),
            threads,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(clap::Parser)]
    struct Probe {
        #[command(flatten)]
        args: NumericsArgs,
    }

    #[test]
    fn flags_of_kernels_that_are_not_used_are_pointed_out() {
        let warnings = |flags: &str| {
            let mut warnings = Vec::new();
            Probe::parse_from(format!("x {flags}").split_whitespace()).args.resolve(&mut warnings);
            warnings
        };
        assert!(warnings("").is_empty());
        assert!(warnings("--cpu-precision int8 --threads 1").is_empty());
        assert!(warnings("--l1 --cpu-kernels off").is_empty());
        assert_eq!(
            warnings("--l1 --cpu-kernels on --cpu-precision int8"),
            ["`--cpu-kernels on` does nothing with `--l1`", "`--cpu-precision` does nothing with `--l1`"]
        );
        assert_eq!(
            warnings("--cpu-kernels off --threads 2"),
            ["`--threads` does nothing with `--cpu-kernels off`"]
        );
    }
}
