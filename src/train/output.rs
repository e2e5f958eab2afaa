//! What a run leaves behind: an adapter that mlx-lm, PEFT and this engine read.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::checkpoint::{self, CheckpointError};
use super::parameters::{Parameters, Tuning};
use super::trainer::Trainer;
use crate::checkpoint::atomic_file::{AtomicFileError, write_bytes_atomically};
use crate::mlx::{self, Array};

/// The adapter's file in a run's folder.
pub const ADAPTER_NAME: &str = "adapters.safetensors";
/// Its config.
pub const CONFIG_NAME: &str = "adapter_config.json";

/// A run's folder.
#[derive(Clone, Debug)]
pub struct Output {
    folder: PathBuf,
    adapter: PathBuf,
}

impl Output {
    /// Makes the folder and writes the config.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn create(folder: &Path, config: &Map<String, Value>) -> Result<Self, CheckpointError> {
        make_folder(folder)?;
        write_config(&folder.join(CONFIG_NAME), &Value::Object(config.clone()))?;
        Ok(Self { folder: folder.to_owned(), adapter: folder.join(ADAPTER_NAME) })
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The adapter's file.
    pub fn adapter_file(&self) -> &Path {
        &self.adapter
    }

    /// Saves the run and its adapter, each file whole or not at all.
    pub(super) fn save(&self, trainer: &Trainer) -> Result<(), CheckpointError> {
        checkpoint::save(trainer, &self.folder)?;
        let arrays: Vec<_> =
            trainer.named_values().map(|(name, value)| (name.to_owned(), value.clone())).collect();
        let metadata = [("format".to_owned(), "mlx".to_owned())].into();
        let numbered = format!("{:07}_{ADAPTER_NAME}", trainer.iteration());
        checkpoint::write(&self.folder.join(numbered), &arrays, &metadata)?;
        checkpoint::write(&self.adapter, &arrays, &metadata)
    }
}

fn make_folder(folder: &Path) -> Result<(), AtomicFileError> {
    fs::create_dir_all(folder).map_err(|cause| AtomicFileError { path: folder.to_owned(), cause })
}

fn write_config(path: &Path, config: &Value) -> Result<(), CheckpointError> {
    Ok(write_bytes_atomically(path, format!("{config:#}\n").as_bytes())?)
}

/// The adapter as PEFT keeps them, in a folder of its own.
///
/// # Errors
/// When it cannot be written. Whole weights are no adapter.
pub fn export_peft(
    folder: &Path,
    parameters: &Parameters,
    values: &[Array],
    base_model: &str,
    shape: PeftShape,
) -> Result<(), CheckpointError> {
    if parameters.tuning() == Tuning::Full {
        return Err(mlx::Error::new("whole weights cannot be exported as a PEFT adapter").into());
    }
    make_folder(folder)?;
    let mut arrays = Vec::new();
    for (name, value) in parameters.names().zip(values) {
        let Some((module, part)) = name.rsplit_once('.') else { continue };
        let (part, value) = match part {
            "lora_a" => ("lora_A.weight", value.t()?.contiguous()?),
            "lora_b" => ("lora_B.weight", value.t()?.contiguous()?),
            _ => ("lora_magnitude_vector", value.clone()),
        };
        arrays.push((format!("base_model.model.{module}.{part}"), value));
    }
    checkpoint::write(&folder.join("adapter_model.safetensors"), &arrays, &BTreeMap::new())?;
    let mut modules: Vec<&str> = parameters.ranks().filter_map(|(path, _)| path.rsplit('.').next()).collect();
    modules.sort_unstable();
    modules.dedup();
    let alpha = |rank: f64| match shape.rank_stabilized {
        true => shape.scale,
        false => shape.scale * rank,
    };
    let ranks: BTreeMap<&str, i32> =
        parameters.ranks().filter(|(_, rank)| i64::from(*rank) != i64::from(shape.rank)).collect();
    let alphas: BTreeMap<&str, Value> =
        ranks.iter().map(|(path, rank)| (*path, whole(alpha(f64::from(*rank))))).collect();
    let layers: Vec<usize> = (0..parameters.layer_count())
        .filter(|&layer| !parameters.of_layers(Some(layer..layer + 1)).is_empty())
        .collect();
    let config = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": shape.rank,
        "lora_alpha": whole(alpha(f64::from(shape.rank))),
        "lora_dropout": 0.0,
        "target_modules": modules,
        "layers_to_transform": layers,
        "rank_pattern": ranks,
        "alpha_pattern": if shape.rank_stabilized { BTreeMap::new() } else { alphas },
        "use_rslora": shape.rank_stabilized,
        "use_dora": parameters.tuning() == Tuning::Dora,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
    });
    write_config(&folder.join(CONFIG_NAME), &config)
}

/// What PEFT's config says of all modules.
#[derive(Clone, Copy, Debug)]
pub struct PeftShape {
    /// Rank.
    pub rank: u32,
    /// What products are multiplied by; with `rank_stabilized`, before it is divided by the root of the rank.
    pub scale: f64,
    /// Whether it is.
    pub rank_stabilized: bool,
}

/// PEFT expects a whole number where it can be one.
fn whole(number: f64) -> Value {
    match number.fract() == 0.0 && number.abs() < 1e15 {
        true => Value::from(number as i64),
        false => Value::from(number),
    }
}
