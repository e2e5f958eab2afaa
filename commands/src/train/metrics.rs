//! `metrics.jsonl`: what a run reported, a JSON object a line, for `train-watch` and `train plot`.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use mlx_bun::checkpoint::atomic_file::write_bytes_atomically;
use mlx_bun::train::report::{TrainReport, ValidationReport};
use serde_json::{Map, Value, json};

/// The file's name in a run's folder.
pub const METRICS_NAME: &str = "metrics.jsonl";

/// The file, open for more lines. What cannot be written is left out: figures must not cost a run.
pub struct Metrics {
    file: Option<File>,
    iterations: u64,
}

impl Metrics {
    /// Begins the file, or goes on after step `after` of a run that was stopped; later lines are of steps that are taken
    /// again.
    pub fn open(folder: &Path, after: u64, iterations: u64, meta: Value) -> Self {
        let path = folder.join(METRICS_NAME);
        let kept: String = read(&path)
            .into_iter()
            .filter(|_| after > 0)
            .filter(|event| event.get("step").and_then(Value::as_u64).is_none_or(|step| step <= after))
            .map(|event| format!("{event}\n"))
            .collect();
        let _ = write_bytes_atomically(&path, kept.as_bytes());
        let mut metrics = Self { file: OpenOptions::new().append(true).open(path).ok(), iterations };
        metrics.write(meta);
        metrics
    }

    fn write(&mut self, mut event: Value) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        if let Some(fields) = event.as_object_mut() {
            fields.insert("t".to_owned(), json!(now.as_millis() as u64));
        }
        if let Some(file) = &mut self.file {
            let _ = file.write_all(format!("{event}\n").as_bytes());
        }
    }

    fn progress(&self, step: u64) -> f64 {
        step as f64 / self.iterations.max(1) as f64
    }

    /// A report of training.
    pub fn train(&mut self, report: &TrainReport) {
        let mut event = json!({
            "type": "metric",
            "kind": "train",
            "step": report.iteration,
            "loss": report.loss,
            "grad_norm": report.gradient_norm,
            "learning_rate": report.learning_rate,
            "iterations_per_second": report.iterations_per_second,
            "tokens_per_sec": report.tokens_per_second,
            "trained_tokens": report.trained_tokens,
            "peak_gb": report.peak_memory_gb,
            "active_gb": report.active_memory_gb,
            "progress": self.progress(report.iteration),
        });
        figures(&mut event, &report.figures);
        self.write(event);
    }

    /// A report of a validation.
    pub fn valid(&mut self, report: &ValidationReport) {
        let mut event = json!({
            "type": "metric",
            "kind": "val",
            "step": report.iteration,
            "loss": report.loss,
            "seconds": report.seconds,
            "progress": self.progress(report.iteration),
        });
        figures(&mut event, &report.figures);
        self.write(event);
    }

    /// How the run ended.
    pub fn end(&mut self, step: u64, outcome: &str) {
        self.write(json!({"type": "end", "step": step, "outcome": outcome}));
    }
}

fn figures(event: &mut Value, figures: &[(&'static str, f64)]) {
    let given: Map<String, Value> =
        figures.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
    if let Some(fields) = event.as_object_mut() {
        fields.extend(given);
    }
}

/// The events of a file, as far as they are whole.
pub fn read(path: &Path) -> Vec<Value> {
    let text = std::fs::read(path).unwrap_or_default();
    let lines = text.split(|byte| *byte == b'\n');
    lines.filter_map(|line| serde_json::from_slice(line).ok()).filter(Value::is_object).collect()
}

/// The file of a run, given its folder or itself.
pub fn file_of(argument: &Path) -> PathBuf {
    if argument.is_dir() { argument.join(METRICS_NAME) } else { argument.to_owned() }
}
