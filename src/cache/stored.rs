//! A cache in memory of our own, which steps of a fused decoder write: the growing cache (`KVCache`) or, with a window,
//! the bounded one (`RotatingKVCache` without kept positions).
//!
//! Clones share the memory until one of them goes on; then it gets a copy of its own. Everything that is not a fused
//! step sees arrays: [`StoredKvCache::export`].

use std::rc::Rc;
use std::sync::Arc;

use half::f16;

use super::{KvCache, LayerCache, RotatingKvCache, STEP};
use crate::mlx::cpu_ops::{KvShape, KvStore, KvType};
use crate::mlx::{Array, Error, Result};

/// Keys and values of one layer and a batch of sequences of one length.
#[derive(Clone, Debug)]
pub struct StoredKvCache {
    /// One a sequence, all of one shape.
    stores: Vec<Arc<KvStore>>,
    shape: KvShape,
    /// Held by every clone that uses the stores; steps in flight hold the stores only.
    owners: Rc<()>,
    /// The result of the last step that writes to the stores.
    pending: Option<Array>,
    /// Positions seen.
    offset: i32,
}

impl StoredKvCache {
    /// Whether stores of `shape` can stand for the cache of a batch.
    pub(super) fn can_import(cache: &LayerCache, shape: KvShape, batch: i32) -> bool {
        let fits = |buffers: Option<(&Array, &Array)>| {
            buffers.is_none_or(|(keys, values)| {
                [keys, values].iter().all(|array| {
                    let dims = [array.dim(1), array.dim(3)].map(|dim| dim as usize);
                    array.dim(0) == batch && dims == [shape.heads, shape.dim]
                })
            })
        };
        match (cache, shape.window) {
            (LayerCache::Plain(cache), None) => fits(cache.buffers()),
            (LayerCache::Rotating(cache), Some(window)) => {
                cache.keep() == 0 && usize::try_from(cache.max_size()) == Ok(window) && fits(cache.buffers())
            }
            (LayerCache::Stored(cache), _) => {
                cache.shape == shape && cache.stores.len() == usize::try_from(batch).unwrap_or(0)
            }
            _ => false,
        }
    }

    /// Takes over what a cache of arrays holds, with room for `added` positions more; `None` unless
    /// [`can_import`](Self::can_import).
    pub(super) fn import(cache: &LayerCache, shape: KvShape, batch: i32, added: i32) -> Result<Option<Self>> {
        if !Self::can_import(cache, shape, batch) {
            return Ok(None);
        }
        let (offset, content) = match (cache, shape.window) {
            (LayerCache::Plain(cache), None) => {
                let content = match cache.buffers() {
                    Some((keys, values)) if cache.offset() > 0 => {
                        Some((keys.slice(2, 0, cache.offset())?, values.slice(2, 0, cache.offset())?))
                    }
                    _ => None,
                };
                (cache.offset(), content)
            }
            (LayerCache::Rotating(cache), Some(_)) => (cache.offset(), cache.last_positions()?),
            _ => return Ok(None),
        };
        let mut stores = Vec::new();
        for row in 0..batch {
            let store = new_store(shape, offset.saturating_add(added))?;
            if let Some((keys, values)) = &content {
                let count = keys.dim(2).min(values.dim(2)).min(offset);
                let last = |array: &Array| {
                    let array = array.slice(0, row, row + 1)?;
                    array.slice(2, array.dim(2) - count, array.dim(2))?.to_f32_vec()
                };
                let (keys, values) = (last(keys)?, last(values)?);
                // SAFETY: nobody else knows the store yet.
                if !unsafe { store.write((offset - count) as usize, count as usize, &keys, &values) } {
                    return Err(Error::new("a cache's arrays do not fit its shape"));
                }
            }
            stores.push(Arc::new(store));
        }
        Ok(Some(Self { stores, shape, owners: Rc::new(()), pending: None, offset }))
    }

    /// Sequences, key-value heads and features a head.
    pub fn layout(&self) -> [i32; 3] {
        [self.stores.len(), self.shape.heads, self.shape.dim]
            .map(|size| i32::try_from(size).unwrap_or(i32::MAX))
    }

    /// Whether numbers are kept in single precision, not in half.
    pub fn is_wide(&self) -> bool {
        self.shape.kind == KvType::F32
    }

    /// Positions seen so far.
    pub fn offset(&self) -> i32 {
        self.offset
    }

    /// Makes room for `added` positions, or if there is not enough also for those `following`, and returns the stores,
    /// which only the next step may write to.
    pub(super) fn reserve(&mut self, added: i32, following: i32) -> Result<Vec<Arc<KvStore>>> {
        let end = self.offset.checked_add(added).filter(|&end| end < i32::MAX - STEP);
        let end = end.ok_or_else(|| Error::new("the sequence exceeds 2^31 positions"))?;
        let fits = self.stores.iter().all(|store| store.fits(end as usize));
        if Rc::strong_count(&self.owners) > 1 || !fits {
            self.settle()?;
            let held = self.held();
            for store in &mut self.stores {
                // A quarter more, so that growing costs little altogether; memory that is not reached is not used.
                let more = following.max(self.offset / 4).max(STEP);
                let larger = new_store(self.shape, end.saturating_add(more))?;
                // SAFETY: all steps that write are done; the new store is ours alone.
                unsafe { larger.copy_from(store, held.clone()) };
                *store = Arc::new(larger);
            }
            self.owners = Rc::new(());
        }
        Ok(self.stores.clone())
    }

    /// Counts the positions of a step whose result is `pending`.
    pub(super) fn advance(&mut self, added: i32, pending: &Array) {
        self.offset = self.offset.saturating_add(added);
        self.pending = Some(pending.clone());
    }

    /// What must be computed before the stores hold all positions.
    pub(super) fn pending(&self) -> Option<&Array> {
        self.pending.as_ref()
    }

    /// Lets go of the last step's result, which must be computed.
    pub(super) fn settled(&mut self) {
        self.pending = None;
    }

    fn settle(&self) -> Result<()> {
        self.pending.as_ref().map_or(Ok(()), Array::eval)
    }

    /// Positions that may still be seen.
    fn held(&self) -> std::ops::Range<usize> {
        let end = self.offset.max(0) as usize;
        end.saturating_sub(self.shape.window.unwrap_or(end))..end
    }

    fn window(&self) -> Option<i32> {
        self.shape.window.and_then(|window| i32::try_from(window).ok())
    }

    /// Whether the last positions can be taken back.
    pub(super) fn is_trimmable(&self) -> bool {
        self.window().is_none_or(|window| self.offset < window)
    }

    pub(super) fn trim(&mut self, n: i32) -> i32 {
        let n = n.min(self.offset);
        self.offset -= n;
        n
    }

    pub(super) fn nbytes(&self) -> usize {
        self.stores.iter().map(|store| store.bytes()).sum()
    }

    /// The same cache, empty, in its kind for arrays.
    pub(super) fn without_content(&self) -> LayerCache {
        match self.window() {
            None => LayerCache::Plain(KvCache::default()),
            Some(window) => LayerCache::Rotating(RotatingKvCache::new(window, 0)),
        }
    }

    /// The same cache over arrays; waits for steps in flight.
    ///
    /// # Errors
    /// When a step failed.
    pub fn export(&self) -> Result<LayerCache> {
        self.settle()?;
        let positions = self.held();
        if positions.is_empty() {
            return Ok(self.without_content());
        }
        let shape = self.shape;
        let dims = [self.stores.len() as i32, shape.heads as i32, positions.len() as i32, shape.dim as i32];
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for store in &self.stores {
            // SAFETY: no step is in flight.
            let (row_keys, row_values) = unsafe { store.read(positions.clone()) };
            keys.extend(row_keys);
            values.extend(row_values);
        }
        let array = |bytes: &[u8]| match shape.kind {
            KvType::F16 => {
                let numbers = bytes.as_chunks().0.iter().map(|&pair| f16::from_ne_bytes(pair));
                Array::from_slice(&numbers.collect::<Vec<_>>(), &dims)
            }
            KvType::F32 => {
                let numbers = bytes.as_chunks().0.iter().map(|&four| f32::from_ne_bytes(four));
                Array::from_slice(&numbers.collect::<Vec<_>>(), &dims)
            }
        };
        let (keys, values) = (array(&keys)?, array(&values)?);
        Ok(match self.window() {
            None => LayerCache::Plain(KvCache::from_state(keys, values, self.offset)),
            Some(window) => {
                let count = positions.len() as i32;
                let cache = RotatingKvCache::from_state(keys, values, self.offset, 0, window, count);
                LayerCache::Rotating(cache)
            }
        })
    }
}

fn new_store(shape: KvShape, positions: i32) -> Result<KvStore> {
    let step = STEP as usize;
    let positions = (positions.max(1) as usize).next_multiple_of(step);
    KvStore::new(shape, positions).map_err(|error| Error::new(error.to_string()))
}
