//! Replies that later requests may refer to: for an hour, as many as fit, in this process only.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

/// How long a reply is kept.
pub const TIME_TO_LIVE: Duration = Duration::from_secs(3600);
/// Bytes that all of them may take.
pub const MOST_BYTES: usize = 32 << 20;

/// A reply with everything before it.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    /// The reply as it was sent.
    pub response: Value,
    /// Items of the conversation, the reply's own last.
    pub items: Vec<Value>,
    /// `instructions` that held.
    pub instructions: Option<String>,
}

impl Stored {
    fn bytes(&self) -> usize {
        let items: usize = self.items.iter().map(|item| item.to_string().len()).sum();
        items + self.response.to_string().len() + self.instructions.as_ref().map_or(0, String::len)
    }
}

struct Entry {
    id: String,
    since: Instant,
    bytes: usize,
    stored: Arc<Stored>,
}

/// The replies; the least recently used goes first.
pub struct ResponseStore {
    /// Most recently used last.
    entries: Mutex<VecDeque<Entry>>,
    time_to_live: Duration,
    most_bytes: usize,
}

impl Default for ResponseStore {
    fn default() -> Self {
        Self { entries: Mutex::default(), time_to_live: TIME_TO_LIVE, most_bytes: MOST_BYTES }
    }
}

impl ResponseStore {
    /// Keeps a reply; one that is larger than all the room is not kept.
    pub fn put(&self, id: &str, stored: Stored) {
        let bytes = stored.bytes() + id.len();
        if bytes > self.most_bytes {
            return;
        }
        let mut entries = self.fresh();
        let mut total: usize = entries.iter().map(|entry| entry.bytes).sum();
        while let Some(oldest) = entries.front().filter(|_| total + bytes > self.most_bytes) {
            total -= oldest.bytes;
            entries.pop_front();
        }
        entries.push_back(Entry {
            id: id.to_owned(),
            since: Instant::now(),
            bytes,
            stored: Arc::new(stored),
        });
    }

    /// The reply of this id.
    pub fn get(&self, id: &str) -> Option<Arc<Stored>> {
        let mut entries = self.fresh();
        let index = entries.iter().position(|entry| entry.id == id)?;
        let entry = entries.remove(index)?;
        let stored = Arc::clone(&entry.stored);
        entries.push_back(entry);
        Some(stored)
    }

    /// Forgets a reply; whether it was there.
    pub fn remove(&self, id: &str) -> bool {
        let mut entries = self.fresh();
        let found = entries.iter().position(|entry| entry.id == id);
        found.and_then(|index| entries.remove(index)).is_some()
    }

    /// Replies that are kept, and their bytes.
    pub fn size(&self) -> (usize, usize) {
        let entries = self.fresh();
        (entries.len(), entries.iter().map(|entry| entry.bytes).sum())
    }

    /// The entries that have not expired.
    fn fresh(&self) -> MutexGuard<'_, VecDeque<Entry>> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.retain(|entry| entry.since.elapsed() < self.time_to_live);
        entries
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn stored(text: &str) -> Stored {
        Stored { response: json!(text), items: Vec::new(), instructions: None }
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let store = ResponseStore { most_bytes: 3 * 13, ..ResponseStore::default() };
        for id in ["a", "b", "c"] {
            store.put(id, stored("0123456789"));
        }
        assert_eq!(store.size(), (3, 39));
        assert!(store.get("a").is_some());
        store.put("d", stored("0123456789"));
        assert!(store.get("b").is_none() && store.get("a").is_some() && store.get("d").is_some());
        store.put("e", stored(&"x".repeat(40)));
        assert!(store.get("e").is_none());
        assert!(store.remove("a") && !store.remove("a"));
    }

    #[test]
    fn replies_expire() {
        let store = ResponseStore { time_to_live: Duration::ZERO, ..ResponseStore::default() };
        store.put("a", stored("x"));
        assert!(store.get("a").is_none());
        assert_eq!(store.size(), (0, 0));
    }
}
