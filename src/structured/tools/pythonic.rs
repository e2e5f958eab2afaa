//! `[NAME(key="text", other=1)]` (mlx_lm/tool_parsers/pythonic.py).

use serde_json::{Map, Value};

use super::{Malformed, Parsed, ToolCall, python};

pub(super) fn parse(text: &str) -> Parsed {
    strict(text).or_else(|| loose(text)).ok_or(Malformed("no function is called"))
}

/// Calls that are Python.
pub(super) fn strict(text: &str) -> Option<Vec<ToolCall>> {
    let (start, end) = (text.find('[')?, text.rfind(']')?);
    let calls = python::calls(text.get(start..=end)?)?;
    Some(calls.into_iter().map(|(name, arguments)| ToolCall::new(name, arguments)).collect())
}

/// One call that almost is.
fn loose(text: &str) -> Option<Vec<ToolCall>> {
    let (name, arguments) = text.match_indices('[').find_map(|(start, _)| {
        let after = text.get(start + 1..)?;
        let (name, after) = after.split_at(after.find(|c| !(python::is_word(c) || c == '.'))?);
        let (arguments, _) = after.strip_prefix('(')?.split_once(")]")?;
        (!name.is_empty()).then_some((name, arguments))
    })?;
    let mut found = Map::new();
    let mut rest = arguments;
    while let Some((key, value, after)) = argument(rest) {
        let value = python::literal(value).unwrap_or_else(|| Value::from(value));
        found.insert(key.to_owned(), value);
        rest = after;
    }
    Some(vec![ToolCall::new(name, found)])
}

/// The next `key=value`, up to a comma or the end.
fn argument(text: &str) -> Option<(&str, &str, &str)> {
    let mut from = 0;
    loop {
        let equals = from + text.get(from..)?.find('=')?;
        from = equals + 1;
        let before = text.get(..equals)?;
        let key = before.get(before.trim_end_matches(python::is_word).len()..)?;
        if key.is_empty() {
            continue;
        }
        let value = text.get(equals + 1..)?;
        for quote in ['"', '\''] {
            if let Some((quoted, after)) = value.strip_prefix(quote).and_then(|rest| rest.split_once(quote))
                && let Some(after) = separator(after)
            {
                return Some((key, quoted, after));
            }
        }
        let end = value.find(',').unwrap_or(value.len());
        let (bare, after) = value.split_at(end);
        if !bare.is_empty() {
            return Some((key, python::strip(bare), separator(after).unwrap_or(after)));
        }
    }
}

/// What follows a comma and blanks, or nothing at the end.
fn separator(text: &str) -> Option<&str> {
    match text.strip_prefix(',') {
        Some(after) => Some(after.trim_start_matches(python::is_space)),
        None => (text.is_empty() || text == "\n").then_some(""),
    }
}
