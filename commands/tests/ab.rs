//! `mlx-bun ab` on commands whose times are known, and on settings of a tiny model.

#![allow(clippy::unwrap_used)] // clippy counts helpers outside of test functions as production code

mod support;

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use support::processes::alive;
use support::server::checkpoint;
use support::{hearing_hangups, mlx_bun};
use tempfile::TempDir;

fn ab(home: &TempDir, arguments: &[&str]) -> Command {
    let mut command = mlx_bun(&["--no-progress", "-q", "ab"]);
    command.args(arguments).env("HOME", home.path());
    command
}

fn outcome(command: &mut Command) -> (i32, String, String) {
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn result(command: &mut Command, code: i32) -> Value {
    let (status, out, err) = outcome(command.arg("--json"));
    assert_eq!(status, code, "{out}{err}");
    serde_json::from_str(&out).unwrap()
}

/// With the JSON flag in front of `--`.
fn levers(home: &TempDir, a: &str, b: &str, more: &[&str], code: i32) -> Value {
    let model = checkpoint("llama-4bit");
    let mut command = ab(home, &["--json", "--a", a, "--b", b]);
    command.args(more).args([
        "--",
        "generate",
        "--model",
        &model,
        "--threads",
        "1",
        "-m",
        "8",
        "hello there",
    ]);
    let (status, out, err) = outcome(&mut command);
    assert_eq!(status, code, "{out}{err}");
    serde_json::from_str(&out).unwrap()
}

#[test]
fn a_slower_command_loses_and_a_faster_one_wins() {
    let home = tempfile::tempdir().unwrap();
    let limits = ["--max-pairs", "8", "--warmup", "0"];
    let mut slower = ab(&home, &["--command-a", "sleep 0.01", "--command-b", "sleep 0.2"]);
    let lost = result(slower.args(limits), 1);
    assert_eq!((lost["verdict"].as_str(), lost["pairs"].as_u64()), (Some("lose"), Some(8)));
    assert!(lost["ratio"].as_f64().unwrap() > 2.0 && lost["interval"][0].as_f64().unwrap() > 1.0);
    let mut faster = ab(&home, &["--command-a", "sleep 0.2", "--command-b", "sleep 0.01"]);
    let won = result(faster.args(limits), 0);
    assert_eq!(won["verdict"], "win");
    assert_eq!(won["output"]["same"], true);
    let (_, text, _) = outcome(
        ab(&home, &["--command-a", "echo a", "--command-b", "echo b", "--max-pairs", "2"])
            .args(["--gate", "same"]),
    );
    assert!(text.contains("Output: B differs from A\nGate same: does NOT hold\n"), "{text}");
    // Recorded, with its verdict.
    let database = home.path().join(".cache/mlx-bun/evals.sqlite");
    assert!(database.is_file());
}

#[test]
fn a_delay_at_each_step_loses_and_says_the_same() {
    let home = tempfile::tempdir().unwrap();
    let lost =
        levers(&home, "", "MLX_BUN_DEBUG_STEP_DELAY_MS=60", &["--max-pairs", "8", "--gate", "same"], 1);
    assert_eq!((lost["verdict"].as_str(), lost["output"]["same"].as_bool()), (Some("lose"), Some(true)));
    assert_eq!(lost["a"]["output"]["tokens"], 8);
    assert_eq!(lost["a"]["output"]["finish_reason"], "length");
    assert_eq!(lost["b"]["environment"]["MLX_BUN_DEBUG_STEP_DELAY_MS"], "60");
    let figure = ["--max-pairs", "2", "--figure", "decode_tps"];
    let tokens = levers(&home, "", "MLX_BUN_DEBUG_STEP_DELAY_MS=60", &figure, 0);
    assert_eq!(
        (tokens["higher_is_better"].as_bool(), tokens["verdict"].as_str()),
        (Some(true), Some("no-difference"))
    );
    assert!(tokens["ratio"].as_f64().unwrap() < 1.0);
}

#[test]
fn quality_gates_measure_both_settings() {
    let home = tempfile::tempdir().unwrap();
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/perplexity.jsonl");
    let data = data.to_str().unwrap();
    let text = [
        "--gate-data",
        data,
        "--gate-samples",
        "2",
        "--gate-length",
        "48",
        "--max-pairs",
        "1",
        "--warmup",
        "0",
    ];
    let gate = |gate: &'static str| [&["--gate", gate][..], &text].concat();
    let kept = levers(&home, "", "--prefill-step-size 16", &gate("kl<1e-4,ppl<1%"), 0);
    assert_eq!(kept["gates"][0]["holds"], true);
    assert!(kept["quality"]["kl"].as_f64().unwrap() < 1e-4);
    let packed = levers(&home, "", "--kv-quant 4 --kv-group-size 32", &gate("kl<1e-9"), 1);
    assert_eq!(packed["gates"][0]["holds"], false);
    assert!(packed["quality"]["kl"].as_f64().unwrap() > 1e-9);
}

#[test]
fn what_makes_no_sense_is_refused_and_what_fails_says_why() {
    let home = tempfile::tempdir().unwrap();
    for (arguments, code, message) in [
        (&["--", "generate", "x"][..], 2, "error: nothing tells A from B\n"),
        (&["--a", "", "--b", "--l1"], 2, "error: there is no command to compare\n"),
        (&["--a", "'", "--b", "", "--", "generate", "x"], 2, "error: `--a '` has a ' that is not closed\n"),
        (
            &["--a", "", "--b", "", "--gate", "kl>1", "--", "generate", "x"],
            2,
            "error: `--gate`: `kl>1` is no condition",
        ),
        (
            &["--command-a", "true", "--command-b", "true", "--gate", "kl<1"],
            2,
            "error: `--gate` can measure `kl`",
        ),
        (
            &["--command-a", "false", "--command-b", "true"],
            1,
            "error: `false`: it said nothing (exit status: 1)\n",
        ),
        (
            &["--command-a", "true", "--command-b", "true", "--figure", "ttft"],
            1,
            "error: `true`: the command printed no JSON",
        ),
    ] {
        let (status, out, err) = outcome(&mut ab(&home, arguments));
        assert_eq!((status, out.as_str()), (code, ""), "{arguments:?}: {err}");
        assert!(err.starts_with(message), "{arguments:?}: {err}");
    }
}

#[test]
fn a_run_that_hangs_and_text_without_end_fail_in_one_line() {
    let home = tempfile::tempdir().unwrap();
    let limits = ["--warmup", "0", "--max-time", "1"];
    let since = Instant::now();
    let mut hangs = ab(&home, &["--command-a", "sleep 100", "--command-b", "true"]);
    let (status, out, err) = outcome(hangs.args(limits));
    assert_eq!((status, out.as_str()), (1, ""));
    assert_eq!(
        err,
        "error: `sleep 100`: it did not end within 1 s\nhint: give it more time with --run-timeout\n"
    );
    let mut patient = ab(&home, &["--command-a", "sleep 1.2", "--command-b", "sleep 1.2"]);
    let (status, _, err) = outcome(patient.args(limits).args(["--run-timeout", "30"]));
    assert_eq!(status, 0, "{err}");
    assert!(since.elapsed() < Duration::from_secs(60));
    let data = ["--gate-data", "/dev/zero", "--gate", "kl<1"];
    let model = checkpoint("llama-4bit");
    let generate = ["--", "generate", "--model", &model, "-m", "1", "x"];
    let mut endless = ab(&home, &["--a", "", "--b", "", "--max-pairs", "1", "--warmup", "0"]);
    let (status, _, err) = outcome(endless.args(data).args(generate));
    assert_eq!(status, 1);
    assert!(err.contains("cannot read `/dev/zero`: it is a device or a pipe"), "{err}");
}

/// Starts a comparison of commands that write their number into a file, and waits until one did.
fn begun(home: &TempDir, seconds: &str) -> (Child, std::path::PathBuf) {
    let file = home.path().join("started");
    let command = format!("sh -c 'echo $$ >> {}; sleep {seconds} & wait'", file.display());
    let mut command = ab(home, &["--command-a", &command, "--command-b", &command]);
    command.args(["--warmup", "0"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = hearing_hangups(&mut command).spawn().unwrap();
    soon(|| file.exists());
    (child, file)
}

fn soon(holds: impl Fn() -> bool) {
    let since = Instant::now();
    while !holds() {
        assert!(since.elapsed() < Duration::from_secs(30), "it never was so");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn signal(child: &Child, name: &str) {
    assert!(Command::new("kill").args(["-s", name, &child.id().to_string()]).status().unwrap().success());
}

#[test]
fn ctrl_c_reports_the_pairs_that_there_are() {
    let home = tempfile::tempdir().unwrap();
    let (child, file) = begun(&home, "0.2");
    soon(|| std::fs::read_to_string(&file).is_ok_and(|text| text.lines().count() >= 4));
    signal(&child, "INT");
    let output = child.wait_with_output().unwrap();
    let out = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(130), "{out}");
    assert!(out.contains(" pairs (interrupted)\n") && out.contains("Verdict: "), "{out}");
    let listed = mlx_bun(&["evals", "--json"]).env("HOME", home.path()).output().unwrap();
    let rows: Value = serde_json::from_slice(&listed.stdout).unwrap();
    assert!(rows[0]["notes"].as_str().unwrap().ends_with(", interrupted"), "{rows}");
}

#[test]
fn no_death_of_ab_leaves_its_command() {
    for name in ["TERM", "HUP", "KILL"] {
        let home = tempfile::tempdir().unwrap();
        let (mut child, file) = begun(&home, "1000");
        soon(|| std::fs::read_to_string(&file).is_ok_and(|text| text.ends_with('\n')));
        let group = std::fs::read_to_string(&file).unwrap().trim().to_owned();
        signal(&child, name);
        child.wait().unwrap();
        // The shell and its `sleep`; what nobody has waited for is not alive.
        let group: u32 = group.parse().unwrap();
        soon(|| alive().iter().all(|process| process.group != group));
    }
}

#[test]
fn levers_are_listed() {
    let home = tempfile::tempdir().unwrap();
    let (status, table, _) = outcome(&mut ab(&home, &["levers"]));
    assert_eq!(status, 0);
    assert!(
        table.lines().any(|line| line.starts_with("cpu-precision") && line.contains("MLX_BUN_CPU_PRECISION"))
    );
    let listed = result(&mut ab(&home, &["levers"]), 0);
    assert!(listed["levers"].as_array().unwrap().len() > 10);
}

/// Minutes on a quiet machine: `cargo test --workspace --test ab -- --ignored`.
#[test]
#[ignore = "takes minutes"]
fn twenty_comparisons_of_a_setting_with_itself_give_at_most_one_false_verdict() {
    let home = tempfile::tempdir().unwrap();
    let verdicts: Vec<String> = (0..20)
        .map(|_| {
            let model = checkpoint("llama-4bit");
            let mut command = ab(&home, &["--json", "--a", "", "--b", "", "--max-pairs", "16"]);
            command.args(["--", "generate", "--model", &model, "--threads", "1", "-m", "64", "hello there"]);
            let (_, out, err) = outcome(&mut command);
            let result: Value = serde_json::from_str(&out).unwrap_or_else(|_| panic!("{out}{err}"));
            result["verdict"].as_str().unwrap().to_owned()
        })
        .collect();
    let wrong = verdicts.iter().filter(|verdict| *verdict != "no-difference").count();
    assert!(wrong <= 1, "{verdicts:?}");
}
