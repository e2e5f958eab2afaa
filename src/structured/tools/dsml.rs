//! `<｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true|false">VALUE</｜DSML｜parameter>` (DeepSeek
//! V3.2; the syntax is that of mlx_lm/chat_templates/deepseek_v32.py, which has no parser for it).

use serde_json::{Map, Value};

use super::{Malformed, Parsed, ToolCall, between, python};

pub(super) fn parse(text: &str) -> Parsed {
    let mut calls = Vec::new();
    for invocation in between(text, "<｜DSML｜invoke name=\"", "</｜DSML｜invoke>") {
        let (name, body) = invocation.split_once("\">").ok_or(Malformed("a function has no name"))?;
        let mut arguments = Map::new();
        for parameter in between(body, "<｜DSML｜parameter name=\"", "</｜DSML｜parameter>") {
            let (key, rest) = parameter.split_once('"').ok_or(Malformed("a parameter has no name"))?;
            let (attributes, value) = rest.split_once('>').ok_or(Malformed("a parameter has no value"))?;
            let value = match python::strip(attributes) {
                "string=\"false\"" => {
                    python::json(value).ok_or(Malformed("a parameter's value is not JSON"))?
                }
                _ => Value::from(value),
            };
            arguments.insert(key.to_owned(), value);
        }
        calls.push(ToolCall::new(name, arguments));
    }
    if calls.is_empty() || calls.iter().any(|call| call.name.is_empty()) {
        return Err(Malformed("no function is called"));
    }
    Ok(calls)
}
