//! What an engine counts.

/// A prompt cache's figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptCacheStats {
    /// Sequences kept.
    pub entries: usize,
    /// Bytes that they take.
    pub bytes: usize,
    /// Bytes that they may take.
    pub max_bytes: usize,
    /// Requests that found a prefix.
    pub hits: u64,
    /// Requests that looked and found none.
    pub misses: u64,
}

/// An engine's figures at one moment; counters run from its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Whether the engine's thread lives.
    pub alive: bool,
    /// Most rows that are computed together.
    pub max_batch: usize,
    /// Requests that wait.
    pub queued: usize,
    /// Most requests that may wait.
    pub queue_limit: usize,
    /// Requests that are being computed, the one whose prompt is read included.
    pub active_rows: usize,
    /// Requests whose prompt is being read.
    pub prefilling_rows: usize,
    /// Requests accepted.
    pub submitted: u64,
    /// Requests that ended by themselves.
    pub finished: u64,
    /// Requests that were cancelled, before or after they began.
    pub cancelled: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Texts embedded.
    pub embedded: u64,
    /// Prompt tokens computed.
    pub prompt_tokens: u64,
    /// Prompt tokens found in the prompt cache.
    pub cached_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Decode steps, whatever the number of rows.
    pub steps: u64,
    /// Bytes of the active rows' caches.
    pub kv_bytes: usize,
    /// Most bytes that active rows may come to need.
    pub kv_budget: Option<usize>,
    /// Bytes that a position of one sequence takes in all layers, windows apart.
    pub kv_bytes_per_token: usize,
    /// The prompt cache.
    pub prompt_cache: PromptCacheStats,
}
