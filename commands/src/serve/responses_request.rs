//! OpenAI's Responses as a conversation: items of input and of stored replies become messages.

use serde_json::{Map, Value, json};

use super::constraint;
use super::error::ApiError;
use super::fields::{Fields, object};
use super::request::{self, Chat, MOST_STOPS, Prompt, Request, Settings};
use super::response_store::Stored;
use super::tools;
use crate::args::range;
use crate::engine::{Message, message};

/// A request of this protocol.
#[derive(Clone, Debug, PartialEq)]
pub struct ResponsesRequest {
    /// What it comes down to.
    pub request: Request,
    /// Whether the reply is sent as events.
    pub stream: bool,
    /// Whether the reply may be referred to later.
    pub store: bool,
    /// All items before the reply.
    pub items: Vec<Value>,
    /// `instructions`, this request's or inherited.
    pub instructions: Option<String>,
    /// What comes back in the reply as it was sent.
    pub echo: Map<String, Value>,
}

/// Fields that a reply repeats, with what they are when absent.
fn echoed(fields: &Fields) -> Map<String, Value> {
    let or = |name: &str, absent: Value| (name.to_owned(), fields.get(name).cloned().unwrap_or(absent));
    Map::from_iter([
        or("max_output_tokens", Value::Null),
        or("parallel_tool_calls", json!(true)),
        or("previous_response_id", Value::Null),
        or("reasoning", Value::Null),
        or("temperature", Value::Null),
        or("text", json!({"format": {"type": "text"}})),
        or("tool_choice", json!("auto")),
        or("tools", json!([])),
        or("top_p", Value::Null),
        or("truncation", json!("disabled")),
        or("user", Value::Null),
        or("metadata", json!({})),
    ])
}

/// The reply that a request refers to.
///
/// # Errors
/// It is no text.
pub fn previous(body: &Map<String, Value>) -> Result<Option<&str>, ApiError> {
    Fields::new(body).text("previous_response_id")
}

/// Reads a request that continues `stored`, if it continues anything.
///
/// # Errors
/// A field is wrong.
pub fn read(body: &Map<String, Value>, stored: Option<&Stored>) -> Result<ResponsesRequest, ApiError> {
    let fields = Fields::new(body);
    fields.text("model")?;
    refuse_what_is_not_there(&fields)?;
    let input = input(&fields)?;
    let earlier = stored.map(|stored| stored.items.as_slice()).unwrap_or_default();
    let items: Vec<Value> = earlier.iter().cloned().chain(input).collect();
    let inherited = stored.and_then(|stored| stored.instructions.clone());
    let instructions = fields.text("instructions")?.map(str::to_owned).or(inherited);
    let tools = offered(&fields)?;
    let tool_choice = tools::choice(&fields, &tools)?;
    let (mut variables, mut thinking) = request::template_variables(&fields)?;
    if let Some(reasoning) = fields.object("reasoning")? {
        let reasoning = Fields::inside(reasoning, "reasoning");
        if let Some(effort) = reasoning.text("effort")? {
            request::check_effort(effort).map_err(|problem| reasoning.wrong("effort", problem))?;
            variables.entry("reasoning_effort").or_insert_with(|| Value::from(effort));
            thinking = thinking.or(Some(effort != "none"));
        }
    }
    let settings = Settings {
        stop: request::stops(&fields, "stop", MOST_STOPS)?,
        max_tokens: request::max_tokens(&fields, &["max_output_tokens", "max_tokens"])?,
        thinking,
        ..Settings::read(&fields)?.with_logit_bias(&fields)?
    };
    let format = match fields.object("text")? {
        Some(text) => constraint::response_format(&Fields::inside(text, "text"), "format")?,
        None => None,
    };
    let chat = Chat {
        messages: messages(&items, instructions.as_deref())?,
        tools,
        tool_choice,
        parallel_tool_calls: fields.boolean("parallel_tool_calls")?.unwrap_or(true),
        variables,
    };
    let adapters = request::adapters(&fields)?;
    let constraint = constraint::with(&fields, "text.format", format)?;
    let enforced = constraint::is_enforced(&fields)?;
    Ok(ResponsesRequest {
        request: Request { prompt: Prompt::Chat(chat), settings, constraint, enforced, adapters },
        stream: fields.boolean("stream")?.unwrap_or(false),
        store: fields.boolean("store")?.unwrap_or(true),
        items,
        instructions,
        echo: echoed(&fields),
    })
}

fn refuse_what_is_not_there(fields: &Fields) -> Result<(), ApiError> {
    if fields.boolean("background")? == Some(true) {
        return Err(fields.wrong("background", "is not supported; leave it out"));
    }
    if fields.text("truncation")?.is_some_and(|truncation| truncation != "disabled") {
        return Err(fields.wrong("truncation", "must be disabled: nothing is left out of a conversation"));
    }
    fields.refuse("conversation", "is not supported; use `previous_response_id`")?;
    fields.refuse("prompt", "is not supported; send the conversation as `input`")?;
    fields.number("top_logprobs", range::WIRE_TOP_LOGPROBS)?.filter(|top| *top > 0).map_or(Ok(()), |_| {
        Err(fields.wrong("top_logprobs", "is not supported here; /v1/chat/completions has log-probabilities"))
    })
}

fn input(fields: &Fields) -> Result<Vec<Value>, ApiError> {
    match fields.get("input") {
        Some(Value::String(text)) => Ok(vec![json!({"type": "message", "role": "user", "content": text})]),
        Some(Value::Array(items)) if !items.is_empty() => Ok(items.clone()),
        Some(Value::Array(_)) => Err(fields.wrong("input", "is empty")),
        Some(_) => Err(fields.wrong("input", "must be a text or a list of items")),
        None => Err(fields.wrong("input", "is missing")),
    }
}

/// Functions; tools that OpenAI's servers would run are dropped.
fn offered(fields: &Fields) -> Result<Vec<Value>, ApiError> {
    let list = fields.list("tools")?.map(Vec::as_slice).unwrap_or_default();
    let nested = |tool: &Value| {
        let mut function =
            tool.as_object().filter(|tool| tool.get("type").is_some_and(|kind| kind == "function"))?.clone();
        if function.contains_key("function") {
            return Some(Value::Object(function));
        }
        function.remove("type");
        Some(json!({"type": "function", "function": function}))
    };
    tools::checked(list.iter().filter_map(nested).collect())
}

fn messages(items: &[Value], instructions: Option<&str>) -> Result<Vec<Message>, ApiError> {
    let mut system: Vec<String> = instructions.map(str::to_owned).into_iter().collect();
    let mut messages: Vec<Message> = Vec::new();
    for (index, item) in items.iter().enumerate() {
        let at = format!("input[{index}]");
        let fields = Fields::inside(object(item, &at)?, &at);
        match fields.text("type")?.unwrap_or("message") {
            "message" => {
                let role = fields.text("role")?.ok_or_else(|| fields.wrong("role", "is missing"))?;
                let text = match fields.get("content") {
                    Some(Value::String(text)) => text.clone(),
                    Some(Value::Array(parts)) => request::text_of_parts(parts, &format!("{at}.content"))?,
                    None => String::new(),
                    Some(_) => return Err(fields.wrong("content", "must be a text or a list of parts")),
                };
                match role {
                    "system" | "developer" => system.push(text),
                    role => messages.push(message(role, text)),
                }
            }
            "function_call" => call(&fields, &mut messages)?,
            "function_call_output" => {
                let text = match fields.get("output") {
                    Some(Value::String(text)) => text.clone(),
                    Some(Value::Array(parts)) => request::text_of_parts(parts, &format!("{at}.output"))?,
                    _ => return Err(fields.wrong("output", "must be a text or a list of parts")),
                };
                let mut message = message("tool", text);
                message.insert("tool_call_id".to_owned(), json!(fields.text("call_id")?.unwrap_or_default()));
                messages.push(message);
            }
            // What was thought before is not fed again.
            "reasoning" => {}
            kind => return Err(fields.wrong("type", format!("is `{kind}`, which this server does not know"))),
        }
    }
    if !system.is_empty() {
        messages.insert(0, message("system", system.join("\n\n")));
    }
    match messages.iter().all(|message| message.get("role").is_some_and(|role| role == "system")) {
        true => Err(ApiError::field("input", "has no message to answer")),
        false => Ok(messages),
    }
}

/// A call joins the message of the assistant before it.
fn call(fields: &Fields, messages: &mut Vec<Message>) -> Result<(), ApiError> {
    let name = fields.text("name")?.ok_or_else(|| fields.wrong("name", "is missing"))?;
    let call = json!({
        "id": fields.text("call_id")?.unwrap_or_default(), "type": "function",
        "function": {"name": name, "arguments": fields.text("arguments")?.unwrap_or("{}")},
    });
    let spoke = messages.last().is_some_and(|last| last.get("role").is_some_and(|role| role == "assistant"));
    if !spoke {
        messages.push(message("assistant", ""));
    }
    if let Some(last) = messages.last_mut() {
        let calls = last.entry("tool_calls").or_insert_with(|| json!([]));
        calls.as_array_mut().into_iter().for_each(|calls| calls.push(call.clone()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(body: Value, stored: Option<&Stored>) -> Result<ResponsesRequest, ApiError> {
        read(body.as_object().unwrap(), stored)
    }

    fn conversation(request: &ResponsesRequest) -> Value {
        let Prompt::Chat(chat) = &request.request.prompt else { panic!("a conversation") };
        Value::Array(chat.messages.iter().cloned().map(Value::Object).collect())
    }

    #[test]
    fn items_become_messages() {
        let request = parse(
            json!({
                "instructions": "one", "tools": [{"type": "function", "name": "f", "parameters": {}}, {"type": "web_search"}],
                "tool_choice": {"type": "function", "name": "f"}, "reasoning": {"effort": "none"},
                "text": {"format": {"type": "json_object"}},
                "input": [
                    {"role": "developer", "content": "two"},
                    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                    {"type": "reasoning", "summary": []},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": "42"},
                ],
            }),
            None,
        )
        .unwrap();
        let expected = json!([
            {"role": "system", "content": "one\n\ntwo"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "content": "42", "tool_call_id": "c"},
        ]);
        assert_eq!(conversation(&request), expected);
        assert_eq!(request.request.settings.thinking, Some(false));
        assert!(request.request.constraint.is_some() && request.store && !request.stream);
    }

    #[test]
    fn a_stored_reply_is_continued() {
        let stored = Stored {
            response: Value::Null,
            items: vec![
                json!({"role": "user", "content": "a"}),
                json!({"type": "message", "role": "assistant", "content":
                [{"type": "output_text", "text": "b", "annotations": []}]}),
            ],
            instructions: Some("s".to_owned()),
        };
        let request = parse(json!({"input": "c", "previous_response_id": "r"}), Some(&stored)).unwrap();
        let texts: Vec<_> =
            conversation(&request).as_array().unwrap().iter().map(|m| m["content"].clone()).collect();
        assert_eq!(texts, ["s", "a", "b", "c"]);
        let request = parse(json!({"input": "c", "instructions": "t"}), Some(&stored)).unwrap();
        assert_eq!(conversation(&request)[0]["content"], "t");
    }

    #[test]
    fn wrong_requests_are_told_why() {
        let message = |body: Value| parse(body, None).unwrap_err().message;
        assert_eq!(message(json!({})), "`input` is missing");
        assert_eq!(message(json!({"input": []})), "`input` is empty");
        assert_eq!(
            message(json!({"input": [{"role": "system", "content": "x"}]})),
            "`input` has no message to answer"
        );
        assert!(
            message(json!({"input": [{"type": "item_reference", "id": "x"}]})).contains("`item_reference`")
        );
        assert!(message(json!({"input": "x", "background": true})).contains("`background`"));
        let twice = json!({"input": "x", "text": {"format": {"type": "json_object"}}, "guided_regex": "a"});
        assert!(message(twice).contains("`guided_regex` cannot be combined with `text.format`"));
        assert!(message(json!({"input": "x", "truncation": "auto"})).contains("`truncation`"));
    }
}
