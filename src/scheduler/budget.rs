//! Bytes that caches come to, known before a request begins.

use crate::cache::{LayerCache, LayerKind, make_prompt_cache};
use crate::generate::step::KvQuantization;
use crate::mlx::{Array, Result};
use crate::models::Model;

/// One layer's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layer {
    bytes_per_token: usize,
    /// Positions it keeps at most.
    window: Option<usize>,
}

/// What one sequence's caches take, by its length.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct KvCost {
    layers: Vec<Layer>,
}

impl KvCost {
    /// Of a model's own caches, packed where that is asked for.
    ///
    /// # Errors
    /// MLX's.
    pub(super) fn of(
        model: &dyn Model,
        max_kv_size: Option<i32>,
        quantization: Option<KvQuantization>,
    ) -> Result<Self> {
        let kinds = model.layer_kinds();
        let mut caches = make_prompt_cache(kinds, max_kv_size);
        // The graph of one step has the shapes and types of the model's own caches; nothing is computed.
        model.forward(&Array::from_slice(&[0u32], &[1, 1])?, Some(&mut caches))?;
        let layer = |(cache, kind): (&LayerCache, &LayerKind)| {
            let (numbers, size) = numbers(cache);
            let window = match (kind, max_kv_size) {
                (LayerKind::Sliding { window }, _) => Some(*window),
                (LayerKind::Full, bound) => bound,
            };
            let bytes_per_token = match quantization {
                Some(KvQuantization { bits, group_size, .. }) if window.is_none() => {
                    let groups = numbers / (group_size as usize).max(1);
                    numbers * usize::from(bits) / 8 + 2 * groups * size
                }
                _ => numbers * size,
            };
            Layer { bytes_per_token, window: window.and_then(|window| usize::try_from(window).ok()) }
        };
        Ok(Self { layers: caches.iter().zip(kinds).map(layer).collect() })
    }

    /// Bytes for a sequence of so many tokens.
    pub(super) fn bytes(&self, tokens: usize) -> usize {
        let layer = |layer: &Layer| {
            let held = layer.window.map_or(tokens, |window| tokens.min(window));
            held.saturating_mul(layer.bytes_per_token)
        };
        self.layers.iter().fold(0, |sum, each| sum.saturating_add(layer(each)))
    }

    /// Bytes that another token takes in a short sequence.
    pub(super) fn bytes_per_token(&self) -> usize {
        self.bytes(1)
    }

    /// The most tokens that fit into so many bytes, up to `most`.
    pub(super) fn tokens(&self, bytes: usize, most: usize) -> usize {
        let (mut fits, mut too_many) = (0, most.saturating_add(1));
        while too_many - fits > 1 {
            let middle = fits + (too_many - fits) / 2;
            if self.bytes(middle) <= bytes {
                fits = middle;
            } else {
                too_many = middle;
            }
        }
        fits
    }
}

/// Numbers that a position takes in a cache, and the bytes of one.
fn numbers(cache: &LayerCache) -> (usize, usize) {
    match cache {
        LayerCache::Stored(cache) => {
            let [_, heads, dim] = cache.layout().map(|size| usize::try_from(size).unwrap_or(0));
            (2 * heads * dim, if cache.is_wide() { 4 } else { 2 })
        }
        _ => {
            let arrays = cache.arrays();
            let numbers = arrays.iter().map(|array| array.size() / (array.dim(2).max(1) as usize)).sum();
            (numbers, arrays.first().map_or(0, |array| array.nbytes() / array.size().max(1)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(layers: &[(usize, Option<usize>)]) -> KvCost {
        let layer = |&(bytes_per_token, window)| Layer { bytes_per_token, window };
        KvCost { layers: layers.iter().map(layer).collect() }
    }

    #[test]
    fn windows_bound_what_a_layer_takes() {
        let cost = cost(&[(10, None), (100, Some(8))]);
        assert_eq!([1, 8, 9, 100].map(|tokens| cost.bytes(tokens)), [110, 880, 890, 1800]);
        assert_eq!(cost.bytes(usize::MAX), usize::MAX);
        for bytes in [0, 109, 110, 879, 880, 889, 890, 1799, 1800] {
            let tokens = cost.tokens(bytes, 1000);
            assert!(cost.bytes(tokens) <= bytes && cost.bytes(tokens + 1) > bytes, "{bytes}");
        }
        assert_eq!(cost.tokens(usize::MAX, 50), 50);
    }
}
