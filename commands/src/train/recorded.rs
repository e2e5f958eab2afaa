//! Going on with a run: the settings that it was saved with, and which of them may change.

use std::path::Path;

use mlx_bun::train::checkpoint::{STATE_NAME, saved_settings};
use serde_json::{Map, Value};

use crate::args::Warnings;
use crate::error::Complaint;

/// What a run may go on with differently: how far and how fast, what it reports, what it costs. The rows are compared
/// themselves, and the model where it is found.
const FREE: [&str; 20] = [
    "iters",
    "learning_rate",
    "warmup",
    "schedule",
    "lr_schedule",
    "weight_decay",
    "grad_clip",
    "save_every",
    "steps_per_report",
    "steps_per_eval",
    "val_batches",
    "val_size",
    "valid_split",
    "test_batches",
    "segment_size",
    "grad_checkpoint",
    "head_chunk",
    "no_prefix",
    "clear_cache_threshold",
    "data",
];
/// What says nothing of the run itself.
const BESIDE: [&str; 5] = ["train", "test", "adapter_path", "resume_adapter_file", "model"];

/// The settings of the run that was saved in a folder, and what messages call them.
///
/// # Errors
/// There is none.
pub fn read(folder: &Path) -> Result<(Map<String, Value>, String), Complaint> {
    let settings = saved_settings(folder).map_err(|error| {
        Complaint::failure(format!("cannot go on with the run in `{}`: {error}", folder.display()))
    })?;
    Ok((settings, folder.join(STATE_NAME).display().to_string()))
}

/// Notes what differs now from the run's settings.
///
/// # Errors
/// Names the setting with which the saved state would mean something else.
pub fn compare(
    recorded: &Map<String, Value>,
    now: &Map<String, Value>,
    warnings: &mut Warnings,
) -> Result<(), Complaint> {
    for (name, value) in now.iter().filter(|(name, _)| !BESIDE.contains(&name.as_str())) {
        let Some(old) = recorded.get(name).filter(|old| *old != value) else { continue };
        if FREE.contains(&name.as_str()) {
            warnings.push(format!("the run goes on with another `{name}`: {value}, and it was {old}"));
            continue;
        }
        let (name, value, old) = match (value, old) {
            (Value::Object(value), Value::Object(old)) => value
                .iter()
                .find_map(|(inner, value)| {
                    let old = old.get(inner).unwrap_or(&Value::Null);
                    (old != value).then(|| (inner.clone(), value.clone(), old.clone()))
                })
                .unwrap_or_else(|| (name.clone(), Value::Null, Value::Null)),
            (value, old) => (name.clone(), value.clone(), old.clone()),
        };
        return Err(Complaint::usage(format!(
            "a run cannot go on with another `{name}`: {value}, and it was {old}"
        ))
        .hint("leave it out, or begin a new run from its adapter with --resume-adapter-file"));
    }
    Ok(())
}

/// A model that was moved is the same model; one beside it is another.
///
/// # Errors
/// It is another.
pub fn check_model(recorded: &str, now: &str) -> Result<(), Complaint> {
    let moved = Path::new(recorded).is_absolute() && !Path::new(recorded).exists();
    if recorded == now || moved {
        return Ok(());
    }
    Err(Complaint::usage(format!(
        "the run was started with the model `{recorded}`, and cannot go on with `{now}`"
    ))
    .hint("leave --model out"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_changes_the_meaning_of_the_state_is_refused_and_the_rest_is_told() {
        let recorded =
            json!({"iters": 10, "seed": 0, "lora_parameters": {"rank": 8, "scale": 20.0}, "test": false});
        let compared = |pointer: &str, value: Value| {
            let mut now = recorded.clone();
            *now.pointer_mut(pointer).unwrap() = value;
            let mut warnings = Vec::new();
            compare(recorded.as_object().unwrap(), now.as_object().unwrap(), &mut warnings)
                .map(|()| warnings)
                .map_err(|error| error.to_string())
        };
        assert_eq!(compared("/test", json!(true)).unwrap(), Vec::<String>::new());
        assert_eq!(
            compared("/iters", json!(20)).unwrap(),
            ["the run goes on with another `iters`: 20, and it was 10"]
        );
        assert_eq!(
            compared("/lora_parameters/scale", json!(5.0)).unwrap_err(),
            "a run cannot go on with another `scale`: 5.0, and it was 20.0"
        );
        assert!(compared("/seed", json!(1)).unwrap_err().contains("another `seed`"));
    }

    #[test]
    fn a_model_may_have_moved() {
        assert!(check_model("/no/such/model", "/elsewhere").is_ok());
        assert!(check_model("org/name", "org/name").is_ok());
        assert!(check_model("org/name", "/elsewhere").is_err());
        assert!(check_model(env!("CARGO_MANIFEST_DIR"), "/elsewhere").is_err());
    }
}
