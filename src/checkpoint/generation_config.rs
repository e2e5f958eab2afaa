//! `generation_config.json`: a model's own sampling defaults and end-of-sequence ids.

use std::path::Path;

use serde_json::Value;

use super::config::token_ids;
use super::error::CheckpointError;
use super::json;

/// What `generation_config.json` says; a field of the wrong kind counts as absent.
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
    /// Reads the file of a snapshot directory. A missing file and broken JSON are an empty config, as in
    /// mlx-lm's `load_config`.
    ///
    /// # Errors
    /// When the file is there but cannot be read.
    pub fn read(directory: &Path) -> Result<Self, CheckpointError> {
        let text = json::read_bytes(&directory.join("generation_config.json"))?;
        Ok(text
            .and_then(|text| json::parse(&text).ok())
            .map(|value| Self::from_value(&value))
            .unwrap_or_default())
    }

    /// Picks the known fields out of a value.
    pub fn from_value(value: &Value) -> Self {
        let number = |name: &str| value.get(name).and_then(Value::as_f64).filter(|number| number.is_finite());
        Self {
            do_sample: value.get("do_sample").and_then(Value::as_bool),
            temperature: number("temperature"),
            top_p: number("top_p"),
            top_k: value.get("top_k").and_then(Value::as_u64).and_then(|k| u32::try_from(k).ok()),
            min_p: number("min_p"),
            repetition_penalty: number("repetition_penalty"),
            eos_token_ids: value.get("eos_token_id").filter(|ids| is_truthy(ids)).and_then(token_ids),
        }
    }
}

/// Python's truth of a JSON value of the kinds that token ids come in.
fn is_truthy(value: &Value) -> bool {
    match value {
        Value::Array(values) => !values.is_empty(),
        Value::Number(number) => number.as_f64() != Some(0.0),
        _ => false,
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
        }));
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
    fn fields_of_the_wrong_kind_are_absent() {
        let odd =
            json!({"temperature": "hot", "top_k": -1, "top_p": {"__float__": "NaN"}, "eos_token_id": "x"});
        assert_eq!(GenerationConfig::from_value(&odd), GenerationConfig::default());
        assert_eq!(GenerationConfig::from_value(&json!([1])), GenerationConfig::default());
    }

    #[test]
    fn eos_that_python_calls_false_does_not_count() {
        let eos = |value| GenerationConfig::from_value(&json!({"eos_token_id": value})).eos_token_ids;
        assert_eq!(eos(json!(0)), None);
        assert_eq!(eos(json!([])), None);
        assert_eq!(eos(json!(null)), None);
        assert_eq!(eos(json!([0])), Some(vec![0]));
        assert_eq!(eos(json!(2)), Some(vec![2]));
    }
}
