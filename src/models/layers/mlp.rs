//! The gated feed-forward layer.

use super::Linear;
use crate::mlx::cpu_ops::{self, Activation, Kernels};
use crate::mlx::{Array, Result};
use crate::models::activations::{gelu_approx, swiglu};
use crate::models::loader::{LoadError, Loader};

/// What the gate goes through before it multiplies `up_proj`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// `silu(gate) * up`, one compiled function.
    SwiGlu,
    /// `gelu_approx(gate) * up`; only the activation is compiled.
    GeGlu,
}

impl Gate {
    /// The function that `gate` goes through.
    pub fn activation(self) -> Activation {
        match self {
            Self::SwiGlu => Activation::Silu,
            Self::GeGlu => Activation::GeluTanh,
        }
    }
}

/// The shape of a feed-forward layer.
#[derive(Clone, Copy, Debug)]
pub struct GatedMlpArgs {
    /// Features in and out.
    pub hidden_size: i32,
    /// Features between.
    pub intermediate_size: i32,
    /// Whether the three projections have biases.
    pub bias: bool,
    /// The activation.
    pub gate: Gate,
}

/// `down_proj(activation(gate_proj(x)) * up_proj(x))`.
#[derive(Clone)]
pub struct GatedMlp {
    pub(crate) gate_proj: Linear,
    pub(crate) up_proj: Linear,
    pub(crate) down_proj: Linear,
    pub(crate) gate: Gate,
    /// Our own activation, where it is used.
    kernels: Option<Kernels>,
}

impl GatedMlp {
    /// Takes the layer's tensors below `path`.
    pub fn load(args: GatedMlpArgs, loader: &mut Loader, path: &str) -> std::result::Result<Self, LoadError> {
        let (dim, hidden_dim, bias) = (args.hidden_size, args.intermediate_size, args.bias);
        Ok(Self {
            gate_proj: loader.linear(&format!("{path}.gate_proj"), dim, hidden_dim, bias)?,
            down_proj: loader.linear(&format!("{path}.down_proj"), hidden_dim, dim, bias)?,
            up_proj: loader.linear(&format!("{path}.up_proj"), dim, hidden_dim, bias)?,
            gate: args.gate,
            kernels: cpu_ops::kernels(),
        })
    }

    /// `[…, hidden_size]` to the same.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        let out = self.down_proj.forward(&self.gated(x)?)?;
        if out.ndim() == x.ndim() { Ok(out) } else { out.reshape(x.shape()) }
    }

    /// What `down_proj` takes for `x`, `[…, intermediate_size]` or that many rows.
    pub(crate) fn gated(&self, x: &Array) -> Result<Array> {
        let rows = self.gate_proj.rows(x)?;
        let (gate, up) = (self.gate_proj.forward(&rows)?, self.up_proj.forward(&rows)?);
        match (&self.kernels, self.gate) {
            (Some(kernels), gate_kind) => kernels.activate_gated(gate_kind.activation(), &gate, &up),
            (None, Gate::SwiGlu) => swiglu(&gate, &up),
            (None, Gate::GeGlu) => gelu_approx(&gate)?.multiply(&up),
        }
    }
}
