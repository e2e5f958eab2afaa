//! A model ready to generate: weights, tokenizer, chat template and defaults from one snapshot or GGUF file.

use std::path::Path;

use serde_json::Value;

use crate::checkpoint::gguf::{self, GgufError};
use crate::checkpoint::source::ModelSource;
use crate::checkpoint::{Checkpoint, CheckpointError, Config, GenerationConfig, Quantization, Tensor};
use crate::lora::Adapter;
use crate::mlx::{DeviceKind, Dtype, default_device};
use crate::models::loader::LoadError;
use crate::models::{self, Model};
use crate::tokenizer::chat_template::ChatTemplates;
use crate::tokenizer::{Tokenizer, TokenizerError, TokenizerParts};

/// A model ready to generate.
pub struct LoadedModel {
    /// The network.
    pub model: Box<dyn Model>,
    /// Its tokenizer; the end-of-sequence ids include those of the config.
    pub tokenizer: Tokenizer,
    /// Its chat templates; empty if it ships none.
    pub chat_templates: ChatTemplates,
    /// Its own sampling defaults.
    pub generation_config: GenerationConfig,
    /// Bytes of its weights.
    pub weight_bytes: u64,
}

/// Why a model cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadModelError {
    /// The snapshot's files.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The GGUF file.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The family.
    #[error(transparent)]
    Model(#[from] LoadError),
    /// The tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The chat template.
    #[error(transparent)]
    Template(#[from] crate::tokenizer::chat_template::TemplateError),
}

/// Loads what a model argument was resolved to. Weights stay mapped and are read when they are used.
///
/// # Errors
/// One line that names the file, the tensor or the field, and what is wrong with it.
pub fn load(source: &ModelSource) -> Result<LoadedModel, LoadModelError> {
    load_adapted(source, None)
}

/// [`load`] with an adapter on the layers it is for.
///
/// # Errors
/// As [`load`], and when the adapter does not fit.
pub fn load_adapted(source: &ModelSource, adapter: Option<Adapter>) -> Result<LoadedModel, LoadModelError> {
    match source {
        ModelSource::Snapshot(directory) => load_snapshot(directory, adapter),
        ModelSource::Gguf(file) => load_gguf(file, adapter),
    }
}

fn load_snapshot(directory: &Path, adapter: Option<Adapter>) -> Result<LoadedModel, LoadModelError> {
    let mut checkpoint = Checkpoint::open(directory)?;
    let mut tokenizer = Tokenizer::from_dir(directory)?;
    tokenizer.extend_eos_token_ids(checkpoint.eos_token_ids.iter().copied());
    let weight_bytes = total_bytes(checkpoint.tensors.values());
    let tensors = checkpoint.take_tensors();
    Ok(LoadedModel {
        weight_bytes,
        chat_templates: ChatTemplates::from_directory(directory, tokenizer.config())?,
        model: models::load_adapted(&checkpoint.config, tensors, None, adapter)?,
        tokenizer,
        generation_config: checkpoint.generation_config,
    })
}

fn load_gguf(file: &Path, adapter: Option<Adapter>) -> Result<LoadedModel, LoadModelError> {
    let gguf = gguf::load(file)?;
    let label =
        file.file_name().map_or_else(|| file.display().to_string(), |name| name.to_string_lossy().into());
    let config = Config::from_value(Value::Object(gguf.config), label.clone())?;
    config.max_position_embeddings()?;
    let quantization = Quantization::from_config(&config, None)?;
    let weight_bytes = total_bytes(gguf.tensors.values());
    let tensors = crate::checkpoint::TensorSource::new(gguf.tensors, quantization, label.clone(), label);
    let parts = TokenizerParts {
        tokenizer_json: gguf.tokenizer_json,
        config: gguf.tokenizer_config,
        special_tokens_map: None,
    };
    let mut tokenizer = Tokenizer::from_parts(parts)?;
    tokenizer.extend_eos_token_ids(gguf.eos_token_ids);
    Ok(LoadedModel {
        weight_bytes,
        chat_templates: ChatTemplates::from_config_value(
            tokenizer.config().get("chat_template").unwrap_or(&Value::Null),
        )?,
        model: models::load_adapted(&config, tensors, Some(gguf_compute_dtype()), adapter)?,
        tokenizer,
        generation_config: GenerationConfig::default(),
    })
}

fn total_bytes<'a>(tensors: impl Iterator<Item = &'a Tensor>) -> u64 {
    tensors.map(|tensor| tensor.bytes().len() as u64).sum()
}

/// GGUF files mix types (float32 norms, float16 scales), so one has to be chosen. MLX's CPU products accumulate in
/// the activations' type, and only float32 answers well there; a GPU accumulates in float32 whatever the type.
fn gguf_compute_dtype() -> Dtype {
    match default_device() {
        DeviceKind::Cpu => Dtype::Float32,
        DeviceKind::Gpu => Dtype::Bfloat16,
    }
}
