//! `<atem:invoke name="NAME"><atem:parameter name="KEY">VALUE</atem:parameter></atem:invoke>`
//! (mlx_lm/tool_parsers/muse_spark.py).

use serde_json::{Map, Value};

use super::{Malformed, Parsed, ToolCall, python};

const INVOKE: &str = "<atem:invoke";
const INVOKE_END: &str = "</atem:invoke>";
const PARAMETER: &str = "<atem:parameter";
const PARAMETER_END: &str = "</atem:parameter>";

pub(super) fn parse(text: &str) -> Parsed {
    let mut calls = Vec::new();
    let mut rest = text;
    while let Some((_, after)) = rest.split_once(INVOKE) {
        rest = after;
        let Some((name, body)) = opening(after, true) else { continue };
        let (body, after) = body.split_at(body_length(body));
        rest = after.strip_prefix(INVOKE_END).unwrap_or(after);
        calls.push(ToolCall::new(name, arguments(body)));
    }
    if calls.is_empty() { Err(Malformed("no function is called")) } else { Ok(calls) }
}

/// The name in an opening tag, and what follows the tag. `name_last`: nothing may stand between the two.
fn opening(text: &str, name_last: bool) -> Option<(&str, &str)> {
    if text.starts_with(python::is_word) {
        return None;
    }
    for (start, marker) in text.match_indices("name=\"") {
        let before = text.get(..start)?;
        if before.contains('>') {
            return None;
        }
        if before.ends_with(python::is_word) {
            continue;
        }
        let Some((name, after)) = text.get(start + marker.len()..)?.split_once('"') else { continue };
        let end = after.find('>').filter(|&end| !name_last || end == 0);
        if let Some(end) = end.filter(|_| !name.is_empty()) {
            return Some((name, after.get(end + 1..)?));
        }
    }
    None
}

/// Bytes up to the end tag or the end; end tags within parameters do not count.
fn body_length(text: &str) -> usize {
    let mut at = 0;
    while let Some(rest) = text.get(at..).filter(|rest| !rest.is_empty() && *rest != "\n") {
        if rest.starts_with(INVOKE_END) {
            break;
        }
        let parameter =
            rest.strip_prefix(PARAMETER).filter(|after| !after.starts_with(python::is_word)).and_then(
                |after| after.find(PARAMETER_END).map(|end| PARAMETER.len() + end + PARAMETER_END.len()),
            );
        at += parameter.or_else(|| rest.chars().next().map(char::len_utf8)).unwrap_or(rest.len());
    }
    at
}

fn arguments(body: &str) -> Map<String, Value> {
    let mut arguments = Map::new();
    let mut rest = body;
    while let Some((_, after)) = rest.split_once(PARAMETER) {
        rest = after;
        let Some((name, value)) = opening(after, false) else { continue };
        let Some((value, after)) = value.split_once(PARAMETER_END) else { continue };
        rest = after;
        let parsed = python::json(value).unwrap_or_else(|| Value::from(python::strip(value)));
        arguments.insert(name.to_owned(), parsed);
    }
    arguments
}
