//! `upload`: one commit of everything, large files streamed and sent once.

use std::fs;
use std::path::Path;

use base64::Engine as _;
use mlx_bun::hub::{HubError, UploadRequest, Uploaded};
use serde_json::Value;

use super::support::{World, weights};
use crate::stand_in::{Fault, OTHER_COMMIT, sha256};

const TARGET: &str = "me/new-model";

fn folder(world: &World) -> std::path::PathBuf {
    let folder = world.home.path().join("mlx_model");
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    };
    write("config.json", br#"{"model_type":"llama"}"#);
    write("model.safetensors", &weights());
    write("sub/notes größe.txt", b"hello");
    write("scratch.ignored", b"not this");
    write(".git/HEAD", b"ref: x");
    write(".cache/x", b"y");
    folder
}

fn upload(world: &World, folder: &Path) -> Result<Uploaded, HubError> {
    let request =
        UploadRequest { folder: folder.to_owned(), repo_id: TARGET.to_owned(), ..UploadRequest::default() };
    world.client().upload(&request, &())
}

fn commit_lines(world: &World) -> Vec<Value> {
    let seen = world.hub.seen();
    let commit = seen.iter().find(|seen| seen.path.contains("/commit/")).unwrap();
    assert_eq!(commit.header("content-type"), Some("application/x-ndjson"));
    String::from_utf8(commit.body.clone())
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[test]
fn a_folder_becomes_one_commit() {
    let world = World::new();
    world.hub.require_token("hf_secret");
    let sent = upload(&world, &folder(&world)).unwrap();
    assert_eq!(sent.commit, OTHER_COMMIT);
    assert_eq!((sent.files, sent.transferred), (3, 120_000));
    assert_eq!(world.storage.objects()[&sha256(&weights())], weights());

    let lines = commit_lines(&world);
    assert_eq!(lines[0]["value"]["summary"], "Upload with mlx-bun");
    let paths: Vec<_> = lines[1..].iter().map(|line| line["value"]["path"].as_str().unwrap()).collect();
    assert_eq!(paths, ["config.json", "model.safetensors", "sub/notes größe.txt"]);
    assert_eq!(lines[2]["key"], "lfsFile");
    assert_eq!(lines[2]["value"]["oid"], sha256(&weights()).as_str());
    let content = lines[3]["value"]["content"].as_str().unwrap();
    assert_eq!(base64::engine::general_purpose::STANDARD.decode(content).unwrap(), b"hello");

    let create = &world.hub.seen()[0];
    assert_eq!(create.json()["name"], "new-model");
    assert_eq!(create.json()["organization"], "me");
    assert!(world.storage.seen().iter().all(|seen| seen.header("authorization").is_none()));
    assert_eq!(world.storage.seen()[0].header("x-extra"), Some("yes"));
    assert!(world.hub.seen().iter().any(|seen| seen.path == "/verify"));
}

#[test]
fn what_the_hub_has_is_not_sent_again() {
    let world = World::new();
    let folder = folder(&world);
    upload(&world, &folder).unwrap();
    world.storage.forget();
    // The stand-in answers from its own list of objects.
    world.hub.remember_object(&weights());
    assert_eq!(upload(&world, &folder).unwrap().transferred, 0);
    assert!(world.storage.seen().is_empty());
}

#[test]
fn large_files_go_in_parts() {
    let world = World::new();
    world.hub.part_size(50_000);
    let sent = upload(&world, &folder(&world)).unwrap();
    assert_eq!(sent.transferred, 120_000);
    assert_eq!(world.storage.objects()[&sha256(&weights())], weights());
    let seen = world.storage.seen();
    let lengths: Vec<_> =
        seen.iter().filter(|seen| seen.method == "PUT").map(|seen| seen.body.len()).collect();
    assert_eq!(lengths, [50_000, 50_000, 20_000]);
    let complete = seen.iter().find(|seen| seen.path.starts_with("/complete/")).unwrap().json();
    assert_eq!(complete["parts"][2]["partNumber"], 3);
    assert_eq!(complete["parts"][2]["etag"], "\"etag-3\"");
}

#[test]
fn storage_that_stumbles_gets_the_part_again() {
    let world = World::new();
    world.hub.part_size(50_000);
    let part = format!("/parts/{}/2", sha256(&weights()));
    world.storage.faults(&part, [Fault::Status(500, vec![]), Fault::Status(503, vec![])]);
    upload(&world, &folder(&world)).unwrap();
    assert_eq!(world.storage.objects()[&sha256(&weights())], weights());
}

#[test]
fn a_commit_is_not_repeated_in_the_dark() {
    let world = World::new();
    let commit = format!("/api/models/{TARGET}/commit/main");
    world.hub.faults(&commit, [Fault::Status(500, vec![])]);
    let error = upload(&world, &folder(&world)).unwrap_err();
    assert_eq!(error.to_string(), format!("committing to {TARGET} failed (HTTP 500): as told"));
    assert_eq!(world.hub.seen().iter().filter(|seen| seen.path == commit).count(), 1);
    // One that was turned away was certainly not made.
    world.hub.faults(&commit, [Fault::Status(429, vec![])]);
    upload(&world, &folder(&world)).unwrap();
}

#[test]
fn an_existing_repository_is_fine_and_a_forbidden_one_is_not() {
    let world = World::new();
    world.hub.faults("/api/repos/create", [Fault::Status(409, vec![])]);
    upload(&world, &folder(&world)).unwrap();
    world.hub.faults("/api/repos/create", [Fault::Status(403, vec![])]);
    let error = upload(&world, &folder(&world)).unwrap_err();
    assert!(error.to_string().starts_with("creating me/new-model failed (HTTP 403)"), "{error}");
    assert!(error.hint().unwrap().contains("no access"));
}

#[test]
fn without_token_or_files_nothing_is_asked() {
    let mut world = World::new();
    let empty = world.home.path().join("empty");
    fs::create_dir(&empty).unwrap();
    assert!(matches!(upload(&world, &empty).unwrap_err(), HubError::NothingToUpload(_)));
    assert!(matches!(upload(&world, &world.home.path().join("none")).unwrap_err(), HubError::Io { .. }));
    let folder = folder(&world);
    world.settings.token = None;
    let error = upload(&world, &folder).unwrap_err();
    assert!(matches!(error, HubError::NoToken));
    assert!(error.hint().unwrap().contains("HF_TOKEN"));
    assert!(world.hub.seen().is_empty());
}
