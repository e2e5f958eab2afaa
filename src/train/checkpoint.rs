//! All that a run goes on from, in one file: a reader finds the whole of one step or of another.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::parameters::Parameters;
use super::trainer::{Progress, Standing, Trainer, Window};
use crate::checkpoint::error::{shown_name, shown_path};
use crate::checkpoint::safetensors::SafetensorsFile;
use crate::checkpoint::safetensors_writer::{WriteError, write_safetensors};
use crate::checkpoint::{self, Tensor};
use crate::mlx::random::RandomState as Keys;
use crate::mlx::{self, Array};
use crate::perplexity::RandomState;

/// The file's name in a run's folder.
pub const STATE_NAME: &str = "training_state.safetensors";
const PROGRESS: &str = "progress";
const SETTINGS: &str = "settings";
const ROWS: &str = "rows";

/// Why a run was not saved, or cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// Nothing there.
    #[error("{} has no {STATE_NAME}: there is no run to go on with", shown_path(path))]
    Nothing {
        /// The folder.
        path: PathBuf,
    },
    /// A file that cannot be read.
    #[error(transparent)]
    Read(#[from] checkpoint::CheckpointError),
    /// A file that cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// A folder or another file.
    #[error(transparent)]
    File(#[from] checkpoint::atomic_file::AtomicFileError),
    /// Another process writes there.
    #[error(
        "another run writes into {}; wait for it, or name another folder with --adapter-path",
        shown_path(path)
    )]
    Busy {
        /// The folder.
        path: PathBuf,
    },
    /// Another run's.
    #[error("{}: {problem}; resume with the flags that the run was started with", shown_path(path))]
    Other {
        /// The file.
        path: PathBuf,
        /// What differs.
        problem: String,
    },
    /// MLX failed.
    #[error(transparent)]
    Mlx(#[from] mlx::Error),
}

/// Writes arrays under their names.
pub(super) fn write(
    path: &Path,
    arrays: &[(String, Array)],
    metadata: &BTreeMap<String, String>,
) -> Result<(), CheckpointError> {
    let tensors: Vec<(&str, Tensor)> = arrays
        .iter()
        .map(|(name, array)| Ok((name.as_str(), array.to_tensor()?)))
        .collect::<mlx::Result<_>>()?;
    let parts =
        tensors.iter().map(|(name, tensor)| (*name, tensor.dtype, tensor.shape.as_slice(), tensor.bytes()));
    Ok(write_safetensors(path, parts, metadata)?)
}

/// The settings of the run that was saved in `folder`, as [`Output`](super::output::Output) was given them.
///
/// # Errors
/// No run was saved there, or what was saved cannot be read.
pub fn saved_settings(folder: &Path) -> Result<Map<String, Value>, CheckpointError> {
    let path = folder.join(STATE_NAME);
    if !path.is_file() {
        return Err(CheckpointError::Nothing { path: folder.to_owned() });
    }
    let file = SafetensorsFile::open(&path)?;
    let text = file.metadata().get(SETTINGS).map(String::as_str).unwrap_or_default();
    match serde_json::from_str(text) {
        Ok(Value::Object(settings)) => Ok(settings),
        _ => Err(CheckpointError::Other { path, problem: "it holds no settings".to_owned() }),
    }
}

/// Saves where a run stands. `rows` tells the rows that it learns from.
pub(super) fn save(
    standing: &Standing,
    parameters: &Parameters,
    rows: &str,
    settings: &Map<String, Value>,
    folder: &Path,
) -> Result<(), CheckpointError> {
    let progress = &standing.progress;
    let words = |words: &[u32]| Array::from_slice(words, &[words.len() as i32]);
    let mut arrays: Vec<(String, Array)> = parameters
        .names()
        .zip(&standing.values)
        .map(|(name, value)| (format!("value.{name}"), value.clone()))
        .collect();
    let numbered = |kind: &str, array: (usize, &Array)| (format!("{kind}.{}", array.0), array.1.clone());
    arrays.extend(standing.optimizer.state().enumerate().map(|array| numbered("optimizer", array)));
    let accumulated = progress.accumulated.iter().flatten().enumerate();
    arrays.extend(accumulated.map(|array| numbered("accumulated", array)));
    arrays.push(("shuffles".to_owned(), words(&progress.shuffles.to_words())?));
    arrays.push(("order".to_owned(), words(&progress.order)?));
    arrays.push(("key".to_owned(), progress.keys.key().clone()));
    let window = &progress.window;
    let figures: Vec<u32> = window.figures.iter().map(|sum| sum.to_bits()).collect();
    let text = json!({
        "iteration": progress.iteration,
        "trained_tokens": progress.trained_tokens,
        "taken": progress.taken,
        "optimizer_steps": standing.optimizer.steps(),
        "window": {"steps": window.steps, "tokens": window.tokens, "loss": window.loss.to_bits(), "figures": figures},
    });
    let metadata = [
        (PROGRESS.to_owned(), text.to_string()),
        (SETTINGS.to_owned(), Value::Object(settings.clone()).to_string()),
        (ROWS.to_owned(), rows.to_owned()),
    ];
    write(&folder.join(STATE_NAME), &arrays, &metadata.into())
}

/// Puts a run where the file says that it stood.
pub(super) fn restore(trainer: &mut Trainer, folder: &Path) -> Result<(), CheckpointError> {
    let path = folder.join(STATE_NAME);
    if !path.is_file() {
        return Err(CheckpointError::Nothing { path: folder.to_owned() });
    }
    let file = SafetensorsFile::open(&path)?;
    let other = |problem: String| CheckpointError::Other { path: path.clone(), problem };
    let mut arrays: BTreeMap<String, Array> = file
        .tensors()
        .map(|(name, tensor)| Ok((name.to_owned(), Array::from_tensor(&tensor)?)))
        .collect::<mlx::Result<_>>()?;
    let text = file.metadata().get(PROGRESS).map(String::as_str).unwrap_or_default();
    let saved: Value = serde_json::from_str(text).map_err(|_| other("it is no run's state".to_owned()))?;
    if file.metadata().get(ROWS).is_some_and(|rows| rows != trainer.rows()) {
        return Err(other("the rows to learn from are not those that the run began with".to_owned()));
    }
    let number = |fields: &Value, name: &str| {
        fields.get(name).and_then(Value::as_u64).ok_or_else(|| other(format!("`{name}` is missing")))
    };
    let mut values = Vec::with_capacity(trainer.values.len());
    for (name, now) in trainer.named_values() {
        match arrays.remove(&format!("value.{name}")) {
            Some(array) if array.shape() == now.shape() && array.dtype() == now.dtype() => values.push(array),
            Some(array) => {
                return Err(other(format!(
                    "`{}` has shape {:?}, and {:?} is needed",
                    shown_name(name),
                    array.shape(),
                    now.shape()
                )));
            }
            None => return Err(other(format!("`{}` is missing", shown_name(name)))),
        }
    }
    if let Some(name) = arrays.keys().find(|name| name.starts_with("value.")) {
        return Err(other(format!("`{}` is not trained now", shown_name(name))));
    }
    let mut take = |name: &str| arrays.remove(name).ok_or_else(|| other(format!("`{name}` is missing")));
    let shuffles: Vec<u32> = take("shuffles")?.to_vec()?;
    let shuffles =
        RandomState::from_words(&shuffles).ok_or_else(|| other("`shuffles` is no state".to_owned()))?;
    let order: Vec<u32> = take("order")?.to_vec()?;
    if !order.is_empty() && order.len() != trainer.batches() {
        return Err(other(format!(
            "it has {} batches an epoch, and the rows give {}",
            order.len(),
            trainer.batches()
        )));
    }
    let mut keys = Keys::from_seed(0)?;
    let key = take("key")?;
    if key.shape() != keys.key().shape() || key.dtype() != keys.key().dtype() {
        return Err(other("`key` is no key".to_owned()));
    }
    keys.set_key(key);
    let mut numbered = |kind: &str| -> Vec<Array> {
        (0..).map_while(|index: usize| arrays.remove(&format!("{kind}.{index}"))).collect()
    };
    let (state, accumulated) = (numbered("optimizer"), numbered("accumulated"));
    let fits = |sums: &[Array]| {
        sums.len() == values.len()
            && sums.iter().zip(&values).all(|(sum, value)| sum.shape() == value.shape())
    };
    if !accumulated.is_empty() && !fits(&accumulated) {
        return Err(other("the accumulated gradients do not fit".to_owned()));
    }
    let window = saved.get("window").cloned().unwrap_or_default();
    let bits = |value: &Value| value.as_u64().and_then(|bits| u32::try_from(bits).ok()).map(f32::from_bits);
    let sums = window.get("figures").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let progress = Progress {
        iteration: number(&saved, "iteration")?,
        trained_tokens: number(&saved, "trained_tokens")?,
        order,
        taken: usize::try_from(number(&saved, "taken")?).unwrap_or(usize::MAX),
        shuffles,
        keys,
        accumulated: Some(accumulated).filter(|sums| !sums.is_empty()),
        window: Window {
            steps: number(&window, "steps")?,
            tokens: number(&window, "tokens")?,
            loss: window.get("loss").and_then(bits).unwrap_or(0.0),
            figures: sums.iter().filter_map(bits).collect(),
        },
    };
    let steps = number(&saved, "optimizer_steps")?;
    trainer.optimizer.restore(steps, state).map_err(|error| other(error.to_string()))?;
    trainer.values = values;
    trainer.progress = progress;
    Ok(())
}
