//! Muon: momentum, made orthogonal by Newton and Schulz's iteration (`mlx.optimizers.Muon`).

use super::{Context, Update, decayed, rest};
use crate::mlx::{Array, Result};

/// Coefficients of the iteration.
const COEFFICIENTS: (f32, f32, f32) = (3.4445, -4.7750, 2.0315);

/// Muon.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Muon {
    /// What is kept of the last velocity.
    pub momentum: f64,
    /// Pulls parameters to zero through the gradient.
    pub weight_decay: f32,
    /// Looks a step ahead.
    pub nesterov: bool,
    /// Rounds of the iteration.
    pub ns_steps: u32,
}

impl Default for Muon {
    fn default() -> Self {
        Self { momentum: 0.95, weight_decay: 0.01, nesterov: true, ns_steps: 5 }
    }
}

impl Update for Muon {
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
        let gradient = &decayed(gradient, parameter, self.weight_decay)?;
        let (momentum, fresh) = (self.momentum as f32, rest(self.momentum));
        *velocity = velocity.multiply_scalar(momentum)?.add(&gradient.multiply_scalar(fresh)?)?;
        let mut update = match self.nesterov {
            true => gradient.multiply_scalar(fresh)?.add(&velocity.multiply_scalar(momentum)?)?,
            false => velocity.clone(),
        };
        let mut rate = context.rate.astype(gradient.dtype())?;
        if update.ndim() >= 2 {
            update = self.orthogonal(&update)?;
            let (rows, columns) = (f64::from(update.dim(-2)), f64::from(update.dim(-1).max(1)));
            rate = rate.multiply_scalar((rows / columns).max(1.0).sqrt() as f32)?;
        }
        parameter.subtract(&rate.multiply(&update)?)
    }
}

impl Muon {
    /// `[rows, columns]` to about the nearest matrix whose singular values are one.
    fn orthogonal(&self, matrix: &Array) -> Result<Array> {
        let (a, b, c) = COEFFICIENTS;
        let turned = matrix.dim(-2) > matrix.dim(-1);
        let matrix = if turned { matrix.t()? } else { matrix.clone() };
        let length = matrix.reshape(&[-1])?.square()?.sum(0, false)?.sqrt()?;
        let mut x = matrix.divide(&length.add_scalar(1e-7)?)?;
        for _ in 0..self.ns_steps {
            let gram = x.matmul(&x.t()?)?;
            let step = gram.multiply_scalar(b)?.addmm_scaled(&gram, &gram, c, 1.0)?;
            x = x.multiply_scalar(a)?.addmm_scaled(&step, &x, 1.0, 1.0)?;
        }
        if turned { x.t() } else { Ok(x) }
    }
}
