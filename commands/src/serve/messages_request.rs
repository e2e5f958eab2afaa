//! Anthropic's messages as a conversation in OpenAI's form.

use mlx_bun::structured::grammar::Constraint;
use serde_json::{Map, Value, json};

use super::constraint;
use super::error::ApiError;
use super::fields::{Fields, object};
use super::request::{self, Chat, MOST_STOP_SEQUENCES, Prompt, Request, Settings, ToolChoice};
use super::tools;
use crate::engine::{Message, message};

/// A request of this protocol.
#[derive(Clone, Debug, PartialEq)]
pub struct MessagesRequest {
    /// What it comes down to.
    pub request: Request,
    /// Whether the reply is sent as events.
    pub stream: bool,
}

/// Reads a request; `counting` one that is only counted, and has no limit.
///
/// # Errors
/// A field is wrong.
pub fn read(body: &Map<String, Value>, counting: bool) -> Result<MessagesRequest, ApiError> {
    let fields = Fields::new(body);
    fields.text("model")?;
    let max_tokens = request::max_tokens(&fields, &["max_tokens"])?;
    if max_tokens.is_none() && !counting {
        return Err(fields.wrong("max_tokens", "is missing"));
    }
    let (mut variables, thinking) = request::template_variables(&fields)?;
    let thinking = self::thinking(&fields)?.or(thinking);
    if let Some(effort) = effort(&fields)? {
        variables.entry("reasoning_effort").or_insert_with(|| Value::from(effort));
    }
    let tools = offered(&fields)?;
    let (tool_choice, parallel_tool_calls) = choice(&fields, &tools)?;
    let settings = Settings {
        stop: request::stops(&fields, "stop_sequences", MOST_STOP_SEQUENCES)?,
        max_tokens,
        thinking,
        ..Settings::read(&fields)?
    };
    let chat = Chat { messages: messages(&fields)?, tools, tool_choice, parallel_tool_calls, variables };
    let adapters = request::adapters(&fields)?;
    let constraint = output_format(&fields)?;
    let enforced = constraint::is_enforced(&fields)?;
    Ok(MessagesRequest {
        request: Request { prompt: Prompt::Chat(chat), settings, constraint, enforced, adapters },
        stream: fields.boolean("stream")?.unwrap_or(false),
    })
}

/// `output_config.format` or `output_format`: `{"type": "json_schema", "schema": ...}`; or a field of the other
/// protocols.
fn output_format(fields: &Fields) -> Result<Option<Constraint>, ApiError> {
    let config = fields.object("output_config")?.map(|config| Fields::inside(config, "output_config"));
    let nested = config.map(|config| constraint::response_format(&config, "format")).transpose()?.flatten();
    let flat = constraint::response_format(fields, "output_format")?;
    match (nested, flat) {
        (Some(_), Some(_)) => {
            Err(fields.wrong("output_format", "cannot be combined with `output_config.format`"))
        }
        (Some(nested), None) => constraint::with(fields, "output_config.format", Some(nested)),
        (None, flat) => constraint::with(fields, "output_format", flat),
    }
}

fn effort<'a>(fields: &Fields<'a>) -> Result<Option<&'a str>, ApiError> {
    let Some(config) = fields.object("output_config")? else { return Ok(None) };
    let config = Fields::inside(config, "output_config");
    let effort = config.text("effort")?;
    if let Some(effort) = effort {
        request::check_effort(effort).map_err(|problem| config.wrong("effort", problem))?;
    }
    Ok(effort)
}

/// `{"type": "enabled" | "disabled" | "adaptive"}`; the budget of tokens is the model's own affair.
fn thinking(fields: &Fields) -> Result<Option<bool>, ApiError> {
    let Some(thinking) = fields.object("thinking")? else { return Ok(None) };
    let thinking = Fields::inside(thinking, "thinking");
    match thinking.text("type")? {
        Some("enabled") => Ok(Some(true)),
        Some("disabled") => Ok(Some(false)),
        Some("adaptive") => Ok(None),
        _ => Err(thinking.wrong("type", "must be enabled, disabled or adaptive")),
    }
}

/// Tools that the client runs; those that Anthropic's servers would run are dropped.
fn offered(fields: &Fields) -> Result<Vec<Value>, ApiError> {
    let list = fields.list("tools")?.map(Vec::as_slice).unwrap_or_default();
    let function = |tool: &Value| {
        let (name, schema) = (tool.get("name")?, tool.get("input_schema")?);
        let mut function = json!({"name": name, "parameters": schema});
        if let Some(description) = tool.get("description").filter(|description| description.is_string()) {
            function["description"] = description.clone();
        }
        Some(json!({"type": "function", "function": function}))
    };
    tools::checked(list.iter().filter_map(function).collect())
}

fn choice(fields: &Fields, tools: &[Value]) -> Result<(ToolChoice, bool), ApiError> {
    let Some(choice) = fields.object("tool_choice")? else { return Ok((ToolChoice::Auto, true)) };
    let choice = Fields::inside(choice, "tool_choice");
    let parallel = !choice.boolean("disable_parallel_tool_use")?.unwrap_or(false);
    let chosen = match choice.text("type")? {
        Some("auto") => ToolChoice::Auto,
        Some("any") => ToolChoice::Required,
        Some("none") => ToolChoice::None,
        Some("tool") => {
            let name = choice.text("name")?.ok_or_else(|| choice.wrong("name", "is missing"))?;
            ToolChoice::Named(name.to_owned())
        }
        _ => return Err(choice.wrong("type", "must be auto, any, tool or none")),
    };
    tools::check_choice(&chosen, tools)?;
    Ok((chosen, parallel))
}

fn messages(fields: &Fields) -> Result<Vec<Message>, ApiError> {
    let list = fields.list("messages")?.map(Vec::as_slice).unwrap_or_default();
    if list.is_empty() {
        let error = ApiError::invalid("messages: at least one message is required");
        return Err(ApiError { param: Some("messages".to_owned()), ..error });
    }
    let mut messages = Vec::new();
    if let Some(system) = system(fields)? {
        messages.push(message("system", system));
    }
    for (index, value) in list.iter().enumerate() {
        let at = format!("messages[{index}]");
        let fields = Fields::inside(object(value, &at)?, &at);
        let role = fields.text("role")?.ok_or_else(|| fields.wrong("role", "is missing"))?;
        let blocks = match fields.get("content") {
            Some(Value::String(text)) => vec![json!({"type": "text", "text": text})],
            Some(Value::Array(blocks)) => blocks.clone(),
            None => Vec::new(),
            Some(_) => return Err(fields.wrong("content", "must be a text or a list of blocks")),
        };
        let at = format!("{at}.content");
        match role {
            "assistant" => messages.push(assistant(&blocks, &at)?),
            // Whoever else speaks in the middle of a conversation, models know two sides of it.
            _ => user(&blocks, &at, &mut messages)?,
        }
    }
    Ok(messages)
}

fn system(fields: &Fields) -> Result<Option<String>, ApiError> {
    let text = match fields.get("system") {
        None => return Ok(None),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(blocks)) => texts(blocks, "system")?.join("\n"),
        Some(_) => return Err(fields.wrong("system", "must be a text or a list of text blocks")),
    };
    Ok(Some(text).filter(|text| !text.is_empty()))
}

fn kind(block: &Value) -> &str {
    block.get("type").and_then(Value::as_str).unwrap_or_default()
}

/// The texts of blocks that have one.
fn texts(blocks: &[Value], at: &str) -> Result<Vec<String>, ApiError> {
    let mut texts = Vec::new();
    for (index, block) in blocks.iter().enumerate() {
        let kind = kind(block);
        if ["image", "audio", "video", "document"].iter().any(|medium| kind.contains(medium)) {
            return Err(request::no_media(kind, &format!("{at}[{index}]")));
        }
        texts.extend(block.get("text").and_then(Value::as_str).map(str::to_owned));
    }
    Ok(texts)
}

/// What was thought before is not fed again.
fn assistant(blocks: &[Value], at: &str) -> Result<Message, ApiError> {
    let spoken: Vec<Value> =
        blocks.iter().filter(|block| !kind(block).contains("thinking")).cloned().collect();
    let mut message = message("assistant", texts(&spoken, at)?.join("\n"));
    let mut calls = Vec::new();
    for (index, block) in blocks.iter().enumerate().filter(|(_, block)| kind(block) == "tool_use") {
        let at = format!("{at}[{index}]");
        let block = Fields::inside(object(block, &at)?, &at);
        let name = block.text("name")?.ok_or_else(|| block.wrong("name", "is missing"))?;
        let input = block.object("input")?.cloned().unwrap_or_default();
        calls.push(json!({
            "id": block.text("id")?.unwrap_or_default(), "type": "function",
            "function": {"name": name, "arguments": input},
        }));
    }
    if !calls.is_empty() {
        message.insert("tool_calls".to_owned(), Value::Array(calls));
    }
    Ok(message)
}

/// Results of tools are messages of their own, before what the user says.
fn user(blocks: &[Value], at: &str, messages: &mut Vec<Message>) -> Result<(), ApiError> {
    let (results, spoken): (Vec<_>, Vec<_>) =
        blocks.iter().cloned().partition(|block| kind(block) == "tool_result");
    for result in &results {
        let text = match result.get("content") {
            Some(Value::String(text)) => text.clone(),
            Some(Value::Array(blocks)) => texts(blocks, &format!("{at}.content"))?.join("\n"),
            None | Some(Value::Null) => String::new(),
            Some(_) => return Err(ApiError::field(at, "has a tool_result whose content is no text")),
        };
        let mut message = message("tool", text);
        message.insert("tool_call_id".to_owned(), result.get("tool_use_id").cloned().unwrap_or_default());
        messages.push(message);
    }
    if !spoken.is_empty() || results.is_empty() {
        messages.push(message("user", texts(&spoken, at)?.join("\n")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(body: Value) -> Result<(Chat, Settings), ApiError> {
        let request = read(body.as_object().unwrap(), false)?.request;
        match request.prompt {
            Prompt::Chat(chat) => Ok((chat, request.settings)),
            _ => panic!("a conversation"),
        }
    }

    #[test]
    fn a_tool_loop_becomes_openais() {
        let (chat, settings) = chat(json!({
            "model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}],
            "stop_sequences": ["x"], "thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "u"},
            "tools": [{"name": "f", "input_schema": {"type": "object"}}, {"type": "web_search_20250305", "name": "web_search"}],
            "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": true},
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "ok"}, {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "42"}]},
                    {"type": "text", "text": "and"}, {"type": "text", "text": "now"}]},
            ],
        }))
        .unwrap();
        assert_eq!((settings.max_tokens, settings.thinking), (Some(Some(5)), Some(true)));
        assert_eq!((chat.tool_choice, chat.parallel_tool_calls), (ToolChoice::Named("f".to_owned()), false));
        assert_eq!(chat.tools.len(), 1);
        let expected = json!([
            {"role": "system", "content": "a\nb"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "ok", "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]},
            {"role": "tool", "content": "42", "tool_call_id": "t1"},
            {"role": "user", "content": "and\nnow"},
        ]);
        assert_eq!(Value::Array(chat.messages.into_iter().map(Value::Object).collect()), expected);
    }

    #[test]
    fn a3_what_is_unknown_is_tolerated() {
        let body = json!({"max_tokens": 1, "messages": [{"role": "system", "content": "x"}], "context_management": {}});
        assert_eq!(chat(body).unwrap().0.messages[0]["role"], "user");
    }

    #[test]
    fn wrong_requests_are_told_why() {
        let message = |body: Value| chat(body).unwrap_err().message;
        assert_eq!(message(json!({"messages": []})), "`max_tokens` is missing");
        assert_eq!(
            message(json!({"max_tokens": 1, "messages": []})),
            "messages: at least one message is required"
        );
        let with = |block: Value| {
            message(json!({"max_tokens": 1, "messages": [{"role": "user", "content": [block]}]}))
        };
        assert!(with(json!({"type": "image", "source": {}})).contains("takes text only"));
        assert!(
            with(json!({"type": "tool_result", "content": [{"type": "input_audio"}]}))
                .contains("takes text only")
        );
        let none = json!({"max_tokens": 1, "messages": [{"role": "user", "content": "a"}], "tool_choice": {"type": "any"}});
        assert!(message(none).contains("no `tools`"));
    }
}
