//! `str()` and `repr()` as Python writes them.

use std::fmt::{self, Write};

use minijinja::value::ValueKind;
use minijinja::{Error, Value};

use super::containers::{PyDict, PyGroup, PyRange, PySeq, PyView, SeqKind};
use super::values::{error, is_namespace};
pub(super) use crate::checkpoint::json_writer::float_repr;

/// The longest text that one value may print as. A list may hold another many times over, so a small value can have
/// an endless repr.
const MAX_TEXT: usize = 4 << 20;

/// Passes text on up to a number of bytes, then fails.
struct Bounded<'a> {
    out: &'a mut dyn Write,
    left: usize,
}

impl Write for Bounded<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.left = self.left.checked_sub(text.len()).ok_or(fmt::Error)?;
        self.out.write_str(text)
    }
}

/// `str(value)`: strings as they are, undefined as nothing, everything else as its repr.
pub(super) fn to_str(value: &Value) -> Result<String, Error> {
    let mut text = String::new();
    write_str(&mut text, value).map_err(|_| error("a value prints as too long a text"))?;
    Ok(text)
}

/// Writes `str(value)`; fails when that is too long.
pub(super) fn write_str(out: &mut dyn Write, value: &Value) -> fmt::Result {
    match value.kind() {
        ValueKind::Undefined => Ok(()),
        ValueKind::String => out.write_str(value.as_str().unwrap_or_default()),
        _ => write_repr(out, value),
    }
}

/// Writes `repr(value)`; fails when that is too long.
pub(super) fn write_repr(out: &mut dyn Write, value: &Value) -> fmt::Result {
    write_value(&mut Bounded { out, left: MAX_TEXT }, value)
}

/// Writes `repr(value)` for a formatter, where failing means a panic: what is too long is cut off.
pub(super) fn render(f: &mut fmt::Formatter<'_>, value: &Value) -> fmt::Result {
    match write_repr(f, value) {
        Ok(()) => Ok(()),
        Err(fmt::Error) => f.write_str("..."),
    }
}

fn write_value(out: &mut dyn Write, value: &Value) -> fmt::Result {
    match value.kind() {
        ValueKind::Undefined => out.write_str("Undefined"),
        ValueKind::None => out.write_str("None"),
        ValueKind::Bool => out.write_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::String => write_quoted(out, value.as_str().unwrap_or_default()),
        ValueKind::Number => match f64::try_from(value.clone()) {
            Ok(number) if !value.is_integer() => out.write_str(&float_repr(number)),
            _ => write!(out, "{value}"),
        },
        _ => write_object(out, value),
    }
}

fn write_object(out: &mut dyn Write, value: &Value) -> fmt::Result {
    if let Some(seq) = value.downcast_object_ref::<PySeq>() {
        return match seq.kind {
            SeqKind::List => write_items(out, "[", &seq.items, "]"),
            SeqKind::Tuple if seq.items.len() == 1 => write_items(out, "(", &seq.items, ",)"),
            SeqKind::Tuple => write_items(out, "(", &seq.items, ")"),
        };
    }
    if let Some(dict) = value.downcast_object_ref::<PyDict>() {
        out.write_char('{')?;
        for (index, (key, value)) in dict.entries().iter().enumerate() {
            if index > 0 {
                out.write_str(", ")?;
            }
            write_value(out, key)?;
            out.write_str(": ")?;
            write_value(out, value)?;
        }
        return out.write_char('}');
    }
    if let Some(view) = value.downcast_object_ref::<PyView>() {
        out.write_str(view.kind.type_name())?;
        return write_items(out, "([", &view.items, "])");
    }
    if let Some(range) = value.downcast_object_ref::<PyRange>() {
        return match range.step {
            1 => write!(out, "range({}, {})", range.start, range.stop),
            step => write!(out, "range({}, {}, {step})", range.start, range.stop),
        };
    }
    if let Some(group) = value.downcast_object_ref::<PyGroup>() {
        let halves = [group.grouper.clone(), group.list.clone()];
        return write_items(out, "(", &halves, ")");
    }
    if is_namespace(value) {
        // Its attributes cannot hold a namespace, so this ends.
        out.write_str("<Namespace {")?;
        for (index, key) in value.try_iter().into_iter().flatten().enumerate() {
            if index > 0 {
                out.write_str(", ")?;
            }
            write_value(out, &key)?;
            out.write_str(": ")?;
            write_value(out, &value.get_item(&key).unwrap_or_default())?;
        }
        return out.write_str("}>");
    }
    if value.as_object().is_some_and(|object| object.type_name().ends_with("::BoxedFunction")) {
        return out.write_str("<function>");
    }
    write!(out, "{value}")
}

fn write_items(out: &mut dyn Write, open: &str, items: &[Value], close: &str) -> fmt::Result {
    out.write_str(open)?;
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            out.write_str(", ")?;
        }
        write_value(out, item)?;
    }
    out.write_str(close)
}

fn write_quoted(out: &mut dyn Write, text: &str) -> fmt::Result {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.write_char(quote)?;
    for character in text.chars() {
        match character {
            '\\' => out.write_str("\\\\")?,
            '\n' => out.write_str("\\n")?,
            '\r' => out.write_str("\\r")?,
            '\t' => out.write_str("\\t")?,
            _ if character == quote => write!(out, "\\{character}")?,
            _ if is_printable(character) => out.write_char(character)?,
            _ => match u32::from(character) {
                code @ ..=0xff => write!(out, "\\x{code:02x}")?,
                code @ ..=0xffff => write!(out, "\\u{code:04x}")?,
                code => write!(out, "\\U{code:08x}")?,
            },
        }
    }
    out.write_char(quote)
}

/// Python's `str.isprintable` for one character.
///
/// The standard library's debug escapes cover the same Unicode categories, but for combining marks at the start of
/// a string; hence the letter before.
pub(super) fn is_printable(character: char) -> bool {
    if character.is_ascii() {
        return !character.is_ascii_control();
    }
    let mut probe = String::from("a");
    probe.push(character);
    probe.escape_debug().count() == 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_print_as_python_prints_them() {
        for (value, expected) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.25e100, "1.25e+100"),
            (123456789.125, "123456789.125"),
            (f64::NAN, "nan"),
            (f64::NEG_INFINITY, "-inf"),
            (5e-324, "5e-324"),
        ] {
            assert_eq!(float_repr(value), expected);
        }
    }

    #[test]
    fn strings_are_quoted_as_python_quotes_them() {
        for (text, expected) in [
            ("a", "'a'"),
            ("it's", "\"it's\""),
            ("it's \"x\"", "'it\\'s \"x\"'"),
            ("a\nb\\\t", "'a\\nb\\\\\\t'"),
            ("\u{0}\u{7f}\u{a0}", "'\\x00\\x7f\\xa0'"),
            ("\u{200b}\u{1f600}é", "'\\u200b\u{1f600}é'"),
            ("e\u{301}", "'e\u{301}'"),
            ("\u{e0001}", "'\\U000e0001'"),
        ] {
            let mut repr = String::new();
            write_repr(&mut repr, &Value::from(text)).unwrap();
            assert_eq!(repr, expected);
        }
    }
}
