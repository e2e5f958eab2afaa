//! Jinja's filters on text and numbers, with Jinja's parameter names.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, State, Value};

use super::arguments::{bind, flag, integer, optional_integer, required, split, string};
use super::containers::PyDict;
use super::environment::add_filter;
use super::methods::{DictAttribute, dict_attribute};
use super::operators::{Number, int, printf, text_of};
use super::python_str::{capitalize, lines, padded, replace, strip, strip_end};
use super::values::{charge, error, type_name};

/// Registers the text and number filters.
pub(super) fn register(env: &mut Environment<'static>) {
    for (name, convert) in [
        ("upper", str::to_uppercase as fn(&str) -> String),
        ("lower", str::to_lowercase),
        ("capitalize", capitalize),
        ("title", |text| minijinja::filters::title(text.into())),
        ("e", escape),
        ("escape", escape),
        ("forceescape", escape),
        ("string", str::to_owned),
        ("safe", str::to_owned),
    ] {
        add_filter(env, name, move |state, args| {
            let [value] = bind(name, args, ["value"])?;
            let text = text_of(state, &required(name, "value", value)?)?;
            Ok(Value::from(convert(&text)))
        });
    }
    add_filter(env, "trim", |state, args| {
        let [value, chars] = bind("trim", args, ["value", "chars"])?;
        let text = text_of(state, &required("trim", "value", value)?)?;
        let chars = chars.filter(|chars| !chars.is_none());
        let chars = chars.as_ref().map(|chars| string("trim", chars)).transpose()?;
        Ok(Value::from(strip(&text, chars)))
    });
    add_filter(env, "replace", |state, args| {
        let [value, old, new, count] = bind("replace", args, ["s", "old", "new", "count"])?;
        let text = text_of(state, &required("replace", "s", value)?)?;
        let old = text_of(state, &required("replace", "old", old)?)?;
        let new = text_of(state, &required("replace", "new", new)?)?;
        let count = optional_integer(count)?.unwrap_or(-1);
        replace(state, &text, &old, &new, count)
    });
    add_filter(env, "center", |state, args| {
        let [value, width] = bind("center", args, ["value", "width"])?;
        let text = text_of(state, &required("center", "value", value)?)?;
        let width = optional_integer(width)?.unwrap_or(80);
        padded(state, &text, "center", width, ' ').map(Value::from)
    });
    add_filter(env, "indent", indent);
    add_filter(env, "truncate", truncate);
    add_filter(env, "wordcount", |state, args| {
        let [value] = bind("wordcount", args, ["s"])?;
        let text = text_of(state, &required("wordcount", "s", value)?)?;
        let words = text.split(|c: char| !(c.is_alphanumeric() || c == '_'));
        Ok(Value::from(words.filter(|word| !word.is_empty()).count()))
    });
    add_filter(env, "urlencode", |state, args| {
        let [value] = bind("urlencode", args, ["value"])?;
        let value = required("urlencode", "value", value)?;
        if value.as_object().is_some() {
            return Err(error(format!("cannot urlencode '{}'", type_name(&value))));
        }
        Ok(Value::from(url_quote(&text_of(state, &value)?)))
    });
    add_filter(env, "format", |state, args| {
        let (positional, keywords) = split(args);
        match positional.split_first() {
            Some((text, rest)) if keywords.is_empty() => printf(state, &text_of(state, text)?, rest),
            Some((text, [])) => {
                let named =
                    PyDict::from_pairs(keywords.into_iter().map(|(name, value)| (Value::from(name), value)))?;
                printf(state, &text_of(state, text)?, &[named])
            }
            _ => Err(error("can't handle positional and keyword arguments at the same time")),
        }
    });
    add_filter(env, "default", default);
    add_filter(env, "d", default);
    add_filter(env, "int", to_int);
    add_filter(env, "float", |_, args| {
        let [value, default] = bind("float", args, ["value", "default"])?;
        let value = required("float", "value", value)?;
        refuse_undefined("float", &value)?;
        let number = match Number::of(&value) {
            Some(number) => Some(number.as_f64()),
            None => value.as_str().and_then(parse_float),
        };
        Ok(number.map_or_else(|| default.unwrap_or_else(|| Value::from(0.0)), Value::from))
    });
    add_filter(env, "abs", |_, args| {
        let [value] = bind("abs", args, ["x"])?;
        let value = required("abs", "x", value)?;
        match Number::of(&value) {
            Some(Number::Int(number)) => {
                let magnitude = number.checked_abs();
                magnitude.map(int).ok_or_else(|| error("abs() of an integer this small"))
            }
            Some(Number::Float(number)) => Ok(Value::from(number.abs())),
            None => Err(error(format!("bad operand type for abs(): '{}'", type_name(&value)))),
        }
    });
    add_filter(env, "round", |_, args| {
        let [value, precision, method] = bind("round", args, ["value", "precision", "method"])?;
        let value = required("round", "value", value)?;
        let precision = precision.as_ref().map(integer).transpose()?;
        let precision = precision.map(|precision| i32::try_from(precision.clamp(-400, 400)).unwrap_or(0));
        let method = method.as_ref().map(|method| string("round", method)).transpose()?;
        let value = match Number::of(&value) {
            Some(Number::Int(number)) => int(number),
            Some(Number::Float(number)) => Value::from(number),
            None => return Err(error(format!("type {} has no rounding", type_name(&value)))),
        };
        minijinja::filters::round(value, precision, method, Kwargs::from_iter([] as [(&str, Value); 0]))
    });
    add_filter(env, "attr", |_, args| {
        let [value, name] = bind("attr", args, ["obj", "name"])?;
        let value = required("attr", "obj", value)?;
        let name = required("attr", "name", name)?;
        let name = string("attr", &name)?;
        if name.starts_with("__") {
            return Err(error(format!(
                "access to attribute '{name}' of '{}' object is unsafe",
                type_name(&value)
            )));
        }
        let is_key = matches!(dict_attribute(name), DictAttribute::Key);
        if is_key && value.downcast_object_ref::<PyDict>().is_some() {
            return Ok(Value::UNDEFINED);
        }
        value.get_attr(name)
    });
}

fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '\'' => escaped.push_str("&#39;"),
            '"' => escaped.push_str("&#34;"),
            _ => escaped.push(character),
        }
    }
    escaped
}

fn url_quote(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"_.-~/".contains(&byte) {
            quoted.push(char::from(byte));
        } else {
            quoted.push_str(&format!("%{byte:02X}"));
        }
    }
    quoted
}

fn indent(state: &State, args: &[Value]) -> Result<Value, Error> {
    let [value, width, first, blank] = bind("indent", args, ["s", "width", "first", "blank"])?;
    let value = required("indent", "s", value)?;
    let text = string("indent", &value)?;
    charge(state, text.len())?;
    let indention = match width {
        Some(width) if width.kind() == ValueKind::String => width.as_str().unwrap_or_default().to_owned(),
        Some(width) => match integer(&width)? {
            width @ ..=1000 => " ".repeat(usize::try_from(width).unwrap_or(0)),
            _ => return Err(error("indent() width is larger than 1000")),
        },
        None => " ".repeat(4),
    };
    let (first, blank) = (flag(first, false), flag(blank, false));
    // Jinja appends a newline so that a last empty line counts.
    let text = format!("{text}\n");
    let lines = lines(&text, false);
    charge(state, text.len() + indention.len() * lines.len())?;
    let mut indented = String::new();
    if first {
        indented.push_str(&indention);
    }
    for (index, line) in lines.iter().enumerate() {
        if index > 0 {
            indented.push('\n');
            if blank || !line.is_empty() {
                indented.push_str(&indention);
            }
        }
        indented.push_str(line);
    }
    Ok(Value::from(indented))
}

fn truncate(state: &State, args: &[Value]) -> Result<Value, Error> {
    let [value, length, kill_words, end, leeway] =
        bind("truncate", args, ["s", "length", "killwords", "end", "leeway"])?;
    let text = text_of(state, &required("truncate", "s", value)?)?;
    let end = end.map_or_else(|| Ok("...".to_owned()), |end| text_of(state, &end))?;
    let count = |value: Option<Value>, default: usize| {
        let value = optional_integer(value)?;
        Ok::<_, Error>(value.map_or(default, |value| usize::try_from(value).unwrap_or(0)))
    };
    let (length, leeway) = (count(length, 255)?, count(leeway, 5)?);
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(Value::from(text));
    }
    let Some(kept) = length.checked_sub(end.chars().count()) else {
        return Err(error("truncate() length is shorter than its end"));
    };
    let mut cut: String = text.chars().take(kept).collect();
    if !flag(kill_words, false)
        && let Some((head, _)) = cut.rsplit_once(' ')
    {
        cut = head.to_owned();
    }
    Ok(Value::from(cut + &end))
}

fn default(_: &State, args: &[Value]) -> Result<Value, Error> {
    let [value, default, boolean] = bind("default", args, ["value", "default_value", "boolean"])?;
    let value = value.unwrap_or_default();
    if value.is_undefined() || (flag(boolean, false) && !value.is_true()) {
        return Ok(default.unwrap_or_else(|| Value::from("")));
    }
    Ok(value)
}

fn refuse_undefined(filter: &str, value: &Value) -> Result<(), Error> {
    if value.is_undefined() {
        return Err(Error::new(
            minijinja::ErrorKind::UndefinedError,
            format!("the value passed to {filter} is undefined"),
        ));
    }
    Ok(())
}

fn to_int(_: &State, args: &[Value]) -> Result<Value, Error> {
    let [value, default, base] = bind("int", args, ["value", "default", "base"])?;
    let value = required("int", "value", value)?;
    refuse_undefined("int", &value)?;
    let default = default.unwrap_or_else(|| Value::from(0));
    let base = optional_integer(base)?.unwrap_or(10);
    let truncated = |number: f64| {
        let whole = number.trunc();
        (whole.abs() < 1e38).then_some(whole as i128)
    };
    let number = match Number::of(&value) {
        Some(Number::Int(number)) => Some(number),
        Some(Number::Float(number)) => truncated(number),
        None => value
            .as_str()
            .and_then(|text| parse_int(text, base).or_else(|| parse_float(text).and_then(truncated))),
    };
    Ok(number.map_or(default, int))
}

fn parse_int(text: &str, base: i64) -> Option<i128> {
    let text = strip(text, None);
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let prefix = match base {
        2 => ["0b", "0B"],
        8 => ["0o", "0O"],
        16 => ["0x", "0X"],
        _ => ["", ""],
    };
    let digits = prefix.iter().find_map(|prefix| digits.strip_prefix(prefix)).unwrap_or(digits);
    let base = u32::try_from(base).ok().filter(|base| (2..=36).contains(base))?;
    let grouped_well = !digits.starts_with('_') && !digits.ends_with('_') && !digits.contains("__");
    let digits = digits.replace('_', "");
    if !grouped_well || digits.starts_with(['+', '-']) {
        return None;
    }
    let number = i128::from_str_radix(&digits, base).ok()?;
    Some(if negative { -number } else { number })
}

fn parse_float(text: &str) -> Option<f64> {
    strip_end(strip(text, None), None).replace('_', "").parse().ok()
}
