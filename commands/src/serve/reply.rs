//! Replies in progress: what the engine sends, split into reasoning, content and calls, and counted.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use mlx_bun::generate::stream::{Chunk, FinishReason};
use mlx_bun::scheduler::{GenerationEvent, GenerationSink, Lane, Summary};
use mlx_bun::structured::tools::ToolCall;
use mlx_bun::structured::{ReplyEvent, ReplyParser};
use mlx_bun::tokenizer::Tokenizer;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::error::ApiError;
use crate::engine::{Candidate, TokenLogprobs};

/// Events that wait for a slow client before it counts as gone.
const BACKLOG: usize = 65_536;

/// JSON as a reply.
pub fn json_response(value: &Value) -> Response {
    let mut response = Body::from(value.to_string()).into_response();
    let kind = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

/// Why a reply ended, in OpenAI's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// By itself, or at a stop text.
    Stop,
    /// At the limit.
    Length,
    /// With calls that the client is to run.
    ToolCalls,
}

impl Finish {
    /// The word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
        }
    }
}

/// Tokens of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Of the prompt.
    pub prompt: usize,
    /// Of these, taken from the prompt cache.
    pub cached: usize,
    /// Generated, the one that ended the reply included.
    pub completion: usize,
    /// Of these, reasoning.
    pub reasoning: usize,
}

impl Usage {
    /// In OpenAI's form.
    pub fn openai(&self, lane: Option<Lane>) -> Value {
        let mut usage = json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        });
        if let Some(lane) = lane {
            usage["lane"] = json!(lane.name());
        }
        usage
    }

    /// The sum over the replies to one prompt.
    pub fn add(&mut self, other: &Self) {
        self.prompt = other.prompt;
        self.cached = self.cached.max(other.cached);
        self.completion += other.completion;
        self.reasoning += other.reasoning;
    }
}

/// How a reply ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Why.
    pub finish: Finish,
    /// The stop text that ended it.
    pub stop: Option<String>,
    /// Its tokens.
    pub usage: Usage,
    /// How it was computed.
    pub lane: Option<Lane>,
}

/// More of a reply.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Piece {
    /// What became certain.
    pub events: Vec<ReplyEvent>,
    /// The token behind it, if asked for.
    pub logprobs: Option<TokenLogprobs>,
}

/// What happens to a reply.
#[derive(Clone, Debug, PartialEq)]
pub enum Item {
    /// The prompt is being read.
    Progress {
        /// Tokens read.
        done: usize,
        /// Of so many.
        total: usize,
    },
    /// More of the reply.
    Piece(Piece),
    /// Its end.
    Done(Outcome),
}

/// Takes the engine's events of one reply to whoever writes them to the client.
pub struct Sink {
    index: usize,
    sender: mpsc::Sender<(usize, GenerationEvent)>,
    over: Arc<AtomicBool>,
    read: usize,
}

impl GenerationSink for Sink {
    fn send(&mut self, event: GenerationEvent) {
        if let GenerationEvent::Prefill { done, .. } = event {
            if done == self.read {
                return;
            }
            self.read = done;
        }
        if self.sender.try_send((self.index, event)).is_err() {
            self.over.store(true, Ordering::Relaxed);
        }
    }

    fn is_gone(&self) -> bool {
        self.over.load(Ordering::Relaxed) || self.sender.is_closed()
    }
}

/// One reply of a request.
struct Choice {
    parser: Option<ReplyParser>,
    over: Arc<AtomicBool>,
    done: bool,
    cached: usize,
    tokens: usize,
    reasoning_tokens: usize,
    in_reasoning: bool,
    calls: usize,
}

/// All replies of a request, in progress. Dropping it ends them.
pub struct Replies {
    receiver: mpsc::Receiver<(usize, GenerationEvent)>,
    sender: Option<mpsc::Sender<(usize, GenerationEvent)>>,
    choices: Vec<Choice>,
    tokenizer: Arc<Tokenizer>,
    prompt_tokens: usize,
    parallel_calls: bool,
    pending: VecDeque<(usize, Item)>,
}

impl Replies {
    /// For a prompt of so many tokens. Without a parser all text is content.
    pub fn new(tokenizer: Arc<Tokenizer>, prompt_tokens: usize, parallel_calls: bool) -> Self {
        let (sender, receiver) = mpsc::channel(BACKLOG);
        Self {
            receiver,
            sender: Some(sender),
            choices: Vec::new(),
            tokenizer,
            prompt_tokens,
            parallel_calls,
            pending: VecDeque::new(),
        }
    }

    /// The place where the engine sends one more reply; `None` once all have been made.
    pub fn sink(&mut self, parser: Option<ReplyParser>) -> Option<Sink> {
        let over = Arc::new(AtomicBool::new(false));
        let sink = Sink {
            index: self.choices.len(),
            sender: self.sender.clone()?,
            over: Arc::clone(&over),
            read: 0,
        };
        self.choices.push(Choice {
            parser,
            over,
            done: false,
            cached: 0,
            tokens: 0,
            reasoning_tokens: 0,
            in_reasoning: false,
            calls: 0,
        });
        Some(sink)
    }

    /// There will be no more sinks.
    pub fn seal(&mut self) {
        self.sender = None;
    }

    /// How many replies there are.
    pub fn count(&self) -> usize {
        self.choices.len()
    }

    /// Tokens of the prompt.
    pub fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// Tokens so far, of all replies.
    pub fn usage(&self) -> Usage {
        let mut usage = Usage { prompt: self.prompt_tokens, ..Usage::default() };
        self.choices.iter().for_each(|choice| usage.add(&choice.usage(self.prompt_tokens)));
        usage
    }

    /// What happens next, and to which reply; `None` after the end of the last.
    ///
    /// # Errors
    /// A reply failed.
    pub async fn next(&mut self) -> Option<Result<(usize, Item), ApiError>> {
        loop {
            if let Some(item) = self.pending.pop_front() {
                return Some(Ok(item));
            }
            if self.choices.iter().all(|choice| choice.done) {
                return None;
            }
            // The engine never goes without a word, but a thread may die.
            let Some((index, event)) = self.receiver.recv().await else {
                return Some(Err(ApiError::unavailable()));
            };
            match self.take(index, event) {
                Ok(Some(item)) => return Some(Ok((index, item))),
                Ok(None) => {}
                Err(error) => return Some(Err(error)),
            }
        }
    }

    fn take(&mut self, index: usize, event: GenerationEvent) -> Result<Option<Item>, ApiError> {
        let Some(choice) = self.choices.get_mut(index).filter(|choice| !choice.done) else { return Ok(None) };
        match event {
            GenerationEvent::Prefill { done, total, cached } => {
                choice.cached = cached;
                Ok(Some(Item::Progress { done, total }))
            }
            GenerationEvent::Chunk(chunk) => {
                let piece = choice.piece(chunk, &self.tokenizer, self.parallel_calls);
                // One call was allowed, and here it is.
                if choice.calls > 0 && !self.parallel_calls {
                    choice.end();
                    let usage = choice.usage(self.prompt_tokens);
                    let outcome = Outcome { finish: Finish::ToolCalls, stop: None, usage, lane: None };
                    self.pending.push_back((index, Item::Done(outcome)));
                }
                Ok(Some(Item::Piece(piece)))
            }
            // Not by us: the server's time was up.
            GenerationEvent::Finished(summary) if summary.finish_reason == FinishReason::Cancelled => {
                Err(ApiError::unavailable())
            }
            GenerationEvent::Finished(summary) => {
                let mut tail = Piece::default();
                if let Some(parser) = &mut choice.parser {
                    tail.events = parser.finish();
                }
                choice.count_calls(&mut tail.events, self.parallel_calls);
                choice.end();
                choice.tokens = summary.stats.generation_tokens;
                let outcome = choice.outcome(summary, self.prompt_tokens);
                self.pending.push_back((index, Item::Done(outcome)));
                Ok((!tail.events.is_empty()).then_some(Item::Piece(tail)))
            }
            GenerationEvent::Failed(error) => Err(super::prepare::generation_error(&error)),
        }
    }

    /// Waits for everything.
    ///
    /// # Errors
    /// A reply failed.
    pub async fn collect(mut self) -> Result<Vec<Whole>, ApiError> {
        let mut wholes: Vec<Whole> = (0..self.count()).map(|_| Whole::default()).collect();
        while let Some(next) = self.next().await {
            let (index, item) = next?;
            let Some(whole) = wholes.get_mut(index) else { continue };
            match item {
                Item::Progress { .. } => {}
                Item::Piece(piece) => {
                    whole.logprobs.extend(piece.logprobs);
                    piece.events.into_iter().for_each(|event| whole.push(event));
                }
                Item::Done(outcome) => whole.outcome = Some(outcome),
            }
        }
        Ok(wholes)
    }
}

impl Choice {
    fn piece(&mut self, chunk: Chunk, tokenizer: &Tokenizer, parallel: bool) -> Piece {
        let mut events = match &mut self.parser {
            Some(parser) => parser.push(&chunk.text),
            None if chunk.text.is_empty() => Vec::new(),
            None => vec![ReplyEvent::Content(chunk.text)],
        };
        if let Some(event) = events.last() {
            self.in_reasoning = matches!(event, ReplyEvent::Reasoning(_));
        }
        if chunk.token.is_some() {
            self.tokens += 1;
            self.reasoning_tokens += usize::from(self.in_reasoning);
        }
        self.count_calls(&mut events, parallel);
        let logprobs =
            chunk.token.zip(chunk.logprobs).map(|(id, logprobs)| TokenLogprobs::new(tokenizer, id, logprobs));
        Piece { events, logprobs }
    }

    /// Counts calls; where only one is allowed, what follows the first is dropped.
    fn count_calls(&mut self, events: &mut Vec<ReplyEvent>, parallel: bool) {
        let is_call = |event: &ReplyEvent| matches!(event, ReplyEvent::ToolCall(_));
        if let Some(first) = events.iter().position(is_call).filter(|_| !parallel) {
            events.truncate(first + 1);
        }
        self.calls += events.iter().filter(|event| is_call(event)).count();
    }

    fn end(&mut self) {
        self.done = true;
        self.over.store(true, Ordering::Relaxed);
    }

    fn usage(&self, prompt: usize) -> Usage {
        Usage { prompt, cached: self.cached, completion: self.tokens, reasoning: self.reasoning_tokens }
    }

    fn outcome(&self, summary: Summary, prompt: usize) -> Outcome {
        let finish = match summary.finish_reason {
            FinishReason::Length => Finish::Length,
            FinishReason::Stop | FinishReason::Cancelled if self.calls > 0 => Finish::ToolCalls,
            FinishReason::Stop | FinishReason::Cancelled => Finish::Stop,
        };
        Outcome {
            finish,
            stop: summary.stop,
            usage: Usage {
                cached: summary.cached_tokens,
                completion: summary.stats.generation_tokens,
                ..self.usage(prompt)
            },
            lane: Some(summary.lane),
        }
    }
}

/// A whole reply.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Whole {
    /// Reasoning, text and calls in the order of their generation; neighbours of a kind are one.
    pub blocks: Vec<ReplyEvent>,
    /// A token each, if asked for.
    pub logprobs: Vec<TokenLogprobs>,
    /// How it ended.
    pub outcome: Option<Outcome>,
}

impl Whole {
    fn push(&mut self, event: ReplyEvent) {
        match (self.blocks.last_mut(), event) {
            (Some(ReplyEvent::Reasoning(text)), ReplyEvent::Reasoning(more))
            | (Some(ReplyEvent::Content(text)), ReplyEvent::Content(more)) => text.push_str(&more),
            (_, event) => self.blocks.push(event),
        }
    }

    /// All its reasoning.
    pub fn reasoning(&self) -> String {
        let text = |block: &ReplyEvent| {
            if let ReplyEvent::Reasoning(text) = block { Some(text.clone()) } else { None }
        };
        self.blocks.iter().filter_map(text).collect()
    }

    /// All its text.
    pub fn content(&self) -> String {
        let text = |block: &ReplyEvent| {
            if let ReplyEvent::Content(text) = block { Some(text.clone()) } else { None }
        };
        self.blocks.iter().filter_map(text).collect()
    }

    /// All its calls.
    pub fn calls(&self) -> impl Iterator<Item = &ToolCall> {
        self.blocks
            .iter()
            .filter_map(|block| if let ReplyEvent::ToolCall(call) = block { Some(call) } else { None })
    }

    /// Why it ended.
    pub fn finish(&self) -> Finish {
        self.outcome.as_ref().map_or(Finish::Stop, |outcome| outcome.finish)
    }

    /// Its tokens.
    pub fn usage(&self) -> Usage {
        self.outcome.as_ref().map(|outcome| outcome.usage).unwrap_or_default()
    }
}

/// Tokens with their log-probabilities in OpenAI's form.
pub fn logprobs_json<'a>(tokens: impl IntoIterator<Item = &'a TokenLogprobs>) -> Value {
    let entry = |candidate: &Candidate| json!({"token": candidate.token, "logprob": candidate.logprob, "bytes": candidate.bytes, "id": candidate.id});
    let token = |token: &TokenLogprobs| {
        let mut whole = entry(&token.chosen);
        whole["top_logprobs"] = token.top_logprobs.iter().map(entry).collect();
        whole
    };
    json!({"content": tokens.into_iter().map(token).collect::<Vec<_>>()})
}

#[cfg(test)]
#[path = "reply_tests.rs"]
pub mod tests;
