//! A model's configuration as GGUF metadata, and what becomes of its tensors: the inverse of [`super::config`] and
//! [`super::names`].

use serde::Deserialize;
use serde_json::{Map, Value};

use super::names::{self, Architecture, Role};
use super::permute::RowOrder;
use super::rope::FACTORS;
use super::writer::MetadataBuilder;
use crate::checkpoint::error::shown_name;
use crate::checkpoint::{CheckpointError, Config};

/// Layers of Gemma 3 27B, whose queries llama.cpp scales by the width a head (src/models/gemma3.cpp).
const GEMMA3_27B_LAYERS: u64 = 62;

/// Why a model cannot be said in GGUF.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The family.
    #[error("model type `{}` has no GGUF architecture here; llama, qwen2, qwen3 and gemma3_text have", shown_name(.0))]
    Family(String),
    /// A field.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A feature that llama.cpp's architecture does not have.
    #[error("config.json: `{field}` {problem}, which the GGUF architecture {architecture} cannot say")]
    Feature {
        /// The field.
        field: &'static str,
        /// What it says, as a predicate.
        problem: String,
        /// The architecture.
        architecture: &'static str,
    },
    /// A tensor without a place.
    #[error("tensor `{}` has no place in the GGUF architecture {architecture}", shown_name(tensor))]
    Tensor {
        /// The tensor.
        tensor: String,
        /// The architecture.
        architecture: &'static str,
    },
}

/// What is read of config.json, with mlx-lm's defaults.
#[derive(Debug, Deserialize)]
struct Fields {
    hidden_size: Option<u64>,
    num_hidden_layers: Option<u64>,
    intermediate_size: Option<u64>,
    num_attention_heads: Option<u64>,
    num_key_value_heads: Option<u64>,
    head_dim: Option<u64>,
    rms_norm_eps: Option<f64>,
    max_position_embeddings: Option<u64>,
    rope_theta: Option<f64>,
    #[serde(default)]
    rope_traditional: bool,
    rope_scaling: Option<Map<String, Value>>,
    rope_local_base_freq: Option<f64>,
    query_pre_attn_scalar: Option<f64>,
    sliding_window: Option<u64>,
    sliding_window_pattern: Option<u64>,
    layer_types: Option<Vec<String>>,
}

/// A model as GGUF sees it.
#[derive(Debug)]
pub struct ExportedConfig {
    architecture: Architecture,
    fields: Fields,
    layers: u64,
    heads: u64,
    key_value_heads: u64,
    head_dimension: u64,
    theta: f64,
}

/// Where a tensor goes.
#[derive(Clone, Debug, PartialEq)]
pub struct ExportedTensor {
    /// Its name in the file.
    pub name: String,
    /// Whether it is a matrix, which takes the file's type; the rest is single precision.
    pub matrix: bool,
    /// The order that its rows are stored in.
    pub order: RowOrder,
    /// Whether one is added to each element.
    pub plus_one: bool,
}

impl ExportedConfig {
    /// Reads a config.
    ///
    /// # Errors
    /// When the family has no architecture, or the architecture no word for what the config asks for.
    pub fn read(config: &Config) -> Result<Self, ExportError> {
        let family = config.family()?;
        let architectures =
            [Architecture::Llama, Architecture::Qwen2, Architecture::Qwen3, Architecture::Gemma3];
        let architecture = architectures.into_iter().find(|one| one.model_type() == family);
        let architecture = architecture.ok_or_else(|| ExportError::Family(family.to_owned()))?;
        let fields: Fields = config.parse_text()?;
        let gemma = architecture == Architecture::Gemma3;
        let given = |field: Option<u64>, gemmas: u64| field.unwrap_or(if gemma { gemmas } else { 0 });
        let heads = given(fields.num_attention_heads, 4);
        let hidden = given(fields.hidden_size, 1152);
        let even_share = hidden.checked_div(heads).unwrap_or(0);
        let exported = Self {
            architecture,
            layers: given(fields.num_hidden_layers, 26),
            heads,
            key_value_heads: fields.num_key_value_heads.unwrap_or(if gemma { 1 } else { heads }),
            head_dimension: fields.head_dim.unwrap_or(if gemma { 256 } else { even_share }),
            theta: fields.rope_theta.unwrap_or(match architecture {
                Architecture::Llama => 10_000.0,
                _ => 1_000_000.0,
            }),
            fields,
        };
        exported.refuse_unsayable(hidden)?;
        Ok(exported)
    }

    fn refuse_unsayable(&self, hidden: u64) -> Result<(), ExportError> {
        let architecture = self.architecture.name();
        let refuse = |field, problem: String| Err(ExportError::Feature { field, problem, architecture });
        if let Some(types) = &self.fields.layer_types
            && self.architecture == Architecture::Llama
            && let Some(other) = types.iter().find(|name| *name != "full_attention")
        {
            return refuse("layer_types", format!("names `{}`", shown_name(other)));
        }
        if self.architecture == Architecture::Gemma3 {
            let scale = match self.layers {
                GEMMA3_27B_LAYERS => hidden.checked_div(self.heads).unwrap_or(0),
                _ => self.head_dimension,
            };
            let asked = self.fields.query_pre_attn_scalar.unwrap_or(256.0);
            if asked != scale as f64 {
                return refuse("query_pre_attn_scalar", format!("is {asked} where llama.cpp takes {scale}"));
            }
        }
        Ok(())
    }

    /// `general.architecture`.
    pub fn architecture(&self) -> &'static str {
        self.architecture.name()
    }

    /// Adds the configuration's keys. `vocabulary` is the embedding's rows.
    ///
    /// # Errors
    /// When the rope scaling is one that GGUF cannot say.
    pub fn add(&self, metadata: &mut MetadataBuilder, vocabulary: usize) -> Result<(), ExportError> {
        let name = self.architecture.name();
        let fields = &self.fields;
        let gemma = self.architecture == Architecture::Gemma3;
        let key = |key: &str| format!("{name}.{key}");
        let size = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        let width = fields.hidden_size.unwrap_or(if gemma { 1152 } else { 0 });
        metadata.integer(&key("vocab_size"), size(vocabulary as u64));
        metadata.integer(&key("context_length"), size(self.context()));
        metadata.integer(&key("embedding_length"), size(width));
        metadata.integer(&key("block_count"), size(self.layers));
        metadata.integer(&key("feed_forward_length"), size(fields.intermediate_size.unwrap_or(6912)));
        metadata.integer(&key("attention.head_count"), size(self.heads));
        metadata.integer(&key("attention.head_count_kv"), size(self.key_value_heads));
        metadata.integer(&key("attention.key_length"), size(self.head_dimension));
        metadata.integer(&key("attention.value_length"), size(self.head_dimension));
        metadata.number(&key("attention.layer_norm_rms_epsilon"), fields.rms_norm_eps.unwrap_or(1e-6) as f32);
        metadata.integer(&key("rope.dimension_count"), size(self.head_dimension));
        metadata.number(&key("rope.freq_base"), self.theta as f32);
        if gemma {
            metadata
                .number(&key("rope.freq_base_swa"), fields.rope_local_base_freq.unwrap_or(10_000.0) as f32);
            metadata.integer(&key("attention.sliding_window"), size(fields.sliding_window.unwrap_or(512)));
            let pattern = fields.sliding_window_pattern.unwrap_or(6);
            metadata.integer(&key("attention.sliding_window_pattern"), size(pattern));
        }
        self.add_scaling(metadata, &key)
    }

    /// Positions the model was trained for; where the config is silent, what transformers takes.
    fn context(&self) -> u64 {
        let silent = if self.architecture == Architecture::Llama { 2048 } else { 32_768 };
        self.fields.max_position_embeddings.unwrap_or(silent)
    }

    fn scaling(&self, field: &str) -> Option<&Value> {
        self.fields.rope_scaling.as_ref()?.get(field).filter(|value| !value.is_null())
    }

    fn scaling_kind(&self) -> &str {
        let kind = self.scaling("type").or_else(|| self.scaling("rope_type"));
        kind.and_then(Value::as_str).unwrap_or("default")
    }

    fn scaling_number(&self, field: &str) -> Option<f64> {
        self.scaling(field).and_then(Value::as_f64)
    }

    fn add_scaling(
        &self,
        metadata: &mut MetadataBuilder,
        key: &impl Fn(&str) -> String,
    ) -> Result<(), ExportError> {
        let factor = self.scaling_number("factor").unwrap_or(1.0) as f32;
        match self.scaling_kind() {
            "default" => {}
            "linear" => {
                metadata.text(&key("rope.scaling.type"), "linear");
                metadata.number(&key("rope.scaling.factor"), factor);
            }
            "yarn" => {
                metadata.text(&key("rope.scaling.type"), "yarn");
                metadata.number(&key("rope.scaling.factor"), factor);
                let original = self.scaling_number("original_max_position_embeddings").unwrap_or(4096.0);
                metadata.integer(&key("rope.scaling.original_context_length"), original as u32);
                for (field, name) in [("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")] {
                    if let Some(value) = self.scaling_number(field) {
                        metadata.number(&key(&format!("rope.scaling.{name}")), value as f32);
                    }
                }
            }
            // Written as a tensor; see [`ExportedConfig::rope_factors`].
            "llama3" if self.architecture == Architecture::Llama => {}
            other => {
                return Err(ExportError::Feature {
                    field: "rope_scaling",
                    problem: format!("is of type `{}`", shown_name(other)),
                    architecture: self.architecture.name(),
                });
            }
        }
        Ok(())
    }

    /// llama3's scaling as llama.cpp's converter stores it: the tensor's name, and a divisor for each rotated pair.
    pub fn rope_factors(&self) -> Option<(&'static str, Vec<f32>)> {
        if self.architecture != Architecture::Llama || self.scaling_kind() != "llama3" {
            return None;
        }
        let number = |field: &str, default: f64| self.scaling_number(field).unwrap_or(default);
        let factor = number("factor", 1.0);
        let (low, high) = (number("low_freq_factor", 1.0), number("high_freq_factor", 4.0));
        let original = number("original_max_position_embeddings", 8192.0);
        let divisor = |pair: u64| {
            let exponent = (2 * pair) as f32 / self.head_dimension.max(1) as f32;
            let frequency = 1.0 / (self.theta as f32).powf(exponent);
            let wavelength = std::f64::consts::TAU / f64::from(frequency);
            if wavelength < original / high {
                1.0
            } else if wavelength > original / low {
                factor as f32
            } else {
                let smooth = (original / wavelength - low) / (high - low);
                (1.0 / ((1.0 - smooth) / factor + smooth)) as f32
            }
        };
        Some((FACTORS, (0..self.head_dimension / 2).map(divisor).collect()))
    }

    /// Where the tensor `module`.`leaf` goes.
    ///
    /// # Errors
    /// When there is no place for it.
    pub fn place(&self, module: &str, leaf: &str) -> Result<ExportedTensor, ExportError> {
        let found = names::stored_name(self.architecture, self.layers, module, leaf);
        let (name, role) = found.ok_or_else(|| ExportError::Tensor {
            tensor: format!("{module}.{leaf}"),
            architecture: self.architecture.name(),
        })?;
        let turned = self.architecture == Architecture::Llama
            && matches!(role, Role::Query | Role::Key)
            // Interleaved pairs are what llama.cpp expects.
            && !self.fields.rope_traditional
            && self.head_dimension >= 2;
        Ok(ExportedTensor {
            name,
            matrix: leaf == "weight" && role != Role::Norm,
            order: if turned { RowOrder::Heads(self.head_dimension as usize) } else { RowOrder::Stored },
            plus_one: self.architecture == Architecture::Gemma3 && role == Role::Norm,
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::rope;
    use super::*;

    fn config(json: Value) -> Result<ExportedConfig, ExportError> {
        ExportedConfig::read(&Config::from_value(json, "config.json").unwrap())
    }

    #[test]
    fn llama3_factors_are_understood_by_the_reader() {
        let scaling = json!({
            "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        });
        let exported = config(json!({
            "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 32,
            "rope_theta": 500_000.0, "rope_scaling": scaling,
        }))
        .unwrap();
        let (_, factors) = exported.rope_factors().unwrap();
        assert_eq!(rope::llama3(&factors, 500_000.0, 64).unwrap().unwrap(), scaling);
    }

    #[test]
    fn what_an_architecture_cannot_say_is_refused_by_name() {
        let error = |json| config(json).unwrap_err().to_string();
        assert!(
            error(json!({"model_type": "phi3"})).starts_with("model type `phi3` has no GGUF architecture")
        );
        let sliding = json!({"model_type": "llama", "layer_types": ["full_attention", "sliding_attention"]});
        assert!(
            error(sliding)
                .contains("`layer_types` names `sliding_attention`, which the GGUF architecture llama")
        );
        let scaled = json!({"model_type": "gemma3_text", "query_pre_attn_scalar": 168});
        assert!(error(scaled).contains("`query_pre_attn_scalar` is 168 where llama.cpp takes 256"));
        let dynamic =
            config(json!({"model_type": "qwen2", "rope_scaling": {"type": "dynamic", "factor": 2.0}}));
        let error = dynamic.unwrap().add(&mut MetadataBuilder::default(), 1).unwrap_err();
        assert!(error.to_string().contains("`rope_scaling` is of type `dynamic`"), "{error}");
        let llama = config(json!({"model_type": "mistral", "num_hidden_layers": 1})).unwrap();
        assert!(llama.place("model.layers.0.mlp.gate", "weight").is_err());
    }
}
