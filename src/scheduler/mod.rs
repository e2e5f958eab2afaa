//! Many requests on one model: continuous batching over the decode step of [`generate`](crate::generate).
//!
//! [`Engine::start`] loads a model on a thread of its own, the only one that touches MLX, and returns a handle that
//! any thread may clone and use. [`Engine::submit`] queues a [`GenerationRequest`]; its [`GenerationSink`] is told of
//! everything that happens to it. No protocol, no argument parsing and no async runtime is known here.

mod budget;
mod command;
mod embeddings;
mod engine;
mod listener;
mod mounts;
mod pace;
pub mod policy;
mod prefix_cache;
mod request;
mod row;
mod stats;
mod worker;

pub use engine::{Engine, EngineOptions, ModelParts, StartError};
pub use request::{
    AdapterInfo, EmbedError, GenerationError, GenerationEvent, GenerationRequest, GenerationSink, Lane,
    MountError, RequestId, SubmitError, Summary,
};
pub use stats::{EngineStats, PromptCacheStats};
