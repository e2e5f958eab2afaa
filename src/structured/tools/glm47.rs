//! `NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>` and what GLM writes in its place
//! (mlx_lm/tool_parsers/glm47.py, which also serves laguna).

use serde_json::{Map, Value};

use super::{Malformed, Parsed, ToolCall, ToolSchemas, python};

/// The tags of one family.
pub(super) struct Tags {
    pub(super) key: [&'static str; 2],
    pub(super) value: [&'static str; 2],
}

const TAGS: Tags = Tags { key: ["<arg_key>", "</arg_key>"], value: ["<arg_value>", "</arg_value>"] };

pub(super) fn parse(text: &str, tools: &ToolSchemas) -> Parsed {
    let call = tagged(text, &TAGS, tools)
        .or_else(|| json_call(text, tools))
        .or_else(|| plain_call(text, tools))
        .ok_or(Malformed("the call is empty"))?;
    if call.name.is_empty() { Err(Malformed("the call has no name")) } else { Ok(vec![call]) }
}

/// A call with tagged arguments; `None` without a key.
pub(super) fn tagged(text: &str, tags: &Tags, tools: &ToolSchemas) -> Option<ToolCall> {
    let (name, _) = text.split_once(tags.key[0])?;
    let name = python::strip(name);
    let mut arguments = Map::new();
    let mut rest = text;
    while let Some((_, after)) = rest.split_once(tags.key[0]) {
        let Some((key, value, after)) = argument(after, tags) else {
            rest = after;
            continue;
        };
        rest = after;
        let (key, value) = (python::strip(key), python::strip(value));
        let value =
            if tools.is_string(name, key) { Value::from(value) } else { python::json_or_literal(value) };
        arguments.insert(key.to_owned(), value);
    }
    Some(ToolCall::new(name, arguments))
}

/// Key, value and what follows. Between the two tags stand blanks, or line ends spelled `\n`.
fn argument<'a>(text: &'a str, tags: &Tags) -> Option<(&'a str, &'a str, &'a str)> {
    let mut from = 0;
    loop {
        let end = from + text.get(from..)?.find(tags.key[1])?;
        let mut rest = text.get(end + tags.key[1].len()..)?;
        loop {
            let blank = rest.trim_start_matches(python::is_space);
            rest = blank.strip_prefix("\\n").unwrap_or(blank);
            if rest.len() == blank.len() {
                break;
            }
        }
        if let Some(value) = rest.strip_prefix(tags.value[0]) {
            let (value, after) = value.split_once(tags.value[1])?;
            return Some((text.get(..end)?, value, after));
        }
        from = end + tags.key[1].len();
    }
}

/// Strings of the schema stay, other texts are read.
fn normalize(name: &str, arguments: Map<String, Value>, tools: &ToolSchemas) -> Map<String, Value> {
    let convert = |(key, value): (String, Value)| {
        let value = match value {
            value if tools.is_string(name, &key) => Value::from(python::to_str(&value)),
            Value::String(text) => python::json_or_literal(&text),
            value => value,
        };
        (key, value)
    };
    arguments.into_iter().map(convert).collect()
}

fn json_call(text: &str, tools: &ToolSchemas) -> Option<ToolCall> {
    let mut value = python::json(python::strip(text))?;
    if let Value::Array(items) = &value
        && let Some(first @ Value::Object(_)) = items.first()
    {
        value = first.clone();
    }
    let fields = value.as_object()?;
    let (mut name, mut arguments) = if fields.contains_key("name") && fields.contains_key("arguments") {
        (fields.get("name"), fields.get("arguments"))
    } else if fields.contains_key("function") && fields.contains_key("arguments") {
        (fields.get("function"), fields.get("arguments"))
    } else {
        let tool = fields.get("tool")?.as_object()?;
        (tool.get("name"), tool.get("arguments"))
    };
    if let Some(Value::Object(function)) = name {
        arguments = arguments.filter(|value| is_true(value)).or_else(|| function.get("arguments"));
        name = function.get("name");
    }
    let name = name?.as_str()?;
    let arguments = match arguments {
        Some(Value::String(text)) => python::json_or_literal(text),
        Some(arguments) => arguments.clone(),
        None => Value::Null,
    };
    match arguments {
        Value::Null => Some(ToolCall::new(name, Map::new())),
        Value::Object(arguments) => Some(ToolCall::new(name, normalize(name, arguments, tools))),
        _ => None,
    }
}

/// `bool` of Python.
fn is_true(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(value) => *value,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
    }
}

/// `NAME`, `NAME {json}`, `NAME key=value`.
fn plain_call(text: &str, tools: &ToolSchemas) -> Option<ToolCall> {
    let text = python::strip(text);
    if text.is_empty() {
        return None;
    }
    let object = |name: &str, text: &str| match python::json_or_literal(text) {
        Value::Object(arguments) => Some(ToolCall::new(name, normalize(name, arguments, tools))),
        _ => None,
    };
    if let Some((name, rest)) = text.split_once('\n') {
        let (name, rest) = (python::strip(name), python::strip(rest));
        if !name.is_empty()
            && !rest.is_empty()
            && let Some(call) = object(name, rest)
        {
            return Some(call);
        }
    }
    let (name, rest) = text.split_once(' ').unwrap_or((text, ""));
    let rest = python::strip(rest);
    if rest.is_empty() {
        return Some(ToolCall::new(name, Map::new()));
    }
    if let Some(call) = object(name, rest) {
        return Some(call);
    }
    let arguments = key_value_pairs(rest, name, tools)
        .unwrap_or_else(|| Map::from_iter([("raw".to_owned(), Value::from(rest))]));
    Some(ToolCall::new(name, arguments))
}

fn key_value_pairs(text: &str, name: &str, tools: &ToolSchemas) -> Option<Map<String, Value>> {
    let words = if text.contains('=') { python::shell_words(text)? } else { return None };
    let pair = |word: &String| {
        let (key, value) = word.split_once('=')?;
        let key = python::strip(key);
        let value =
            if tools.is_string(name, key) { Value::from(value) } else { python::json_or_literal(value) };
        (!key.is_empty()).then(|| (key.to_owned(), value))
    };
    if words.is_empty() { None } else { words.iter().map(pair).collect() }
}
