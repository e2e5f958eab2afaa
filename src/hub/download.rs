//! Downloading a repository's files, several at once, each whole or not at all.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use super::error::HubError;
use super::http::HubClient;
use super::listing::{RepoFile, RepoListing, is_commit, is_safe_path};
use super::local_dir::LocalDir;
use super::lock::{FileLock, Locked, Sharing, repo_lock, try_lock};
use super::patterns::{MODEL_FILES, is_wanted, matches};
use super::progress::TransferProgress;
use super::store::RepoStore;
use super::transfer::Place;
use crate::checkpoint::hub_cache::{HubCacheError, missing_files, repo_folder};

/// What to download.
#[derive(Clone, Debug, Default)]
pub struct DownloadRequest {
    /// `org/name`.
    pub repo_id: String,
    /// Branch, tag or commit; `main` when not given.
    pub revision: Option<String>,
    /// Patterns of wanted files; when there are none, those that a model needs.
    pub include: Vec<String>,
    /// Patterns of unwanted files.
    pub exclude: Vec<String>,
    /// A folder to download into instead of the cache.
    pub local_dir: Option<PathBuf>,
    /// Files at once; at least one.
    pub workers: usize,
}

/// What a download left behind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Downloaded {
    /// The snapshot's directory, or the folder asked for.
    pub path: PathBuf,
    /// The commit.
    pub commit: String,
    /// Files that are there now.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes that came over the network.
    pub transferred: u64,
}

enum Destination<'a> {
    Cache(RepoStore<'a>),
    Local(LocalDir<'a>),
}

impl Destination<'_> {
    fn has(&self, file: &RepoFile) -> Result<bool, HubError> {
        match self {
            Self::Cache(store) => Ok(store.has(file)),
            Self::Local(local) => local.has(file),
        }
    }

    fn place(&self, file: &RepoFile) -> Place {
        match self {
            Self::Cache(store) => store.place(file),
            Self::Local(local) => local.place(file),
        }
    }

    fn keep(&self, listing: &RepoListing, file: &RepoFile) -> Result<(), HubError> {
        match self {
            Self::Cache(store) => store.link(file),
            Self::Local(local) => local.record(listing, file),
        }
    }
}

impl HubClient {
    /// Downloads a repository's files. Whatever ends it, a later call goes on where it stopped.
    ///
    /// # Errors
    /// The hub, the network or the disk; the first one that happened.
    pub fn download(
        &self,
        request: &DownloadRequest,
        progress: &dyn TransferProgress,
    ) -> Result<Downloaded, HubError> {
        let revision = request.revision.as_deref().unwrap_or("main");
        // It becomes a path below `refs`.
        if !is_safe_path(revision) {
            return Err(HubError::Cache(HubCacheError::NoSuchRevision {
                repo_id: request.repo_id.clone(),
                revision: revision.to_owned(),
                revisions: Vec::new(),
            }));
        }
        if self.settings().offline && request.local_dir.is_none() {
            return self.already_there(request, revision);
        }
        let listing = self.list(&request.repo_id, revision, progress)?;
        if is_commit(revision) && revision != listing.commit {
            let problem = format!("asked for commit {revision}, it answers with {}", listing.commit);
            let action = format!("listing {}@{revision}", request.repo_id);
            return Err(HubError::Malformed { action, problem });
        }
        let wanted = wanted(&listing, request)?;
        let destination = match &request.local_dir {
            Some(directory) => Destination::Local(LocalDir::new(directory)),
            None => Destination::Cache(RepoStore::new(&self.settings().cache, &listing)),
        };
        let _lock = match &destination {
            Destination::Cache(_) => Some(self.lock_repo(&request.repo_id)?),
            Destination::Local(_) => None,
        };
        let bytes = wanted.iter().map(|file| file.size).fold(0, u64::saturating_add);
        progress.planned(wanted.len(), bytes);
        let counted = Counted { inner: progress, failed: AtomicBool::new(false), moved: AtomicU64::new(0) };
        self.fetch_all(&listing, &wanted, &destination, request.workers.max(1), &counted)?;
        let path = match &destination {
            Destination::Cache(store) => {
                store.publish(&listing, revision)?;
                store.snapshot().to_owned()
            }
            Destination::Local(_) => request.local_dir.clone().unwrap_or_default(),
        };
        let transferred = counted.moved.into_inner();
        Ok(Downloaded { path, commit: listing.commit.clone(), files: wanted.len(), bytes, transferred })
    }

    /// What the cache has, when the network may not be asked.
    fn already_there(&self, request: &DownloadRequest, revision: &str) -> Result<Downloaded, HubError> {
        let offline = || HubError::Offline { what: format!("{}@{revision}", request.repo_id) };
        let cache = &self.settings().cache;
        let snapshot = cache.find(&request.repo_id, Some(revision)).map_err(|_| offline())?;
        if !missing_files(&snapshot.path)?.is_empty() {
            return Err(offline());
        }
        let (files, bytes) = contents(&snapshot.path);
        Ok(Downloaded { path: snapshot.path, commit: snapshot.commit, files, bytes, transferred: 0 })
    }

    /// Keeps the collector of old snapshots away.
    fn lock_repo(&self, repo_id: &str) -> Result<FileLock, HubError> {
        let path = repo_lock(self.settings().cache.root(), &repo_folder(repo_id));
        match try_lock(&path, Sharing::Shared).map_err(HubError::io("lock", &path))? {
            Locked::Mine(lock) => Ok(lock),
            Locked::Theirs(holder) => Err(HubError::Busy { file: repo_id.to_owned(), holder }),
        }
    }

    fn fetch_all(
        &self,
        listing: &RepoListing,
        wanted: &[&RepoFile],
        destination: &Destination,
        workers: usize,
        progress: &Counted,
    ) -> Result<(), HubError> {
        // Files with the same bytes are one blob; each worker takes all files of one, so that none meets its own lock.
        let mut groups: BTreeMap<&str, Vec<&RepoFile>> = BTreeMap::new();
        for file in wanted {
            let key = match destination {
                Destination::Cache(_) => file.id.hex(),
                Destination::Local(_) => &file.path,
            };
            groups.entry(key).or_default().push(file);
        }
        // Small files first: what a model is becomes known early.
        let mut groups: Vec<_> = groups.into_values().collect();
        groups.sort_by_key(|files| files.first().map(|file| (file.size, file.path.as_str())));
        let next = AtomicUsize::new(0);
        let error = Mutex::new(None);
        let work = || {
            while let Some(files) = groups.get(next.fetch_add(1, Ordering::Relaxed)) {
                if progress.is_cancelled() {
                    return;
                }
                if let Err(cause) = self.fetch_group(listing, files, destination, progress) {
                    progress.failed.store(true, Ordering::SeqCst);
                    if let Ok(mut error) = error.lock() {
                        error.get_or_insert(cause);
                    }
                }
            }
        };
        thread::scope(|scope| {
            for _ in 1..workers.min(groups.len()) {
                // Where the system has no more threads, fewer do the work.
                let _ = thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
        match error.into_inner() {
            Ok(Some(error)) => Err(error),
            _ if progress.inner.is_cancelled() => Err(HubError::Cancelled),
            _ => Ok(()),
        }
    }

    fn fetch_group(
        &self,
        listing: &RepoListing,
        files: &[&RepoFile],
        destination: &Destination,
        progress: &Counted,
    ) -> Result<(), HubError> {
        for file in files {
            if destination.has(file)? {
                progress.advanced(file.size, false);
            } else {
                self.fetch(listing, file, &destination.place(file), progress)?;
            }
            destination.keep(listing, file)?;
            progress.finished(&file.path);
        }
        Ok(())
    }
}

/// Counts what came over the network, and ends every worker when one has failed.
struct Counted<'a> {
    inner: &'a dyn TransferProgress,
    failed: AtomicBool,
    moved: AtomicU64,
}

impl TransferProgress for Counted<'_> {
    fn advanced(&self, bytes: u64, moved: bool) {
        if moved {
            self.moved.fetch_add(bytes, Ordering::Relaxed);
        }
        self.inner.advanced(bytes, moved);
    }

    fn rewound(&self, bytes: u64) {
        self.inner.rewound(bytes);
    }

    fn finished(&self, file: &str) {
        self.inner.finished(file);
    }

    fn waiting(&self, time: Duration) {
        self.inner.waiting(time);
    }

    fn is_cancelled(&self) -> bool {
        self.failed.load(Ordering::SeqCst) || self.inner.is_cancelled()
    }
}

/// The files to download.
fn wanted<'a>(listing: &'a RepoListing, request: &DownloadRequest) -> Result<Vec<&'a RepoFile>, HubError> {
    let mut include = request.include.clone();
    let has = |pattern: &str| listing.files.iter().any(|file| matches(pattern, &file.path));
    if include.is_empty() && has("model*.safetensors") {
        include = MODEL_FILES.iter().map(|pattern| (*pattern).to_owned()).collect();
    } else if include.is_empty() {
        // An adapter or a GGUF file: all of it, unless that would be the same model several times.
        let is_gguf = |file: &&RepoFile| is_wanted(&file.path, &["*.gguf".to_owned()], &request.exclude);
        let ggufs: Vec<_> = listing.files.iter().filter(is_gguf).map(|file| file.path.clone()).collect();
        if ggufs.len() > 1 {
            return Err(HubError::ManyGguf { repo_id: listing.repo_id.clone(), files: ggufs });
        }
    }
    let mut seen = HashSet::new();
    let wanted: Vec<_> = listing
        .files
        .iter()
        .filter(|file| is_wanted(&file.path, &include, &request.exclude) && seen.insert(&file.path))
        .collect();
    match wanted.is_empty() {
        true => Err(HubError::NothingMatches(listing.repo_id.clone())),
        false => Ok(wanted),
    }
}

/// Files and bytes of a snapshot, links followed.
fn contents(directory: &Path) -> (usize, u64) {
    let (mut files, mut bytes) = (0, 0);
    for entry in std::fs::read_dir(directory).into_iter().flatten().filter_map(Result::ok) {
        match std::fs::metadata(entry.path()) {
            Ok(metadata) if metadata.is_dir() => {
                let (more_files, more_bytes) = contents(&entry.path());
                files += more_files;
                bytes += more_bytes;
            }
            Ok(metadata) => {
                files += 1;
                bytes += metadata.len();
            }
            Err(_) => {}
        }
    }
    (files, bytes)
}
