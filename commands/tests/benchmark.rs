//! `mlx-bun benchmark` on a tiny checkpoint: what is printed, recorded, refused, and kept after Ctrl-C.

#![allow(clippy::unwrap_used)] // clippy counts helpers outside of test functions as production code

mod support;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use support::{mlx_bun, refused};

fn model() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/checkpoints/llama-bf16");
    path.canonicalize().unwrap().to_str().unwrap().to_owned()
}

/// In an environment whose database is in `folder`.
fn benchmark(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = mlx_bun(&["--no-progress", "benchmark", "--no-warmup", "-m", &model()]);
    command.args(arguments).env("MLX_BUN_CACHE", folder);
    command
}

fn succeed(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn recorded(folder: &Path) -> Vec<Value> {
    let mut command = mlx_bun(&["evals", "--limit", "0", "--raw"]);
    let output = succeed(command.env("MLX_BUN_CACHE", folder));
    text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn every_cell_of_the_matrix_is_measured_and_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = [
        "-p",
        "4,8-16*2",
        "-g",
        "3",
        "-b",
        "1,2",
        "-t",
        "1,2",
        "-d",
        "0,5",
        "-n",
        "2",
        "--roofline",
        "-o",
        "jsonl",
    ];
    let output = succeed(&mut benchmark(folder.path(), &arguments));
    let cells: Vec<Value> =
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(cells.len(), 3 * 2 * 2 * 2);
    for cell in &cells {
        assert_eq!(cell["schema_version"], 1);
        for name in ["prompt_tps", "generation_tps", "ttft_ms"] {
            let statistics = &cell[name];
            let of = |part: &str| statistics[part].as_f64().unwrap();
            assert!(of("min") > 0.0 && of("min") <= of("median") && of("median") <= of("max"), "{cell}");
            assert_eq!(statistics["count"], 2);
        }
        assert_eq!(cell["samples"]["prompt_tps"].as_array().unwrap().len(), 2);
        assert!(cell["bandwidth_gbs"].as_f64().unwrap() > 0.0);
        // Our kernels keep caches of their own, which MLX knows nothing of: the process's memory counts.
        let (peak, mlx) = (cell["peak_bytes"].as_u64().unwrap(), cell["mlx_peak_bytes"].as_u64().unwrap());
        assert!(mlx > 0 && peak >= mlx, "{cell}");
        if cell["backend"] == "cpu" {
            assert!(peak > 8 << 20, "{cell}");
        }
    }
    let threads: Vec<_> = cells.iter().map(|cell| cell["threads"].as_u64().unwrap()).collect();
    assert_eq!((threads[0], threads[23]), (1, 2));
    let rows = recorded(folder.path());
    assert_eq!(rows.len(), 24);
    let last = &rows[0];
    assert_eq!(last["label"], "pp16+tg3@d5 b2 kv-off t2");
    assert_eq!((&last["verb"], &last["table"]), (&"benchmark".into(), &"runs".into()));
    assert_eq!((&last["prompt_tokens"], &last["cached_tokens"]), (&42.into(), &10.into()));
    assert_eq!(last["model_path"], Value::from(model()));
    assert!(last["machine"]["cpu"].is_string() && last["machine_state"]["at"].is_string(), "{last}");
    assert_eq!(last["flags"]["cpu_precision"], "auto");
    assert_eq!(last["samples"]["generation_tps"].as_array().unwrap().len(), 2);
}

#[test]
fn prompts_or_generation_alone_and_other_formats() {
    let folder = tempfile::tempdir().unwrap();
    let run = |arguments: &[&str]| text(&succeed(&mut benchmark(folder.path(), arguments)).stdout);
    let md = run(&["-p", "0,4", "-g", "0,3", "-r", "1", "--no-record"]);
    let tests: Vec<_> = md.lines().skip(2).map(|line| line.split(" | ").next().unwrap()).collect();
    assert_eq!(tests, ["| tg3", "| pp4", "| pp4+tg3"], "{md}");
    assert!(md.lines().nth(2).unwrap().contains("(+50 %)"), "{md}");
    let csv = run(&["-p", "4", "-g", "3", "-n", "1", "-o", "csv", "--l1"]);
    assert_eq!(csv.lines().count(), 2, "{csv}");
    assert!(csv.starts_with("schema_version,model,label,"), "{csv}");
    let json: Value = serde_json::from_str(&run(&["-p", "4", "-g", "3", "--quick", "--json"])).unwrap();
    assert_eq!(json[0]["trials"], 2);
    // Not the first run.
    assert_eq!(recorded(folder.path()).len(), 2);
}

/// Caches of 256 sequences lie in memory of our kernels, of which MLX knows nothing, and go before the next cell.
#[test]
#[cfg(target_os = "linux")]
fn memory_is_that_of_the_cell_with_all_its_caches() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["-p", "64", "-g", "4", "-b", "256,1", "-n", "1", "-o", "jsonl", "--no-record"];
    let output = succeed(&mut benchmark(folder.path(), &arguments));
    let cells: Vec<Value> =
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let bytes = |index: usize, name: &str| cells[index][name].as_u64().unwrap();
    if cells[0]["backend"] == "cpu" {
        assert!(bytes(0, "peak_bytes") > bytes(1, "peak_bytes") + (16 << 20), "{cells:?}");
        assert!(bytes(0, "mlx_peak_bytes") < 16 << 20, "{cells:?}");
    }
}

#[test]
fn without_a_folder_for_the_database_it_still_measures() {
    let output = succeed(&mut benchmark(Path::new("/dev/null/cache"), &["-p", "4", "-g", "2", "-n", "1"]));
    assert!(text(&output.stderr).contains("warning: nothing is recorded: "));
    assert_eq!(text(&output.stdout).lines().count(), 3);
}

#[test]
fn lists_that_make_no_sense_are_wrong_usage_with_their_place() {
    let model = model();
    for (arguments, message) in [
        (&["-p", "128,x"][..], "item 2 (`x`) must be a whole number in [0, 1000000], or a range of them"),
        (&["-b", "1,0"], "item 2 (`0`) must be a whole number in [1, 256]"),
        (&["-t", "65"], "item 1 (`65`) must be a whole number in [1, 64]"),
        (&["-d", "9-1"], "item 1 (`9-1`) must not go down"),
        (&["--kv-quant", "off,5"], "item 2 (`5`) must be off, 4 or 8"),
        (&["-p", "0", "-g", "0"], "nothing to measure"),
        (&["-p", "900000"], "the model's context is"),
    ] {
        let mut whole = vec!["benchmark", "-m", &model];
        whole.extend(arguments);
        let said = refused(&whole);
        assert!(said.contains(message), "{arguments:?}: {said}");
    }
}

#[test]
fn ctrl_c_and_sigterm_keep_what_is_measured() {
    keeps_what_is_measured("-INT", 130);
    keeps_what_is_measured("-TERM", 143);
}

fn keeps_what_is_measured(signal: &str, code: i32) {
    let folder = tempfile::tempdir().unwrap();
    let mut command =
        benchmark(folder.path(), &["-p", "4", "-g", "3", "-b", "1-200+1", "-n", "3", "-o", "jsonl"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let first: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
    assert_eq!(first["batch_size"], 1);
    let killed = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    // Every line that comes is whole.
    let rest: Vec<Value> = lines.map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect();
    let rest = rest.len();
    assert_eq!(child.wait().unwrap().code(), Some(code));
    assert!(rest < 190, "{rest}");
    let rows = recorded(folder.path());
    assert!(rows.len() == rest + 1, "{} {rest}", rows.len());
}

#[cfg(target_os = "linux")]
#[test]
fn sigterm_ends_a_step_that_takes_long_while_output_is_held() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = benchmark(folder.path(), &["-p", "4", "-g", "3", "--no-warmup"]);
    command.env("MLX_BUN_DEBUG_STEP_DELAY_MS", "60000");
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let started = Instant::now();
    let catches = |status: String| {
        let line = status.lines().find(|line| line.starts_with("SigCgt:")).map(str::to_owned);
        let mask = line.and_then(|line| u64::from_str_radix(line["SigCgt:".len()..].trim(), 16).ok());
        mask.is_some_and(|mask| mask & (1 << 14) != 0)
    };
    let status = format!("/proc/{}/status", child.id());
    while !catches(std::fs::read_to_string(&status).unwrap()) {
        assert!(started.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_secs(1));
    let told = Instant::now();
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert!(told.elapsed() < Duration::from_secs(30), "{:?}", told.elapsed());
}
