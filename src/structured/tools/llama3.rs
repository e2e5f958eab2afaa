//! Calls of Llama 3.1 to 4, which have no end marker: `{"name": …, "parameters": {…}}`, several with `;` between
//! them, or Python calls (llama-models, prompt_format.md of each release).

use serde_json::{Deserializer, Value};

use super::{Malformed, Parsed, ToolCall, python, pythonic};

pub(super) fn parse(text: &str) -> Parsed {
    let text = python::strip(text);
    if text.starts_with('[')
        && text.ends_with(']')
        && let Some(calls) = pythonic::strict(text)
    {
        return Ok(calls);
    }
    let mut calls = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let mut values = Deserializer::from_str(rest).into_iter::<Value>();
        let value = match values.next() {
            Some(Ok(value @ Value::Object(_))) => value,
            Some(Ok(Value::Array(items))) if calls.is_empty() && !items.is_empty() => {
                let end = rest.get(values.byte_offset()..).unwrap_or_default();
                return match python::strip(end) {
                    "" => items.iter().map(call).collect(),
                    _ => Err(Malformed("something follows the calls")),
                };
            }
            _ => return Err(Malformed("the call is not JSON")),
        };
        calls.push(call(&value)?);
        let after = python::strip(rest.get(values.byte_offset()..).unwrap_or_default());
        rest = match after.strip_prefix([';', ',']) {
            Some(next) => python::strip(next),
            None if after.is_empty() || after.starts_with('{') => after,
            None => return Err(Malformed("something follows the calls")),
        };
    }
    if calls.is_empty() { Err(Malformed("no function is called")) } else { Ok(calls) }
}

fn call(value: &Value) -> Result<ToolCall, Malformed> {
    let arguments = value.get("parameters").or_else(|| value.get("arguments"));
    // JSON without arguments is an answer rather than a call.
    let arguments = arguments.ok_or(Malformed("the call has no parameters"))?;
    ToolCall::from_values(value.get("name"), Some(arguments))
}
