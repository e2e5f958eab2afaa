//! From what the user names to what is loaded: paths, the Hugging Face cache, the starter model.

use std::path::{Path, PathBuf};

use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::checkpoint::source::{ModelSource, ResolvedModel, STARTER_FILE, SourceError, resolve_model};

use super::support::{Folder, assert_message};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const OTHER_COMMIT: &str = "89abcdef0123456789abcdef0123456789abcdef";
const REPO: &str = "models--org--name";

fn environment(folder: &Folder) -> Environment {
    let path = folder.path().to_str().unwrap();
    Environment::from_pairs([("HOME", path), ("HF_HUB_CACHE", path), ("MLX_BUN_CACHE", path)])
}

fn resolve(folder: &Folder, argument: &str) -> Result<ResolvedModel, SourceError> {
    resolve_model(Some(argument), &environment(folder))
}

#[track_caller]
fn assert_refused(folder: &Folder, argument: &str, parts: &[&str]) {
    match resolve(folder, argument) {
        Ok(found) => panic!("{argument} resolved to {found:?}"),
        Err(error) => assert_message(&error, parts),
    }
}

/// A cached repository of plain files.
fn cached() -> Folder {
    let folder = Folder::new();
    folder.write(&format!("{REPO}/refs/main"), format!("{COMMIT}\n"));
    for commit in [COMMIT, OTHER_COMMIT] {
        folder.write(&format!("{REPO}/snapshots/{commit}/config.json"), "{}");
        folder.weights(&format!("{REPO}/snapshots/{commit}/model.safetensors"), &["a"]);
    }
    folder
}

fn snapshot(folder: &Folder, commit: &str) -> PathBuf {
    folder.join(&format!("{REPO}/snapshots/{commit}"))
}

#[cfg(unix)]
fn link(folder: &Folder, name: &str, target: &str) {
    let path = folder.join(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let _ = std::fs::remove_file(&path);
    std::os::unix::fs::symlink(target, path).unwrap();
}

#[test]
fn a_directory_is_a_snapshot() {
    let folder = Folder::snapshot();
    let found = resolve(&folder, folder.path().to_str().unwrap()).unwrap();
    let source = ModelSource::Snapshot(folder.path().to_owned());
    assert_eq!(found, ResolvedModel { source, repo_id: None, revision: None });
}

#[test]
fn a_directory_without_config_is_named() {
    let folder = Folder::new();
    let path = folder.path().to_str().unwrap();
    assert_refused(&folder, path, &[path, "has no config.json"]);
    folder.write("a.gguf", "");
    assert_eq!(resolve(&folder, path).unwrap().source, ModelSource::Gguf(folder.join("a.gguf")));
    folder.write("b.GGUF", "");
    assert_refused(&folder, path, &["2 .gguf files", "such as a.gguf"]);
}

#[test]
fn a_gguf_file_is_taken_and_other_files_are_not() {
    let folder = Folder::snapshot();
    let gguf = folder.write("x.gguf", "");
    assert_eq!(resolve(&folder, gguf.to_str().unwrap()).unwrap().source, ModelSource::Gguf(gguf));
    assert_refused(
        &folder,
        folder.join("model.safetensors").to_str().unwrap(),
        &["is not a .gguf file", "directory"],
    );
}

#[test]
fn what_does_not_exist_is_an_error() {
    let folder = Folder::new();
    for path in ["/no/such/model", "./no", "../no", "a/b/c", "no.gguf", "org/no.gguf", "~/no"] {
        assert_refused(&folder, path, &["there is no model at", path]);
    }
    for name in ["llama", "", "org/na me", "a--b/c"] {
        assert_refused(&folder, name, &["is no model", "org/name"]);
    }
    assert_refused(
        &folder,
        "org/name",
        &["org/name is not in the Hugging Face cache", folder.path().to_str().unwrap()],
    );
}

#[test]
fn a_repository_is_found_by_its_main_ref() {
    let folder = cached();
    let found = resolve(&folder, "org/name").unwrap();
    assert_eq!(found.source, ModelSource::Snapshot(snapshot(&folder, COMMIT)));
    assert_eq!(found.repo_id.as_deref(), Some("org/name"));
    assert_eq!(found.revision.as_deref(), Some(COMMIT));
}

#[test]
fn a_revision_is_a_commit_or_a_ref() {
    let folder = cached();
    folder.write(&format!("{REPO}/refs/refs/pr/1"), OTHER_COMMIT);
    for revision in [OTHER_COMMIT, "refs/pr/1"] {
        let found = resolve(&folder, &format!("org/name@{revision}")).unwrap();
        assert_eq!(found.source, ModelSource::Snapshot(snapshot(&folder, OTHER_COMMIT)));
        assert_eq!(found.revision.as_deref(), Some(OTHER_COMMIT));
    }
    assert_refused(&folder, "org/name@v2", &["revision `v2`", "main", COMMIT]);
}

#[test]
fn a_revision_cannot_leave_the_cache() {
    let folder = cached();
    folder.write("evil/config.json", "{}");
    folder.write(&format!("{REPO}/refs/escape"), "../../evil");
    for revision in ["../../evil", "..", ".", "", "/", "escape", "../refs/main"] {
        assert_refused(&folder, &format!("org/name@{revision}"), &["not its revision"]);
    }
}

#[test]
fn a_ref_to_a_snapshot_that_is_gone_is_an_error() {
    let folder = cached();
    folder.write(&format!("{REPO}/refs/main"), "ffff");
    assert_refused(&folder, "org/name", &["not its revision `main`"]);
}

#[cfg(unix)]
#[test]
fn files_two_links_away_are_found() {
    let folder = cached();
    let config = format!("{REPO}/snapshots/{COMMIT}/config.json");
    folder.write("blobs/ab/payload", r#"{"model_type":"llama"}"#);
    link(&folder, &format!("{REPO}/blobs/etag"), "../../blobs/ab/payload");
    link(&folder, &config, "../../blobs/etag");
    let found = resolve(&folder, "org/name").unwrap();
    let checkpoint = mlx_bun::checkpoint::Checkpoint::open(found.source.path()).unwrap();
    assert_eq!(checkpoint.config.family().unwrap(), "llama");
}

#[cfg(unix)]
#[test]
fn an_incomplete_snapshot_lists_what_is_missing() {
    let folder = cached();
    let file = |name: &str| format!("{REPO}/snapshots/{COMMIT}/{name}");
    link(&folder, &file("model.safetensors"), "../../blobs/gone");
    link(&folder, &file("tokenizer.json"), "../../blobs/gone");
    assert_refused(&folder, "org/name", &["incomplete", "missing: model.safetensors, tokenizer.json"]);
    link(&folder, &file("config.json"), "../../blobs/gone");
    assert_refused(&folder, "org/name", &["missing: config.json, model.safetensors"]);
}

#[cfg(unix)]
#[test]
fn files_that_are_never_read_may_be_missing() {
    let folder = cached();
    for name in [".gitattributes", "README.md", "modeling.py"] {
        link(&folder, &format!("{REPO}/snapshots/{COMMIT}/{name}"), "../../blobs/gone");
    }
    assert!(resolve(&folder, "org/name").is_ok());
}

#[test]
fn shards_that_only_the_index_knows_are_missing() {
    let folder = cached();
    let file = |name: &str| format!("{REPO}/snapshots/{COMMIT}/{name}");
    std::fs::remove_file(folder.join(&file("model.safetensors"))).unwrap();
    assert_refused(&folder, "org/name", &["missing: model*.safetensors"]);
    folder.weights(&file("model-1.safetensors"), &["a"]);
    folder.write(
        &file("model.safetensors.index.json"),
        r#"{"weight_map":{"a":"model-1.safetensors","b":"model-2.safetensors"}}"#,
    );
    assert_refused(&folder, "org/name", &["missing: model-2.safetensors"]);
}

#[test]
fn a_repository_of_one_gguf_is_that_file() {
    let folder = Folder::new();
    folder.write(&format!("{REPO}/refs/main"), COMMIT);
    let file = folder.write(&format!("{REPO}/snapshots/{COMMIT}/q4.gguf"), "");
    assert_eq!(resolve(&folder, "org/name").unwrap().source, ModelSource::Gguf(file));
}

#[test]
fn a_path_into_the_cache_tells_its_repository() {
    let folder = cached();
    let found = resolve(&folder, snapshot(&folder, COMMIT).to_str().unwrap()).unwrap();
    assert_eq!(found.repo_id.as_deref(), Some("org/name"));
    assert_eq!(found.revision.as_deref(), Some(COMMIT));
}

#[test]
fn a_local_path_wins_over_a_repository() {
    // Tests run in the package's root, where this directory is; as a repository it would be an id.
    let argument = "src/checkpoint";
    let folder = Folder::new();
    folder.write("models--src--checkpoint/refs/main", COMMIT);
    folder.write(&format!("models--src--checkpoint/snapshots/{COMMIT}/config.json"), "{}");
    folder.weights(&format!("models--src--checkpoint/snapshots/{COMMIT}/model.safetensors"), &["a"]);
    assert!(Path::new(argument).is_dir());
    assert_refused(&folder, argument, &["src/checkpoint has no config.json"]);
}

#[test]
fn nothing_named_is_the_starter_model() {
    let folder = Folder::new();
    let error = resolve_model(None, &environment(&folder)).unwrap_err();
    assert_message(&error, &["models", STARTER_FILE, "./scripts/mlx-bun", "--model"]);
    let file = folder.write(&format!("models/{STARTER_FILE}"), "");
    assert_eq!(resolve_model(None, &environment(&folder)).unwrap().source, ModelSource::Gguf(file));
}

#[test]
fn a_path_that_leads_nowhere_is_not_called_absent() {
    let folder = Folder::new();
    link(&folder, "a", "b");
    link(&folder, "b", "a");
    link(&folder, "gone", "nowhere");
    let path = |name: &str| folder.path().join(name).display().to_string();
    assert_refused(&folder, &path("a"), &["cannot use ", "symbolic link"]);
    assert_refused(&folder, &path("gone"), &["it is a link to nowhere, which is not there"]);
}

#[test]
fn an_address_is_told_what_to_write_instead() {
    let folder = Folder::new();
    for (address, hint) in [
        ("https://huggingface.co/org/name", "give org/name"),
        ("https://huggingface.co/org/name/tree/main", "give org/name"),
        ("https://www.huggingface.co/org/name?x=1", "give org/name"),
        ("hf://org/name", "give org/name"),
        ("https://example.org/model.gguf", "name its folder or .gguf file"),
        ("https://", "org/name"),
    ] {
        assert_refused(&folder, address, &["is an address", hint]);
    }
}
