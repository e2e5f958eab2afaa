//! The loss of a batch and its gradients.

use std::ops::Range;

use super::{Network, flow, head};
use crate::mlx::autograd::{value_and_grad, vjp};
use crate::mlx::{Array, Dtype, Error, Result, eval};
use crate::train::batches::Batch;
use crate::train::losses::{Objective, References};

/// What a batch gives.
#[derive(Clone, Debug)]
pub struct Gradient {
    /// The loss, a float32 scalar, and the objective's figures.
    pub values: Vec<Array>,
    /// Of each trained array.
    pub gradients: Vec<Array>,
}

impl Network {
    /// The loss of a batch and its gradients with respect to the trained arrays. `dropout_keys` come from
    /// [`Parameters::dropout_keys`](super::super::parameters::Parameters::dropout_keys).
    ///
    /// # Errors
    /// When MLX fails.
    pub fn gradient(
        &self,
        values: &[Array],
        batch: &Batch,
        objective: &Objective,
        dropout_keys: &[Array],
    ) -> Result<Gradient> {
        let references = self.references(batch, objective)?;
        let outcome = match self.memory.segment {
            None => self.recorded(values, batch, objective, references, dropout_keys),
            Some(size) => self.segmented(values, batch, objective, &references, dropout_keys, size.max(1)),
        };
        self.parameters.detach();
        outcome
    }

    /// Records the whole pass.
    fn recorded(
        &self,
        values: &[Array],
        batch: &Batch,
        objective: &Objective,
        references: References,
        dropout_keys: &[Array],
    ) -> Result<Gradient> {
        let (network, batch, objective) = (self.clone(), batch.clone(), objective.clone());
        let dropout_keys = dropout_keys.to_vec();
        let all: Vec<usize> = (0..values.len()).collect();
        let numbers: Vec<i32> = (0..values.len() as i32).collect();
        let function = move |values: &[Array]| {
            let pieces = network.parameters.apply(&network.pieces, &all, values, &dropout_keys)?;
            let flow = flow::start(&pieces, &batch)?;
            let flow = flow::through(&pieces, 0..pieces.blocks.len(), &flow, &batch)?;
            let hidden = flow::join(flow, &batch)?;
            let Some(size) = network.memory.head_chunk else {
                return objective.loss(&head::losses(&pieces, &hidden, &batch)?, &batch, &references);
            };
            let (mut values, gradients) =
                head::chunked_gradient(&pieces, &hidden, &batch, &objective, &references, size)?;
            // The head's gradient is known; a term of value zero carries it into what lies before.
            let Some(loss) = values.first_mut() else { return Err(Error::new("an objective without loss")) };
            *loss = loss.stop_gradient()?;
            for (hidden, gradient) in hidden.iter().zip(&gradients) {
                let term = hidden.astype(Dtype::Float32)?.multiply(&gradient.stop_gradient()?)?.sum_all()?;
                *loss = loss.add(&term.subtract(&term.stop_gradient()?)?)?;
            }
            Ok(values)
        };
        let (values, gradients) = value_and_grad(function, &numbers)?.call(values)?;
        // One evaluation: what the pass keeps for the way back must not outlive it.
        eval(values.iter().chain(&gradients))?;
        Ok(Gradient { values, gradients })
    }

    /// Keeps what goes into each segment, and computes segments once more on the way back.
    fn segmented(
        &self,
        values: &[Array],
        batch: &Batch,
        objective: &Objective,
        references: &References,
        dropout_keys: &[Array],
        size: usize,
    ) -> Result<Gradient> {
        let layers = self.pieces.blocks.len();
        let segments: Vec<Range<usize>> =
            (0..layers).step_by(size).map(|start| start..(start + size).min(layers)).collect();
        let outside = self.parameters.of_layers(None);
        let chosen = |indices: &[usize]| -> Vec<Array> {
            indices.iter().filter_map(|&index| values.get(index).cloned()).collect()
        };
        let pieces = self.parameters.apply(&self.pieces, &outside, &chosen(&outside), dropout_keys)?;
        let mut inputs = vec![flow::start(&pieces, batch)?];
        for layers in &segments {
            let indices = self.parameters.of_layers(Some(layers.clone()));
            let pieces = self.parameters.apply(&self.pieces, &indices, &chosen(&indices), dropout_keys)?;
            let Some(input) = inputs.last() else { break };
            let output = flow::through(&pieces, layers.clone(), input, batch)?;
            eval(&output)?;
            inputs.push(output);
        }
        let mut gradients: Vec<Option<Array>> = vec![None; values.len()];
        let last = inputs.pop().unwrap_or_default();
        let (found, mut back) =
            self.head_back(&outside, &chosen(&outside), last, batch, objective, references, &mut gradients)?;
        for layers in segments.iter().rev() {
            let input = inputs.pop().unwrap_or_default();
            let indices = self.parameters.of_layers(Some(layers.clone()));
            let needed = !inputs.is_empty() || !outside.is_empty();
            if indices.is_empty() && !self.trained_before(layers.start) {
                break;
            }
            let width = input.len();
            let (network, batch, layers, own) =
                (self.clone(), batch.clone(), layers.clone(), indices.clone());
            let keys = dropout_keys.to_vec();
            let function = move |arguments: &[Array]| {
                let (flow, values) = arguments.split_at(width);
                let pieces = network.parameters.apply(&network.pieces, &own, values, &keys)?;
                flow::through(&pieces, layers.clone(), flow, &batch)
            };
            let primals: Vec<Array> = input.into_iter().chain(chosen(&indices)).collect();
            let (_, mut results) = vjp(function, &primals, &back)?;
            let own = results.split_off(width);
            eval(own.iter().chain(results.iter().filter(|_| needed)))?;
            for (index, gradient) in indices.into_iter().zip(own) {
                accumulate(&mut gradients, index, gradient)?;
            }
            back = results;
        }
        if !outside.is_empty() {
            self.embedding_back(&outside, &chosen(&outside), &back, batch, &mut gradients)?;
        }
        let zeros = |(gradient, value): (Option<Array>, &Array)| match gradient {
            Some(gradient) => Ok(gradient),
            None => Array::zeros(value.shape(), value.dtype()),
        };
        let gradients = gradients.into_iter().zip(values).map(zeros).collect::<Result<Vec<_>>>()?;
        eval(&gradients)?;
        Ok(Gradient { values: found, gradients })
    }

    /// Whether anything below layer `index` is trained.
    fn trained_before(&self, index: usize) -> bool {
        !self.parameters.of_layers(Some(0..index)).is_empty() || self.parameters.outside_layers()
    }

    /// The objective's values, and the gradient with respect to what flows out of the last layer.
    fn head_back(
        &self,
        outside: &[usize],
        values: &[Array],
        flow: Vec<Array>,
        batch: &Batch,
        objective: &Objective,
        references: &References,
        gradients: &mut [Option<Array>],
    ) -> Result<(Vec<Array>, Vec<Array>)> {
        if let Some(size) = self.memory.head_chunk {
            let hidden = flow::join(flow, batch)?;
            let (found, back) =
                head::chunked_gradient(&self.pieces, &hidden, batch, objective, references, size)?;
            let back = flow::part(back, batch)?;
            eval(found.iter().chain(&back))?;
            return Ok((found, back));
        }
        let width = flow.len();
        let primals: Vec<Array> = flow.into_iter().chain(values.iter().cloned()).collect();
        let (network, own) = (self.clone(), outside.to_vec());
        let (batch, objective, references) = (batch.clone(), objective.clone(), references.clone());
        let function = move |arguments: &[Array]| {
            let (flow, values) = arguments.split_at(width);
            let pieces = network.parameters.apply(&network.pieces, &own, values, &[])?;
            let hidden = flow::join(flow.to_vec(), &batch)?;
            objective.loss(&head::losses(&pieces, &hidden, &batch)?, &batch, &references)
        };
        let numbers: Vec<i32> = (0..primals.len() as i32).collect();
        let (found, mut back) = value_and_grad(function, &numbers)?.call(&primals)?;
        eval(found.iter().chain(&back))?;
        for (index, gradient) in outside.iter().zip(back.split_off(width)) {
            accumulate(gradients, *index, gradient)?;
        }
        Ok((found, back))
    }

    /// What the embedding's own adapters get from the way back.
    fn embedding_back(
        &self,
        outside: &[usize],
        values: &[Array],
        back: &[Array],
        batch: &Batch,
        gradients: &mut [Option<Array>],
    ) -> Result<()> {
        let (network, own, batch) = (self.clone(), outside.to_vec(), batch.clone());
        let function = move |values: &[Array]| {
            let pieces = network.parameters.apply(&network.pieces, &own, values, &[])?;
            flow::start(&pieces, &batch)
        };
        let (_, results) = vjp(function, values, back)?;
        eval(&results)?;
        for (index, gradient) in outside.iter().zip(results) {
            accumulate(gradients, *index, gradient)?;
        }
        Ok(())
    }
}

fn accumulate(gradients: &mut [Option<Array>], index: usize, gradient: Array) -> Result<()> {
    if let Some(place) = gradients.get_mut(index) {
        *place = Some(match place.take() {
            Some(sum) => sum.add(&gradient)?,
            None => gradient,
        });
    }
    Ok(())
}
