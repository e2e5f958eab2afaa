//! `mlx-bun evals` over what `perplexity` and `benchmark` recorded on a tiny checkpoint.

#![allow(clippy::unwrap_used)] // clippy counts helpers outside of test functions as production code

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use mlx_bun::record::{Database, Entry, Figures, MachineIdentity, Run};
use serde_json::Value;
use support::mlx_bun;
use tempfile::TempDir;

struct World(TempDir);

fn fixture(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures").join(name).to_str().unwrap().to_owned()
}

impl World {
    fn new() -> Self {
        let world = Self(tempfile::tempdir().unwrap());
        let model = fixture("checkpoints/llama-bf16");
        for generation in ["3", "5"] {
            world.said(&[
                "-q",
                "benchmark",
                "-m",
                &model,
                "-p",
                "4",
                "-g",
                generation,
                "-n",
                "2",
                "--no-warmup",
            ]);
        }
        let data = fixture("perplexity.jsonl");
        let few = ["--sequence-length", "16", "--num-samples", "2"];
        let mut perplexity = vec!["-q", "perplexity", "--model", &model, "--data-path", &data];
        perplexity.extend(few);
        world.said(&perplexity);
        world
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = mlx_bun(&["--no-progress"]);
        command.args(arguments).env("MLX_BUN_CACHE", self.0.path()).current_dir(self.0.path());
        command
    }

    fn said(&self, arguments: &[&str]) -> String {
        let output = self.command(arguments).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {stderr}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn failed(&self, arguments: &[&str]) -> String {
        let output = self.command(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        String::from_utf8(output.stderr).unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

#[test]
fn what_was_measured_is_listed_filtered_exported_compared_plotted_reported_and_put_aside() {
    let world = World::new();

    let list = world.said(&["evals"]);
    assert!(list.starts_with("TIME "), "{list}");
    assert_eq!(list.lines().count(), 4, "{list}");
    assert!(list.contains("perplexity.jsonl 2x16") && list.contains("pp4+tg5 b1 kv-off"), "{list}");
    let count = |arguments: &[&str]| {
        let mut whole = vec!["evals", "--json"];
        whole.extend(arguments);
        serde_json::from_str::<Vec<Value>>(&world.said(&whole)).unwrap().len()
    };
    assert_eq!(count(&[]), 3);
    assert_eq!(count(&["--limit", "1"]), 1);
    assert_eq!(count(&["--verb", "perplexity", "--model", "LLAMA"]), 1);
    assert_eq!(count(&["--since", "1h", "--label", "tg3"]), 1);
    assert_eq!(count(&["--commit", "zzzz"]), 0);
    let rows: Vec<Value> = serde_json::from_str(&world.said(&["evals", "--json"])).unwrap();
    assert!(rows[0]["figures"]["perplexity"]["value"].as_f64().unwrap() > 1.0, "{}", rows[0]);
    assert!(rows[0].get("samples").is_none());

    world.said(&["evals", "--csv", "a.csv", "--parquet", "a.parquet"]);
    assert!(fs::read_to_string(world.path("a.csv")).unwrap().contains(",generation_tps,tok/s,"));
    assert!(fs::read(world.path("a.parquet")).unwrap().starts_with(b"PAR1"));
    // A pipe's end: rows, and no table.
    let text = world.said(&["evals", "--csv", "-"]);
    assert!(text.starts_with("id,ts,") && text == fs::read_to_string(world.path("a.csv")).unwrap(), "{text}");
    assert!(!world.path("-").exists());
    for contradiction in [&["--parquet", "-"][..], &["--csv", "-", "--json"]] {
        let output = world.command(&[&["evals"], contradiction].concat()).output().unwrap();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{contradiction:?}");
    }
    fs::write(world.path("weights.bin"), "mine").unwrap();
    assert!(world.failed(&["evals", "--csv", "weights.bin"]).contains("is no .csv file"));

    let machine = rows[0]["machine_key"].as_str().unwrap().to_owned();
    let pairs: Value =
        serde_json::from_str(&world.said(&["evals", "compare", &machine, &machine, "--json"])).unwrap();
    let pairs = pairs["pairs"].as_array().unwrap().clone();
    assert!(!pairs.is_empty() && pairs.iter().all(|pair| pair["ratio"].is_null() || pair["ratio"] == 1.0));
    assert!(world.said(&["evals", "compare", &machine, &machine]).contains("1.000"));
    assert!(world.failed(&["evals", "compare", &machine, "nowhere"]).contains("called `nowhere`"));

    for file in ["a.svg", "a.png"] {
        world.said(&["evals", "plot", "generation_tps", "--out", file]);
        assert!(fs::metadata(world.path(file)).unwrap().len() > 1000);
    }
    assert!(fs::read_to_string(world.path("a.svg")).unwrap().contains("generation_tps"));
    world.said(&["evals", "plot", "generation_tps", "--against", "generated_tokens", "--out", "b.svg"]);
    let text = fs::read_to_string(world.path("b.svg")).unwrap();
    // Both cells are on one line.
    assert_eq!(text.matches("pp4 b1 kv-off").count(), 1, "{text}");
    let unknown = world.failed(&["evals", "plot", "generation_tps", "--against", "speed", "--out", "a.svg"]);
    assert!(unknown.contains("no row has a figure `speed`"), "{unknown}");
    let unknown = world.failed(&["evals", "plot", "speed", "--out", "a.svg"]);
    assert!(unknown.contains("no row has a figure `speed`") && unknown.contains("perplexity"), "{unknown}");

    world.said(&["evals", "report", "--out", "page.md", "--debug-builds"]);
    let page = fs::read_to_string(world.path("page.md")).unwrap();
    assert!(page.contains(&format!("## {machine}")) && page.contains("| pp4+tg3 b1 kv-off |"), "{page}");
    assert!(world.failed(&["evals", "report", "--out", "a.csv"]).contains("is no page of this verb"));
    // A device has no end; it is not read to find out.
    world.failed(&["evals", "report", "--out", "/dev/zero", "--debug-builds"]);

    // What was slowed down on purpose is listed as such, and not reported.
    let model = fixture("checkpoints/llama-bf16");
    let slowed = ["-q", "benchmark", "-m", &model, "-p", "4", "-g", "3", "-n", "1", "--no-warmup"];
    let slowed = world.command(&slowed).env("MLX_BUN_DEBUG_STEP_DELAY_MS", "5").output().unwrap();
    assert!(slowed.status.success());
    assert!(world.said(&["evals", "--label", "tg3"]).contains("MLX_BUN_DEBUG_STEP_DELAY_MS=5"));
    world.said(&["evals", "report", "--out", "page.md", "--debug-builds"]);
    assert_eq!(fs::read_to_string(world.path("page.md")).unwrap(), page);

    world.said(&["evals", "--clear"]);
    assert_eq!(world.said(&["evals", "--json"]), "[]\n");
    let archives = fs::read_dir(world.0.path()).unwrap().filter_map(Result::ok);
    let names: Vec<_> = archives.map(|entry| entry.file_name().into_string().unwrap()).collect();
    assert_eq!(names.iter().filter(|name| name.starts_with("evals-")).count(), 1, "{names:?}");
    assert!(!names.iter().any(|name| name == "evals.sqlite"), "{names:?}");
}

#[test]
fn fit_tells_the_rate_that_was_measured_here() {
    let folder = tempfile::tempdir().unwrap();
    let model = Path::new(&fixture("checkpoints/llama-bf16")).canonicalize().unwrap();
    let model = model.to_str().unwrap();
    let fit = |more: &[&str]| -> Value {
        let mut command = mlx_bun(&["fit", "--json", "--model", model]);
        let output = command.args(more).env("MLX_BUN_CACHE", folder.path()).output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap()
    };
    assert_eq!(fit(&[])["rate_measured"], false);
    let database = Database::open(&folder.path().join("evals.sqlite")).unwrap();
    let mut figures = Figures::default();
    figures.add("batch", 1.0, "");
    let entry = Entry {
        verb: "benchmark".to_owned(),
        label: "pp512+tg128 b1 kv-off".to_owned(),
        stack: "mlx-bun".to_owned(),
        build: "release".to_owned(),
        machine_key: MachineIdentity::this().key,
        figures,
        ..Entry::default()
    };
    let row = |rate| Run { model_path: model.to_owned(), decode_tps: Some(rate), ..Run::default() };
    database.insert(&entry, &row(123.0)).unwrap();
    // Newer, but of another machine, another build, another cell.
    for other in [
        Entry { machine_key: "elsewhere".to_owned(), ..entry.clone() },
        Entry { build: "debug".to_owned(), ..entry.clone() },
        Entry { label: "pp512+tg128 b1 kv-8".to_owned(), ..entry.clone() },
        Entry { figures: Figures::default(), ..entry.clone() },
        Entry { flags: serde_json::json!({"MLX_BUN_DEBUG_STEP_DELAY_MS": "20"}), ..entry.clone() },
    ] {
        database.insert(&other, &row(5.0)).unwrap();
    }
    let measured = fit(&[]);
    assert_eq!((&measured["rate_measured"], &measured["decode_rate"]), (&true.into(), &123.0.into()));
    assert_eq!(fit(&["--kv-bits", "8"])["rate_measured"], false);
}

#[test]
fn looking_at_nothing_makes_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let output = mlx_bun(&["evals"]).env("MLX_BUN_CACHE", folder.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(String::from_utf8(output.stderr).unwrap().contains("nothing has been measured yet"));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}
