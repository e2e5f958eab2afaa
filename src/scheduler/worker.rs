//! The engine's thread: the only one that touches MLX. It does what the [policy](super::policy) says.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::MutexGuard;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::time::Instant;

use super::engine::{Shared, State};
use super::listener::Listener;
use super::policy::{Bounds, Demand, Policy, Work};
use super::prefix_cache::PrefixCache;
use super::request::{
    AdapterInfo, EmbedError, GenerationError, GenerationEvent, GenerationRequest, GenerationSink, Lane,
    MountError, RequestId, SubmitError, Summary,
};
use super::row::{AdapterStack, KeptCaches, Namespace, Row};
use super::stats::EngineStats;
use crate::cache::{LayerCache, LayerKind, make_prompt_cache};
use crate::generate::hidden::last_hidden;
use crate::generate::sequence::{self, Sequence};
use crate::generate::step::ControlFlow;
use crate::generate::stream::Reply;
use crate::lora::{Adapter, AdapterSet, FittedAdapter};
use crate::mlx::{cpu_ops, memory};
use crate::models::Model;
use crate::tokenizer::Tokenizer;

/// Prompt tokens that are read between two steps of others, where the chunk size does not show in any bit.
const CHUNK_BESIDE: usize = 256;

/// A request that was accepted.
pub(super) struct Queued {
    pub(super) id: RequestId,
    pub(super) request: GenerationRequest,
    pub(super) sink: Box<dyn GenerationSink>,
    pub(super) kv_bytes: usize,
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

impl Command {
    /// Answers that there is nobody to do it.
    fn refuse(self, error: fn() -> SubmitError) {
        match self {
            Self::Submit(queued) => {
                let refused = match error() {
                    SubmitError::Stopped => GenerationError::Stopped,
                    _ => GenerationError::Dead,
                };
                Listener::new(queued.sink).end(Err(refused));
            }
            Self::Embed { reply, .. } => Embedding::answer(reply, Err(error().into())),
            Self::Mount { reply, .. } => drop(reply.send(Err(error().into()))),
            Self::Unmount { reply, .. } => drop(reply.send(Err(error().into()))),
            Self::Stop { .. } => {}
        }
    }
}

/// Works until there are no handles, or until it is told to stop. A panic ends all requests and the engine, and nothing
/// else.
pub(super) fn run(shared: &Shared, model: &dyn Model, tokenizer: &Tokenizer, inbox: &Receiver<Command>) {
    let mut worker = Worker::new(shared, model, tokenizer);
    let ended = catch_unwind(AssertUnwindSafe(|| worker.work(inbox)));
    let error: fn() -> SubmitError = match ended {
        Ok(()) => || SubmitError::Stopped,
        Err(_) => || SubmitError::Dead,
    };
    // From here on nobody can send.
    let mut state = shared.state();
    state.stats.alive = false;
    state.stopping |= ended.is_ok();
    state.stats.queued = 0;
    state.stats.active_rows = 0;
    drop(state);
    let _ = catch_unwind(AssertUnwindSafe(|| worker.abandon(error)));
    while let Ok(command) = inbox.try_recv() {
        command.refuse(error);
    }
    // Nothing of ours may still run when the model goes.
    let _ = crate::mlx::synchronize();
}

/// A request that waits.
struct Waiting {
    request: GenerationRequest,
    listener: Listener,
    stack: AdapterStack,
    since: Instant,
}

/// Texts of which some are embedded.
struct Embedding {
    inputs: VecDeque<Vec<u32>>,
    done: Vec<Vec<f32>>,
    reply: EmbedReply,
}

impl Embedding {
    fn answer(reply: EmbedReply, answer: Result<Vec<Vec<f32>>, EmbedError>) {
        // The code is the caller's.
        let _ = catch_unwind(AssertUnwindSafe(|| reply(answer)));
    }
}

/// An adapter that requests can name.
struct Mounted {
    number: u64,
    adapter: Rc<FittedAdapter>,
}

/// The figures, locked.
struct StatsGuard<'a>(MutexGuard<'a, State>);

impl std::ops::Deref for StatsGuard<'_> {
    type Target = EngineStats;

    fn deref(&self) -> &EngineStats {
        &self.0.stats
    }
}

impl std::ops::DerefMut for StatsGuard<'_> {
    fn deref_mut(&mut self) -> &mut EngineStats {
        &mut self.0.stats
    }
}

struct Worker<'a> {
    shared: &'a Shared,
    model: &'a dyn Model,
    tokenizer: &'a Tokenizer,
    policy: Policy,
    waiting: HashMap<RequestId, Waiting>,
    rows: Vec<Row>,
    embeddings: VecDeque<Embedding>,
    prefixes: PrefixCache<Namespace, KeptCaches>,
    mounted: BTreeMap<String, Mounted>,
    /// Adapters mounted so far.
    numbers: u64,
    deadline: Option<Instant>,
}

impl<'a> Worker<'a> {
    fn new(shared: &'a Shared, model: &'a dyn Model, tokenizer: &'a Tokenizer) -> Self {
        let options = &shared.options;
        let chunk_alone = options.prefill_step_size.max(1);
        // With our kernels a prompt's chunks do not show in the result, so that they may be short; packed caches do
        // depend on where a chunk ends.
        let invariant = cpu_ops::enabled() && options.kv_quantization.is_none();
        let short = if invariant { chunk_alone.min(CHUNK_BESIDE) } else { chunk_alone };
        let bounds = Bounds {
            max_batch: options.max_batch.max(1),
            kv_budget: shared.kv_budget,
            chunk_alone: short,
            chunk_beside: short,
        };
        Self {
            shared,
            model,
            tokenizer,
            policy: Policy::new(bounds),
            waiting: HashMap::new(),
            rows: Vec::new(),
            embeddings: VecDeque::new(),
            prefixes: PrefixCache::new(options.prompt_cache_bytes),
            mounted: BTreeMap::new(),
            numbers: 0,
            deadline: None,
        }
    }

    fn work(&mut self, inbox: &Receiver<Command>) {
        let mut connected = true;
        loop {
            while connected {
                let idle = self.is_idle() && self.deadline.is_none();
                let command = if idle {
                    inbox.recv().map_err(|_| TryRecvError::Disconnected)
                } else {
                    inbox.try_recv()
                };
                match command {
                    Ok(command) => self.take(command),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => connected = false,
                }
            }
            if self.is_idle() {
                return;
            }
            self.drop_pointless();
            self.embed_one();
            match self.policy.next() {
                Work::Admit(id) => self.admit(id),
                Work::Prefill(id, most) => self.prefill(id, most),
                Work::Decode(ids) => self.decode(&ids),
                Work::Idle => {}
            }
            if self.is_idle() {
                // Spare memory is worth keeping only while there is work. What fails here fails again in a step.
                let _ = memory::clear_cache();
            }
            self.report();
        }
    }

    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.rows.is_empty() && self.embeddings.is_empty()
    }

    fn take(&mut self, command: Command) {
        match command {
            Command::Submit(queued) => self.enqueue(*queued),
            Command::Embed { inputs, reply } => {
                self.embeddings.push_back(Embedding { inputs: inputs.into(), done: Vec::new(), reply });
            }
            Command::Mount { id, path, adapter, reply } => {
                let _ = reply.send(self.mount(id, path, adapter));
            }
            Command::Unmount { id, reply } => {
                let _ = reply.send(self.unmount(id));
            }
            Command::Stop { deadline } => self.deadline = Some(deadline),
        }
    }

    fn enqueue(&mut self, queued: Queued) {
        let Queued { id, request, sink, kv_bytes, since } = queued;
        let mut listener = Listener::new(sink);
        let stack = match self.stack(&request.adapters) {
            Ok(stack) => stack,
            Err(error) => {
                self.unqueue().failed += 1;
                return listener.end(Err(error));
            }
        };
        self.policy.submit(id, Demand { group: stack.numbers.clone(), kv_bytes });
        self.waiting.insert(id, Waiting { request, listener, stack, since });
    }

    fn stack(&self, names: &[String]) -> Result<AdapterStack, GenerationError> {
        let mounted =
            |name: &String| self.mounted.get(name).ok_or_else(|| GenerationError::AdapterGone(name.clone()));
        let mounted = names.iter().map(mounted).collect::<Result<Vec<_>, _>>()?;
        Ok(AdapterStack {
            numbers: mounted.iter().map(|mounted| mounted.number).collect(),
            set: AdapterSet::new(mounted.iter().map(|mounted| Rc::clone(&mounted.adapter)).collect())?,
        })
    }

    fn stats(&self) -> StatsGuard<'_> {
        StatsGuard(self.shared.state())
    }

    /// One fewer waits.
    fn unqueue(&self) -> StatsGuard<'_> {
        let mut stats = self.stats();
        stats.queued = stats.queued.saturating_sub(1);
        stats
    }

    /// Lets those go that nobody waits for; all, once the time is up.
    fn drop_pointless(&mut self) {
        let expired = self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        let mut gone: Vec<RequestId> = Vec::new();
        for (id, waiting) in &mut self.waiting {
            if expired || waiting.listener.is_gone() {
                gone.push(*id);
            }
        }
        for id in gone {
            self.policy.remove(id);
            let Some(mut waiting) = self.waiting.remove(&id) else { continue };
            self.unqueue().cancelled += 1;
            waiting.listener.end(match expired {
                true => Err(GenerationError::Stopped),
                false => Ok(Summary::unbegun(waiting.since.elapsed())),
            });
        }
        let gone: Vec<RequestId> = self
            .rows
            .iter_mut()
            .filter_map(|row| (expired || row.listener.is_gone()).then_some(row.id))
            .collect();
        for id in gone {
            self.cancel(id);
        }
        if expired {
            while let Some(Embedding { reply, .. }) = self.embeddings.pop_front() {
                self.unqueue().cancelled += 1;
                Embedding::answer(reply, Err(SubmitError::Stopped.into()));
            }
        }
    }

    /// Computes one text's embedding.
    fn embed_one(&mut self) {
        let Some(embedding) = self.embeddings.front_mut() else { return };
        if let Some(input) = embedding.inputs.pop_front() {
            self.model.adapters().activate(&AdapterSet::default());
            match last_hidden(self.model, &input) {
                Ok(hidden) => embedding.done.push(hidden),
                Err(error) => return self.answer_first(|_| Err(error.into())),
            }
        }
        if embedding.inputs.is_empty() {
            self.answer_first(Ok);
        }
    }

    fn answer_first(&mut self, answer: impl FnOnce(Vec<Vec<f32>>) -> Result<Vec<Vec<f32>>, EmbedError>) {
        let Some(Embedding { done, reply, .. }) = self.embeddings.pop_front() else { return };
        self.unqueue().embedded += done.len() as u64;
        Embedding::answer(reply, answer(done));
    }

    fn namespace(&self, stack: &AdapterStack) -> Namespace {
        Namespace {
            adapters: stack.numbers.clone(),
            kv_quantization: self.shared.options.kv_quantization,
            max_kv_size: self.shared.options.max_kv_size,
        }
    }

    /// Makes a row of a request that waited.
    fn admit(&mut self, id: RequestId) {
        let Some(Waiting { request, mut listener, stack, since }) = self.waiting.remove(&id) else { return };
        drop(self.unqueue());
        let found = if request.prompt_cache {
            let namespace = self.namespace(&stack);
            self.prefixes.find(&namespace, &request.prompt)
        } else {
            None
        };
        let found = found.and_then(|(length, kept)| Some((length, kept.shortened(length)?)));
        let (cached, caches) = found.unwrap_or_else(|| {
            (0, make_prompt_cache(self.model.layer_kinds(), self.shared.options.max_kv_size))
        });
        let (known, rest) = request.prompt.split_at(cached);
        let made = Sequence::new(self.model, caches, rest, &request.options.step).and_then(|mut sequence| {
            sequence.remember(known)?;
            Ok(sequence)
        });
        let reply = Reply::new(self.tokenizer, rest.len(), &request.options);
        let (sequence, mut reply) = match (made, reply) {
            (Ok(sequence), Ok(reply)) => (sequence, reply),
            (Err(error), _) => return self.refuse(id, listener, error.into()),
            (_, Err(error)) => return self.refuse(id, listener, error.into()),
        };
        let total = request.prompt.len();
        listener.send(GenerationEvent::Prefill { done: cached, total, cached });
        reply.begin();
        self.stats().cached_tokens += cached as u64;
        self.rows.push(Row {
            id,
            listener,
            sequence,
            reply,
            stack,
            history: request.prompt,
            prompt_tokens: total,
            cached_tokens: cached,
            queue_time: since.elapsed(),
            lane: Lane::Serial,
            keeps: request.prompt_cache && self.shared.options.prompt_cache_bytes > 0,
        });
    }

    /// Ends a request that could not become a row.
    fn refuse(&mut self, id: RequestId, mut listener: Listener, error: GenerationError) {
        self.policy.remove(id);
        self.stats().failed += 1;
        listener.end(Err(error));
    }

    /// Reads a piece of a prompt and, after the last, starts decoding.
    fn prefill(&mut self, id: RequestId, most: usize) {
        let Some(row) = self.rows.iter_mut().find(|row| row.id == id) else {
            debug_assert!(false, "no row for {id:?}");
            self.policy.remove(id);
            return;
        };
        let before = row.sequence.unfed();
        let read = read_prompt(self.model, row, most, self.deadline);
        let fed = before - row.sequence.unfed();
        self.policy.fed(fed.max(1));
        match read {
            Ok(ControlFlow::Continue(())) => {}
            Ok(ControlFlow::Break(())) => {
                // The caches are torn.
                row.keeps = false;
                return self.cancel(id);
            }
            Err(error) => return self.fail(id, error),
        }
        let mut computed = fed as u64;
        if row.sequence.unfed() == 0 {
            computed += 1;
            self.keep_prompt(id);
            let Some(row) = self.rows.iter_mut().find(|row| row.id == id) else { return };
            if let Err(error) = row.sequence.start(self.model) {
                return self.fail(id, error);
            }
            let total = row.prompt_tokens;
            let cached = row.cached_tokens;
            row.listener.send(GenerationEvent::Prefill { done: total, total, cached });
            self.policy.prefilled(id);
        }
        self.stats().prompt_tokens += computed;
    }

    /// A window that wraps while the reply is generated can no longer be cut back to the prompt, with which the next
    /// turn of a conversation begins; so the prompt is kept by itself.
    fn keep_prompt(&mut self, id: RequestId) {
        let Some(row) = self.rows.iter().find(|row| row.id == id && row.keeps) else { return };
        let windows = self.model.layer_kinds().iter().any(|kind| matches!(kind, LayerKind::Sliding { .. }));
        if !windows && self.shared.options.max_kv_size.is_none() || row.held().is_empty() {
            return;
        }
        let (tokens, caches) = (row.held().to_vec(), row.sequence.caches().to_vec());
        let namespace = self.namespace(&row.stack);
        self.keep(namespace, tokens, caches);
    }

    fn keep(&mut self, namespace: Namespace, tokens: Vec<u32>, caches: Vec<LayerCache>) {
        // A step that failed leaves nothing to keep.
        if let Ok(kept) = KeptCaches::new(caches, self.shared.options.kv_quantization) {
            self.prefixes.insert(&namespace, tokens, kept);
        }
    }

    /// One token of each of some rows.
    fn decode(&mut self, ids: &[RequestId]) {
        let mut rows: Vec<&mut Row> = self.rows.iter_mut().filter(|row| ids.contains(&row.id)).collect();
        let Some(first) = rows.first() else { return };
        self.model.adapters().activate(&first.stack.set);
        if rows.len() > 1 {
            rows.iter_mut().for_each(|row| row.lane = Lane::Batched);
        }
        let mut sequences: Vec<&mut Sequence> = rows.iter_mut().map(|row| &mut row.sequence).collect();
        let results = sequence::step(self.model, &mut sequences);
        let mut failed = Vec::new();
        let mut ended = Vec::new();
        let mut generated = 0;
        for (row, result) in rows.into_iter().zip(results) {
            let pushed = result.map_err(GenerationError::from).and_then(|step| {
                if let Some(step) = &step {
                    row.history.push(step.token);
                    generated += 1;
                }
                Ok(row.reply.push(step)?)
            });
            match pushed {
                Ok(chunk) => {
                    row.listener.send(GenerationEvent::Chunk(chunk));
                    if row.reply.is_complete() {
                        ended.push(row.id);
                    }
                }
                Err(error) => failed.push((row.id, error)),
            }
        }
        let mut stats = self.stats();
        stats.steps += 1;
        stats.generated_tokens += generated;
        drop(stats);
        for id in ended {
            self.finish(id);
        }
        for (id, error) in failed {
            self.fail(id, error);
        }
    }

    fn leave(&mut self, id: RequestId) -> Option<Row> {
        self.policy.remove(id);
        let place = self.rows.iter().position(|row| row.id == id)?;
        Some(self.rows.remove(place))
    }

    fn finish(&mut self, id: RequestId) {
        let Some(mut row) = self.leave(id) else { return };
        let summary = row.summary();
        self.stats().finished += 1;
        row.listener.end(Ok(summary));
        self.retire(&mut row);
    }

    fn cancel(&mut self, id: RequestId) {
        let Some(mut row) = self.leave(id) else { return };
        row.reply.cancel();
        if !row.reply.is_complete() {
            let rest = row.reply.finish(None, None);
            row.listener.send(GenerationEvent::Chunk(rest));
        }
        let summary = row.summary();
        self.stats().cancelled += 1;
        row.listener.end(Ok(summary));
        self.retire(&mut row);
    }

    fn fail(&mut self, id: RequestId, error: impl Into<GenerationError>) {
        let Some(mut row) = self.leave(id) else { return };
        self.stats().failed += 1;
        row.listener.end(Err(error.into()));
    }

    /// Gives a row's caches to the prompt cache.
    fn retire(&mut self, row: &mut Row) {
        if !row.keeps || row.held().is_empty() {
            return;
        }
        let tokens = row.held().to_vec();
        let caches = row.sequence.take_caches();
        let namespace = self.namespace(&row.stack);
        self.keep(namespace, tokens, caches);
    }

    fn mount(&mut self, id: String, path: PathBuf, adapter: Adapter) -> Result<AdapterInfo, MountError> {
        if self.mounted.contains_key(&id) {
            return Err(MountError::Taken(id));
        }
        let adapter = self.model.adapters().fit(adapter)?;
        let info = AdapterInfo {
            id: id.clone(),
            path,
            modules: adapter.modules(),
            bytes: adapter.nbytes(),
            can_stack: adapter.can_stack(),
        };
        self.numbers += 1;
        self.mounted.insert(id.clone(), Mounted { number: self.numbers, adapter });
        self.shared.state().adapters.insert(id, info.clone());
        Ok(info)
    }

    fn unmount(&mut self, id: String) -> Result<(), MountError> {
        let Some(Mounted { number, .. }) = self.mounted.remove(&id) else {
            return Err(MountError::Unknown(id));
        };
        self.shared.state().adapters.remove(&id);
        self.prefixes.retain(|namespace| !namespace.adapters.contains(&number));
        self.stats().prompt_cache = self.prefixes.stats();
        // The model may hold on to the last that was active.
        self.model.adapters().activate(&AdapterSet::default());
        Ok(())
    }

    /// Shows the figures of this moment.
    fn report(&mut self) {
        let kv_bytes = self.rows.iter().flat_map(|row| row.sequence.caches()).map(LayerCache::nbytes).sum();
        let prefilling = self.rows.iter().filter(|row| row.sequence.is_in_prompt()).count();
        let mut stats = self.stats();
        stats.active_rows = self.rows.len();
        stats.prefilling_rows = prefilling;
        stats.kv_bytes = kv_bytes;
        stats.prompt_cache = self.prefixes.stats();
    }

    /// Tells everybody that it is over.
    fn abandon(&mut self, error: fn() -> SubmitError) {
        let failed = || match error() {
            SubmitError::Stopped => GenerationError::Stopped,
            _ => GenerationError::Dead,
        };
        for mut row in std::mem::take(&mut self.rows) {
            row.listener.end(Err(failed()));
        }
        for (_, mut waiting) in std::mem::take(&mut self.waiting) {
            waiting.listener.end(Err(failed()));
        }
        for Embedding { reply, .. } in std::mem::take(&mut self.embeddings) {
            Embedding::answer(reply, Err(error().into()));
        }
    }
}

/// Feeds up to `most` prompt tokens of a row and tells its listener.
fn read_prompt(
    model: &dyn Model,
    row: &mut Row,
    most: usize,
    deadline: Option<Instant>,
) -> Result<ControlFlow, GenerationError> {
    model.adapters().activate(&row.stack.set);
    if row.sequence.unfed() == 0 {
        return Ok(ControlFlow::Continue(()));
    }
    let listener = &mut row.listener;
    let poll = &mut || match listener.is_gone() || deadline.is_some_and(|deadline| Instant::now() >= deadline)
    {
        true => ControlFlow::Break(()),
        false => ControlFlow::Continue(()),
    };
    if row.sequence.feed(model, most, poll)?.is_break() {
        return Ok(ControlFlow::Break(()));
    }
    let (total, cached) = (row.prompt_tokens, row.cached_tokens);
    let done = total - 1 - row.sequence.unfed();
    row.listener.send(GenerationEvent::Prefill { done, total, cached });
    Ok(ControlFlow::Continue(()))
}
