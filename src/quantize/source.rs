//! A model on disk as conversions take it: the tensors its family uses, its config, its other files.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::checkpoint::gguf;
use crate::checkpoint::snapshot_writer::{SnapshotError, SnapshotWriter};
use crate::checkpoint::source::ModelSource;
use crate::checkpoint::{Checkpoint, Config, QuantParams, Quantization, Taken, TensorSource};
use crate::load::LoadModelError;
use crate::lora::WholeWeights;
use crate::mlx::Dtype;
use crate::models::loader::LoadError;
use crate::models::{self, Model};
use crate::tokenizer::chat_template::ChatTemplates;
use crate::tokenizer::{Tokenizer, TokenizerError, TokenizerParts};

/// A model to convert, its weights mapped.
#[derive(Clone)]
pub struct SourceModel {
    /// config.json with the end-of-sequence ids of generation_config.json, as mlx-lm's `load_config` returns it.
    pub config: Map<String, Value>,
    /// What the family uses, in its order.
    pub tensors: Vec<Taken>,
    /// What lies beside config and weights.
    pub files: SourceFiles,
    /// To build the network from, as often as needed.
    network: (Config, TensorSource),
}

/// What lies beside config and weights.
#[derive(Clone)]
pub enum SourceFiles {
    /// In a snapshot directory.
    Snapshot(PathBuf),
    /// In the metadata of a GGUF file.
    Gguf {
        /// The bytes of a tokenizer.json.
        tokenizer_json: Vec<u8>,
        /// As tokenizer_config.json.
        tokenizer_config: Value,
    },
}

/// Names of tokenizer files; those that end in one of [`COPIED_ENDINGS`] are copied as well.
const COPIED_NAMES: [&str; 9] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.json",
    "generation_config.json",
];
const COPIED_ENDINGS: [&str; 4] = [".jinja", ".model", ".tiktoken", ".py"];
/// A chat template in a file of its own.
const TEMPLATE_NAME: &str = "chat_template.jinja";
/// Bits of each layer's key-value cache, where a model comes with them.
pub const KV_CONFIG_NAME: &str = "kv_config.json";

impl SourceModel {
    /// Opens a model and lets its family take the tensors; nothing of them is read.
    ///
    /// # Errors
    /// As loading the model for generation.
    pub fn open(source: &ModelSource) -> Result<Self, LoadModelError> {
        match source {
            ModelSource::Snapshot(directory) => Self::open_snapshot(directory),
            ModelSource::Gguf(file) => Self::open_gguf(file),
        }
    }

    fn open_snapshot(directory: &Path) -> Result<Self, LoadModelError> {
        let mut checkpoint = Checkpoint::open(directory)?;
        let tensors = checkpoint.take_tensors();
        let network = (checkpoint.config.clone(), tensors.clone());
        let tensors = models::inventory(&checkpoint.config, tensors)?;
        let mut config = checkpoint.config.root().as_object().cloned().unwrap_or_default();
        // As long as the config's own ids say the same, they keep their form.
        if checkpoint.generation_config.eos_token_ids.as_ref().is_some_and(|ids| !ids.is_empty()) {
            let from_generation = generation_eos(directory)?;
            config.extend(from_generation.map(|ids| ("eos_token_id".to_owned(), ids)));
        }
        if config.get("quantization").is_none_or(Value::is_null) {
            config.remove("quantization");
            if let Some(default) = checkpoint.quantization.default {
                let block = quantization_block(default);
                config.insert("quantization".to_owned(), Value::Object(block));
            }
        }
        Ok(Self { config, tensors, files: SourceFiles::Snapshot(directory.to_owned()), network })
    }

    fn open_gguf(file: &Path) -> Result<Self, LoadModelError> {
        let gguf = gguf::load(file)?;
        let label =
            file.file_name().map_or_else(|| file.display().to_string(), |name| name.to_string_lossy().into());
        let config = Config::from_value(Value::Object(gguf.config.clone()), label.clone())?;
        let quantization = Quantization::from_config(&config, None)?;
        let tensors = TensorSource::new(gguf.tensors, quantization, label.clone(), label);
        let network = (config.clone(), tensors.clone());
        let tensors = models::inventory(&config, tensors)?;
        let files = SourceFiles::Gguf {
            tokenizer_json: gguf.tokenizer_json,
            tokenizer_config: gguf.tokenizer_config,
        };
        Ok(Self { config: gguf.config, tensors, files, network })
    }

    /// The model with whole weights in place of its own.
    ///
    /// # Errors
    /// When they do not fit.
    pub(super) fn with_weights(&self, whole: &WholeWeights) -> Result<Self, LoadError> {
        let (config, mut tensors) = self.network.clone();
        whole.replace(&mut tensors)?;
        Ok(Self {
            tensors: models::inventory(&config, tensors.clone())?,
            network: (config, tensors),
            ..self.clone()
        })
    }

    /// The network.
    ///
    /// # Errors
    /// When the config cannot be used.
    pub(super) fn load(&self) -> Result<Box<dyn Model>, LoadError> {
        let (config, tensors) = &self.network;
        let compute = self.is_gguf().then_some(Dtype::Float32);
        models::load(config, tensors.clone(), compute)
    }

    /// The config that the network is built from.
    pub(super) fn network_config(&self) -> &Config {
        &self.network.0
    }

    /// The model's tokenizer.
    ///
    /// # Errors
    /// When its files are missing or broken.
    pub fn tokenizer(&self) -> Result<Tokenizer, TokenizerError> {
        match &self.files {
            SourceFiles::Snapshot(directory) => Tokenizer::from_dir(directory),
            SourceFiles::Gguf { tokenizer_json, tokenizer_config } => Tokenizer::from_parts(TokenizerParts {
                tokenizer_json: tokenizer_json.clone(),
                config: tokenizer_config.clone(),
                special_tokens_map: None,
            }),
        }
    }

    /// The model's chat templates; empty if it ships none.
    ///
    /// # Errors
    /// When its files are broken.
    pub fn chat_templates(&self) -> Result<ChatTemplates, LoadModelError> {
        Ok(match &self.files {
            SourceFiles::Snapshot(directory) => {
                ChatTemplates::from_directory(directory, self.tokenizer()?.config())?
            }
            SourceFiles::Gguf { tokenizer_config, .. } => ChatTemplates::from_config_value(
                tokenizer_config.get("chat_template").unwrap_or(&Value::Null),
            )?,
        })
    }

    /// Whether the weights come from a GGUF file.
    pub fn is_gguf(&self) -> bool {
        matches!(self.files, SourceFiles::Gguf { .. })
    }

    /// Paths of the modules that can be quantized.
    pub fn module_paths(&self) -> Vec<&str> {
        fn path(taken: &Taken) -> Option<&str> {
            match taken {
                Taken::Weight { path, .. } => Some(path.as_str()),
                Taken::Plain { .. } => None,
            }
        }
        self.tensors.iter().filter_map(path).collect()
    }

    /// Number of transformer blocks.
    pub fn layer_count(&self) -> usize {
        let index = |path: &&str| block_index(path);
        self.module_paths().iter().filter_map(index).max().map_or(0, |last| last + 1)
    }

    /// Puts the tokenizer's and the other small files into a converted model, and a model card.
    ///
    /// # Errors
    /// When a file cannot be copied.
    pub fn copy_files(&self, writer: &SnapshotWriter, repo_id: Option<&str>) -> Result<(), SnapshotError> {
        match &self.files {
            SourceFiles::Snapshot(directory) => {
                let failed = |cause| SnapshotError::Write { path: directory.clone(), cause };
                let mut files = Vec::new();
                for entry in std::fs::read_dir(directory).map_err(failed)? {
                    let path = entry.map_err(failed)?.path();
                    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
                    let copied = COPIED_NAMES.contains(&name)
                        || name == KV_CONFIG_NAME
                        || COPIED_ENDINGS.iter().any(|ending| name.ends_with(ending));
                    if copied && path.is_file() {
                        files.push(path);
                    }
                }
                files.sort();
                files.iter().try_for_each(|file| writer.copy(file))?;
                if !directory.join(TEMPLATE_NAME).exists() {
                    self.write_templates(writer)?;
                }
            }
            SourceFiles::Gguf { tokenizer_json, tokenizer_config } => {
                writer.write("tokenizer.json", tokenizer_json)?;
                writer.write_json("tokenizer_config.json", tokenizer_config)?;
                let ids = ["bos_token_id", "eos_token_id"];
                let ids: Map<String, Value> = ids
                    .into_iter()
                    .filter_map(|name| Some((name.to_owned(), self.config.get(name)?.clone())))
                    .collect();
                writer.write_json("generation_config.json", &ids)?;
                self.write_templates(writer)?;
            }
        }
        writer.write("README.md", model_card(repo_id).as_bytes())
    }
}

impl SourceModel {
    /// Chat templates in files of their own, where transformers writes them; those of the tokenizer's config stay there
    /// as well.
    fn write_templates(&self, writer: &SnapshotWriter) -> Result<(), SnapshotError> {
        // A template that cannot be read is copied with its file and complained about when it is used.
        let Ok(templates) = self.chat_templates() else { return Ok(()) };
        let is_safe = |name: &str| {
            !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
        };
        if !templates.names().iter().all(|name| is_safe(name)) {
            return Ok(());
        }
        for name in templates.names() {
            let Ok(text) = templates.source(Some(name), false) else { continue };
            match name {
                "default" => writer.write(TEMPLATE_NAME, text.as_bytes())?,
                name => writer.write(&format!("additional_chat_templates/{name}.jinja"), text.as_bytes())?,
            }
        }
        Ok(())
    }
}

/// The number after `layers` in a module's path.
pub fn block_index(path: &str) -> Option<usize> {
    let mut segments = path.split('.');
    segments.find(|segment| *segment == "layers")?;
    segments.next()?.parse().ok()
}

/// `quantization` as mlx-lm writes it.
pub(super) fn quantization_block(params: QuantParams) -> Map<String, Value> {
    Map::from_iter([
        ("group_size".to_owned(), json!(params.group_size)),
        ("bits".to_owned(), json!(params.bits)),
        ("mode".to_owned(), json!(params.mode.name())),
    ])
}

fn generation_eos(directory: &Path) -> Result<Option<Value>, LoadModelError> {
    let file = directory.join("generation_config.json");
    let unreadable = |cause| crate::checkpoint::CheckpointError::Read { file: file.clone(), cause };
    let text = std::fs::read(&file).map_err(unreadable)?;
    let value: Option<Value> = serde_json::from_slice(&text).ok();
    Ok(value.and_then(|value| value.get("eos_token_id").cloned()))
}

/// What `create_model_card` of mlx-lm writes before an upload fills it in.
fn model_card(repo_id: Option<&str>) -> String {
    let (language, base) = match repo_id {
        None => ("language: en\n", String::new()),
        Some(id) => ("", format!("base_model: {id}\n")),
    };
    format!("---\n{language}library_name: mlx\npipeline_tag: text-generation\ntags:\n- mlx\n{base}---\n")
}
