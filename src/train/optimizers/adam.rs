//! Adam and AdamW (`mlx.optimizers.Adam`, `AdamW`).

use super::{Context, Update, rest};
use crate::mlx::{Array, Result};

/// Adam. mlx-lm's default corrects no bias.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    /// Decay of the two moments.
    pub betas: (f64, f64),
    /// Added to the denominator.
    pub eps: f32,
    /// Whether moments are scaled up while there are few.
    pub bias_correction: bool,
}

impl Default for Adam {
    fn default() -> Self {
        Self { betas: (0.9, 0.999), eps: 1e-8, bias_correction: false }
    }
}

impl Update for Adam {
    fn state(&self, parameter: &Array) -> Result<Vec<Array>> {
        let zeros = || Array::zeros(parameter.shape(), parameter.dtype());
        Ok(vec![zeros()?, zeros()?])
    }

    fn apply(
        &self,
        context: &Context,
        gradient: &Array,
        parameter: &Array,
        state: &mut [Array],
    ) -> Result<Array> {
        let [first, second] = state else { return Ok(parameter.clone()) };
        let dtype = gradient.dtype();
        let rate = context.rate.astype(dtype)?;
        let (b1, b2) = (self.betas.0 as f32, self.betas.1 as f32);
        *first = first.multiply_scalar(b1)?.add(&gradient.multiply_scalar(rest(self.betas.0))?)?;
        *second =
            second.multiply_scalar(b2)?.add(&gradient.square()?.multiply_scalar(rest(self.betas.1))?)?;
        if !self.bias_correction {
            let below = second.sqrt()?.add_scalar(self.eps)?;
            return parameter.subtract(&rate.multiply(first)?.divide(&below)?);
        }
        let number = |value: f32| Array::scalar(value, context.step.dtype());
        let left = |beta: f32| number(1.0)?.subtract(&number(beta)?.power(context.step)?);
        let above = rate.divide(&left(b1)?)?.astype(dtype)?.multiply(first)?;
        let correction = left(b2)?.rsqrt()?.astype(dtype)?;
        let below = second.sqrt()?.multiply(&correction)?.add_scalar(self.eps)?;
        parameter.subtract(&above.divide(&below)?)
    }
}

/// Adam with weight decay that does not pass through the moments.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// The rest of it.
    pub adam: Adam,
    /// What a parameter loses a step, times the learning rate.
    pub weight_decay: f32,
}

impl Default for AdamW {
    fn default() -> Self {
        Self { adam: Adam::default(), weight_decay: 0.01 }
    }
}

impl Update for AdamW {
    fn state(&self, parameter: &Array) -> Result<Vec<Array>> {
        self.adam.state(parameter)
    }

    fn apply(
        &self,
        context: &Context,
        gradient: &Array,
        parameter: &Array,
        state: &mut [Array],
    ) -> Result<Array> {
        let rate = context.rate.astype(gradient.dtype())?;
        let one = Array::scalar(1.0, rate.dtype())?;
        let kept = one.subtract(&rate.multiply_scalar(self.weight_decay)?)?;
        self.adam.apply(context, gradient, &parameter.multiply(&kept)?, state)
    }
}
