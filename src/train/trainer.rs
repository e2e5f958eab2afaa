//! The training loop (mlx-lm `tuner/trainer.py`): batches, gradients, updates, measurements, in mlx-lm's order of
//! random draws.

use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

use super::batches::{Batch, BatchOptions, TooFewExamples};
use super::checkpoint::CheckpointError;
use super::dataset::Example;
use super::losses::Objective;
use super::network::Network;
use super::optimizers::{Optimizer, clip_by_norm};
use super::output::Output;
use super::report::{Event, Outcome, TrainReport, ValidationReport};
use super::rows::Rows;
use crate::mlx::random::RandomState as Keys;
use crate::mlx::{self, Array, Dtype, memory};
use crate::perplexity::RandomState;

/// How to train.
#[derive(Clone, Copy, Debug)]
pub struct TrainOptions {
    /// Steps, each of one batch.
    pub iterations: u64,
    /// How batches are made.
    pub batch: BatchOptions,
    /// Batches of a measurement; `None` for all there are.
    pub validation_batches: Option<usize>,
    /// Steps between reports.
    pub steps_per_report: u64,
    /// Steps between measurements.
    pub steps_per_eval: u64,
    /// Steps between saves.
    pub save_every: u64,
    /// Batches of an update.
    pub accumulation: u64,
    /// Norm of a gradient, at most.
    pub clip: Option<f32>,
    /// Bytes that the allocator may keep between steps.
    pub cache_limit: usize,
    /// Fixes the order of the rows and the draws of dropout.
    pub seed: u32,
}

/// Why training stopped short.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// Fewer rows than a batch takes.
    #[error("{rows} rows: {cause}")]
    TooFew {
        /// Which rows.
        rows: &'static str,
        /// How many.
        cause: TooFewExamples,
    },
    /// A file.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// MLX failed.
    #[error(transparent)]
    Mlx(#[from] mlx::Error),
}

/// Sums since the last report.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Window {
    pub(super) steps: u64,
    pub(super) tokens: u64,
    pub(super) loss: f32,
    pub(super) figures: Vec<f32>,
}

/// Where a run stands; together with the values of parameters and optimizer, all that it goes on from.
#[derive(Clone, Debug)]
pub(super) struct Progress {
    pub(super) iteration: u64,
    pub(super) trained_tokens: u64,
    /// Batches of this epoch, and how many of them were taken.
    pub(super) order: Vec<u32>,
    pub(super) taken: usize,
    pub(super) shuffles: RandomState,
    pub(super) keys: Keys,
    pub(super) accumulated: Option<Vec<Array>>,
    pub(super) window: Window,
}

/// A run at one of its steps.
pub(super) struct Standing {
    pub(super) values: Vec<Array>,
    pub(super) optimizer: Optimizer,
    pub(super) progress: Progress,
}

/// A run.
pub struct Trainer {
    pub(super) network: Network,
    pub(super) values: Vec<Array>,
    pub(super) optimizer: Optimizer,
    pub(super) progress: Progress,
    objective: Objective,
    options: TrainOptions,
    train: Rows,
    valid: Option<Rows>,
    gradient_norm: Option<f32>,
    /// Tells the rows to learn from.
    fingerprint: String,
    /// The step that was gone on from.
    resumed: Option<u64>,
    /// The step that was saved last.
    saved: Option<u64>,
}

impl Trainer {
    /// A run that begins. `keys` are those that the parameters' first values were drawn from.
    ///
    /// # Errors
    /// Fewer rows than a batch takes.
    pub fn new(
        network: Network,
        values: Vec<Array>,
        optimizer: Optimizer,
        objective: Objective,
        options: TrainOptions,
        train: Vec<Example>,
        valid: Vec<Example>,
        keys: Keys,
    ) -> Result<Self, TrainError> {
        let train = Rows::new("train", train, &options.batch)?;
        let valid = match valid.is_empty() {
            true => None,
            false => Some(Rows::new("valid", valid, &options.batch)?),
        };
        let progress = Progress {
            iteration: 0,
            trained_tokens: 0,
            order: Vec::new(),
            taken: 0,
            shuffles: RandomState::from_seed(options.seed),
            keys,
            accumulated: None,
            window: Window::default(),
        };
        Ok(Self {
            network,
            values,
            optimizer,
            progress,
            objective,
            options,
            fingerprint: train.fingerprint(),
            train,
            valid,
            gradient_norm: None,
            resumed: None,
            saved: None,
        })
    }

    /// Steps taken.
    pub fn iteration(&self) -> u64 {
        self.progress.iteration
    }

    /// The step that was saved last, by this run or the one that it goes on with.
    pub fn saved(&self) -> Option<u64> {
        self.saved
    }

    /// The step that the run went on from.
    pub fn resumed(&self) -> Option<u64> {
        self.resumed
    }

    /// Tells the rows to learn from.
    pub(super) fn rows(&self) -> &str {
        &self.fingerprint
    }

    /// Batches of an epoch.
    pub fn batches(&self) -> usize {
        self.train.batches.len()
    }

    /// What is trained.
    pub fn parameters(&self) -> &super::parameters::Parameters {
        self.network.parameters()
    }

    /// The trained arrays by name.
    pub fn named_values(&self) -> impl Iterator<Item = (&str, &Array)> {
        self.network.parameters().names().zip(&self.values)
    }

    /// Takes all steps that are left, and saves as asked for into `output`. What a step made is written when the next step
    /// has shown that its loss and gradient are numbers; after the last, the loss is computed once more. `on_event` may ask
    /// to stop: then the step that runs is finished and saved.
    ///
    /// # Errors
    /// When MLX fails or a file cannot be written.
    pub fn run(
        &mut self,
        output: &Output,
        on_event: &mut dyn FnMut(Event) -> ControlFlow<()>,
    ) -> Result<Outcome, TrainError> {
        let mut busy = 0.0;
        let mut waiting: Option<Standing> = None;
        while self.progress.iteration < self.options.iterations {
            let iteration = self.progress.iteration + 1;
            let mut started = Instant::now();
            let batch = self.next_batch()?;
            let eval = iteration == 1
                || iteration.is_multiple_of(self.options.steps_per_eval.max(1))
                || iteration == self.options.iterations;
            if eval && self.validate(on_event)?.is_break() {
                self.unread_batch();
                if self.saved.unwrap_or(0) < self.progress.iteration {
                    if !self.is_sound(&batch)? {
                        return Ok(Outcome::NotFinite { iteration });
                    }
                    let standing = self.standing();
                    self.save(&standing, output, on_event)?;
                }
                return Ok(Outcome::Interrupted);
            }
            if eval {
                started = Instant::now();
            }
            if !self.step(&batch)? {
                return Ok(Outcome::NotFinite { iteration });
            }
            if let Some(standing) = waiting.take() {
                self.save(&standing, output, on_event)?;
            }
            busy += started.elapsed().as_secs_f64();
            let mut flow = on_event(Event::Step { iteration });
            if iteration.is_multiple_of(self.options.steps_per_report.max(1))
                || iteration == self.options.iterations
            {
                let report = self.report(std::mem::take(&mut busy))?;
                if on_event(Event::Train(report)).is_break() {
                    flow = ControlFlow::Break(());
                }
            }
            let last = iteration == self.options.iterations;
            if last || flow.is_break() {
                if !self.is_sound(&batch)? {
                    return Ok(Outcome::NotFinite { iteration: iteration + 1 });
                }
                let standing = self.standing();
                self.save(&standing, output, on_event)?;
            } else if iteration.is_multiple_of(self.options.save_every.max(1)) {
                waiting = Some(self.standing());
            }
            if flow.is_break() && !last {
                return Ok(Outcome::Interrupted);
            }
        }
        Ok(Outcome::Finished)
    }

    /// The mean loss over `examples` and the objective's figures, in mlx-lm's order, of `batches` batches or all.
    ///
    /// # Errors
    /// Fewer rows than a batch takes, or MLX fails.
    pub fn measure(
        &mut self,
        name: &'static str,
        examples: Vec<Example>,
        batches: Option<usize>,
        on_event: &mut dyn FnMut(Event) -> ControlFlow<()>,
    ) -> Result<Option<ValidationReport>, TrainError> {
        let rows = Rows::new(name, examples, &self.options.batch)?;
        self.measure_rows(&rows, batches, on_event)
    }

    fn measure_rows(
        &mut self,
        rows: &Rows,
        batches: Option<usize>,
        on_event: &mut dyn FnMut(Event) -> ControlFlow<()>,
    ) -> Result<Option<ValidationReport>, TrainError> {
        let started = Instant::now();
        let order = rows.batches.shuffle(&mut self.progress.shuffles);
        let total = order.len().min(batches.unwrap_or(usize::MAX));
        // MLX adds these up in single precision.
        let mut sums = vec![0f32; 1 + self.objective.figures().len()];
        let mut weights = 0f32;
        for (done, index) in (1..).zip(order.into_iter().take(total)) {
            let batch = rows.batches.build(index, &rows.examples, &self.options.batch)?;
            let weight = self.weight(&batch);
            let values = self.network.evaluate(&self.values, &batch, &self.objective)?;
            for (sum, value) in sums.iter_mut().zip(scalars(&values)?) {
                *sum += value * weight;
            }
            weights += weight;
            self.tidy()?;
            if on_event(Event::Measured { done, total }).is_break() {
                return Ok(None);
            }
        }
        let means: Vec<f64> = sums.iter().map(|sum| f64::from(sum / weights)).collect();
        Ok(Some(ValidationReport {
            iteration: self.progress.iteration,
            loss: means.first().copied().unwrap_or(f64::NAN),
            figures: named(&self.objective, &means[1..]),
            seconds: started.elapsed().as_secs_f64(),
            batches: total,
        }))
    }

    /// What a batch counts in a mean: its learned tokens, or its pairs.
    fn weight(&self, batch: &Batch) -> f32 {
        match self.objective.takes_pairs() {
            true => batch.streams.first().map_or(0.0, |stream| stream.inputs.dim(0) as f32),
            false => batch.tokens as f32,
        }
    }

    fn validate(
        &mut self,
        on_event: &mut dyn FnMut(Event) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, TrainError> {
        let Some(rows) = self.valid.take() else { return Ok(ControlFlow::Continue(())) };
        let before = self.progress.shuffles.clone();
        let report = self.measure_rows(&rows, self.options.validation_batches, on_event);
        self.valid = Some(rows);
        let flow = match report? {
            Some(report) => on_event(Event::Validation(report)),
            None => ControlFlow::Break(()),
        };
        if flow.is_break() {
            // As if it had not begun: whoever goes on begins it again.
            self.progress.shuffles = before;
        }
        Ok(flow)
    }

    /// Whether the values give a loss that is a number.
    fn is_sound(&self, batch: &Batch) -> Result<bool, TrainError> {
        let figures = scalars(&self.network.evaluate(&self.values, batch, &self.objective)?)?;
        self.tidy()?;
        Ok(figures.first().is_some_and(|loss| loss.is_finite()))
    }

    fn standing(&self) -> Standing {
        Standing {
            values: self.values.clone(),
            optimizer: self.optimizer.clone(),
            progress: self.progress.clone(),
        }
    }

    fn next_batch(&mut self) -> Result<Batch, TrainError> {
        let progress = &mut self.progress;
        if progress.taken >= progress.order.len() {
            progress.order = self.train.batches.shuffle(&mut progress.shuffles);
            progress.taken = 0;
        }
        let index = progress.order.get(progress.taken).copied().unwrap_or(0);
        progress.taken += 1;
        Ok(self.train.batches.build(index, &self.train.examples, &self.options.batch)?)
    }

    /// Puts the last batch back.
    fn unread_batch(&mut self) {
        self.progress.taken = self.progress.taken.saturating_sub(1);
    }

    /// One step. `false`, with parameters and optimizer as they were, if the loss or the gradient is no number.
    fn step(&mut self, batch: &Batch) -> Result<bool, TrainError> {
        let mut keys = self.progress.keys.clone();
        let dropout = self.network.parameters().dropout_keys(&mut keys)?;
        let gradient = self.network.gradient(&self.values, batch, &self.objective, &dropout)?;
        let figures = scalars(&gradient.values)?;
        let loss = figures.first().copied().unwrap_or(f32::NAN);
        if !loss.is_finite() {
            return Ok(false);
        }
        let mut gradients = gradient.gradients;
        if let Some(sums) = self.progress.accumulated.take() {
            gradients =
                gradients.iter().zip(&sums).map(|(new, sum)| new.add(sum)).collect::<Result<_, _>>()?;
        }
        let iteration = self.progress.iteration + 1;
        let accumulation = self.options.accumulation.max(1);
        if iteration.is_multiple_of(accumulation) {
            if accumulation > 1 {
                let mean = |sum: &Array| sum.divide_scalar(accumulation as f32);
                gradients = gradients.iter().map(mean).collect::<Result<_, _>>()?;
            }
            let (gradients, norm) = clip_by_norm(gradients, self.options.clip)?;
            let norm = scalars(std::slice::from_ref(&norm))?.first().copied().unwrap_or(f32::NAN);
            if !norm.is_finite() {
                return Ok(false);
            }
            self.gradient_norm = Some(norm);
            self.values = self.optimizer.step(&self.values, &gradients)?;
        } else {
            mlx::eval(&gradients)?;
            self.progress.accumulated = Some(gradients);
        }
        let progress = &mut self.progress;
        progress.keys = keys;
        progress.iteration = iteration;
        progress.trained_tokens += batch.tokens as u64;
        let window = &mut progress.window;
        window.steps += 1;
        window.tokens += batch.tokens as u64;
        window.loss += loss;
        window.figures.resize(figures.len().saturating_sub(1), 0.0);
        window.figures.iter_mut().zip(figures.iter().skip(1)).for_each(|(sum, figure)| *sum += figure);
        self.tidy()?;
        Ok(true)
    }

    fn tidy(&self) -> Result<(), TrainError> {
        if memory::cached()? > self.options.cache_limit {
            memory::clear_cache()?;
        }
        Ok(())
    }

    fn report(&mut self, seconds: f64) -> Result<TrainReport, TrainError> {
        let window = std::mem::take(&mut self.progress.window);
        let steps = window.steps.max(1) as f64;
        let seconds = seconds.max(1e-9);
        let means: Vec<f64> = window.figures.iter().map(|sum| f64::from(*sum) / steps).collect();
        Ok(TrainReport {
            iteration: self.progress.iteration,
            loss: f64::from(window.loss) / steps,
            figures: named(&self.objective, &means),
            gradient_norm: self.gradient_norm,
            learning_rate: self.optimizer.learning_rate()?,
            iterations_per_second: steps / seconds,
            tokens_per_second: window.tokens as f64 / seconds,
            trained_tokens: self.progress.trained_tokens,
            peak_memory_gb: memory::peak()? as f64 / 1e9,
            active_memory_gb: memory::active()? as f64 / 1e9,
        })
    }

    fn save(
        &mut self,
        standing: &Standing,
        output: &Output,
        on_event: &mut dyn FnMut(Event) -> ControlFlow<()>,
    ) -> Result<(), TrainError> {
        output.save(self, standing)?;
        let iteration = standing.progress.iteration;
        self.saved = Some(iteration);
        // The work is saved; whoever wants to stop may do so after the next step.
        let _ = on_event(Event::Saved { iteration, path: output.adapter_file() });
        Ok(())
    }

    /// Writes what a run that was killed while it was saved could not write any more. Returns whether there was any.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn complete_save(&mut self, output: &Output) -> Result<bool, TrainError> {
        let standing = self.standing();
        let missing = !output.holds(self, &standing)?;
        if missing {
            output.save(self, &standing)?;
        }
        Ok(missing)
    }

    /// Goes on where `folder` was left.
    ///
    /// # Errors
    /// There is nothing to go on from, or it is of another run.
    pub fn resume(&mut self, folder: &Path) -> Result<(), TrainError> {
        super::checkpoint::restore(self, folder)?;
        self.resumed = Some(self.progress.iteration);
        self.saved = self.resumed;
        Ok(())
    }
}

fn named(objective: &Objective, means: &[f64]) -> Vec<(&'static str, f64)> {
    objective.figures().iter().copied().zip(means.iter().copied()).collect()
}

fn scalars(arrays: &[Array]) -> mlx::Result<Vec<f32>> {
    let one = |array: &Array| {
        Ok(array.astype(Dtype::Float32)?.to_vec::<f32>()?.first().copied().unwrap_or(f32::NAN))
    };
    arrays.iter().map(one).collect()
}
