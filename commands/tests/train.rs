//! `mlx-bun train` on the tiny checkpoints.

#![allow(clippy::unwrap_used)] // clippy counts helpers outside of test functions as production code

mod support;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use support::train::{fixture, folder, losses, metrics, outcome, train};
use support::{failed, hearing_hangups, mlx_bun, refused};

/// A run, what it leaves behind, and that other verbs take it.
#[test]
fn a_run_leaves_an_adapter_that_other_verbs_use() {
    let (holder, adapter) = folder();
    let peft = holder.path().join("peft");
    let arguments =
        ["--iters", "6", "--lr", "1e-3", "--mask-prompt", "--export-peft", peft.to_str().unwrap()];
    let (out, err) = outcome(&mut train("llama-f32", "train/pairs", &adapter, &arguments), 0);
    assert!(out.starts_with("Iter 1: val loss ") && out.contains("\nIter 6: train loss "), "{out}");
    assert!(err.contains("--adapter-path"), "{err}");
    let config: Value =
        serde_json::from_slice(&fs::read(adapter.join("adapter_config.json")).unwrap()).unwrap();
    assert_eq!((&config["fine_tune_type"], &config["num_layers"]), (&"lora".into(), &2.into()));
    assert_eq!(config["lora_parameters"]["rank"], 8);
    let events = metrics(&adapter);
    assert_eq!(
        (&events[0]["type"], &events.last().unwrap()["outcome"]),
        (&"meta".into(), &"finished".into())
    );
    assert_eq!(losses(&adapter).len(), 6);
    // Both layouts say the same, and something else than the model alone.
    let perplexity = |adapter: Option<&Path>| {
        let (model, data) = (fixture("checkpoints/llama-f32"), fixture("perplexity.jsonl"));
        let mut command = mlx_bun(&["-q", "perplexity", "--model", &model, "--data-path", &data]);
        command.args(["--sequence-length", "32"]);
        if let Some(adapter) = adapter {
            command.arg("--adapter-path").arg(adapter);
        }
        outcome(&mut command, 0).0
    };
    assert_eq!(perplexity(Some(&adapter)), perplexity(Some(&peft)));
    assert_ne!(perplexity(Some(&adapter)), perplexity(None));
}

#[test]
fn settings_come_from_flags_then_the_file_then_defaults() {
    let (holder, adapter) = folder();
    let file = holder.path().join("lora.yaml");
    fs::write(
        &file,
        "iters: 3\nlearning_rate: 1e-4\nlora_parameters:\n  rank: 2\n  scale: 4.0\n  dropout: 0.0\nwhatever: 1\n\
         lr_schedule:\n  name: cosine_decay\n  warmup: 1\n  arguments: [1e-4, 10]\n",
    )
    .unwrap();
    let arguments = ["-c", file.to_str().unwrap(), "--iters", "2"];
    let (_, err) = outcome(&mut train("llama-f32", "train/pairs", &adapter, &arguments), 0);
    assert!(err.contains("nothing here is called `whatever`"), "{err}");
    assert_eq!(losses(&adapter).len(), 2);
    let config: Value =
        serde_json::from_slice(&fs::read(adapter.join("adapter_config.json")).unwrap()).unwrap();
    assert_eq!(config["lora_parameters"]["rank"], 2);
    let rates: Vec<f64> =
        metrics(&adapter).iter().filter_map(|event| event["learning_rate"].as_f64()).collect();
    // The first is that of the settings' own line; the warm-up begins at 0.
    assert!(rates.contains(&0.0) && rates.iter().any(|rate| (rate - 1e-4).abs() < 1e-9), "{rates:?}");
}

#[test]
fn preferences_are_learned_from_pairs() {
    let (holder, adapter) = folder();
    let data = holder.path().join("pairs.jsonl");
    let row = |index: usize| {
        serde_json::json!({"prompt": format!("say {index}"), "chosen": "yes it is", "rejected": "no no no"})
            .to_string()
    };
    fs::write(&data, (0..8).map(|index| row(index) + "\n").collect::<String>()).unwrap();
    for method in ["dpo", "orpo", "simpo", "kto"] {
        let data = data.to_str().unwrap();
        let arguments = [
            "--method",
            method,
            "--iters",
            "6",
            "--lr",
            "1e-3",
            "--data",
            data,
            "--batch",
            "1",
            "--valid-split",
            "2",
        ];
        let (out, _) = outcome(&mut train("llama-f32", "train/pairs", &adapter, &arguments), 0);
        assert!(out.contains("val loss"), "{out}");
        let events = metrics(&adapter);
        let margins: Vec<f64> =
            events.iter().filter(|e| e["kind"] == "train").map(|e| e["margin"].as_f64().unwrap()).collect();
        assert!(margins[5] > margins[0], "{method}: {margins:?}");
    }
    let (_, err) = outcome(&mut train("llama-f32", "train/pairs", &adapter, &["--method", "dpo"]), 1);
    assert!(err.contains("train.jsonl, line 1: dpo needs rows with `chosen` and `rejected`"), "{err}");
}

#[test]
fn a_dry_run_tells_what_would_happen_and_writes_nothing() {
    let (_holder, adapter) = folder();
    let (out, _) =
        outcome(&mut train("qwen3-4bit", "train/chats", &adapter, &["--dry-run", "--seg", "1"]), 0);
    for expected in [
        "of format messages",
        "train: 13 rows",
        "valid: 6 rows",
        "test: none",
        "to 64",
        "Memory: about",
        "Time: about",
    ] {
        assert!(out.contains(expected), "{expected}: {out}");
    }
    assert!(!adapter.exists());
}

#[test]
fn bad_rows_and_settings_are_told() {
    let (holder, adapter) = folder();
    let data = holder.path().join("train.jsonl");
    fs::write(&data, "{\"text\": \"a\"}\n\n{\"text\": 7}\n").unwrap();
    let (_, err) =
        outcome(&mut train("llama-f32", "train/pairs", &adapter, &["--data", data.to_str().unwrap()]), 1);
    assert!(err.contains("train.jsonl, line 3: `text` is not a string"), "{err}");
    let (_, err) = outcome(&mut train("llama-f32", "train/pairs", &adapter, &["--batch-size", "30"]), 1);
    assert!(err.contains("train rows: 13 examples are fewer than a batch of 30 takes"), "{err}");
    let (_, err) = outcome(&mut train("llama-f32", "train/pairs", &adapter, &["--num-layers", "3"]), 1);
    assert!(err.contains("the model has 2 layers"), "{err}");
    let (_, err) =
        outcome(&mut train("llama-f32", "train/pairs", &adapter, &["--data", "mlx-community/WikiSQL"]), 1);
    assert!(err.contains("data sets of the hub are not read"), "{err}");
    assert!(failed(&["train", "--resume", holder.path().to_str().unwrap()]).contains("cannot go on"));
    let given = |arguments: &[&str]| refused(&[&["train", "--data", "x"], arguments].concat());
    assert!(given(&["--method", "ppo"]).contains("`--method ppo` is unknown; use sft, dpo"));
    assert!(given(&["--sft-scope", "half"]).contains("use full or response"));
    assert!(given(&["--dropout", "1"]).contains("below 1"));
    assert!(given(&["--report-to", "wandb"]).contains("not sent to services"));
    assert!(given(&["--iters", "0"]).contains("`--iters` must be at least 1"));
    assert!(refused(&["train"]).contains("--data is missing"));
}

/// Killed at any moment, a run goes on from its last save and ends as an unbroken one.
#[test]
fn a_killed_run_goes_on_and_ends_as_an_unbroken_one() {
    let (_one, whole) = folder();
    let (_two, broken) = folder();
    let arguments = ["--iters", "60", "--save-every", "5", "--lr", "1e-4", "--dropout", "0.1"];
    outcome(&mut train("llama-f32", "train/pairs", &whole, &arguments), 0);
    let mut child = train("llama-f32", "train/pairs", &broken, &arguments)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(120);
    while !broken.join("0000010_adapters.safetensors").exists() {
        assert!(Instant::now() < deadline, "the run does not save");
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let mut resume =
        mlx_bun(&["--no-progress", "train", "--threads", "2", "--resume", broken.to_str().unwrap()]);
    outcome(&mut resume, 0);
    assert_eq!(losses(&whole), losses(&broken));
    for name in ["adapters.safetensors", "training_state.safetensors"] {
        assert!(fs::read(whole.join(name)).unwrap() == fs::read(broken.join(name)).unwrap(), "{name}");
    }
}

#[cfg(unix)]
#[test]
fn ctrl_c_and_sigterm_save_and_say_how_to_go_on() {
    for (signal, code) in [("-INT", 130), ("-TERM", 143), ("-HUP", 143)] {
        saves_and_says_how_to_go_on(signal, code);
    }
}

#[cfg(unix)]
fn saves_and_says_how_to_go_on(signal: &str, code: i32) {
    let (_holder, adapter) = folder();
    let mut command =
        train("llama-f32", "train/pairs", &adapter, &["--iters", "100000", "--save-every", "100000"]);
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    let child = hearing_hangups(&mut command).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(120);
    while losses_so_far(&adapter) < 3 {
        assert!(Instant::now() < deadline, "the run does not begin");
        std::thread::sleep(Duration::from_millis(5));
    }
    let status = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    assert!(status.success());
    let output = child.wait_with_output().unwrap();
    let err = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{err}");
    assert!(err.contains("go on with `mlx-bun train --resume"), "{err}");
    assert!(adapter.join("training_state.safetensors").is_file());
    assert_eq!(metrics(&adapter).last().unwrap()["outcome"], "interrupted");
}

fn losses_so_far(folder: &Path) -> usize {
    let text = fs::read_to_string(folder.join("metrics.jsonl")).unwrap_or_default();
    text.lines().filter(|line| line.contains("\"train\"")).count()
}

#[test]
fn tests_measure_rows_without_training() {
    let (holder, adapter) = folder();
    let data = holder.path().join("data");
    fs::create_dir(&data).unwrap();
    for name in ["train", "test"] {
        fs::copy(fixture("train/pairs/train.jsonl"), data.join(format!("{name}.jsonl"))).unwrap();
    }
    let data = ["--data", data.to_str().unwrap()];
    let (out, _) = outcome(
        &mut train(
            "llama-f32",
            "train/pairs",
            &adapter,
            &[&data[..], &["--iters", "2", "--train", "--test"]].concat(),
        ),
        0,
    );
    let line = out.lines().last().unwrap().to_owned();
    assert!(line.starts_with("Test loss ") && line.contains("test ppl"), "{out}");
    let (again, _) =
        outcome(&mut train("llama-f32", "train/pairs", &adapter, &[&data[..], &["--test"]].concat()), 0);
    // Batches come in another order, and sums round.
    let loss = |line: &str| line.split(',').next().unwrap().to_owned();
    assert_eq!(loss(again.trim_end()), loss(&line));
    let (without, _) =
        outcome(&mut train("llama-f32", "train/pairs", Path::new(""), &[&data[..], &["--test"]].concat()), 0);
    assert!(without.starts_with("Test loss ") && without.trim_end() != line, "{without}");
}

#[test]
fn runs_are_drawn_and_summed_up() {
    let (holder, adapter) = folder();
    outcome(&mut train("llama-f32", "train/pairs", &adapter, &["--iters", "4"]), 0);
    let run = adapter.to_str().unwrap();
    let picture = holder.path().join("losses.svg");
    let plot = |figure: &str, output: &Path| {
        mlx_bun(&["train", "plot", run, "--figure", figure, "-o", output.to_str().unwrap()])
    };
    outcome(&mut plot("loss", &picture), 0);
    let text = fs::read_to_string(&picture).unwrap();
    assert!(text.contains("loss over steps") && text.contains("validation"), "{text}");
    let (_, err) = outcome(&mut plot("margin", &picture), 1);
    assert!(err.contains("metrics.jsonl has no `margin`"), "{err}");
    let (out, _) = outcome(&mut mlx_bun(&["train-watch", run, "--once"]), 0);
    assert!(out.contains("Step: 4 of 4 (finished)") && out.contains("Validation: "), "{out}");
    assert!(failed(&["train-watch", holder.path().to_str().unwrap(), "--once"]).contains("no run to follow"));
    assert!(refused(&["train-watch", run]).contains("no terminal"));
    // One that is not there yet is waited for.
    assert!(refused(&["train-watch", "no/such/folder"]).contains("no terminal"));
}
