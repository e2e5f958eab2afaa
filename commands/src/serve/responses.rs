//! `/v1/responses`: OpenAI's newer protocol, whose replies are lists of items that later requests may refer to.

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::Request as HttpRequest;
use axum::response::Response;
use mlx_bun::structured::ReplyEvent;
use mlx_bun::structured::tools::ToolCall;
use serde_json::{Map, Value, json};

use super::app::{App, new_id, now};
use super::error::ApiError;
use super::log::RequestLog;
use super::reply::{Finish, Outcome, Piece, Replies, Usage, json_response};
use super::response_store::Stored;
use super::responses_request::{self as request, ResponsesRequest};
use super::stream::{self, Encoder, respond};

fn unknown(id: &str) -> ApiError {
    let error = ApiError::not_found(format!("previous_response_id '{id}' not found or expired"));
    ApiError { param: Some("previous_response_id".to_owned()), ..error }.code("previous_response_not_found")
}

/// Answers a request.
pub async fn handle(
    State(app): State<Arc<App>>,
    Extension(log): Extension<Arc<RequestLog>>,
    request: HttpRequest<Body>,
) -> Result<Response, ApiError> {
    let body = app.bodies.read_object(request).await?;
    let stored = match request::previous(&body)? {
        Some(id) => Some(app.responses.get(id).ok_or_else(|| unknown(id))?),
        None => None,
    };
    let ResponsesRequest { request, stream, store, items, instructions, echo } =
        request::read(&body, stored.as_deref())?;
    let room = body.into_room();
    let started = app.start(request, 1).await?;
    drop(room);
    let record = Record {
        id: new_id("resp_"),
        created: now(),
        model: app.served.id.clone(),
        echo,
        instructions,
        store: store.then(|| (Arc::clone(&app), items)),
    };
    if stream {
        return Ok(respond(started, ResponsesEncoder::new(record), log));
    }
    let warning = started.warning;
    let whole = started.replies.collect().await?.pop().unwrap_or_default();
    log.finished(whole.usage());
    // The items of the stream, of which the last event has them all.
    let mut encoder = ResponsesEncoder::new(record);
    let outcome = whole.outcome.ok_or_else(ApiError::unavailable)?;
    encoder.piece(0, Piece { events: whole.blocks, logprobs: None });
    encoder.done(0, &outcome);
    let response = encoder.last.unwrap_or_default();
    let mut response = json_response(&response);
    stream::warn(response.headers_mut(), warning.as_deref());
    Ok(response)
}

/// A stored reply.
pub async fn get(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, ApiError> {
    let stored = app.responses.get(&id).ok_or_else(|| not_stored(&id))?;
    Ok(json_response(&stored.response))
}

/// Forgets a stored reply.
pub async fn delete(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, ApiError> {
    match app.responses.remove(&id) {
        true => Ok(json_response(&json!({"id": id, "object": "response", "deleted": true}))),
        false => Err(not_stored(&id)),
    }
}

fn not_stored(id: &str) -> ApiError {
    ApiError::not_found(format!("response '{id}' not found or expired"))
}

fn call_id(call: &ToolCall) -> String {
    call.id.clone().unwrap_or_else(|| new_id("call_"))
}

/// An item of reasoning; `None` for one that has just begun.
fn reasoning_item(id: &str, text: Option<&str>) -> Value {
    let summary: Vec<Value> =
        text.map(|text| json!({"type": "summary_text", "text": text})).into_iter().collect();
    json!({"type": "reasoning", "id": id, "summary": summary})
}

fn text_part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": []})
}

/// A message, which is `in_progress` without a text, `completed` or `incomplete`.
fn message_item(id: &str, status: &str, text: Option<&str>) -> Value {
    let content: Vec<Value> = text.map(text_part).into_iter().collect();
    json!({"type": "message", "id": id, "status": status, "role": "assistant", "content": content})
}

/// A call, begun or whole.
fn call_item(id: &str, call_id: &str, call: &ToolCall, whole: bool) -> Value {
    let (status, arguments) = match whole {
        true => ("completed", call.arguments_json()),
        false => ("in_progress", String::new()),
    };
    json!({
        "type": "function_call", "id": id, "call_id": call_id, "name": call.name, "arguments": arguments,
        "status": status,
    })
}

fn usage_json(usage: &Usage) -> Value {
    json!({
        "input_tokens": usage.prompt,
        "output_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
    })
}

/// Of a reply, and of the message that was its last.
fn status(finish: Finish) -> &'static str {
    if finish == Finish::Length { "incomplete" } else { "completed" }
}

/// What is known of a reply from its beginning.
struct Record {
    id: String,
    created: u64,
    model: String,
    echo: Map<String, Value>,
    instructions: Option<String>,
    /// Where it is kept, with the items before it.
    store: Option<(Arc<App>, Vec<Value>)>,
}

impl Record {
    fn object(&self, status: &str, output: &[Value], usage: Value) -> Value {
        let mut object = json!({
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "error": null,
            "incomplete_details": null, "instructions": self.instructions, "model": self.model, "output": output,
            "store": self.store.is_some(), "usage": usage,
        });
        if let Some(object) = object.as_object_mut() {
            object.extend(self.echo.clone());
        }
        object
    }

    /// The whole reply, which is kept if it may be referred to.
    fn finish(&self, output: Vec<Value>, finish: Finish, usage: &Usage) -> Value {
        let mut response = self.object(status(finish), &output, usage_json(usage));
        if finish == Finish::Length {
            response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        if let Some((app, items)) = &self.store {
            let kept = output.into_iter().filter(|item| item["type"] != "reasoning");
            let stored = Stored {
                response: response.clone(),
                items: items.iter().cloned().chain(kept).collect(),
                instructions: self.instructions.clone(),
            };
            app.responses.put(&self.id, stored);
        }
        response
    }
}

/// What kind of item is open, its id and its text so far.
enum Open {
    Reasoning(String, String),
    Message(String, String),
}

/// A reply as events.
struct ResponsesEncoder {
    record: Record,
    open: Option<Open>,
    output: Vec<Value>,
    sequence: u64,
    last: Option<Value>,
}

impl ResponsesEncoder {
    fn new(record: Record) -> Self {
        Self { record, open: None, output: Vec::new(), sequence: 0, last: None }
    }

    fn push(&mut self, events: &mut String, kind: &str, fields: Value) {
        let mut value = json!({"type": kind, "sequence_number": self.sequence});
        if let (Some(value), Value::Object(fields)) = (value.as_object_mut(), fields) {
            value.extend(fields);
        }
        self.sequence += 1;
        stream::push_event(events, kind, &value);
    }

    /// The place of the item in progress.
    fn index(&self) -> usize {
        self.output.len()
    }

    fn added(&mut self, events: &mut String, item: &Value) {
        let index = self.index();
        self.push(events, "response.output_item.added", json!({"output_index": index, "item": item}));
    }

    /// Closes what is open; `status` is that of a message.
    fn close(&mut self, events: &mut String, status: &str) {
        let index = self.index();
        let item = match self.open.take() {
            None => return,
            Some(Open::Reasoning(id, text)) => {
                let at = json!({"item_id": id, "output_index": index, "summary_index": 0});
                let part = json!({"type": "summary_text", "text": text});
                self.push(events, "response.reasoning_summary_text.done", with(&at, "text", json!(text)));
                self.push(events, "response.reasoning_summary_part.done", with(&at, "part", part));
                reasoning_item(&id, Some(&text))
            }
            Some(Open::Message(id, text)) => {
                let at = json!({"item_id": id, "output_index": index, "content_index": 0});
                let done = with(&with(&at, "text", json!(text)), "logprobs", json!([]));
                self.push(events, "response.output_text.done", done);
                self.push(events, "response.content_part.done", with(&at, "part", text_part(&text)));
                message_item(&id, status, Some(&text))
            }
        };
        self.push(events, "response.output_item.done", json!({"output_index": index, "item": item}));
        self.output.push(item);
    }

    fn reasoning(&mut self, events: &mut String, text: &str) {
        if !matches!(self.open, Some(Open::Reasoning(..))) {
            self.close(events, "completed");
            let id = new_id("rs_");
            self.added(events, &reasoning_item(&id, None));
            let part = json!({
                "item_id": id, "output_index": self.index(), "summary_index": 0,
                "part": {"type": "summary_text", "text": ""},
            });
            self.push(events, "response.reasoning_summary_part.added", part);
            self.open = Some(Open::Reasoning(id, String::new()));
        }
        if let Some(Open::Reasoning(id, whole)) = &mut self.open {
            whole.push_str(text);
            let id = id.clone();
            let index = self.index();
            let delta = json!({"item_id": id, "output_index": index, "summary_index": 0, "delta": text});
            self.push(events, "response.reasoning_summary_text.delta", delta);
        }
    }

    fn message(&mut self, events: &mut String) {
        if !matches!(self.open, Some(Open::Message(..))) {
            self.close(events, "completed");
            let id = new_id("msg_");
            self.added(events, &message_item(&id, "in_progress", None));
            let part = json!({"item_id": id, "output_index": self.index(), "content_index": 0, "part": text_part("")});
            self.push(events, "response.content_part.added", part);
            self.open = Some(Open::Message(id, String::new()));
        }
    }

    fn content(&mut self, events: &mut String, text: &str) {
        self.message(events);
        if let Some(Open::Message(id, whole)) = &mut self.open {
            whole.push_str(text);
            let id = id.clone();
            let index = self.index();
            let delta = json!({"item_id": id, "output_index": index, "content_index": 0, "delta": text, "logprobs": []});
            self.push(events, "response.output_text.delta", delta);
        }
    }

    fn call(&mut self, events: &mut String, call: &ToolCall) {
        self.close(events, "completed");
        let (id, call_id) = (new_id("fc_"), call_id(call));
        self.added(events, &call_item(&id, &call_id, call, false));
        let index = self.index();
        let arguments = call.arguments_json();
        let at = json!({"item_id": id, "output_index": index});
        self.push(events, "response.function_call_arguments.delta", with(&at, "delta", json!(arguments)));
        let done = with(&with(&at, "name", json!(call.name)), "arguments", json!(arguments));
        self.push(events, "response.function_call_arguments.done", done);
        let item = call_item(&id, &call_id, call, true);
        self.push(events, "response.output_item.done", json!({"output_index": index, "item": item}));
        self.output.push(item);
    }
}

fn with(object: &Value, name: &str, value: Value) -> Value {
    let mut object = object.clone();
    object[name] = value;
    object
}

impl Encoder for ResponsesEncoder {
    fn begin(&mut self, _replies: &Replies) -> String {
        let mut events = String::new();
        let response = self.record.object("in_progress", &[], Value::Null);
        self.push(&mut events, "response.created", json!({"response": response}));
        self.push(&mut events, "response.in_progress", json!({"response": response}));
        events
    }

    fn piece(&mut self, _index: usize, piece: Piece) -> String {
        let mut events = String::new();
        for event in &piece.events {
            match event {
                ReplyEvent::Reasoning(text) => self.reasoning(&mut events, text),
                ReplyEvent::Content(text) => self.content(&mut events, text),
                ReplyEvent::ToolCall(call) => self.call(&mut events, call),
            }
        }
        events
    }

    fn done(&mut self, _index: usize, outcome: &Outcome) -> String {
        let mut events = String::new();
        let has_answer = self.output.iter().any(|item| item["type"] != "reasoning");
        if !has_answer {
            self.message(&mut events);
        }
        // What the limit cut off is the message that is open.
        self.close(&mut events, status(outcome.finish));
        let output = std::mem::take(&mut self.output);
        self.last = Some(self.record.finish(output, outcome.finish, &outcome.usage));
        events
    }

    fn end(&mut self) -> String {
        let mut events = String::new();
        let response = self.last.take().unwrap_or_default();
        let kind =
            if response["status"] == "incomplete" { "response.incomplete" } else { "response.completed" };
        self.push(&mut events, kind, json!({"response": response}));
        events
    }

    fn failed(&mut self, error: &ApiError) -> String {
        let mut events = String::new();
        let fields = json!({"code": error.code.unwrap_or("server_error"), "message": error.message, "param": error.param});
        self.push(&mut events, "error", fields);
        events
    }
}

#[cfg(test)]
mod tests {
    use mlx_bun::generate::stream::FinishReason;

    use super::super::reply::tests::{CALL, encoded};
    use super::*;

    fn record() -> Record {
        Record {
            id: "resp_1".to_owned(),
            created: 1,
            model: "m".to_owned(),
            echo: Map::new(),
            instructions: None,
            store: None,
        }
    }

    #[test]
    fn events_come_in_order() {
        let mut encoder = ResponsesEncoder::new(record());
        let call = ToolCall { name: "f".to_owned(), arguments: Map::new(), id: None };
        let events = vec![
            ReplyEvent::Reasoning("a".to_owned()),
            ReplyEvent::Content("b".to_owned()),
            ReplyEvent::ToolCall(call),
        ];
        let usage = Usage { prompt: 3, cached: 1, completion: 4, reasoning: 1 };
        let outcome = Outcome { finish: Finish::Length, stop: None, usage, lane: None };
        let text =
            encoder.piece(0, Piece { events, logprobs: None }) + &encoder.done(0, &outcome) + &encoder.end();
        let values: Vec<Value> = text
            .lines()
            .filter_map(|line| line.strip_prefix("data: "))
            .map(|data| serde_json::from_str(data).unwrap())
            .collect();
        let kinds: Vec<_> =
            values.iter().map(|value| value["type"].as_str().unwrap().replace("response.", "")).collect();
        assert_eq!(
            kinds,
            [
                "output_item.added",
                "reasoning_summary_part.added",
                "reasoning_summary_text.delta",
                "reasoning_summary_text.done",
                "reasoning_summary_part.done",
                "output_item.done",
                "output_item.added",
                "content_part.added",
                "output_text.delta",
                "output_text.done",
                "content_part.done",
                "output_item.done",
                "output_item.added",
                "function_call_arguments.delta",
                "function_call_arguments.done",
                "output_item.done",
                "incomplete",
            ]
        );
        let numbers: Vec<_> = values.iter().map(|value| value["sequence_number"].as_u64().unwrap()).collect();
        assert_eq!(numbers, (0..17).collect::<Vec<_>>());
        let response = &values[16]["response"];
        assert_eq!(
            (&response["status"], response["output"].as_array().unwrap().len()),
            (&json!("incomplete"), 3)
        );
        assert_eq!(response["usage"]["total_tokens"], 7);
    }

    #[test]
    fn a_message_that_the_limit_cuts_is_incomplete() {
        for (finish, expected) in [(Finish::Length, "incomplete"), (Finish::Stop, "completed")] {
            let mut encoder = ResponsesEncoder::new(record());
            let events = vec![ReplyEvent::Content("b".to_owned())];
            encoder.piece(0, Piece { events, logprobs: None });
            let outcome = Outcome { finish, stop: None, usage: Usage::default(), lane: None };
            let done = encoder.done(0, &outcome);
            let last = encoder.end();
            assert!(done.contains(&format!("\"status\":\"{expected}\"")), "{done}");
            assert!(last.starts_with(&format!("event: response.{expected}\n")), "{last}");
            let data: Value =
                serde_json::from_str(last.lines().nth(1).unwrap().strip_prefix("data: ").unwrap()).unwrap();
            assert_eq!(
                (&data["type"], &data["response"]["status"]),
                (&json!(format!("response.{expected}")), &json!(expected))
            );
            assert_eq!(data["response"]["output"][0]["status"], expected);
        }
    }

    #[test]
    fn items_come_in_the_order_of_generation_however_the_reply_is_cut() {
        let text = format!("Look: {CALL} and {CALL} so.");
        for cut in 1..text.len() {
            let pieces = [&text[..cut], &text[cut..]];
            let events = encoded(&pieces, FinishReason::Stop, &mut ResponsesEncoder::new(record()));
            let last = events.lines().filter_map(|line| line.strip_prefix("data: ")).next_back().unwrap();
            let last: Value = serde_json::from_str(last).unwrap();
            let items = last["response"]["output"].as_array().unwrap();
            let kinds: Vec<_> = items.iter().map(|item| item["type"].as_str().unwrap()).collect();
            assert_eq!(kinds, ["message", "function_call", "message", "function_call", "message"], "{cut}");
        }
    }
}
