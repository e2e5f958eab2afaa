//! The growing cache (`KVCache`).

use super::{QuantizedKvCache, STEP, grow};
use crate::mlx::{Array, Error, Result};

/// Keys and values in buffers that grow by 256 positions.
#[derive(Clone, Debug, Default)]
pub struct KvCache {
    buffers: Option<(Array, Array)>,
    offset: i32,
}

impl KvCache {
    /// A cache over existing buffers of which `offset` positions are filled.
    pub fn from_state(keys: Array, values: Array, offset: i32) -> Self {
        Self { buffers: Some((keys, values)), offset }
    }

    /// Positions stored.
    pub fn offset(&self) -> i32 {
        self.offset
    }

    /// The buffers, the slack after `offset` included.
    pub fn buffers(&self) -> Option<(&Array, &Array)> {
        self.buffers.as_ref().map(|(keys, values)| (keys, values))
    }

    pub(super) fn arrays(&self) -> Vec<&Array> {
        self.buffers.iter().flat_map(|(keys, values)| [keys, values]).collect()
    }

    pub(super) fn update_and_fetch(&mut self, keys: &Array, values: &Array) -> Result<(Array, Array)> {
        let (prev, added) = (self.offset, keys.dim(2));
        let next =
            prev.checked_add(added).ok_or_else(|| Error::new("the sequence exceeds 2^31 positions"))?;
        let (k, v) = match self.buffers.take() {
            Some((k, v)) if next <= k.dim(2) => (k, v),
            old => {
                let positions = (STEP + added - 1) / STEP * STEP;
                // mlx-lm cuts the slack off before it grows, so a capacity is not always a multiple of 256.
                let old = match old {
                    Some((k, v)) if prev % STEP != 0 => Some((k.slice(2, 0, prev)?, v.slice(2, 0, prev)?)),
                    other => other,
                };
                let (old_k, old_v) = (old.as_ref().map(|(k, _)| k), old.as_ref().map(|(_, v)| v));
                (grow(old_k, keys, positions)?, grow(old_v, values, positions)?)
            }
        };
        let (k, v) = (k.slice_update(keys, 2, prev)?, v.slice_update(values, 2, prev)?);
        self.offset = next;
        let fetched = if next < k.dim(2) {
            (k.slice(2, 0, next)?, v.slice(2, 0, next)?)
        } else {
            (k.clone(), v.clone())
        };
        self.buffers = Some((k, v));
        Ok(fetched)
    }

    pub(super) fn trim(&mut self, n: i32) -> i32 {
        let n = n.min(self.offset);
        self.offset -= n;
        n
    }

    /// Packs the whole buffers, the slack included, as mlx-lm does.
    pub(super) fn to_quantized(&self, bits: u8, group_size: u32) -> Result<QuantizedKvCache> {
        QuantizedKvCache::from_dense(self.buffers(), self.offset, bits, group_size)
    }
}
