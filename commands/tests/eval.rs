//! `mlx-bun eval` on the tiny checkpoints.

#![allow(clippy::unwrap_used)] // clippy counts helpers outside of test functions as production code

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::{mlx_bun, outcome};

fn fixture(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures").join(name).to_str().unwrap().to_owned()
}

/// A folder with rows, which the commands of a test see.
struct Rows(tempfile::TempDir);

impl Rows {
    fn new() -> Self {
        let rows = Self(tempfile::tempdir().unwrap());
        let sums = |i: usize| {
            format!("{{\"question\": \"What is {i} plus {i}?\", \"answer\": \"#### {}\"}}\n", 2 * i)
        };
        rows.write("gsm8k.jsonl", &(0..12).map(sums).collect::<String>());
        rows
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, text: &str) -> String {
        fs::write(self.path(name), text).unwrap();
        self.path(name).to_str().unwrap().to_owned()
    }

    fn eval(&self, arguments: &[&str]) -> Command {
        let mut command = mlx_bun(&["--no-progress", "eval"]);
        command
            .args(arguments)
            .env("MLX_BUN_EVAL_DATA", self.0.path())
            .env("MLX_BUN_CACHE", self.path("cache"));
        command
    }

    /// As [`eval`](Self::eval), with a model that answers at random, the same every time.
    fn ask(&self, arguments: &[&str]) -> Command {
        let mut command = self.eval(arguments);
        command.args([
            "--model",
            &fixture("checkpoints/qwen3-f32"),
            "--max-tokens",
            "12",
            "--num-shots",
            "0",
        ]);
        command
    }

    fn samples(&self, folder: &str, task: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.path(folder).join(format!("{task}.jsonl"))).unwrap();
        let mut samples: Vec<Value> =
            text.lines().skip(1).map(|line| serde_json::from_str(line).unwrap()).collect();
        samples.sort_by_key(|sample| sample["index"].as_u64());
        samples
    }
}

/// The JSON that a command prints; it must succeed.
fn result(command: &mut Command) -> Value {
    let output = command.arg("--json").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Standard error of a command that ends with a status.
fn complaint(command: &mut Command, status: i32) -> String {
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(status), "{text}");
    text
}

#[test]
fn e4_scores_of_twenty_questions_are_mlx_lms() {
    let expected: Value =
        serde_json::from_slice(&fs::read(fixture("evals/multiple_choice.json")).unwrap()).unwrap();
    let rows = Rows::new();
    for (model, expected) in expected.as_object().unwrap() {
        let folder = rows.path(model).to_str().unwrap().to_owned();
        let data = fixture("evals/multiple_choice.jsonl");
        let found = result(
            rows.eval(&[
                "multiple-choice",
                "--l1",
                "--batch",
                "5",
                "--data-path",
                &data,
                "--output-dir",
                &folder,
            ])
            .args(["--model", &fixture(&format!("checkpoints/{model}"))]),
        );
        let task = &found["tasks"][0];
        assert_eq!(task["total"], 20);
        assert_eq!(task["correct"], expected["acc"], "{model}");
        assert_eq!(task["acc_norm"]["correct"], expected["acc_norm"], "{model}");
        for (sample, expected) in rows
            .samples(model, "multiple-choice")
            .iter()
            .zip(expected["log_probabilities"].as_array().unwrap())
        {
            let values = |value: &Value| -> Vec<f64> {
                value.as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect()
            };
            let (ours, theirs) = (values(&sample["detail"]["log_probabilities"]), values(expected));
            // Padding changes MLX's own sums in their last bits, more so in low precision.
            let tolerance = if model.ends_with("f32") { 1e-3 } else { 0.15 };
            let near = |(a, b): (&f64, &f64)| (a - b).abs() < tolerance * b.abs().max(1.0);
            assert!(
                ours.len() == theirs.len() && ours.iter().zip(&theirs).all(near),
                "{model}: {ours:?} {theirs:?}"
            );
        }
    }
}

#[test]
fn answers_do_not_depend_on_how_many_are_asked_at_a_time() {
    let rows = Rows::new();
    let choices = fixture("evals/multiple_choice.jsonl");
    for batch in ["1", "8"] {
        let folder = rows.path(batch).to_str().unwrap().to_owned();
        let command = &mut rows.ask(&["gsm8k", "multiple-choice", "--batch", batch, "--output-dir", &folder]);
        result(command.args(["--data-path", &choices]));
    }
    assert_eq!(rows.samples("1", "gsm8k").len(), 12);
    assert_eq!(rows.samples("1", "gsm8k"), rows.samples("8", "gsm8k"));
    assert_eq!(rows.samples("1", "multiple-choice"), rows.samples("8", "multiple-choice"));
}

#[test]
fn a_killed_run_goes_on_to_the_same_score() {
    let rows = Rows::new();
    let (whole, killed) = (rows.path("whole"), rows.path("killed"));
    let arguments = |folder: &Path| {
        vec!["gsm8k".to_owned(), "--output-dir".to_owned(), folder.to_str().unwrap().to_owned()]
    };
    let run = |folder: &Path, more: &[&str]| {
        let arguments = arguments(folder);
        let mut arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        arguments.extend(more);
        result(&mut rows.ask(&arguments))
    };
    let expected = run(&whole, &[]);
    // Slow enough to be caught in the middle: many tokens, one question at a time.
    let file = killed.join("gsm8k.jsonl");
    let arguments = arguments(&killed);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let mut child = rows
        .ask(&arguments)
        .args(["--batch", "1"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let started = Instant::now();
    let lines = || fs::read_to_string(&file).unwrap_or_default().lines().count();
    while lines() < 4 && child.try_wait().unwrap().is_none() && started.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    // What a kill in the middle of a write leaves.
    let text = fs::read_to_string(&file).unwrap();
    let kept: String = text.split_inclusive('\n').take(4).collect();
    fs::write(&file, format!("{kept}{{\"index\": 3, \"id\": \"gs")).unwrap();
    let resumed = run(&killed, &["--resume"]);
    for field in ["correct", "total", "percent", "interval"] {
        assert_eq!(resumed["tasks"][0][field], expected["tasks"][0][field], "{field}");
    }
    assert_eq!(rows.samples("killed", "gsm8k"), rows.samples("whole", "gsm8k"));
    assert!(fs::read_to_string(&file).unwrap().starts_with(&kept));
}

#[test]
fn ctrl_c_ends_with_130_and_the_run_goes_on_from_there() {
    let rows = Rows::new();
    let many: String =
        (0..300).map(|i| format!("{{\"question\": \"What is {i}?\", \"answer\": \"{i}\"}}\n")).collect();
    rows.write("gsm8k.jsonl", &many);
    let folder = rows.path("out");
    let arguments = ["gsm8k", "--output-dir", folder.to_str().unwrap()];
    let mut child = rows.ask(&arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let lines = || fs::read_to_string(folder.join("gsm8k.jsonl")).unwrap_or_default().lines().count();
    let started = Instant::now();
    while lines() < 3 && child.try_wait().unwrap().is_none() && started.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(1));
    }
    let stopped = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(stopped.success());
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(130), "{text}");
    assert!(text.contains("hint: --resume goes on from here"), "{text}");
    let before = lines();
    assert!((3..300).contains(&before), "{before}");
    let resumed = result(rows.ask(&arguments).arg("--resume"));
    assert_eq!(resumed["tasks"][0]["total"], 300);
    let indices: Vec<u64> =
        rows.samples("out", "gsm8k").iter().map(|sample| sample["index"].as_u64().unwrap()).collect();
    assert_eq!(indices, (0..300).collect::<Vec<_>>());
    assert!(rows.path("cache").join("evals.sqlite").is_file());
}

#[test]
fn sigterm_does_not_wait_for_a_step_that_takes_long() {
    let rows = Rows::new();
    let folder = rows.path("out");
    let mut child = rows
        .ask(&["gsm8k", "--output-dir", folder.to_str().unwrap()])
        .env("MLX_BUN_DEBUG_STEP_DELAY_MS", "60000")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let started = Instant::now();
    // Written when the questions begin.
    while !folder.join("gsm8k.jsonl").exists() && started.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(1));
    }
    let told = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert!(told.success());
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert!(started.elapsed() < Duration::from_secs(55));
}

#[test]
fn another_run_is_not_continued() {
    let rows = Rows::new();
    let folder = rows.path("out").to_str().unwrap().to_owned();
    let run = |more: &[&str]| {
        let mut command = rows.ask(&["gsm8k", "--limit", "2", "--output-dir", &folder]);
        command.args(more);
        command
    };
    result(&mut run(&[]));
    let text = complaint(&mut run(&[]), 1);
    assert!(text.contains("gsm8k.jsonl exists already\nhint: give --resume"), "{text}");
    let text = complaint(run(&["--resume"]).args(["--seed", "7"]), 1);
    assert!(text.contains("cannot be continued: its settings has `seed` 42, this run 7"), "{text}");
    rows.write(
        "gsm8k.jsonl",
        "{\"question\": \"q\", \"answer\": \"#### 1\"}\n{\"question\": \"r\", \"answer\": \"#### 1\"}\n",
    );
    let text = complaint(&mut run(&["--resume"]), 1);
    assert!(text.contains("its settings has `data`"), "{text}");
}

#[test]
fn kl_of_identical_arms_is_exactly_zero() {
    let rows = Rows::new();
    let run = |arguments: &[&str]| result(&mut rows.ask(arguments))["tasks"][0].clone();
    let same = run(&["kl", "--l1", "--limit", "8"]);
    assert_eq!((&same["kl_mean"], &same["kl_p95"]), (&json!(0.0), &json!(0.0)));
    assert_eq!(same["top1_agreement"], 1.0);
    let baseline = fixture("checkpoints/qwen3-4bit");
    let other = run(&["kl", "--limit", "8", "--baseline", &baseline]);
    assert!(other["kl_mean"].as_f64().unwrap() > 1e-3, "{other}");
    let packed = |bits: &str| {
        run(&["kl", "--limit", "8", "--kv-quant", bits, "--kv-group-size", "32"])["kl_mean"].as_f64().unwrap()
    };
    let (four, eight) = (packed("4"), packed("8"));
    assert!(four > eight && eight > 0.0, "{four} {eight}");
}

#[test]
fn code_runs_in_the_sandbox_and_its_verdict_counts() {
    let rows = Rows::new();
    let row = |prompt: &str, test: &str| {
        json!({"task_id": "t", "prompt": prompt, "entry_point": "f", "test": test}).to_string() + "\n"
    };
    let stub = "def f(x):\n    \"\"\"Return something.\"\"\"\n";
    // What a random model writes is no Python, so the verdicts are those of the harness.
    rows.write("humaneval.jsonl", &row(stub, "def check(c):\n    assert c(1) == 1"));
    let folder = rows.path("out").to_str().unwrap().to_owned();
    result(&mut rows.ask(&["humaneval", "--output-dir", &folder]));
    let sample = &rows.samples("out", "humaneval")[0];
    assert_eq!(sample["correct"], false);
    assert!(sample["detail"]["result"].as_str().unwrap().starts_with("failed: "), "{sample}");
}

#[test]
fn bad_rows_are_placed() {
    let rows = Rows::new();
    let file = rows.write(
        "mine.jsonl",
        "{\"context\": \"a\", \"choices\": [\"b\", \"c\"], \"answer\": 0}\n\n{\"context\": \"a\"}\n",
    );
    let text = complaint(&mut rows.ask(&["multiple-choice", "--data-path", &file]), 1);
    assert_eq!(text, format!("error: {file}:3: the row has no `choices`\n"));
    let text = complaint(&mut rows.eval(&["import", "gsm8k", &file]), 1);
    assert_eq!(text, format!("error: {file}:1: the row has no `question`\n"));
}

#[test]
fn what_is_missing_is_said_with_what_to_do() {
    let rows = Rows::new();
    let place = rows.0.path().display().to_string();
    let text = complaint(&mut rows.ask(&["humaneval"]), 1).replace(&place, "DATA");
    assert_eq!(
        text,
        "error: there is no data for humaneval: DATA has none of humaneval.jsonl, HumanEval.jsonl\n\
         hint: `mlx-bun eval fetch-data humaneval` gets it\n"
    );
    let text = complaint(&mut rows.ask(&["multiple-choice"]), 2);
    assert!(text.starts_with("error: multiple-choice needs rows\nhint: "), "{text}");
    complaint(&mut rows.eval(&[]), 2);
    complaint(&mut rows.eval(&["gsm8k", "--resume"]), 2);
    complaint(&mut rows.eval(&["gsm8k", "--limit", "0"]), 2);
    let text = outcome(&mut rows.ask(&["all", "--limit", "1"]));
    assert!(text.contains("warning: there is no data for mmlu") && text.starts_with("exit 0"), "{text}");
}

#[test]
fn one_object_holds_the_result() {
    let rows = Rows::new();
    let out = rows.path("out.json").to_str().unwrap().to_owned();
    let found = result(&mut rows.ask(&["smoketest", "--limit", "3", "--out", &out]));
    assert_eq!(found, serde_json::from_slice::<Value>(&fs::read(&out).unwrap()).unwrap());
    assert_eq!(found["schema_version"], 1);
    let tasks: Vec<&Value> = found["tasks"].as_array().unwrap().iter().map(|task| &task["task"]).collect();
    assert_eq!(tasks, ["kl", "gsm8k"]);
    assert_eq!(found["tasks"][1]["total"], 3);
    assert_eq!(found["capability_score"], found["tasks"][1]["percent"]);
    let text = rows.write("other.json", "{}");
    let text = complaint(&mut rows.ask(&["gsm8k", "--out", &text]), 1);
    assert!(text.contains("exists and is no result of this verb"), "{text}");
}
