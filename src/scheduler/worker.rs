//! The engine's thread: the only one that touches MLX. It does what the [policy](super::policy) says.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::MutexGuard;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Instant;

use super::command::{Command, Over, Queued};
use super::embeddings::Embeddings;
use super::engine::{Shared, State};
use super::listener::Listener;
use super::mounts::{AdapterStack, Mounts};
use super::pace::Pace;
use super::policy::{Bounds, Demand, Policy, Work};
use super::prefix_cache::PrefixCache;
use super::request::{
    AdapterInfo, GenerationError, GenerationEvent, GenerationRequest, Lane, MountError, RequestId, Summary,
};
use super::row::{KeptCaches, Namespace, Row};
use super::stats::EngineStats;
use crate::cache::{LayerCache, LayerKind, make_prompt_cache};
use crate::generate::sequence::{self, Sequence};
use crate::generate::step::ControlFlow;
use crate::generate::stream::Reply;
use crate::lora::{Adapter, AdapterSet};
use crate::mlx::{self, cpu_ops, memory};
use crate::models::Model;
use crate::tokenizer::Tokenizer;

/// Works until there are no handles, or until it is told to stop. A panic ends all requests and the engine, and nothing
/// else.
pub(super) fn run(shared: &Shared, model: &dyn Model, tokenizer: &Tokenizer, inbox: &Receiver<Command>) {
    let mut worker = Worker::new(shared, model, tokenizer);
    let ended = catch_unwind(AssertUnwindSafe(|| worker.work(inbox)));
    let over = if ended.is_ok() { Over::Stopped } else { Over::Dead };
    // From here on nobody can send.
    let mut state = shared.state();
    state.stats.alive = false;
    state.stopping |= ended.is_ok();
    state.stats.queued = 0;
    state.stats.active_rows = 0;
    drop(state);
    let _ = catch_unwind(AssertUnwindSafe(|| worker.abandon(over)));
    while let Ok(command) = inbox.try_recv() {
        command.refuse(over);
    }
    // Nothing of ours may still run when the model goes.
    let _ = mlx::synchronize();
}

/// A request that waits.
struct Waiting {
    request: GenerationRequest,
    listener: Listener,
    stack: AdapterStack,
    since: Instant,
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
    pace: Option<Pace>,
    waiting: HashMap<RequestId, Waiting>,
    rows: Vec<Row>,
    embeddings: Embeddings,
    prefixes: PrefixCache<Namespace, KeptCaches>,
    mounts: Mounts,
    deadline: Option<Instant>,
}

impl<'a> Worker<'a> {
    fn new(shared: &'a Shared, model: &'a dyn Model, tokenizer: &'a Tokenizer) -> Self {
        let options = &shared.options;
        // With our kernels a prompt's chunks do not show in the result, so that they may be short; packed and bounded
        // caches do depend on where a chunk ends.
        let whole_cache = options.kv_quantization.is_none() && options.max_kv_size.is_none();
        let invariant = cpu_ops::enabled() && whole_cache;
        let pace = invariant.then(|| Pace::new(options.prefill_step_size));
        let whole = options.prefill_step_size.max(1);
        let (chunk_alone, chunk_beside) = pace.map_or((whole, whole), |pace| pace.chunks());
        let bounds = Bounds {
            max_batch: options.max_batch.max(1),
            kv_budget: shared.kv_budget,
            chunk_alone,
            chunk_beside,
        };
        Self {
            shared,
            model,
            tokenizer,
            policy: Policy::new(bounds),
            pace,
            waiting: HashMap::new(),
            rows: Vec::new(),
            embeddings: Embeddings::default(),
            prefixes: PrefixCache::new(options.prompt_cache_bytes),
            mounts: Mounts::default(),
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
            if let Some(count) = self.embeddings.step(self.model) {
                self.unqueue().embedded += count as u64;
            }
            match self.policy.decide() {
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
            Command::Embed { inputs, reply } => self.embeddings.push(inputs, reply),
            Command::Mount { id, path, adapter, reply } => {
                let _ = reply.send(self.mount(id, path, adapter));
            }
            Command::Unmount { id, reply } => {
                let _ = reply.send(self.unmount(&id));
            }
            Command::Stop { deadline } => self.deadline = Some(deadline),
        }
    }

    fn enqueue(&mut self, queued: Queued) {
        let Queued { id, request, sink, kv_bytes, since } = queued;
        let mut listener = Listener::new(sink);
        let stack = match self.mounts.stack(&request.adapters) {
            Ok(stack) => stack,
            Err(error) => {
                self.unqueue().failed += 1;
                return listener.end(Err(error));
            }
        };
        self.policy.submit(id, Demand { group: stack.numbers.clone(), kv_bytes });
        self.waiting.insert(id, Waiting { request, listener, stack, since });
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
            for _ in 0..self.embeddings.abandon(Over::Stopped) {
                self.unqueue().cancelled += 1;
            }
        }
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
        let clock = Instant::now();
        let read = read_prompt(self.model, row, most, self.deadline);
        let fed = before - row.sequence.unfed();
        self.policy.fed(fed.max(1));
        if let Some(pace) = &mut self.pace {
            pace.note(fed, clock.elapsed());
            let (alone, beside) = pace.chunks();
            self.policy.set_chunks(alone, beside);
        }
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
        let Ok(caches) = row.sequence.take_caches() else { return };
        let namespace = self.namespace(&row.stack);
        self.keep(namespace, tokens, caches);
    }

    fn mount(&mut self, id: String, path: PathBuf, adapter: Adapter) -> Result<AdapterInfo, MountError> {
        let info = self.mounts.mount(self.model, id, path, adapter)?;
        self.shared.state().adapters.insert(info.id.clone(), info.clone());
        Ok(info)
    }

    fn unmount(&mut self, id: &str) -> Result<(), MountError> {
        let number = self.mounts.unmount(id)?;
        self.prefixes.retain(|namespace| !namespace.adapters.contains(&number));
        self.stats().prompt_cache = self.prefixes.stats();
        self.shared.state().adapters.remove(id);
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
    fn abandon(&mut self, over: Over) {
        for mut row in std::mem::take(&mut self.rows) {
            row.listener.end(Err(over.into()));
        }
        for (_, mut waiting) in std::mem::take(&mut self.waiting) {
            waiting.listener.end(Err(over.into()));
        }
        self.embeddings.abandon(over);
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
    memory::clear_cache()?;
    let (total, cached) = (row.prompt_tokens, row.cached_tokens);
    let done = total - 1 - row.sequence.unfed();
    row.listener.send(GenerationEvent::Prefill { done, total, cached });
    Ok(ControlFlow::Continue(()))
}
