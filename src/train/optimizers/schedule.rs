//! Learning rates over the steps (`mlx.optimizers.schedulers`, and mlx-lm's `build_schedule`).

use crate::mlx::{Array, Dtype, Result};

/// A schedule that makes no sense.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("learning rate schedule: {0}")]
pub struct ScheduleError(pub String);

/// How the rate falls.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decay {
    /// Not at all.
    Constant {
        /// The rate.
        rate: f64,
    },
    /// By a factor a step.
    Exponential {
        /// At the start.
        init: f64,
        /// The factor.
        rate: f64,
    },
    /// By a factor every so many steps.
    Step {
        /// At the start.
        init: f64,
        /// The factor.
        rate: f64,
        /// Steps between.
        size: u64,
    },
    /// Along half a cosine.
    Cosine {
        /// At the start.
        init: f64,
        /// Steps it takes.
        steps: u64,
        /// At the end and from there on.
        end: f64,
    },
    /// Along a line.
    Linear {
        /// At the start.
        init: f64,
        /// At the end and from there on.
        end: f64,
        /// Steps it takes.
        steps: u64,
    },
}

/// A learning rate for each step, perhaps with a warm-up before it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    decay: Decay,
    /// Steps and the rate that it begins with.
    warmup: Option<(u64, f64)>,
}

impl Schedule {
    /// The same rate for all steps.
    pub fn constant(rate: f64) -> Self {
        Self { decay: Decay::Constant { rate }, warmup: None }
    }

    /// `decay` after `warmup` steps in which the rate rises from `warmup_init` to the decay's first.
    ///
    /// # Errors
    /// Rates that are no numbers, or no steps to decay over.
    pub fn new(decay: Decay, warmup: u64, warmup_init: f64) -> std::result::Result<Self, ScheduleError> {
        let (rates, steps) = match decay {
            Decay::Constant { rate } => ([rate, 0.0], 1),
            Decay::Exponential { init, rate } => ([init, rate], 1),
            Decay::Step { init, rate, size } => ([init, rate], size),
            Decay::Cosine { init, steps, end } | Decay::Linear { init, end, steps } => ([init, end], steps),
        };
        if steps < 1 {
            return Err(ScheduleError("it needs at least one step".to_owned()));
        }
        if !rates.iter().chain([&warmup_init]).all(|rate| rate.is_finite() && *rate >= 0.0) {
            return Err(ScheduleError("rates must be finite and not negative".to_owned()));
        }
        Ok(Self { decay, warmup: (warmup > 0).then_some((warmup, warmup_init)) })
    }

    /// From the name and the arguments of mlx-lm's `lr_schedule`.
    ///
    /// # Errors
    /// An unknown name, or arguments that it does not take.
    pub fn from_arguments(
        name: &str,
        arguments: &[f64],
        warmup: u64,
        warmup_init: f64,
    ) -> std::result::Result<Self, ScheduleError> {
        let wrong = |takes: &str| {
            ScheduleError(format!("`{name}` takes {takes}, and has {} arguments", arguments.len()))
        };
        let decay = match (name, arguments) {
            ("exponential_decay", [init, rate]) => Decay::Exponential { init: *init, rate: *rate },
            ("step_decay", [init, rate, size]) => {
                Decay::Step { init: *init, rate: *rate, size: *size as u64 }
            }
            ("cosine_decay", [init, steps]) => Decay::Cosine { init: *init, steps: *steps as u64, end: 0.0 },
            ("cosine_decay", [init, steps, end]) => {
                Decay::Cosine { init: *init, steps: *steps as u64, end: *end }
            }
            ("linear_schedule", [init, end, steps]) => {
                Decay::Linear { init: *init, end: *end, steps: *steps as u64 }
            }
            ("exponential_decay", _) => return Err(wrong("[rate, factor]")),
            ("step_decay", _) => return Err(wrong("[rate, factor, steps]")),
            ("cosine_decay", _) => return Err(wrong("[rate, steps] or [rate, steps, end]")),
            ("linear_schedule", _) => return Err(wrong("[start, end, steps]")),
            _ => {
                return Err(ScheduleError(format!(
                    "`{name}` is unknown; use exponential_decay, step_decay, cosine_decay or linear_schedule"
                )));
            }
        };
        Self::new(decay, warmup, warmup_init)
    }

    /// The rate of the step after `step` others, a float32 scalar, computed as MLX computes it.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn at(&self, step: u64) -> Result<Array> {
        let Some((warmup, init)) = self.warmup else { return self.decay.at(step) };
        // mlx-lm joins the two one step after the warm-up has reached its end.
        match step.checked_sub(warmup + 1) {
            Some(after) => self.decay.at(after),
            None => Decay::Linear { init, end: self.decay.first(), steps: warmup }.at(step),
        }
    }
}

impl Decay {
    fn first(&self) -> f64 {
        match *self {
            Self::Constant { rate } => rate,
            Self::Exponential { init, .. }
            | Self::Step { init, .. }
            | Self::Cosine { init, .. }
            | Self::Linear { init, .. } => init,
        }
    }

    fn at(&self, step: u64) -> Result<Array> {
        let number = |value: f64| Array::scalar(value as f32, Dtype::Float32);
        match *self {
            Self::Constant { rate } => number(rate),
            Self::Exponential { init, rate } => {
                number(init)?.multiply(&number(rate)?.power(&number(step as f64)?)?)
            }
            Self::Step { init, rate, size } => {
                let times = step / size.max(1);
                number(init)?.multiply(&number(rate)?.power(&number(times as f64)?)?)
            }
            Self::Cosine { init, steps, end } => {
                let place = number(step.min(steps) as f64)?;
                let turn = number(std::f64::consts::PI / steps as f64)?.multiply(&place)?;
                let decay = turn.cos()?.add_scalar(1.0)?.multiply_scalar(0.5)?;
                number(end)?.add(&decay.multiply(&number(init - end)?)?)
            }
            Self::Linear { init, end, steps } => {
                let place = number(step.min(steps) as f64)?;
                place.multiply(&number((end - init) / steps as f64)?)?.add(&number(init)?)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(schedule: Schedule, steps: impl IntoIterator<Item = u64>) -> Vec<f32> {
        steps.into_iter().map(|step| schedule.at(step).unwrap().to_f32_vec().unwrap()[0]).collect()
    }

    /// The numbers of mlx.optimizers' own documentation.
    #[test]
    fn schedules_are_those_of_mlx() {
        let from = |name, arguments: &[f64]| Schedule::from_arguments(name, arguments, 0, 0.0).unwrap();
        let near = |found: Vec<f32>, expected: &[f32]| {
            assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "{found:?} {expected:?}");
        };
        near(rates(from("exponential_decay", &[0.1, 0.9]), [0, 4]), &[0.1, 0.06561]);
        near(rates(from("step_decay", &[0.1, 0.9, 10.0]), [0, 9, 20]), &[0.1, 0.1, 0.081]);
        near(rates(from("cosine_decay", &[0.1, 1000.0]), [0, 4, 2000]), &[0.1, 0.099_996_1, 0.0]);
        near(rates(from("linear_schedule", &[0.0, 0.1, 100.0]), [0, 100, 101]), &[0.0, 0.1, 0.1]);
    }

    #[test]
    fn the_warm_up_reaches_the_first_rate() {
        let schedule = Schedule::from_arguments("cosine_decay", &[0.1, 10.0], 4, 0.02).unwrap();
        let found = rates(schedule, 0..7);
        assert!((found[0] - 0.02).abs() < 1e-7 && (found[4] - 0.1).abs() < 1e-7, "{found:?}");
        assert_eq!(found[5], 0.1);
        assert!(found[6] < 0.1);
    }

    #[test]
    fn wrong_arguments_are_told() {
        let error = |name, arguments: &[f64]| {
            Schedule::from_arguments(name, arguments, 0, 0.0).unwrap_err().to_string()
        };
        assert!(error("cosine", &[0.1]).contains("`cosine` is unknown"));
        assert!(error("cosine_decay", &[0.1]).contains("takes [rate, steps]"));
        assert!(error("cosine_decay", &[0.1, 0.0]).contains("at least one step"));
        assert!(error("linear_schedule", &[f64::NAN, 0.1, 3.0]).contains("finite"));
    }
}
