//! Whose arithmetic: mlx-lm's bit for bit, or ours.

use super::Switch;

/// Flags that may change bits.
#[derive(Clone, Copy, Debug, clap::Args)]
#[command(next_help_heading = "Numerics")]
pub struct NumericsArgs {
    /// Compute bit for bit as mlx-lm does: only MLX's own kernels (slower on a Linux CPU)
    #[arg(long)]
    pub l1: bool,

    /// Fuse activation functions as mlx-lm does; `off` rounds between their parts
    #[arg(long, value_name = "ON|OFF", value_enum, default_value_t = Switch::On, hide_short_help = true)]
    pub compiled_activations: Switch,
}

/// Which arithmetic the engine uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numerics {
    /// Only MLX's own kernels.
    pub l1: bool,
    /// Activations as one compiled function each.
    pub compiled_activations: bool,
}

impl NumericsArgs {
    /// What was asked for.
    pub fn resolve(&self) -> Numerics {
        Numerics { l1: self.l1, compiled_activations: self.compiled_activations.is_on() }
    }
}
