//! `functions.NAME:0<|tool_call_argument_begin|>{…}` (mlx_lm/tool_parsers/kimi_k2.py).

use serde_json::Value;

use super::{Malformed, Parsed, ToolCall, between, python};

const ARGUMENTS: &str = "<|tool_call_argument_begin|>";

pub(super) fn parse(text: &str) -> Parsed {
    let calls: Vec<&str> = between(text, "<|tool_call_begin|>", "<|tool_call_end|>").collect();
    if calls.is_empty() { Ok(vec![call(text)?]) } else { calls.into_iter().map(call).collect() }
}

fn call(text: &str) -> Result<ToolCall, Malformed> {
    let text = text.trim_start_matches(python::is_space);
    let id = text.match_indices(':').find_map(|(colon, _)| id(text, colon));
    let id = id.ok_or(Malformed("the call has no id"))?;
    let (_, arguments) = text.split_once(ARGUMENTS).ok_or(Malformed("the call has no arguments"))?;
    let arguments = python::json_or_literal(arguments.trim_start_matches(python::is_space));
    let (name, _) = id.rsplit_once(':').unwrap_or((id, ""));
    let name = name.strip_prefix("functions.").filter(|name| !name.is_empty()).unwrap_or(name);
    let mut call = ToolCall::from_values(Some(&Value::from(name)), Some(&arguments))?;
    call.id = Some(id.to_owned());
    Ok(call)
}

/// `functions.NAME:0`, if the colon at this place is the one before the number.
fn id(text: &str, colon: usize) -> Option<&str> {
    let after = text.get(colon + 1..)?;
    let digits = after.find(|c: char| !c.is_numeric()).unwrap_or(after.len());
    let follows = after.get(digits..)?.trim_start_matches(python::is_space).starts_with(ARGUMENTS);
    if colon == 0 || digits == 0 || !follows { None } else { text.get(..colon + 1 + digits) }
}
