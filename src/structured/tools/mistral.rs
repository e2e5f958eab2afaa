//! `[{"name": …, "arguments": …}]`, or `NAME[ARGS]{…}` repeated (mlx_lm/tool_parsers/mistral.py).

use serde_json::{Deserializer, Value};

use super::{Malformed, Parsed, ToolCall, python};

pub(super) fn parse(text: &str) -> Parsed {
    if let Some(Value::Array(calls)) = python::json(text)
        && !calls.is_empty()
    {
        return calls.iter().map(json_call).collect();
    }
    header_calls(text)
}

fn json_call(value: &Value) -> Result<ToolCall, Malformed> {
    let mut call = ToolCall::from_values(value.get("name"), value.get("arguments"))?;
    call.id = value.get("id").and_then(Value::as_str).map(str::to_owned);
    Ok(call)
}

fn header_calls(text: &str) -> Parsed {
    let mut calls = Vec::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("[ARGS]") {
        let before = before.trim_end_matches(python::is_space);
        let start = before.trim_end_matches(|c| python::is_word(c) || c == '-').len();
        let name = before.get(start..).unwrap_or_default();
        if name.is_empty() {
            rest = after;
            continue;
        }
        let after = after.trim_start_matches(python::is_space);
        let mut values = Deserializer::from_str(after).into_iter::<Value>();
        match values.next() {
            Some(Ok(Value::Object(arguments))) => calls.push(ToolCall::new(name, arguments)),
            _ => return Err(Malformed("the arguments are no JSON object")),
        }
        rest = after.get(values.byte_offset()..).unwrap_or_default();
    }
    if calls.is_empty() { Err(Malformed("no function is called")) } else { Ok(calls) }
}
