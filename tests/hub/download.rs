//! `get`: whole or absent, resumed, verified, and no secret to strangers.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mlx_bun::hub::lock::{Locked, Sharing, blob_lock, try_lock};
use mlx_bun::hub::{DownloadRequest, HubError, TransferProgress};

use super::support::{REPO, World, request, tree, weights};
use crate::stand_in::{COMMIT, Fault, OTHER_COMMIT, git_sha1, sha256};

#[test]
fn the_layout_is_huggingface_hubs() {
    let world = World::new();
    let sub = b"{}";
    world.hub.add(&world.storage, REPO, "sub/dir/extra.json", sub, false);
    let got = world.get().unwrap();
    assert_eq!(got.path, world.repo().join("snapshots").join(COMMIT));
    assert_eq!((got.commit.as_str(), got.files), (COMMIT, 4));
    assert_eq!(got.bytes, got.transferred);
    let config = git_sha1(br#"{"model_type":"llama"}"#);
    let readme = git_sha1(b"---\nlicense: mit\n---\n");
    let snapshot = |name: &str| format!("snapshots/{COMMIT}/{name}");
    let expected = [
        (format!("blobs/{config}"), "22 bytes".to_owned()),
        (format!("blobs/{readme}"), "21 bytes".to_owned()),
        (format!("blobs/{}", git_sha1(sub)), "2 bytes".to_owned()),
        (format!("blobs/{}", sha256(&weights())), "120000 bytes".to_owned()),
        ("refs/main".to_owned(), "40 bytes".to_owned()),
        (snapshot("config.json"), format!("-> ../../blobs/{config}")),
        (snapshot("README.md"), format!("-> ../../blobs/{readme}")),
        (snapshot("sub/dir/extra.json"), format!("-> ../../../../blobs/{}", git_sha1(sub))),
        (snapshot("model.safetensors"), format!("-> ../../blobs/{}", sha256(&weights()))),
    ];
    assert_eq!(tree(&world.repo()), expected.into_iter().collect());
    assert_eq!(fs::read_to_string(world.repo().join("refs/main")).unwrap(), COMMIT);
    assert_eq!(fs::read(got.path.join("model.safetensors")).unwrap(), weights());
}

#[test]
fn what_is_there_is_not_fetched_again() {
    let world = World::new();
    world.get().unwrap();
    world.hub.forget();
    world.storage.forget();
    let again = world.get().unwrap();
    assert_eq!(again.transferred, 0);
    assert_eq!(world.hub.seen().len(), 1);
    assert!(world.storage.seen().is_empty());
}

#[test]
fn a_new_commit_shares_what_did_not_change() {
    let world = World::new();
    world.get().unwrap();
    world.hub.add_at(&world.storage, REPO, OTHER_COMMIT, "config.json", b"{}", false);
    world.hub.add_at(&world.storage, REPO, OTHER_COMMIT, "model.safetensors", &weights(), true);
    world.hub.name_revision(REPO, "main", OTHER_COMMIT);
    let got = world.get().unwrap();
    assert_eq!((got.commit.as_str(), got.transferred), (OTHER_COMMIT, 2));
    assert_eq!(fs::read_to_string(world.repo().join("refs/main")).unwrap(), OTHER_COMMIT);
    assert!(world.repo().join("snapshots").join(COMMIT).is_dir());
}

#[test]
fn revisions_with_slashes_and_commits() {
    let world = World::new();
    world.hub.name_revision(REPO, "refs/pr/1", COMMIT);
    let at = |revision: &str| {
        let request = DownloadRequest { revision: Some(revision.to_owned()), ..request() };
        world.client().download(&request, &())
    };
    at("refs/pr/1").unwrap();
    assert_eq!(fs::read_to_string(world.repo().join("refs/refs/pr/1")).unwrap(), COMMIT);
    at(COMMIT).unwrap();
    assert!(!world.repo().join("refs").join(COMMIT).exists());
    for bad in ["../../x", "/etc", "a/../b", ""] {
        assert!(at(bad).is_err(), "{bad}");
    }
    let missing = at("v9").unwrap_err();
    assert_eq!(missing.to_string(), "listing org/name@v9 failed (HTTP 404): not here");
}

#[test]
fn the_token_goes_to_the_hub_and_not_to_its_storage() {
    let world = World::new();
    world.hub.require_token("hf_secret");
    world.get().unwrap();
    assert!(world.hub.seen().iter().all(|seen| seen.header("authorization") == Some("Bearer hf_secret")));
    let storage = world.storage.seen();
    assert!(!storage.is_empty());
    assert!(storage.iter().all(|seen| seen.header("authorization").is_none()));
}

#[test]
fn a_gated_repository_says_what_to_do() {
    let mut world = World::new();
    world.hub.require_token("hf_other");
    let error = world.get().unwrap_err();
    assert_eq!(error.to_string(), "listing org/name@main failed (HTTP 401): Access is restricted");
    assert!(error.hint().unwrap().contains("gated"), "{error:?}");
    world.settings.token = None;
    assert!(world.get().unwrap_err().hint().unwrap().contains("HF_TOKEN"));
    assert!(!format!("{error:?}").contains("hf_secret"));
    assert!(!world.repo().exists());
}

#[test]
fn a_cut_connection_is_resumed() {
    let world = World::new();
    let (_, object) = World::weight_paths();
    world.storage.faults(&object, [Fault::CutAfter(1000), Fault::CutAfter(50_000), Fault::CutAfter(1)]);
    let got = world.get().unwrap();
    assert_eq!(got.transferred, got.bytes);
    assert_eq!(fs::read(got.path.join("model.safetensors")).unwrap(), weights());
    let ranges: Vec<_> =
        world.storage.seen().iter().map(|seen| seen.header("range").map(str::to_owned)).collect();
    assert_eq!(ranges[0], None);
    assert_eq!(ranges[1].as_deref(), Some("bytes=1000-"));
    assert_eq!(ranges.len(), 4);
}

#[test]
fn a_connection_that_never_lasts_leaves_what_there_is() {
    let world = World::new();
    let (_, object) = World::weight_paths();
    world.storage.faults(&object, [Fault::CutAfter(1000)]);
    world.storage.always(&object, Fault::CutAfter(0));
    let error = world.get().unwrap_err();
    assert!(matches!(error, HubError::Short { have: 1000, size: 120_000, .. }), "{error}");
    assert!(error.to_string().contains("1000 of 120000 bytes"), "{error}");
    let partial = world.repo().join("blobs").join(format!("{}.incomplete", sha256(&weights())));
    assert_eq!(fs::metadata(&partial).unwrap().len(), 1000);
    assert!(!world.repo().join("refs").exists());

    world.storage.forgive();
    world.storage.forget();
    let got = world.get().unwrap();
    assert_eq!(got.transferred + 1000 + 43, got.bytes);
    assert_eq!(world.storage.seen()[0].header("range"), Some("bytes=1000-"));
    assert!(!partial.exists());
}

#[test]
fn a_stalled_connection_is_given_up_and_resumed() {
    let mut world = World::new();
    world.settings.download_timeout = Duration::from_secs(1);
    let (_, object) = World::weight_paths();
    world.storage.faults(&object, [Fault::StallAfter(2000, Duration::from_secs(30))]);
    let started = Instant::now();
    world.get().unwrap();
    assert!(started.elapsed() < Duration::from_secs(20));
    assert_eq!(world.storage.seen()[1].header("range"), Some("bytes=2000-"));
}

#[test]
fn servers_that_are_busy_are_asked_again() {
    let world = World::new();
    let (hub, object) = World::weight_paths();
    world.hub.faults(
        "/api/models/org/name/revision/main",
        [Fault::Status(429, vec![("Retry-After", "1".into())])],
    );
    world.hub.faults(&hub, [Fault::Status(500, vec![]), Fault::Status(503, vec![])]);
    world.storage.faults(&object, [Fault::Status(504, vec![])]);
    let started = Instant::now();
    world.get().unwrap();
    assert!(started.elapsed() >= Duration::from_secs(1));

    world.hub.always(&hub, Fault::Status(500, vec![]));
    fs::remove_dir_all(world.repo()).unwrap();
    let error = world.get().unwrap_err();
    assert_eq!(error.to_string(), "downloading model.safetensors failed (HTTP 500): as told");
}

#[test]
fn a_retry_that_is_asked_for_has_a_limit() {
    let world = World::new();
    let path = "/api/models/org/name/revision/main";
    world.hub.always(path, Fault::Status(429, vec![("Retry-After", "86400".into())]));
    let started = Instant::now();
    assert!(world.get().is_err());
    assert!(started.elapsed() < Duration::from_secs(60));
}

#[test]
fn a_server_that_ignores_ranges_starts_anew() {
    let world = World::new();
    let (_, object) = World::weight_paths();
    world.storage.faults(&object, [Fault::CutAfter(1000), Fault::IgnoreRange]);
    let got = world.get().unwrap();
    assert_eq!(fs::read(got.path.join("model.safetensors")).unwrap(), weights());
}

#[test]
fn a_server_that_ignores_ranges_and_breaks_off_is_given_up() {
    let world = World::new();
    let (_, object) = World::weight_paths();
    world.storage.always(&object, Fault::IgnoreRangeAndCut(5000));
    let error = world.get().unwrap_err();
    assert!(matches!(error, HubError::Short { have: 5000, .. }), "{error}");
}

#[test]
fn other_bytes_than_promised_are_refused() {
    let world = World::new();
    let (_, object) = World::weight_paths();
    world.storage.always(&object, Fault::Corrupt);
    let error = world.get().unwrap_err();
    assert!(matches!(error, HubError::Mismatch { .. }), "{error}");
    assert!(!tree(&world.repo()).keys().any(|name| name.contains(&sha256(&weights()))));
    assert!(!world.repo().join("refs").exists());
}

#[test]
fn plain_files_are_verified_too() {
    let world = World::new();
    let path = format!("/{REPO}/resolve/{COMMIT}/config.json");
    world.hub.always(&path, Fault::Corrupt);
    assert!(matches!(world.get().unwrap_err(), HubError::Mismatch { file } if file == "config.json"));
}

#[test]
fn a_broken_partial_file_is_fetched_anew() {
    let world = World::new();
    let blobs = world.repo().join("blobs");
    fs::create_dir_all(&blobs).unwrap();
    let partial = blobs.join(format!("{}.incomplete", sha256(&weights())));
    for left in [vec![1; 1000], vec![2; 120_000], vec![3; 200_000]] {
        fs::write(&partial, &left).unwrap();
        let got = world.get().unwrap();
        assert_eq!(fs::read(got.path.join("model.safetensors")).unwrap(), weights());
        assert!(!partial.exists());
        fs::remove_file(blobs.join(sha256(&weights()))).unwrap();
    }
}

#[test]
fn lengths_that_lie() {
    let world = World::new();
    let (_, object) = World::weight_paths();
    // Fewer bytes than there are: the rest comes with a second request.
    world.storage.faults(&object, [Fault::Length(4000)]);
    let got = world.get().unwrap();
    assert_eq!(fs::read(got.path.join("model.safetensors")).unwrap(), weights());

    // More than there are, once and for ever.
    fs::remove_dir_all(world.repo()).unwrap();
    world.storage.faults(&object, [Fault::Length(120_001)]);
    assert!(matches!(world.get().unwrap_err(), HubError::WrongLength { sent: 120_001, .. }));
    // A listing that says less or more than there is.
    for listed in [100_000, 130_000] {
        world.hub.lie_about_size("model.safetensors", listed);
        let error = world.get().unwrap_err().to_string();
        assert!(error.contains(&listed.to_string()), "{error}");
        assert!(!world.repo().join("refs").exists());
    }
}

#[test]
fn a_file_that_changes_between_tries_is_noticed() {
    let world = World::new();
    let (hub, object) = World::weight_paths();
    let mut other = weights();
    other.reverse();
    // The second part is of another file, and so is all of the third answer.
    let rest = other[1000..].to_vec();
    world.storage.faults(&object, [Fault::CutAfter(1000), Fault::Body(rest), Fault::Body(other)]);
    assert!(matches!(world.get().unwrap_err(), HubError::Mismatch { .. }));
    assert_eq!(fs::read(world.get().unwrap().path.join("model.safetensors")).unwrap(), weights());

    // The hub says itself that it is another one.
    fs::remove_dir_all(world.repo()).unwrap();
    world.hub.faults(
        &hub,
        [Fault::Status(
            302,
            vec![
                ("Location", format!("{}{object}", world.storage.address)),
                ("X-Linked-Etag", "0".repeat(64)),
            ],
        )],
    );
    let error = world.get().unwrap_err();
    assert_eq!(error.to_string(), "model.safetensors changed on the hub during the download; run it again");
}

#[test]
fn redirects_are_followed_with_measure() {
    let world = World::new();
    let listing = "/api/models/org/name/revision/main";
    let to = |location: &str| Fault::Status(307, vec![("Location", location.to_owned())]);
    world.hub.faults(listing, [to(&format!("{listing}?again"))]);
    world.get().unwrap();
    world.hub.always(listing, to(listing));
    assert_eq!(world.get().unwrap_err().to_string(), "listing org/name@main failed: more than 5 redirects");
    world.hub.always(listing, to("file:///etc/passwd"));
    world.get().unwrap_err();
}

#[test]
fn a_second_download_of_a_file_is_refused() {
    let world = World::new();
    let hash = sha256(&weights());
    let lock = blob_lock(world.settings.cache.root(), "models--org--name", &hash);
    let held = try_lock(&lock, Sharing::Exclusive).unwrap();
    assert!(matches!(held, Locked::Mine(_)));
    let error = world.get().unwrap_err();
    let pid = std::process::id();
    assert_eq!(
        error.to_string(),
        format!("another download of model.safetensors is in progress (pid {pid})")
    );
    drop(held);
    world.get().unwrap();
}

#[test]
fn unsafe_names_stop_everything() {
    let world = World::new();
    world.hub.add(&world.storage, REPO, "../../../outside.json", b"x", false);
    let error = world.get().unwrap_err();
    assert!(matches!(error, HubError::UnsafeName { .. }), "{error}");
    assert!(!world.repo().exists());
}

#[test]
fn a_link_out_of_the_cache_is_replaced_not_followed() {
    let world = World::new();
    let outside = world.home.path().join("outside");
    fs::write(&outside, vec![7; weights().len()]).unwrap();
    let blobs = world.repo().join("blobs");
    fs::create_dir_all(&blobs).unwrap();
    let blob = blobs.join(sha256(&weights()));
    std::os::unix::fs::symlink(&outside, &blob).unwrap();
    let got = world.get().unwrap();
    assert_eq!(fs::read(got.path.join("model.safetensors")).unwrap(), weights());
    assert!(fs::symlink_metadata(&blob).unwrap().is_file());
    assert_eq!(fs::read(&outside).unwrap(), vec![7; weights().len()]);
}

#[test]
fn a_blob_in_the_shared_store_is_used() {
    let world = World::new();
    let store = world.settings.cache.root().join("blobs/ab");
    fs::create_dir_all(&store).unwrap();
    fs::write(store.join("payload"), weights()).unwrap();
    let blobs = world.repo().join("blobs");
    fs::create_dir_all(&blobs).unwrap();
    std::os::unix::fs::symlink("../../blobs/ab/payload", blobs.join(sha256(&weights()))).unwrap();
    let got = world.get().unwrap();
    assert!(world.storage.seen().is_empty());
    assert_eq!(fs::read(got.path.join("model.safetensors")).unwrap(), weights());
}

#[test]
fn patterns_choose_files() {
    let world = World::new();
    let names = |include: &[&str], exclude: &[&str]| {
        let list = |patterns: &[&str]| patterns.iter().map(|p| (*p).to_owned()).collect::<Vec<_>>();
        let request = DownloadRequest { include: list(include), exclude: list(exclude), ..request() };
        let got = world.client().download(&request, &())?;
        let mut names: Vec<_> = tree(&got.path).into_keys().collect();
        names.sort();
        fs::remove_dir_all(world.repo()).unwrap();
        Ok::<_, HubError>(names)
    };
    assert_eq!(names(&[], &[]).unwrap(), ["README.md", "config.json", "model.safetensors"]);
    assert_eq!(names(&["*.json"], &[]).unwrap(), ["config.json"]);
    assert_eq!(names(&["*"], &["*.safetensors", "*.bin"]).unwrap(), ["README.md", "config.json"]);
    assert!(matches!(names(&["*.nothing"], &[]).unwrap_err(), HubError::NothingMatches(_)));
}

#[test]
fn one_gguf_is_taken_and_of_several_none() {
    let world = World::new();
    world.hub.add(&world.storage, "org/gguf", "a-q4.gguf", b"GGUF1", true);
    let request = DownloadRequest { repo_id: "org/gguf".to_owned(), ..request() };
    world.client().download(&request, &()).unwrap();
    world.hub.add(&world.storage, "org/gguf", "a-q8.gguf", b"GGUF2", true);
    let error = world.client().download(&request, &()).unwrap_err();
    assert_eq!(error.to_string(), "org/gguf holds 2 GGUF files and no safetensors: a-q4.gguf, a-q8.gguf");
    assert_eq!(error.hint().unwrap(), "choose one: --include a-q4.gguf");
}

#[test]
fn files_with_the_same_bytes_are_one_blob() {
    let world = World::new();
    world.hub.add(&world.storage, REPO, "model-copy.safetensors", &weights(), true);
    world.get().unwrap();
    assert_eq!(world.storage.seen().len(), 1);
}

#[test]
fn an_empty_file_is_made() {
    let world = World::new();
    world.hub.add(&world.storage, REPO, "empty.json", b"", false);
    let got = world.get().unwrap();
    assert_eq!(fs::read(got.path.join("empty.json")).unwrap(), b"");
}

#[test]
fn without_network_the_cache_answers() {
    let mut world = World::new();
    world.settings.offline = true;
    let error = world.get().unwrap_err();
    assert_eq!(error.to_string(), "org/name@main is not on this machine and HF_HUB_OFFLINE is set");
    world.settings.offline = false;
    let online = world.get().unwrap();
    world.settings.offline = true;
    world.hub.forget();
    let offline = world.get().unwrap();
    assert_eq!((offline.path, offline.files, offline.bytes), (online.path, online.files, online.bytes));
    assert!(world.hub.seen().is_empty());
}

#[test]
fn a_hub_that_is_not_there_is_given_up_soon() {
    let mut world = World::new();
    // Bound and closed again: nobody listens.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    world.settings.endpoint = format!("http://127.0.0.1:{port}");
    let started = Instant::now();
    let error = world.get().unwrap_err();
    assert!(matches!(error, HubError::Unreachable { .. }), "{error}");
    assert!(
        error.to_string().starts_with("listing org/name@main failed: no answer from 127.0.0.1: "),
        "{error}"
    );
    assert!(started.elapsed() < Duration::from_secs(8));
}

#[test]
fn answers_that_make_no_sense() {
    let world = World::new();
    let path = "/api/models/org/name/revision/main";
    for body in ["", "[]", "{}", r#"{"sha":"../x"}"#, r#"{"sha":"#, "<html>"] {
        world.hub.faults(path, [Fault::Body(body.into())]);
        let error = world.get().unwrap_err();
        assert!(matches!(error, HubError::Malformed { .. }), "{body}: {error}");
        assert!(!error.to_string().contains('\n'));
    }
    let no_size = format!(r#"{{"sha":"{COMMIT}","siblings":[{{"rfilename":"a.json"}}]}}"#);
    world.hub.faults(path, [Fault::Body(no_size.into())]);
    assert!(
        world.get().unwrap_err().to_string().contains("file `a.json` is listed without its size or hash")
    );
}

#[test]
fn a_folder_of_ones_own() {
    let world = World::new();
    let folder = world.home.path().join("mine");
    let request = DownloadRequest { local_dir: Some(folder.clone()), ..request() };
    let got = world.client().download(&request, &()).unwrap();
    assert_eq!(got.path, folder);
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), weights());
    assert!(fs::symlink_metadata(folder.join("model.safetensors")).unwrap().is_file());
    let record = fs::read_to_string(folder.join(".cache/huggingface/download/config.json.metadata")).unwrap();
    assert_eq!(record.lines().take(2).collect::<Vec<_>>(), [COMMIT, &git_sha1(br#"{"model_type":"llama"}"#)]);
    assert!(!world.repo().exists());

    world.storage.forget();
    assert_eq!(world.client().download(&request, &()).unwrap().transferred, 0);
    // A file that was changed by hand is fetched again, one that lost its record is only hashed.
    fs::write(folder.join("config.json"), "{}").unwrap();
    fs::remove_dir_all(folder.join(".cache")).unwrap();
    assert_eq!(world.client().download(&request, &()).unwrap().transferred, 22);
    assert!(world.storage.seen().is_empty());
}

#[test]
fn progress_adds_up() {
    #[derive(Default)]
    struct Count {
        planned: AtomicU64,
        now: AtomicU64,
        files: AtomicU64,
    }
    impl TransferProgress for Count {
        fn planned(&self, _files: usize, bytes: u64) {
            self.planned.store(bytes, Ordering::SeqCst);
        }
        fn advanced(&self, bytes: u64, _moved: bool) {
            self.now.fetch_add(bytes, Ordering::SeqCst);
        }
        fn rewound(&self, bytes: u64) {
            self.now.fetch_sub(bytes, Ordering::SeqCst);
        }
        fn finished(&self, _file: &str) {
            self.files.fetch_add(1, Ordering::SeqCst);
        }
    }
    let world = World::new();
    let (_, object) = World::weight_paths();
    world.storage.faults(&object, [Fault::CutAfter(1000), Fault::IgnoreRange]);
    for _ in 0..2 {
        let count = Count::default();
        world.client().download(&request(), &count).unwrap();
        assert_eq!(count.now.into_inner(), count.planned.into_inner());
        assert_eq!(count.files.into_inner(), 3);
    }
}

#[test]
fn a_cancelled_download_keeps_what_it_has() {
    struct Stop(AtomicU64);
    impl TransferProgress for Stop {
        fn advanced(&self, bytes: u64, _moved: bool) {
            self.0.fetch_add(bytes, Ordering::SeqCst);
        }
        fn is_cancelled(&self) -> bool {
            self.0.load(Ordering::SeqCst) > 10_000
        }
    }
    let world = World::new();
    let (_, object) = World::weight_paths();
    world.storage.always(&object, Fault::Slow(5_000, Duration::from_millis(20)));
    let error = world.client().download(&request(), &Stop(AtomicU64::new(0))).unwrap_err();
    assert!(matches!(error, HubError::Cancelled), "{error}");
    world.storage.forgive();
    world.storage.forget();
    world.get().unwrap();
    assert!(world.storage.seen()[0].header("range").is_some());
}
