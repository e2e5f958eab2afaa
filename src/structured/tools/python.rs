//! What mlx-lm's parsers take from Python: JSON and numbers as it reads them, `str`, `shlex.split`.
//!
//! Where Python has values that JSON lacks (sets, bytes, complex numbers, infinities), the functions here answer
//! `None`, and the caller keeps the text: arguments are valid JSON whatever a model writes.

use serde_json::{Number, Value};

pub(super) use super::literal::{calls, literal};

/// `str.isspace` of one character.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// `str.strip`.
pub(super) fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// `\w`.
pub(super) fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// `json.loads`, without the numbers that JSON lacks.
pub(super) fn json(text: &str) -> Option<Value> {
    serde_json::from_str(text).ok()
}

/// `json.loads(text, strict=False)`: control characters may stand in strings.
pub(super) fn lenient_json(text: &str) -> Option<Value> {
    let mut escaped = String::with_capacity(text.len());
    let (mut in_string, mut after_backslash) = (false, false);
    for c in text.chars() {
        if in_string && c < ' ' {
            if after_backslash {
                return None;
            }
            escaped.push_str(&format!("\\u{:04x}", u32::from(c)));
            continue;
        }
        in_string ^= c == '"' && !after_backslash;
        after_backslash = in_string && c == '\\' && !after_backslash;
        escaped.push(c);
    }
    json(&escaped)
}

/// JSON, else a Python literal, else the text: the `_deserialize` of several mlx-lm parsers.
pub(super) fn json_or_literal(text: &str) -> Value {
    json(text).or_else(|| literal(text)).unwrap_or_else(|| Value::from(text))
}

/// `float`; infinities and NaN included.
pub(super) fn float(text: &str) -> Option<f64> {
    without_underscores(strip(text))?.parse().ok()
}

/// `int`, beyond 64 bits as the nearest double.
pub(super) fn integer(text: &str) -> Option<Value> {
    let digits = without_underscores(strip(text))?;
    let unsigned = digits.strip_prefix(['+', '-']).unwrap_or(&digits);
    if unsigned.is_empty() || !unsigned.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    decimal(&digits)
}

/// A whole number of this value; `None` for infinities and NaN.
pub(super) fn whole(value: f64) -> Option<Value> {
    if value.fract() == 0.0 && value.abs() < 9e18 {
        return Some(Value::from(value as i64));
    }
    Number::from_f64(value).map(Value::Number)
}

pub(super) fn decimal(digits: &str) -> Option<Value> {
    let digits = digits.strip_prefix('+').unwrap_or(digits);
    if let Ok(number) = digits.parse::<i64>() {
        return Some(Value::from(number));
    }
    if let Ok(number) = digits.parse::<u64>() {
        return Some(Value::from(number));
    }
    Number::from_f64(digits.parse().ok()?).map(Value::Number)
}

/// Python allows `_` between digits.
pub(super) fn without_underscores(text: &str) -> Option<String> {
    let bytes = text.as_bytes();
    let digit = |index: Option<usize>| index.and_then(|i| bytes.get(i)).is_some_and(u8::is_ascii_digit);
    let fine = bytes
        .iter()
        .enumerate()
        .all(|(i, &byte)| byte != b'_' || (digit(i.checked_sub(1)) && digit(i.checked_add(1))));
    fine.then(|| text.replace('_', ""))
}

/// `str(value)`.
pub(super) fn to_str(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        _ => repr(value),
    }
}

pub(super) fn repr(value: &Value) -> String {
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
            Some(float) => float_repr(float),
            None => number.to_string(),
        },
        Value::String(text) => string_repr(text),
        Value::Array(items) => format!("[{}]", items.iter().map(repr).collect::<Vec<_>>().join(", ")),
        Value::Object(fields) => {
            let fields: Vec<String> =
                fields.iter().map(|(key, value)| format!("{}: {}", string_repr(key), repr(value))).collect();
            format!("{{{}}}", fields.join(", "))
        }
    }
}

/// Shortest digits, in Python's choice between the two notations.
fn float_repr(value: f64) -> String {
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if value == 0.0 || (-4..16).contains(&exponent) {
        let plain = value.to_string();
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
}

fn string_repr(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if c < ' ' || c == '\x7f' => out.push_str(&format!("\\x{:02x}", u32::from(c))),
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

/// `shlex.split`; `None` when a quotation or an escape does not end.
pub(super) fn shell_words(text: &str) -> Option<Vec<String>> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            ' ' | '\t' | '\r' | '\n' => words.extend(word.take()),
            '\'' => {
                let word = word.get_or_insert_default();
                loop {
                    match chars.next()? {
                        '\'' => break,
                        c => word.push(c),
                    }
                }
            }
            '"' => {
                let word = word.get_or_insert_default();
                loop {
                    match chars.next()? {
                        '"' => break,
                        '\\' => {
                            let c = chars.next()?;
                            if c != '"' && c != '\\' {
                                word.push('\\');
                            }
                            word.push(c);
                        }
                        c => word.push(c),
                    }
                }
            }
            '\\' => word.get_or_insert_default().push(chars.next()?),
            c => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    Some(words)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn str_is_pythons() {
        let value = json!({"a": [1, 2.0, 1e22, 1e-7, null, true, "it's", "\"'\n"]});
        assert_eq!(to_str(&value), r#"{'a': [1, 2.0, 1e+22, 1e-07, None, True, "it's", '"\'\n']}"#);
    }

    #[test]
    fn shell_words_are_shlexs() {
        assert_eq!(shell_words(r#"a='b c' d="e\"f\g" h\ i"#).unwrap(), ["a=b c", r#"d=e"f\g"#, "h i"]);
        assert_eq!(shell_words("a 'b"), None);
        assert_eq!(shell_words("''").unwrap(), [""]);
    }

    proptest::proptest! {
        #[test]
        fn nothing_panics(text in r#"[\[\](){}'\",:=.\\#a-e0-9_ \nxé+-]{0,40}"#) {
            shell_words(&text);
            lenient_json(&text);
            integer(&text);
        }
    }
}
