//! `mlx-bun fuse` and adapters at run time, on the tiny checkpoints.

#![allow(clippy::unwrap_used)] // clippy counts helpers outside of test functions as production code

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use mlx_bun::checkpoint::Tensor;
use mlx_bun::checkpoint::safetensors::SafetensorsFile;
use mlx_bun::checkpoint::source::ModelSource;
use mlx_bun::load::{load, load_adapted};
use mlx_bun::lora::Adapter;
use mlx_bun::mlx::{Array, Dtype};
use mlx_bun::models::Model;
use support::adapter::{Layout, MODULES, adapter};
use support::mlx_bun;

fn checkpoint(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/checkpoints").join(name)
}

fn fuse(model: &Path, adapter: &Path, target: &Path, arguments: &[&str]) -> Command {
    let mut command = mlx_bun(&["--no-progress", "fuse", "--model", model.to_str().unwrap()]);
    command.args(["--adapter-path", adapter.to_str().unwrap(), "--save-path", target.to_str().unwrap()]);
    command.args(arguments);
    command
}

fn stderr(command: &mut Command, status: i32) -> String {
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(status), "{text}");
    text
}

fn logits(model: &dyn Model) -> Vec<f32> {
    let ids: Vec<u32> = (0..24).map(|i| (i * 37 + 11) % 320).collect();
    let ids = Array::from_slice(&ids, &[1, 24]).unwrap();
    model.forward(&ids, None).unwrap().astype(Dtype::Float32).unwrap().to_vec().unwrap()
}

fn of(path: &Path) -> Vec<f32> {
    logits(&*load(&ModelSource::Snapshot(path.to_owned())).unwrap().model)
}

fn adapted(path: &Path, adapter: &Path) -> Vec<f32> {
    let adapter = Adapter::open(adapter).unwrap();
    logits(&*load_adapted(&ModelSource::Snapshot(path.to_owned()), Some(adapter)).unwrap().model)
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn tensors(path: &Path) -> BTreeMap<String, Tensor> {
    let file = SafetensorsFile::open(&path.join("model.safetensors")).unwrap();
    file.tensors().map(|(name, tensor)| (name.to_owned(), tensor)).collect()
}

#[test]
fn a_fused_model_answers_as_the_adapted_one() {
    let folder = tempfile::tempdir().unwrap();
    let model = checkpoint("llama-f32");
    let base = of(&model);
    let mut answers = Vec::new();
    for (name, layout) in [("lora", Layout::MlxLm), ("peft", Layout::Peft), ("dora", Layout::Dora)] {
        let (directory, target) = (folder.path().join(name), folder.path().join(format!("{name}-fused")));
        adapter(&directory, layout, 0.1);
        assert_eq!(
            stderr(&mut fuse(&model, &directory, &target, &[]), 0),
            format!("Fused 6 modules into {}\n", target.display())
        );
        let (at_run_time, fused) = (adapted(&model, &directory), of(&target));
        // Adding the change to a weight rounds it once more than adding its product to the result does.
        let largest = at_run_time.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        assert!(
            distance(&at_run_time, &fused) < 1e-5 * largest,
            "{name}: {}",
            distance(&at_run_time, &fused)
        );
        assert!(distance(&base, &fused) > 0.1, "{name}");
        // Whatever the adapter does not touch keeps its bits.
        let (before, after) = (tensors(&model), tensors(&target));
        for (tensor, stored) in &before {
            let touched = MODULES.iter().any(|(module, ..)| tensor.contains(module));
            assert_eq!(stored.bytes() != after[tensor].bytes(), touched, "{tensor}");
        }
        answers.push(fused);
    }
    assert_eq!(answers[0], answers[1], "PEFT's layout is mlx-lm's, turned");
}

/// cases L1 and L2: a small adapter vanishes when its weights are packed again, which is said; unpacked it stays.
#[test]
fn what_packing_takes_from_an_adapter_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let model = checkpoint("llama-4bit");
    let (small, large) = (folder.path().join("small"), folder.path().join("large"));
    adapter(&small, Layout::MlxLm, 0.003);
    adapter(&large, Layout::MlxLm, 0.6);
    let packed = stderr(&mut fuse(&model, &small, &folder.path().join("packed"), &[]), 0);
    assert!(
        packed.starts_with("warning: packing the weights again left ")
            && packed.contains("hint: --dequantize keeps all of it"),
        "{packed}"
    );
    let text = stderr(&mut fuse(&model, &large, &folder.path().join("large-packed"), &[]), 0);
    assert!(!text.contains("warning"), "{text}");

    let unpacked = folder.path().join("unpacked");
    let text = stderr(&mut fuse(&model, &small, &unpacked, &["--dequantize"]), 0);
    assert!(!text.contains("warning"), "{text}");
    let config = fs::read_to_string(unpacked.join("config.json")).unwrap();
    assert!(!config.contains("quantization"));
    let large_packed = of(&folder.path().join("large-packed"));
    let wanted = adapted(&model, &large);
    assert!(distance(&large_packed, &wanted) < distance(&of(&model), &wanted));
}

/// case L6: the GGUF file is of the model that was saved.
#[test]
fn a_fused_model_is_also_written_as_gguf() {
    let folder = tempfile::tempdir().unwrap();
    let (model, directory) = (checkpoint("llama-f32"), folder.path().join("adapter"));
    adapter(&directory, Layout::MlxLm, 0.1);
    let target = folder.path().join("fused");
    stderr(&mut fuse(&model, &directory, &target, &["--export-gguf"]), 0);
    let gguf = target.join("ggml-model-f16.gguf");
    let answers = logits(&*load(&ModelSource::Gguf(gguf)).unwrap().model);
    let fused = of(&target);
    let largest = fused.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    assert!(distance(&fused, &answers) < 0.01 * largest, "{}", distance(&fused, &answers));
    assert!(distance(&of(&model), &answers) > 0.1);
}

/// The file goes beside what was saved, never over it; all of that is known before the work.
#[test]
fn a_gguf_file_replaces_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (model, directory) = (checkpoint("llama-f32"), folder.path().join("adapter"));
    adapter(&directory, Layout::MlxLm, 0.1);
    let (target, mine) = (folder.path().join("fused"), folder.path().join("mine.gguf"));
    std::fs::write(&mine, "precious").unwrap();
    for (name, status) in
        [("model.safetensors", 2), ("config.json", 2), ("absent/model.gguf", 1), (mine.to_str().unwrap(), 1)]
    {
        let flags = ["--export-gguf", "--gguf-path", name];
        stderr(&mut fuse(&model, &directory, &target, &flags), status);
        assert!(!target.exists(), "{name}");
    }
    assert_eq!(std::fs::read_to_string(&mine).unwrap(), "precious");
    stderr(&mut fuse(&model, &directory, &target, &["--gguf-path", "x.gguf"]), 2);
}

/// case L4: tensors that do not fit are refused and named.
#[test]
fn an_adapter_for_another_model_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (directory, target) = (folder.path().join("adapter"), folder.path().join("out"));
    adapter(&directory, Layout::MlxLm, 0.1);
    let text = stderr(&mut fuse(&checkpoint("qwen3-f32"), &directory, &target, &[]), 1);
    assert!(
        text.starts_with("error: the adapter does not fit the model: `model.layers.0.mlp.down_proj` maps 64 to 64, the adapter has lora_a [96, 4] and lora_b [4, 64]"),
        "{text}"
    );
    assert!(!target.exists());
    let text = stderr(&mut fuse(&checkpoint("llama-f32"), folder.path(), &target, &[]), 1);
    assert!(text.contains("is no adapter: it has neither adapters.safetensors nor"), "{text}");
    // The same at run time.
    let model = checkpoint("qwen3-f32");
    let mut command =
        mlx_bun(&["generate", "--raw", "a", "--max-tokens", "2", "--model", model.to_str().unwrap()]);
    let text = stderr(command.args(["--adapter-path", directory.to_str().unwrap()]), 1);
    assert!(text.contains("the adapter does not fit the model"), "{text}");
}
