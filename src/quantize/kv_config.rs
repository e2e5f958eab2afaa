//! Bits for each layer's key-value cache: kv_config.json.
//!
//! A method of our own: one layer's cache at a time is packed to each width while the others stay as they are, and the
//! KL divergence of the predictions is measured; all layers start at the fewest bits, and the layer that gains most
//! is raised next until the mean reaches the target.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::sensitivity::{SweepError, SweepOptions, batch, mean_divergence};
use super::source::SourceModel;
use super::sweep_results::SweepResults;
use crate::cache::{LayerCache, LayerKind, make_prompt_cache, maybe_quantize};
use crate::mlx::{Array, Dtype, Result};
use crate::models::Model;

/// Widths of a packed cache.
pub const WIDTHS: [u8; 2] = [4, 8];
/// Numbers that share a scale, where a head has as many.
const GROUP_SIZES: [u32; 3] = [64, 32, 128];

/// One layer of kv_config.json; layers that it does not list keep their cache unpacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvLayer {
    /// Index among the caches.
    pub layer_idx: usize,
    /// Bits a number.
    pub bits: u8,
    /// Numbers that share a scale.
    pub group_size: u32,
}

/// Measures every layer of full attention and gives each its bits, so that their mean is at least `target` (4 to 8).
/// Results are kept in `file` as they come, and what it has of the same sweep is not computed again; `model` names the
/// weights there. `on_progress` hears layers done and in all.
///
/// # Errors
/// When the model cannot be run, has no cache that can be packed, the file cannot be written, or the caller wants to
/// stop.
pub fn kv_config(
    source: &SourceModel,
    sequences: &[Vec<u32>],
    target: f64,
    file: &Path,
    model: &str,
    on_progress: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
) -> std::result::Result<Vec<KvLayer>, SweepError> {
    let network = source.load()?;
    let head = u32::try_from(network.head_dim()).unwrap_or(0);
    let group_size = GROUP_SIZES.into_iter().find(|size| head > 0 && head.is_multiple_of(*size));
    let kinds = network.layer_kinds().iter().enumerate();
    let layers: Vec<usize> =
        kinds.filter(|(_, kind)| matches!(kind, LayerKind::Full)).map(|(layer, _)| layer).collect();
    let Some(group_size) = group_size.filter(|_| !layers.is_empty()) else {
        return Err(SweepError::NoCaches);
    };
    let options = SweepOptions { candidates: WIDTHS.to_vec(), group_size, sequences: sequences.to_vec() };
    let mut results = SweepResults::open(file, model, &options);
    let batch = batch(sequences)?;
    let mut reference = None;
    let mut divergences = BTreeMap::new();
    for (done, &layer) in layers.iter().enumerate() {
        if on_progress(done, layers.len()).is_break() {
            return Err(SweepError::Interrupted);
        }
        let name = layer.to_string();
        if results.get(&name).is_none() {
            let reference = match &reference {
                Some(reference) => reference,
                None => reference.insert(logits(&*network, &batch, None)?),
            };
            let mut of_layer = BTreeMap::new();
            for bits in WIDTHS {
                let packed = logits(&*network, &batch, Some((layer, bits, group_size)))?;
                of_layer.insert(bits, mean_divergence(reference, &packed)?);
            }
            results.put(&name, of_layer)?;
        }
        let known = results.get(&name);
        divergences.insert(
            layer,
            WIDTHS.map(|bits| known.and_then(|known| known.get(&bits)).copied().unwrap_or(0.0)),
        );
    }
    let _ = on_progress(layers.len(), layers.len());
    let bits = share_out(&divergences, target);
    Ok(bits.into_iter().map(|(layer_idx, bits)| KvLayer { layer_idx, bits, group_size }).collect())
}

/// Logits of the sequences with one layer's cache packed.
fn logits(model: &dyn Model, batch: &Array, packed: Option<(usize, u8, u32)>) -> Result<Array> {
    let mut caches: Vec<LayerCache> = make_prompt_cache(model.layer_kinds(), None);
    if let Some((layer, bits, group_size)) = packed
        && let Some(cache) = caches.get_mut(layer)
    {
        maybe_quantize(std::slice::from_mut(cache), bits, group_size, 0)?;
    }
    let logits = model.forward(batch, Some(&mut caches))?.astype(Dtype::Float32)?;
    logits.eval()?;
    Ok(logits)
}

/// Raises layers by what they gain until the mean reaches the target.
fn share_out(divergences: &BTreeMap<usize, [f64; 2]>, target: f64) -> BTreeMap<usize, u8> {
    let mut bits: BTreeMap<usize, u8> = divergences.keys().map(|layer| (*layer, WIDTHS[0])).collect();
    let gain = |layer: &usize| divergences.get(layer).map_or(0.0, |[low, high]| low - high);
    let mut order: Vec<usize> = divergences.keys().copied().collect();
    order.sort_by(|a, b| gain(b).total_cmp(&gain(a)));
    for layer in order {
        let mean = bits.values().map(|bits| f64::from(*bits)).sum::<f64>() / bits.len() as f64;
        if mean >= target {
            break;
        }
        bits.insert(layer, WIDTHS[1]);
    }
    bits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_that_gain_most_are_raised_until_the_mean_reaches_the_target() {
        let divergences =
            BTreeMap::from([(0, [0.5, 0.1]), (1, [0.9, 0.1]), (2, [0.1, 0.1]), (5, [0.2, 0.1])]);
        let raised = |target| {
            let bits = share_out(&divergences, target);
            bits.into_iter().filter(|(_, bits)| *bits == 8).map(|(layer, _)| layer).collect::<Vec<_>>()
        };
        assert!(raised(4.0).is_empty());
        assert_eq!(raised(4.5), [1]);
        assert_eq!(raised(6.0), [0, 1]);
        assert_eq!(raised(8.0), [0, 1, 2, 5]);
    }
}
