//! What handles tell the engine's thread.

use std::path::PathBuf;
use std::sync::mpsc::Sender;
use std::time::Instant;

use super::embeddings::{self, EmbedReply};
use super::listener::Listener;
use super::request::{
    AdapterInfo, GenerationError, GenerationRequest, GenerationSink, MountError, RequestId, SubmitError,
};
use crate::lora::Adapter;

/// A request that was accepted.
pub(super) struct Queued {
    pub(super) id: RequestId,
    pub(super) request: GenerationRequest,
    pub(super) sink: Box<dyn GenerationSink>,
    /// What its caches may grow to.
    pub(super) kv_bytes: usize,
    pub(super) since: Instant,
}

/// A command.
pub(super) enum Command {
    Submit(Box<Queued>),
    Embed { inputs: Vec<Vec<u32>>, reply: EmbedReply },
    Mount { id: String, path: PathBuf, adapter: Adapter, reply: Sender<Result<AdapterInfo, MountError>> },
    Unmount { id: String, reply: Sender<Result<(), MountError>> },
    Stop { deadline: Instant },
}

/// Why there is nobody to do it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Over {
    Stopped,
    Dead,
}

impl From<Over> for SubmitError {
    fn from(over: Over) -> Self {
        match over {
            Over::Stopped => Self::Stopped,
            Over::Dead => Self::Dead,
        }
    }
}

impl From<Over> for GenerationError {
    fn from(over: Over) -> Self {
        match over {
            Over::Stopped => Self::Stopped,
            Over::Dead => Self::Dead,
        }
    }
}

impl Command {
    /// Answers that there is nobody to do it. Who asked may be gone, too.
    pub(super) fn refuse(self, over: Over) {
        match self {
            Self::Submit(queued) => Listener::new(queued.sink).end(Err(over.into())),
            Self::Embed { reply, .. } => embeddings::answer(reply, Err(SubmitError::from(over).into())),
            Self::Mount { reply, .. } => drop(reply.send(Err(SubmitError::from(over).into()))),
            Self::Unmount { reply, .. } => drop(reply.send(Err(SubmitError::from(over).into()))),
            Self::Stop { .. } => {}
        }
    }
}
