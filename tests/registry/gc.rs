//! `gc`: what goes, what stays, and why.

use std::fs::{self, File};
use std::time::{Duration, SystemTime};

use mlx_bun::hub::lock::{Locked, Sharing, blob_lock, repo_lock, try_lock};
use mlx_bun::registry::gc::{GcOptions, GcPlan, execute, plan};

use super::support::Cache;

const HASH: &str = "abaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";

fn planned(cache: &Cache) -> GcPlan {
    plan(&cache.hub(), &GcOptions::default()).unwrap()
}

fn commits(plan: &GcPlan) -> Vec<&str> {
    plan.snapshots.iter().map(|snapshot| snapshot.commit.as_str()).collect()
}

/// An old and a new snapshot that share a blob.
fn two_revisions() -> Cache {
    let cache = Cache::new();
    cache.file("a--b", "old", "config.json", "shared");
    cache.file("a--b", "old", "model.safetensors", "old-weights");
    cache.file("a--b", "new", "config.json", "shared");
    cache.file("a--b", "new", "model.safetensors", "new-weights");
    cache.named("a--b", "main", "new");
    cache
}

#[test]
fn revisions_that_share_blobs_keep_them() {
    let cache = two_revisions();
    let plan = planned(&cache);
    assert_eq!(commits(&plan), ["old"]);
    let blobs: Vec<_> = plan.blobs.iter().map(|blob| blob.path.clone()).collect();
    assert_eq!(blobs, [cache.root().join("models--a--b/blobs/old-weights")]);
    assert_eq!(plan.reclaimable(), "bytes of old-weights".len() as u64);
    assert!(cache.exists("models--a--b/snapshots/old"));

    let result = execute(&cache.hub(), &GcOptions::default(), &plan).unwrap();
    assert_eq!((result.snapshots, result.blobs, result.reclaimed_bytes), (1, 1, plan.reclaimable()));
    assert!(!cache.exists("models--a--b/snapshots/old") && !cache.exists("models--a--b/blobs/old-weights"));
    let weights = cache.root().join("models--a--b/snapshots/new/model.safetensors");
    assert_eq!(fs::read_to_string(weights).unwrap(), "bytes of new-weights");
    assert!(planned(&cache).is_empty());
}

#[test]
fn a_repository_without_refs_is_left_alone() {
    let cache = two_revisions();
    fs::remove_dir_all(cache.root().join("models--a--b/refs")).unwrap();
    cache.write("models--a--b/blobs/orphan", "x");
    assert!(planned(&cache).is_empty());
    // A ref to a snapshot that is not there says nothing either.
    cache.named("a--b", "main", "gone");
    assert!(planned(&cache).is_empty());
    assert!(plan(&Cache::new().hub(), &GcOptions::default()).unwrap().is_empty());
}

#[test]
fn every_ref_keeps_its_snapshot() {
    let cache = two_revisions();
    cache.named("a--b", "refs/pr/1", "old\n");
    assert!(planned(&cache).is_empty());
}

#[test]
fn files_that_only_an_old_snapshot_has_keep_it() {
    let cache = two_revisions();
    cache.file("a--b", "old", "sub/extra.bin", "extra");
    cache.write("models--a--b/snapshots/old/.DS_Store", "x");
    let plan = planned(&cache);
    assert!(plan.snapshots.is_empty() && plan.blobs.is_empty());
    assert_eq!(plan.skipped[0].only_here, ["sub/extra.bin"]);
    let forced = GcOptions { force: true, ..GcOptions::default() };
    let forced = super::gc::plan(&cache.hub(), &forced).unwrap();
    assert_eq!((commits(&forced), forced.blobs.len()), (vec!["old"], 2));
}

/// A dangling link does not stand for the file that an old snapshot still has.
#[test]
fn a_lost_blob_of_the_kept_snapshot_keeps_the_old_one() {
    let cache = two_revisions();
    for commit in ["old", "new"] {
        cache.file("a--b", commit, "more.safetensors", &format!("weights-{commit}"));
    }
    fs::remove_file(cache.root().join("models--a--b/blobs/weights-new")).unwrap();
    let plan = planned(&cache);
    assert!(plan.snapshots.is_empty(), "{plan:?}");
    assert_eq!(plan.skipped[0].only_here, ["more.safetensors"]);
}

#[test]
fn a_link_from_another_repository_keeps_a_blob() {
    let cache = two_revisions();
    cache.file("c--d", "one", "config.json", "x");
    cache.named("c--d", "main", "one");
    cache.link("models--c--d/snapshots/one/w", "../../../models--a--b/blobs/old-weights");
    let plan = planned(&cache);
    assert_eq!((commits(&plan), plan.blobs.len()), (vec!["old"], 0));
    // Also through the snapshot, and by an absolute path.
    let absolute = cache.root().join("models--a--b/snapshots/old/model.safetensors");
    cache.link("datasets--e--f/snapshots/two/w", absolute.to_str().unwrap());
    let plan = planned(&cache);
    assert!(plan.snapshots.is_empty() && plan.blobs.is_empty());
    assert_eq!(plan.skipped[0].commit, "old");
}

#[test]
fn copies_in_a_snapshot_are_counted_once() {
    let cache = two_revisions();
    cache.write("models--a--b/snapshots/old/model.safetensors.copy", "copied");
    cache.write("models--a--b/snapshots/new/model.safetensors.copy", "copied");
    let plan = planned(&cache);
    assert_eq!(plan.snapshots[0].bytes, 6);
    let result = execute(&cache.hub(), &GcOptions::default(), &plan).unwrap();
    assert_eq!((result.blobs, result.reclaimed_bytes), (1, 6 + "bytes of old-weights".len() as u64));
}

fn shared_store(cache: &Cache) {
    cache.write("blobs/.huggingface-shared-blobs", "1\n");
    cache.write(&format!("blobs/ab/{HASH}"), "payload");
}

#[test]
fn a_shared_payload_goes_with_its_last_link() {
    let cache = two_revisions();
    shared_store(&cache);
    let link = |repo: &str, commit: &str, blob: &str| {
        cache.link(&format!("models--{repo}/blobs/{blob}"), &format!("../../blobs/ab/{HASH}"));
        cache.link(&format!("models--{repo}/snapshots/{commit}/big"), &format!("../../blobs/{blob}"));
    };
    link("a--b", "old", "big1");
    cache.file("a--b", "new", "big", "other");
    link("c--d", "one", "big2");
    cache.named("c--d", "main", "one");
    cache.write(&format!("blobs/ab/{HASH}.refs"), "models--a--b/blobs/big1\nmodels--c--d/blobs/big2\n");
    let payload = format!("blobs/ab/{HASH}");
    let plan = planned(&cache);
    assert!(!plan.blobs.iter().any(|blob| blob.path.ends_with(HASH)));
    assert!(plan.blobs.iter().any(|blob| blob.path.ends_with("big1") && blob.bytes == 0));
    execute(&cache.hub(), &GcOptions::default(), &plan).unwrap();
    assert!(cache.exists(&payload) && !cache.exists("models--a--b/blobs/big1"));

    // The other repository moves on.
    cache.file("c--d", "two", "big", "next");
    cache.named("c--d", "main", "two");
    let plan = planned(&cache);
    assert_eq!(plan.reclaimable(), 7);
    execute(&cache.hub(), &GcOptions::default(), &plan).unwrap();
    assert!(!cache.exists(&payload) && !cache.exists(&format!("{payload}.refs")));
}

#[test]
fn a_shared_payload_without_a_manifest_stays() {
    let cache = two_revisions();
    shared_store(&cache);
    assert!(!planned(&cache).blobs.iter().any(|blob| blob.path.ends_with(HASH)));
    cache.write(&format!("blobs/ab/{HASH}.refs"), "");
    assert!(planned(&cache).blobs.iter().any(|blob| blob.path.ends_with(HASH)));
    // A folder that only looks like the store is none.
    cache.write("blobs/.huggingface-shared-blobs", "2\n");
    assert!(!planned(&cache).blobs.iter().any(|blob| blob.path.ends_with(HASH)));
}

#[test]
fn links_out_of_the_cache_are_not_followed() {
    let cache = two_revisions();
    let outside = cache.home.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("precious"), "x").unwrap();
    cache.link("models--a--b/snapshots/old/model.safetensors.link", outside.to_str().unwrap());
    cache.link("models--a--b/blobs/dead-link", outside.join("precious").to_str().unwrap());
    cache.link("models--x--y", outside.to_str().unwrap());
    let options = GcOptions { force: true, ..GcOptions::default() };
    let plan = plan(&cache.hub(), &options).unwrap();
    execute(&cache.hub(), &options, &plan).unwrap();
    assert!(!cache.exists("models--a--b/snapshots/old") && !cache.exists("models--a--b/blobs/dead-link"));
    assert_eq!(fs::read_to_string(outside.join("precious")).unwrap(), "x");
}

#[test]
fn abandoned_downloads_go_after_a_while() {
    let cache = two_revisions();
    let partial = cache.write("models--a--b/blobs/etag.incomplete", "half");
    cache.write("models--a--b/blobs/etag.lock", "");
    assert!(planned(&cache).partials.is_empty());
    let week_ago = SystemTime::now() - Duration::from_secs(8 * 24 * 3600);
    File::options().write(true).open(&partial).unwrap().set_modified(week_ago).unwrap();
    let plan = planned(&cache);
    assert_eq!((plan.partials.len(), plan.partials[0].bytes), (1, 4));
    execute(&cache.hub(), &GcOptions::default(), &plan).unwrap();
    assert!(!partial.exists() && cache.exists("models--a--b/blobs/etag.lock"));
}

#[test]
fn a_repository_with_a_download_is_busy() {
    let cache = two_revisions();
    let plan = planned(&cache);
    for lock in [repo_lock(&cache.root(), "models--a--b"), blob_lock(&cache.root(), "models--a--b", "etag")] {
        let held = try_lock(&lock, Sharing::Shared).unwrap();
        assert!(matches!(held, Locked::Mine(_)));
        let result = execute(&cache.hub(), &GcOptions::default(), &plan).unwrap();
        assert_eq!((result.snapshots, result.blobs, result.busy), (0, 0, vec!["a/b".to_owned()]));
        assert!(cache.exists("models--a--b/snapshots/old"));
    }
}

#[test]
fn what_changed_since_the_plan_is_respected() {
    let cache = two_revisions();
    let plan = planned(&cache);
    cache.named("a--b", "v1", "old");
    let result = execute(&cache.hub(), &GcOptions::default(), &plan).unwrap();
    assert_eq!((result.snapshots, result.blobs), (0, 0));
    assert!(cache.exists("models--a--b/blobs/old-weights"));
}

#[test]
fn only_the_repositories_named() {
    let cache = two_revisions();
    let only = |repo: &str| GcOptions { repos: vec![repo.to_owned()], ..GcOptions::default() };
    cache.file("c--d", "one", "config.json", "x");
    assert!(plan(&cache.hub(), &only("c/d")).unwrap().is_empty());
    assert_eq!(plan(&cache.hub(), &only("a/b")).unwrap().snapshots.len(), 1);
    let error = plan(&cache.hub(), &only("a")).unwrap_err().to_string();
    assert!(error.starts_with("a is not in the cache "), "{error}");
}

#[test]
fn a_collection_that_was_cut_short_is_finished_by_the_next() {
    let cache = two_revisions();
    // As after a kill between the two steps, and in the middle of the first.
    fs::remove_file(cache.root().join("models--a--b/snapshots/old/config.json")).unwrap();
    let plan = planned(&cache);
    assert_eq!((commits(&plan), plan.blobs.len()), (vec!["old"], 1));
    fs::remove_dir_all(cache.root().join("models--a--b/snapshots/old")).unwrap();
    let plan = planned(&cache);
    assert_eq!((plan.snapshots.len(), plan.blobs.len()), (0, 1));
}
