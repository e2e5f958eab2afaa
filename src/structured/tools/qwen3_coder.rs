//! `<function=NAME><parameter=KEY>VALUE</parameter></function>` (mlx_lm/tool_parsers/qwen3_coder.py).

use serde_json::{Map, Value};

use super::{Malformed, Parsed, ToolCall, ToolSchemas, between, python};

const STRING_TYPES: [&str; 6] = ["string", "str", "text", "varchar", "char", "enum"];
const BOOL_TYPES: [&str; 3] = ["boolean", "bool", "binary"];
const OBJECT_TYPES: [&str; 3] = ["object", "array", "arr"];

pub(super) fn parse(text: &str, tools: &ToolSchemas) -> Parsed {
    const NO_FUNCTION: Malformed = Malformed("the call names no function");
    // As Python's `$`: a last line end does not count.
    let text = text.strip_suffix('\n').unwrap_or(text);
    let body = text.strip_suffix("</function>").ok_or(NO_FUNCTION)?;
    let (_, body) = body.split_once("<function=").ok_or(NO_FUNCTION)?;
    let (name, rest) = name(body).ok_or(NO_FUNCTION)?;
    let mut arguments = Map::new();
    for parameter in between(rest, "<parameter=", "</parameter>") {
        let Some((key, value)) = self::name(parameter) else { continue };
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        arguments.insert(key.to_owned(), convert(value, tools.property(name, key))?);
    }
    Ok(vec![ToolCall::new(name, arguments)])
}

/// A name, the `>` after it, and the rest.
fn name(text: &str) -> Option<(&str, &str)> {
    let text = text.trim_start_matches(python::is_space);
    let end = text.find(|c| python::is_space(c) || c == '<' || c == '>').unwrap_or(text.len());
    let (name, rest) = text.split_at(end);
    (!name.is_empty()).then_some((name, rest.strip_prefix('>').unwrap_or(rest)))
}

/// Gives a value the type that the tool's schema declares.
fn convert(value: &str, schema: Option<&Value>) -> Result<Value, Malformed> {
    let text = || Value::from(value);
    if value.eq_ignore_ascii_case("null") {
        return Ok(Value::Null);
    }
    let Some(schema) = schema.filter(|schema| schema.as_object().is_some_and(|schema| !schema.is_empty()))
    else {
        return Ok(text());
    };
    let Some(kind) = schema.get("type") else {
        let parsed = python::json(value).filter(|value| value.is_object() || value.is_array());
        return Ok(parsed.unwrap_or_else(text));
    };
    // A list of types counts as its spelling, as in mlx-lm: such values are read as Python literals.
    let kind = python::to_str(kind).trim().to_lowercase();
    let kind = kind.as_str();
    if STRING_TYPES.contains(&kind) {
        return Ok(text());
    }
    if ["int", "uint", "long", "short", "unsigned"].iter().any(|prefix| kind.starts_with(prefix)) {
        let number = number(value)?;
        return match number.fract() == 0.0 {
            true => python::whole(number).ok_or(Malformed("an integer is infinite")),
            false => Err(Malformed("an integer has a fraction")),
        };
    }
    if kind.starts_with("num") || kind.starts_with("float") {
        return python::whole(number(value)?).ok_or(Malformed("a number is infinite"));
    }
    if BOOL_TYPES.contains(&kind) {
        return Ok(Value::Bool(value.eq_ignore_ascii_case("true")));
    }
    let structured = OBJECT_TYPES.contains(&kind) || kind.starts_with("dict") || kind.starts_with("list");
    let parsed = if structured { python::lenient_json(value) } else { None };
    Ok(parsed.or_else(|| python::literal(value)).unwrap_or_else(text))
}

fn number(value: &str) -> Result<f64, Malformed> {
    python::float(value).filter(|number| number.is_finite()).ok_or(Malformed("a number is not one"))
}
