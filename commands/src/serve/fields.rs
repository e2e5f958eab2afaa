//! Reads the fields of a request's body: numbers as numbers, null as absent, and words for what is wrong.

use serde_json::{Map, Number as JsonNumber, Value};

use super::error::ApiError;
use crate::args::range::{Number, Range};

/// A number as JSON carries it.
pub trait Wire: Number {
    /// The value, if the number is one of this kind.
    fn from_json(number: &JsonNumber) -> Option<Self>;
}

impl Wire for f64 {
    fn from_json(number: &JsonNumber) -> Option<Self> {
        number.as_f64()
    }
}

impl Wire for f32 {
    fn from_json(number: &JsonNumber) -> Option<Self> {
        number.as_f64().map(|number| number as Self)
    }
}

/// Whole numbers, also where they are written with a fraction of zero.
fn whole(number: &JsonNumber) -> Option<i128> {
    let integer = number.as_i64().map(i128::from).or_else(|| number.as_u64().map(i128::from));
    integer.or_else(|| number.as_f64().filter(|n| n.fract() == 0.0 && n.abs() < 1e15).map(|n| n as i128))
}

impl Wire for u64 {
    fn from_json(number: &JsonNumber) -> Option<Self> {
        whole(number)?.try_into().ok()
    }
}

impl Wire for usize {
    fn from_json(number: &JsonNumber) -> Option<Self> {
        whole(number)?.try_into().ok()
    }
}

impl Wire for i32 {
    fn from_json(number: &JsonNumber) -> Option<Self> {
        whole(number)?.try_into().ok()
    }
}

/// The fields of an object, with the path to it for messages.
#[derive(Clone, Copy)]
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    at: &'a str,
}

impl<'a> Fields<'a> {
    /// The fields of a whole body.
    pub fn new(map: &'a Map<String, Value>) -> Self {
        Self { map, at: "" }
    }

    /// The fields of an object inside a body, which `at` leads to.
    pub fn inside(map: &'a Map<String, Value>, at: &'a str) -> Self {
        Self { map, at }
    }

    /// A field that is there and not null.
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// An error about a field.
    pub fn wrong(&self, name: &str, problem: impl std::fmt::Display) -> ApiError {
        match self.at {
            "" => ApiError::field(name, problem),
            at => ApiError::field(&format!("{at}.{name}"), problem),
        }
    }

    fn typed<T>(
        &self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        self.get(name)
            .map(|value| read(value).ok_or_else(|| self.wrong(name, format!("must be {expected}"))))
            .transpose()
    }

    /// A truth value.
    pub fn boolean(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.typed(name, "true or false", Value::as_bool)
    }

    /// A text.
    pub fn text(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.typed(name, "a text", Value::as_str)
    }

    /// A list.
    pub fn list(&self, name: &str) -> Result<Option<&'a Vec<Value>>, ApiError> {
        self.typed(name, "a list", Value::as_array)
    }

    /// An object.
    pub fn object(&self, name: &str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        self.typed(name, "an object", Value::as_object)
    }

    /// A number inside a range; a truth value is none.
    pub fn number<T: Wire>(&self, name: &str, range: Range<T>) -> Result<Option<T>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let number = match value {
            Value::Number(number) => T::from_json(number),
            _ => None,
        };
        let number = number.ok_or_else(|| self.wrong(name, range.expected()))?;
        range.check(number).map(Some).map_err(|problem| self.wrong(name, problem))
    }

    /// Refuses fields beside these: where ignoring one would change what is asked.
    ///
    /// # Errors
    /// There is another that is not null.
    pub fn only(&self, known: &[&str]) -> Result<(), ApiError> {
        let unknown = |(name, value): &(&String, &Value)| !known.contains(&name.as_str()) && !value.is_null();
        match self.map.iter().find(unknown) {
            Some((name, _)) => Err(self.wrong(name, format!("is not known; there are {}", known.join(", ")))),
            None => Ok(()),
        }
    }

    /// Refuses a field that a client may not set.
    pub fn refuse(&self, name: &str, why: &str) -> Result<(), ApiError> {
        match self.get(name) {
            Some(_) => Err(self.wrong(name, why)),
            None => Ok(()),
        }
    }
}

/// The fields of a value that must be an object.
pub fn object<'a>(value: &'a Value, at: &str) -> Result<&'a Map<String, Value>, ApiError> {
    value.as_object().ok_or_else(|| ApiError::field(at, "must be an object"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::args::range;

    fn map(value: Value) -> Map<String, Value> {
        value.as_object().unwrap().clone()
    }

    #[test]
    fn numbers_are_numbers() {
        let body = map(json!({"a": 0, "b": true, "c": "1", "d": 2.0, "e": 1.5, "f": null, "g": 9, "h": -1}));
        let fields = Fields::new(&body);
        assert_eq!(fields.number("a", range::TEMPERATURE).unwrap(), Some(0.0));
        assert_eq!(fields.number("a", range::XTC_PROBABILITY).unwrap(), Some(0.0));
        assert_eq!(fields.number("d", range::MAX_TOKENS).unwrap(), Some(2));
        assert_eq!(fields.number("f", range::MAX_TOKENS).unwrap(), None);
        let message = |name: &str| fields.number(name, range::MAX_TOKENS).unwrap_err().message;
        assert_eq!(message("b"), "`b` must be a whole number in [1, 10000000]");
        assert_eq!(message("c"), "`c` must be a whole number in [1, 10000000]");
        assert_eq!(message("e"), "`e` must be a whole number in [1, 10000000]");
        assert_eq!(message("a"), "`a` must be in [1, 10000000]");
        assert!(fields.number("h", range::SEED).is_err());
        assert_eq!(fields.number("g", range::TEMPERATURE).unwrap_err().message, "`g` must be in [0, 5]");
    }

    #[test]
    fn errors_name_the_path() {
        let body = map(json!({"include_usage": 1}));
        let error = Fields::inside(&body, "stream_options").boolean("include_usage").unwrap_err();
        assert_eq!(error.param.as_deref(), Some("stream_options.include_usage"));
        assert_eq!(error.message, "`stream_options.include_usage` must be true or false");
    }
}
