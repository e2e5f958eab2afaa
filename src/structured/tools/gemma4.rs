//! `call:NAME{key:<|"|>text<|"|>,other:{…}}` (mlx_lm/tool_parsers/gemma4.py).

use serde_json::Value;

use super::{Malformed, Parsed, ToolCall, python};

/// Stands on both sides of a text.
const QUOTE: &str = "<|\"|>";

pub(super) fn parse(text: &str) -> Parsed {
    let mut calls = Vec::new();
    let mut rest = text;
    while let Some((_, after)) = rest.split_once("call:") {
        rest = after;
        let end = after.find(|c| !(python::is_word(c) || c == '-')).unwrap_or(after.len());
        let (name, body) = after.split_at(end);
        let Some(length) = balanced(body).filter(|_| !name.is_empty()) else { continue };
        let (arguments, after) = body.split_at(length);
        rest = after;
        match python::json(&to_json(arguments)) {
            Some(Value::Object(arguments)) => calls.push(ToolCall::new(name, arguments)),
            _ => return Err(Malformed("the arguments cannot be read")),
        }
    }
    if calls.is_empty() { Err(Malformed("no function is called")) } else { Ok(calls) }
}

/// Bytes of the braces that `text` begins with; braces within texts do not count.
fn balanced(text: &str) -> Option<usize> {
    let mut depth = 0usize;
    let mut rest = text;
    loop {
        if let Some(quoted) = rest.strip_prefix(QUOTE) {
            rest = quoted.split_once(QUOTE)?.1;
            continue;
        }
        let mut chars = rest.chars();
        match chars.next()? {
            '{' => depth += 1,
            '}' => depth = depth.checked_sub(1)?,
            _ if depth == 0 => return None,
            _ => {}
        }
        rest = chars.as_str();
        if depth == 0 {
            return Some(text.len() - rest.len());
        }
    }
}

/// Texts become JSON strings, bare keys are quoted. Keys may have hyphens, which mlx-lm refuses.
fn to_json(arguments: &str) -> String {
    let mut json = String::with_capacity(arguments.len());
    let mut rest = arguments;
    while let Some((before, after)) = rest.split_once(QUOTE) {
        let Some((quoted, after)) = after.split_once(QUOTE) else { break };
        quote_keys(before, &mut json);
        json.push_str(&Value::from(quoted).to_string());
        rest = after;
    }
    quote_keys(rest, &mut json);
    json
}

fn quote_keys(text: &str, json: &mut String) {
    let mut rest = text;
    let mut key_may_follow = false;
    while let Some(c) = rest.chars().next() {
        let end = rest.find(|c| !(python::is_word(c) || c == '-')).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        if key_may_follow && !word.is_empty() && after.starts_with(':') {
            json.push_str(&Value::from(word).to_string());
            rest = after;
        } else {
            json.push(c);
            rest = rest.get(c.len_utf8()..).unwrap_or_default();
        }
        key_may_follow = matches!(c, '{' | ',');
    }
}
