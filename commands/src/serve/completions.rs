//! `/v1/completions`: text that goes on from text.

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::Request as HttpRequest;
use axum::response::Response;
use mlx_bun::structured::ReplyEvent;
use serde_json::{Map, Value, json};

use super::app::{App, new_id, now};
use super::body::read_object;
use super::chat::{Form, Head};
use super::constraint;
use super::error::{ApiError, Dialect};
use super::fields::Fields;
use super::log::RequestLog;
use super::reply::{Outcome, Piece, Replies, Usage, Whole, json_response};
use super::request::{self, MOST_STOPS, Prompt, Request, Settings};
use super::stream::{self, Encoder, data, respond};
use super::usage_chunks::UsageChunks;
use crate::args::range;
use crate::engine::TokenLogprobs;

const OBJECT: &str = "text_completion";

/// Reads a completion request.
///
/// # Errors
/// A field is wrong.
pub fn read(body: &Map<String, Value>) -> Result<(Request, Form), ApiError> {
    let fields = Fields::new(body);
    let form = Form::read(&fields)?;
    let prompt = match fields.get("prompt") {
        Some(Value::String(prompt)) if !prompt.is_empty() => prompt.clone(),
        _ => {
            return Err(ApiError {
                param: Some("prompt".to_owned()),
                ..ApiError::invalid(
                    "prompt (a non-empty string) is required (token-array prompts are not accepted, matching \
                     mlx_lm.server)",
                )
            });
        }
    };
    if fields.boolean("echo")? == Some(true) {
        return Err(fields.wrong("echo", "is not supported; put the prompt before the text yourself"));
    }
    if fields.text("suffix")?.is_some_and(|suffix| !suffix.is_empty()) {
        return Err(fields.wrong("suffix", "is not supported"));
    }
    if fields.number("best_of", range::CHOICES)?.is_some_and(|best| best != form.count) {
        return Err(fields.wrong("best_of", "must equal `n`: replies are not ranked"));
    }
    let settings = Settings {
        stop: request::stops(&fields, "stop", MOST_STOPS)?,
        max_tokens: request::max_tokens(&fields, &["max_completion_tokens", "max_tokens"])?,
        logprobs: logprobs(&fields)?,
        ..Settings::read(&fields)?.with_logit_bias(&fields)?
    };
    let constraint = constraint::read(&fields)?;
    let adapters = request::adapters(&fields)?;
    Ok((Request { prompt: Prompt::Text(prompt), settings, constraint, adapters }, form))
}

/// OpenAI's number of alternatives, or mlx-lm's switch.
fn logprobs(fields: &Fields) -> Result<Option<usize>, ApiError> {
    let top =
        fields.number("top_logprobs", range::WIRE_TOP_LOGPROBS)?.and_then(|top| usize::try_from(top).ok());
    match fields.get("logprobs") {
        None => Ok(top.filter(|top| *top > 0)),
        Some(Value::Bool(on)) => Ok(on.then_some(top.unwrap_or(0))),
        Some(_) => {
            let asked = fields.number("logprobs", range::WIRE_TOP_LOGPROBS)?;
            Ok(asked.and_then(|top| usize::try_from(top).ok()))
        }
    }
}

/// Answers a completion request.
pub async fn handle(
    State(app): State<Arc<App>>,
    Extension(log): Extension<Arc<RequestLog>>,
    request: HttpRequest<Body>,
) -> Result<Response, ApiError> {
    let body = read_object(request).await?;
    let (request, form) = read(&body)?;
    let started = app.start(request, form.count).await?;
    let head = Head { id: new_id("cmpl-"), created: now(), model: app.served.id.clone() };
    if form.stream {
        let offsets = vec![0; form.count];
        let encoder = CompletionEncoder { head, usage: UsageChunks::new(form.include_usage), offsets };
        return Ok(respond(started, encoder, log));
    }
    let warning = started.warning;
    let wholes = started.replies.collect().await?;
    let mut usage = Usage::default();
    wholes.iter().for_each(|whole| usage.add(&whole.usage()));
    log.finished(usage);
    let lane = wholes.first().and_then(|whole| whole.outcome.as_ref()).and_then(|outcome| outcome.lane);
    let mut object = head.object(OBJECT, wholes.iter().enumerate().map(choice).collect());
    object["usage"] = usage.openai(lane);
    let mut response = json_response(&object);
    stream::warn(response.headers_mut(), warning.as_deref());
    Ok(response)
}

fn choice((index, whole): (usize, &Whole)) -> Value {
    let logprobs = match whole.logprobs.as_slice() {
        [] => Value::Null,
        tokens => logprobs_json(tokens, &mut 0),
    };
    json!({"index": index, "text": whole.content, "logprobs": logprobs, "finish_reason": whole.finish().name()})
}

/// The parallel lists of this protocol; `offset` is where the tokens begin in the text, in characters.
fn logprobs_json(tokens: &[TokenLogprobs], offset: &mut usize) -> Value {
    let offsets: Vec<usize> = tokens
        .iter()
        .map(|token| {
            let start = *offset;
            *offset += token.chosen.token.chars().count();
            start
        })
        .collect();
    let top = |token: &TokenLogprobs| {
        let entry =
            |candidate: &crate::engine::Candidate| (candidate.token.clone(), json!(candidate.logprob));
        Value::Object(token.top_logprobs.iter().map(entry).collect())
    };
    json!({
        "tokens": tokens.iter().map(|token| token.chosen.token.as_str()).collect::<Vec<_>>(),
        "token_logprobs": tokens.iter().map(|token| token.chosen.logprob).collect::<Vec<_>>(),
        "top_logprobs": tokens.iter().map(top).collect::<Vec<_>>(),
        "text_offset": offsets,
    })
}

/// Completions as events.
struct CompletionEncoder {
    head: Head,
    usage: UsageChunks,
    /// Characters so far, by reply.
    offsets: Vec<usize>,
}

impl CompletionEncoder {
    fn chunk(&self, index: usize, text: &str, logprobs: Value, finish: Value) -> Value {
        let choice = json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish});
        self.head.object(OBJECT, vec![choice])
    }
}

impl Encoder for CompletionEncoder {
    fn begin(&mut self, _replies: &Replies) -> String {
        String::new()
    }

    fn piece(&mut self, index: usize, piece: Piece) -> String {
        let text: String = piece
            .events
            .iter()
            .filter_map(
                |event| if let ReplyEvent::Content(text) = event { Some(text.as_str()) } else { None },
            )
            .collect();
        let logprobs = match (&piece.logprobs, self.offsets.get_mut(index)) {
            (Some(token), Some(offset)) => logprobs_json(std::slice::from_ref(token), offset),
            _ => Value::Null,
        };
        match text.is_empty() && logprobs.is_null() {
            true => String::new(),
            false => data(&self.chunk(index, &text, logprobs, Value::Null)),
        }
    }

    fn done(&mut self, index: usize, outcome: &Outcome) -> String {
        let chunk = self.chunk(index, "", Value::Null, json!(outcome.finish.name()));
        self.usage.close(chunk, outcome)
    }

    fn end(&mut self) -> String {
        self.usage.end(|| self.head.object(OBJECT, Vec::new()))
    }

    fn failed(&mut self, error: &ApiError) -> String {
        data(&error.body(Dialect::OpenAi))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(body: Value) -> Result<(Request, Form), ApiError> {
        read(body.as_object().unwrap())
    }

    #[test]
    fn prompts_are_texts() {
        let (request, _) = parse(json!({"prompt": "a", "logprobs": 2})).unwrap();
        assert_eq!((request.prompt, request.settings.logprobs), (Prompt::Text("a".to_owned()), Some(2)));
        assert_eq!(parse(json!({"prompt": "a", "logprobs": true})).unwrap().0.settings.logprobs, Some(0));
        for wrong in [json!({}), json!({"prompt": ""}), json!({"prompt": [1, 2]}), json!({"prompt": ["a"]})] {
            assert!(parse(wrong).unwrap_err().message.starts_with("prompt (a non-empty string) is required"));
        }
        assert!(parse(json!({"prompt": "a", "echo": true})).is_err());
        assert!(parse(json!({"prompt": "a", "suffix": "b"})).is_err());
        assert!(parse(json!({"prompt": "a", "best_of": 2})).is_err());
    }
}
