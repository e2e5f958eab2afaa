//! Python literals as `ast.literal_eval` reads them, and calls whose arguments are such.

use serde_json::{Map, Number, Value};

use super::python::{decimal, is_word, repr, without_underscores};

/// Brackets within brackets that a literal may have.
const MAX_DEPTH: usize = 100;

/// Python's reserved words, which name neither functions nor arguments.
const KEYWORDS: [&str; 35] = [
    "False", "None", "True", "and", "as", "assert", "async", "await", "break", "class", "continue", "def",
    "del", "elif", "else", "except", "finally", "for", "from", "global", "if", "import", "in", "is",
    "lambda", "nonlocal", "not", "or", "pass", "raise", "return", "try", "while", "with", "yield",
];

/// `ast.literal_eval`.
pub(super) fn literal(text: &str) -> Option<Value> {
    let mut reader = Reader::new(text, false)?;
    reader.blank();
    let value = reader.tuple_or_value(None)?;
    reader.blank();
    reader.rest.is_empty().then_some(value)
}

/// A call with keyword arguments, `name.of.function(key=literal)`.
pub(super) type Call = (String, Map<String, Value>);

/// A list of calls, `[a(x=1), b()]`. `true`, `false` and `null` count as literals too, as templates write them.
pub(super) fn calls(text: &str) -> Option<Vec<Call>> {
    let mut reader = Reader::new(text, true)?;
    reader.brackets = 1;
    reader.take('[')?;
    let mut calls = Vec::new();
    reader.items(']', |reader| {
        calls.push(reader.call()?);
        Some(())
    })?;
    reader.blank();
    (reader.rest.is_empty() && !calls.is_empty()).then_some(calls)
}

/// Reads Python literals from the front of `rest`.
struct Reader<'a> {
    rest: &'a str,
    /// Open brackets: within any, line ends are blank.
    brackets: usize,
    json_names: bool,
}

impl<'a> Reader<'a> {
    /// `None` for the null character, which Python refuses anywhere.
    fn new(text: &'a str, json_names: bool) -> Option<Self> {
        (!text.contains('\0')).then_some(Self { rest: text, brackets: 0, json_names })
    }

    /// Skips blanks and comments. Outside of brackets a line end counts only where nothing follows, which the
    /// callers check.
    fn blank(&mut self) {
        loop {
            self.rest = self.rest.trim_start_matches([' ', '\t', '\x0c', '\n', '\r']);
            if !self.rest.starts_with('#') {
                return;
            }
            self.rest = self.rest.find('\n').map_or("", |end| &self.rest[end..]);
        }
    }

    /// Blanks that may come between two parts of an expression.
    fn gap(&mut self) {
        if self.brackets > 0 {
            self.blank();
        } else {
            self.rest = self.rest.trim_start_matches([' ', '\t', '\x0c']);
        }
    }

    fn take(&mut self, c: char) -> Option<()> {
        self.rest = self.rest.strip_prefix(c)?;
        Some(())
    }

    /// Items up to `close`, a comma after each but perhaps the last. Says whether there was a comma.
    fn items(&mut self, close: char, mut item: impl FnMut(&mut Self) -> Option<()>) -> Option<bool> {
        let mut commas = false;
        loop {
            self.gap();
            if self.take(close).is_some() {
                break;
            }
            item(self)?;
            self.gap();
            if self.take(',').is_some() {
                commas = true;
                // `(,)` and `[1,,]` fail at the item.
                continue;
            }
            self.take(close)?;
            break;
        }
        self.brackets = self.brackets.checked_sub(1)?;
        Some(commas)
    }

    /// One value, or values with commas between them, up to `close` or the end.
    fn tuple_or_value(&mut self, close: Option<char>) -> Option<Value> {
        let first = self.value()?;
        self.gap();
        if !self.rest.starts_with(',') {
            return Some(first);
        }
        let mut items = vec![first];
        while self.take(',').is_some() {
            self.gap();
            let at_end = match close {
                Some(close) => self.rest.starts_with(close),
                None => self.rest.is_empty() || self.rest.starts_with(['\n', '\r', '#']),
            };
            if at_end {
                break;
            }
            items.push(self.value()?);
            self.gap();
        }
        Some(Value::Array(items))
    }

    fn value(&mut self) -> Option<Value> {
        let first = self.rest.chars().next()?;
        match first {
            '[' | '(' | '{' => {
                self.take(first)?;
                self.brackets = self.brackets.checked_add(1).filter(|&depth| depth <= MAX_DEPTH)?;
                match first {
                    '[' => {
                        let mut items = Vec::new();
                        self.items(']', |reader| {
                            items.push(reader.value()?);
                            Some(())
                        })?;
                        Some(Value::Array(items))
                    }
                    '(' => {
                        let mut items = Vec::new();
                        let commas = self.items(')', |reader| {
                            items.push(reader.value()?);
                            Some(())
                        })?;
                        if items.len() == 1 && !commas { items.pop() } else { Some(Value::Array(items)) }
                    }
                    _ => {
                        let mut fields = Map::new();
                        self.items('}', |reader| {
                            let key = key(&reader.value()?)?;
                            reader.gap();
                            reader.take(':')?;
                            reader.gap();
                            fields.insert(key, reader.value()?);
                            Some(())
                        })?;
                        Some(Value::Object(fields))
                    }
                }
            }
            '+' | '-' => {
                self.take(first)?;
                self.gap();
                let number = self.number()?;
                if first == '-' { negative(&number) } else { Some(number) }
            }
            '0'..='9' | '.' => self.number(),
            '\'' | '"' => self.prefixed_strings(""),
            _ => {
                let name = self.name()?;
                match name {
                    "True" => Some(Value::Bool(true)),
                    "False" => Some(Value::Bool(false)),
                    "None" => Some(Value::Null),
                    "true" if self.json_names => Some(Value::Bool(true)),
                    "false" if self.json_names => Some(Value::Bool(false)),
                    "null" if self.json_names => Some(Value::Null),
                    _ if self.rest.starts_with(['\'', '"']) && is_text_prefix(name) => {
                        self.prefixed_strings(name)
                    }
                    _ => None,
                }
            }
        }
    }

    fn name(&mut self) -> Option<&'a str> {
        let end = self.rest.find(|c| !is_word(c)).unwrap_or(self.rest.len());
        let (name, rest) = self.rest.split_at(end);
        if name.is_empty() || name.starts_with(|c: char| c.is_numeric()) {
            return None;
        }
        self.rest = rest;
        Some(name)
    }

    fn number(&mut self) -> Option<Value> {
        let text = self.rest;
        let bytes = text.as_bytes();
        if let [b'0', base @ (b'x' | b'X' | b'o' | b'O' | b'b' | b'B'), ..] = bytes {
            let radix = match base.to_ascii_lowercase() {
                b'x' => 16,
                b'o' => 8,
                _ => 2,
            };
            let end = text.find(|c| !is_word(c)).unwrap_or(text.len());
            let digits = text.get(2..end)?;
            let digits = digits.strip_prefix('_').unwrap_or(digits);
            if digits.is_empty() || digits.ends_with('_') || digits.contains("__") {
                return None;
            }
            let number = u64::from_str_radix(&digits.replace('_', ""), radix).ok()?;
            self.rest = &text[end..];
            return Some(Value::from(number));
        }
        let mut end = 0;
        let mut float = false;
        while let Some(&byte) = bytes.get(end) {
            let exponent_sign = matches!(byte, b'+' | b'-')
                && end.checked_sub(1).and_then(|i| bytes.get(i)).is_some_and(|b| matches!(b, b'e' | b'E'));
            match byte {
                b'0'..=b'9' | b'_' => {}
                b'.' | b'e' | b'E' => float = true,
                _ if exponent_sign => {}
                _ => break,
            }
            end += 1;
        }
        let (digits, rest) = text.split_at(end);
        if rest.starts_with(is_word) {
            return None;
        }
        let plain = without_underscores(digits)?;
        let number = if float {
            Number::from_f64(plain.parse().ok()?).map(Value::Number)?
        } else {
            if plain.starts_with('0') && plain.bytes().any(|b| b != b'0') {
                return None;
            }
            decimal(&plain)?
        };
        self.rest = rest;
        Some(number)
    }

    /// A string and those that follow it, which Python joins.
    fn prefixed_strings(&mut self, prefix: &str) -> Option<Value> {
        let mut joined = self.string(prefix.eq_ignore_ascii_case("r"))?;
        loop {
            self.gap();
            let before = self.rest;
            let prefix = self.name().unwrap_or_default();
            if !self.rest.starts_with(['\'', '"']) {
                self.rest = before;
                return Some(Value::String(joined));
            }
            if !prefix.is_empty() && !is_text_prefix(prefix) {
                return None;
            }
            joined.push_str(&self.string(prefix.eq_ignore_ascii_case("r"))?);
        }
    }

    fn string(&mut self, raw: bool) -> Option<String> {
        let quote = self.rest.chars().next()?;
        let triple = [quote; 3].iter().collect::<String>();
        let long = self.rest.starts_with(&triple);
        self.rest = if long { self.rest.strip_prefix(&triple)? } else { self.rest.strip_prefix(quote)? };
        let mut out = String::new();
        loop {
            if long && let Some(rest) = self.rest.strip_prefix(&triple) {
                self.rest = rest;
                return Some(out);
            }
            let c = self.next_char()?;
            match c {
                '\\' if raw => {
                    out.push(c);
                    out.push(self.next_char()?);
                }
                '\\' => self.escape(&mut out)?,
                c if c == quote && !long => return Some(out),
                '\n' | '\r' if !long => return None,
                c => out.push(c),
            }
        }
    }

    fn next_char(&mut self) -> Option<char> {
        let mut chars = self.rest.chars();
        let c = chars.next()?;
        self.rest = chars.as_str();
        Some(c)
    }

    fn escape(&mut self, out: &mut String) -> Option<()> {
        let c = self.next_char()?;
        let digits = match c {
            '\n' => return Some(()),
            '\\' | '\'' | '"' => return push(out, c),
            'a' => return push(out, '\x07'),
            'b' => return push(out, '\x08'),
            'f' => return push(out, '\x0c'),
            'n' => return push(out, '\n'),
            'r' => return push(out, '\r'),
            't' => return push(out, '\t'),
            'v' => return push(out, '\x0b'),
            '0'..='7' => {
                let mut code = c.to_digit(8)?;
                for _ in 0..2 {
                    let Some(digit) = self.rest.chars().next().and_then(|c| c.to_digit(8)) else { break };
                    self.next_char()?;
                    code = code * 8 + digit;
                }
                return push(out, char::from_u32(code)?);
            }
            'x' => 2,
            'u' => 4,
            'U' => 8,
            'N' => return None,
            c => {
                out.extend(['\\', c]);
                return Some(());
            }
        };
        let hex = self.rest.get(..digits).filter(|hex| hex.bytes().all(|b| b.is_ascii_hexdigit()))?;
        self.rest = self.rest.get(digits..)?;
        push(out, char::from_u32(u32::from_str_radix(hex, 16).ok()?)?)
    }

    fn call(&mut self) -> Option<Call> {
        let mut name = self.identifier()?.to_owned();
        self.gap();
        while self.take('.').is_some() {
            self.gap();
            name.push('.');
            name.push_str(self.identifier()?);
            self.gap();
        }
        self.take('(')?;
        self.brackets = self.brackets.checked_add(1)?;
        let mut arguments = Map::new();
        self.items(')', |reader| {
            let key = reader.identifier()?.to_owned();
            reader.gap();
            reader.take('=')?;
            reader.gap();
            arguments.insert(key, reader.value()?);
            Some(())
        })?;
        Some((name, arguments))
    }

    fn identifier(&mut self) -> Option<&'a str> {
        self.name().filter(|name| !KEYWORDS.contains(name))
    }
}

fn push(out: &mut String, c: char) -> Option<()> {
    out.push(c);
    Some(())
}

fn is_text_prefix(name: &str) -> bool {
    name.eq_ignore_ascii_case("r") || name.eq_ignore_ascii_case("u")
}

fn negative(number: &Value) -> Option<Value> {
    match number.as_u64() {
        Some(value) => decimal(&format!("-{value}")),
        None => Number::from_f64(-number.as_f64()?).map(Value::Number),
    }
}

/// A dictionary's key as `json.dumps` writes it.
fn key(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Null | Value::Bool(_) => Some(value.to_string()),
        Value::Number(_) => Some(repr(value)),
        Value::Array(_) | Value::Object(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn literals_are_pythons() {
        for (text, value) in [
            ("1_000", json!(1000)),
            ("-0x1F", json!(-31)),
            (" 1.5e3 # a comment", json!(1500.0)),
            ("1, 2,", json!([1, 2])),
            ("()", json!([])),
            ("(1)", json!(1)),
            ("(1,)", json!([1])),
            ("{'a': True, 2: None, None: ()}", json!({"a": true, "2": null, "null": []})),
            (r#"'a\x41\u00e9\101\q' "b" r'\n'"#, json!("aA\u{e9}A\\qb\\n")),
            ("'''x\n'y'''", json!("x\n'y")),
            ("[1,\n 2]\n", json!([1, 2])),
        ] {
            assert_eq!(literal(text), Some(value), "{text}");
        }
        for text in [
            "007",
            "1_",
            "--1",
            "-True",
            "a",
            "true",
            "{1, 2}",
            "b'x'",
            "1j",
            "1e999",
            "'a\nb'",
            "'a",
            "[1,,2]",
            "(,)",
            "1 2",
            "'\\ud800'",
            "1\n2",
            "f'x'",
            "",
        ] {
            assert_eq!(literal(text), None, "{text}");
        }
    }

    #[test]
    fn deep_nesting_is_refused_and_not_a_crash() {
        let text = |depth| "[".repeat(depth) + &"]".repeat(depth);
        assert!(literal(&text(MAX_DEPTH)).is_some());
        assert_eq!(literal(&text(MAX_DEPTH + 1)), None);
        assert_eq!(literal(&text(1_000_000)), None);
    }

    proptest::proptest! {
        #[test]
        fn nothing_panics(text in r#"[\[\](){}'\",:=.\\#a-e0-9_ \nxé+-]{0,40}"#) {
            literal(&text);
            calls(&text);
        }
    }
}
