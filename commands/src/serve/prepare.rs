//! From a request to tokens in the engine: template, tokenizer, grammar, defaults.

use std::sync::Arc;

use mlx_bun::generate::step::{StepError, StepOptions};
use mlx_bun::generate::stream::{StreamError, StreamOptions};
use mlx_bun::scheduler::{GenerationError, GenerationRequest, SubmitError};
use mlx_bun::structured::ReplyParser;
use mlx_bun::structured::grammar::{Constraint, Grammar, GrammarError, Reasoning, ToolChoice as CalledTools};
use mlx_bun::structured::tools::ToolSchemas;
use mlx_bun::tokenizer::chat_template::TemplateError;
use serde_json::Value;

use super::app::App;
use super::error::ApiError;
use super::reply::Replies;
use super::request::{Chat, Prompt, Request, Settings, ToolChoice};
use super::{constraint, tools};
use crate::args::prompt::LONGEST_PROMPT;
use crate::engine::message;
use crate::session::{protect_special_tokens, reasoning_before};

/// A request that the engine can take.
pub struct Prepared {
    /// For the engine.
    pub request: GenerationRequest,
    /// Splits the reply; `None` where all of it is content.
    pub parser: Option<ReplyParser>,
    /// Whether several calls may come.
    pub parallel_calls: bool,
    /// What the client is to be warned of.
    pub warning: Option<String>,
}

/// A request on its way to [`Prepared`].
struct Draft {
    request: Request,
    ids: Vec<u32>,
    constraint: Option<Constraint>,
    /// Its grammar, where that is known already.
    known: Option<Result<Grammar, GrammarError>>,
    reasoning: Reasoning,
    parser: Option<ReplyParser>,
}

/// Replies in progress, and what the client is to be warned of.
pub struct Started {
    /// The replies.
    pub replies: Replies,
    /// For the header `Warning`.
    pub warning: Option<String>,
}

impl App {
    /// Prepares a request and submits it, once for each of `count` replies.
    ///
    /// # Errors
    /// Something is wrong with it, or there is no room for it.
    pub async fn start(self: &Arc<Self>, request: Request, count: usize) -> Result<Started, ApiError> {
        let Prepared { request, parser, parallel_calls, warning } = self.prepare(request).await?;
        let mut replies = Replies::new(Arc::clone(self.tokenizer()), request.prompt.len(), parallel_calls);
        for index in 0..count {
            let mut request = request.clone();
            // The same draws twice would be one reply twice.
            if let Some(seed) = &mut request.options.step.seed {
                *seed = seed.wrapping_add(index as u64);
            }
            if let Some(sink) = replies.sink(parser.clone()) {
                self.engine.submit(request, Box::new(sink)).map_err(|error| submit_error(&error))?;
            }
        }
        replies.seal();
        Ok(Started { replies, warning })
    }

    /// The tokens of a request's prompt.
    ///
    /// # Errors
    /// The template refuses it, or it is too long.
    pub fn prompt_tokens(&self, prompt: &Prompt) -> Result<Vec<u32>, ApiError> {
        let tokenizer = self.tokenizer();
        check_length(prompt.text_bytes())?;
        let encoded = match prompt {
            Prompt::Text(text) => {
                // Of repeated beginnings of a sequence one is kept.
                self.check_fits(tokenizer.bos_token().map_or(text, |bos| text.trim_start_matches(bos)))?;
                tokenizer.encode_prompt(text)
            }
            Prompt::Chat(chat) => {
                let text = self.render(chat)?;
                self.check_fits(&text)?;
                tokenizer.encode(&text, false)
            }
        };
        let ids =
            encoded.map_err(|error| ApiError::invalid(format!("the prompt cannot be tokenized: {error}")))?;
        match ids.is_empty() {
            true => Err(ApiError::invalid("the prompt is empty")),
            false => Ok(ids),
        }
    }

    /// Refuses text that has more tokens than the context however it is tokenized, before it is.
    ///
    /// # Errors
    /// It has.
    pub fn check_fits(&self, text: &str) -> Result<(), ApiError> {
        let (Some(context), Some(bound)) = (self.served.parts.context_length, self.text_bound) else {
            return Ok(());
        };
        match bound.least_tokens(text) {
            least if least > context => Err(ApiError::context_length_at_least(least, context)),
            _ => Ok(()),
        }
    }

    fn render(&self, chat: &Chat) -> Result<String, ApiError> {
        let mut messages = chat.messages.clone();
        let has_system =
            messages.iter().any(|message| message.get("role").is_some_and(|role| role == "system"));
        if let Some(system) = self.policy.system_prompt.as_ref().filter(|_| !has_system) {
            messages.insert(0, message("system", system));
        }
        let tools = tools::for_template(&chat.tools);
        self.renderer
            .render(&messages, &tools, false, &chat.variables)
            .map_err(|error| template_error(&error))
    }

    /// Whether a conversation is answered with reasoning: the request, then `--thinking`, then the model decides.
    fn thinking(&self, settings: &Settings) -> Option<bool> {
        settings.thinking.or(self.policy.thinking)
    }

    async fn prepare(self: &Arc<Self>, request: Request) -> Result<Prepared, ApiError> {
        let bytes = request.prompt.text_bytes();
        let mut draft = self.off_thread_over(bytes, move |app| app.draft(request)).await?;
        let mut warning = None;
        let mut grammar = None;
        if let Some(constraint) = draft.constraint.take() {
            let compiled = match draft.known.take() {
                Some(known) => known,
                None => self.compile(constraint.clone(), draft.reasoning).await?,
            };
            match compiled {
                Ok(compiled) => grammar = Some(compiled),
                Err(error) if self.policy.grammar_fallback && !draft.request.enforced => {
                    warning = Some(format!("grammar not enforced: {error}"));
                    draft =
                        self.off_thread_over(bytes, move |app| app.instructed(draft, &constraint)).await?;
                }
                Err(error) => return Err(grammar_error(&error)),
            }
        }
        let Draft { request, ids, parser, .. } = draft;
        let parallel_calls = match &request.prompt {
            Prompt::Chat(chat) => chat.parallel_tool_calls,
            Prompt::Text(_) => true,
        };
        let options = self.options(&request.settings, ids.len(), grammar);
        let adapters = request.adapters.unwrap_or_else(|| self.policy.adapter.iter().cloned().collect());
        let request = GenerationRequest { prompt: ids, options, adapters, prompt_cache: true };
        Ok(Prepared { request, parser, parallel_calls, warning })
    }

    /// Everything about a request but its grammar.
    fn draft(&self, mut request: Request) -> Result<Draft, ApiError> {
        let thinking = self.thinking(&request.settings);
        if let Prompt::Chat(chat) = &mut request.prompt {
            if chat.tool_choice == ToolChoice::None {
                chat.tools.clear();
            }
            if let Some(thinking) = thinking {
                chat.variables.insert("enable_thinking".to_owned(), Value::Bool(thinking));
            }
        }
        let constraint = self.constraint(&request.prompt, request.constraint.as_ref())?;
        let ids = self.prompt_tokens(&request.prompt)?;
        let context = self.served.parts.context_length;
        if let Some(context) = context.filter(|context| ids.len() >= *context) {
            return Err(ApiError::context_length(ids.len(), context));
        }
        let (parser, reasoning) = match &request.prompt {
            Prompt::Chat(chat) => {
                let schemas = ToolSchemas::from_openai(&chat.tools);
                let parser = self.format.parser(self.tokenizer(), &ids, schemas);
                (Some(parser), reasoning_before(self.tokenizer(), &ids, true))
            }
            Prompt::Text(_) => (None, Reasoning::None),
        };
        let known = constraint.as_ref().and_then(|constraint| self.compiled(constraint, reasoning));
        Ok(Draft { request, ids, constraint, known, reasoning, parser })
    }

    /// The same request with words in place of a constraint that cannot be enforced.
    fn instructed(&self, draft: Draft, constraint: &Constraint) -> Result<Draft, ApiError> {
        let mut request = draft.request;
        if let Prompt::Chat(chat) = &mut request.prompt {
            instruct(chat, constraint);
        }
        Ok(Draft { constraint: None, ..self.draft(request)? })
    }

    /// What the reply must look like: calls where they are required, else what the request says.
    fn constraint(
        &self,
        prompt: &Prompt,
        asked: Option<&Constraint>,
    ) -> Result<Option<Constraint>, ApiError> {
        let Prompt::Chat(chat) = prompt else { return Ok(asked.cloned()) };
        let named = match &chat.tool_choice {
            ToolChoice::Named(name) => Some(name.as_str()),
            ToolChoice::Required => None,
            ToolChoice::Auto if asked.is_some() && !chat.tools.is_empty() => {
                return Err(ApiError::field(
                    "response_format",
                    "cannot be combined with `tools` that may or may not be called; set `tool_choice` to none or \
                     required",
                ));
            }
            ToolChoice::Auto | ToolChoice::None => return Ok(asked.cloned()),
        };
        let parser = self.format.tool_parser().ok_or_else(|| {
            ApiError::field(
                "tool_choice",
                "asks for a call, and this model's chat template knows no tool calls",
            )
        })?;
        let schemas = ToolSchemas::from_openai(&chat.tools);
        let calls = CalledTools::new(parser, &schemas, named, chat.parallel_tool_calls);
        calls.map(|calls| Some(Constraint::ToolCalls(calls))).map_err(|error| grammar_error(&error))
    }

    fn options(&self, settings: &Settings, prompt: usize, grammar: Option<Grammar>) -> StreamOptions {
        let defaults = &self.policy.defaults;
        let tokenizer = self.tokenizer();
        let unthinking = tokenizer.has_thinking() && self.thinking(settings) == Some(false);
        let mut sampling = defaults.sampling(settings, unthinking);
        protect_special_tokens(&mut sampling, tokenizer);
        StreamOptions {
            step: StepOptions {
                max_tokens: defaults.max_tokens(settings, prompt, self.served.parts.context_length),
                sampling,
                penalties: defaults.penalties(settings),
                seed: settings.seed,
                grammar,
                ..StepOptions::default()
            },
            stop: settings.stop.clone(),
            eos_token_ids: None,
            logprobs: settings.logprobs,
        }
    }
}

/// Asks for what cannot be enforced.
fn instruct(chat: &mut Chat, constraint: &Constraint) {
    let instruction = constraint::instruction(constraint);
    match chat.messages.first_mut().filter(|first| first.get("role").is_some_and(|role| role == "system")) {
        Some(system) => {
            let text = system.get("content").and_then(Value::as_str).unwrap_or_default();
            let text = format!("{text}\n\n{instruction}");
            system.insert("content".to_owned(), Value::from(text));
        }
        None => chat.messages.insert(0, message("system", instruction)),
    }
}

/// Refuses more text than any model reads.
///
/// # Errors
/// It is.
pub fn check_length(bytes: usize) -> Result<(), ApiError> {
    match bytes > LONGEST_PROMPT {
        true => {
            let message = format!("the prompt has {bytes} bytes; at most {LONGEST_PROMPT} are taken");
            Err(ApiError::invalid(message).code("context_length_exceeded"))
        }
        false => Ok(()),
    }
}

/// A template that fails has been sent something it cannot print.
fn template_error(error: &anyhow::Error) -> ApiError {
    match error.downcast_ref::<TemplateError>() {
        Some(TemplateError::Missing) | None => ApiError::invalid(
            "the model has no chat template; use /v1/completions, or start the server with --use-default-chat-template",
        ),
        Some(error) => ApiError::invalid(format!("the prompt cannot be built: {error}")),
    }
}

fn grammar_error(error: &GrammarError) -> ApiError {
    ApiError::invalid(error.to_string()).code("constraint_not_supported")
}

/// Why a request was not taken.
pub fn submit_error(error: &SubmitError) -> ApiError {
    match error {
        SubmitError::Busy { .. } => ApiError::busy(),
        SubmitError::Stopped | SubmitError::Dead => ApiError::unavailable(),
        SubmitError::Invalid(error) => stream_error(error),
        SubmitError::UnknownAdapter(id) => ApiError::field(
            "adapter",
            format!("`{id}` is not mounted; GET /v1/adapters lists those that are"),
        ),
        SubmitError::CannotStack(_) => ApiError::field("adapter", format!("cannot be used: {error}")),
        SubmitError::OverKvBudget { .. } | SubmitError::OverMemoryBudget { .. } => {
            ApiError::invalid(error.to_string()).code("context_over_budget")
        }
    }
}

/// Why a reply failed.
pub fn generation_error(error: &GenerationError) -> ApiError {
    match error {
        GenerationError::Stream(error) => stream_error(error),
        GenerationError::AdapterGone(_) | GenerationError::Adapter(_) => ApiError::invalid(error.to_string()),
        GenerationError::Stopped | GenerationError::Dead => ApiError::unavailable(),
    }
}

fn stream_error(error: &StreamError) -> ApiError {
    match error {
        StreamError::ContextLength { prompt, context } => ApiError::context_length(*prompt, *context),
        StreamError::Step(StepError::Mlx(_) | StepError::NanLogits) | StreamError::Mlx(_) => {
            ApiError::internal(error.to_string())
        }
        StreamError::Step(_) | StreamError::Stop(_) | StreamError::NoTokens => {
            ApiError::invalid(error.to_string())
        }
    }
}
