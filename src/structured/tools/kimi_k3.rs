//! `<|open|>call tool="NAME"<|sep|><|open|>argument key="KEY" type="string"<|sep|>VALUE…`
//! (mlx_lm/tool_parsers/kimi_k3.py).

use serde_json::{Map, Value};

use super::{Malformed, Parsed, ToolCall, python};

pub(super) fn parse(text: &str) -> Parsed {
    // A call that cannot be read does not spoil the others.
    let calls: Vec<ToolCall> =
        elements(text, "call").filter_map(|(attributes, body)| call(attributes, body)).collect();
    if calls.is_empty() { Err(Malformed("no function is called")) } else { Ok(calls) }
}

/// Attributes and bodies of `<|open|>NAME attributes<|sep|>body<|close|>NAME<|sep|>`.
fn elements<'a>(text: &'a str, name: &str) -> impl Iterator<Item = (&'a str, &'a str)> {
    let (open, close) = (format!("<|open|>{name}"), format!("<|close|>{name}<|sep|>"));
    let mut rest = text;
    std::iter::from_fn(move || {
        let (_, after) = rest.split_once(&open)?;
        let (attributes, after) = after.split_once("<|sep|>")?;
        let (body, after) = after.split_once(&close)?;
        rest = after;
        Some((attributes, body))
    })
}

fn call(attributes: &str, body: &str) -> Option<ToolCall> {
    let name = attribute(attributes, "tool").filter(|name| !name.is_empty())?;
    if let Some((_, json)) = elements(body, "json").next() {
        let Value::Object(arguments) = python::json(json)? else { return None };
        return Some(ToolCall::new(name, arguments));
    }
    let mut arguments = Map::new();
    for (attributes, value) in elements(body, "argument") {
        let text = attribute(attributes, "type").is_none_or(|kind| kind == "string");
        let parsed = if text { None } else { python::json(value) };
        arguments.insert(attribute(attributes, "key")?, parsed.unwrap_or_else(|| Value::from(value)));
    }
    Some(ToolCall::new(name, arguments))
}

/// The value of `name="value"`, the last one of that name.
fn attribute(text: &str, name: &str) -> Option<String> {
    let mut found = None;
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("=\"") {
        let Some((value, after)) = after.split_once('"') else { break };
        let key = before.rsplit(|c| !python::is_word(c)).next().unwrap_or_default();
        if key == name {
            found = Some(value.replace("&quot;", "\"").replace("&amp;", "&"));
        }
        // Without a key this was no attribute, and one may begin inside.
        rest = if key.is_empty() { rest.get(before.len() + 2..).unwrap_or_default() } else { after };
    }
    found
}
