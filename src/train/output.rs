//! What a run leaves behind: an adapter that mlx-lm, PEFT and this engine read.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::checkpoint::{self, CheckpointError, STATE_NAME};
use super::parameters::{Parameters, Tuning};
use super::trainer::{Standing, Trainer};
use crate::checkpoint::Tensor;
use crate::checkpoint::atomic_file::{AtomicFileError, remove_unfinished, write_bytes_atomically};
use crate::checkpoint::safetensors::SafetensorsFile;
use crate::mlx::{self, Array};

/// The adapter's file in a run's folder.
pub const ADAPTER_NAME: &str = "adapters.safetensors";
/// Its config.
pub const CONFIG_NAME: &str = "adapter_config.json";

/// The adapter's file while its config is not there yet.
const NEXT_NAME: &str = "next_adapters.safetensors";
/// What of a config decides what its weights mean.
const MEANING: [&str; 4] = ["fine_tune_type", "lora_parameters", "rs_lora", "model"];

/// A run's folder, which no other run writes into meanwhile.
#[derive(Debug)]
pub struct Output {
    folder: PathBuf,
    adapter: PathBuf,
    config: Map<String, Value>,
    settings: Map<String, Value>,
    /// Whether nothing was saved yet.
    untouched: Cell<bool>,
    /// Locked as long as it is open.
    _lock: Option<File>,
}

impl Output {
    /// Makes the folder. What an earlier run left in it stays until this one is saved for the first time; then `config`
    /// becomes adapter_config.json, and `settings` is kept for whoever goes on with the run
    /// ([`saved_settings`](checkpoint::saved_settings)).
    ///
    /// # Errors
    /// When it cannot be written, or another run writes into it.
    pub fn create(
        folder: &Path,
        config: &Map<String, Value>,
        settings: &Map<String, Value>,
    ) -> Result<Self, CheckpointError> {
        let wrong = |cause| AtomicFileError { path: folder.to_owned(), cause };
        fs::create_dir_all(folder).map_err(wrong)?;
        let lock = lock(folder)?;
        if lock.is_some() {
            remove_unfinished(folder, |name| {
                [STATE_NAME, ADAPTER_NAME, NEXT_NAME, CONFIG_NAME].contains(&name) || number(name).is_some()
            });
            // Its copy has the same weights.
            let _ = fs::remove_file(folder.join(NEXT_NAME));
        }
        Ok(Self {
            folder: folder.to_owned(),
            adapter: folder.join(ADAPTER_NAME),
            config: config.clone(),
            settings: settings.clone(),
            untouched: Cell::new(true),
            _lock: lock,
        })
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The adapter's file.
    pub fn adapter_file(&self) -> &Path {
        &self.adapter
    }

    /// Saves the run as it stood and its adapter, each file whole or not at all, and never weights beside a config that is
    /// not theirs.
    pub(super) fn save(&self, trainer: &Trainer, standing: &Standing) -> Result<(), CheckpointError> {
        let parameters = trainer.parameters();
        checkpoint::save(standing, parameters, trainer.rows(), &self.settings, &self.folder)?;
        let arrays = parameters.exported(&standing.values)?;
        let metadata = [("format".to_owned(), "mlx".to_owned())].into();
        let iteration = standing.progress.iteration;
        checkpoint::write(&self.folder.join(format!("{iteration:07}_{ADAPTER_NAME}")), &arrays, &metadata)?;
        self.replace_adapter(|file| checkpoint::write(file, &arrays, &metadata))?;
        if self.untouched.replace(false) {
            // A run that goes on keeps what it had saved; all others are another run's.
            let kept = trainer.resumed().unwrap_or(0);
            self.remove_copies(|number| number > kept && number != iteration);
        }
        Ok(())
    }

    /// Whether the adapter's file has the values of the run as it stood.
    pub(super) fn holds(&self, trainer: &Trainer, standing: &Standing) -> Result<bool, CheckpointError> {
        let arrays = trainer.parameters().exported(&standing.values)?;
        let Ok(file) = SafetensorsFile::open(&self.adapter) else { return Ok(false) };
        let stored: BTreeMap<&str, Tensor> = file.tensors().collect();
        for (name, array) in &arrays {
            let tensor = array.to_tensor()?;
            let same = stored.get(name.as_str()).is_some_and(|stored| {
                (stored.dtype, &stored.shape, stored.bytes()) == (tensor.dtype, &tensor.shape, tensor.bytes())
            });
            if !same {
                return Ok(false);
            }
        }
        Ok(stored.len() == arrays.len())
    }

    /// Replaces weights and config together. Where the old config says something else of its weights, there are none under
    /// the adapter's name while the config changes.
    fn replace_adapter(
        &self,
        write: impl Fn(&Path) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let file = self.folder.join(CONFIG_NAME);
        let old = fs::read(&file).ok();
        let new = format!("{:#}\n", Value::Object(self.config.clone()));
        if old.as_deref() == Some(new.as_bytes()) {
            return write(&self.adapter);
        }
        let failed = |cause| AtomicFileError { path: self.adapter.clone(), cause };
        let parsed: Option<Value> = old.and_then(|text| serde_json::from_slice(&text).ok());
        let same =
            parsed.is_some_and(|old| MEANING.iter().all(|name| old.get(name) == self.config.get(*name)));
        if same || !self.adapter.exists() {
            write_bytes_atomically(&file, new.as_bytes())?;
            return write(&self.adapter);
        }
        let next = self.folder.join(NEXT_NAME);
        write(&next)?;
        fs::remove_file(&self.adapter).map_err(failed)?;
        write_bytes_atomically(&file, new.as_bytes())?;
        fs::rename(&next, &self.adapter).map_err(failed)?;
        // Without this the rename may be lost in a crash.
        File::open(&self.folder).and_then(|folder| folder.sync_all()).map_err(failed)?;
        Ok(())
    }

    /// Removes copies of steps that are not this run's. One that cannot be removed is a copy too many, and no failure.
    fn remove_copies(&self, unwanted: impl Fn(u64) -> bool) {
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            if entry.file_name().to_str().and_then(number).is_some_and(&unwanted) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

/// The step of a copy's name.
fn number(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(ADAPTER_NAME)?.strip_suffix('_')?;
    if digits.len() < 7 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    digits.parse().ok()
}

/// Takes the folder for this process; `None` where the file system knows no locks.
fn lock(folder: &Path) -> Result<Option<File>, CheckpointError> {
    let file = File::open(folder).map_err(|cause| AtomicFileError { path: folder.to_owned(), cause })?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Err(CheckpointError::Busy { path: folder.to_owned() }),
        Err(TryLockError::Error(_)) => Ok(None),
    }
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
) -> Result<(), CheckpointError> {
    let Some(shape) = parameters.shape() else {
        return Err(mlx::Error::new("whole weights cannot be exported as a PEFT adapter").into());
    };
    fs::create_dir_all(folder).map_err(|cause| AtomicFileError { path: folder.to_owned(), cause })?;
    let mut arrays = Vec::new();
    for (name, value) in parameters.exported(values)? {
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
    let layers: Vec<usize> = (0..parameters.layer_count())
        .filter(|&layer| !parameters.of_layers(Some(layer..layer + 1)).is_empty())
        .collect();
    let config = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": shape.rank,
        "lora_alpha": whole(shape.scale * f64::from(shape.rank)),
        "lora_dropout": 0.0,
        "target_modules": modules,
        "layers_to_transform": layers,
        "use_rslora": false,
        "use_dora": parameters.tuning() == Tuning::Dora,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
    });
    write_config(&folder.join(CONFIG_NAME), &config)
}

/// PEFT expects a whole number where it can be one.
fn whole(number: f64) -> Value {
    match number.fract() == 0.0 && number.abs() < 1e15 {
        true => Value::from(number as i64),
        false => Value::from(number),
    }
}
