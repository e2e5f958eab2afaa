//! Downloads into the Hugging Face cache that have not come to their end, as their files tell.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::checkpoint::hub_cache::{HubCache, repo_of_folder};
use serde_json::{Value, json};

/// Most entries.
const MOST: usize = 5;
/// A file that has not grown for so long belongs to a download that was broken off.
const STALE: Duration = Duration::from_secs(30);

struct Partial {
    path: String,
    bytes: u64,
    begun: Option<SystemTime>,
    changed: SystemTime,
}

/// One entry a repository, the latest first.
pub fn unfinished(environment: &Environment) -> Vec<Value> {
    let cache = HubCache::from_environment(environment);
    let mut entries: Vec<(SystemTime, Value)> = Vec::new();
    for folder in fs::read_dir(cache.root()).into_iter().flatten().flatten() {
        let Some(repo) = folder.file_name().to_str().and_then(repo_of_folder) else { continue };
        let partials = partials(&folder.path().join("blobs"));
        let Some(latest) = partials.iter().max_by_key(|partial| partial.changed) else { continue };
        let running = latest.changed.elapsed().is_ok_and(|age| age < STALE);
        let begun = partials.iter().filter_map(|partial| partial.begun).min().and_then(millis);
        let entry = json!({
            "repo_id": repo, "state": if running { "downloading" } else { "interrupted" },
            "current_file": latest.path, "received_bytes": partials.iter().map(|partial| partial.bytes).sum::<u64>(),
            "total_bytes": null, "files_done": null, "files_total": null, "bytes_per_sec": null,
            "started_at": begun, "finished_at": null,
        });
        entries.push((latest.changed, entry));
    }
    entries.sort_by_key(|(changed, _)| std::cmp::Reverse(*changed));
    entries.into_iter().take(MOST).map(|(_, entry)| entry).collect()
}

fn partials(blobs: &Path) -> Vec<Partial> {
    let partial = |entry: fs::DirEntry| {
        let name = entry.file_name().to_str()?.strip_suffix(".incomplete")?.to_owned();
        let metadata = entry.metadata().ok()?;
        let changed = metadata.modified().ok()?;
        Some(Partial { path: name, bytes: metadata.len(), begun: metadata.created().ok(), changed })
    };
    fs::read_dir(blobs).into_iter().flatten().flatten().filter_map(partial).collect()
}

fn millis(time: SystemTime) -> Option<u64> {
    time.duration_since(UNIX_EPOCH).ok()?.as_millis().try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_still_grow_are_downloads() {
        let root = tempfile::tempdir().unwrap();
        let blobs = root.path().join("models--org--name/blobs");
        fs::create_dir_all(&blobs).unwrap();
        fs::write(blobs.join("done"), "x").unwrap();
        let environment = Environment::from_pairs([("HF_HUB_CACHE", root.path().to_str().unwrap())]);
        assert!(unfinished(&environment).is_empty());
        fs::write(blobs.join("abc.incomplete"), "12345").unwrap();
        let found = unfinished(&environment);
        assert_eq!((&found[0]["repo_id"], &found[0]["received_bytes"]), (&json!("org/name"), &json!(5)));
        assert_eq!(found[0]["state"], "downloading");
    }
}
