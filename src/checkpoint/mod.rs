//! Models on disk: HF snapshots (config.json, safetensors shards) and GGUF files, read without MLX.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub mod atomic_file;
pub mod audit;
pub mod config;
pub mod config_value;
pub mod environment;
pub mod error;
pub mod generation_config;
pub mod gguf;
pub mod hub_cache;
pub mod json;
pub mod json_lines;
pub mod json_writer;
pub mod mapping;
pub mod quantization;
pub mod safetensors;
pub mod safetensors_writer;
pub mod shards;
pub mod snapshot_writer;
pub mod source;
pub mod tensor;

pub use audit::{AuditError, Taken, TensorSource, WeightTensors};
pub use config::Config;
pub use error::CheckpointError;
pub use generation_config::GenerationConfig;
pub use quantization::{QuantMode, QuantParams, Quantization};
pub use tensor::{ElementType, Tensor, TensorData};

/// A model as it lies on disk, its weights mapped but not read.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// Where the tokenizer's files are.
    pub directory: PathBuf,
    /// What kind of model it is.
    pub config: Config,
    /// How its weights are quantized.
    pub quantization: Quantization,
    /// Its own sampling defaults.
    pub generation_config: GenerationConfig,
    /// End-of-sequence ids: those of `generation_config.json` when it has any, else the config's (mlx-lm
    /// `utils.py`, `load_config`). The tokenizer's own id comes on top.
    pub eos_token_ids: Vec<u32>,
    /// Every tensor by name.
    pub tensors: BTreeMap<String, Tensor>,
    /// What messages call the place the tensors come from.
    pub weights_label: String,
}

impl Checkpoint {
    /// Opens a snapshot directory.
    ///
    /// # Errors
    /// When a file is missing or broken, or the model needs what is not supported; names file and tensor.
    pub fn open(directory: &Path) -> Result<Self, CheckpointError> {
        let config = Config::read(directory)?;
        let quantization = Quantization::from_config(&config, Some(directory))?;
        let generation_config = GenerationConfig::read(directory)?;
        // Both are read even where one is not used: an odd value is a broken checkpoint.
        let of_config = config.eos_token_ids()?;
        let eos_token_ids = generation_config.eos_token_ids.clone().unwrap_or(of_config);
        config.max_position_embeddings()?;
        let weights = shards::open_weights(directory)?;
        Ok(Self {
            directory: directory.to_owned(),
            config,
            quantization,
            generation_config,
            eos_token_ids,
            tensors: weights.tensors,
            weights_label: weights.label,
        })
    }

    /// The tensors for a family to take; they leave the checkpoint.
    pub fn take_tensors(&mut self) -> TensorSource {
        let tensors = std::mem::take(&mut self.tensors);
        TensorSource::new(
            tensors,
            self.quantization.clone(),
            self.weights_label.clone(),
            self.config.origin(),
        )
    }
}
