//! What all handlers share.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use mlx_bun::registry::fit::KvScheme;
use mlx_bun::scheduler::{Engine, ModelParts};
use mlx_bun::structured::ReplyFormat;
use mlx_bun::structured::grammar::{GrammarCompiler, GrammarError, Limits};
use mlx_bun::tokenizer::Tokenizer;
use tokio::sync::Semaphore;

use super::defaults::Defaults;
use super::error::ApiError;
use super::guard::Guard;
use super::log::Log;
use super::metrics::Metrics;
use super::response_store::ResponseStore;
use super::status::Library;
use crate::prompt::Renderer;

/// Requests that wait for a thread to render, tokenize and compile.
const PREPARATIONS_WAITING: usize = 64;

/// The model that is served.
pub struct Served {
    /// What clients call it.
    pub id: String,
    /// Its folder or file.
    pub path: PathBuf,
    /// Whether it makes embeddings.
    pub embeds: bool,
    /// Its tokenizer and what else is known of it.
    pub parts: ModelParts,
}

/// What a request may ask for beyond the model.
pub struct Policy {
    /// What requests leave open.
    pub defaults: Defaults,
    /// `--thinking`.
    pub thinking: Option<bool>,
    /// `--system-prompt`, for conversations without one.
    pub system_prompt: Option<String>,
    /// The adapter of requests that name none.
    pub adapter: Option<String>,
    /// The folder that clients may mount adapters from.
    pub adapter_root: Option<PathBuf>,
    /// Whether a constraint that cannot be enforced becomes an instruction.
    pub grammar_fallback: bool,
    /// Packing of the caches, for estimates.
    pub kv: KvScheme,
    /// `--kv-quant` in words.
    pub kv_mode: String,
    /// `--memory-budget`.
    pub memory_budget: Option<u64>,
}

/// The server.
pub struct App {
    /// Where requests are computed.
    pub engine: Engine,
    /// The model.
    pub served: Served,
    /// Its templates.
    pub renderer: Renderer,
    /// How its replies are laid out.
    pub format: ReplyFormat,
    /// What requests leave open.
    pub policy: Policy,
    /// Who may come in.
    pub guard: Guard,
    /// Stored responses.
    pub responses: ResponseStore,
    /// Models on this machine.
    pub library: Library,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// Standard error.
    pub log: Log,
    /// When the server started, in milliseconds since 1970.
    pub started_at: u64,
    /// Made for the first request with a constraint.
    grammars: OnceLock<GrammarCompiler>,
    /// Threads for rendering, tokenizing and compiling.
    preparing: Semaphore,
    preparations: Semaphore,
}

impl App {
    /// A server over an engine.
    pub fn new(
        engine: Engine,
        served: Served,
        renderer: Renderer,
        format: ReplyFormat,
        policy: Policy,
        guard: Guard,
        log: Log,
    ) -> Self {
        let threads = std::thread::available_parallelism().map_or(2, usize::from).clamp(1, 4);
        Self {
            engine,
            served,
            renderer,
            format,
            policy,
            guard,
            responses: ResponseStore::default(),
            library: Library::default(),
            metrics: Arc::default(),
            log,
            started_at: u64::try_from(since_1970().as_millis()).unwrap_or_default(),
            grammars: OnceLock::new(),
            preparing: Semaphore::new(threads),
            preparations: Semaphore::new(threads + PREPARATIONS_WAITING),
        }
    }

    /// Its tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.served.parts.tokenizer
    }

    /// The model's compiler of constraints.
    ///
    /// # Errors
    /// The tokenizer allows none.
    pub fn grammars(&self) -> Result<&GrammarCompiler, GrammarError> {
        if let Some(grammars) = self.grammars.get() {
            return Ok(grammars);
        }
        let grammars = GrammarCompiler::new(self.tokenizer(), Limits::default())?;
        Ok(self.grammars.get_or_init(|| grammars))
    }

    /// Runs work that takes the processor for a while, on a thread that nobody else waits for.
    ///
    /// # Errors
    /// Too much of it waits already, or the work fails.
    pub async fn off_thread<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let _waiting = self.preparations.try_acquire().map_err(|_| ApiError::busy())?;
        let _working = self.preparing.acquire().await.map_err(|_| ApiError::unavailable())?;
        let app = Arc::clone(self);
        match tokio::task::spawn_blocking(move || work(&app)).await {
            Ok(result) => result,
            Err(_) => Err(ApiError::internal("preparing the request failed; please report this as a bug")),
        }
    }
}

/// Now.
pub fn since_1970() -> std::time::Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Now, in seconds.
pub fn now() -> u64 {
    since_1970().as_secs()
}

/// An id that nobody can guess: the prefix and 24 hexadecimal digits.
pub fn new_id(prefix: &str) -> String {
    let mut id = uuid::Uuid::new_v4().simple().to_string();
    id.truncate(24);
    format!("{prefix}{id}")
}
