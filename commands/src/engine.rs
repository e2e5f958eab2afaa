//! The seam between the verbs and the engine: what a verb asks for, what it is told back.
//!
//! Verbs know [`Engine`] only, so their tests run on a scripted one.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use mlx_bun::generate::stream;
use mlx_bun::sampling::{PenaltyParams, SamplingParams};
use mlx_bun::structured::grammar::Constraint;
use mlx_bun::tokenizer::Tokenizer;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::args::kv_cache::KvCache;
use crate::args::numerics::Numerics;
use crate::args::template::Template;

/// One message of a conversation: `role`, `content` and whatever else a template understands.
pub type Message = Map<String, Value>;

/// A message of plain text.
pub fn message(role: &str, content: impl Into<String>) -> Message {
    let content: String = content.into();
    Message::from_iter([("role".to_owned(), Value::from(role)), ("content".to_owned(), Value::from(content))])
}

/// Bytes of the texts in a value.
pub fn text_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(values) => values.iter().map(text_bytes).sum(),
        Value::Object(fields) => fields.values().map(text_bytes).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    }
}

/// What to load, and how to run it.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Folder, .gguf file or hub id; `None` for the model of the prompt cache file, else the starter.
    pub model: Option<String>,
    /// An adapter to put on it.
    pub adapter_path: Option<PathBuf>,
    /// Tokens that end a reply, beside the model's own.
    pub extra_eos_tokens: Vec<String>,
    /// The chat template.
    pub template: Template,
    /// The key-value cache.
    pub kv_cache: KvCache,
    /// Whose arithmetic.
    pub numerics: Numerics,
    /// A saved cache that every request continues.
    pub prompt_cache_file: Option<PathBuf>,
    /// Requests are turns of one conversation, which may continue the last one's cache. Otherwise each is computed
    /// whole, so that its bits do not depend on what was asked before.
    pub conversation: bool,
}

/// What to continue.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Text as it is, with the tokenizer's own special tokens around it.
    Raw(String),
    /// Messages for the chat template.
    Chat {
        /// The conversation.
        messages: Vec<Message>,
        /// The last message is the beginning of the reply.
        continue_last: bool,
        /// Template variables of this request, over those of [`Template`].
        variables: Map<String, Value>,
    },
}

impl Prompt {
    /// Bytes of text in it.
    pub fn text_bytes(&self) -> usize {
        match self {
            Self::Raw(text) => text.len(),
            Self::Chat { messages, .. } => messages.iter().flat_map(Map::values).map(text_bytes).sum(),
        }
    }
}

/// One request.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// What to continue.
    pub prompt: Prompt,
    /// Most tokens; `None` for no limit.
    pub max_tokens: Option<usize>,
    /// How to choose tokens; XTC's protected tokens are still to be filled in.
    pub sampling: SamplingParams,
    /// What to do to logits first.
    pub penalties: PenaltyParams,
    /// Seed of the draws.
    pub seed: Option<u64>,
    /// Texts to stop before.
    pub stop: Vec<String>,
    /// `None` for no log-probabilities, else how many alternatives at each position.
    pub logprobs: Option<usize>,
    /// What the reply must look like; reasoning may come before it.
    pub constraint: Option<Constraint>,
}

/// What happens during a generation, in order.
#[derive(Clone, Debug)]
pub enum Event {
    /// Prompt tokens fed so far.
    Prefill {
        /// Fed.
        done: usize,
        /// Of so many.
        total: usize,
    },
    /// A token was chosen. Its text comes when it is known to be whole.
    Token {
        /// Its id.
        id: u32,
        /// Its log-probability, if asked for.
        logprobs: Option<TokenLogprobs>,
    },
    /// More of the reply's text.
    Text(String),
}

/// The token chosen and the likeliest alternatives, best first.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TokenLogprobs {
    /// The token chosen.
    #[serde(flatten)]
    pub chosen: Candidate,
    /// The likeliest tokens at this position.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub top_logprobs: Vec<Candidate>,
}

impl TokenLogprobs {
    /// From the engine's, with the tokens' texts.
    pub fn new(tokenizer: &Tokenizer, id: u32, logprobs: stream::TokenLogprobs) -> Self {
        let candidate = |(id, logprob): (u32, f32)| {
            let bytes = tokenizer.token_bytes(id);
            Candidate { id, token: String::from_utf8_lossy(&bytes).into_owned(), bytes, logprob }
        };
        let top_logprobs = logprobs.top.into_iter().map(candidate).collect();
        Self { chosen: candidate((id, logprobs.logprob)), top_logprobs }
    }
}

/// A token with its log-probability; the fields have OpenAI's names, and its id.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Candidate {
    /// Its id.
    pub id: u32,
    /// Its text inside a sequence, U+FFFD where it is part of a character.
    pub token: String,
    /// The bytes of that text, as they are.
    pub bytes: Vec<u8>,
    /// Its log-probability.
    pub logprob: f32,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// An end-of-sequence token or a stop text.
    Stop,
    /// The token limit.
    Length,
    /// The caller asked to stop.
    Interrupted,
}

/// Figures of one generation; the clock starts and stops where mlx-lm's does.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Stats {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these, taken from a cache.
    pub cached_tokens: usize,
    /// Prompt tokens a second.
    pub prompt_tps: f64,
    /// Tokens generated.
    pub generation_tokens: usize,
    /// Generated tokens a second.
    pub generation_tps: f64,
    /// Seconds to the first token.
    pub time_to_first_token: f64,
    /// Most memory in use at once, in units of 10^9 bytes.
    pub peak_memory_gb: f64,
}

/// How a generation ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    /// Why.
    pub finish_reason: FinishReason,
    /// Figures.
    pub stats: Stats,
}

/// What a saved prompt cache holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SavedCache {
    /// Tokens in it.
    pub tokens: usize,
    /// Most memory in use at once, in units of 10^9 bytes.
    pub peak_memory_gb: f64,
}

/// Receives events; `Break` asks to stop, an error ends the generation with that error.
pub type Sink<'a> = &'a mut dyn FnMut(Event) -> anyhow::Result<ControlFlow<()>>;

/// A loaded model.
pub trait Engine {
    /// Answers one request. Requests that share a beginning may share its computation, never a different result.
    ///
    /// # Errors
    /// The request is impossible (prompt empty or longer than the context, template error), the sink failed, or
    /// MLX did.
    fn generate(&mut self, request: &Request, sink: Sink) -> anyhow::Result<Summary>;

    /// Feeds a prompt and writes the cache to `file`. `None` when the sink asked to stop; nothing is written then.
    ///
    /// # Errors
    /// As for [`Engine::generate`], and when the file cannot be written.
    fn save_prompt_cache(
        &mut self,
        prompt: &Prompt,
        file: &Path,
        sink: Sink,
    ) -> anyhow::Result<Option<SavedCache>>;
}
