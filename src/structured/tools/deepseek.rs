//! `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME` with the arguments in a JSON fence (DeepSeek V3 and R1), or
//! `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}` (V3.1); the models' chat templates.

use serde_json::Value;

use super::{Malformed, Parsed, ToolCall, between, python};

const BEGIN: &str = "<｜tool▁call▁begin｜>";
const END: &str = "<｜tool▁call▁end｜>";
const SEPARATOR: &str = "<｜tool▁sep｜>";

pub(super) fn parse(text: &str) -> Parsed {
    let calls: Vec<ToolCall> = between(text, BEGIN, END).map(call).collect::<Result<_, _>>()?;
    if calls.is_empty() { Err(Malformed("no function is called")) } else { Ok(calls) }
}

fn call(text: &str) -> Result<ToolCall, Malformed> {
    let (first, rest) = text.split_once(SEPARATOR).ok_or(Malformed("the call has no arguments"))?;
    let (name, arguments) = match rest.split_once("```json") {
        Some((name, fenced)) if python::strip(first) == "function" => {
            (name, fenced.rsplit_once("```").map_or(fenced, |(inside, _)| inside))
        }
        _ => (first, rest),
    };
    let name = Value::from(python::strip(name));
    ToolCall::from_values(Some(&name), Some(&Value::from(python::strip(arguments))))
}
