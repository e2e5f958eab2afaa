//! `<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>`, and the conversion of values that
//! MiniCPM5 shares (mlx_lm/tool_parsers/minimax_m2.py).

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::{Malformed, Parsed, ToolCall, ToolSchemas, between, python, type_name};

pub(super) fn parse(text: &str, tools: &ToolSchemas) -> Parsed {
    let mut calls = Vec::new();
    for invocation in between(text, "<invoke name=", "</invoke>") {
        let name = invocation.split('>').next().unwrap_or_default();
        if name.is_empty() {
            continue;
        }
        let name = unquote(name);
        let mut arguments = Map::new();
        for parameter in between(invocation, "<parameter name=", "</parameter>") {
            let Some((key, value)) = parameter.split_once('>').filter(|(key, _)| !key.is_empty()) else {
                continue;
            };
            let key = unquote(key);
            let value = convert(python::strip(value), tools.property(name, key));
            arguments.insert(key.to_owned(), value);
        }
        calls.push(ToolCall::new(name, arguments));
    }
    if calls.is_empty() || calls.iter().any(|call| call.name.is_empty()) {
        return Err(Malformed("no function is called"));
    }
    Ok(calls)
}

/// A name without the quotes around it.
pub(super) fn unquote(name: &str) -> &str {
    let name = python::strip(name);
    let inside = |quote| name.strip_prefix(quote)?.strip_suffix(quote);
    inside('"').or_else(|| inside('\'')).unwrap_or(name)
}

/// Gives a value the first of the schema's types that it fits, from integer to string.
pub(super) fn convert(value: &str, schema: Option<&Value>) -> Value {
    let lower = value.to_lowercase();
    if lower == "null" {
        return Value::Null;
    }
    let mut types = BTreeSet::new();
    collect_types(schema, &mut types);
    let has = |names: &[&str]| names.iter().any(|name| types.contains(*name));
    if has(&["null"]) && (lower == "none" || lower == "nil") {
        return Value::Null;
    }
    if has(&["integer", "int"])
        && let Some(integer) = python::integer(value)
    {
        return integer;
    }
    if has(&["number", "float"])
        && let Some(number) = python::float(value).and_then(python::whole)
    {
        return number;
    }
    if has(&["boolean", "bool"]) {
        match python::strip(&lower) {
            "true" | "1" | "yes" | "on" => return Value::Bool(true),
            "false" | "0" | "no" | "off" => return Value::Bool(false),
            _ => {}
        }
    }
    if has(&["object", "array"])
        && let Some(parsed) = python::lenient_json(value).or_else(|| python::literal(value))
    {
        return parsed;
    }
    if has(&["string", "str", "text"]) {
        return Value::from(value);
    }
    python::json(value).unwrap_or_else(|| Value::from(value))
}

/// Types that a schema allows; a string when it does not say.
fn collect_types(schema: Option<&Value>, types: &mut BTreeSet<String>) {
    let before = types.len();
    if let Some(Value::Object(schema)) = schema {
        match schema.get("type") {
            Some(Value::String(kind)) => {
                types.insert(kind.to_lowercase());
            }
            Some(Value::Array(kinds)) => {
                types.extend(kinds.iter().filter_map(Value::as_str).map(str::to_lowercase));
            }
            _ => {}
        }
        if let Some(Value::Array(values)) = schema.get("enum") {
            types.extend(values.iter().map(|value| type_name(value).to_owned()));
        }
        for choice in ["anyOf", "oneOf", "allOf"] {
            if let Some(Value::Array(choices)) = schema.get(choice) {
                choices.iter().for_each(|choice| collect_types(Some(choice), types));
            }
        }
        let says = ["type", "enum", "anyOf", "oneOf", "allOf"].iter().any(|key| schema.contains_key(*key));
        if types.len() > before || (says && !types.is_empty()) {
            return;
        }
    }
    types.insert("string".to_owned());
}
