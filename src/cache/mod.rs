//! Key-value caches, one a layer: mlx-lm's `models/cache.py` for a single sequence.
//!
//! Keys and values are `[B, kv_heads, T, head_dim]` everywhere. [`LayerCache`] is what a model holds; the kinds
//! behind it each have a file of their own.

mod joined;
mod plain;
mod quantized;
mod rotating;
mod stored;

pub use joined::JoinedKvCache;
pub(crate) use joined::{JoinedRows, places, ragged_mask};
pub use plain::KvCache;
pub use quantized::{Packed, QuantizedKvCache};
pub use rotating::RotatingKvCache;
pub use stored::StoredKvCache;

use std::sync::Arc;

use crate::mlx::cpu_ops::{KvShape, KvStore};
use crate::mlx::fast::Mask;
use crate::mlx::{Array, Dtype, Error, Result};

/// Positions a buffer grows by (`KVCache.step`).
pub(crate) const STEP: i32 = 256;

/// What one layer's attention needs to know to choose its cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// Attends to everything before it.
    Full,
    /// Attends to the last `window` positions.
    Sliding {
        /// Positions, the query's own included.
        window: i32,
    },
}

/// The keys and values that a step attends to.
pub enum Attended<'a> {
    /// In the model's own type.
    Dense(Array, Array),
    /// Packed; attention multiplies them as they are.
    Quantized {
        /// Keys.
        keys: Packed,
        /// Values.
        values: Packed,
        /// The scheme.
        cache: &'a QuantizedKvCache,
    },
}

/// One layer's cache.
#[derive(Clone, Debug)]
pub enum LayerCache {
    /// Grows without bound.
    Plain(KvCache),
    /// Keeps a window.
    Rotating(RotatingKvCache),
    /// Grows without bound, packed.
    Quantized(QuantizedKvCache),
    /// One of the first two, in memory that fused steps write.
    Stored(StoredKvCache),
    /// The first, beside those of the sequences that it steps with.
    Joined(JoinedKvCache),
}

impl LayerCache {
    /// Positions seen so far: where the next token stands.
    pub fn offset(&self) -> i32 {
        match self {
            Self::Plain(cache) => cache.offset(),
            Self::Rotating(cache) => cache.offset(),
            Self::Quantized(cache) => cache.offset(),
            Self::Stored(cache) => cache.offset(),
            Self::Joined(cache) => cache.offset(),
        }
    }

    /// Appends `[B, kv_heads, L, head_dim]` and returns what the new queries attend to.
    pub fn update_and_fetch(&mut self, keys: &Array, values: &Array) -> Result<Attended<'_>> {
        if let Some(exported) = self.exported()? {
            *self = exported;
        }
        match self {
            Self::Plain(cache) => cache.update_and_fetch(keys, values).map(|(k, v)| Attended::Dense(k, v)),
            Self::Rotating(cache) => cache.update_and_fetch(keys, values).map(|(k, v)| Attended::Dense(k, v)),
            Self::Quantized(cache) => {
                let (keys, values) = cache.update_and_fetch(keys, values)?;
                Ok(Attended::Quantized { keys, values, cache })
            }
            Self::Stored(_) | Self::Joined(_) => Err(Error::new("a cache was not exported")),
        }
    }

    /// The same cache over arrays of its own, unless it is that already.
    ///
    /// # Errors
    /// MLX's, and those of steps in flight.
    pub fn exported(&self) -> Result<Option<Self>> {
        match self {
            Self::Stored(cache) => cache.export().map(Some),
            Self::Joined(cache) => cache.export().map(Some),
            _ => Ok(None),
        }
    }

    /// The mask for `n` new queries; `window` is the layer kind's own, `None` for full attention.
    pub fn make_mask(&self, n: i32, window: Option<i32>) -> Result<Mask> {
        match self {
            Self::Plain(cache) => plain_mask(n, cache.offset(), window),
            Self::Quantized(cache) => plain_mask(n, cache.offset(), window),
            Self::Rotating(cache) => cache.make_mask(n, window),
            Self::Stored(cache) => cache.export()?.make_mask(n, window),
            Self::Joined(cache) => plain_mask(n, cache.offset(), window),
        }
    }

    /// The arrays that hold the cache's content, for evaluation at chunk boundaries. Joined caches, which only single
    /// steps write, have none.
    pub fn arrays(&self) -> Vec<&Array> {
        match self {
            Self::Plain(cache) => cache.arrays(),
            Self::Rotating(cache) => cache.arrays(),
            Self::Quantized(cache) => cache.arrays(),
            Self::Stored(cache) => cache.pending().into_iter().collect(),
            Self::Joined(_) => Vec::new(),
        }
    }

    /// Forgets what a fused step returned, which is computed by now.
    pub fn settled(&mut self) {
        if let Self::Stored(cache) = self {
            cache.settled();
        }
    }

    /// Whether the last positions can be taken back.
    pub fn is_trimmable(&self) -> bool {
        match self {
            Self::Plain(_) | Self::Quantized(_) | Self::Joined(_) => true,
            Self::Rotating(cache) => cache.is_trimmable(),
            Self::Stored(cache) => cache.is_trimmable(),
        }
    }

    /// Forgets the last `n` positions; returns how many were forgotten.
    pub fn trim(&mut self, n: i32) -> i32 {
        match self {
            Self::Plain(cache) => cache.trim(n),
            Self::Rotating(cache) => cache.trim(n),
            Self::Quantized(cache) => cache.trim(n),
            Self::Stored(cache) => cache.trim(n),
            Self::Joined(cache) => cache.trim(n),
        }
    }

    /// Bytes the buffers take.
    pub fn nbytes(&self) -> usize {
        match self {
            Self::Stored(cache) => cache.nbytes(),
            Self::Joined(cache) => cache.nbytes(),
            _ => self.arrays().iter().map(|array| array.nbytes()).sum(),
        }
    }

    /// Whether [`store`](Self::store) can move the content.
    pub fn can_store(&self, shape: KvShape, batch: i32) -> bool {
        StoredKvCache::can_import(self, shape, batch)
    }

    /// Moves the content into memory that fused steps write, if this kind of cache can be there and its content has
    /// that shape, with room for `added` positions more. Returns whether it is there now.
    pub fn store(&mut self, shape: KvShape, batch: i32, added: i32) -> Result<bool> {
        if !matches!(self, Self::Stored(_))
            && let Some(stored) = StoredKvCache::import(self, shape, batch, added)?
        {
            *self = Self::Stored(stored);
        }
        Ok(matches!(self, Self::Stored(_)))
    }

    /// Makes room for a fused step of `added` positions, and where that takes new memory for those `following` too: a
    /// store a sequence; `None` for a cache that is not stored.
    pub fn reserve(&mut self, added: i32, following: i32) -> Result<Option<Vec<Arc<KvStore>>>> {
        match self {
            Self::Stored(cache) => cache.reserve(added, following).map(Some),
            _ => Ok(None),
        }
    }

    /// Counts the positions of a fused step, whose result is `pending`.
    pub fn advance(&mut self, added: i32, pending: &Array) {
        if let Self::Stored(cache) = self {
            cache.advance(added, pending);
        }
    }
}

/// The caches of all layers for one sequence (mlx-lm's `make_prompt_cache`).
///
/// `max_kv_size` bounds layers of full attention by a rotating cache that keeps the first 4 positions.
pub fn make_prompt_cache(layers: &[LayerKind], max_kv_size: Option<i32>) -> Vec<LayerCache> {
    let make = |layer: &LayerKind| match (*layer, max_kv_size) {
        (LayerKind::Sliding { window }, _) => LayerCache::Rotating(RotatingKvCache::new(window, 0)),
        (LayerKind::Full, Some(size)) => LayerCache::Rotating(RotatingKvCache::new(size, 4)),
        (LayerKind::Full, None) => LayerCache::Plain(KvCache::default()),
    };
    layers.iter().map(make).collect()
}

/// Replaces plain caches that have reached `start` positions by packed ones (`maybe_quantize_kv_cache`).
///
/// # Errors
/// A rotating cache cannot be packed (mlx-lm: "NYI"); callers refuse such models before generation starts.
pub fn maybe_quantize(caches: &mut [LayerCache], bits: u8, group_size: u32, start: i32) -> Result<()> {
    for cache in caches {
        if cache.offset() >= start
            && let Some(exported) = cache.exported()?
        {
            *cache = exported;
        }
        if let LayerCache::Plain(plain) = cache
            && plain.offset() >= start
        {
            *cache = LayerCache::Quantized(plain.to_quantized(bits, group_size)?);
        }
    }
    Ok(())
}

/// Whether every layer can take positions back (`can_trim_prompt_cache`).
pub fn can_trim(caches: &[LayerCache]) -> bool {
    caches.iter().all(LayerCache::is_trimmable)
}

/// `create_attention_mask` of mlx-lm's cache.py.
fn plain_mask(n: i32, offset: i32, window: Option<i32>) -> Result<Mask> {
    match window {
        Some(_) => causal_mask(n, offset, window).map(Mask::Array),
        None if n == 1 => Ok(Mask::None),
        None => Ok(Mask::Causal),
    }
}

/// Boolean `[n, offset + n]`: query `offset + i` sees key `j` when `j` is not later and inside the window
/// (`create_causal_mask` of mlx-lm's base.py).
pub fn causal_mask(n: i32, offset: i32, window: Option<i32>) -> Result<Array> {
    let arange = |from: i32| Array::arange(f64::from(from), f64::from(offset + n), 1.0, Dtype::Int32);
    let queries = arange(offset)?.expand_dims(1)?;
    let keys = arange(0)?.expand_dims(0)?;
    let mask = queries.greater_equal(&keys)?;
    match window {
        None => Ok(mask),
        Some(window) => {
            let reach = keys.add(&Array::from_slice(&[window], &[])?)?;
            mask.bitwise_and(&queries.less(&reach)?)
        }
    }
}

/// `[B, heads, T, dim]` of zeros after `prefix`, along T.
pub(crate) fn grow(prefix: Option<&Array>, like: &Array, positions: i32) -> Result<Array> {
    let zeros = Array::zeros(&[like.dim(0), like.dim(1), positions, like.dim(3)], like.dtype())?;
    match prefix {
        Some(prefix) => Array::concatenate([prefix, &zeros], 2),
        None => Ok(zeros),
    }
}
