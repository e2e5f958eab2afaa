//! Stochastic gradient descent (`mlx.optimizers.SGD`).

use super::{Context, Update, decayed, rest};
use crate::mlx::{Array, Result};

/// Gradient descent. All zero by default, as in MLX.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sgd {
    /// What is kept of the last velocity.
    pub momentum: f32,
    /// Pulls parameters to zero through the gradient.
    pub weight_decay: f32,
    /// What of the gradient is left out of the velocity.
    pub dampening: f64,
    /// Looks a step ahead.
    pub nesterov: bool,
}

impl Update for Sgd {
    fn state(&self, parameter: &Array) -> Result<Vec<Array>> {
        Ok(vec![Array::zeros(parameter.shape(), parameter.dtype())?])
    }

    fn apply(
        &self,
        context: &Context,
        gradient: &Array,
        parameter: &Array,
        state: &mut [Array],
    ) -> Result<Array> {
        let [velocity] = state else { return Ok(parameter.clone()) };
        let rate = context.rate.astype(gradient.dtype())?;
        let gradient = &decayed(gradient, parameter, self.weight_decay)?;
        if self.momentum <= 0.0 {
            return parameter.subtract(&rate.multiply(gradient)?);
        }
        let kept = velocity.multiply_scalar(self.momentum)?;
        *velocity = match self.dampening > 0.0 {
            true => kept.add(&gradient.multiply_scalar(rest(self.dampening))?)?,
            false => kept.add(gradient)?,
        };
        let update = match self.nesterov {
            true => gradient.add(&velocity.multiply_scalar(self.momentum)?)?,
            false => velocity.clone(),
        };
        parameter.subtract(&rate.multiply(&update)?)
    }
}
