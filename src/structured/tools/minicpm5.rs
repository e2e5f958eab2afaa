//! `<function name="NAME"><param name="KEY">VALUE</param></function>` (mlx_lm/tool_parsers/minicpm5.py).

use serde_json::Map;

use super::minimax_m2::{convert, unquote};
use super::{Malformed, Parsed, ToolCall, ToolSchemas, python};

const CDATA: &str = "<![CDATA[";

pub(super) fn parse(text: &str, tools: &ToolSchemas) -> Parsed {
    let mut calls = Vec::new();
    let mut rest = text;
    while let Some((name, body)) = function(rest) {
        let name = unquote(name);
        let (arguments, after) = parameters(body, name, tools);
        calls.push(ToolCall::new(name, arguments));
        rest = after;
    }
    if calls.is_empty() || calls.iter().any(|call| call.name.is_empty()) {
        return Err(Malformed("no function is called"));
    }
    Ok(calls)
}

/// The next name with a `>` after it, and what follows. The tag before the name is optional: the reply's parser
/// takes it for the marker.
fn function(text: &str) -> Option<(&str, &str)> {
    let mut rest = text;
    loop {
        let tagged = rest.strip_prefix("<function").and_then(blanks).unwrap_or(rest);
        let named = attribute(tagged).unwrap_or(tagged);
        let found = [named, tagged, rest].into_iter().find_map(|start| {
            let (name, after) = name(start)?;
            Some((name, after.trim_start_matches(python::is_space).strip_prefix('>')?))
        });
        if found.is_some() {
            return found;
        }
        let mut chars = rest.chars();
        chars.next()?;
        // Within a name no other name begins.
        let skipped = chars.as_str();
        let run = name_length(rest).saturating_sub(1).min(skipped.len());
        rest = skipped.get(run..).unwrap_or(skipped);
    }
}

/// At least one blank, and what follows.
fn blanks(text: &str) -> Option<&str> {
    let rest = text.trim_start_matches(python::is_space);
    (rest.len() < text.len()).then_some(rest)
}

/// What follows `name =`.
fn attribute(text: &str) -> Option<&str> {
    let after = text.strip_prefix("name")?.trim_start_matches(python::is_space).strip_prefix('=')?;
    Some(after.trim_start_matches(python::is_space))
}

fn name(text: &str) -> Option<(&str, &str)> {
    for quote in ['"', '\''] {
        if let Some(quoted) = text.strip_prefix(quote) {
            return Some(text.split_at(quoted.find(quote)? + 2));
        }
    }
    let length = name_length(text);
    (length > 0).then(|| text.split_at(length))
}

fn name_length(text: &str) -> usize {
    let ends = |c| python::is_space(c) || matches!(c, '"' | '\'' | '<' | '>');
    text.find(ends).unwrap_or(text.len())
}

/// Parameters up to `</function>`, and what follows it.
fn parameters<'a>(
    text: &'a str,
    function: &str,
    tools: &ToolSchemas,
) -> (Map<String, serde_json::Value>, &'a str) {
    let mut arguments = Map::new();
    let mut rest = text;
    loop {
        let end = rest.find("</function>");
        let parameter = rest.find("<param").filter(|&start| end.is_none_or(|end| start < end));
        let Some(start) = parameter else {
            let after = end.and_then(|end| rest.get(end + "</function>".len()..));
            return (arguments, after.unwrap_or_default());
        };
        let after = rest.get(start + "<param".len()..).unwrap_or_default();
        rest = after;
        if let Some((key, value, after)) = self::parameter(after) {
            let key = unquote(key);
            arguments.insert(key.to_owned(), convert(value, tools.property(function, key)));
            rest = after;
        }
    }
}

/// Key, value and what follows. A CDATA section may hold anything, end tags too.
fn parameter(text: &str) -> Option<(&str, &str, &str)> {
    let (key, after) = name(attribute(blanks(text)?)?)?;
    let body = after.trim_start_matches(python::is_space).strip_prefix('>')?;
    if let Some(section) = body.trim_start_matches(python::is_space).strip_prefix(CDATA) {
        for (end, bracket) in section.match_indices("]]>") {
            let after = section.get(end + bracket.len()..)?.trim_start_matches(python::is_space);
            if let Some(after) = after.strip_prefix("</param>") {
                return Some((key, section.get(..end)?, after));
            }
        }
    }
    let (value, after) = body.split_once("</param>")?;
    Some((key, python::strip(value), after))
}
