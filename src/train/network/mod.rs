//! A model as training runs it: whole sequences without a cache, in pieces, with gradients.
//!
//! There are two ways to the same loss and gradients. The plain one records the whole pass and goes back through it,
//! which keeps what every layer computed. The segmented one keeps what goes into every few layers and computes those
//! layers once more on the way back, segment by segment, so that only one segment's work is in memory at a time.
//! Either way the head may be computed for a few positions at a time ([`head`]), so that logits of a whole batch never
//! exist.

mod flow;
mod gradient;
mod head;

pub use gradient::Gradient;

use super::batches::Batch;
use super::losses::{Objective, References};
use super::parameters::Parameters;
use crate::mlx::{Array, Result};
use crate::models::pieces::Pieces;

/// What memory costs time for. All ways give the same numbers but for the order of sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryOptions {
    /// Layers of a segment; `None` records the whole pass.
    pub segment: Option<usize>,
    /// Positions of which logits exist at a time; `None` for all.
    pub head_chunk: Option<usize>,
}

/// A model and what of it is trained.
#[derive(Clone)]
pub struct Network {
    pieces: Pieces,
    parameters: Parameters,
    memory: MemoryOptions,
}

impl Network {
    /// The pieces of a model, some of which are trained.
    pub fn new(pieces: Pieces, parameters: Parameters, memory: MemoryOptions) -> Self {
        // Logits of a few positions at a time have no gradients for a head that is trained itself.
        let head_chunk = memory.head_chunk.filter(|_| !parameters.outside_layers());
        Self { pieces, parameters, memory: MemoryOptions { head_chunk, ..memory } }
    }

    /// The model as it is now, adapters that others put on it included; nothing of it is trained.
    #[must_use]
    pub fn without_training(self) -> Self {
        Self { parameters: Parameters::none(), ..self }
    }

    /// What is trained.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// Layers.
    pub fn layers(&self) -> usize {
        self.pieces.blocks.len()
    }

    /// The loss and the figures of a batch, without gradients and without dropout: the first value is the loss.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn evaluate(&self, values: &[Array], batch: &Batch, objective: &Objective) -> Result<Vec<Array>> {
        let references = self.references(batch, objective)?;
        let all: Vec<usize> = (0..values.len()).collect();
        let pieces = self.parameters.apply(&self.pieces, &all, values, &[])?;
        let outcome = self
            .losses(&pieces, batch, objective.looks_at_prompts())
            .and_then(|losses| objective.loss(&losses, batch, &references));
        self.parameters.detach();
        let outcome = outcome?;
        crate::mlx::eval(&outcome)?;
        Ok(outcome)
    }

    /// What the untrained model thinks of a batch, for objectives that compare with it.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn references(&self, batch: &Batch, objective: &Objective) -> Result<References> {
        if !objective.needs_reference() {
            return Ok(References::default());
        }
        self.parameters.detach();
        let losses = self.losses(&self.pieces, batch, false)?;
        References::of(&losses, batch)
    }

    /// Loss of each target, a `[B, L]` a stream; what no objective looks at may be zero.
    fn losses(&self, pieces: &Pieces, batch: &Batch, prompts: bool) -> Result<Vec<Array>> {
        let flow = flow::start(pieces, batch)?;
        let flow = flow::through(pieces, 0..pieces.blocks.len(), &flow, batch)?;
        let hidden = flow::join(flow, batch)?;
        match self.memory.head_chunk {
            None => head::losses(pieces, &hidden, batch),
            Some(chunk) => Ok(head::chunked_losses(pieces, &hidden, batch, prompts, chunk)?.0),
        }
    }
}
