//! What a trainer tells its caller.

use std::path::Path;

/// Something happened.
#[derive(Clone, Debug)]
pub enum Event<'a> {
    /// A step was taken.
    Step {
        /// Steps so far.
        iteration: u64,
    },
    /// Figures of the steps since the last report.
    Train(TrainReport),
    /// The rows that are not learned from were measured.
    Validation(ValidationReport),
    /// A batch of a measurement was computed.
    Measured {
        /// Batches so far.
        done: usize,
        /// Of so many.
        total: usize,
    },
    /// Everything was saved.
    Saved {
        /// After this step.
        iteration: u64,
        /// The adapter's file.
        path: &'a Path,
    },
}

/// Figures of some steps.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainReport {
    /// The last step.
    pub iteration: u64,
    /// Mean loss.
    pub loss: f64,
    /// Means of the objective's figures.
    pub figures: Vec<(&'static str, f64)>,
    /// Norm of the last update's gradient, before it was clipped; absent where none was made.
    pub gradient_norm: Option<f32>,
    /// Of the last update.
    pub learning_rate: f32,
    /// Steps a second.
    pub iterations_per_second: f64,
    /// Learned tokens a second.
    pub tokens_per_second: f64,
    /// Learned tokens since the start.
    pub trained_tokens: u64,
    /// Most memory in use at once since the start, in units of 10^9 bytes.
    pub peak_memory_gb: f64,
    /// Memory in use now.
    pub active_memory_gb: f64,
}

/// Figures of the rows that are not learned from.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidationReport {
    /// Steps taken before.
    pub iteration: u64,
    /// Mean loss.
    pub loss: f64,
    /// Means of the objective's figures.
    pub figures: Vec<(&'static str, f64)>,
    /// How long it took.
    pub seconds: f64,
    /// Batches.
    pub batches: usize,
}

/// How training ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All steps were taken.
    Finished,
    /// The caller asked to stop.
    Interrupted,
    /// A step's loss or gradient was no number; it was not taken, and what leads to it was not saved.
    NotFinite {
        /// Which; one more than the last where the last step's result gives such a loss.
        iteration: u64,
    },
}
