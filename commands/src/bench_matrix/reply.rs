//! A reply as it streams in: its text, the times of its pieces, and the counts that the server tells, as far as they can
//! be true.

use std::time::Instant;

use serde_json::Value;

use super::client::{ChatRequest, ClientError, error_message};

/// Tokens that leave no text behind, such as those that end a turn, and tokens that a chat template adds to a prompt.
const SILENT_TOKENS: u64 = 16;
const TEMPLATE_TOKENS: u64 = 16 << 10;

/// A reply and its times, in seconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reply {
    /// Until the first piece of text.
    pub ttft: f64,
    /// Between pieces of text.
    pub gaps: Vec<f64>,
    /// Until the end.
    pub e2e: f64,
    /// Tokens of the reply.
    pub tokens: u64,
    /// Whether the server said so; otherwise pieces of text were counted.
    pub tokens_from_usage: bool,
    /// What it said, where that cannot be.
    pub claimed_tokens: Option<u64>,
    /// Tokens of the prompt, if the server said so.
    pub prompt_tokens: Option<u64>,
    /// Why it ended.
    pub finish: Option<String>,
    /// Its text, without reasoning.
    pub text: String,
    /// Drafted tokens that were accepted, of those drafted, if the server said so.
    pub speculation: Option<(u64, u64)>,
}

/// A reply that is coming in.
pub struct ReplyStream {
    started: Instant,
    last: Option<Instant>,
    pieces: usize,
    /// Bytes of text, reasoning and calls.
    bytes: usize,
    ended: bool,
    usage: Option<Value>,
    reply: Reply,
}

impl ReplyStream {
    /// Of a request that was sent at this time.
    pub fn new(started: Instant) -> Self {
        Self { started, last: None, pieces: 0, bytes: 0, ended: false, usage: None, reply: Reply::default() }
    }

    /// Pieces of text so far.
    pub fn pieces(&self) -> usize {
        self.pieces
    }

    /// Takes an event; whether it was the last.
    ///
    /// # Errors
    /// It is none, or says that something went wrong.
    pub fn event(&mut self, data: &str) -> Result<bool, ClientError> {
        if data.trim() == "[DONE]" {
            self.ended = true;
            return Ok(true);
        }
        let now = Instant::now();
        let chunk: Value = serde_json::from_str(data)
            .map_err(|error| ClientError::Stream(format!("an event that is no JSON ({error})")))?;
        if !chunk["error"].is_null() {
            return Err(ClientError::Stream(error_message(data)));
        }
        if chunk["usage"].is_object() {
            self.usage = Some(chunk["usage"].clone());
        }
        let Some(choice) = chunk["choices"].get(0) else { return Ok(false) };
        let text = |field: &str| choice["delta"][field].as_str().filter(|text| !text.is_empty());
        let content = text("content");
        let called = choice["delta"]["tool_calls"].as_array().is_some_and(|calls| !calls.is_empty());
        let reasoning = text("reasoning_content").or(text("reasoning"));
        if content.is_some() || called || reasoning.is_some() {
            self.pieces += 1;
            let calls = if called { choice["delta"]["tool_calls"].to_string().len() } else { 0 };
            self.bytes += content.map_or(0, str::len) + reasoning.map_or(0, str::len) + calls;
            match self.last.replace(now) {
                Some(last) => self.reply.gaps.push((now - last).as_secs_f64()),
                None => self.reply.ttft = (now - self.started).as_secs_f64(),
            }
        }
        self.reply.text.push_str(content.unwrap_or_default());
        if let Some(finish) = choice["finish_reason"].as_str() {
            self.reply.finish = Some(finish.to_owned());
            self.ended = true;
        }
        Ok(false)
    }

    /// The reply to `request`. Counts that cannot be are not believed: more tokens than were asked for, or than there
    /// are bytes of text.
    ///
    /// # Errors
    /// It has no end, or no text.
    pub fn finish(mut self, request: &ChatRequest) -> Result<Reply, ClientError> {
        if !self.ended {
            return Err(ClientError::Cut { pieces: self.pieces });
        }
        if self.pieces == 0 {
            return Err(ClientError::Empty);
        }
        self.reply.e2e = self.started.elapsed().as_secs_f64();
        let number = |value: &Value| value.as_u64();
        let usage = self.usage.unwrap_or_default();
        let most_prompt = TEMPLATE_TOKENS + request.prompt.len() as u64;
        self.reply.prompt_tokens = number(&usage["prompt_tokens"]).filter(|tokens| *tokens <= most_prompt);
        let most = (request.max_tokens as u64).min(self.bytes as u64 + SILENT_TOKENS);
        let said = number(&usage["completion_tokens"]);
        let believed = said.filter(|tokens| (1..=most).contains(tokens));
        self.reply.claimed_tokens = said.filter(|_| believed.is_none());
        self.reply.tokens_from_usage = believed.is_some();
        self.reply.tokens = believed.unwrap_or(self.pieces as u64);
        let speculation = &usage["speculation"];
        let accepted = number(&speculation["accepted"]).zip(number(&speculation["drafted"]));
        self.reply.speculation = accepted.filter(|(accepted, drafted)| accepted <= drafted);
        Ok(self.reply)
    }
}
