//! Optimizers over a list of arrays, operation for operation those of `mlx.optimizers`.

mod adafactor;
mod adam;
mod clip;
mod muon;
mod schedule;
mod sgd;

pub use adafactor::Adafactor;
pub use adam::{Adam, AdamW};
pub use clip::clip_by_norm;
pub use muon::Muon;
pub use schedule::{Decay, Schedule, ScheduleError};
pub use sgd::Sgd;

use crate::mlx::{Array, Dtype, Error, Result, eval};

/// Which optimizer, and its parameters.
#[derive(Clone, Debug, PartialEq)]
pub enum Kind {
    /// Adam.
    Adam(Adam),
    /// Adam with decoupled weight decay.
    AdamW(AdamW),
    /// Momentum made orthogonal.
    Muon(Muon),
    /// Gradient descent, perhaps with momentum.
    Sgd(Sgd),
    /// Adafactor.
    Adafactor(Adafactor),
}

impl Kind {
    fn update(&self) -> &dyn Update {
        match self {
            Self::Adam(adam) => adam,
            Self::AdamW(adam) => adam,
            Self::Muon(muon) => muon,
            Self::Sgd(sgd) => sgd,
            Self::Adafactor(adafactor) => adafactor,
        }
    }
}

/// What an update may read beside its parameter.
struct Context<'a> {
    /// Learning rate, a float32 scalar.
    rate: &'a Array,
    /// Number of this step, from 1, a float32 scalar.
    step: &'a Array,
}

/// How one parameter is updated.
trait Update {
    /// What is kept for a parameter from step to step.
    fn state(&self, parameter: &Array) -> Result<Vec<Array>>;

    /// The parameter after the step; `state` is replaced.
    fn apply(
        &self,
        context: &Context,
        gradient: &Array,
        parameter: &Array,
        state: &mut [Array],
    ) -> Result<Array>;
}

/// An optimizer and what it remembers.
#[derive(Clone, Debug)]
pub struct Optimizer {
    kind: Kind,
    schedule: Schedule,
    steps: u64,
    state: Vec<Vec<Array>>,
    /// A factor on the learning rate of each parameter; empty for none.
    factors: Vec<f32>,
}

impl Optimizer {
    /// For parameters of these shapes and types.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn new(kind: Kind, schedule: Schedule, parameters: &[Array]) -> Result<Self> {
        let state =
            parameters.iter().map(|parameter| kind.update().state(parameter)).collect::<Result<_>>()?;
        Ok(Self { kind, schedule, steps: 0, state, factors: Vec::new() })
    }

    /// Multiplies the learning rate of each parameter (LoRA+).
    #[must_use]
    pub fn with_factors(self, factors: Vec<f32>) -> Self {
        Self { factors, ..self }
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The learning rate of the last step, or of the first if there was none.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn learning_rate(&self) -> Result<f32> {
        let rate = self.schedule.at(self.steps.saturating_sub(1))?;
        Ok(rate.to_f32_vec()?.first().copied().unwrap_or(f32::NAN))
    }

    /// What is remembered, in the order of the parameters.
    pub fn state(&self) -> impl Iterator<Item = &Array> {
        self.state.iter().flatten()
    }

    /// Puts back what [`state`](Self::state) gave after `steps` steps.
    ///
    /// # Errors
    /// When shapes or types differ.
    pub fn restore(&mut self, steps: u64, state: impl IntoIterator<Item = Array>) -> Result<()> {
        let mut given = state.into_iter();
        for place in self.state.iter_mut().flatten() {
            match given.next() {
                Some(array) if array.shape() == place.shape() && array.dtype() == place.dtype() => {
                    *place = array;
                }
                _ => return Err(Error::new("the optimizer's state is of another optimizer or model")),
            }
        }
        if given.next().is_some() {
            return Err(Error::new("the optimizer's state is of another optimizer or model"));
        }
        self.steps = steps;
        Ok(())
    }

    /// The parameters after a step against these gradients. Both the parameters and the state are computed on return.
    ///
    /// # Errors
    /// When MLX fails, or there is not one gradient a parameter.
    pub fn step(&mut self, parameters: &[Array], gradients: &[Array]) -> Result<Vec<Array>> {
        if parameters.len() != self.state.len() || gradients.len() != parameters.len() {
            return Err(Error::new(format!(
                "{} gradients for {} parameters",
                gradients.len(),
                self.state.len()
            )));
        }
        let rate = self.schedule.at(self.steps)?;
        let step = Array::scalar((self.steps + 1) as f32, Dtype::Float32)?;
        let mut next = Vec::with_capacity(parameters.len());
        let mut states = self.state.clone();
        for (index, state) in states.iter_mut().enumerate() {
            let rate = match self.factors.get(index) {
                Some(factor) if *factor != 1.0 => rate.multiply_scalar(*factor)?,
                _ => rate.clone(),
            };
            let context = Context { rate: &rate, step: &step };
            next.push(self.kind.update().apply(&context, &gradients[index], &parameters[index], state)?);
        }
        eval(next.iter().chain(states.iter().flatten()))?;
        self.state = states;
        self.steps += 1;
        Ok(next)
    }
}

/// The gradient with a pull of the parameter to zero in it.
fn decayed(gradient: &Array, parameter: &Array, decay: f32) -> Result<Array> {
    if decay == 0.0 { Ok(gradient.clone()) } else { gradient.add(&parameter.multiply_scalar(decay)?) }
}

/// Python computes `1 - x` in double precision, and MLX rounds.
fn rest(value: f64) -> f32 {
    (1.0 - value) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_of_another_shape_is_refused() {
        let parameters = [Array::zeros(&[2, 3], Dtype::Float32).unwrap()];
        let mut optimizer =
            Optimizer::new(Kind::Adam(Adam::default()), Schedule::constant(0.1), &parameters).unwrap();
        let gradient = Array::full(&[2, 3], 1.0, Dtype::Float32).unwrap();
        optimizer.step(&parameters, std::slice::from_ref(&gradient)).unwrap();
        assert!(optimizer.step(&parameters, &[]).is_err());
        let kept: Vec<_> = optimizer.state().cloned().collect();
        assert!(optimizer.restore(1, kept[..1].to_vec()).is_err());
        assert!(optimizer.restore(1, [kept[0].t().unwrap(), kept[1].clone()]).is_err());
        optimizer.restore(7, kept).unwrap();
        assert_eq!(optimizer.steps(), 7);
    }

    #[test]
    fn factors_scale_the_rate_of_their_parameter() {
        let parameters = [0, 1].map(|_| Array::zeros(&[1], Dtype::Float32).unwrap());
        let sgd = Kind::Sgd(Sgd::default());
        let optimizer = Optimizer::new(sgd, Schedule::constant(0.5), &parameters).unwrap();
        let gradient = Array::full(&[1], 1.0, Dtype::Float32).unwrap();
        let next =
            optimizer.with_factors(vec![1.0, 4.0]).step(&parameters, &[gradient.clone(), gradient]).unwrap();
        let values: Vec<f32> = next.iter().map(|array| array.to_f32_vec().unwrap()[0]).collect();
        assert_eq!(values, [-0.5, -2.0]);
    }
}
