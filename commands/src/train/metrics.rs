//! `metrics.jsonl`: what a run reported, a JSON object a line, for `train-watch` and `train plot`.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use mlx_bun::checkpoint::atomic_file::{remove_unfinished, write_bytes_atomically};
use mlx_bun::train::report::{TrainReport, ValidationReport};
use serde_json::{Map, Value, json};

/// The file's name in a run's folder.
pub const METRICS_NAME: &str = "metrics.jsonl";

/// The file, open for more lines. What cannot be written is left out: figures must not cost a run.
pub struct Metrics {
    path: PathBuf,
    file: Option<File>,
    iterations: u64,
    /// Bytes of an earlier run, which stay as long as its adapter does.
    earlier: usize,
}

impl Metrics {
    /// Begins after what an earlier run reported, or goes on after step `after` of the run that was saved; later lines are
    /// of steps that are taken again.
    pub fn open(folder: &Path, after: Option<u64>, iterations: u64, mut meta: Value) -> Self {
        let path = folder.join(METRICS_NAME);
        remove_unfinished(folder, |name| name == METRICS_NAME);
        let mut text = std::fs::read(&path).unwrap_or_default();
        if let Some(after) = after {
            let _ = write_bytes_atomically(&path, &kept(&text, after));
            text.clear();
        }
        if let Some(fields) = meta.as_object_mut() {
            fields.insert("after".to_owned(), json!(after.unwrap_or(0)));
        }
        let file = OpenOptions::new().append(true).create(true).open(&path).ok();
        let mut metrics = Self { path, file, iterations, earlier: text.len() };
        if text.last().is_some_and(|byte| *byte != b'\n')
            && let Some(file) = &mut metrics.file
        {
            // A writer that was killed half-way.
            let _ = file.write_all(b"\n");
        }
        metrics.write(meta);
        metrics
    }

    /// The run was saved: what an earlier one reported goes with its adapter.
    pub fn saved(&mut self) {
        let earlier = std::mem::take(&mut self.earlier);
        if earlier == 0 {
            return;
        }
        let text = std::fs::read(&self.path).unwrap_or_default();
        let own = text.get(earlier..).unwrap_or_default();
        let own = own.strip_prefix(b"\n").unwrap_or(own);
        if write_bytes_atomically(&self.path, own).is_ok() {
            self.file = OpenOptions::new().append(true).open(&self.path).ok();
        }
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

/// Whether a run begins with this event.
fn begins(event: &Value) -> bool {
    event.get("type").and_then(Value::as_str) == Some("meta")
        && event.get("after").and_then(Value::as_u64) == Some(0)
}

/// The lines up to step `after` of the first run in a file, byte for byte: one after it was never saved.
fn kept(text: &[u8], after: u64) -> Vec<u8> {
    let mut kept = Vec::new();
    let mut runs = 0;
    for line in text.split_inclusive(|byte| *byte == b'\n') {
        let Ok(event) = serde_json::from_slice::<Value>(line) else { continue };
        runs += usize::from(begins(&event));
        if runs > 1 {
            break;
        }
        // A validation stands before the next step, which is taken again.
        let last = match event.get("kind").and_then(Value::as_str) {
            Some("val") => after.checked_sub(1),
            _ => Some(after),
        };
        let step = event.get("step").and_then(Value::as_u64);
        if line.ends_with(b"\n") && step.is_none_or(|step| last.is_some_and(|last| step <= last)) {
            kept.extend_from_slice(line);
        }
    }
    kept
}

/// The events of the last run in a file, as far as they are whole.
pub fn read(path: &Path) -> Vec<Value> {
    let text = std::fs::read(path).unwrap_or_default();
    let lines = text.split(|byte| *byte == b'\n');
    let mut events: Vec<Value> =
        lines.filter_map(|line| serde_json::from_slice(line).ok()).filter(Value::is_object).collect();
    let begin = events.iter().rposition(begins).unwrap_or(0);
    events.split_off(begin)
}

/// The file of a run, given its folder or itself.
pub fn file_of(argument: &Path) -> PathBuf {
    if argument.is_dir() { argument.join(METRICS_NAME) } else { argument.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(kind: &str, step: u64) -> String {
        format!(
            "{{\"type\":\"metric\",\"kind\":\"{kind}\",\"step\":{step},\"loss\":1.2345678901234567e-5}}\n"
        )
    }

    /// Parsed and written again, figures had lost their last digit, and a validation was there twice.
    #[test]
    fn what_stays_of_a_run_that_goes_on_stays_byte_for_byte() {
        let begin = "{\"type\":\"meta\",\"after\":0}\n";
        let text =
            [begin, &step("val", 0), &step("train", 1), &step("train", 2), &step("val", 2), "{\"type\""]
                .concat();
        let expected = [begin, &step("val", 0), &step("train", 1), &step("train", 2)].concat();
        assert_eq!(String::from_utf8(kept(text.as_bytes(), 2)).unwrap(), expected);
        // A later run that came to nothing is not the one that was saved.
        let two = [expected.as_str(), begin, &step("train", 1)].concat();
        assert_eq!(String::from_utf8(kept(two.as_bytes(), 2)).unwrap(), expected);
    }

    #[test]
    fn a_new_run_leaves_the_figures_of_the_old_one_until_it_is_saved() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(METRICS_NAME);
        std::fs::write(&path, step("train", 7).trim_end()).unwrap();
        let mut metrics = Metrics::open(folder.path(), None, 9, json!({"type": "meta", "iters": 9}));
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.starts_with(&step("train", 7)), "{text}");
        assert_eq!(read(&path).len(), 1);
        metrics.saved();
        metrics.end(9, "finished");
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("{\"type\":\"meta\"") && text.lines().count() == 2, "{text}");
    }
}
