//! Calls in a reply, whatever syntax a model chose for them.

use std::sync::LazyLock;

use regex::Regex;
use serde_json::{Map, Value};

use super::compare::Call;

#[allow(clippy::unwrap_used)] // constants
static TAGGED: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"(?s)<tool_call>\s*(\{.*?)(?:</tool_call>|\z)").unwrap());
#[allow(clippy::unwrap_used)] // constants
static FUNCTION: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"(?s)<function=([^>\s]+)>(.*?)(?:</function>|\z)").unwrap());
#[allow(clippy::unwrap_used)] // constants
static PARAMETER: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"(?s)<parameter=([^>\s]+)>(.*?)</parameter>").unwrap());
#[allow(clippy::unwrap_used)] // constants
static GEMMA: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"<\|?tool_call\|?>\s*call:([\w.]+)\{").unwrap());

/// The calls of a reply: `<tool_call>` with JSON, `<function=…>`, Gemma's `call:name{…}`, or bare JSON; the first kind
/// that is there.
pub fn calls(reply: &str) -> Vec<Call> {
    [tagged, functions, gemma, bare]
        .iter()
        .map(|read| read(reply))
        .find(|calls| !calls.is_empty())
        .unwrap_or_default()
}

fn tagged(reply: &str) -> Vec<Call> {
    let text =
        |found: regex::Captures<'_>| found.get(1).and_then(|text| from_json(first_value(text.as_str())?));
    TAGGED.captures_iter(reply).filter_map(text).collect()
}

fn functions(reply: &str) -> Vec<Call> {
    let call = |found: regex::Captures<'_>| {
        let (name, body) = (found.get(1)?.as_str(), found.get(2)?.as_str());
        let argument = |found: regex::Captures<'_>| {
            let text = found.get(2)?.as_str().trim();
            // A value without quotes is a text unless it is JSON.
            let value = serde_json::from_str(text).unwrap_or_else(|_| Value::from(text));
            Some((found.get(1)?.as_str().to_owned(), value))
        };
        let arguments = PARAMETER.captures_iter(body).filter_map(argument).collect();
        Some(Call { name: name.to_owned(), arguments })
    };
    FUNCTION.captures_iter(reply).filter_map(call).collect()
}

fn gemma(reply: &str) -> Vec<Call> {
    let call = |found: regex::Captures<'_>| {
        let inside = reply.get(found.get(0)?.end() - 1..)?;
        // `<|"|>` are its quotes, and keys have none.
        let quoted = inside.replace("<|\"|>", "\"").replace("<escape>", "\"");
        let arguments = match first_value(&quote_keys(&quoted))? {
            Value::Object(arguments) => arguments,
            _ => return None,
        };
        Some(Call { name: found.get(1)?.as_str().to_owned(), arguments })
    };
    GEMMA.captures_iter(reply).filter_map(call).collect()
}

/// Puts quotes around bare keys, outside of texts.
fn quote_keys(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len());
    let (mut inside, mut escaped, mut key_may_come) = (false, false, false);
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        if inside {
            inside = c != '"' || escaped;
            escaped = c == '\\' && !escaped;
            quoted.push(c);
        } else if key_may_come && (c.is_alphabetic() || c == '_') {
            let mut word = String::from(c);
            while let Some(next) =
                rest.next_if(|next| next.is_alphanumeric() || matches!(next, '_' | '-' | '.'))
            {
                word.push(next);
            }
            let is_key = rest.peek() == Some(&':');
            quoted.push_str(&if is_key { format!("\"{word}\"") } else { word });
            key_may_come = false;
        } else {
            inside = c == '"';
            if !c.is_whitespace() {
                key_may_come = matches!(c, '{' | ',');
            }
            quoted.push(c);
        }
    }
    quoted
}

/// JSON objects with a name and arguments anywhere in the text, or lists of them.
fn bare(reply: &str) -> Vec<Call> {
    let mut calls = Vec::new();
    let mut at = 0;
    while let Some(offset) = reply.get(at..).and_then(|rest| rest.find(['{', '['])) {
        let start = at + offset;
        let text = reply.get(start..).unwrap_or_default();
        let mut values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
        match values.next() {
            Some(Ok(value)) => {
                at = start + values.byte_offset().max(1);
                match value {
                    Value::Array(items) => calls.extend(items.into_iter().filter_map(from_json)),
                    value => calls.extend(from_json(value)),
                }
            }
            _ => at = start + 1,
        }
    }
    calls
}

/// The value that a text begins with.
fn first_value(text: &str) -> Option<Value> {
    serde_json::Deserializer::from_str(text).into_iter::<Value>().next()?.ok()
}

/// A call as `{"name" | "function": …, "arguments" | "args" | "parameters": {…}}`.
fn from_json(value: Value) -> Option<Call> {
    let Value::Object(mut fields) = value else { return None };
    if let Some(Value::Object(function)) = fields.get("function") {
        fields = function.clone();
    }
    let name = ["name", "function"].iter().find_map(|name| fields.get(*name)?.as_str())?.to_owned();
    let arguments = ["arguments", "args", "parameters"].iter().find_map(|name| fields.get(*name));
    let arguments = match arguments? {
        Value::Object(arguments) => arguments.clone(),
        Value::String(text) => match serde_json::from_str(text).ok()? {
            Value::Object(arguments) => arguments,
            _ => return None,
        },
        Value::Null => Map::new(),
        _ => return None,
    };
    Some(Call { name, arguments })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn read(reply: &str) -> Value {
        calls(reply).into_iter().map(|call| json!({call.name: call.arguments})).collect()
    }

    #[test]
    fn calls_are_found_in_every_syntax() {
        let f = json!([{"f": {"a": 1}}]);
        assert_eq!(read("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>"), f);
        assert_eq!(read("<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}"), f);
        assert_eq!(read("<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"), f);
        assert_eq!(read("<|tool_call>call:f{a:1}<tool_call|>"), f);
        assert_eq!(read("Sure: {\"function\": \"f\", \"args\": {\"a\": 1}} there"), f);
        assert_eq!(read("[{\"name\": \"f\", \"parameters\": {\"a\": 1}}]"), f);
        assert_eq!(
            read("{\"type\": \"function\", \"function\": {\"name\": \"f\", \"arguments\": {\"a\": 1}}}"),
            f
        );
        assert_eq!(read("{\"x\": 1} {\"a\": {\"name\": \"f\"}} {broken"), json!([]));
    }

    #[test]
    fn gemmas_texts_and_nested_values_are_read() {
        let reply = "<|tool_call>call:m.f{s:<|\"|>a, b:c<|\"|>,l:[1,{k:true}],n:null}<tool_call|>";
        assert_eq!(read(reply), json!([{"m.f": {"s": "a, b:c", "l": [1, {"k": true}], "n": null}}]));
    }

    #[test]
    fn every_call_is_found() {
        let reply = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call><tool_call>{\"name\": \"g\", \"arguments\": {}}</tool_call>";
        assert_eq!(calls(reply).len(), 2);
        assert_eq!(
            calls("{\"name\": \"f\", \"arguments\": {}}\n{\"name\": \"g\", \"arguments\": {}}").len(),
            2
        );
    }

    proptest! {
        #[test]
        fn any_reply_is_read(reply in "(<tool_call>|</tool_call>|<function=f>|call:f\\{|[{}\\[\\]\":, a1é]{0,6}){0,20}") {
            let _ = calls(&reply);
        }
    }
}
