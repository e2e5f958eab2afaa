//! The engine's thread: the only one that touches MLX.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Instant;

use super::engine::Shared;
use super::request::{
    AdapterInfo, EmbedError, GenerationError, GenerationEvent, GenerationRequest, GenerationSink, Lane,
    MountError, RequestId, Summary,
};
use crate::cache::make_prompt_cache;
use crate::generate::step::ControlFlow;
use crate::generate::stream::{FinishReason, TextGenerator};
use crate::lora::Adapter;
use crate::models::Model;
use crate::tokenizer::Tokenizer;

/// A request that waits.
pub(super) struct Queued {
    pub(super) id: RequestId,
    pub(super) request: GenerationRequest,
    pub(super) sink: Box<dyn GenerationSink>,
    pub(super) since: Instant,
}

/// Where embeddings go.
pub(super) type EmbedReply = Box<dyn FnOnce(Result<Vec<Vec<f32>>, EmbedError>) + Send>;

/// What handles tell the thread.
pub(super) enum Command {
    Submit(Box<Queued>),
    Embed { inputs: Vec<Vec<u32>>, reply: EmbedReply },
    Mount { id: String, path: PathBuf, adapter: Adapter, reply: Sender<Result<AdapterInfo, MountError>> },
    Unmount { id: String, reply: Sender<Result<(), MountError>> },
    Stop { deadline: Instant },
}

/// Works until there are no handles or it is told to stop.
pub(super) fn run(shared: &Shared, model: &dyn Model, tokenizer: &Tokenizer, inbox: &Receiver<Command>) {
    while let Ok(command) = inbox.recv() {
        match command {
            Command::Submit(queued) => {
                shared.state().stats.queued -= 1;
                let Queued { id: _, request, mut sink, since: _ } = *queued;
                if sink.is_gone() {
                    shared.state().stats.cancelled += 1;
                    continue;
                }
                shared.state().stats.active_rows = 1;
                let ended = generate(shared, model, tokenizer, &request, &mut *sink);
                shared.state().stats.active_rows = 0;
                sink.send(match ended {
                    Ok(summary) => GenerationEvent::Finished(summary),
                    Err(error) => GenerationEvent::Failed(error),
                });
            }
            Command::Embed { inputs, reply } => {
                shared.state().stats.queued -= 1;
                let embedded: Result<_, EmbedError> = inputs
                    .iter()
                    .map(|input| crate::generate::hidden::last_hidden(model, input).map_err(EmbedError::from))
                    .collect();
                reply(embedded);
            }
            Command::Mount { id, reply, .. } => {
                let _ = reply.send(Err(MountError::Unknown(id)));
            }
            Command::Unmount { id, reply } => {
                let _ = reply.send(Err(MountError::Unknown(id)));
            }
            Command::Stop { .. } => break,
        }
    }
    shared.state().stats.alive = false;
}

fn generate(
    shared: &Shared,
    model: &dyn Model,
    tokenizer: &Tokenizer,
    request: &GenerationRequest,
    sink: &mut dyn GenerationSink,
) -> Result<Summary, GenerationError> {
    let mut caches = make_prompt_cache(model.layer_kinds(), shared.options.max_kv_size);
    let mut options = request.options.clone();
    options.step.prefill_step_size = shared.options.prefill_step_size;
    let mut reply = TextGenerator::new(model, tokenizer, &mut caches, &request.prompt, &options)?;
    reply.prefill(&mut |done, total| {
        sink.send(GenerationEvent::Prefill { done, total, cached: 0 });
        if sink.is_gone() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    while let Some(chunk) = reply.next()? {
        sink.send(GenerationEvent::Chunk(chunk));
        if sink.is_gone() {
            reply.cancel();
        }
    }
    Ok(Summary {
        finish_reason: reply.finish_reason().unwrap_or(FinishReason::Cancelled),
        stop: reply.matched_stop().map(str::to_owned),
        stats: reply.stats(),
        cached_tokens: 0,
        lane: Lane::Serial,
    })
}
