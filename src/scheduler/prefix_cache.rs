//! What prompts have in common: a byte-capped memory of token sequences and what was computed for them.
//!
//! Sequences lie sorted, so those that share most with a prompt are its neighbours. Tokens themselves are compared, no
//! hashes. What is found stays where it is; whoever asked gets a clone.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::ops::Bound;

use super::stats::PromptCacheStats;

/// What is kept for a sequence.
pub(super) trait Kept: Clone {
    /// Bytes that it takes.
    fn nbytes(&self) -> usize;

    /// Whether it can be cut to its first `length` tokens.
    fn can_shorten_to(&self, length: usize) -> bool;
}

#[derive(Debug)]
struct Entry<K> {
    kept: K,
    bytes: usize,
    /// When it was last asked for.
    used: u64,
}

/// The memory. Nothing is shared between the namespaces `N`.
#[derive(Debug)]
pub(super) struct PrefixCache<N, K> {
    entries: BTreeMap<N, BTreeMap<Vec<u32>, Entry<K>>>,
    clock: u64,
    stats: PromptCacheStats,
}

impl<N: Ord + Clone, K: Kept> PrefixCache<N, K> {
    /// Keeps up to `max_bytes`; nothing for 0.
    pub(super) fn new(max_bytes: usize) -> Self {
        let stats = PromptCacheStats { max_bytes, ..PromptCacheStats::default() };
        Self { entries: BTreeMap::new(), clock: 0, stats }
    }

    /// The longest usable prefix of a prompt, always shorter than the prompt: its length, and what is kept for a
    /// sequence that begins with it, which the caller cuts to that length.
    pub(super) fn find(&mut self, namespace: &N, prompt: &[u32]) -> Option<(usize, K)> {
        if self.stats.max_bytes == 0 {
            return None;
        }
        let found = self.entries.get(namespace).and_then(|entries| {
            let before = entries.range::<[u32], _>((Bound::Unbounded, Bound::Excluded(prompt))).rev();
            let after = entries.range::<[u32], _>((Bound::Included(prompt), Bound::Unbounded));
            let (best, key) = nearest(after, prompt, nearest(before, prompt, (0, None)));
            key.cloned().map(|key| (best, key))
        });
        let Some((length, key)) = found else {
            self.stats.misses += 1;
            return None;
        };
        self.stats.hits += 1;
        self.clock += 1;
        let entry = self.entries.get_mut(namespace)?.get_mut(&key)?;
        entry.used = self.clock;
        Some((length, entry.kept.clone()))
    }

    /// Keeps something for a sequence, and forgets what it makes superfluous, then the least recently used.
    pub(super) fn insert(&mut self, namespace: &N, tokens: Vec<u32>, kept: K) {
        let bytes = kept.nbytes();
        if tokens.is_empty() || bytes > self.stats.max_bytes {
            return;
        }
        self.clock += 1;
        let entries = self.entries.entry(namespace.clone()).or_default();
        for prefix in prefixes(entries, &tokens) {
            if kept.can_shorten_to(prefix.len())
                && let Some(entry) = entries.remove(&prefix)
            {
                self.stats.bytes -= entry.bytes;
                self.stats.entries -= 1;
            }
        }
        let replaced = entries.insert(tokens, Entry { kept, bytes, used: self.clock });
        self.stats.bytes += bytes;
        match replaced {
            Some(entry) => self.stats.bytes -= entry.bytes,
            None => self.stats.entries += 1,
        }
        while self.stats.bytes > self.stats.max_bytes && self.forget_oldest() {}
    }

    /// Forgets all sequences of some namespaces.
    pub(super) fn retain(&mut self, keep: impl Fn(&N) -> bool) {
        self.entries.retain(|namespace, entries| {
            let kept = keep(namespace);
            if !kept {
                self.stats.entries -= entries.len();
                self.stats.bytes -= entries.values().map(|entry| entry.bytes).sum::<usize>();
            }
            kept
        });
    }

    /// Its figures.
    pub(super) fn stats(&self) -> PromptCacheStats {
        self.stats
    }

    fn forget_oldest(&mut self) -> bool {
        let all = self.entries.iter().flat_map(|(namespace, entries)| {
            entries.iter().map(move |(tokens, entry)| (entry.used, namespace, tokens))
        });
        let Some((_, namespace, tokens)) = all.min_by_key(|(used, ..)| *used) else { return false };
        let (namespace, tokens) = (namespace.clone(), tokens.clone());
        let Some(entries) = self.entries.get_mut(&namespace) else { return false };
        let Some(entry) = entries.remove(&tokens) else { return false };
        if entries.is_empty() {
            self.entries.remove(&namespace);
        }
        self.stats.bytes -= entry.bytes;
        self.stats.entries -= 1;
        true
    }
}

fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// Improves on `best` among sequences that share ever less with the prompt.
fn nearest<'a, K: Kept + 'a>(
    entries: impl Iterator<Item = (&'a Vec<u32>, &'a Entry<K>)>,
    prompt: &[u32],
    mut best: (usize, Option<&'a Vec<u32>>),
) -> (usize, Option<&'a Vec<u32>>) {
    let most = prompt.len().saturating_sub(1);
    for (tokens, entry) in entries {
        let length = common(tokens, prompt).min(most);
        if length <= best.0 {
            break;
        }
        if length == tokens.len() || entry.kept.can_shorten_to(length) {
            best = (length, Some(tokens));
        }
    }
    best
}

/// The sequences that `tokens` begin with, itself excepted.
fn prefixes<V>(entries: &BTreeMap<Vec<u32>, V>, tokens: &[u32]) -> Vec<Vec<u32>> {
    let mut found = Vec::new();
    let mut end = Bound::Excluded(tokens);
    while let Some((candidate, _)) = entries.range::<[u32], _>((Bound::Unbounded, end)).next_back() {
        let candidate: &[u32] = candidate.borrow();
        let length = common(candidate, tokens);
        if length == candidate.len() {
            found.push(candidate.to_vec());
            end = Bound::Excluded(&tokens[..length]);
        } else {
            end = Bound::Included(&tokens[..length]);
        }
        if length == 0 {
            break;
        }
    }
    found
}

#[cfg(test)]
#[path = "prefix_cache_tests.rs"]
mod tests;
