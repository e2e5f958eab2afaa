//! From the last hidden states to the loss of each target, all at once or for a few positions at a time.
//!
//! Logits are by far the largest array of a small model's step: `[B * L, vocabulary]`, and again for what the loss keeps
//! and for their gradient. For a few positions at a time they are computed, made into losses and gone back through
//! before the next few exist; where an objective needs all losses before it knows any gradient, they are computed
//! twice.

use crate::mlx::autograd::vjp;
use crate::mlx::{Array, Dtype, Error, Result};
use crate::models::pieces::Pieces;
use crate::train::batches::{Batch, Stream};
use crate::train::losses::{Objective, References, cross_entropy};

/// Loss of each target, `[B, L]` a stream.
pub(super) fn losses(pieces: &Pieces, hidden: &[Array], batch: &Batch) -> Result<Vec<Array>> {
    let one = |(hidden, stream): (&Array, &Stream)| cross_entropy(&pieces.logits(hidden)?, &stream.targets);
    hidden.iter().zip(&batch.streams).map(one).collect()
}

/// A few positions of a stream.
struct Chunk {
    hidden: Array,
    targets: Array,
    places: Array,
}

/// The positions that are looked at, `size` at a time, in order. Gradients do not pass.
fn chunks(hidden: &Array, stream: &Stream, prompts: bool, size: usize) -> Result<Vec<Chunk>> {
    let features = hidden.dim(-1);
    let rows = hidden.stop_gradient()?.reshape(&[-1, features])?;
    let targets = stream.targets.reshape(&[-1])?;
    let chunk = |places: &[u32]| {
        let places = Array::from_slice(places, &[places.len() as i32])?;
        let hidden = rows.take(&places, 0)?.expand_dims(0)?;
        Ok(Chunk { hidden, targets: targets.take(&places, 0)?.expand_dims(0)?, places })
    };
    stream.looked_at(prompts).chunks(size.max(1)).map(chunk).collect()
}

/// Rows of chunks back in their places, zeros elsewhere: `[1, n, …]` each to `[B * L, …]`.
fn gathered(parts: &[Array], stream: &Stream, prompts: bool, dtype: Dtype) -> Result<Array> {
    let count = stream.targets.size();
    let places = stream.looked_at(prompts);
    let mut from = vec![places.len() as u32; count];
    for (row, place) in (0u32..).zip(places) {
        if let Some(from) = from.get_mut(*place as usize) {
            *from = row;
        }
    }
    let mut shape = vec![1];
    shape.extend(parts.first().map_or(&[][..], |part| part.shape().get(2..).unwrap_or_default()));
    let mut rows = parts.iter().map(|part| part.squeeze(0)).collect::<Result<Vec<_>>>()?;
    rows.push(Array::zeros(&shape, dtype)?);
    Array::concatenate(&rows, 0)?.take(&Array::from_slice(&from, &[count as i32])?, 0)
}

/// [`losses`] of `size` positions at a time, each chunk after the last, and the last one's result to wait for.
pub(super) fn chunked_losses(
    pieces: &Pieces,
    hidden: &[Array],
    batch: &Batch,
    prompts: bool,
    size: usize,
) -> Result<(Vec<Array>, Option<Array>)> {
    let mut last: Option<Array> = None;
    let mut all = Vec::with_capacity(hidden.len());
    for (hidden, stream) in hidden.iter().zip(&batch.streams) {
        let mut parts = Vec::new();
        for chunk in chunks(hidden, stream, prompts, size)? {
            let input = waiting(&chunk.hidden, last.as_ref())?;
            let part = cross_entropy(&pieces.logits(&input)?, &chunk.targets)?.astype(Dtype::Float32)?;
            last = Some(part.clone());
            parts.push(part);
        }
        all.push(gathered(&parts, stream, prompts, Dtype::Float32)?.reshape(stream.targets.shape())?);
    }
    Ok((all, last))
}

fn waiting(array: &Array, last: Option<&Array>) -> Result<Array> {
    last.map_or_else(|| Ok(array.clone()), |last| array.after([last]))
}

/// The objective's values, and the gradient of its loss with respect to the hidden states of each stream, computed for
/// `size` positions at a time. Nothing of it is part of an outer gradient.
pub(super) fn chunked_gradient(
    pieces: &Pieces,
    hidden: &[Array],
    batch: &Batch,
    objective: &Objective,
    references: &References,
    size: usize,
) -> Result<(Vec<Array>, Vec<Array>)> {
    let prompts = objective.looks_at_prompts();
    // Where each target's weight in the loss does not depend on the losses, one pass does.
    let (losses, mut last) = match objective.is_linear() {
        true => {
            let zeros = |stream: &Stream| Array::zeros(stream.targets.shape(), Dtype::Float32);
            (batch.streams.iter().map(zeros).collect::<Result<Vec<_>>>()?, None)
        }
        false => chunked_losses(pieces, hidden, batch, prompts, size)?,
    };
    let (values, weights) = objective_gradient(&losses, batch, objective, references)?;
    let (mut found, mut gradients) = (Vec::new(), Vec::new());
    for ((hidden, stream), weights) in hidden.iter().zip(&batch.streams).zip(&weights) {
        let weights = weights.reshape(&[-1])?;
        let (mut parts, mut backs) = (Vec::new(), Vec::new());
        for chunk in chunks(hidden, stream, prompts, size)? {
            let input = waiting(&chunk.hidden, last.as_ref())?;
            let weight = weights.take(&chunk.places, 0)?.expand_dims(0)?;
            let (network, targets) = (pieces.clone(), chunk.targets.clone());
            let function = move |inputs: &[Array]| {
                let loss = cross_entropy(&network.logits(&inputs[0])?, &targets)?;
                Ok(vec![loss.astype(Dtype::Float32)?])
            };
            let (mut loss, mut back) = vjp(function, &[input], &[weight])?;
            let missing = || Error::new("a gradient is missing");
            let (loss, back) = (loss.pop().ok_or_else(missing)?, back.pop().ok_or_else(missing)?);
            last = Some(back.clone());
            parts.push(loss);
            backs.push(back);
        }
        found.push(gathered(&parts, stream, prompts, Dtype::Float32)?.reshape(stream.targets.shape())?);
        gradients.push(gathered(&backs, stream, prompts, hidden.dtype())?.reshape(hidden.shape())?);
    }
    let values = match objective.is_linear() {
        true => objective.loss(&found, batch, references)?,
        false => values,
    };
    Ok((values, gradients))
}

/// The objective's values and its loss's gradient with respect to the loss of each target.
pub(super) fn objective_gradient(
    losses: &[Array],
    batch: &Batch,
    objective: &Objective,
    references: &References,
) -> Result<(Vec<Array>, Vec<Array>)> {
    let count = objective.figures().len();
    let (objective, batch, references) = (objective.clone(), batch.clone(), references.clone());
    let function = move |losses: &[Array]| objective.loss(losses, &batch, &references);
    let mut cotangents = vec![Array::scalar(1.0, Dtype::Float32)?];
    cotangents.extend((0..count).map(|_| Array::scalar(0.0, Dtype::Float32)).collect::<Result<Vec<_>>>()?);
    vjp(function, losses, &cotangents)
}
