//! What runs of `mlx-bun train` refuse, keep and hand on.

#![allow(clippy::unwrap_used)] // clippy counts helpers outside of test functions as production code

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use support::mlx_bun;
use support::server::{Server, chat, content};
use support::train::{fixture, folder, metrics, outcome, train};

fn config(adapter: &Path) -> Value {
    serde_json::from_slice(&fs::read(adapter.join("adapter_config.json")).unwrap()).unwrap()
}

/// A folder of rows to learn from and to test with.
fn with_test_rows(holder: &Path) -> String {
    let data = holder.join("data");
    fs::create_dir(&data).unwrap();
    for name in ["train", "test"] {
        fs::copy(fixture("train/pairs/train.jsonl"), data.join(format!("{name}.jsonl"))).unwrap();
    }
    data.to_str().unwrap().to_owned()
}

fn perplexity(model: &str, adapter: Option<&Path>) -> String {
    let mut command = mlx_bun(&["-q", "perplexity", "--model", model]);
    command.args(["--data-path", &fixture("perplexity.jsonl"), "--sequence-length", "32"]);
    if let Some(adapter) = adapter {
        command.arg("--adapter-path").arg(adapter);
    }
    outcome(&mut command, 0).0
}

fn fuse(model: &str, adapter: &Path, target: &Path, status: i32) -> String {
    let mut command = mlx_bun(&["--no-progress", "fuse", "--model", model, "--adapter-path"]);
    command.arg(adapter).arg("--save-path").arg(target);
    outcome(&mut command, status).1
}

/// The test loss as it is printed.
fn tested(out: &str) -> String {
    let line = out.lines().find(|line| line.starts_with("Test loss")).unwrap();
    line.split(',').next().unwrap().to_owned()
}

fn resume(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = mlx_bun(&["--no-progress", "train", "--threads", "2", "--resume"]);
    command.arg(folder).args(arguments);
    command
}

fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| (path.clone(), fs::read(&path).unwrap())).collect()
}

/// The config had one rank and the files several, and nothing loaded them.
#[test]
fn ranks_of_several_widths_make_one_adapter_that_everything_loads() {
    let (holder, adapter) = folder();
    let (peft, fused) = (holder.path().join("peft"), holder.path().join("fused"));
    let data = with_test_rows(holder.path());
    let arguments = [
        "--data",
        &data,
        "--iters",
        "3",
        "--lr",
        "1e-2",
        "--rank-policy",
        "by_bits",
        "--rs-lora",
        "--train",
        "--test",
        "--export-peft",
        peft.to_str().unwrap(),
    ];
    let (out, err) = outcome(&mut train("llama-quantmix_f32", "train/pairs", &adapter, &arguments), 0);
    let told = err.lines().find(|line| line.starts_with("Training ")).unwrap();
    assert!(told.contains(", ranks "), "{told}");
    let written = config(&adapter);
    let ranks =
        written["mlx_bun"]["applied_ranks"].as_object().unwrap().values().map(|rank| rank.as_u64().unwrap());
    let (low, high) = (ranks.clone().min().unwrap(), ranks.max().unwrap());
    assert!(low < high, "{low} {high}");
    assert_eq!((&written["lora_parameters"]["rank"], &written["rs_lora"]), (&high.into(), &false.into()));
    // As good from its files as it was in the run.
    let again = ["--data", &data, "--test"];
    let (loaded, _) = outcome(&mut train("llama-quantmix_f32", "train/pairs", &adapter, &again), 0);
    assert_eq!(tested(&loaded), tested(&out));
    let model = fixture("checkpoints/llama-quantmix_f32");
    assert_eq!(perplexity(&model, Some(&adapter)), perplexity(&model, Some(&peft)));
    assert_ne!(perplexity(&model, Some(&adapter)), perplexity(&model, None));
    assert!(fuse(&model, &adapter, &fused, 0).contains("Fused "));
    // The state keeps the real ranks, with which the run goes on, and so does a run that begins with its values.
    outcome(&mut resume(&adapter, &["--iters", "4"]), 0);
    assert_eq!(config(&adapter)["mlx_bun"]["applied_ranks"], written["mlx_bun"]["applied_ranks"]);
    let (next, values) = (holder.path().join("next"), adapter.join("adapters.safetensors"));
    let arguments =
        ["--iters", "1", "--rank-policy", "by_bits", "--resume-adapter-file", values.to_str().unwrap()];
    outcome(&mut train("llama-quantmix_f32", "train/pairs", &next, &arguments), 0);
}

#[test]
fn ranks_by_divergence_need_its_figures() {
    let (_holder, adapter) = folder();
    let arguments = ["--iters", "1", "--rank-policy", "by_kl"];
    let (_, err) = outcome(&mut train("llama-f32", "train/pairs", &adapter, &arguments), 1);
    assert!(err.contains("the model has no optiq_metadata.json, and is not quantized"), "{err}");
    let (_, err) = outcome(&mut train("llama-4bit", "train/pairs", &adapter, &arguments), 0);
    assert!(err.contains("the model has no optiq_metadata.json; ranks go by bits"), "{err}");
}

/// A run over whole weights ended in files that nothing here could use.
#[test]
fn whole_weights_are_loaded_measured_and_fused() {
    let (holder, adapter) = folder();
    let data = with_test_rows(holder.path());
    let arguments =
        ["--data", &data, "--iters", "2", "--lr", "1e-3", "--fine-tune-type", "full", "--train", "--test"];
    let (out, _) = outcome(&mut train("llama-f32", "train/pairs", &adapter, &arguments), 0);
    let (loaded, _) =
        outcome(&mut train("llama-f32", "train/pairs", &adapter, &["--data", &data, "--test"]), 0);
    assert_eq!(tested(&loaded), tested(&out));
    let model = fixture("checkpoints/llama-f32");
    let fused = holder.path().join("fused");
    let err = fuse(&model, &adapter, &fused, 0);
    assert!(err.contains("Fused 18 tensors into "), "{err}");
    let measured = perplexity(&model, Some(&adapter));
    assert_ne!(measured, perplexity(&model, None));
    assert_eq!(measured, perplexity(fused.to_str().unwrap(), None));
    let mut generate = mlx_bun(&["-q", "generate", "--model", &model, "--max-tokens", "2", "--prompt", "a"]);
    outcome(generate.arg("--adapter-path").arg(&adapter), 0);
    let reply = |server: &Server| content(&server.ask("/v1/chat/completions", &chat("Hello", 8))).to_owned();
    let served = Server::over(&model, &["--adapter-path", adapter.to_str().unwrap()]);
    assert_eq!(reply(&served), reply(&Server::over(fused.to_str().unwrap(), &[])));
    assert_eq!(served.get("/v1/adapters").json()["adapters"], Value::Array(Vec::new()));
    // Another model, and the same one packed.
    let other = holder.path().join("other");
    let err = fuse(&fixture("checkpoints/llama-4bit"), &adapter, &other, 1);
    assert!(err.contains("is quantized in the model and cannot be replaced"), "{err}");
    let err = fuse(&fixture("checkpoints/gemma3_text-f32"), &adapter, &other, 1);
    assert!(err.contains("was it trained for another base model?"), "{err}");
}

/// The state was deleted and the config replaced as soon as a run began.
#[test]
fn a_run_that_is_killed_before_it_saves_leaves_the_earlier_one_whole() {
    let (_holder, adapter) = folder();
    let first = ["--iters", "3", "--save-every", "1", "--lr", "1e-3"];
    outcome(&mut train("llama-f32", "train/pairs", &adapter, &first), 0);
    let before = files(&adapter);
    let second = ["--iters", "100000", "--save-every", "100000", "--rank", "4", "--scale", "1"];
    let mut child = train("llama-f32", "train/pairs", &adapter, &second)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(120);
    let begun = || metrics(&adapter).iter().filter(|event| event["type"] == "meta").count() > 1;
    while !begun() {
        assert!(Instant::now() < deadline, "the run does not begin");
        std::thread::sleep(Duration::from_millis(20));
    }
    // No other run may write there meanwhile.
    let (_, err) = outcome(&mut train("llama-f32", "train/pairs", &adapter, &first), 1);
    assert!(err.contains("another run writes into "), "{err}");
    child.kill().unwrap();
    child.wait().unwrap();
    let figures = adapter.join("metrics.jsonl");
    let mut after = files(&adapter);
    assert!(after.remove(&figures).unwrap().starts_with(&before[&figures]));
    assert!(after.iter().all(|(path, bytes)| before[path] == *bytes) && after.len() == before.len() - 1);
    // It goes on, and its figures are its own.
    outcome(&mut resume(&adapter, &["--iters", "4"]), 0);
    let steps: Vec<_> =
        metrics(&adapter).iter().filter(|e| e["kind"] == "train").map(|e| e["step"].clone()).collect();
    assert_eq!(steps, [1, 2, 3, 4]);
    // The next run replaces everything together.
    let third = ["--iters", "1", "--rank", "4"];
    let (_, err) = outcome(&mut train("llama-f32", "train/pairs", &adapter, &third), 0);
    assert!(err.contains("is replaced when this run is saved"), "{err}");
    assert_eq!(config(&adapter)["lora_parameters"]["rank"], 4);
    assert!(!adapter.join("0000003_adapters.safetensors").exists());
    assert_eq!(metrics(&adapter).iter().filter(|event| event["type"] == "meta").count(), 1);
}

#[test]
fn resuming_takes_the_runs_own_settings_and_refuses_what_makes_it_another() {
    let (holder, adapter) = folder();
    let data = with_test_rows(holder.path());
    // A relative path means the same from another folder.
    let mut first = train("llama-f32", "train/pairs", &adapter, &["--data", "data", "--iters", "2"]);
    outcome(first.current_dir(holder.path()), 0);
    let before = files(&adapter);
    let same = || files(&adapter) == before;
    // The folder of --adapter-path, if no other is named; and nothing is left to do.
    let mut bare =
        mlx_bun(&["--no-progress", "train", "--adapter-path", adapter.to_str().unwrap(), "--resume"]);
    let (_, err) = outcome(&mut bare, 0);
    assert!(err.contains("Nothing is left to train: 2 steps are taken, and --iters is 2"), "{err}");
    assert!(!err.contains("Saved: ") && same());
    let refused = |arguments: &[&str], message: &str, status: i32| {
        let (_, err) = outcome(&mut resume(&adapter, arguments), status);
        assert!(err.contains(message) && same(), "{arguments:?}: {err}");
    };
    refused(&["--seed", "1"], "a run cannot go on with another `seed`: 1, and it was 0", 2);
    refused(&["--scale", "5"], "another `scale`: 5.0, and it was 20.0", 2);
    refused(&["--rs-lora"], "another `rs_lora`", 2);
    refused(&["--mask-prompt"], "another `mask_prompt`", 2);
    refused(&["--adapter-path", "elsewhere"], "not in `elsewhere`", 2);
    refused(&["--resume-adapter-file", "x.safetensors"], "begins a run with an adapter's values", 2);
    refused(&["--model", &fixture("checkpoints/llama-bf16")], "was started with the model", 2);
    let other = fixture("train/chats");
    refused(&["--iters", "3", "--data", &other], "the rows to learn from are not those", 1);
    refused(&["--iters", "3", "--data", &other, "--dry-run"], "the rows to learn from are not those", 1);
    let (_, err) =
        outcome(&mut resume(&adapter, &["--iters", "3", "--lr", "1e-4", "--test", "--data", &data]), 0);
    assert!(err.contains("another `learning_rate`: 0.0001, and it was 0.00001"), "{err}");
    assert_eq!(config(&adapter)["iters"], 3);
}

#[test]
fn a_loss_that_is_no_number_is_told_with_what_is_saved() {
    let (_holder, adapter) = folder();
    let arguments = ["--iters", "5", "--save-every", "1", "--lr", "1e30"];
    let (_, err) = outcome(&mut train("llama-f32", "train/pairs", &adapter, &arguments), 1);
    assert!(err.contains("after 1 steps the loss or the gradient is no number; nothing was saved"), "{err}");
    assert!(!err.contains("Saved: ") && !adapter.join("adapters.safetensors").exists(), "{err}");
}

/// A copy of a checkpoint with a weight that is no number.
fn damaged(holder: &Path) -> String {
    let model = holder.join("damaged");
    fs::create_dir(&model).unwrap();
    for entry in fs::read_dir(fixture("checkpoints/llama-f32")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, model.join(path.file_name().unwrap())).unwrap();
    }
    let weights = model.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let end = bytes.len() - 4;
    bytes[end..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(weights, bytes).unwrap();
    model.to_str().unwrap().to_owned()
}

/// A dry run approved what then failed.
#[test]
fn a_dry_run_refuses_what_a_run_refuses() {
    let (holder, adapter) = folder();
    let (damaged, file) = (damaged(holder.path()), holder.path().join("file"));
    fs::write(&file, "").unwrap();
    let (own, below) = (adapter.to_str().unwrap(), file.join("x"));
    let rows = fixture("train/pairs/train.jsonl");
    let cases: [(&[&str], i32, &str); 6] = [
        (
            &["--data", &rows, "--valid-split", "1"],
            1,
            "valid rows: 1 examples are fewer than a batch of 2 takes",
        ),
        (&["--model", &damaged], 1, "of the first step is no number"),
        (&["--export-peft", own], 2, "is the adapter's own folder"),
        (&["--export-peft", below.to_str().unwrap()], 1, "is no folder"),
        (&["--fine-tune-type", "full", "--export-peft", "x"], 2, "not for whole weights"),
        (&["--iters", "3", "--grad-accum", "4"], 2, "nothing would be learned"),
    ];
    for (arguments, status, message) in cases {
        for dry in [&["--dry-run"][..], &[]] {
            let all = [arguments, dry].concat();
            let (_, err) = outcome(&mut train("llama-f32", "train/pairs", &adapter, &all), status);
            assert!(err.contains(message), "{all:?}: {err}");
            assert_eq!(
                err.matches("fewer than a batch").count(),
                usize::from(message.contains("fewer")),
                "{err}"
            );
        }
    }
    let below = file.join("adapter");
    let (_, err) = outcome(&mut train("llama-f32", "train/pairs", &below, &[]), 1);
    assert!(err.contains(&format!("cannot write into `{}`", below.display())), "{err}");
}

#[test]
fn settings_that_do_nothing_or_contradict_each_other_are_told() {
    let (holder, adapter) = folder();
    let file = holder.path().join("a.yaml");
    let run = |text: &str, arguments: &[&str], status: i32| {
        fs::write(&file, text).unwrap();
        let all = [&["-c", file.to_str().unwrap(), "--iters", "1"], arguments].concat();
        outcome(&mut train("llama-f32", "train/pairs", &adapter, &all), status).1
    };
    let schedule = "lr_schedule:\n  name: cosine_decay\n  arguments: [1e-4, 10]\n";
    let err = run(schedule, &["--lr", "1e-3", "--beta", "0.2"], 0);
    assert!(err.contains("`lr_schedule` does nothing, as `--learning-rate` was given"), "{err}");
    assert!(err.contains("`--beta` does nothing with `--method sft`"), "{err}");
    let rates: Vec<_> =
        metrics(&adapter).iter().filter_map(|event| event["learning_rate"].as_f64()).collect();
    assert!(rates.len() == 2 && rates.iter().all(|rate| (rate - 1e-3).abs() < 1e-9), "{rates:?}");
    assert_eq!(config(&adapter)["lr_schedule"], Value::Null);
    assert!(run("lerning_rate: 1\n", &[], 0).contains("`lerning_rate`; did you mean `learning_rate`?"));
    assert!(run("train: false\n", &[], 2).contains("there is nothing to do"));
    assert!(run("iters: 1\niters: 2\n", &[], 2).contains("duplicate mapping key"));
    assert!(run("optimizer_config:\n  adam: 3\n", &[], 2).contains("`optimizer_config.adam` must hold"));
    assert!(run("", &["--num-layers", "-2"], 2).contains("or -1 for all, and is -2"));
    assert!(run("", &["--fine-tune-type", "full", "--rank", "2"], 0).contains("`--rank` does nothing"));
    let mut silent = train("llama-f32", "train/pairs", &adapter, &["--iters", "1", "-qq"]);
    assert_eq!(outcome(&mut silent, 0), (String::new(), String::new()));
}
