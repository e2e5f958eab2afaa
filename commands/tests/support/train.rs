//! Short training runs on the tiny checkpoints.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::mlx_bun;

pub fn fixture(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures").join(name).to_str().unwrap().to_owned()
}

/// A short run into `adapter`.
pub fn train(model: &str, data: &str, adapter: &Path, arguments: &[&str]) -> Command {
    let (model, data) = (fixture(&format!("checkpoints/{model}")), fixture(data));
    let mut command = mlx_bun(&["--no-progress", "train", "--threads", "2"]);
    command.args(["--model", &model, "--data", &data, "--adapter-path", adapter.to_str().unwrap()]);
    command.args(["--max-seq-length", "100", "--batch-size", "2", "--steps-per-report", "1"]).args(arguments);
    command
}

pub fn outcome(command: &mut Command, status: i32) -> (String, String) {
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let (out, err) = (text(output.stdout), text(output.stderr));
    assert_eq!(output.status.code(), Some(status), "{out}{err}");
    (out, err)
}

pub fn metrics(folder: &Path) -> Vec<Value> {
    let text = fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

pub fn losses(folder: &Path) -> Vec<(u64, f64)> {
    let events = metrics(folder);
    let train = events.iter().filter(|event| event["kind"] == "train");
    train.map(|event| (event["step"].as_u64().unwrap(), event["loss"].as_f64().unwrap())).collect()
}

pub fn folder() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("adapter");
    (folder, path)
}
