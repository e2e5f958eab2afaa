//! JSON laid out as Python's `json.dump(value, file, indent=4)` lays it out: the files that mlx-lm writes.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

const INDENT: &[u8] = b"    ";

/// Text of a JSON value with an indent of four: floats as Python's `repr`, other than ASCII escaped.
///
/// # Errors
/// When the value has no JSON form (a map whose keys are not strings).
pub fn python_json(value: &impl Serialize) -> Result<Vec<u8>, serde_json::Error> {
    let mut text = Vec::new();
    let formatter = PythonFormatter { pretty: PrettyFormatter::with_indent(INDENT) };
    value.serialize(&mut Serializer::with_formatter(&mut text, formatter))?;
    Ok(text)
}

struct PythonFormatter {
    pretty: PrettyFormatter<'static>,
}

macro_rules! as_pretty {
    ($($name:ident($($argument:ident: $kind:ty),*);)*) => { $(
        fn $name<W: ?Sized + Write>(&mut self, writer: &mut W $(, $argument: $kind)*) -> io::Result<()> {
            self.pretty.$name(writer $(, $argument)*)
        }
    )* };
}

impl Formatter for PythonFormatter {
    as_pretty! {
        begin_array();
        end_array();
        begin_array_value(first: bool);
        end_array_value();
        begin_object();
        end_object();
        begin_object_key(first: bool);
        begin_object_value();
        end_object_value();
    }

    fn write_f64<W: ?Sized + Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        writer.write_all(float_repr(value).as_bytes())
    }

    fn write_string_fragment<W: ?Sized + Write>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()> {
        let mut units = [0; 2];
        for character in fragment.chars() {
            // serde_json escapes control characters itself, except DEL, which Python leaves as well.
            if character.is_ascii() {
                writer.write_all(&[character as u8])?;
            } else {
                for unit in character.encode_utf16(&mut units) {
                    write!(writer, "\\u{unit:04x}")?;
                }
            }
        }
        Ok(())
    }
}

/// A float as Python's `repr` writes it.
pub fn float_repr(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if value == 0.0 || (-4..16).contains(&exponent) {
        let mut text = format!("{value}");
        if !text.contains('.') {
            text.push_str(".0");
        }
        return text;
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.unsigned_abs())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn files_look_as_python_writes_them() {
        let value = json!({"a": [], "b": {}, "c": [1, -2.0, 1e-6, true, null], "ü\"\n": {"x": "🙂\u{7f}"}});
        let expected = "{\n    \"a\": [],\n    \"b\": {},\n    \"c\": [\n        1,\n        -2.0,\n        1e-06,\n        \
                        true,\n        null\n    ],\n    \"\\u00fc\\\"\\n\": {\n        \
                        \"x\": \"\\ud83d\\ude42\u{7f}\"\n    }\n}";
        assert_eq!(String::from_utf8(python_json(&value).unwrap()).unwrap(), expected);
    }
}
