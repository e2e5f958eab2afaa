//! The Hugging Face cache on this machine: finds a repository's snapshot, never touches the network.
//!
//! Layout (huggingface_hub): `models--{org}--{name}/` with `refs/{revision}` holding a commit hash and
//! `snapshots/{commit}/{file}` linking to `blobs/{etag}`, which may itself link into a store that
//! repositories share.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::environment::Environment;
use super::error::{CheckpointError, shown_name, shown_path};
use super::shards::{INDEX_NAME, ShardIndex, is_plain_name, is_weight_file};

const DEFAULT_REVISION: &str = "main";
const REPO_PREFIX: &str = "models--";
const LONGEST_REPO_ID: usize = 96;
/// Names in one message before it only counts.
const NAMED: usize = 5;

/// Why a repository cannot be used from the cache.
#[derive(Debug, thiserror::Error)]
pub enum HubCacheError {
    /// The repository was never downloaded.
    #[error(
        "{repo_id} is not in the Hugging Face cache {}; get it with `mlx-bun get {repo_id}`, or name a folder",
        shown_path(cache)
    )]
    NotCached {
        /// The repository.
        repo_id: String,
        /// The cache that was searched.
        cache: PathBuf,
    },
    /// The repository is there but not this revision.
    #[error("{repo_id} is cached but not its revision `{}`; {}", shown_name(revision), known(revisions))]
    NoSuchRevision {
        /// The repository.
        repo_id: String,
        /// The revision.
        revision: String,
        /// Branches, tags and commits that are cached.
        revisions: Vec<String>,
    },
    /// Files are missing, most likely from a download that was interrupted.
    #[error(
        "the cached copy {} of {repo_id} is incomplete, download it again; missing: {}",
        shown_path(snapshot),
        listed(missing)
    )]
    Incomplete {
        /// The repository.
        repo_id: String,
        /// Its snapshot directory.
        snapshot: PathBuf,
        /// What is missing, file by file.
        missing: Vec<String>,
    },
    /// A part of the cache cannot be read.
    #[error("cannot read {}: {cause}", shown_path(path))]
    Read {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// A file of the snapshot is broken.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

fn known(revisions: &[String]) -> String {
    if revisions.is_empty() {
        "no revision is".to_owned()
    } else {
        format!("there are {}", listed(revisions))
    }
}

fn listed(names: &[String]) -> String {
    let named: Vec<_> = names.iter().take(NAMED).map(|name| shown_name(name)).collect();
    match names.len().saturating_sub(NAMED) {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}

/// A snapshot of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubSnapshot {
    /// Its directory.
    pub path: PathBuf,
    /// `org/name`.
    pub repo_id: String,
    /// The commit hash.
    pub commit: String,
}

/// The cache's root directory.
#[derive(Clone, Debug)]
pub struct HubCache {
    root: PathBuf,
}

impl HubCache {
    /// The cache that huggingface_hub would use: `HF_HUB_CACHE`, else `HUGGINGFACE_HUB_CACHE`, else `hub`
    /// in `HF_HOME`, which is `huggingface` in the user's caches when unset.
    pub fn from_environment(environment: &Environment) -> Self {
        let root = environment
            .path("HF_HUB_CACHE")
            .or_else(|| environment.path("HUGGINGFACE_HUB_CACHE"))
            .unwrap_or_else(|| Self::home(environment).join("hub"));
        Self { root }
    }

    /// Hugging Face's folder, where its token lies.
    pub fn home(environment: &Environment) -> PathBuf {
        environment.path("HF_HOME").unwrap_or_else(|| environment.cache_home().join("huggingface"))
    }

    /// The cache in this directory.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Its root directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Where a repository's files are or would be.
    pub fn repo(&self, repo_id: &str) -> PathBuf {
        self.root.join(repo_folder(repo_id))
    }

    /// Finds a snapshot by branch, tag or full commit hash; `main` when no revision is given. Whether it is
    /// complete is [`missing_files`]'s question.
    ///
    /// # Errors
    /// When the repository or the revision is not cached.
    pub fn find(&self, repo_id: &str, revision: Option<&str>) -> Result<HubSnapshot, HubCacheError> {
        let repo = self.repo(repo_id);
        if !is_repo_id(repo_id) || !repo.is_dir() {
            return Err(HubCacheError::NotCached { repo_id: repo_id.to_owned(), cache: self.root.clone() });
        }
        let revision = revision.unwrap_or(DEFAULT_REVISION);
        let snapshots = repo.join("snapshots");
        let found = [is_plain_name(revision).then(|| revision.to_owned()), commit_of(&repo, revision)?]
            .into_iter()
            .flatten()
            .find(|commit| snapshots.join(commit).is_dir());
        match found {
            Some(commit) => {
                Ok(HubSnapshot { path: snapshots.join(&commit), repo_id: repo_id.to_owned(), commit })
            }
            None => Err(HubCacheError::NoSuchRevision {
                repo_id: repo_id.to_owned(),
                revision: revision.to_owned(),
                revisions: revisions(&repo),
            }),
        }
    }
}

/// The name of a repository's folder in the cache (huggingface_hub `repo_folder_name`).
pub fn repo_folder(repo_id: &str) -> String {
    format!("{REPO_PREFIX}{}", repo_id.replace('/', "--"))
}

/// The repository of a folder in the cache; `None` for anything but a model's.
pub fn repo_of_folder(folder: &str) -> Option<String> {
    folder.strip_prefix(REPO_PREFIX).map(|name| name.replace("--", "/"))
}

/// Whether `text` has the form `org/name` of a hub repository (huggingface_hub `validate_repo_id`).
pub fn is_repo_id(text: &str) -> bool {
    let part = |part: &str| {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        !part.is_empty()
            && part.chars().all(allowed)
            && !part.starts_with(['-', '.'])
            && !part.ends_with(['-', '.'])
    };
    let Some((organisation, name)) = text.split_once('/') else { return false };
    let plain = !text.contains("--") && !text.contains("..") && text.len() <= LONGEST_REPO_ID;
    plain && part(organisation) && part(name)
}

/// Repository and commit of a directory inside some cache, from its path alone.
pub fn origin_of(snapshot: &Path) -> Option<(String, String)> {
    let snapshot = std::path::absolute(snapshot).ok()?;
    let commit = snapshot.file_name()?.to_str()?;
    let snapshots = snapshot.parent()?;
    let repo = repo_of_folder(snapshots.parent()?.file_name()?.to_str()?)?;
    (snapshots.file_name()? == "snapshots").then(|| (repo, commit.to_owned()))
}

/// The commit that a ref file names.
fn commit_of(repo: &Path, revision: &str) -> Result<Option<String>, HubCacheError> {
    // A pull request's revision has slashes: refs/pr/1.
    if !revision.split('/').all(is_plain_name) {
        return Ok(None);
    }
    let path = repo.join("refs").join(revision);
    match fs::read_to_string(&path) {
        Ok(commit) => Ok(Some(commit.trim().to_owned()).filter(|commit| is_plain_name(commit))),
        Err(error) if error.kind() == io::ErrorKind::NotFound || path.is_dir() => Ok(None),
        Err(cause) => Err(HubCacheError::Read { path, cause }),
    }
}

/// What of a repository is cached, for messages.
fn revisions(repo: &Path) -> Vec<String> {
    let mut names: Vec<_> = ["refs", "snapshots"]
        .iter()
        .filter_map(|folder| fs::read_dir(repo.join(folder)).ok())
        .flat_map(|entries| entries.filter_map(Result::ok))
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.dedup();
    names
}

/// What a snapshot directory lacks to be loaded: links to nothing, shards that the index names, a config,
/// weights. Files that are not read (README, `.gitattributes`) do not count.
///
/// # Errors
/// When the directory or its index cannot be read.
pub fn missing_files(snapshot: &Path) -> Result<Vec<String>, HubCacheError> {
    let unreadable = |cause| HubCacheError::Read { path: snapshot.to_owned(), cause };
    let mut missing = Vec::new();
    let mut has_weights = false;
    for entry in fs::read_dir(snapshot).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        let is_weights = is_weight_file(&name);
        has_weights |= is_weights;
        if (is_weights || is_read(&name)) && !entry.path().exists() {
            missing.push(name);
        }
    }
    let mut require = |name: &str| {
        if !missing.iter().any(|known| known == name) && !snapshot.join(name).exists() {
            missing.push(name.to_owned());
        }
    };
    require("config.json");
    if snapshot.join(INDEX_NAME).exists() && !snapshot.join("model.safetensors").exists() {
        let index = ShardIndex::read(snapshot)?;
        index.iter().flat_map(|index| index.shards.keys()).for_each(|shard| require(shard));
    } else if !has_weights {
        missing.push("model*.safetensors".to_owned());
    }
    missing.sort();
    Ok(missing)
}

/// Whether a file beside the weights is read when a model is loaded.
fn is_read(name: &str) -> bool {
    let extension = Path::new(name).extension().and_then(|extension| extension.to_str());
    matches!(extension, Some("json" | "jinja" | "tiktoken")) || name == "tokenizer.model"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repo_ids_are_recognised() {
        for id in ["org/name", "HuggingFaceTB/SmolLM2-135M-Instruct", "a/b.c_d-e"] {
            assert!(is_repo_id(id), "{id}");
        }
        let long = format!("a/{}", "b".repeat(95));
        for id in
            ["name", "/name", "org/", "a/b/c", "a/..", "../a", "a/b--c", "a/.b", "a/b c", "a/b\\c", "", &long]
        {
            assert!(!is_repo_id(id), "{id}");
        }
    }

    #[test]
    fn the_cache_is_where_huggingface_hub_has_it() {
        let root = |pairs: &[(&str, &str)]| {
            let home = [("HOME", "/h")];
            let environment = Environment::from_pairs(home.into_iter().chain(pairs.iter().copied()));
            HubCache::from_environment(&environment).root().to_string_lossy().into_owned()
        };
        assert_eq!(root(&[]), "/h/.cache/huggingface/hub");
        assert_eq!(root(&[("XDG_CACHE_HOME", "/x")]), "/x/huggingface/hub");
        assert_eq!(root(&[("XDG_CACHE_HOME", "/x"), ("HF_HOME", "~/hf")]), "/h/hf/hub");
        assert_eq!(root(&[("HF_HOME", "/hf"), ("HUGGINGFACE_HUB_CACHE", "/old")]), "/old");
        assert_eq!(root(&[("HUGGINGFACE_HUB_CACHE", "/old"), ("HF_HUB_CACHE", "$HOME/new")]), "/h/new");
    }

    #[test]
    fn a_snapshot_path_tells_its_repository() {
        let path = Path::new("/c/hub/models--org--name/snapshots/abc");
        assert_eq!(origin_of(path), Some(("org/name".to_owned(), "abc".to_owned())));
        assert_eq!(origin_of(Path::new("/c/hub/models--org--name/blobs/abc")), None);
        assert_eq!(origin_of(Path::new("/models/mine")), None);
    }
}
