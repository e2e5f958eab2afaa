//! Adafactor: second moments by rows and columns (`mlx.optimizers.Adafactor`).

use super::{Context, Update, rest};
use crate::mlx::{Array, Dtype, Result};

/// Adafactor. By default it chooses its own step size and the learning rate is not used, as in MLX.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adafactor {
    /// Added to squared gradients; least scale of a parameter.
    pub eps: (f32, f32),
    /// Root mean square of an update, at most.
    pub clip_threshold: f32,
    /// Power of the step that moments decay with.
    pub decay_rate: f32,
    /// Decay of the first moment; `None` for none.
    pub beta_1: Option<f64>,
    /// Pulls parameters to zero.
    pub weight_decay: f32,
    /// Scales steps with the parameter.
    pub scale_parameter: bool,
    /// Chooses step sizes by the number of the step.
    pub relative_step: bool,
    /// Starts with small ones.
    pub warmup_init: bool,
}

impl Default for Adafactor {
    fn default() -> Self {
        Self {
            eps: (1e-30, 1e-3),
            clip_threshold: 1.0,
            decay_rate: -0.8,
            beta_1: None,
            weight_decay: 0.0,
            scale_parameter: true,
            relative_step: true,
            warmup_init: false,
        }
    }
}

fn root_mean_square(x: &Array) -> Result<Array> {
    x.square()?.mean_all()?.sqrt()
}

fn scalar(value: f32, like: &Array) -> Result<Array> {
    Array::scalar(value, like.dtype())
}

impl Adafactor {
    fn rate(&self, context: &Context, size: &Array) -> Result<Array> {
        let relative = match (self.relative_step, self.warmup_init) {
            (false, _) => context.rate.clone(),
            (true, warm) => {
                let least = match warm {
                    true => context.step.multiply_scalar(1e-6)?,
                    false => Array::scalar(1e-2, Dtype::Float32)?,
                };
                least.minimum(&context.step.rsqrt()?)?
            }
        };
        let relative = relative.astype(size.dtype())?;
        match self.scale_parameter {
            true => scalar(self.eps.1, size)?.maximum(size)?.multiply(&relative),
            false => scalar(1.0, size)?.multiply(&relative),
        }
    }
}

impl Update for Adafactor {
    fn state(&self, parameter: &Array) -> Result<Vec<Array>> {
        let (shape, dtype) = (parameter.shape(), parameter.dtype());
        let mut state = match shape {
            [above @ .., rows, columns] => {
                let row_shape = [above, &[*rows]].concat();
                let column_shape = [above, &[*columns]].concat();
                vec![Array::zeros(&row_shape, dtype)?, Array::zeros(&column_shape, dtype)?]
            }
            _ => vec![Array::zeros(shape, dtype)?],
        };
        if self.beta_1.is_some() {
            state.push(Array::zeros(shape, dtype)?);
        }
        Ok(state)
    }

    fn apply(
        &self,
        context: &Context,
        gradient: &Array,
        parameter: &Array,
        state: &mut [Array],
    ) -> Result<Array> {
        let size = root_mean_square(parameter)?;
        let rate = self.rate(context, &size)?;
        let power = context.step.power(&Array::scalar(self.decay_rate, Dtype::Float32)?)?;
        let old = scalar(1.0, &size)?.subtract(&power.astype(size.dtype())?)?;
        let new = scalar(1.0, &old)?.subtract(&old)?;
        let squares = gradient.square()?.add_scalar(self.eps.0)?;
        let (moments, first) = state.split_at_mut(if gradient.ndim() >= 2 { 2 } else { 1 });
        let mut update = match moments {
            [rows, columns] => {
                *rows = old.multiply(rows)?.add(&new.multiply(&mean(&squares, -1)?)?)?;
                *columns = old.multiply(columns)?.add(&new.multiply(&mean(&squares, -2)?)?)?;
                let across = mean(rows, -1)?.expand_dims(-1)?;
                let row_factor = rows.divide(&across)?.rsqrt()?.expand_dims(-1)?;
                let column_factor = columns.rsqrt()?.expand_dims(-2)?;
                row_factor.multiply(&column_factor)?.multiply(gradient)?
            }
            [moment] => {
                *moment = old.multiply(moment)?.add(&new.multiply(&squares)?)?;
                moment.rsqrt()?.multiply(gradient)?
            }
            _ => gradient.clone(),
        };
        let excess = root_mean_square(&update)?.divide_scalar(self.clip_threshold)?;
        update = update.divide(&scalar(1.0, &excess)?.maximum(&excess)?)?;
        update = rate.multiply(&update)?;
        if let (Some(beta), [first]) = (self.beta_1, first) {
            *first = first.multiply_scalar(beta as f32)?.add(&update.multiply_scalar(rest(beta))?)?;
            update = first.clone();
        }
        match self.weight_decay {
            0.0 => parameter.subtract(&update),
            decay => {
                let lost = parameter.multiply(&rate.multiply_scalar(-decay)?)?;
                parameter.add(&lost)?.subtract(&update)
            }
        }
    }
}

fn mean(x: &Array, axis: i32) -> Result<Array> {
    x.mean(&[axis])
}
