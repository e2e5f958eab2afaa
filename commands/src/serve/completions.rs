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
use crate::engine::{Candidate, TokenLogprobs};

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
    let settings = Settings {
        stop: request::stops(&fields, "stop", MOST_STOPS)?,
        max_tokens: request::max_tokens(&fields, &["max_completion_tokens", "max_tokens"])?,
        logprobs: logprobs(&fields)?,
        ..Settings::read(&fields)?.with_logit_bias(&fields)?
    };
    let constraint = constraint::read(&fields)?;
    let enforced = constraint::is_enforced(&fields)?;
    let adapters = request::adapters(&fields)?;
    Ok((Request { prompt: Prompt::Text(prompt), settings, constraint, enforced, adapters }, form))
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
    let body = app.bodies.read_object(request).await?;
    let (request, form) = read(&body)?;
    let room = body.into_room();
    let started = app.start(request, form.count).await?;
    drop(room);
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
    json!({"index": index, "text": whole.content(), "logprobs": logprobs, "finish_reason": whole.finish().name()})
}

/// The parallel lists of this protocol; `offset` is where the tokens begin in the text, in characters.
fn logprobs_json(tokens: &[TokenLogprobs], offset: &mut usize) -> Value {
    let offsets: Vec<usize> = tokens.iter().map(|token| text_offset(&token.chosen.bytes, offset)).collect();
    json!({
        "tokens": tokens.iter().map(|token| name(&token.chosen)).collect::<Vec<_>>(),
        "token_logprobs": tokens.iter().map(|token| token.chosen.logprob).collect::<Vec<_>>(),
        "top_logprobs": tokens.iter().map(top_logprobs).collect::<Vec<_>>(),
        "text_offset": offsets,
    })
}

/// Where a token begins: inside of a character, where that character does.
fn text_offset(bytes: &[u8], offset: &mut usize) -> usize {
    let continues = |byte: &u8| byte & 0xc0 == 0x80;
    let start = *offset;
    *offset += bytes.iter().filter(|byte| !continues(byte)).count();
    start - usize::from(start > 0 && bytes.first().is_some_and(continues))
}

/// A token's text, or the bytes of one that is no text, as OpenAI writes them: `bytes:\xe2\x80`.
fn name(candidate: &Candidate) -> String {
    match std::str::from_utf8(&candidate.bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => spelled(&candidate.bytes),
    }
}

fn spelled(bytes: &[u8]) -> String {
    bytes.iter().fold("bytes:".to_owned(), |name, byte| name + &format!("\\x{byte:02x}"))
}

/// The likeliest tokens and, as at OpenAI, the chosen one. Names are keys here: tokens of the same text go by their
/// bytes, or by their ids.
fn top_logprobs(token: &TokenLogprobs) -> Value {
    let mut names = Map::new();
    let among = token.top_logprobs.iter().any(|candidate| candidate.id == token.chosen.id);
    for candidate in std::iter::once(&token.chosen).filter(|_| !among).chain(&token.top_logprobs) {
        let id = || format!("token_id:{}", candidate.id);
        let name =
            [name(candidate), spelled(&candidate.bytes)].into_iter().find(|name| !names.contains_key(name));
        names.insert(name.unwrap_or_else(id), json!(candidate.logprob));
    }
    Value::Object(names)
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

    #[test]
    fn tokens_that_are_no_text_keep_their_places() {
        let candidate = |id: u32, bytes: &[u8]| Candidate {
            id,
            token: String::from_utf8_lossy(bytes).into_owned(),
            bytes: bytes.to_vec(),
            logprob: -(id as f32),
        };
        // The beginnings of three characters, which as text are all U+FFFD, and two tokens of one text.
        let top = [b"\xe2\x80".as_slice(), b"\xe2", b"\xf0\x9f", b"a", b"a", b"a"];
        let top: Vec<_> = top.iter().zip(0..).map(|(bytes, id)| candidate(id, bytes)).collect();
        let tokens = [
            TokenLogprobs { chosen: candidate(9, b"h\xc3"), top_logprobs: top },
            TokenLogprobs { chosen: candidate(1, b"\xa9"), top_logprobs: Vec::new() },
            TokenLogprobs { chosen: candidate(2, b"!"), top_logprobs: Vec::new() },
        ];
        let mut offset = 0;
        let json = logprobs_json(&tokens, &mut offset);
        assert_eq!(json["tokens"], json!(["bytes:\\x68\\xc3", "bytes:\\xa9", "!"]));
        let expected = json!({
            "bytes:\\x68\\xc3": -9.0, "bytes:\\xe2\\x80": -0.0, "bytes:\\xe2": -1.0, "bytes:\\xf0\\x9f": -2.0,
            "a": -3.0, "bytes:\\x61": -4.0, "token_id:5": -5.0,
        });
        assert_eq!(json["top_logprobs"][0], expected);
        assert_eq!((&json["text_offset"], offset), (&json!([0, 1, 2]), 3));
    }
}
