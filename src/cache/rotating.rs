//! The bounded cache (`RotatingKVCache`): a ring of `max_size` positions, the first `keep` of them permanent.

use super::{STEP, causal_mask, grow};
use crate::mlx::fast::Mask;
use crate::mlx::{Array, Dtype, Error, Result};

/// Keys and values of the last positions.
#[derive(Clone, Debug)]
pub struct RotatingKvCache {
    buffers: Option<(Array, Array)>,
    /// Positions seen, those since overwritten included.
    offset: i32,
    keep: i32,
    max_size: i32,
    /// Where the next position is written.
    idx: i32,
}

impl RotatingKvCache {
    /// A cache of `max_size` positions of which the first `keep` are never overwritten.
    pub fn new(max_size: i32, keep: i32) -> Self {
        Self { buffers: None, offset: 0, keep, max_size, idx: 0 }
    }

    /// A cache over existing buffers.
    pub fn from_state(keys: Array, values: Array, offset: i32, keep: i32, max_size: i32, idx: i32) -> Self {
        Self { buffers: Some((keys, values)), offset, keep, max_size, idx }
    }

    /// Positions seen.
    pub fn offset(&self) -> i32 {
        self.offset
    }

    /// Positions the ring holds at most.
    pub fn max_size(&self) -> i32 {
        self.max_size
    }

    /// Positions at the start that are never overwritten.
    pub fn keep(&self) -> i32 {
        self.keep
    }

    /// Where the next position is written.
    pub fn idx(&self) -> i32 {
        self.idx
    }

    /// The buffers in ring order.
    pub fn buffers(&self) -> Option<(&Array, &Array)> {
        self.buffers.as_ref().map(|(keys, values)| (keys, values))
    }

    /// The last positions in temporal order, as many as are held.
    pub(super) fn last_positions(&self) -> Result<Option<(Array, Array)>> {
        let Some((keys, values)) = self.buffers() else { return Ok(None) };
        Ok(Some((self.temporal_order(keys.clone())?, self.temporal_order(values.clone())?)))
    }

    pub(super) fn arrays(&self) -> Vec<&Array> {
        self.buffers.iter().flat_map(|(keys, values)| [keys, values]).collect()
    }

    pub(super) fn update_and_fetch(&mut self, keys: &Array, values: &Array) -> Result<(Array, Array)> {
        if self.offset.checked_add(keys.dim(2)).is_none() {
            return Err(Error::new("the sequence exceeds 2^31 positions"));
        }
        if keys.dim(2) == 1 { self.update_in_place(keys, values) } else { self.update_concat(keys, values) }
    }

    /// Many positions: the ring is put in temporal order and they are appended, so that each query sees
    /// `max_size` positions; the buffer may hold `max_size + L - 1` afterwards.
    fn update_concat(&mut self, keys: &Array, values: &Array) -> Result<(Array, Array)> {
        let (k, v) = match self.buffers.take() {
            None => (keys.clone(), values.clone()),
            Some((k, v)) => {
                let (k, v) = (self.temporal_order(k)?, self.temporal_order(v)?);
                let excess = k.dim(2) - self.max_size + 1;
                (self.drop_oldest(&k, excess, Some(keys))?, self.drop_oldest(&v, excess, Some(values))?)
            }
        };
        self.offset += keys.dim(2);
        self.idx = k.dim(2);
        self.buffers = Some((k.clone(), v.clone()));
        Ok((k, v))
    }

    /// One position: written into the ring, which grows by at most 256 until it is full.
    fn update_in_place(&mut self, keys: &Array, values: &Array) -> Result<(Array, Array)> {
        let prev = self.offset;
        let (mut k, mut v) = match self.buffers.take() {
            Some((k, v)) if prev < k.dim(2) || k.dim(2) >= self.max_size => (k, v),
            old => {
                let positions = STEP.min(self.max_size - prev);
                self.idx = prev;
                let (old_k, old_v) = (old.as_ref().map(|(k, _)| k), old.as_ref().map(|(_, v)| v));
                (grow(old_k, keys, positions)?, grow(old_v, values, positions)?)
            }
        };
        let excess = k.dim(2) - self.max_size;
        if excess > 0 {
            (k, v) = (self.drop_oldest(&k, excess, None)?, self.drop_oldest(&v, excess, None)?);
            self.idx = self.max_size;
        }
        if self.idx == self.max_size {
            self.idx = self.keep;
        }
        (k, v) = (k.slice_update(keys, 2, self.idx)?, v.slice_update(values, 2, self.idx)?);
        self.offset += 1;
        self.idx += 1;
        let fetched = if self.offset < k.dim(2) {
            (k.slice(2, 0, self.offset)?, v.slice(2, 0, self.offset)?)
        } else {
            (k.clone(), v.clone())
        };
        self.buffers = Some((k, v));
        Ok(fetched)
    }

    /// Without the `excess` positions that follow the kept ones, `append` joined at the end (`_trim`).
    fn drop_oldest(&self, ring: &Array, excess: i32, append: Option<&Array>) -> Result<Array> {
        let parts = if excess > 0 {
            vec![ring.slice(2, 0, self.keep)?, ring.slice(2, excess + self.keep, ring.dim(2))?]
        } else {
            vec![ring.clone()]
        };
        Array::concatenate(parts.iter().chain(append), 2)
    }

    fn temporal_order(&self, ring: Array) -> Result<Array> {
        let length = ring.dim(2);
        if self.idx == length {
            Ok(ring)
        } else if self.idx < self.offset {
            let parts = [
                ring.slice(2, 0, self.keep)?,
                ring.slice(2, self.idx, length)?,
                ring.slice(2, self.keep, self.idx)?,
            ];
            Array::concatenate(&parts, 2)
        } else {
            ring.slice(2, 0, self.idx)
        }
    }

    pub(super) fn make_mask(&self, n: i32, window: Option<i32>) -> Result<Mask> {
        if n > 1 {
            let window = window.unwrap_or(self.max_size);
            let offset = (self.max_size - 1).min(self.offset);
            return if offset + n > window {
                causal_mask(n, offset, Some(window)).map(Mask::Array)
            } else {
                Ok(Mask::Causal)
            };
        }
        match window {
            // Only a window smaller than the ring hides something from a single query.
            Some(window) if self.offset >= window && self.max_size > window => {
                let idx = if self.idx >= self.max_size { 0 } else { self.idx };
                let size = if self.offset < self.max_size { self.offset + 1 } else { self.max_size };
                let positions = Array::arange(0.0, f64::from(size), 1.0, Dtype::Int32)?;
                let visible = positions.greater_equal(&Array::from_slice(&[size - window], &[])?)?;
                visible.roll(idx + 1, 0).map(Mask::Array)
            }
            _ => Ok(Mask::None),
        }
    }

    /// Only before the ring has wrapped.
    pub(super) fn is_trimmable(&self) -> bool {
        self.offset < self.max_size
    }

    pub(super) fn trim(&mut self, n: i32) -> i32 {
        let n = n.min(self.offset);
        self.offset -= n;
        self.idx -= n;
        n
    }
}
