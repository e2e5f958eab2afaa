//! `call:NAME{key:<escape>text<escape>,key:1}` (mlx_lm/tool_parsers/function_gemma.py).

use serde_json::{Map, Value};

use super::{Malformed, Parsed, ToolCall, python};

const ESCAPE: &str = "<escape>";

pub(super) fn parse(text: &str) -> Parsed {
    let (name, mut rest) = first_call(text).ok_or(Malformed("no function is called"))?;
    let mut arguments = Map::new();
    while !rest.is_empty() {
        let (key, value) = rest.split_once(':').ok_or(Malformed("an argument has no value"))?;
        if let Some(quoted) = value.strip_prefix(ESCAPE) {
            let (value, after) = quoted.split_once(ESCAPE).ok_or(Malformed("a text does not end"))?;
            arguments.insert(key.to_owned(), Value::from(value));
            // What follows is a comma.
            let mut after = after.chars();
            after.next();
            rest = after.as_str();
            continue;
        }
        let (value, after) = value.split_once(',').unwrap_or((value, ""));
        arguments.insert(key.to_owned(), python::json(value).unwrap_or_else(|| Value::from(value)));
        rest = after;
    }
    Ok(vec![ToolCall::new(name, arguments)])
}

/// The name and the arguments of `call:NAME{…}`.
fn first_call(text: &str) -> Option<(&str, &str)> {
    text.match_indices("call:").find_map(|(start, marker)| {
        let after = text.get(start + marker.len()..)?;
        let (name, after) = after.split_at(after.find(|c| !python::is_word(c))?);
        let (arguments, _) = after.strip_prefix('{')?.split_once('}')?;
        (!name.is_empty()).then_some((name, arguments))
    })
}
