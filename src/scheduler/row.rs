//! A request that is being computed.

use std::time::Duration;

use super::listener::Listener;
use super::mounts::AdapterStack;
use super::prefix_cache::Kept;
use super::request::{Lane, RequestId, Summary};
use crate::cache::LayerCache;
use crate::generate::sequence::Sequence;
use crate::generate::step::KvQuantization;
use crate::generate::stream::{FinishReason, Reply};
use crate::mlx;

/// What the prompt cache keeps apart.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Namespace {
    /// Numbers of adapters.
    pub(super) adapters: Vec<u64>,
    pub(super) kv_quantization: Option<KvQuantization>,
    pub(super) max_kv_size: Option<i32>,
}

/// A row of the batch.
pub(super) struct Row {
    pub(super) id: RequestId,
    pub(super) listener: Listener,
    pub(super) sequence: Sequence,
    pub(super) reply: Reply,
    pub(super) stack: AdapterStack,
    /// The prompt and what was generated: what the caches hold begins with it.
    pub(super) history: Vec<u32>,
    pub(super) prompt_tokens: usize,
    pub(super) cached_tokens: usize,
    pub(super) queue_time: Duration,
    pub(super) lane: Lane,
    /// Whether the prompt cache takes the caches afterwards.
    pub(super) keeps: bool,
}

impl Row {
    /// How it ended.
    pub(super) fn summary(&self) -> Summary {
        Summary {
            finish_reason: self.reply.finish_reason().unwrap_or(FinishReason::Cancelled),
            stop: self.reply.matched_stop().map(str::to_owned),
            stats: self.reply.stats(),
            cached_tokens: self.cached_tokens,
            queue_time: self.queue_time,
            lane: self.lane,
        }
    }

    /// Tokens that the caches hold.
    pub(super) fn held(&self) -> &[u32] {
        let held = self.sequence.caches().first().map_or(0, |cache| cache.offset().max(0) as usize);
        &self.history[..held.min(self.history.len())]
    }
}

/// The caches of a sequence, for those that begin alike.
#[derive(Clone, Debug)]
pub(super) struct KeptCaches {
    caches: Vec<LayerCache>,
    /// Packing happened from this position on; before it a sequence of its own would not be packed.
    packed_from: usize,
}

impl KeptCaches {
    /// Computes what is still in flight, so that nothing but the caches is kept alive.
    ///
    /// # Errors
    /// A step that failed.
    pub(super) fn new(mut caches: Vec<LayerCache>, kv: Option<KvQuantization>) -> Result<Self, mlx::Error> {
        mlx::eval(caches.iter().flat_map(LayerCache::arrays))?;
        caches.iter_mut().for_each(LayerCache::settled);
        let packed_from = kv.map_or(0, |kv| usize::try_from(kv.start).unwrap_or(0));
        Ok(Self { caches, packed_from })
    }

    /// The caches with their first `length` positions; `None` if they cannot be cut to that.
    pub(super) fn shortened(mut self, length: usize) -> Option<Vec<LayerCache>> {
        let length = i32::try_from(length).ok()?;
        for cache in &mut self.caches {
            let excess = cache.offset() - length;
            if excess < 0 || cache.trim(excess) != excess {
                return None;
            }
        }
        Some(self.caches)
    }
}

impl Kept for KeptCaches {
    fn nbytes(&self) -> usize {
        self.caches.iter().map(LayerCache::nbytes).sum()
    }

    fn can_shorten_to(&self, length: usize) -> bool {
        let packed = self.caches.iter().any(|cache| matches!(cache, LayerCache::Quantized(_)));
        (!packed || length >= self.packed_from) && self.caches.iter().all(LayerCache::is_trimmable)
    }
}
