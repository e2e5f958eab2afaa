//! JSON as Python's `json.load` reads it: with `NaN`, `Infinity` and `-Infinity`.
//!
//! `serde_json` has no value for them, so they are kept in the form that transformers writes into newer
//! configs, `{"__float__": "Infinity"}`; [`config_value`](super::config_value) turns that into a float.

use std::path::Path;

use serde_json::{Map, Value};

use super::error::{CheckpointError, shown_message};

/// Key of a tagged float (mlx-lm `utils.py`, `_FLOAT_TAG_KEY`).
pub(super) const FLOAT_TAG: &str = "__float__";
const LARGEST_FILE: u64 = 256 << 20;

/// The float that an object `{"__float__": …}` stands for.
pub(super) fn tagged_float(object: &Map<String, Value>) -> Option<f64> {
    if object.len() != 1 {
        return None;
    }
    match object.get(FLOAT_TAG)?.as_str()? {
        "Infinity" => Some(f64::INFINITY),
        "-Infinity" => Some(f64::NEG_INFINITY),
        "NaN" => Some(f64::NAN),
        _ => None,
    }
}

/// Parses JSON text, non-finite numbers included.
///
/// # Errors
/// The parser's words, on one line.
pub(super) fn parse(text: &[u8]) -> Result<Value, String> {
    serde_json::from_slice(text)
        .or_else(|error| match tag_floats(text) {
            Some(tagged) => serde_json::from_slice(&tagged),
            None => Err(error),
        })
        .map_err(|error| problem(&error))
}

/// What is wrong with a text that is not JSON, and where, in words for people who did not write the parser.
pub fn problem(error: &serde_json::Error) -> String {
    let place = format!("line {}, column {}", error.line(), error.column());
    if error.is_eof() {
        return format!("not valid JSON: it breaks off at {place}");
    }
    let said = error.to_string();
    // What is left helps: "expected `,` or `}`", "trailing characters", "key must be a string".
    match said.split(" at line ").next().filter(|said| !["expected ident", "expected value"].contains(said)) {
        Some(said) => format!("not valid JSON: {} at {place}", shown_message(said)),
        None => format!("not valid JSON at {place}"),
    }
}

/// The text with bare non-finite numbers tagged; `None` when it has none.
fn tag_floats(text: &[u8]) -> Option<Vec<u8>> {
    let mut tagged = Vec::with_capacity(text.len() + 64);
    let mut rest = text;
    let mut found = false;
    while let Some(&byte) = rest.first() {
        let token = match byte {
            b'"' => &rest[..string_length(rest)],
            _ => [b"-Infinity".as_slice(), b"Infinity", b"NaN"]
                .into_iter()
                .find(|name| rest.starts_with(name))
                .unwrap_or(&rest[..1]),
        };
        if token.len() > 1 && byte != b'"' {
            found = true;
            tagged
                .extend(format!("{{\"{FLOAT_TAG}\":\"").bytes().chain(token.iter().copied()).chain(*b"\"}"));
        } else {
            tagged.extend(token);
        }
        rest = &rest[token.len()..];
    }
    found.then_some(tagged)
}

/// Bytes of the string that `text` begins with, quotes included.
fn string_length(text: &[u8]) -> usize {
    let mut escaped = false;
    for (at, &byte) in text.iter().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// The bytes of a JSON file; `None` when there is no such file.
///
/// # Errors
/// When it cannot be read, is no regular file, or is absurdly large.
pub(super) fn read_bytes(path: &Path) -> Result<Option<Vec<u8>>, CheckpointError> {
    let unreadable = |cause| CheckpointError::Read { file: path.to_owned(), cause };
    let metadata = match std::fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        metadata => metadata.map_err(unreadable)?,
    };
    if !metadata.is_file() {
        return Err(CheckpointError::NotAFile { file: path.to_owned() });
    }
    if metadata.len() > LARGEST_FILE {
        let (file, size) = (path.to_owned(), metadata.len());
        return Err(CheckpointError::JsonTooLarge { file, size, limit: LARGEST_FILE });
    }
    std::fs::read(path).map(Some).map_err(unreadable)
}

/// Reads and parses a JSON file; `None` when there is no such file.
///
/// # Errors
/// When it cannot be read or is not JSON; names the file.
pub(super) fn read(path: &Path) -> Result<Option<Value>, CheckpointError> {
    let Some(text) = read_bytes(path)? else { return Ok(None) };
    let value = parse(&text).map_err(|message| CheckpointError::Json { file: path.to_owned(), message })?;
    Ok(Some(value))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn bare_non_finite_numbers_are_tagged() {
        let value = parse(br#"{"limit":[0.0,Infinity],"low":-Infinity,"n":NaN}"#).unwrap();
        let expected = json!({
            "limit": [0.0, {"__float__": "Infinity"}],
            "low": {"__float__": "-Infinity"},
            "n": {"__float__": "NaN"},
        });
        assert_eq!(value, expected);
    }

    #[test]
    fn strings_keep_their_words() {
        let value = parse(br#"{"a":"NaN \" Infinity","b":NaN,"Infinity":"\\"}"#).unwrap();
        assert_eq!(value["a"], "NaN \" Infinity");
        assert_eq!(value["Infinity"], "\\");
    }

    #[test]
    fn problems_are_said_in_words_and_with_their_place() {
        let said = |text: &str| problem(&serde_json::from_str::<Value>(text).unwrap_err());
        assert_eq!(said("not"), "not valid JSON at line 1, column 2");
        assert_eq!(said("{\n  \"a\": ,}"), "not valid JSON at line 2, column 8");
        assert_eq!(said("{\"a\": 1"), "not valid JSON: it breaks off at line 1, column 7");
        assert_eq!(said("{\"a\" 1}"), "not valid JSON: expected `:` at line 1, column 6");
    }

    #[test]
    fn other_words_stay_errors() {
        for text in ["nan", "{\"a\":Inf}", "{\"a\":--Infinity}", "{\"a\": NaN", "\"NaN", "", "\\"] {
            assert!(parse(text.as_bytes()).is_err(), "{text}");
        }
    }

    #[test]
    fn tags_are_read() {
        let float = |value: Value| value.as_object().and_then(tagged_float);
        assert_eq!(float(json!({"__float__": "-Infinity"})), Some(f64::NEG_INFINITY));
        assert!(float(json!({"__float__": "NaN"})).unwrap().is_nan());
        assert_eq!(float(json!({"__float__": "inf"})), None);
        assert_eq!(float(json!({"__float__": "NaN", "b": 1})), None);
    }
}
