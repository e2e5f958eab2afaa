//! `commentary to=functions.NAME <|constrain|>json<|message|>{…}`: a message of gpt-oss to a function, its header
//! included (openai/harmony, docs/format.md).

use serde_json::Value;

use super::{Malformed, Parsed, ToolCall, python};

pub(super) fn parse(text: &str) -> Parsed {
    let (header, body) = text.split_once("<|message|>").ok_or(Malformed("the call has no arguments"))?;
    let name = recipient(header).ok_or(Malformed("the call has no recipient"))?;
    let name = Value::from(name.strip_prefix("functions.").unwrap_or(name));
    Ok(vec![ToolCall::from_values(Some(&name), Some(&Value::from(python::strip(body))))?])
}

/// Whom a message is for; `None` for the user.
pub(crate) fn recipient(header: &str) -> Option<&str> {
    let (_, after) = header.split_once("to=")?;
    after.split(|c: char| python::is_space(c) || c == '<').next().filter(|name| !name.is_empty())
}
