//! What is asked of an engine and what it answers.

use std::path::PathBuf;
use std::time::Duration;

use crate::generate::step::StepError;
use crate::generate::stream::{Chunk, FinishReason, Stats, StreamError, StreamOptions};
use crate::lora::AdapterError;
use crate::mlx;

/// Names a request in its engine; later requests have larger numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// A reply that is wanted, whatever protocol it was asked for in.
#[derive(Clone, Debug, Default)]
pub struct GenerationRequest {
    /// Token ids, at least one.
    pub prompt: Vec<u32>,
    /// Length, sampling, penalties, seed, grammar, stop strings, log-probabilities.
    pub options: StreamOptions,
    /// Ids of mounted adapters, applied in this order; empty for the base model.
    pub adapters: Vec<String>,
    /// Whether the prompt cache may be read and fed.
    pub prompt_cache: bool,
}

/// How a request was computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lane {
    /// Alone, from the first token to the last.
    #[default]
    Serial,
    /// Some steps were shared with other requests.
    Batched,
}

impl Lane {
    /// The word clients know.
    pub fn name(self) -> &'static str {
        match self {
            Self::Serial => "serial",
            Self::Batched => "batched",
        }
    }
}

/// How a reply ended.
#[derive(Clone, Debug)]
pub struct Summary {
    /// Why.
    pub finish_reason: FinishReason,
    /// The stop string that ended it.
    pub stop: Option<String>,
    /// Counts and times; `prompt_tokens` are those that were computed.
    pub stats: Stats,
    /// Tokens of the prompt that the prompt cache held.
    pub cached_tokens: usize,
    /// From being accepted to beginning.
    pub queue_time: Duration,
    /// How it was computed.
    pub lane: Lane,
}

impl Summary {
    /// Of a request that never began.
    pub(super) fn unbegun(queue_time: Duration) -> Self {
        Self {
            finish_reason: FinishReason::Cancelled,
            stop: None,
            stats: Stats::default(),
            cached_tokens: 0,
            queue_time,
            lane: Lane::Serial,
        }
    }
}

/// What happens to a request. [`Finished`](Self::Finished) or [`Failed`](Self::Failed) comes last, once.
#[derive(Debug)]
pub enum GenerationEvent {
    /// The prompt is being read; `done` and `total` include the `cached` tokens.
    Prefill {
        /// Tokens that are in the cache now.
        done: usize,
        /// Tokens of the prompt.
        total: usize,
        /// Tokens that need not be computed.
        cached: usize,
    },
    /// A piece of the reply.
    Chunk(Chunk),
    /// The reply is complete, or was cancelled.
    Finished(Summary),
    /// There will be no (more) reply. Other requests are not affected.
    Failed(GenerationError),
}

/// Hears what happens to one request. Called on the engine's thread, so it must return soon; one that panics loses its
/// own request only.
pub trait GenerationSink: Send {
    /// Takes an event.
    fn send(&mut self, event: GenerationEvent);

    /// Whether nobody listens any more: the request then ends at the next step, or before it begins. Asked while the
    /// request waits, between the layers and chunks of its prompt, and at every token.
    fn is_gone(&self) -> bool;
}

/// Why a request was accepted and yet failed.
#[derive(Debug, thiserror::Error)]
pub enum GenerationError {
    /// The request, its grammar or the model.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// An adapter that was unmounted while the request waited.
    #[error("there is no adapter `{0}` any more")]
    AdapterGone(String),
    /// The adapters.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    /// The engine was stopped before the request began.
    #[error("the engine was stopped")]
    Stopped,
    /// The engine's thread has died.
    #[error("the engine has failed and must be restarted")]
    Dead,
}

impl From<StepError> for GenerationError {
    fn from(error: StepError) -> Self {
        Self::Stream(error.into())
    }
}

impl From<mlx::Error> for GenerationError {
    fn from(error: mlx::Error) -> Self {
        Self::Stream(error.into())
    }
}

/// Why a request is not accepted.
#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    /// The queue is full.
    #[error("{limit} requests are waiting already; try again later")]
    Busy {
        /// The most that may wait.
        limit: usize,
    },
    /// The engine takes no more requests.
    #[error("the engine is stopping")]
    Stopped,
    /// The engine's thread has died.
    #[error("the engine has failed and must be restarted")]
    Dead,
    /// Something is wrong with the request.
    #[error(transparent)]
    Invalid(#[from] StreamError),
    /// An adapter that is not mounted.
    #[error("there is no adapter `{0}`")]
    UnknownAdapter(String),
    /// Adapters that cannot be applied together.
    #[error("`{0}` is a DoRA adapter, which cannot be stacked on others; use it alone")]
    CannotStack(String),
    /// The caches would be larger than the budget, even alone.
    #[error(
        "the request needs up to {needed} bytes of KV cache for {prompt} prompt tokens and {max_tokens} more, the \
         budget is {budget}; ask for fewer tokens"
    )]
    OverKvBudget {
        /// Bytes that its caches may grow to.
        needed: usize,
        /// The budget.
        budget: usize,
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens that may be generated.
        max_tokens: usize,
    },
    /// Not even one token fits beside the prompt.
    #[error(
        "the request needs {needed} tokens of context (prompt {prompt}, at least one more), and the memory budget \
         allows {allowed}; shorten the prompt"
    )]
    OverMemoryBudget {
        /// Tokens of the prompt and one more.
        needed: usize,
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens that fit.
        allowed: usize,
    },
}

/// Why texts cannot be embedded.
#[derive(Debug, thiserror::Error)]
pub enum EmbedError {
    /// An input that the model cannot read.
    #[error("input {index}: {error}")]
    Input {
        /// Which.
        index: usize,
        /// Why.
        error: StreamError,
    },
    /// MLX failed.
    #[error(transparent)]
    Mlx(#[from] mlx::Error),
    /// As [`SubmitError::Busy`] and its like.
    #[error(transparent)]
    Refused(#[from] SubmitError),
}

/// A mounted adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterInfo {
    /// What requests call it.
    pub id: String,
    /// Its directory.
    pub path: PathBuf,
    /// Modules that it adapts.
    pub modules: usize,
    /// Bytes of its weights.
    pub bytes: usize,
    /// Whether it can be applied together with others.
    pub can_stack: bool,
}

/// Why an adapter cannot be mounted or unmounted.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The name is taken by an adapter of another directory.
    #[error("an adapter `{0}` is mounted already; unmount it first")]
    Taken(String),
    /// No such adapter.
    #[error("there is no adapter `{0}`")]
    Unknown(String),
    /// A name that requests could not use.
    #[error("`{0}` is no name for an adapter; use letters, digits, `.`, `-` and `_`, and not `none`")]
    Name(String),
    /// The adapter.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    /// The engine is stopped or has died.
    #[error(transparent)]
    Refused(#[from] SubmitError),
}
