//! Hidden states on their way through the layers: one array a stream, or, for a pair that shares its prompt, the prompt
//! and what either answer adds to it.

use std::ops::Range;

use crate::cache::{LayerCache, LayerKind, causal_mask, make_prompt_cache};
use crate::mlx::fast::Mask;
use crate::mlx::{Array, Result};
use crate::models::pieces::Pieces;
use crate::train::batches::Batch;

/// The first hidden states.
pub(super) fn start(pieces: &Pieces, batch: &Batch) -> Result<Vec<Array>> {
    let whole = |array: &Array| pieces.embed(array);
    match (batch.shared_prefix, &batch.streams[..]) {
        (Some(prefix), [chosen, rejected]) => {
            let after = |ids: &Array| pieces.embed(&ids.slice(1, prefix, ids.dim(1))?);
            Ok(vec![
                pieces.embed(&chosen.inputs.slice(1, 0, prefix)?)?,
                after(&chosen.inputs)?,
                after(&rejected.inputs)?,
            ])
        }
        (_, streams) => streams.iter().map(|stream| whole(&stream.inputs)).collect(),
    }
}

/// Hidden states of whole streams again.
pub(super) fn join(flow: Vec<Array>, batch: &Batch) -> Result<Vec<Array>> {
    match (batch.shared_prefix, &flow[..]) {
        (Some(_), [prefix, chosen, rejected]) => {
            Ok(vec![Array::concatenate([prefix, chosen], 1)?, Array::concatenate([prefix, rejected], 1)?])
        }
        _ => Ok(flow),
    }
}

/// Gradients of whole streams to those of what flows.
pub(super) fn part(gradients: Vec<Array>, batch: &Batch) -> Result<Vec<Array>> {
    match (batch.shared_prefix, &gradients[..]) {
        (Some(prefix), [chosen, rejected]) => {
            let after = |array: &Array| array.slice(1, prefix, array.dim(1));
            let both = chosen.slice(1, 0, prefix)?.add(&rejected.slice(1, 0, prefix)?)?;
            Ok(vec![both, after(chosen)?, after(rejected)?])
        }
        _ => Ok(gradients),
    }
}

/// Through some of the layers.
pub(super) fn through(
    pieces: &Pieces,
    layers: Range<usize>,
    flow: &[Array],
    batch: &Batch,
) -> Result<Vec<Array>> {
    let mut flow = flow.to_vec();
    for index in layers {
        let (Some(block), Some(kind)) = (pieces.blocks.get(index), pieces.kinds.get(index)) else { break };
        flow = match (batch.shared_prefix, &flow[..]) {
            (Some(_), [prefix, chosen, rejected]) => {
                let mut cache = make_prompt_cache(&[*kind], None);
                let Some(cache) = cache.first_mut() else { break };
                let window = window_of(*kind);
                let step = |h: &Array, cache: &mut LayerCache| {
                    let mask = cache.make_mask(h.dim(1), window)?;
                    block.forward_after(h, &mask, Some(cache))
                };
                let prefix = step(prefix, cache)?;
                let chosen = step(chosen, &mut cache.clone())?;
                vec![prefix, chosen, step(rejected, cache)?]
            }
            _ => {
                let one = |h: &Array| block.forward(h, &mask(pieces, index, *kind, h, batch)?);
                flow.iter().map(one).collect::<Result<_>>()?
            }
        };
    }
    Ok(flow)
}

fn window_of(kind: LayerKind) -> Option<i32> {
    match kind {
        LayerKind::Full => None,
        LayerKind::Sliding { window } => Some(window),
    }
}

/// What the positions of a stream may attend to. Positions of packed rows count on, which rotary embeddings do not
/// mind: only distances matter to them.
fn mask(pieces: &Pieces, index: usize, kind: LayerKind, h: &Array, batch: &Batch) -> Result<Mask> {
    let Some(segments) = &batch.segments else { return pieces.mask(index, h) };
    let same = segments.expand_dims(2)?.equal(&segments.expand_dims(1)?)?;
    let causal = causal_mask(h.dim(1), 0, window_of(kind))?;
    Ok(Mask::Array(same.logical_and(&causal)?.expand_dims(1)?))
}
