//! Settings from flags, a config file and defaults, in this order.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::error::Complaint;

/// The settings that a config file gives and nobody has asked for yet.
pub struct Layers {
    file: Map<String, Value>,
    name: String,
    /// All settings as they turned out.
    pub settled: Map<String, Value>,
}

impl Layers {
    /// Over the settings of a file called `name`.
    pub fn new(file: Map<String, Value>, name: &str) -> Self {
        Self { file, name: name.to_owned(), settled: Map::new() }
    }

    /// What was typed, else what the file says, else nothing.
    ///
    /// # Errors
    /// The file says something else than is wanted.
    pub fn given<T: DeserializeOwned + serde::Serialize>(
        &mut self,
        name: &str,
        typed: Option<T>,
    ) -> Result<Option<T>, Complaint> {
        let filed = self.file.remove(name).filter(|value| !value.is_null());
        let value = match (typed, filed) {
            (Some(typed), _) => Some(typed),
            (None, Some(value)) => Some(self.parse(name, value)?),
            (None, None) => None,
        };
        let settled = value.as_ref().and_then(|value| serde_json::to_value(value).ok());
        self.settled.insert(name.to_owned(), settled.unwrap_or_default());
        Ok(value)
    }

    /// [`given`](Self::given), else `default`.
    ///
    /// # Errors
    /// As [`given`](Self::given).
    pub fn setting<T: DeserializeOwned + serde::Serialize>(
        &mut self,
        name: &str,
        typed: Option<T>,
        default: T,
    ) -> Result<T, Complaint> {
        let value = self.given(name, typed)?.unwrap_or(default);
        let settled = serde_json::to_value(&value).unwrap_or_default();
        self.settled.insert(name.to_owned(), settled);
        Ok(value)
    }

    /// A switch, which can only be switched on by a flag.
    ///
    /// # Errors
    /// As [`given`](Self::given).
    pub fn switch(&mut self, name: &str, typed: bool) -> Result<bool, Complaint> {
        self.setting(name, typed.then_some(true), false)
    }

    fn parse<T: DeserializeOwned>(&self, name: &str, value: Value) -> Result<T, Complaint> {
        // YAML takes `1e-5` for a word, and mlx-lm for a number.
        let number = match &value {
            Value::String(text) => text.parse::<f64>().ok().map(Value::from),
            _ => None,
        };
        let wrong = |error: serde_json::Error| {
            Complaint::usage(format!("{}: `{name}` does not fit: {error}", self.name))
        };
        match serde_json::from_value(value) {
            Ok(parsed) => Ok(parsed),
            Err(error) => match number {
                Some(number) => serde_json::from_value(number).map_err(wrong),
                None => Err(wrong(error)),
            },
        }
    }

    /// Names in the file that nobody asked for.
    pub fn unknown(&self) -> impl Iterator<Item = &str> {
        self.file.keys().map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn layers(value: &Value) -> Layers {
        Layers::new(value.as_object().unwrap().clone(), "a.yaml")
    }

    #[test]
    fn flags_win_over_the_file_and_the_file_over_defaults() {
        let mut layers = layers(&json!({"iters": 5, "seed": null, "rate": "1e-5", "nonsense": 1}));
        assert_eq!(layers.setting("iters", Some(7u64), 1).unwrap(), 7);
        assert_eq!(layers.setting("seed", None, 3u64).unwrap(), 3);
        assert_eq!(layers.setting("rate", None, 1.0).unwrap(), 1e-5);
        assert_eq!(layers.given::<u64>("absent", None).unwrap(), None);
        assert_eq!(layers.unknown().collect::<Vec<_>>(), ["nonsense"]);
        assert_eq!(layers.settled["iters"], 7);
        assert!(!layers.switch("train", false).unwrap());
    }

    #[test]
    fn what_does_not_fit_is_told_with_its_name() {
        let error = layers(&json!({"iters": "many"})).setting("iters", None, 1u64).unwrap_err().to_string();
        assert!(error.starts_with("a.yaml: `iters` does not fit: invalid type"), "{error}");
        assert!(layers(&json!({"iters": -1})).setting("iters", None, 1u64).is_err());
    }
}
