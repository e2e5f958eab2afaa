//! `json.dumps` and `json.loads` as Python's json module does them: the `tojson` and `fromjson` filters.

use std::fmt::Write;

use minijinja::value::ValueKind;
use minijinja::{Error, State, Value};

use super::arguments::{bind, flag, required};
use super::comparisons;
use super::containers::{PyDict, PyGroup, PySeq};
use super::python_repr::float_repr;
use super::python_sort;
use super::values::{self, charge, error, type_name};

/// How `json.dumps` lays out its output.
#[derive(Debug, Clone)]
struct Layout {
    ensure_ascii: bool,
    /// The text of one level of indentation; `None` keeps everything on one line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

/// The `tojson` filter: `json.dumps(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(state: &State, args: &[Value]) -> Result<Value, Error> {
    let [value, ensure_ascii, indent, separators, sort_keys] =
        bind("tojson", args, ["x", "ensure_ascii", "indent", "separators", "sort_keys"])?;
    let value = required("tojson", "x", value)?;
    let indent = match indent {
        Some(indent) if !indent.is_none() => Some(indent_text(&indent)?),
        _ => None,
    };
    let (item_separator, key_separator) = match separators {
        Some(separators) if !separators.is_none() => separator_pair(state, &separators)?,
        _ if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        _ => (", ".to_owned(), ": ".to_owned()),
    };
    let layout = Layout {
        ensure_ascii: flag(ensure_ascii, false),
        indent,
        item_separator,
        key_separator,
        sort_keys: flag(sort_keys, false),
    };
    let mut writer = Writer { state, layout: &layout, out: String::new(), charged: 0 };
    writer.value(&value, 0)?;
    Ok(Value::from(writer.out))
}

fn indent_text(indent: &Value) -> Result<String, Error> {
    if let Some(text) = indent.as_str() {
        return Ok(text.to_owned());
    }
    let width = super::arguments::integer(indent)?;
    if width > 1000 {
        return Err(error("tojson() indent is larger than 1000"));
    }
    Ok(" ".repeat(usize::try_from(width).unwrap_or(0)))
}

fn separator_pair(state: &State, separators: &Value) -> Result<(String, String), Error> {
    let parts = values::iterate(state, separators)?;
    match parts.as_slice() {
        [item, key] => match (item.as_str(), key.as_str()) {
            (Some(item), Some(key)) => Ok((item.to_owned(), key.to_owned())),
            _ => Err(error("tojson() separators must be strings")),
        },
        _ => Err(error("tojson() separators must be a pair of strings (between items, after keys)")),
    }
}

struct Writer<'a, 'template, 'env> {
    state: &'a State<'template, 'env>,
    layout: &'a Layout,
    out: String,
    charged: usize,
}

impl Writer<'_, '_, '_> {
    /// Serialising costs four times as much as copying.
    fn pay(&mut self) -> Result<(), Error> {
        if self.out.len() - self.charged >= 256 {
            charge(self.state, (self.out.len() - self.charged) * 4)?;
            self.charged = self.out.len();
        }
        Ok(())
    }

    fn value(&mut self, value: &Value, level: usize) -> Result<(), Error> {
        self.pay()?;
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            _ => {
                if let Some(seq) = value.downcast_object_ref::<PySeq>() {
                    return self.array(&seq.items, level);
                }
                if let Some(group) = value.downcast_object_ref::<PyGroup>() {
                    return self.array(&[group.grouper.clone(), group.list.clone()], level);
                }
                if let Some(dict) = value.downcast_object_ref::<PyDict>() {
                    return self.object(dict, level);
                }
                return Err(error(format!("Object of type {} is not JSON serializable", type_name(value))));
            }
        }
        Ok(())
    }

    fn array(&mut self, items: &[Value], level: usize) -> Result<(), Error> {
        if items.is_empty() {
            self.out.push_str("[]");
            return Ok(());
        }
        self.out.push('[');
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                self.out.push_str(&self.layout.item_separator);
            }
            self.line(level + 1);
            self.value(item, level + 1)?;
        }
        self.line(level);
        self.out.push(']');
        Ok(())
    }

    fn object(&mut self, dict: &PyDict, level: usize) -> Result<(), Error> {
        let mut entries = dict.entries().to_vec();
        if entries.is_empty() {
            self.out.push_str("{}");
            return Ok(());
        }
        if self.layout.sort_keys {
            entries =
                python_sort::merge_sort(entries, &mut |a, b| comparisons::less_than(self.state, &a.0, &b.0))?;
        }
        self.out.push('{');
        for (index, (key, value)) in entries.iter().enumerate() {
            if index > 0 {
                self.out.push_str(&self.layout.item_separator);
            }
            self.line(level + 1);
            self.key(key)?;
            self.out.push_str(&self.layout.key_separator);
            self.value(value, level + 1)?;
        }
        self.line(level);
        self.out.push('}');
        Ok(())
    }

    fn key(&mut self, key: &Value) -> Result<(), Error> {
        match key.kind() {
            ValueKind::String => self.string(key.as_str().unwrap_or_default()),
            ValueKind::None => self.string("null"),
            ValueKind::Bool => self.string(if key.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.string(&number(key)),
            _ => {
                return Err(error(format!(
                    "keys must be str, int, float, bool or None, not {}",
                    type_name(key)
                )));
            }
        }
        Ok(())
    }

    fn line(&mut self, level: usize) {
        if let Some(indent) = &self.layout.indent {
            self.out.push('\n');
            for _ in 0..level {
                self.out.push_str(indent);
            }
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for character in text.chars() {
            match character {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                '\0'..'\u{20}' => self.escape(character),
                '\u{7f}'.. if self.layout.ensure_ascii => self.escape(character),
                _ => self.out.push(character),
            }
        }
        self.out.push('"');
    }

    fn escape(&mut self, character: char) {
        for unit in character.encode_utf16(&mut [0; 2]) {
            // Writing to a String cannot fail.
            let _ = write!(self.out, "\\u{unit:04x}");
        }
    }
}

fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(number) if !value.is_integer() => {
            if number.is_nan() {
                "NaN".to_owned()
            } else if number.is_infinite() {
                if number > 0.0 { "Infinity" } else { "-Infinity" }.to_owned()
            } else {
                float_repr(number)
            }
        }
        _ => value.to_string(),
    }
}

/// The `fromjson` filter: `json.loads(x)`.
pub(super) fn fromjson(state: &State, args: &[Value]) -> Result<Value, Error> {
    let [value] = bind("fromjson", args, ["x"])?;
    let value = required("fromjson", "x", value)?;
    let Some(text) = value.as_str() else {
        return Err(error(format!("the JSON object must be str, not {}", type_name(&value))));
    };
    charge(state, text.len().saturating_mul(4))?;
    let json = serde_json::from_str(text)
        .map_err(|cause| error(format!("cannot parse {} as JSON: {cause}", excerpt(text))))?;
    values::from_json(&json)
}

fn excerpt(text: &str) -> String {
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{:?}...", &text[..end]),
        None => format!("{text:?}"),
    }
}
