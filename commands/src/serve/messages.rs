//! `/v1/messages`: Anthropic's protocol.

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::Request as HttpRequest;
use axum::response::{IntoResponse, Response};
use mlx_bun::structured::ReplyEvent;
use mlx_bun::structured::tools::ToolCall;
use serde_json::{Value, json};

use super::app::{App, new_id};
use super::error::{ApiError, Dialect};
use super::log::RequestLog;
use super::messages_request as request;
use super::reply::{Finish, Outcome, Piece, Replies, Usage, Whole, json_response};
use super::request::{Prompt, ToolChoice};
use super::stream::{self, Encoder, push_event, respond};

/// Answers a request.
pub async fn handle(
    State(app): State<Arc<App>>,
    Extension(log): Extension<Arc<RequestLog>>,
    request: HttpRequest<Body>,
) -> Response {
    answer(&app, log, request).await.unwrap_or_else(|error| error.response(Dialect::Anthropic))
}

async fn answer(
    app: &Arc<App>,
    log: Arc<RequestLog>,
    request: HttpRequest<Body>,
) -> Result<Response, ApiError> {
    let body = app.bodies.read_object(request).await?;
    let request::MessagesRequest { request, stream } = request::read(&body, false)?;
    let room = body.into_room();
    let started = app.start(request, 1).await?;
    drop(room);
    let encoder = MessagesEncoder::new(new_id("msg_"), app.served.id.clone());
    if stream {
        return Ok(respond(started, encoder, log));
    }
    let warning = started.warning;
    let whole = started.replies.collect().await?.pop().unwrap_or_default();
    log.finished(whole.usage());
    let mut response = json_response(&whole_message(&encoder.id, &encoder.model, &whole));
    stream::warn(response.headers_mut(), warning.as_deref());
    Ok(response)
}

/// Counts the tokens of a request's prompt.
pub async fn count_tokens(State(app): State<Arc<App>>, request: HttpRequest<Body>) -> Response {
    let count = async {
        let body = app.bodies.read_object(request).await?;
        let mut prompt = request::read(&body, true)?.request.prompt;
        if let Prompt::Chat(chat) = &mut prompt
            && chat.tool_choice == ToolChoice::None
        {
            chat.tools.clear();
        }
        let _room = body.into_room();
        app.off_thread_over(prompt.text_bytes(), move |app| app.prompt_tokens(&prompt)).await
    };
    match count.await {
        Ok(tokens) => json_response(&json!({"input_tokens": tokens.len()})).into_response(),
        Err(error) => error.response(Dialect::Anthropic),
    }
}

fn usage_json(usage: &Usage) -> Value {
    // What was cached is counted apart.
    json!({
        "input_tokens": usage.prompt.saturating_sub(usage.cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    })
}

/// Why it ended, and at which stop text.
fn stop_reason(outcome: &Outcome) -> (Value, Value) {
    match (outcome.finish, &outcome.stop) {
        (Finish::ToolCalls, _) => (json!("tool_use"), Value::Null),
        (Finish::Length, _) => (json!("max_tokens"), Value::Null),
        (Finish::Stop, Some(stop)) => (json!("stop_sequence"), json!(stop)),
        (Finish::Stop, None) => (json!("end_turn"), Value::Null),
    }
}

fn call_id(call: &ToolCall) -> String {
    call.id.clone().unwrap_or_else(|| new_id("toolu_"))
}

fn message(id: &str, model: &str, content: Vec<Value>, reason: (Value, Value), usage: Value) -> Value {
    json!({
        "id": id, "type": "message", "role": "assistant", "model": model, "content": content,
        "stop_reason": reason.0, "stop_sequence": reason.1, "usage": usage,
    })
}

fn whole_message(id: &str, model: &str, whole: &Whole) -> Value {
    let block = |block: &ReplyEvent| match block {
        ReplyEvent::Reasoning(text) => json!({"type": "thinking", "thinking": text, "signature": ""}),
        ReplyEvent::Content(text) => json!({"type": "text", "text": text}),
        ReplyEvent::ToolCall(call) => {
            json!({"type": "tool_use", "id": call_id(call), "name": call.name, "input": call.arguments})
        }
    };
    let mut content: Vec<Value> = whole.blocks.iter().map(block).collect();
    if content.is_empty() {
        content.push(json!({"type": "text", "text": ""}));
    }
    let reason = whole.outcome.as_ref().map_or((json!("end_turn"), Value::Null), stop_reason);
    message(id, model, content, reason, usage_json(&whole.usage()))
}

/// What kind of block is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Block {
    Thinking,
    Text,
}

/// A reply as events.
struct MessagesEncoder {
    id: String,
    model: String,
    open: Option<Block>,
    /// Blocks so far.
    blocks: usize,
}

impl MessagesEncoder {
    fn new(id: String, model: String) -> Self {
        Self { id, model, open: None, blocks: 0 }
    }

    fn start(&mut self, events: &mut String, block: &Value) {
        let value = json!({"type": "content_block_start", "index": self.blocks, "content_block": block});
        push_event(events, "content_block_start", &value);
    }

    fn delta(&self, events: &mut String, delta: &Value) {
        let value = json!({"type": "content_block_delta", "index": self.blocks, "delta": delta});
        push_event(events, "content_block_delta", &value);
    }

    fn stop(&mut self, events: &mut String) {
        push_event(
            events,
            "content_block_stop",
            &json!({"type": "content_block_stop", "index": self.blocks}),
        );
        self.blocks += 1;
    }

    /// Closes what is open, unless it is of this kind, and opens a block of it.
    fn switch(&mut self, events: &mut String, to: Option<Block>) {
        if self.open == to {
            return;
        }
        if let Some(open) = self.open.take() {
            if open == Block::Thinking {
                self.delta(events, &json!({"type": "signature_delta", "signature": ""}));
            }
            self.stop(events);
        }
        match to {
            Some(Block::Thinking) => {
                self.start(events, &json!({"type": "thinking", "thinking": "", "signature": ""}));
            }
            Some(Block::Text) => self.start(events, &json!({"type": "text", "text": ""})),
            None => {}
        }
        self.open = to;
    }
}

impl Encoder for MessagesEncoder {
    fn begin(&mut self, replies: &Replies) -> String {
        // Claude Code takes the size of the context from here.
        let usage = Usage { prompt: replies.prompt_tokens(), ..Usage::default() };
        let message =
            message(&self.id, &self.model, Vec::new(), (Value::Null, Value::Null), usage_json(&usage));
        let mut events = String::new();
        push_event(&mut events, "message_start", &json!({"type": "message_start", "message": message}));
        push_event(&mut events, "ping", &json!({"type": "ping"}));
        events
    }

    fn piece(&mut self, _index: usize, piece: Piece) -> String {
        let mut events = String::new();
        for event in piece.events {
            match event {
                ReplyEvent::Reasoning(text) => {
                    self.switch(&mut events, Some(Block::Thinking));
                    self.delta(&mut events, &json!({"type": "thinking_delta", "thinking": text}));
                }
                ReplyEvent::Content(text) => {
                    self.switch(&mut events, Some(Block::Text));
                    self.delta(&mut events, &json!({"type": "text_delta", "text": text}));
                }
                ReplyEvent::ToolCall(call) => {
                    self.switch(&mut events, None);
                    let block =
                        json!({"type": "tool_use", "id": call_id(&call), "name": call.name, "input": {}});
                    self.start(&mut events, &block);
                    let arguments = call.arguments_json();
                    self.delta(&mut events, &json!({"type": "input_json_delta", "partial_json": arguments}));
                    self.stop(&mut events);
                }
            }
        }
        events
    }

    fn done(&mut self, _index: usize, outcome: &Outcome) -> String {
        let mut events = String::new();
        if self.open.is_none() && self.blocks == 0 {
            self.switch(&mut events, Some(Block::Text));
        }
        self.switch(&mut events, None);
        let (reason, sequence) = stop_reason(outcome);
        let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
        let value = json!({"type": "message_delta", "delta": delta, "usage": usage_json(&outcome.usage)});
        push_event(&mut events, "message_delta", &value);
        events
    }

    fn end(&mut self) -> String {
        stream::event("message_stop", &json!({"type": "message_stop"}))
    }

    fn failed(&mut self, error: &ApiError) -> String {
        stream::event("error", &error.body(Dialect::Anthropic))
    }
}

#[cfg(test)]
mod tests {
    use mlx_bun::generate::stream::FinishReason;

    use super::super::reply::tests::{CALL, encoded, reply};
    use super::*;

    fn outcome(finish: Finish) -> Outcome {
        Outcome {
            finish,
            stop: None,
            usage: Usage { prompt: 9, cached: 4, completion: 2, reasoning: 0 },
            lane: None,
        }
    }

    /// What a client puts together from a stream.
    fn assembled(events: &str) -> Value {
        let mut content: Vec<Value> = Vec::new();
        let mut stop = Value::Null;
        for event in events.lines().filter_map(|line| line.strip_prefix("data: ")) {
            let event: Value = serde_json::from_str(event).unwrap();
            let delta = &event["delta"];
            match event["type"].as_str().unwrap() {
                "content_block_start" => content.push(event["content_block"].clone()),
                "content_block_delta" => {
                    let block = content.last_mut().unwrap();
                    for kind in ["text", "thinking"] {
                        if let Some(text) = delta[kind].as_str() {
                            block[kind] = json!(block[kind].as_str().unwrap().to_owned() + text);
                        }
                    }
                    if let Some(arguments) = delta["partial_json"].as_str() {
                        block["input"] = serde_json::from_str(arguments).unwrap();
                    }
                }
                "message_delta" => stop = delta["stop_reason"].clone(),
                _ => {}
            }
        }
        json!({"content": content, "stop_reason": stop})
    }

    #[test]
    fn a_whole_reply_has_the_blocks_of_its_stream_however_it_is_cut() {
        let text = format!("Look: {CALL} and {CALL} so.");
        let cuts = (1..text.len()).map(|cut| vec![&text[..cut], &text[cut..]]);
        let mut kinds = Vec::new();
        for pieces in
            cuts.chain([vec![text.as_str()], text.split_inclusive("").collect(), vec![""], vec![" "]])
        {
            let mut encoder = MessagesEncoder::new("i".to_owned(), "m".to_owned());
            let events = encoded(&pieces, FinishReason::Stop, &mut encoder);
            let whole = whole_message("i", "m", &reply(&pieces, FinishReason::Stop, true).unwrap());
            let without_ids = |mut message: Value| {
                let blocks = message["content"].as_array_mut().unwrap();
                blocks.iter_mut().for_each(|block| _ = block.as_object_mut().unwrap().remove("id"));
                json!([message["content"], message["stop_reason"]])
            };
            assert_eq!(without_ids(assembled(&events)), without_ids(whole.clone()), "{pieces:?}");
            if pieces.concat() == text {
                let blocks = whole["content"].as_array().unwrap();
                kinds.push(blocks.iter().map(|block| block["type"].clone()).collect::<Vec<_>>());
            }
        }
        assert!(
            kinds.iter().all(|kinds| *kinds == ["text", "tool_use", "text", "tool_use", "text"]),
            "{kinds:?}"
        );
    }

    fn names(events: &str) -> Vec<String> {
        let data = events.lines().filter_map(|line| line.strip_prefix("data: "));
        data.map(|data| {
            let value: Value = serde_json::from_str(data).unwrap();
            let inner = [&value["delta"]["type"], &value["content_block"]["type"]]
                .into_iter()
                .find_map(Value::as_str);
            format!("{} {} {}", value["type"].as_str().unwrap(), value["index"], inner.unwrap_or(""))
        })
        .collect()
    }

    #[test]
    fn blocks_open_and_close_in_order() {
        let mut encoder = MessagesEncoder::new("i".to_owned(), "m".to_owned());
        let call = ToolCall { name: "f".to_owned(), arguments: serde_json::Map::new(), id: None };
        let events = vec![
            ReplyEvent::Reasoning("a".to_owned()),
            ReplyEvent::Content("b".to_owned()),
            ReplyEvent::ToolCall(call),
        ];
        let events = encoder.piece(0, Piece { events, logprobs: None })
            + &encoder.done(0, &outcome(Finish::ToolCalls));
        assert_eq!(
            names(&events),
            [
                "content_block_start 0 thinking",
                "content_block_delta 0 thinking_delta",
                "content_block_delta 0 signature_delta",
                "content_block_stop 0 ",
                "content_block_start 1 text",
                "content_block_delta 1 text_delta",
                "content_block_stop 1 ",
                "content_block_start 2 tool_use",
                "content_block_delta 2 input_json_delta",
                "content_block_stop 2 ",
                "message_delta null ",
            ]
        );
    }

    #[test]
    fn an_empty_reply_is_an_empty_text() {
        let mut encoder = MessagesEncoder::new("i".to_owned(), "m".to_owned());
        let events = encoder.done(0, &outcome(Finish::Stop));
        assert_eq!(
            names(&events),
            ["content_block_start 0 text", "content_block_stop 0 ", "message_delta null "]
        );
        assert!(events.contains("\"input_tokens\":5"), "{events}");
        let whole =
            whole_message("i", "m", &Whole { outcome: Some(outcome(Finish::Length)), ..Whole::default() });
        assert_eq!((&whole["content"][0]["text"], &whole["stop_reason"]), (&json!(""), &json!("max_tokens")));
    }
}
