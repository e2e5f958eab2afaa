//! `config.json`: what kind of model a checkpoint holds.

use std::path::Path;

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::config_value::{self, FieldError, as_object, kind};
use super::error::CheckpointError;
use super::json;

/// Model types that another family's code runs (mlx-lm `utils.py`, `MODEL_REMAPPING`).
const REMAPPED_TYPES: [(&str, &str); 3] =
    [("mistral", "llama"), ("iquestcoder", "llama"), ("xverse", "llama")];

/// A model's config.
///
/// Multimodal checkpoints nest the language model's fields in `text_config`; [`Config::text`] is where those
/// are, whichever way the file is laid out. Quantization and end-of-sequence ids are always root fields.
#[derive(Clone, Debug)]
pub struct Config {
    root: Value,
    origin: String,
}

impl Config {
    /// Reads `config.json` of a snapshot directory.
    ///
    /// # Errors
    /// When it is missing, unreadable or not a JSON object, or wants Python code of its own (`model_file`).
    pub fn read(directory: &Path) -> Result<Self, CheckpointError> {
        let file = directory.join("config.json");
        match json::read(&file)? {
            Some(root) => Self::from_value(root, "config.json"),
            None => Err(CheckpointError::Read { file, cause: std::io::ErrorKind::NotFound.into() }),
        }
    }

    /// A config made from `root`; `origin` is what messages call it.
    ///
    /// # Errors
    /// When `root` is not an object or has a `model_file`.
    pub fn from_value(root: Value, origin: impl Into<String>) -> Result<Self, CheckpointError> {
        let config = Self { root, origin: origin.into() };
        if !config.root.is_object() {
            let message = format!("expected an object, found {}", kind(&config.root));
            return Err(config.field_error(FieldError { path: Vec::new(), message }));
        }
        match config.root.get("model_file") {
            None | Some(Value::Null) => Ok(config),
            Some(file) => Err(CheckpointError::CustomCode {
                model_file: file.as_str().map_or_else(|| file.to_string(), str::to_owned),
                origin: config.origin,
            }),
        }
    }

    /// The whole config, an object.
    pub fn root(&self) -> &Value {
        &self.root
    }

    /// The language model's part: `text_config` when that is an object, else the root.
    pub fn text(&self) -> &Value {
        self.root.get("text_config").filter(|text| text.is_object()).unwrap_or(&self.root)
    }

    /// What messages call this config.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// `model_type` as the config spells it.
    ///
    /// # Errors
    /// When it is missing or not a string.
    pub fn model_type(&self) -> Result<&str, CheckpointError> {
        let problem = match self.root.get("model_type") {
            Some(Value::String(model_type)) => return Ok(model_type),
            Some(other) => format!("expected a string, found {}", kind(other)),
            None => "missing".to_owned(),
        };
        Err(self.field_error(FieldError::new("model_type", problem)))
    }

    /// The family whose code runs this model: `model_type`, or the family that stands in for it.
    ///
    /// # Errors
    /// As [`Config::model_type`].
    pub fn family(&self) -> Result<&str, CheckpointError> {
        self.model_type().map(Self::family_of)
    }

    /// The family whose code runs models of this type.
    pub fn family_of(model_type: &str) -> &str {
        let remapped = REMAPPED_TYPES.iter().find(|(from, _)| *from == model_type);
        remapped.map_or(model_type, |(_, to)| to)
    }

    /// The root as a family's argument struct.
    ///
    /// # Errors
    /// Names the field that is missing or does not fit.
    pub fn parse_root<T: DeserializeOwned>(&self) -> Result<T, CheckpointError> {
        config_value::from_value(&self.root).map_err(|cause| self.field_error(cause))
    }

    /// [`Config::text`] as a family's argument struct.
    ///
    /// # Errors
    /// Names the field that is missing or does not fit.
    pub fn parse_text<T: DeserializeOwned>(&self) -> Result<T, CheckpointError> {
        config_value::from_value(self.text()).map_err(|mut cause| {
            if self.root.get("text_config").is_some_and(Value::is_object) {
                cause.path.insert(0, "text_config".to_owned());
            }
            self.field_error(cause)
        })
    }

    /// Positions the model was made for, when the config says so.
    ///
    /// # Errors
    /// When `max_position_embeddings` is not a positive whole number.
    pub fn max_position_embeddings(&self) -> Result<Option<u64>, CheckpointError> {
        const NAME: &str = "max_position_embeddings";
        let value = self.text().get(NAME).or_else(|| self.root.get(NAME));
        let Some(value) = value.filter(|value| !value.is_null()) else { return Ok(None) };
        match config_value::from_value::<u64>(value) {
            Ok(positions) if positions > 0 => Ok(Some(positions)),
            Ok(_) => Err(self.field_error(FieldError::new(NAME, "must be at least 1"))),
            Err(cause) => Err(self.field_error(FieldError::new(NAME, cause.message))),
        }
    }

    /// End-of-sequence ids of the root's `eos_token_id`, a number or a list; none when it is absent.
    ///
    /// `generation_config.json` may replace them: see [`Checkpoint`](super::Checkpoint).
    ///
    /// # Errors
    /// When the field is something else.
    pub fn eos_token_ids(&self) -> Result<Vec<u32>, CheckpointError> {
        const NAME: &str = "eos_token_id";
        match self.root.get(NAME) {
            None | Some(Value::Null) => Ok(Vec::new()),
            Some(value) => token_ids(value).ok_or_else(|| {
                self.field_error(FieldError::new(NAME, "expected a token id or a list of token ids"))
            }),
        }
    }

    /// `quantization_config`, of the root or else of `text_config`, as mlx-lm's `load_model` looks for it.
    pub(super) fn quantization_config(&self) -> Result<Option<&serde_json::Map<String, Value>>, FieldError> {
        const NAME: &str = "quantization_config";
        let value = self.root.get(NAME).or_else(|| self.text().get(NAME));
        value.filter(|value| !value.is_null()).map(|value| as_object(value, NAME)).transpose()
    }

    /// `cause` as an error of this config.
    pub fn field_error(&self, cause: FieldError) -> CheckpointError {
        CheckpointError::Field { origin: self.origin.clone(), cause }
    }
}

/// One token id or a list of them. Negative ids stand for "none" and are left out.
pub(super) fn token_ids(value: &Value) -> Option<Vec<u32>> {
    let one = |value: &Value| match value.as_i64()? {
        id if id < 0 => Some(None),
        id => u32::try_from(id).ok().map(Some),
    };
    match value {
        Value::Array(values) => {
            values.iter().map(one).collect::<Option<Vec<_>>>().map(|ids| ids.into_iter().flatten().collect())
        }
        value => one(value).map(|id| id.into_iter().collect()),
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_json::json;

    use super::*;

    fn config(root: Value) -> Config {
        Config::from_value(root, "config.json").unwrap()
    }

    #[test]
    fn text_config_is_the_language_model() {
        #[derive(Debug, Deserialize)]
        struct Args {
            hidden_size: u32,
        }
        let nested = config(json!({"model_type": "gemma3", "eos_token_id": [1, 106],
            "text_config": {"hidden_size": 8, "max_position_embeddings": 512, "eos_token_id": 3}}));
        assert_eq!(nested.parse_text::<Args>().unwrap().hidden_size, 8);
        assert_eq!(nested.max_position_embeddings().unwrap(), Some(512));
        assert_eq!(nested.eos_token_ids().unwrap(), [1, 106]);
        assert_eq!(config(json!({"hidden_size": 9})).parse_text::<Args>().unwrap().hidden_size, 9);

        let error = config(json!({"text_config": {}})).parse_text::<Args>().unwrap_err();
        assert_eq!(error.to_string(), "config.json: field `text_config.hidden_size`: missing");
    }

    #[test]
    fn model_types_are_remapped_to_families() {
        for (model_type, family) in [("mistral", "llama"), ("xverse", "llama"), ("qwen3", "qwen3")] {
            assert_eq!(config(json!({"model_type": model_type})).family().unwrap(), family);
        }
        let error = config(json!({"model_type": 3})).family().unwrap_err();
        assert_eq!(error.to_string(), "config.json: field `model_type`: expected a string, found a number");
        assert!(config(json!({})).family().is_err());
    }

    #[test]
    fn positions_are_checked() {
        assert_eq!(config(json!({})).max_position_embeddings().unwrap(), None);
        assert_eq!(
            config(json!({"max_position_embeddings": 2048.0})).max_position_embeddings().unwrap(),
            Some(2048)
        );
        for bad in [json!(0), json!(-1), json!("2048")] {
            let error = config(json!({"max_position_embeddings": bad})).max_position_embeddings();
            assert!(error.unwrap_err().to_string().contains("field `max_position_embeddings`"));
        }
    }

    #[test]
    fn eos_is_a_number_or_a_list() {
        let ids = |value| config(json!({"eos_token_id": value})).eos_token_ids();
        assert_eq!(ids(json!(2)).unwrap(), [2]);
        assert_eq!(ids(json!([2, 5])).unwrap(), [2, 5]);
        assert!(ids(json!(null)).unwrap().is_empty());
        assert!(ids(json!(-1)).unwrap().is_empty());
        for bad in [json!("</s>"), json!([[2]]), json!(1.5), json!(1u64 << 40), json!([null])] {
            assert!(ids(bad.clone()).unwrap_err().to_string().contains("field `eos_token_id`"), "{bad}");
        }
    }
}
