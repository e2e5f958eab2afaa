//! Deserializes a family's argument struct from a config value, with errors that name the field.
//!
//! Differs from `serde_json`'s own: tagged floats (`{"__float__": "Infinity"}`) are floats, a whole number
//! written as a float (`4096.0`) passes for an integer as it does in Python, and an error carries the path
//! of the field it is about.

use std::fmt;

use serde::de::{self, DeserializeOwned, DeserializeSeed, IntoDeserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value, map, value};

use super::error::{shown_message, shown_name};
use super::json::tagged_float;

/// A config field that is missing or of the wrong kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldError {
    /// Names from the outermost field to the one at fault; a number for an element of a list.
    pub path: Vec<String>,
    /// What is wrong with it.
    pub message: String,
}

impl FieldError {
    /// An error about the field `path` (dots between nested names).
    pub fn new(path: &str, message: impl Into<String>) -> Self {
        Self { path: path.split('.').map(str::to_owned).collect(), message: message.into() }
    }

    fn within(mut self, name: &str) -> Self {
        self.path.insert(0, name.to_owned());
        self
    }
}

impl fmt::Display for FieldError {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        if !self.path.is_empty() {
            write!(formatter, "field `{}`: ", shown_name(&self.path.join(".")))?;
        }
        formatter.write_str(&shown_message(&self.message))
    }
}

impl std::error::Error for FieldError {}

impl de::Error for FieldError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self { path: Vec::new(), message: message.to_string() }
    }

    fn invalid_type(found: de::Unexpected, expected: &dyn de::Expected) -> Self {
        let message = format!("must be {}, not {}", expected_words(expected), found_words(found));
        Self { path: Vec::new(), message }
    }

    fn invalid_value(found: de::Unexpected, expected: &dyn de::Expected) -> Self {
        Self::invalid_type(found, expected)
    }

    fn unknown_variant(variant: &str, expected: &'static [&'static str]) -> Self {
        let expected: Vec<_> = expected.iter().map(|name| format!("`{name}`")).collect();
        Self::custom(format!("must be one of {}, not `{}`", expected.join(", "), shown_name(variant)))
    }

    fn missing_field(field: &'static str) -> Self {
        Self::new(field, "missing")
    }
}

/// What serde expects, in JSON's words.
fn expected_words(expected: &dyn de::Expected) -> String {
    let words = expected.to_string();
    match words.as_str() {
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number of 0 or more",
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number",
        "f32" | "f64" => "a number",
        "a boolean" => "true or false",
        "a sequence" => "a list",
        "a map" => "an object",
        other if other.starts_with("struct ") => "an object",
        other => other,
    }
    .to_owned()
}

fn found_words(found: de::Unexpected) -> String {
    match found {
        de::Unexpected::Bool(value) => value.to_string(),
        de::Unexpected::Unsigned(value) => value.to_string(),
        de::Unexpected::Signed(value) => value.to_string(),
        de::Unexpected::Float(value) => value.to_string(),
        de::Unexpected::Str(text) => format!("the text \"{}\"", shown_name(text)),
        de::Unexpected::Unit | de::Unexpected::Option => "null".to_owned(),
        de::Unexpected::Seq => "a list".to_owned(),
        de::Unexpected::Map => "an object".to_owned(),
        other => other.to_string(),
    }
}

/// Deserializes `T` from a config value.
///
/// # Errors
/// The first field that is missing or does not fit.
pub fn from_value<T: DeserializeOwned>(value: &Value) -> Result<T, FieldError> {
    T::deserialize(ConfigValue(value))
}

#[derive(Clone, Copy)]
struct ConfigValue<'a>(&'a Value);

impl<'a> ConfigValue<'a> {
    fn integer<'de, V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FieldError>
    where
        'a: 'de,
    {
        const EXACT: f64 = (1u64 << 53) as f64;
        match self.0.as_f64() {
            Some(float) if self.0.is_f64() && float.fract() == 0.0 && float.abs() <= EXACT => {
                visitor.visit_i64(float as i64)
            }
            _ => de::Deserializer::deserialize_any(self, visitor),
        }
    }
}

macro_rules! integers {
    ($($method:ident)*) => {
        $(fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FieldError> {
            self.integer(visitor)
        })*
    };
}

impl<'de> de::Deserializer<'de> for ConfigValue<'de> {
    type Error = FieldError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FieldError> {
        match self.0 {
            Value::Array(elements) => visitor.visit_seq(Elements { rest: elements.iter(), at: 0 }),
            Value::Object(fields) => match tagged_float(fields) {
                Some(float) => visitor.visit_f64(float),
                None => visitor.visit_map(Fields { rest: fields.iter(), pending: None }),
            },
            Value::String(text) => visitor.visit_borrowed_str(text),
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Number(number) => match (number.as_u64(), number.as_i64(), number.as_f64()) {
                (Some(number), ..) => visitor.visit_u64(number),
                (None, Some(number), _) => visitor.visit_i64(number),
                (None, None, number) => visitor.visit_f64(number.unwrap_or(f64::NAN)),
            },
        }
    }

    integers! {
        deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64
        deserialize_u8 deserialize_u16 deserialize_u32 deserialize_u64
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FieldError> {
        match self.0 {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, FieldError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, FieldError> {
        match self.0 {
            Value::String(text) => {
                visitor.visit_enum(de::value::BorrowedStrDeserializer::<FieldError>::new(text))
            }
            other => other.deserialize_enum(name, variants, visitor).map_err(de::Error::custom),
        }
    }

    serde::forward_to_deserialize_any! {
        bool i128 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple tuple_struct map
        struct identifier ignored_any
    }
}

impl<'de> IntoDeserializer<'de, FieldError> for ConfigValue<'de> {
    type Deserializer = Self;
    fn into_deserializer(self) -> Self {
        self
    }
}

struct Elements<'de> {
    rest: std::slice::Iter<'de, Value>,
    at: usize,
}

impl<'de> SeqAccess<'de> for Elements<'de> {
    type Error = FieldError;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, FieldError> {
        let Some(value) = self.rest.next() else { return Ok(None) };
        let at = self.at;
        self.at += 1;
        seed.deserialize(ConfigValue(value)).map(Some).map_err(|error| error.within(&at.to_string()))
    }
}

struct Fields<'de> {
    rest: map::Iter<'de>,
    pending: Option<(&'de String, &'de Value)>,
}

impl<'de> MapAccess<'de> for Fields<'de> {
    type Error = FieldError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, FieldError> {
        self.pending = self.rest.next();
        let Some((name, _)) = self.pending else { return Ok(None) };
        let name: de::value::BorrowedStrDeserializer<'de, FieldError> =
            de::value::BorrowedStrDeserializer::new(name);
        seed.deserialize(name).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, FieldError> {
        let Some((name, value)) = self.pending.take() else {
            return Err(de::Error::custom("a value was asked for before its name"));
        };
        seed.deserialize(ConfigValue(value)).map_err(|error| error.within(name))
    }
}

/// An object, or the error that it is something else.
pub(super) fn as_object<'a>(value: &'a Value, path: &str) -> Result<&'a Map<String, Value>, FieldError> {
    value
        .as_object()
        .ok_or_else(|| FieldError::new(path, format!("expected an object, found {}", kind(value))))
}

/// What kind of JSON value this is, for messages.
pub(super) fn kind(value: &value::Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use serde::Deserialize;
    use serde_json::json;

    use super::*;

    #[derive(Debug, Deserialize, PartialEq)]
    #[serde(rename_all = "lowercase")]
    enum Kind {
        Plain,
        Tied,
    }

    #[derive(Debug, Deserialize)]
    struct Scaling {
        factor: f32,
    }

    #[derive(Debug, Deserialize)]
    struct Args {
        hidden_size: u32,
        #[serde(default)]
        limits: Vec<f32>,
        #[serde(default)]
        rope_scaling: Option<Scaling>,
        #[serde(default)]
        kind: Option<Kind>,
        #[serde(default)]
        extra: HashMap<String, Value>,
    }

    fn message(value: Value) -> String {
        from_value::<Args>(&value).unwrap_err().to_string()
    }

    #[test]
    fn a_struct_is_read_and_unknown_fields_are_ignored() {
        let args: Args = from_value(&json!({
            "hidden_size": 64.0, "limits": [0, {"__float__": "Infinity"}], "kind": "tied", "new_field": [[1]],
            "rope_scaling": {"factor": 8}, "extra": {"a": 1.5, "b": [true, null]},
        }))
        .unwrap();
        assert_eq!(args.hidden_size, 64);
        assert_eq!(args.limits, [0.0, f32::INFINITY]);
        assert_eq!(args.rope_scaling.unwrap().factor, 8.0);
        assert_eq!(args.kind, Some(Kind::Tied));
        assert_eq!(args.extra["b"], json!([true, null]));
    }

    #[test]
    fn errors_name_the_field() {
        assert_eq!(message(json!({})), "field `hidden_size`: missing");
        let text = message(json!({"hidden_size": "64"}));
        assert_eq!(text, "field `hidden_size`: must be a whole number of 0 or more, not the text \"64\"");
        let text = message(json!({"hidden_size": 1, "limits": [1.0, null]}));
        assert_eq!(text, "field `limits.1`: must be a number, not null");
        assert_eq!(
            message(json!({"hidden_size": 1, "rope_scaling": {}})),
            "field `rope_scaling.factor`: missing"
        );
        assert!(
            message(json!({"hidden_size": 1, "kind": "odd"}))
                .contains("`kind`: must be one of `plain`, `tied`, not `odd`")
        );
    }

    #[test]
    fn integers_keep_their_range() {
        assert!(
            message(json!({"hidden_size": -1}))
                .contains("`hidden_size`: must be a whole number of 0 or more, not -1")
        );
        assert!(message(json!({"hidden_size": 1e18})).contains("`hidden_size`"));
        assert!(message(json!({"hidden_size": 1.5})).contains("not 1.5"));
        assert!(message(json!({"hidden_size": 4_294_967_296.0})).contains("`hidden_size`"));
    }
}
