//! `/v1/chat/completions`: OpenAI's chat protocol, with mlx-lm's fields beside its own.

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::Request as HttpRequest;
use axum::response::Response;
use mlx_bun::structured::ReplyEvent;
use mlx_bun::structured::tools::ToolCall;
use serde_json::{Map, Value, json};

use super::app::{App, new_id, now};
use super::error::{ApiError, Dialect};
use super::fields::Fields;
use super::log::RequestLog;
use super::reply::{Outcome, Piece, Replies, Usage, Whole, json_response, logprobs_json};
use super::request::{self, Chat, MOST_STOPS, Prompt, Request, Settings};
use super::stream::{self, Encoder, data, respond};
use super::usage_chunks::UsageChunks;
use super::{constraint, tools};
use crate::args::range;

/// How a chat request is to be answered.
#[derive(Clone, Debug, PartialEq)]
pub struct Form {
    /// As events.
    pub stream: bool,
    /// With the usage as an event of its own.
    pub include_usage: bool,
    /// Replies.
    pub count: usize,
}

impl Form {
    /// `stream`, `stream_options`, `n` and `best_of`.
    ///
    /// # Errors
    /// One of them is wrong.
    pub fn read(fields: &Fields) -> Result<Self, ApiError> {
        let options = fields.object("stream_options")?;
        let include_usage = options
            .map(|options| Fields::inside(options, "stream_options").boolean("include_usage"))
            .transpose()?
            .flatten();
        fields.text("model")?;
        let count = fields.number("n", range::CHOICES)?.unwrap_or(1);
        if fields.number("best_of", range::CHOICES)?.is_some_and(|best| best != count) {
            return Err(fields.wrong("best_of", "must equal `n`: replies are not ranked"));
        }
        Ok(Self {
            stream: fields.boolean("stream")?.unwrap_or(false),
            include_usage: include_usage.unwrap_or(false),
            count,
        })
    }
}

/// Reads a chat request.
///
/// # Errors
/// A field is wrong.
pub fn read(body: &Map<String, Value>) -> Result<(Request, Form), ApiError> {
    let fields = Fields::new(body);
    let form = Form::read(&fields)?;
    fields.refuse("functions", "is not supported; use `tools`")?;
    fields.refuse("function_call", "is not supported; use `tool_choice`")?;
    check_modalities(&fields)?;
    let tools = tools::read(&fields)?;
    let tool_choice = tools::choice(&fields, &tools)?;
    let (variables, thinking) = request::template_variables(&fields)?;
    let settings = Settings {
        stop: request::stops(&fields, "stop", MOST_STOPS)?,
        max_tokens: request::max_tokens(&fields, &["max_completion_tokens", "max_tokens"])?,
        logprobs: logprobs(&fields)?,
        thinking,
        ..Settings::read(&fields)?.with_logit_bias(&fields)?
    };
    let chat = Chat {
        messages: request::messages(&fields)?,
        tools,
        tool_choice,
        parallel_tool_calls: fields.boolean("parallel_tool_calls")?.unwrap_or(true),
        variables,
    };
    let constraint = constraint::read(&fields)?;
    let enforced = constraint::is_enforced(&fields)?;
    let adapters = request::adapters(&fields)?;
    Ok((Request { prompt: Prompt::Chat(chat), settings, constraint, enforced, adapters }, form))
}

/// Replies are text.
fn check_modalities(fields: &Fields) -> Result<(), ApiError> {
    let list = fields.list("modalities")?.map(Vec::as_slice).unwrap_or_default();
    match list.iter().all(|modality| modality == "text") {
        true => Ok(()),
        false => {
            Err(fields.wrong("modalities", "may have `text` only; this server answers with nothing else"))
        }
    }
}

fn logprobs(fields: &Fields) -> Result<Option<usize>, ApiError> {
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.number("top_logprobs", range::WIRE_TOP_LOGPROBS)?.unwrap_or(-1);
    match usize::try_from(top) {
        Ok(top) if wanted || top > 0 => Ok(Some(top)),
        _ => Ok(wanted.then_some(0)),
    }
}

/// Answers a chat request.
pub async fn handle(
    State(app): State<Arc<App>>,
    Extension(log): Extension<Arc<RequestLog>>,
    request: HttpRequest<Body>,
) -> Result<Response, ApiError> {
    let body = app.bodies.read_object(request).await?;
    let (request, form) = read(&body)?;
    let room = body.into_room();
    let started = app.start(request, form.count).await?;
    drop(room);
    let head = Head { id: new_id("chatcmpl-"), created: now(), model: app.served.id.clone() };
    if form.stream {
        return Ok(respond(started, ChatEncoder::new(head, &form), log));
    }
    let warning = started.warning;
    let wholes = started.replies.collect().await?;
    let mut usage = Usage::default();
    wholes.iter().for_each(|whole| usage.add(&whole.usage()));
    log.finished(usage);
    let mut response = json_response(&completion(&head, &wholes, usage));
    stream::warn(response.headers_mut(), warning.as_deref());
    Ok(response)
}

/// What every object about one request says.
#[derive(Clone, Debug)]
pub struct Head {
    /// The reply's id.
    pub id: String,
    /// When it was begun.
    pub created: u64,
    /// Who answers.
    pub model: String,
}

impl Head {
    /// An object of this kind with these choices.
    pub fn object(&self, kind: &str, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id, "object": kind, "created": self.created, "model": self.model,
            "system_fingerprint": FINGERPRINT, "choices": choices,
        })
    }
}

/// The program that answers: what `seed` promises holds for one version of it.
pub const FINGERPRINT: &str = concat!("mlx-bun-", env!("CARGO_PKG_VERSION"));

/// A call as clients get it.
pub fn call_json(call: &ToolCall) -> Value {
    json!({
        "id": call.id.clone().unwrap_or_else(|| new_id("call_")),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments_json()},
    })
}

fn completion(head: &Head, wholes: &[Whole], usage: Usage) -> Value {
    let choices = wholes.iter().enumerate().map(|(index, whole)| {
        // Clients want the field, also where there is nothing to say.
        let content = Some(whole.content()).filter(|content| !content.is_empty());
        let mut message = json!({"role": "assistant", "content": content});
        let (reasoning, calls) = (whole.reasoning(), whole.calls().map(call_json).collect::<Vec<_>>());
        if !reasoning.is_empty() {
            message["reasoning"] = json!(reasoning);
            message["reasoning_content"] = json!(reasoning);
        }
        if !calls.is_empty() {
            message["tool_calls"] = json!(calls);
        }
        let logprobs = match whole.logprobs.is_empty() {
            true => Value::Null,
            false => logprobs_json(&whole.logprobs),
        };
        json!({"index": index, "message": message, "logprobs": logprobs, "finish_reason": whole.finish().name()})
    });
    let mut object = head.object("chat.completion", choices.collect());
    let lane = wholes.first().and_then(|whole| whole.outcome.as_ref()).and_then(|outcome| outcome.lane);
    object["usage"] = usage.openai(lane);
    object
}

const CHUNK: &str = "chat.completion.chunk";

/// Chat replies as events.
pub struct ChatEncoder {
    head: Head,
    usage: UsageChunks,
    /// Calls so far, by reply.
    calls: Vec<usize>,
}

impl ChatEncoder {
    /// For one request.
    pub fn new(head: Head, form: &Form) -> Self {
        Self { head, usage: UsageChunks::new(form.include_usage), calls: vec![0; form.count] }
    }

    fn chunk(&self, index: usize, delta: Value, finish: Value, logprobs: Option<Value>) -> Value {
        let choice = json!({
            "index": index, "delta": delta, "logprobs": logprobs.unwrap_or_default(), "finish_reason": finish,
        });
        let mut chunk = self.head.object(CHUNK, vec![choice]);
        if self.usage.is_apart() {
            chunk["usage"] = Value::Null;
        }
        chunk
    }
}

impl Encoder for ChatEncoder {
    fn begin(&mut self, replies: &Replies) -> String {
        let first =
            |index| data(&self.chunk(index, json!({"role": "assistant", "content": ""}), Value::Null, None));
        (0..replies.count()).map(first).collect()
    }

    fn piece(&mut self, index: usize, piece: Piece) -> String {
        let mut logprobs = piece.logprobs.as_ref().map(|token| logprobs_json([token]));
        let mut events = String::new();
        for event in &piece.events {
            let delta = match event {
                ReplyEvent::Reasoning(text) => json!({"reasoning": text, "reasoning_content": text}),
                ReplyEvent::Content(text) => json!({"content": text}),
                ReplyEvent::ToolCall(call) => {
                    let mut json = call_json(call);
                    if let Some(calls) = self.calls.get_mut(index) {
                        json["index"] = json!(*calls);
                        *calls += 1;
                    }
                    json!({"tool_calls": [json]})
                }
            };
            events.push_str(&data(&self.chunk(index, delta, Value::Null, logprobs.take())));
        }
        // A token whose text is held back.
        if logprobs.is_some() {
            events.push_str(&data(&self.chunk(index, json!({}), Value::Null, logprobs)));
        }
        events
    }

    fn done(&mut self, index: usize, outcome: &Outcome) -> String {
        let chunk = self.chunk(index, json!({}), json!(outcome.finish.name()), None);
        self.usage.close(chunk, outcome)
    }

    fn end(&mut self) -> String {
        self.usage.end(|| self.head.object(CHUNK, Vec::new()))
    }

    fn failed(&mut self, error: &ApiError) -> String {
        data(&error.body(Dialect::OpenAi))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::request::ToolChoice;

    fn parse(body: Value) -> Result<(Request, Form), ApiError> {
        read(body.as_object().unwrap())
    }

    #[test]
    fn a_request_becomes_one_request() {
        let (request, form) = parse(json!({
            "model": "x", "messages": [{"role": "user", "content": "hi"}], "stream": true, "stream_options": {},
            "max_completion_tokens": 5, "stop": ["a"], "n": 2, "logprobs": true, "top_logprobs": 3, "adapter": "none",
            "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required",
            "parallel_tool_calls": false, "chat_template_kwargs": {"enable_thinking": true}, "store": false,
        }))
        .unwrap();
        assert_eq!(form, Form { stream: true, include_usage: false, count: 2 });
        let settings = &request.settings;
        assert_eq!(
            (settings.max_tokens, settings.logprobs, settings.thinking),
            (Some(Some(5)), Some(3), Some(true))
        );
        let Prompt::Chat(chat) = &request.prompt else { panic!("a conversation") };
        assert_eq!((&chat.tool_choice, chat.parallel_tool_calls), (&ToolChoice::Required, false));
        assert_eq!(request.adapters, Some(vec![]));
    }

    #[test]
    fn wrong_requests_are_told_why() {
        let message = |field: &str, value: Value| {
            let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
            body[field] = value;
            parse(body).unwrap_err().message
        };
        assert_eq!(parse(json!({})).unwrap_err().message, "`messages` is missing");
        assert_eq!(message("n", json!(0)), "`n` must be in [1, 16]");
        assert_eq!(message("top_logprobs", json!(21)), "`top_logprobs` must be in [-1, 20]");
        assert_eq!(message("logprobs", json!(1)), "`logprobs` must be true or false");
        assert_eq!(message("stream_options", json!(true)), "`stream_options` must be an object");
        assert_eq!(message("model", json!(3)), "`model` must be a text");
        // What would be ignored with 200 elsewhere.
        assert_eq!(message("functions", json!([{"name": "a"}])), "`functions` is not supported; use `tools`");
        assert_eq!(
            message("function_call", json!("auto")),
            "`function_call` is not supported; use `tool_choice`"
        );
        assert_eq!(message("best_of", json!(5)), "`best_of` must equal `n`: replies are not ranked");
        assert!(message("modalities", json!(["text", "audio"])).contains("`text` only"));
        assert!(message("hlg", json!({"wdith": 1})).contains("`hlg.wdith` is not known"));
        let plain =
            json!({"messages": [{"role": "user", "content": "x"}], "modalities": ["text"], "best_of": 1});
        assert!(parse(plain).is_ok());
    }

    #[test]
    fn a4_content_is_present_and_null_beside_calls() {
        let call = ToolCall { name: "f".to_owned(), arguments: Map::new(), id: None };
        let whole = Whole { blocks: vec![ReplyEvent::ToolCall(call)], ..Whole::default() };
        let head = Head { id: "i".to_owned(), created: 1, model: "m".to_owned() };
        let message = &completion(&head, &[whole], Usage::default())["choices"][0]["message"];
        assert_eq!(message.get("content"), Some(&Value::Null));
        assert_eq!(message["tool_calls"][0]["function"]["arguments"], "{}");
    }
}
