//! A call as JSON between tags (mlx_lm/tool_parsers/json_tools.py).

use serde_json::Value;

use super::{Malformed, Parsed, ToolCall, python};

pub(super) fn parse(text: &str) -> Parsed {
    match python::json(python::strip(text)) {
        Some(Value::Array(calls)) if !calls.is_empty() => calls.iter().map(call).collect(),
        Some(value) => Ok(vec![call(&value)?]),
        None => Err(Malformed("the call is not JSON")),
    }
}

fn call(value: &Value) -> Result<ToolCall, Malformed> {
    let name = value.get("name").or_else(|| value.get("function")?.get("name"));
    let arguments = value.get("arguments").or_else(|| value.get("function")?.get("arguments"));
    let mut call = ToolCall::from_values(name, arguments)?;
    call.id = value.get("id").and_then(Value::as_str).map(str::to_owned);
    Ok(call)
}
