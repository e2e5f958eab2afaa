//! `mlx-bun bench-matrix` through its own server on a tiny checkpoint, and on the starter model where it is at hand.

#![allow(clippy::unwrap_used)] // clippy counts helpers outside of test functions as production code

#[path = "../src/bench_matrix/schema_check.rs"]
mod schema_check;
mod support;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use support::processes::{Process, alive};
use support::server::checkpoint;
use support::{hearing_hangups, mlx_bun};
use tempfile::TempDir;

/// `bench-matrix` with a home of its own; the machine of tests is never quiet.
fn bench(home: &TempDir, arguments: &[&str]) -> Command {
    let mut command = mlx_bun(&["--no-progress", "bench-matrix"]);
    command.args(arguments).env("HOME", home.path());
    command
}

fn on_fixture(home: &TempDir, matrix: &str, arguments: &[&str]) -> Command {
    let mut command = bench(home, &[matrix, "--force", "--model", &checkpoint("llama-f32")]);
    command.args(arguments);
    command
}

/// The exit code, standard output and standard error.
fn outcome(command: &mut Command) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (status.code().unwrap(), text(stdout), text(stderr))
}

/// The document of a run, which is what the published schema says.
fn document(command: &mut Command, code: i32) -> Value {
    let (status, out, err) = outcome(command.args(["--json"]));
    assert_eq!(status, code, "{out}\n{err}");
    let document = serde_json::from_str(&out).unwrap();
    let schema = serde_json::from_str(include_str!("../../docs/schema/bench-matrix.schema.json")).unwrap();
    assert_eq!(schema_check::check(&schema, &document).unwrap(), [""; 0], "{out}");
    document
}

fn cell<'a>(document: &'a Value, label: &str) -> &'a Value {
    let cells = document["cells"].as_array().unwrap();
    cells.iter().find(|cell| cell["label"] == label).unwrap_or_else(|| panic!("no cell {label}: {document}"))
}

fn figure(document: &Value, label: &str, name: &str) -> f64 {
    cell(document, label)["figures"][name]["value"].as_f64().unwrap_or_else(|| panic!("{label}: no {name}"))
}

#[test]
fn features_go_through_the_server_and_structured_replies_conform() {
    let home = tempfile::tempdir().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("features.json");
    let arguments = ["--quick", "-m", "8", "-b", "2", "--out", out.to_str().unwrap(), "--json"];
    let (status, stdout, stderr) = outcome(&mut on_fixture(&home, "features", &arguments));
    assert_eq!(status, 0, "{stdout}\n{stderr}");
    assert_eq!(std::fs::read_to_string(&out).unwrap(), stdout);
    let document: Value = serde_json::from_str(&stdout).unwrap();
    for label in ["serial", "serial+grammar", "batch2", "batch2+grammar", "kv8", "kv4", "adapters"] {
        assert_eq!(cell(&document, label)["status"], "measured", "{label}");
        assert!(figure(&document, label, "aggregate_tps") > 0.0);
        assert!(figure(&document, label, "ttft_p95_ms") >= figure(&document, label, "ttft_p50_ms"));
        assert!(figure(&document, label, "itl_p95_ms") >= figure(&document, label, "itl_p50_ms"));
    }
    for label in ["serial+grammar", "batch2+grammar"] {
        assert_eq!(figure(&document, label, "conformance_pct"), 100.0, "{label}");
    }
    assert_eq!(document["gates"].as_array().unwrap().len(), 2);
    assert_eq!(document["passed"], true);
    for (label, beside, clients) in
        [("serial+grammar", "serial", 1.0), ("kv8", "batch2", 2.0), ("adapters", "batch2", 2.0)]
    {
        assert_eq!(cell(&document, label)["beside"]["cell"], beside);
        assert!(cell(&document, label)["beside"]["ratio"].as_f64().unwrap() > 0.0);
        assert_eq!(
            (figure(&document, label, "clients"), figure(&document, label, "batch")),
            (clients, clients)
        );
    }
    assert_eq!(cell(&document, "serial")["beside"], Value::Null);
    assert_eq!(figure(&document, "batch2", "requests"), 4.0);

    // What this build measured on this machine is not measured again, unless it is to be.
    let (_, table, err) = outcome(&mut on_fixture(&home, "features", &["--quick", "-m", "8", "-b", "2"]));
    assert_eq!(table.matches("| reused").count(), 7, "{table}{err}");
    let redo = ["--quick", "-m", "8", "-b", "2", "--redo", "--cells", "serial"];
    let again = self::document(&mut on_fixture(&home, "features", &redo), 0);
    assert_eq!(cell(&again, "serial")["status"], "measured");
    // Other settings are other numbers.
    let other =
        self::document(&mut on_fixture(&home, "features", &["--quick", "-m", "9", "--cells", "serial"]), 0);
    assert_eq!(cell(&other, "serial")["status"], "measured");
}

#[test]
fn a_slower_program_fails_against_its_baseline() {
    let home = tempfile::tempdir().unwrap();
    let base = home.path().join("base.json");
    let base = base.to_str().unwrap();
    let arguments = ["--cells", "serial,batch4", "-m", "12", "--repeats", "2", "--per-client", "1"];
    let measure = |more: &[&str], delay: Option<&str>| {
        let mut command = on_fixture(&home, "features", &arguments);
        command.args(more);
        if let Some(delay) = delay {
            command.env("MLX_BUN_DEBUG_STEP_DELAY_MS", delay);
        }
        outcome(&mut command)
    };
    assert_eq!(measure(&["--out", base], None).0, 0);
    // What is known of a cell is the baseline itself: it is measured again, not compared with itself.
    let itself = measure(&["--baseline", base, "--max-regression", "900%"], None);
    assert_eq!(itself.0, 0, "{}{}", itself.1, itself.2);
    assert!(
        !itself.1.contains("| reused") && itself.2.contains("serial: measured again, for"),
        "{}",
        itself.2
    );
    // The same program; the machine of tests is shared.
    let same = measure(&["--redo", "--baseline", base, "--max-regression", "900%"], None);
    assert_eq!(same.0, 0, "{}{}", same.1, same.2);
    assert!(same.1.contains("Gates that hold:\n\n- serial: aggregate_tps is "), "{}", same.1);
    let other = measure(&["--redo", "--baseline", base, "-m", "13"], None);
    assert_eq!(other.0, 1);
    assert!(
        other.2.contains("says nothing about what is measured here\nerror: the baseline's `requests` is "),
        "{}",
        other.2
    );
    let (status, table, err) = measure(&["--baseline", base, "--max-regression", "5%"], Some("400"));
    assert_eq!(status, 1, "{table}{err}");
    assert!(table.contains("worse than the baseline's") && table.contains("Failures:"), "{table}");
    assert!(err.contains("error: serial: aggregate_tps is ") || err.contains("error: batch4: "), "{err}");
    // Every cell that was measured is compared.
    for label in ["serial", "batch4"] {
        assert!(table.contains(&format!("- {label}: aggregate_tps is ")), "{table}");
    }
    assert!(err.contains("warning: the baseline's `environment` is {}, here it is "), "{err}");
    // The delay is one of the settings that cells are remembered with.
    assert!(!table.contains("reused"), "{table}");
    // A commit stands for what it measured here, if the program knows its commit.
    let written: Value = serde_json::from_str(&std::fs::read_to_string(base).unwrap()).unwrap();
    if let Some(commit) = written["commit"].as_str() {
        let (status, table, err) =
            measure(&["--redo", "--baseline", &commit[..12], "--max-regression", "900%"], None);
        assert_eq!(status, 0, "{table}{err}");
    }
    let absent = measure(&["--baseline", "0123abcd"], None);
    assert_eq!(absent.0, 1);
    assert!(absent.2.contains("the baseline `0123abcd` has none of the cells measured here"), "{}", absent.2);
    let absent = measure(&["--baseline", "before.json"], None);
    assert!(absent.2.contains("`--baseline before.json` is neither a file nor a commit"), "{}", absent.2);
    for (wrong, said) in [
        (["--baseline", "", "--max-regression", "5%"], "must be a file that --out wrote, or a commit"),
        (["--baseline", base, "--max-regression", "0.05"], "with its sign, such as 5%"),
        (["--baseline", base, "--max-regression", "5%%"], "with its sign, such as 5%"),
    ] {
        let (status, _, err) = measure(&wrong, None);
        assert!(status == 2 && err.contains(said), "{wrong:?}: {err}");
    }
    for endless in [["--baseline", "/dev/zero"], ["--out", "/dev/zero"]] {
        let (status, _, err) = measure(&endless, None);
        assert_eq!(status, 1, "{endless:?}: {err}");
    }
}

#[test]
fn modes_have_two_workloads_and_memory() {
    let home = tempfile::tempdir().unwrap();
    let cells =
        "serial-l1/short,serial/short,serial/long,serial-conc4/short,batch2/long,batch4-grammar/short";
    let arguments = ["--quick", "-m", "6", "--long-words", "50", "--cells", cells];
    let document = document(&mut on_fixture(&home, "modes", &arguments), 0);
    assert_eq!(document["cells"].as_array().unwrap().len(), 6);
    assert!(
        figure(&document, "serial/long", "prompt_tokens")
            > figure(&document, "serial/short", "prompt_tokens")
    );
    for label in ["serial-l1/short", "serial-conc4/short", "batch2/long"] {
        for name in ["prefill_tps", "decode_tps", "aggregate_tps"] {
            assert!(figure(&document, label, name) > 0.0, "{label} {name}");
        }
        assert!(figure(&document, label, "peak_bytes") > 1e6, "{label}");
    }
}

#[test]
fn load_tells_latency_and_the_knee_of_a_server_that_is_there() {
    let home = tempfile::tempdir().unwrap();
    let server = support::server::Server::start(&["--threads", "1"]);
    let url = format!("http://{}", server.address);
    let arguments = [
        "load",
        "--force",
        "--url",
        &url,
        "--stack",
        "elsewhere",
        "--clients",
        "1,3",
        "--per-client",
        "2",
        "-m",
        "4",
        "--rpm",
        "120,240",
        "--duration",
        "2",
        "--ttft-limit",
        "600000",
    ];
    let document = document(&mut bench(&home, &arguments), 0);
    assert_eq!(document["stack"], "elsewhere");
    assert_eq!(figure(&document, "closed-3", "requests"), 6.0);
    assert!(figure(&document, "closed-1", "achieved_rpm") > 0.0);
    assert_eq!(figure(&document, "open-240rpm", "errors"), 0.0);
    assert_eq!(document["knee"]["label"], "open-240rpm");
    assert_eq!(document["knee"]["rpm"], 240.0);
    let (status, _, err) =
        outcome(&mut bench(&home, &["load", "--force", "--url", "http://127.0.0.1:9", "--stack", "x"]));
    assert_eq!(status, 1);
    assert!(err.starts_with("error: http://127.0.0.1:9: no answer"), "{err}");
}

#[test]
fn conversions_are_timed_and_what_they_write_goes() {
    let home = tempfile::tempdir().unwrap();
    let temporary = tempfile::tempdir().unwrap();
    let mut command = on_fixture(&home, "convert", &["--quick"]);
    let document = document(command.env("TMPDIR", temporary.path()), 0);
    let (q4, q8) = (figure(&document, "q4", "output_bytes"), figure(&document, "q8", "output_bytes"));
    assert!(
        q4 < q8 && figure(&document, "q4", "seconds") > 0.0 && figure(&document, "q4", "peak_bytes") > 1e6
    );
    assert_eq!(std::fs::read_dir(temporary.path()).unwrap().count(), 0);
}

#[test]
fn what_cannot_be_measured_is_said_before_the_work() {
    let home = tempfile::tempdir().unwrap();
    let (status, _, err) = outcome(&mut on_fixture(&home, "features", &["--cells", "serail"]));
    assert_eq!(status, 2);
    assert!(
        err.starts_with("error: `--cells serail`: there is no such cell\nhint: the cells are serial,"),
        "{err}"
    );
    let (status, _, err) = outcome(&mut bench(&home, &["features", "--force", "--model", "/nowhere/model"]));
    assert_eq!(status, 1, "{err}");
    let (status, _, _) = outcome(&mut bench(&home, &["features", "--url", "http://x"]));
    assert_eq!(status, 2);
    // A server that does not start is a failure of its cell, with its own words.
    let flags = ["--cells", "serial", "--", "--max-kv-size", "0"];
    let (status, table, err) = outcome(&mut on_fixture(&home, "features", &flags));
    assert_eq!(status, 1);
    assert!(
        table.contains("FAILED") && err.contains("error: serial: the server did not start"),
        "{table}{err}"
    );
}

#[test]
fn ctrl_c_ends_with_what_is_there() {
    let home = tempfile::tempdir().unwrap();
    let arguments =
        ["--cells", "serial,batch4", "--repeats", "1000", "-m", "64", "--json", "--", "--threads", "1"];
    let mut command = on_fixture(&home, "features", &arguments);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-s", "INT", &pid]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&document["interrupted"], &document["passed"]), (&Value::Bool(true), &Value::Bool(false)));
}

#[test]
fn no_death_of_the_program_leaves_its_server_or_its_folder() {
    for name in ["TERM", "HUP", "KILL"] {
        let (home, temporary) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let arguments = ["--cells", "adapters", "--repeats", "1000", "-m", "64", "--", "--threads", "1"];
        let mut command = on_fixture(&home, "features", &arguments);
        command.env("TMPDIR", temporary.path()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = hearing_hangups(&mut command).spawn().unwrap();
        let since = Instant::now();
        let server = loop {
            let is_server = |process: &&Process| {
                let arguments = &process.arguments;
                process.parent == child.id()
                    && arguments.contains(" serve ")
                    && arguments.contains("mlx-bun-bench-")
            };
            if let Some(server) = alive().iter().find(is_server) {
                break server.pid;
            }
            assert!(since.elapsed() < Duration::from_secs(60), "no server");
            std::thread::sleep(Duration::from_millis(20));
        };
        assert!(Command::new("kill").args(["-s", name, &child.id().to_string()]).status().unwrap().success());
        child.wait().unwrap();
        let folders = || std::fs::read_dir(temporary.path()).unwrap().count();
        let since = Instant::now();
        while alive().iter().any(|process| process.pid == server) || folders() > 0 {
            assert!(since.elapsed() < Duration::from_secs(30), "{name}: {server} and {} folders", folders());
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Whether this machine is quiet is not for a test to say.
#[test]
fn a_busy_machine_is_refused_with_what_disturbs_it() {
    let home = tempfile::tempdir().unwrap();
    let arguments =
        ["features", "--cells", "serial", "--quick", "-m", "4", "--model", &checkpoint("llama-f32")];
    let (status, out, err) = outcome(bench(&home, &arguments).arg("--json"));
    match status {
        0 => {
            let document: Value = serde_json::from_str(&out).unwrap();
            assert_eq!(document["machine_state"]["ok"], true);
            assert_eq!(cell(&document, "serial")["forced"], false);
        }
        _ => {
            assert!(
                err.starts_with("error: the machine is busy, and its numbers would say little\nerror: "),
                "{err}"
            );
            assert!(err.contains("hint: wait until it is quiet, or give --force") && out.is_empty(), "{err}");
        }
    }
}

/// The model that `scripts/setup.py starter` fetches.
fn starter() -> Option<PathBuf> {
    let cache = std::env::var_os("MLX_BUN_CACHE").map(PathBuf::from);
    let home = std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache/mlx-bun"));
    let file = cache.or(home)?.join("models/SmolLM2-135M-Instruct.Q4_1.gguf");
    file.is_file().then_some(file)
}

#[test]
fn features_of_the_starter_model() {
    let Some(model) = starter() else { return };
    let home = tempfile::tempdir().unwrap();
    let arguments = [
        "features",
        "--quick",
        "--force",
        "--model",
        model.to_str().unwrap(),
        "-m",
        "8",
        "--repeats",
        "1",
        "-b",
        "2",
        "--cells",
        "serial,batch2,batch2+grammar",
    ];
    let document = document(&mut bench(&home, &arguments), 0);
    assert_eq!(figure(&document, "batch2+grammar", "conformance_pct"), 100.0);
    assert!(figure(&document, "batch2", "aggregate_tps") > 0.0);
}
