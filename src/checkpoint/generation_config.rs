//! `generation_config.json`: a model's own sampling defaults and end-of-sequence ids.

use std::path::Path;

use serde_json::Value;

use super::config::token_ids;
use super::config_value::{FieldError, kind};
use super::error::CheckpointError;
use super::json;

const NAME: &str = "generation_config.json";

/// What `generation_config.json` says. Fields that are not listed here are ignored, as in mlx-lm.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// Whether to sample at all.
    pub do_sample: Option<bool>,
    /// Softmax temperature.
    pub temperature: Option<f64>,
    /// Nucleus probability.
    pub top_p: Option<f64>,
    /// Number of most likely tokens to keep.
    pub top_k: Option<u32>,
    /// Least probability, relative to the most likely token.
    pub min_p: Option<f64>,
    /// Repetition penalty.
    pub repetition_penalty: Option<f64>,
    /// End-of-sequence ids; `None` when the file has none that count (`0`, `null` and `[]` do not, as in
    /// mlx-lm's `load_config`).
    pub eos_token_ids: Option<Vec<u32>>,
}

impl GenerationConfig {
    /// Reads the file of a snapshot directory; a missing file is an empty config. mlx-lm's `load_config` also takes
    /// broken JSON for that, and then never ends at the model's own end-of-sequence ids.
    ///
    /// # Errors
    /// When the file is there but cannot be read, is not JSON, or a field is of the wrong kind.
    pub fn read(directory: &Path) -> Result<Self, CheckpointError> {
        match json::read(&directory.join(NAME))? {
            None => Ok(Self::default()),
            Some(value) => Self::from_value(&value)
                .map_err(|cause| CheckpointError::Field { origin: NAME.to_owned(), cause }),
        }
    }

    /// Picks the known fields out of a value; `null` is absent.
    ///
    /// # Errors
    /// The field that is of the wrong kind.
    pub fn from_value(value: &Value) -> Result<Self, FieldError> {
        if !value.is_object() {
            return Err(FieldError {
                path: Vec::new(),
                message: format!("expected an object, found {}", kind(value)),
            });
        }
        Ok(Self {
            do_sample: field(value, "do_sample", "true or false", Value::as_bool)?,
            temperature: number(value, "temperature")?,
            top_p: number(value, "top_p")?,
            // Other runtimes write -1 for "off".
            top_k: field(value, "top_k", "a whole number", Value::as_i64)?
                .and_then(|k| u32::try_from(k).ok()),
            min_p: number(value, "min_p")?,
            repetition_penalty: number(value, "repetition_penalty")?,
            eos_token_ids: match value.get("eos_token_id").filter(|ids| is_truthy(ids)) {
                None => None,
                Some(ids) => Some(token_ids(ids).ok_or_else(|| {
                    FieldError::new("eos_token_id", "expected a token id or a list of token ids")
                })?),
            },
        })
    }
}

fn field<T>(
    value: &Value,
    name: &str,
    expected: &str,
    read: impl Fn(&Value) -> Option<T>,
) -> Result<Option<T>, FieldError> {
    let Some(value) = value.get(name).filter(|value| !value.is_null()) else { return Ok(None) };
    let wrong = || FieldError::new(name, format!("expected {expected}, found {}", kind(value)));
    read(value).ok_or_else(wrong).map(Some)
}

fn number(value: &Value, name: &str) -> Result<Option<f64>, FieldError> {
    field(value, name, "a finite number", |value| value.as_f64().filter(|number| number.is_finite()))
}

/// Python's truth of a JSON value of the kinds that token ids come in.
fn is_truthy(value: &Value) -> bool {
    match value {
        Value::Array(values) => !values.is_empty(),
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::Null => false,
        Value::Bool(_) | Value::String(_) | Value::Object(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn known_fields_are_read() {
        let config = GenerationConfig::from_value(&json!({
            "do_sample": true, "temperature": 0.6, "top_p": 1, "top_k": 20, "min_p": 0.05,
            "repetition_penalty": 1.1, "eos_token_id": [7, 9], "transformers_version": "4.51.0",
        }))
        .unwrap();
        let expected = GenerationConfig {
            do_sample: Some(true),
            temperature: Some(0.6),
            top_p: Some(1.0),
            top_k: Some(20),
            min_p: Some(0.05),
            repetition_penalty: Some(1.1),
            eos_token_ids: Some(vec![7, 9]),
        };
        assert_eq!(config, expected);
    }

    #[test]
    fn fields_of_the_wrong_kind_are_named() {
        let said = |value| GenerationConfig::from_value(&value).unwrap_err().to_string();
        assert_eq!(
            said(json!({"temperature": "hot"})),
            "field `temperature`: expected a finite number, found a string"
        );
        for name in ["do_sample", "top_p", "top_k", "min_p", "repetition_penalty", "eos_token_id"] {
            for odd in [json!("x"), json!({"__float__": "NaN"}), json!([[1]])] {
                assert!(
                    said(json!({name: odd})).starts_with(&format!("field `{name}`: expected ")),
                    "{name}"
                );
            }
        }
        assert_eq!(said(json!([1])), "expected an object, found a list");
        let off =
            json!({"temperature": null, "top_k": -1, "eos_token_id": null, "something_new": {"a": [1]}});
        assert_eq!(GenerationConfig::from_value(&off), Ok(GenerationConfig::default()));
    }

    #[test]
    fn eos_that_python_calls_false_does_not_count() {
        let eos =
            |value| GenerationConfig::from_value(&json!({"eos_token_id": value})).unwrap().eos_token_ids;
        assert_eq!(eos(json!(0)), None);
        assert_eq!(eos(json!([])), None);
        assert_eq!(eos(json!(null)), None);
        assert_eq!(eos(json!([0])), Some(vec![0]));
        assert_eq!(eos(json!(2)), Some(vec![2]));
    }
}
