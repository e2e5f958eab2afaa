//! The handle: what other threads call.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::budget::KvCost;
use super::command::{Command, Queued};
use super::request::{
    AdapterInfo, EmbedError, GenerationRequest, GenerationSink, MountError, RequestId, SubmitError,
};
use super::stats::{EngineStats, PromptCacheStats};
use super::worker;
use crate::checkpoint::GenerationConfig;
use crate::generate::limits::Limits;
use crate::generate::step::{KvQuantization, PREFILL_STEP_SIZE, StepError};
use crate::generate::stream::StreamError;
use crate::load::LoadedModel;
use crate::lora::Adapter;
use crate::mlx;
use crate::tokenizer::Tokenizer;
use crate::tokenizer::chat_template::ChatTemplates;

/// How an engine works.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Most requests that are computed together; 1 computes one after the other.
    pub max_batch: usize,
    /// Most requests that wait.
    pub queue: usize,
    /// Bytes that the prompt cache may take; 0 for none.
    pub prompt_cache_bytes: usize,
    /// Prompt tokens fed at a time.
    pub prefill_step_size: usize,
    /// Packing of all caches.
    pub kv_quantization: Option<KvQuantization>,
    /// Bounds the caches of full attention, as mlx-lm's `--max-kv-size`.
    pub max_kv_size: Option<i32>,
    /// Bytes that the caches of all active requests may grow to; who does not fit waits.
    pub kv_budget: Option<usize>,
    /// Bytes for weights and caches: requests are cut to what fits, or refused.
    pub memory_budget: Option<usize>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            max_batch: 8,
            queue: 64,
            prompt_cache_bytes: 8 << 30,
            prefill_step_size: PREFILL_STEP_SIZE,
            kv_quantization: None,
            max_kv_size: None,
            kv_budget: None,
            memory_budget: None,
        }
    }
}

/// What of a model other threads may use: for rendering, tokenizing and checking requests.
#[derive(Clone, Debug)]
pub struct ModelParts {
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Its chat templates.
    pub chat_templates: Arc<ChatTemplates>,
    /// Its own sampling defaults.
    pub generation_config: GenerationConfig,
    /// Positions it was trained for, where the config says.
    pub context_length: Option<usize>,
    /// Logits at a position.
    pub vocab_size: usize,
    /// Bytes of its weights.
    pub weight_bytes: u64,
}

/// Why an engine cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError<E: std::error::Error + 'static> {
    /// The model cannot be loaded.
    #[error(transparent)]
    Load(E),
    /// The system gives no thread.
    #[error("the engine's thread cannot be started: {0}")]
    Thread(std::io::Error),
    /// Loading panicked.
    #[error("loading the model failed")]
    Panicked,
    /// MLX failed.
    #[error(transparent)]
    Mlx(mlx::Error),
    /// The budget is less than the weights.
    #[error(
        "the weights take {weights} bytes, the memory budget is {budget}; raise it or take a smaller model"
    )]
    MemoryBudget {
        /// Bytes of the weights.
        weights: u64,
        /// The budget.
        budget: usize,
    },
    /// The budget holds no request at all.
    #[error(
        "the shortest request needs {needed} bytes of KV cache, the {name} leaves {budget} for it; raise it"
    )]
    KvBudget {
        /// Bytes for a prompt of one token and a reply of one.
        needed: usize,
        /// Which budget.
        name: &'static str,
        /// What is left.
        budget: usize,
    },
    /// Options that no request to this model could be computed with.
    #[error(transparent)]
    Options(StepError),
}

/// What the handle and the thread share.
pub(super) struct Shared {
    pub(super) options: EngineOptions,
    pub(super) limits: Limits,
    pub(super) kv_cost: KvCost,
    /// Bytes that the caches of all active requests may grow to.
    pub(super) kv_budget: Option<usize>,
    /// Tokens of one sequence that the memory budget has room for.
    pub(super) most_tokens: Option<usize>,
    pub(super) state: Mutex<State>,
}

/// The part that changes.
#[derive(Default)]
pub(super) struct State {
    pub(super) stats: EngineStats,
    /// Whether requests are refused.
    pub(super) stopping: bool,
    pub(super) adapters: BTreeMap<String, AdapterInfo>,
}

impl Shared {
    /// The state is whole between any two statements.
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Cuts a request to the memory budget, and to the model's context if it has no limit of its own; returns the bytes
    /// that its caches may grow to.
    fn admit(&self, request: &mut GenerationRequest) -> Result<usize, SubmitError> {
        let prompt = request.prompt.len();
        let max_tokens = &mut request.options.step.max_tokens;
        if let (None, Some(context)) = (&max_tokens, self.limits.context) {
            // A prompt that fills the context still gets an answer.
            *max_tokens = Some(context.saturating_sub(prompt).max(1));
        }
        if let Some(allowed) = self.most_tokens {
            if prompt >= allowed {
                return Err(SubmitError::OverMemoryBudget { needed: prompt + 1, prompt, allowed });
            }
            let room = allowed - prompt;
            *max_tokens = Some(max_tokens.map_or(room, |most| most.min(room)));
        }
        let max_tokens = max_tokens.unwrap_or(usize::MAX);
        let needed = self.kv_cost.bytes(prompt.saturating_add(max_tokens));
        match self.kv_budget {
            Some(budget) if needed > budget => {
                Err(SubmitError::OverKvBudget { needed, budget, prompt, max_tokens })
            }
            _ => Ok(needed),
        }
    }
}

/// A handle on a running engine; clones share it. The thread ends once the last handle is dropped and all requests are
/// done, or by [`stop`](Self::stop).
#[derive(Clone)]
pub struct Engine {
    shared: Arc<Shared>,
    commands: Sender<Command>,
    next: Arc<AtomicU64>,
    thread: Arc<Mutex<Option<JoinHandle<()>>>>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("options", &self.shared.options).finish_non_exhaustive()
    }
}

impl Engine {
    /// Loads a model with `load` on the engine's thread and starts working. What `load` chooses for its thread (our
    /// CPU kernels, say) holds for the engine.
    ///
    /// # Errors
    /// What `load` returns, and when there is no thread or not enough memory.
    pub fn start<E>(
        options: EngineOptions,
        load: impl FnOnce() -> Result<LoadedModel, E> + Send + 'static,
    ) -> Result<(Self, ModelParts), StartError<E>>
    where
        E: std::error::Error + Send + 'static,
    {
        let (commands, inbox) = mpsc::channel();
        let (ready, started) = mpsc::sync_channel(1);
        let run = move || {
            let loaded = match load() {
                Ok(loaded) => loaded,
                // Nobody listens only if `start` was killed.
                Err(error) => return drop(ready.send(Err(StartError::Load(error)))),
            };
            match prepare(loaded, options) {
                Ok((shared, parts, model)) => {
                    let tokenizer = Arc::clone(&parts.tokenizer);
                    let _ = ready.send(Ok((Arc::clone(&shared), parts)));
                    worker::run(&shared, &*model, &tokenizer, &inbox);
                }
                Err(error) => drop(ready.send(Err(error))),
            }
        };
        let thread = std::thread::Builder::new().name("engine".to_owned()).spawn(run);
        let thread = thread.map_err(StartError::Thread)?;
        let (shared, parts) = started.recv().map_err(|_| StartError::Panicked)??;
        let engine = Self {
            shared,
            commands,
            next: Arc::new(AtomicU64::new(1)),
            thread: Arc::new(Mutex::new(Some(thread))),
        };
        Ok((engine, parts))
    }

    /// Queues a request; `sink` is told what happens to it.
    ///
    /// # Errors
    /// The queue is full, the engine is stopping or dead, or something is wrong with the request; `sink` is then not
    /// called.
    pub fn submit(
        &self,
        mut request: GenerationRequest,
        sink: Box<dyn GenerationSink>,
    ) -> Result<RequestId, SubmitError> {
        let shared = &self.shared;
        request.options.step.kv_quantization = shared.options.kv_quantization;
        request.options.step.prefill_step_size = shared.options.prefill_step_size.max(1);
        request.options.validate(request.prompt.len(), &shared.limits)?;
        request.options.step.validate(&request.prompt, &shared.limits).map_err(StreamError::from)?;
        let kv_bytes = shared.admit(&mut request)?;
        let id = RequestId(self.next.fetch_add(1, Ordering::Relaxed));
        let mut state = self.open()?;
        if let Some(unknown) = request.adapters.iter().find(|id| !state.adapters.contains_key(*id)) {
            return Err(SubmitError::UnknownAdapter(unknown.clone()));
        }
        let stacks = |id: &&String| state.adapters.get(*id).is_some_and(|info| info.can_stack);
        if request.adapters.len() > 1
            && let Some(alone) = request.adapters.iter().find(|id| !stacks(id))
        {
            return Err(SubmitError::CannotStack(alone.clone()));
        }
        if state.stats.queued >= shared.options.queue {
            return Err(SubmitError::Busy { limit: shared.options.queue });
        }
        let queued = Box::new(Queued { id, request, sink, kv_bytes, since: Instant::now() });
        self.commands.send(Command::Submit(queued)).map_err(|_| SubmitError::Dead)?;
        state.stats.queued += 1;
        state.stats.submitted += 1;
        Ok(id)
    }

    /// The mounted adapters, by id.
    pub fn adapters(&self) -> Vec<AdapterInfo> {
        self.shared.state().adapters.values().cloned().collect()
    }

    /// Mounts an adapter directory for requests that name `id`. Waits for the step that runs.
    ///
    /// # Errors
    /// A name that is taken or impossible, or an adapter that does not fit the model.
    pub fn mount(&self, id: &str, path: &Path) -> Result<AdapterInfo, MountError> {
        let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        if id.is_empty() || id == "none" || !id.chars().all(fits) {
            return Err(MountError::Name(id.to_owned()));
        }
        let adapter = Adapter::open(path)?;
        self.ask(|reply| Command::Mount { id: id.to_owned(), path: path.to_owned(), adapter, reply })?
    }

    /// Forgets an adapter. Requests that use it already keep it until they end.
    ///
    /// # Errors
    /// There is no such adapter.
    pub fn unmount(&self, id: &str) -> Result<(), MountError> {
        self.ask(|reply| Command::Unmount { id: id.to_owned(), reply })?
    }

    /// Embeds token sequences: the last token's hidden state after the final norm, in float32, not normalised. Inputs
    /// are computed one at a time, between the steps of running requests.
    ///
    /// # Errors
    /// The engine is stopping or dead, or an input cannot be read; `reply` is then not called.
    pub fn embed(
        &self,
        inputs: Vec<Vec<u32>>,
        reply: impl FnOnce(Result<Vec<Vec<f32>>, EmbedError>) + Send + 'static,
    ) -> Result<(), EmbedError> {
        for (index, input) in inputs.iter().enumerate() {
            let checked = self.shared.limits.check_prompt(input);
            checked.map_err(|error| EmbedError::Input { index, error })?;
        }
        let mut state = self.open()?;
        if state.stats.queued >= self.shared.options.queue {
            return Err(SubmitError::Busy { limit: self.shared.options.queue }.into());
        }
        let command = Command::Embed { inputs, reply: Box::new(reply) };
        self.commands.send(command).map_err(|_| SubmitError::Dead)?;
        state.stats.queued += 1;
        Ok(())
    }

    /// Figures of this moment.
    pub fn stats(&self) -> EngineStats {
        self.shared.state().stats
    }

    /// Whether the engine's thread lives.
    pub fn is_alive(&self) -> bool {
        self.stats().alive
    }

    /// Takes no more requests, lets those that are here finish for `grace`, cancels the rest and waits for the thread.
    pub fn stop(&self, grace: Duration) {
        self.shared.state().stopping = true;
        let _ = self.commands.send(Command::Stop { deadline: Instant::now() + grace });
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // Its panics are caught and told to all requests.
            let _ = thread.join();
        }
    }

    fn open(&self) -> Result<MutexGuard<'_, State>, SubmitError> {
        let state = self.shared.state();
        match (state.stats.alive, state.stopping) {
            (_, true) => Err(SubmitError::Stopped),
            (false, _) => Err(SubmitError::Dead),
            _ => Ok(state),
        }
    }

    /// Sends a command and waits for its answer.
    fn ask<T>(&self, command: impl FnOnce(Sender<T>) -> Command) -> Result<T, SubmitError> {
        drop(self.open()?);
        let (reply, answer): (_, Receiver<T>) = mpsc::channel();
        self.commands.send(command(reply)).map_err(|_| SubmitError::Dead)?;
        answer.recv().map_err(|_| SubmitError::Dead)
    }
}

type Prepared = (Arc<Shared>, ModelParts, Box<dyn crate::models::Model>);

/// Splits a model into what stays on its thread and what others may use.
fn prepare<E: std::error::Error + 'static>(
    loaded: LoadedModel,
    options: EngineOptions,
) -> Result<Prepared, StartError<E>> {
    let LoadedModel { model, tokenizer, chat_templates, generation_config, weight_bytes } = loaded;
    model.prepare().map_err(StartError::Mlx)?;
    let limits = Limits::of(&*model);
    limits.check_kv(options.kv_quantization).map_err(StartError::Options)?;
    let kv_cost = KvCost::of(&*model, options.max_kv_size, options.kv_quantization);
    let kv_cost = kv_cost.map_err(StartError::Mlx)?;
    let mut kv_budget = options.kv_budget;
    let mut most_tokens = None;
    if let Some(budget) = options.memory_budget {
        let weights = usize::try_from(weight_bytes).unwrap_or(usize::MAX);
        let Some(usable) = budget.checked_sub(weights).filter(|&usable| usable > 0) else {
            return Err(StartError::MemoryBudget { weights: weight_bytes, budget });
        };
        kv_budget = Some(kv_budget.map_or(usable, |budget| budget.min(usable)));
        most_tokens = Some(kv_cost.tokens(usable, limits.context.unwrap_or(i32::MAX as usize)));
    }
    let needed = kv_cost.bytes(2);
    if let Some(budget) = kv_budget.filter(|&budget| budget < needed) {
        let name = if options.kv_budget == Some(budget) { "KV budget" } else { "memory budget" };
        return Err(StartError::KvBudget { needed, name, budget });
    }
    let parts = ModelParts {
        tokenizer: Arc::new(tokenizer),
        chat_templates: Arc::new(chat_templates),
        generation_config,
        context_length: limits.context,
        vocab_size: limits.vocab_size,
        weight_bytes,
    };
    let stats = EngineStats {
        alive: true,
        max_batch: options.max_batch.max(1),
        queue_limit: options.queue,
        kv_budget,
        kv_bytes_per_token: kv_cost.bytes_per_token(),
        prompt_cache: PromptCacheStats { max_bytes: options.prompt_cache_bytes, ..Default::default() },
        ..EngineStats::default()
    };
    let state = State { stats, ..State::default() };
    let shared = Shared { options, limits, kv_cost, kv_budget, most_tokens, state: Mutex::new(state) };
    Ok((Arc::new(shared), parts, model))
}
