//! Deletes what a plan says, after looking again.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::survey::{beside, manifest_of, manifest_references};
use super::{GcError, GcOptions, GcPlan, plan};
use crate::checkpoint::hub_cache::{HubCache, repo_folder};
use crate::hub::lock::{FileLock, Locked, Sharing, repo_lock, try_lock};

/// What was deleted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GcResult {
    /// Snapshots.
    pub snapshots: usize,
    /// Blobs and abandoned downloads.
    pub blobs: usize,
    /// Bytes that are free now.
    pub reclaimed_bytes: u64,
    /// Repositories that were left alone because a download is going on in them.
    pub busy: Vec<String>,
}

/// Deletes what is in the plan and still may go: snapshots first, then blobs.
///
/// # Errors
/// Something cannot be deleted. What was deleted before stays deleted, and what is left is whole.
pub fn execute(cache: &HubCache, options: &GcOptions, planned: &GcPlan) -> Result<GcResult, GcError> {
    let mut result = GcResult::default();
    let Ok(root) = cache.root().canonicalize() else { return Ok(result) };
    let (locks, busy) = lock_repos(&root, planned)?;
    // Whatever happened between planning and locking is seen now; only what both plans name goes.
    let current = plan(cache, options)?;
    let locked = |path: &Path| {
        let repo = path.strip_prefix(&root).ok().and_then(|path| path.iter().next());
        repo.is_some_and(|repo| locks.contains_key(&*repo.to_string_lossy()))
    };
    for snapshot in &planned.snapshots {
        if current.snapshots.contains(snapshot) && locked(&snapshot.path) {
            fs::remove_dir_all(&snapshot.path).map_err(|cause| unremovable(&snapshot.path, cause))?;
            result.snapshots += 1;
            result.reclaimed_bytes += snapshot.bytes;
        }
    }
    let now: BTreeSet<_> = current.blobs.iter().chain(&current.partials).collect();
    for item in planned.blobs.iter().chain(&planned.partials).filter(|item| now.contains(item)) {
        let removed = if item.path.starts_with(root.join("blobs")) {
            remove_payload(&root, &item.path)?
        } else if locked(&item.path) {
            fs::remove_file(&item.path).map_err(|cause| unremovable(&item.path, cause))?;
            true
        } else {
            false
        };
        if removed {
            result.blobs += 1;
            result.reclaimed_bytes += item.bytes;
        }
    }
    result.busy = busy;
    Ok(result)
}

type RepoLocks = BTreeMap<String, Vec<FileLock>>;

/// Takes every lock of the repositories in the plan; those where one is taken are busy.
fn lock_repos(root: &Path, planned: &GcPlan) -> Result<(RepoLocks, Vec<String>), GcError> {
    let in_snapshots = planned.snapshots.iter().map(|snapshot| repo_folder(&snapshot.repo_id));
    let items = planned.blobs.iter().chain(&planned.partials);
    let in_items = items.filter_map(|item| {
        let folder = item.path.strip_prefix(root).ok()?.iter().next()?;
        Some(folder.to_string_lossy().into_owned()).filter(|folder| folder.contains("--"))
    });
    let folders: BTreeSet<String> = in_snapshots.chain(in_items).collect();
    let (mut locks, mut busy) = (RepoLocks::new(), Vec::new());
    for folder in folders {
        match lock_repo(root, &folder)? {
            Some(held) => {
                locks.insert(folder, held);
            }
            None => busy.push(crate::checkpoint::hub_cache::repo_of_folder(&folder).unwrap_or(folder)),
        }
    }
    Ok((locks, busy))
}

fn lock_repo(root: &Path, folder: &str) -> Result<Option<Vec<FileLock>>, GcError> {
    let others = fs::read_dir(root.join(".locks").join(folder)).into_iter().flatten();
    let mut paths: BTreeSet<PathBuf> = others.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.insert(repo_lock(root, folder));
    let mut held = Vec::new();
    for path in paths {
        let locked = try_lock(&path, Sharing::Exclusive);
        match locked.map_err(|cause| GcError::Io { doing: "lock", path: path.clone(), cause })? {
            Locked::Mine(lock) => held.push(lock),
            Locked::Theirs(_) => return Ok(None),
        }
    }
    Ok(Some(held))
}

/// Removes a payload of the shared store, under its own lock and if still nothing links to it.
fn remove_payload(root: &Path, payload: &Path) -> Result<bool, GcError> {
    let lock = beside(payload, ".lock");
    let Ok(Locked::Mine(_lock)) = try_lock(&lock, Sharing::Exclusive) else { return Ok(false) };
    if !manifest_references(root, payload).is_some_and(|references| references.is_empty()) {
        return Ok(false);
    }
    let remove = |path: PathBuf| match fs::remove_file(&path) {
        Err(cause) if cause.kind() != io::ErrorKind::NotFound => Err(unremovable(&path, cause)),
        _ => Ok(()),
    };
    remove(payload.to_owned())?;
    remove(manifest_of(payload))?;
    Ok(true)
}

fn unremovable(path: &Path, cause: io::Error) -> GcError {
    GcError::Io { doing: "remove", path: path.to_owned(), cause }
}
