//! Activations and their products with a second array.

use std::sync::Arc;

use super::operands::{RowOperand, Run, floats_mut, nth};
use super::{Kernels, refuse};
use crate::mlx::cpu::kernels::activation::{Activation, activate, activate_gated};
use crate::mlx::kernel::{Kernel, View, custom};
use crate::mlx::{Array, Result};

impl Kernels {
    /// `activation(x)` in float32, rounded once.
    ///
    /// # Errors
    /// On evaluation, an array that is not of floating-point values.
    pub fn activate(&self, activation: Activation, x: &Array) -> Result<Array> {
        let node = Activate { kernels: self.clone(), activation };
        custom(c"activate", Arc::new(node), &[x], x.shape(), x.dtype())
    }

    /// `activation(gate) * up` in float32, rounded once.
    ///
    /// # Errors
    /// Shapes or types that differ.
    pub fn activate_gated(&self, activation: Activation, gate: &Array, up: &Array) -> Result<Array> {
        if gate.shape() != up.shape() || gate.dtype() != up.dtype() {
            return refuse("activate_gated", format!("{gate:?} and {up:?} are not alike"));
        }
        let node = Activate { kernels: self.clone(), activation };
        custom(c"activate_gated", Arc::new(node), &[gate, up], gate.shape(), gate.dtype())
    }
}

/// Inputs: x, perhaps what it is multiplied with.
struct Activate {
    kernels: Kernels,
    activation: Activation,
}

impl Kernel for Activate {
    fn run(&self, inputs: &[View], outputs: &[View]) -> Run<()> {
        let rows = |view: &View| view.shape.last().map_or(1, |&dim| dim.max(1) as usize);
        let view = nth(inputs, 0)?;
        let x = RowOperand::new(view, rows(view))?;
        let out = floats_mut(nth(outputs, 0)?)?;
        let (isa, pool) = (self.kernels.isa(), self.kernels.pool());
        match inputs.get(1) {
            Some(up) => {
                let up = RowOperand::new(up, rows(up))?;
                activate_gated(isa, pool, self.activation, &x.rows()?, &up.rows()?, out)
            }
            None => activate(isa, pool, self.activation, &x.rows()?, out),
        }
        .map_err(super::operands::text)
    }

    fn stock(&self, inputs: &[Array]) -> Result<Vec<Array>> {
        let activated = stock(self.activation, &inputs[0])?;
        Ok(vec![match inputs.get(1) {
            Some(up) => activated.multiply(up)?,
            None => activated,
        }])
    }
}

fn stock(activation: Activation, x: &Array) -> Result<Array> {
    match activation {
        Activation::Identity => Ok(x.clone()),
        Activation::Silu => x.multiply(&x.sigmoid()?),
        Activation::Gelu => {
            let erf = x.multiply_scalar(std::f32::consts::FRAC_1_SQRT_2)?.erf()?;
            x.multiply_scalar(0.5)?.multiply(&erf.add_scalar(1.0)?)
        }
        Activation::GeluTanh => {
            let cube = x.square()?.multiply(x)?;
            let inner = x.add(&cube.multiply_scalar(0.044_715)?)?.multiply_scalar(0.797_884_6)?;
            x.multiply_scalar(0.5)?.multiply(&inner.tanh()?.add_scalar(1.0)?)
        }
        Activation::GeluQuick => x.multiply(&x.multiply_scalar(1.702)?.sigmoid()?),
        Activation::Relu => x.maximum(&Array::scalar(0.0, x.dtype())?),
        Activation::ReluSquared => x.maximum(&Array::scalar(0.0, x.dtype())?)?.square(),
        Activation::Sigmoid => x.sigmoid(),
        Activation::Softcap(cap) => x.divide_scalar(cap)?.tanh()?.multiply_scalar(cap),
    }
}
