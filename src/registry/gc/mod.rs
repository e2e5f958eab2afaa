//! Reclaims disk space in the Hugging Face cache: snapshots that no ref names any more, and the blobs that only
//! they need.
//!
//! [`plan`] looks and [`execute`] deletes. Nothing is deleted that a kept snapshot, another repository, or any
//! link from anywhere in the cache leads to, and no link is followed to a deletion. A collection that is cut
//! short leaves at most blobs without a snapshot, which the next one finds.

mod execute;
mod survey;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::Serialize;

pub use self::execute::{GcResult, execute};
use self::survey::{Repo, Survey, is_store_payload, manifest_references};
use crate::checkpoint::error::shown_path;
use crate::checkpoint::hub_cache::{HubCache, repo_folder};

/// Why the cache cannot be looked through or cleaned.
#[derive(Debug, thiserror::Error)]
pub enum GcError {
    /// A part of it cannot be read or removed.
    #[error("cannot {doing} {}: {cause}", shown_path(path))]
    Io {
        /// Reading or removing.
        doing: &'static str,
        /// What.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// A repository that is not in the cache.
    #[error("{repo_id} is not in the cache {}", shown_path(cache))]
    NoSuchRepo {
        /// The repository.
        repo_id: String,
        /// The cache.
        cache: PathBuf,
    },
}

/// What to collect.
#[derive(Clone, Debug)]
pub struct GcOptions {
    /// Also snapshots with files that no kept snapshot has.
    pub force: bool,
    /// Only these repositories; all when there are none.
    pub repos: Vec<String>,
    /// Unfinished downloads count as abandoned after this time.
    pub abandoned_after: Duration,
}

impl Default for GcOptions {
    fn default() -> Self {
        Self { force: false, repos: Vec::new(), abandoned_after: Duration::from_secs(7 * 24 * 3600) }
    }
}

/// What would be deleted, and what would not.
#[derive(Clone, Debug, Default, Serialize)]
pub struct GcPlan {
    /// Old snapshots.
    pub snapshots: Vec<Snapshot>,
    /// Blobs that only they need, or that nothing needs; in the repositories or in the store they share.
    pub blobs: Vec<Item>,
    /// Downloads that nobody has gone on with for long.
    pub partials: Vec<Item>,
    /// Old snapshots that stay all the same.
    pub skipped: Vec<Skipped>,
}

/// A snapshot's directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Snapshot {
    /// `org/name`.
    pub repo_id: String,
    /// The commit.
    pub commit: String,
    /// The directory.
    pub path: PathBuf,
    /// Bytes of files that lie in it and are no links.
    pub bytes: u64,
}

/// A file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Item {
    /// Where it is.
    pub path: PathBuf,
    /// Bytes it takes; a link takes none.
    pub bytes: u64,
}

/// A snapshot that stays.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Skipped {
    /// `org/name`.
    pub repo_id: String,
    /// The commit.
    pub commit: String,
    /// Files that no kept snapshot has; empty when a link from elsewhere keeps it.
    pub only_here: Vec<String>,
}

impl GcPlan {
    /// Bytes that would be free.
    pub fn reclaimable(&self) -> u64 {
        let items = self.blobs.iter().chain(&self.partials).map(|item| item.bytes);
        items.chain(self.snapshots.iter().map(|snapshot| snapshot.bytes)).fold(0, u64::saturating_add)
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.snapshots.is_empty() && self.blobs.is_empty() && self.partials.is_empty()
    }
}

/// Finds what can go.
///
/// # Errors
/// The cache cannot be read, or a repository that was named is not in it. A cache that does not exist is empty.
pub fn plan(cache: &HubCache, options: &GcOptions) -> Result<GcPlan, GcError> {
    let Some(survey) = Survey::of(cache.root())? else {
        return match options.repos.first() {
            Some(repo_id) => Err(no_such_repo(repo_id, cache)),
            None => Ok(GcPlan::default()),
        };
    };
    let chosen: BTreeSet<String> = options.repos.iter().map(|repo_id| repo_folder(repo_id)).collect();
    for (repo_id, folder) in
        options.repos.iter().zip(options.repos.iter().map(|repo_id| repo_folder(repo_id)))
    {
        if !survey.repos.iter().any(|repo| repo.folder == folder) {
            return Err(no_such_repo(repo_id, cache));
        }
    }
    let repos: Vec<&Repo> = survey
        .repos
        .iter()
        .filter(|repo| repo.repo_id.is_some() && (chosen.is_empty() || chosen.contains(&repo.folder)))
        .collect();

    let (mut candidates, mut skipped) = (BTreeMap::new(), Vec::new());
    for repo in &repos {
        sort_snapshots(repo, options.force, &mut candidates, &mut skipped);
    }
    let cleaned: Vec<&Repo> = repos.iter().filter(|repo| !repo.kept().is_empty()).copied().collect();
    let live = live_paths(&survey, &cleaned, &mut candidates, &mut skipped);

    let mut blobs = Vec::new();
    for repo in &cleaned {
        blobs.extend(
            repo.blobs
                .iter()
                .filter(|blob| !blob.unfinished && !live.has(&blob.path))
                .map(|blob| Item { path: blob.path.clone(), bytes: blob.bytes }),
        );
    }
    blobs.extend(shared(&survey, &live, &blobs));
    let limit = SystemTime::now().checked_sub(options.abandoned_after);
    let partials = repos.iter().flat_map(|repo| &repo.blobs).filter(|blob| {
        blob.unfinished && blob.modified.zip(limit).is_some_and(|(modified, limit)| modified <= limit)
    });
    let partials = partials.map(|blob| Item { path: blob.path.clone(), bytes: blob.bytes }).collect();
    skipped.sort();
    Ok(GcPlan { snapshots: candidates.into_values().collect(), blobs, partials, skipped })
}

fn no_such_repo(repo_id: &str, cache: &HubCache) -> GcError {
    GcError::NoSuchRepo { repo_id: repo_id.to_owned(), cache: cache.root().to_owned() }
}

type Candidates = BTreeMap<PathBuf, Snapshot>;

/// Which snapshots of a repository may go, and which hold something of their own. A repository without a ref to a
/// snapshot is left alone: there is no telling what is old.
fn sort_snapshots(repo: &Repo, force: bool, candidates: &mut Candidates, skipped: &mut Vec<Skipped>) {
    let (Some(repo_id), kept) = (&repo.repo_id, repo.kept()) else { return };
    if kept.is_empty() {
        return;
    }
    let kept_files: BTreeSet<&str> = repo
        .snapshots
        .iter()
        .filter(|snapshot| kept.contains(snapshot.commit.as_str()))
        .flat_map(|snapshot| snapshot.files.iter().map(String::as_str))
        .collect();
    for snapshot in repo.snapshots.iter().filter(|snapshot| !kept.contains(snapshot.commit.as_str())) {
        let commit = snapshot.commit.clone();
        let only_here: Vec<String> =
            snapshot.files.iter().filter(|file| !kept_files.contains(file.as_str())).cloned().collect();
        if !only_here.is_empty() && !force {
            skipped.push(Skipped { repo_id: repo_id.clone(), commit, only_here });
            continue;
        }
        let (path, bytes) = (snapshot.path.clone(), snapshot.bytes);
        candidates.insert(path.clone(), Snapshot { repo_id: repo_id.clone(), commit, path, bytes });
    }
}

/// What some link that stays leads to.
struct Live {
    paths: BTreeSet<PathBuf>,
}

impl Live {
    /// Whether the path, or a directory that it is in, is needed.
    fn has(&self, path: &Path) -> bool {
        path.ancestors().any(|part| self.paths.contains(part))
    }
}

/// Follows all links but those inside snapshots that may go, link by link. A snapshot that one of them reaches
/// stays, and then its links count as well.
fn live_paths(
    survey: &Survey,
    cleaned: &[&Repo],
    candidates: &mut Candidates,
    skipped: &mut Vec<Skipped>,
) -> Live {
    let holder =
        |link: &Path, candidates: &Candidates| link.ancestors().any(|part| candidates.contains_key(part));
    let mut live = Live { paths: BTreeSet::new() };
    // Blobs do not keep themselves alive: their own links count when something leads to them.
    let blobs: BTreeSet<&Path> =
        cleaned.iter().flat_map(|repo| &repo.blobs).map(|blob| blob.path.as_path()).collect();
    let roots =
        survey.links.iter().filter(|(link, _)| !blobs.contains(link.as_path()) && !holder(link, candidates));
    let mut queue: Vec<&PathBuf> = roots.map(|(_, target)| target).collect();
    while let Some(target) = queue.pop() {
        if !live.paths.insert(target.clone()) {
            continue;
        }
        queue.extend(survey.links.get(target));
        let reached: Vec<PathBuf> = candidates
            .keys()
            .filter(|snapshot| target.starts_with(snapshot) || snapshot.starts_with(target))
            .cloned()
            .collect();
        for path in reached {
            if let Some(Snapshot { repo_id, commit, .. }) = candidates.remove(&path) {
                skipped.push(Skipped { repo_id, commit, only_here: Vec::new() });
            }
            queue.extend(survey.links.iter().filter(|(link, _)| link.starts_with(&path)).map(|(_, to)| to));
        }
        // A link to a directory needs what the links in it need.
        let below = survey.links.iter().filter(|(link, _)| link.starts_with(target) && *link != target);
        queue.extend(below.map(|(_, to)| to));
    }
    live
}

/// Payloads of the shared store that nothing needs once `dead` is gone: as huggingface_hub does, only with a
/// readable manifest, all of whose links go.
fn shared(survey: &Survey, live: &Live, dead: &[Item]) -> Vec<Item> {
    let dead: BTreeSet<&Path> = dead.iter().map(|item| item.path.as_path()).collect();
    survey
        .store
        .iter()
        .filter(|payload| is_store_payload(&payload.path) && !live.has(&payload.path))
        .filter(|payload| {
            let mut links = survey.links.iter().filter(|(_, target)| **target == payload.path);
            links.all(|(link, _)| dead.contains(link.as_path()))
        })
        .filter(|payload| {
            manifest_references(&survey.root, &payload.path)
                .is_some_and(|references| references.iter().all(|link| dead.contains(link.as_path())))
        })
        .map(|payload| Item { path: payload.path.clone(), bytes: payload.bytes })
        .collect()
}
