//! What all handlers share.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use mlx_bun::registry::fit::KvScheme;
use mlx_bun::scheduler::{Engine, ModelParts};
use mlx_bun::structured::ReplyFormat;
use mlx_bun::structured::grammar::{Constraint, Grammar, GrammarCompiler, GrammarError, Limits, Reasoning};
use mlx_bun::tokenizer::{TextBound, Tokenizer};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::body::Bodies;
use super::defaults::Defaults;
use super::error::ApiError;
use super::guard::Guard;
use super::log::Log;
use super::metrics::Metrics;
use super::response_store::ResponseStore;
use super::status::Library;
use crate::prompt::Renderer;

/// Requests that wait for a thread to render and tokenize.
const PREPARATIONS_WAITING: usize = 64;
/// Bytes of text from which on only one request at a time is prepared, so that a thread is left for the small ones.
const BULKY: usize = 1 << 20;
/// Grammars that are compiled at a time, those included that nobody waits for any more.
const COMPILING: usize = 2;
/// How long a request waits for such a place: as long as it would wait for its grammar then.
const PLACE_PATIENCE: Duration = Duration::from_secs(10);

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
    /// Room for the bodies of requests.
    pub bodies: Bodies,
    /// How few tokens a text can have.
    pub text_bound: Option<TextBound>,
    /// Made for the first request with a constraint.
    grammars: OnceLock<GrammarCompiler>,
    /// Places to compile in, each held until the work has really ended.
    compiling: Arc<Semaphore>,
    /// Threads for rendering and tokenizing, held likewise.
    preparing: Arc<Semaphore>,
    preparing_bulk: Arc<Semaphore>,
    preparations: Arc<Semaphore>,
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
        let threads = std::thread::available_parallelism().map_or(2, usize::from).clamp(2, 4);
        let text_bound = served.parts.tokenizer.text_bound();
        let places = |count| Arc::new(Semaphore::new(count));
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
            bodies: Bodies::default(),
            text_bound,
            grammars: OnceLock::new(),
            compiling: places(COMPILING),
            preparing: places(threads),
            preparing_bulk: places(1),
            preparations: places(threads + PREPARATIONS_WAITING),
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
    fn grammars(&self) -> Result<&GrammarCompiler, GrammarError> {
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
        self.off_thread_over(0, work).await
    }

    /// The same for work on so many bytes of text.
    ///
    /// # Errors
    /// As for [`Self::off_thread`].
    pub async fn off_thread_over<T: Send + 'static>(
        self: &Arc<Self>,
        bytes: usize,
        work: impl FnOnce(&Self) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let gone = |_| ApiError::unavailable();
        // Those that wait here take no place from others; the room for bodies bounds them.
        let bulk = match bytes > BULKY {
            true => Some(Arc::clone(&self.preparing_bulk).acquire_owned().await.map_err(gone)?),
            false => None,
        };
        let waiting = Arc::clone(&self.preparations).try_acquire_owned().map_err(|_| ApiError::busy())?;
        let working = Arc::clone(&self.preparing).acquire_owned().await.map_err(gone)?;
        let app = Arc::clone(self);
        let work = move || {
            // The client may go; the work holds its places to its end.
            let _held = (waiting, bulk, working);
            work(&app)
        };
        tokio::task::spawn_blocking(work).await.unwrap_or_else(|_| Err(broke_down()))
    }

    /// A constraint that was compiled before, or why it never will be.
    pub fn compiled(
        &self,
        constraint: &Constraint,
        reasoning: Reasoning,
    ) -> Option<Result<Grammar, GrammarError>> {
        self.grammars.get()?.find(constraint, reasoning).transpose()
    }

    /// Compiles a constraint beside all other work; requests without one never wait for this.
    ///
    /// # Errors
    /// All places are taken by others' grammars. What is wrong with the constraint itself is the inner error.
    pub async fn compile(
        self: &Arc<Self>,
        constraint: Constraint,
        reasoning: Reasoning,
    ) -> Result<Result<Grammar, GrammarError>, ApiError> {
        let Ok(place) = timeout(PLACE_PATIENCE, Arc::clone(&self.compiling).acquire_owned()).await else {
            return Err(ApiError::overloaded(
                "the structures of other requests take long to compile; try again in a moment, or without a structure",
            ));
        };
        let place = place.map_err(|_| ApiError::unavailable())?;
        let app = Arc::clone(self);
        let work = move || app.grammars()?.compile_holding(&constraint, reasoning, place);
        tokio::task::spawn_blocking(work).await.map_err(|_| broke_down())
    }
}

fn broke_down() -> ApiError {
    ApiError::internal("preparing the request failed; please report this as a bug")
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
