//! The verbs that keep models: `get`, `ls`, `scan`, `fit`, `gc`, `upload`, against a stand-in hub.

#![allow(clippy::unwrap_used)] // clippy counts helpers outside of test functions as production code

#[path = "../../tests/support/hub.rs"]
mod stand_in;
mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::thread;
use std::time::{Duration, Instant};

use stand_in::{COMMIT, Fault, OTHER_COMMIT, StandIn, sha256};
use tempfile::TempDir;

const REPO: &str = "org/tiny-llama";
const LISTING: &str = "/api/models/org/tiny-llama/revision/main";
const CONFIG: &str = r#"{"model_type":"llama","num_hidden_layers":2,"hidden_size":64,"num_attention_heads":4,
    "num_key_value_heads":2,"vocab_size":99,"max_position_embeddings":4096}"#;

struct World {
    hub: StandIn,
    storage: StandIn,
    home: TempDir,
}

impl World {
    fn new() -> Self {
        let (hub, storage) = StandIn::start();
        hub.add(&storage, REPO, "config.json", CONFIG.as_bytes(), false);
        hub.add(&storage, REPO, "model.safetensors", &weights(), true);
        Self { hub, storage, home: tempfile::tempdir().unwrap() }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = support::mlx_bun(arguments);
        command
            .env("HOME", self.home.path())
            .env("HF_HUB_CACHE", self.cache())
            .env("HF_ENDPOINT", &self.hub.address)
            .env("NO_PROXY", "*");
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Standard output of a command that must succeed.
    fn said(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {stderr}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Standard error of a command that must fail with this code.
    fn refused(&self, code: i32, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
        assert!(output.stdout.is_empty());
        stderr
    }

    fn cache(&self) -> PathBuf {
        self.home.path().join("hub")
    }

    fn repo(&self) -> PathBuf {
        self.cache().join("models--org--tiny-llama")
    }

    fn object(&self) -> String {
        format!("/objects/{}", sha256(&weights()))
    }
}

/// A safetensors file of one tensor.
fn weights() -> Vec<u8> {
    let data: Vec<u8> = (0..25_000u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    let header = format!(r#"{{"w":{{"dtype":"F32","shape":[25000],"data_offsets":[0,{}]}}}}"#, data.len());
    [(header.len() as u64).to_le_bytes().as_slice(), header.as_bytes(), &data].concat()
}

#[test]
fn a_model_is_fetched_listed_judged_and_asked_for() {
    let world = World::new();
    let output = world.run(&["get", REPO]);
    let snapshot = world.repo().join("snapshots").join(COMMIT);
    assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{}\n", snapshot.display()));
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(said, "org/tiny-llama: 2 files, 100 kB, 100 kB transferred\n");
    // No bar into a pipe.
    assert!(!said.contains('\r') && !said.contains('\x1b'));

    let list = world.said(&["ls"]);
    let lines: Vec<_> = list.lines().collect();
    assert_eq!(lines[0].split_whitespace().next(), Some("MODEL"));
    assert!(lines[1].starts_with("org/tiny-llama  llama"), "{list}");
    assert!(lines[1].contains("supported (generic)"), "{list}");
    assert_eq!(world.said(&["ls", "--max-size", "1kB"]), "");
    let model: serde_json::Value = serde_json::from_str(&world.said(&["ls", "TINY", "--json"])).unwrap();
    assert_eq!((model["repo_id"].as_str(), model["param_count"].as_u64()), (Some(REPO), Some(25_000)));

    let fit: serde_json::Value =
        serde_json::from_str(&world.said(&["fit", "tiny", "--ctx", "1000", "--json"])).unwrap();
    // Two layers, two heads of 16, keys and values of two bytes.
    assert_eq!(fit["kv"].as_u64(), Some(2 * 2 * 2 * 16 * 2 * 1000));
    assert_eq!((fit["model"].as_str(), fit["max_context"].as_u64()), (Some(REPO), Some(4096)));
    assert!(fit["decode_rate"].as_f64().unwrap() > 0.0);
    let beyond = String::from_utf8(world.run(&["fit", "tiny", "--ctx", "9000"]).stderr).unwrap();
    assert!(beyond.contains("org/tiny-llama was made for 4096 tokens of context, not 9000"), "{beyond}");
    let text = world.said(&["fit", "tiny", "--memory-budget", "0.001"]);
    assert!(text.starts_with("org/tiny-llama does not fit on "), "{text}");
    let skus = world.said(&["fit", "tiny", "--skus"]);
    assert_eq!(skus.lines().count(), 42);
    assert!(skus.contains("M4 Max 128 GB"), "{skus}");

    assert_eq!(world.said(&["scan"]), "1 model: 0 new or changed, 0 gone\n");
    // The query reaches the loader, which then misses the tokenizer.
    let error = world.refused(1, &["generate", "--model", "tiny", "hi"]);
    assert!(error.contains("tokenizer"), "{error}");
}

#[test]
fn a_query_that_means_several_says_which() {
    let world = World::new();
    world.said(&["get", REPO]);
    world.hub.add(&world.storage, "org/other-llama", "config.json", CONFIG.as_bytes(), false);
    world.hub.add(&world.storage, "org/other-llama", "model.safetensors", &weights(), true);
    world.said(&["get", "org/other-llama"]);
    let expected = "`llama` is ambiguous: org/other-llama, org/tiny-llama";
    for arguments in [&["fit", "llama"][..], &["get", "llama"], &["generate", "--query", "llama", "hi"]] {
        let error = world.refused(1, arguments);
        assert!(error.starts_with(&format!("error: {expected}")), "{error}");
    }
    // --model wins over the positional, that over --query.
    let fit = |arguments: &[&str]| world.said(&[&["fit", "--json"], arguments].concat());
    assert!(fit(&["llama", "--model", "tiny", "--query", "x"]).contains("org/tiny-llama"));
    assert!(fit(&["other", "--query", "tiny"]).contains("org/other-llama"));
    assert!(fit(&["--query", "tiny"]).contains("org/tiny-llama"));
    assert_eq!(fit(&[]).lines().count(), 2);
}

#[test]
fn a_query_renews_what_is_there() {
    let world = World::new();
    world.said(&["get", REPO]);
    world.hub.add_at(&world.storage, REPO, OTHER_COMMIT, "config.json", CONFIG.as_bytes(), false);
    world.hub.add_at(&world.storage, REPO, OTHER_COMMIT, "model.safetensors", &weights(), true);
    world.hub.name_revision(REPO, "main", OTHER_COMMIT);
    let report: serde_json::Value = serde_json::from_str(&world.said(&["get", "tiny", "--json"])).unwrap();
    assert_eq!((report["commit"].as_str(), report["transferred"].as_u64()), (Some(OTHER_COMMIT), Some(0)));
    assert_eq!(world.said(&["ls", "--all-revisions"]).lines().count(), 3);
    assert_eq!(world.said(&["ls"]).lines().count(), 2);

    let plan = world.said(&["gc"]);
    assert!(
        plan.starts_with(&format!("old snapshot  org/tiny-llama@{COMMIT}\n1 snapshots, 0 files: 0 B\n")),
        "{plan}"
    );
    assert!(world.repo().join("snapshots").join(COMMIT).is_dir());
    world.said(&["gc", "--yes", "--dry-run"]);
    assert!(world.repo().join("snapshots").join(COMMIT).is_dir());
    let done = world.said(&["gc", "--yes"]);
    assert!(done.ends_with("deleted 1 snapshots and 0 files: 0 B reclaimed\n"), "{done}");
    assert!(!world.repo().join("snapshots").join(COMMIT).exists());
    assert_eq!(world.said(&["gc"]), "nothing to reclaim\n");
    assert_eq!(world.said(&["ls"]).lines().count(), 2);
}

#[test]
fn errors_of_the_hub_have_a_hint() {
    let world = World::new();
    world.hub.require_token("hf_good");
    let error = world.refused(1, &["get", REPO]);
    assert!(
        error.starts_with(
            "error: listing org/tiny-llama@main failed (HTTP 401): Access is restricted\nhint: "
        )
    );
    assert!(error.contains("HF_TOKEN"), "{error}");
    let output = world.command(&["get", REPO]).env("HF_TOKEN", "hf_good").output().unwrap();
    assert!(output.status.success());
    let error = world.refused(1, &["get", "no-such-model"]);
    assert_eq!(
        error,
        "error: no model matches `no-such-model`\nhint: give the id of a model on the hub, like org/name\n"
    );
    let offline = world.command(&["get", "org/other"]).env("HF_HUB_OFFLINE", "1").output().unwrap();
    let error = String::from_utf8(offline.stderr).unwrap();
    assert!(
        error.contains("org/other@main is not on this machine and HF_HUB_OFFLINE is set\nhint: "),
        "{error}"
    );
    let endpoint = world.command(&["get", REPO]).env("HF_ENDPOINT", "nonsense").output().unwrap();
    assert_eq!(endpoint.status.code(), Some(2));
}

#[test]
fn nothing_named_needs_no_hub() {
    let world = World::new();
    // Every question to the hub would wait.
    world.hub.always(LISTING, Fault::StallAfter(0, Duration::from_secs(60)));
    let started = Instant::now();
    let error = world.refused(1, &["generate", "hi"]);
    assert!(error.contains("starter model"), "{error}");
    assert!(world.hub.seen().is_empty() && started.elapsed() < Duration::from_secs(30));
}

/// A kill at any moment leaves each file whole or absent, and the next run goes on.
#[test]
fn killed_in_a_loop() {
    let world = World::new();
    world.storage.always(&world.object(), Fault::Slow(2_000, Duration::from_millis(10)));
    let whole: BTreeMap<String, usize> =
        [(sha256(&weights()), weights().len()), (stand_in::git_sha1(CONFIG.as_bytes()), CONFIG.len())].into();
    for round in 0..25u64 {
        let mut child = world.command(&["get", REPO]).stdout(std::process::Stdio::null()).spawn().unwrap();
        thread::sleep(Duration::from_millis(10 + round * 17 % 400));
        // SIGKILL; the program may have ended already.
        let _ = child.kill();
        child.wait().unwrap();
        check_nothing_half(&world.repo(), &whole);
    }
    world.storage.forgive();
    world.said(&["get", REPO]);
    check_nothing_half(&world.repo(), &whole);
    let snapshot = world.repo().join("snapshots").join(COMMIT);
    assert_eq!(fs::read(snapshot.join("model.safetensors")).unwrap(), weights());
    assert_eq!(fs::read_to_string(world.repo().join("refs/main")).unwrap(), COMMIT);
    let blobs: Vec<_> =
        fs::read_dir(world.repo().join("blobs")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(blobs.len(), 2, "{blobs:?}");
    let resumed = world.storage.seen().iter().filter(|seen| seen.header("range").is_some()).count();
    assert!(resumed > 0, "no run went on where another stopped");
}

fn check_nothing_half(repo: &Path, whole: &BTreeMap<String, usize>) {
    for entry in fs::read_dir(repo.join("blobs")).into_iter().flatten().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        if !name.ends_with(".incomplete") {
            assert_eq!(fs::metadata(entry.path()).unwrap().len() as usize, whole[&name], "{name}");
        }
    }
    let snapshot = repo.join("snapshots").join(COMMIT);
    for entry in fs::read_dir(&snapshot).into_iter().flatten().map(Result::unwrap) {
        if !entry.file_name().to_string_lossy().starts_with('.') {
            assert!(entry.path().exists(), "{} leads to nothing", entry.path().display());
        }
    }
    if repo.join("refs/main").exists() {
        assert!(snapshot.join("config.json").exists() && snapshot.join("model.safetensors").exists());
    }
}

#[test]
fn a_wait_that_the_hub_asks_for_is_said() {
    let world = World::new();
    world.hub.faults(LISTING, [Fault::Status(429, vec![("Retry-After", "2".into())])]);
    let output = world.run(&["get", REPO]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && said.starts_with("The hub asks for 2 s of patience\n"), "{said}");
}

#[test]
fn two_downloads_of_a_model_do_not_meet() {
    let world = World::new();
    world.storage.faults(&world.object(), [Fault::Slow(1_000, Duration::from_millis(100))]);
    let mut first = world.command(&["get", REPO]).stdout(std::process::Stdio::null()).spawn().unwrap();
    let started = Instant::now();
    while world.storage.seen().is_empty() && started.elapsed() < Duration::from_secs(30) {
        thread::sleep(Duration::from_millis(20));
    }
    let error = world.refused(1, &["get", REPO]);
    let expected = format!("another download of model.safetensors is in progress (pid {})", first.id());
    assert!(error.contains(&expected), "{error}");
    // Nor does the collector disturb it.
    assert_eq!(world.said(&["gc", "--yes"]), "nothing to reclaim\n");
    assert!(first.wait().unwrap().success());
}

#[test]
fn a_folder_is_uploaded() {
    let world = World::new();
    let folder = world.home.path().join("mlx_model");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("config.json"), CONFIG).unwrap();
    fs::write(folder.join("model.safetensors"), [7; 5000]).unwrap();
    let arguments = ["upload", "--path", folder.to_str().unwrap(), "--upload-repo", "me/mine", "--private"];
    let error = world.refused(1, &arguments);
    assert_eq!(
        error,
        "error: no Hugging Face token is set\nhint: set HF_TOKEN to a token with write access\n"
    );
    assert!(world.hub.seen().is_empty());
    let output = world.command(&arguments).env("HF_TOKEN", "hf_x").output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "https://hub/commit\n");
    assert_eq!(world.storage.objects()[&sha256(&[7; 5000])], [7; 5000]);
    assert_eq!(world.hub.seen()[0].json()["private"], true);
}

#[test]
fn converted_and_fused_models_are_sent_when_they_are_whole() {
    let world = World::new();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures");
    let model = fixtures.join("checkpoints/llama-f32");
    let adapter = fixtures.join("adapters/lora");
    let out = |name: &str| world.home.path().join(name).to_str().unwrap().to_owned();
    let (model, adapter) = (model.to_str().unwrap(), adapter.to_str().unwrap());
    let (converted, fused) = (out("converted"), out("fused"));
    let convert = ["convert", model, "--mlx-path", &converted, "-q", "--upload-repo", "me/mine"];
    let fuse = [
        "fuse",
        "--model",
        model,
        "--adapter-path",
        adapter,
        "--save-path",
        &fused,
        "--upload-repo",
        "me/fused",
    ];
    // The token is asked for before the work.
    for arguments in [&convert[..], &fuse] {
        assert!(world.refused(1, arguments).starts_with("error: no Hugging Face token is set\n"));
    }
    assert!(world.hub.seen().is_empty() && !Path::new(&converted).exists() && !Path::new(&fused).exists());

    for (arguments, folder, verb) in [(&convert[..], &converted, "convert"), (&fuse, &fused, "fuse")] {
        world.hub.forget();
        let output = world.command(arguments).env("HF_TOKEN", "hf_x").output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(0), "{stderr}");
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "https://hub/commit\n");
        let weights = fs::read(Path::new(folder).join("model.safetensors")).unwrap();
        assert_eq!(world.storage.objects()[&sha256(&weights)], weights);
        let seen = world.hub.seen();
        let commit = seen.iter().find(|seen| seen.path.contains("/commit/")).unwrap();
        let first = String::from_utf8(commit.body.clone()).unwrap();
        assert!(first.contains(&format!("Upload with mlx-bun {verb}")), "{first}");
    }

    // A failed upload keeps the folder and says how to send it.
    world.hub.always("/api/repos/create", Fault::Status(403, Vec::new()));
    let kept = out("kept");
    let arguments = ["convert", model, "--mlx-path", &kept, "--upload-repo", "me/mine"];
    let output = world.command(&arguments).env("HF_TOKEN", "hf_x").output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains(&format!("mlx-bun upload --path {kept} --upload-repo me/mine")), "{stderr}");
    assert!(Path::new(&kept).join("model.safetensors").exists());
}
