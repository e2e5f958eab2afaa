//! `gc` over random caches: whatever lies there, what stays can be read as before.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use mlx_bun::registry::gc::{GcOptions, execute, plan};
use proptest::prelude::*;

use super::support::{Cache, contents};

const REPOS: [&str; 4] = ["models--a--b", "models--c--d", "models--e--f", "datasets--g--h"];
const COMMITS: [&str; 3] = ["c0", "c1", "c2"];
const NAMES: [&str; 4] = ["config.json", "model.safetensors", "sub/deep.txt", "extra"];

/// How a file of a snapshot comes to its bytes.
#[derive(Clone, Debug)]
enum Way {
    /// A link to the repository's own blob.
    Blob(usize),
    /// A link to a blob that is a link into the shared store.
    Shared(usize),
    /// A copy.
    Copy,
    /// A link to another repository's blob.
    OtherBlob(usize, usize),
    /// A link to another snapshot's file.
    OtherFile(usize, usize, usize),
    /// The same with an absolute path.
    Absolute(usize, usize, usize),
    /// A link to a whole snapshot.
    Folder(usize, usize),
    /// A link to nothing.
    Dangling,
}

fn way() -> impl Strategy<Value = Way> {
    let (repo, commit, name, blob) = (0..REPOS.len(), 0..COMMITS.len(), 0..NAMES.len(), 0..4usize);
    prop_oneof![
        6 => blob.clone().prop_map(Way::Blob),
        3 => (0..3usize).prop_map(Way::Shared),
        1 => Just(Way::Copy),
        1 => (repo.clone(), blob).prop_map(|(repo, blob)| Way::OtherBlob(repo, blob)),
        1 => (repo.clone(), commit.clone(), name.clone()).prop_map(|(r, c, n)| Way::OtherFile(r, c, n)),
        1 => (repo.clone(), commit.clone(), name).prop_map(|(r, c, n)| Way::Absolute(r, c, n)),
        1 => (repo, commit).prop_map(|(repo, commit)| Way::Folder(repo, commit)),
        1 => Just(Way::Dangling),
    ]
}

type Entry = (usize, usize, usize, Way);

fn store_hash(number: usize) -> String {
    format!("a{number}").repeat(32)
}

fn build(
    entries: &[Entry],
    refs: &[(usize, usize)],
    orphans: &[(usize, usize)],
    manifests: [bool; 3],
) -> Cache {
    let cache = Cache::new();
    let mut listed: [BTreeSet<String>; 3] = Default::default();
    cache.write("blobs/.huggingface-shared-blobs", "1\n");
    for number in 0..3 {
        let hash = store_hash(number);
        cache.write(&format!("blobs/{}/{hash}", &hash[..2]), format!("payload {number}"));
    }
    for (repo, commit, name, way) in entries {
        let (repo, file) = (REPOS[*repo], format!("snapshots/{}/{}", COMMITS[*commit], NAMES[*name]));
        let up = "../".repeat(NAMES[*name].split('/').count() + 1);
        let path = format!("{repo}/{file}");
        if cache.exists(&path) {
            continue;
        }
        match way {
            Way::Blob(blob) => {
                cache.write(&format!("{repo}/blobs/blob{blob}"), format!("{repo} blob {blob}"));
                cache.link(&path, &format!("{up}blobs/blob{blob}"));
            }
            Way::Shared(number) => {
                let (hash, blob) = (store_hash(*number), format!("{repo}/blobs/shared{number}"));
                if !cache.exists(&blob) {
                    cache.link(&blob, &format!("../../blobs/{}/{hash}", &hash[..2]));
                }
                listed[*number].insert(blob);
                cache.link(&path, &format!("{up}blobs/shared{number}"));
            }
            Way::Copy => {
                cache.write(&path, "copied");
            }
            Way::OtherBlob(other, blob) => {
                cache.link(&path, &format!("{up}../{}/blobs/blob{blob}", REPOS[*other]))
            }
            Way::OtherFile(other, commit, name) => {
                let target =
                    format!("{up}../{}/snapshots/{}/{}", REPOS[*other], COMMITS[*commit], NAMES[*name]);
                cache.link(&path, &target);
            }
            Way::Absolute(other, commit, name) => {
                let target = format!("{}/snapshots/{}/{}", REPOS[*other], COMMITS[*commit], NAMES[*name]);
                cache.link(&path, cache.root().join(target).to_str().unwrap());
            }
            Way::Folder(other, commit) => {
                cache.link(&path, &format!("{up}../{}/snapshots/{}", REPOS[*other], COMMITS[*commit]));
            }
            Way::Dangling => cache.link(&path, &format!("{up}blobs/nothing")),
        }
    }
    for (repo, commit) in refs {
        cache.write(&format!("{}/refs/r{commit}", REPOS[*repo]), COMMITS[*commit]);
    }
    for (repo, number) in orphans {
        cache.write(&format!("{}/blobs/orphan{number}", REPOS[*repo]), "orphan");
    }
    for (number, written) in manifests.into_iter().enumerate().filter(|(_, written)| *written) {
        let hash = store_hash(number);
        let lines: String = listed[number].iter().map(|blob| format!("{blob}\n")).collect();
        let _ = written;
        cache.write(&format!("blobs/{}/{hash}.refs", &hash[..2]), lines);
    }
    cache
}

/// Bytes on the disk, links not followed and the collector's own locks left out.
fn disk_use(root: &Path) -> u64 {
    let mut total = 0;
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let (path, kind) = (entry.path(), entry.file_type().unwrap());
            let name = entry.file_name().to_string_lossy().into_owned();
            if kind.is_dir() && name != ".locks" {
                folders.push(path);
            } else if kind.is_file() && !name.ends_with(".lock") && !name.ends_with(".refs") {
                total += entry.metadata().unwrap().len();
            }
        }
    }
    total
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_stays_reads_as_before(
        entries in prop::collection::vec((0..REPOS.len(), 0..COMMITS.len(), 0..NAMES.len(), way()), 0..24),
        refs in prop::collection::vec((0..REPOS.len(), 0..COMMITS.len()), 0..6),
        orphans in prop::collection::vec((0..REPOS.len(), 0..3usize), 0..4),
        manifests in any::<[bool; 3]>(),
        force in any::<bool>(),
    ) {
        let cache = build(&entries, &refs, &orphans, manifests);
        let outside = cache.home.path().join("outside");
        fs::write(&outside, "x").unwrap();
        let (hub, options) = (cache.hub(), GcOptions { force, ..GcOptions::default() });
        let before = contents(&cache.root());
        let used = disk_use(&cache.root());
        let planned = plan(&hub, &options).unwrap();
        prop_assert_eq!(contents(&cache.root()).len(), before.len(), "planning touches nothing");

        let result = execute(&hub, &options, &planned).unwrap();
        prop_assert!(result.busy.is_empty());
        prop_assert_eq!(result.snapshots, planned.snapshots.len());
        prop_assert_eq!(result.reclaimed_bytes, planned.reclaimable());
        prop_assert_eq!(used - disk_use(&cache.root()), planned.reclaimable());

        let gone: Vec<&PathBuf> = planned.snapshots.iter().map(|snapshot| &snapshot.path).collect();
        let after = contents(&cache.root());
        for (path, bytes) in &before {
            let in_snapshot = path.to_str().unwrap().contains("/snapshots/");
            if in_snapshot && !gone.iter().any(|snapshot| path.starts_with(snapshot)) {
                prop_assert_eq!(after.get(path), Some(bytes), "{}", path.display());
            }
        }
        // A snapshot that a ref names stays, and so does all of a repository without one.
        for (repo, commit) in &refs {
            let path = cache.root().join(REPOS[*repo]).join("snapshots").join(COMMITS[*commit]);
            prop_assert!(!gone.contains(&&path));
        }
        for (number, repo) in REPOS.iter().enumerate() {
            let there = |commit: &usize| entries.iter().any(|(r, c, ..)| *r == number && c == commit);
            let kept = refs.iter().any(|(r, commit)| *r == number && there(commit));
            let under = |tree: &std::collections::BTreeMap<PathBuf, Option<Vec<u8>>>| {
                let folder = cache.root().join(repo);
                tree.keys().filter(|path| path.starts_with(&folder)).cloned().collect::<Vec<_>>()
            };
            if !kept || repo.starts_with("datasets") {
                prop_assert_eq!(under(&before), under(&after));
            }
        }
        prop_assert!(plan(&hub, &options).unwrap().is_empty(), "nothing is left for a second time");
        prop_assert_eq!(fs::read_to_string(&outside).unwrap(), "x");
    }
}
