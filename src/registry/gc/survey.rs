//! What lies in a cache: repositories, their snapshots, refs and blobs, the shared store, and every link anywhere.
//! Only names and sizes are read; no link is followed out of the directory that is looked through.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirEntry, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::GcError;
use crate::checkpoint::hub_cache::repo_of_folder;

const STORE: &str = "blobs";
const STORE_MARKER: &str = ".huggingface-shared-blobs";
const STORE_VERSION: &str = "1\n";
/// Left by a file browser, worth nothing.
const NOT_A_FILE: &str = ".DS_Store";

pub(super) struct Survey {
    /// The cache's directory without links in its path.
    pub root: PathBuf,
    pub repos: Vec<Repo>,
    /// Every link: where it is, and what it names, itself not followed.
    pub links: BTreeMap<PathBuf, PathBuf>,
    /// Payloads of the shared store.
    pub store: Vec<Blob>,
}

pub(super) struct Repo {
    pub folder: String,
    /// `None` for data sets and the like, whose links count but which are not cleaned.
    pub repo_id: Option<String>,
    pub snapshots: Vec<SnapshotDir>,
    /// Commits that refs name.
    refs: BTreeSet<String>,
    pub blobs: Vec<Blob>,
}

pub(super) struct SnapshotDir {
    pub commit: String,
    pub path: PathBuf,
    /// Paths of its files.
    pub files: BTreeSet<String>,
    /// Bytes of those that are no links.
    pub bytes: u64,
}

pub(super) struct Blob {
    pub path: PathBuf,
    pub bytes: u64,
    pub unfinished: bool,
    pub modified: Option<SystemTime>,
}

impl Repo {
    /// Commits that a ref names and that are there.
    pub(super) fn kept(&self) -> BTreeSet<&str> {
        let there = self.snapshots.iter().map(|snapshot| snapshot.commit.as_str());
        there.filter(|commit| self.refs.contains(*commit)).collect()
    }
}

impl Survey {
    /// Looks through a cache; `None` when there is none.
    pub(super) fn of(root: &Path) -> Result<Option<Self>, GcError> {
        let root = match root.canonicalize() {
            Ok(root) => root,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(cause) => return Err(unreadable(root, cause)),
        };
        let mut survey = Self { repos: Vec::new(), links: BTreeMap::new(), store: Vec::new(), root };
        for entry in list(&survey.root)? {
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            let kind = lstat(&path)?;
            if kind.is_symlink() {
                survey.note_link(&path);
            } else if kind.is_dir() && name == STORE && is_store(&path) {
                survey.read_store(&path)?;
            } else if kind.is_dir() && name != ".locks" {
                survey.collect_links(&path)?;
                if name.contains("--") {
                    let repo = read_repo(name, &path)?;
                    survey.repos.push(repo);
                }
            }
        }
        survey.repos.sort_by(|a, b| a.folder.cmp(&b.folder));
        Ok(Some(survey))
    }

    fn note_link(&mut self, path: &Path) {
        if let Some(target) = target_of(path) {
            self.links.insert(path.to_owned(), target);
        }
    }

    fn collect_links(&mut self, directory: &Path) -> Result<(), GcError> {
        let mut folders = vec![directory.to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in list(&folder)? {
                let path = entry.path();
                let kind = lstat(&path)?;
                if kind.is_symlink() {
                    self.note_link(&path);
                } else if kind.is_dir() {
                    folders.push(path);
                }
            }
        }
        Ok(())
    }

    fn read_store(&mut self, store: &Path) -> Result<(), GcError> {
        for prefix in list(store)? {
            if !lstat(&prefix.path())?.is_dir() {
                continue;
            }
            for entry in list(&prefix.path())? {
                let path = entry.path();
                let kind = lstat(&path)?;
                if kind.is_symlink() {
                    self.note_link(&path);
                } else if kind.is_file() && is_store_payload(&path) {
                    self.store.push(Blob { path, bytes: kind.len(), unfinished: false, modified: None });
                }
            }
        }
        Ok(())
    }
}

fn read_repo(folder: String, path: &Path) -> Result<Repo, GcError> {
    let mut snapshots = Vec::new();
    for entry in list_if_directory(&path.join("snapshots"))? {
        let path = entry.path();
        if lstat(&path)?.is_dir() {
            let commit = entry.file_name().to_string_lossy().into_owned();
            snapshots.push(read_snapshot(commit, path)?);
        }
    }
    snapshots.sort_by(|a, b| a.commit.cmp(&b.commit));
    let mut blobs = Vec::new();
    for entry in list_if_directory(&path.join("blobs"))? {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        let kind = lstat(&path)?;
        if kind.is_dir() || name.ends_with(".lock") {
            continue;
        }
        let bytes = if kind.is_symlink() { 0 } else { kind.len() };
        let unfinished = name.ends_with(".incomplete");
        blobs.push(Blob { path, bytes, unfinished, modified: kind.modified().ok() });
    }
    blobs.sort_by(|a, b| a.path.cmp(&b.path));
    let repo_id = repo_of_folder(&folder);
    Ok(Repo { folder, repo_id, snapshots, refs: read_refs(&path.join("refs"))?, blobs })
}

fn read_snapshot(commit: String, path: PathBuf) -> Result<SnapshotDir, GcError> {
    let (mut files, mut bytes) = (BTreeSet::new(), 0);
    let mut folders = vec![path.clone()];
    while let Some(folder) = folders.pop() {
        for entry in list(&folder)? {
            let file = entry.path();
            let kind = lstat(&file)?;
            if kind.is_dir() {
                folders.push(file);
                continue;
            }
            if !kind.is_symlink() {
                bytes += kind.len();
            }
            // A dangling link is no file that anybody could use instead of another revision's.
            if entry.file_name() != NOT_A_FILE && file.exists() {
                let name = file.strip_prefix(&path).unwrap_or(&file);
                files.insert(name.to_string_lossy().into_owned());
            }
        }
    }
    Ok(SnapshotDir { commit, path, files, bytes })
}

/// Commits that the files below `refs` name; one that cannot be read stops everything, as it may name any.
fn read_refs(directory: &Path) -> Result<BTreeSet<String>, GcError> {
    let mut refs = BTreeSet::new();
    let mut folders = vec![directory.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in list_if_directory(&folder)? {
            let path = entry.path();
            match fs::metadata(&path) {
                Ok(metadata) if metadata.is_dir() && !lstat(&path)?.is_symlink() => folders.push(path),
                Ok(metadata) if metadata.is_file() => {
                    let text = fs::read(&path).map_err(|cause| unreadable(&path, cause))?;
                    refs.insert(String::from_utf8_lossy(&text).trim().to_owned());
                }
                _ => {}
            }
        }
    }
    Ok(refs)
}

/// What a link names: the directory it is in with links followed, the last name as it is. `None` when that
/// directory is not there.
fn target_of(link: &Path) -> Option<PathBuf> {
    let target = link.parent()?.join(fs::read_link(link).ok()?);
    match target.file_name() {
        Some(name) => Some(target.parent()?.canonicalize().ok()?.join(name)),
        // It ends with `..`.
        None => target.canonicalize().ok(),
    }
}

fn is_store(directory: &Path) -> bool {
    let marker = directory.join(STORE_MARKER);
    fs::symlink_metadata(&marker).is_ok_and(|metadata| metadata.is_file())
        && fs::read_to_string(&marker).is_ok_and(|text| text == STORE_VERSION)
}

/// Whether this is the path of a payload: `blobs/{2 digits}/{64 digits}` (huggingface_hub `_shared_blobs.py`).
pub(super) fn is_store_payload(path: &Path) -> bool {
    let name = |path: &Path| path.file_name().and_then(|name| name.to_str()).map(str::to_owned);
    let (Some(hash), Some(prefix)) = (name(path), path.parent().and_then(name)) else { return false };
    let digits = hash.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    hash.len() == 64 && digits && hash.get(..2) == Some(&prefix)
}

/// The manifest beside a payload.
pub(super) fn manifest_of(payload: &Path) -> PathBuf {
    beside(payload, ".refs")
}

/// A file beside a payload.
pub(super) fn beside(payload: &Path, suffix: &str) -> PathBuf {
    let mut name = payload.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// The blobs that a payload's manifest lists and that do link to it; `None` when there is no readable manifest.
pub(super) fn manifest_references(root: &Path, payload: &Path) -> Option<Vec<PathBuf>> {
    let manifest = manifest_of(payload);
    if !fs::symlink_metadata(&manifest).is_ok_and(|metadata| metadata.is_file()) {
        return None;
    }
    let text = fs::read_to_string(&manifest).ok()?;
    let links = text.lines().map(|line| root.join(line));
    Some(links.filter(|link| target_of(link).as_deref() == Some(payload)).collect())
}

fn list(directory: &Path) -> Result<Vec<DirEntry>, GcError> {
    let entries = fs::read_dir(directory).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    entries.map_err(|cause| unreadable(directory, cause))
}

/// The entries of a real directory; none of a link or of nothing.
fn list_if_directory(directory: &Path) -> Result<Vec<DirEntry>, GcError> {
    match fs::symlink_metadata(directory) {
        Ok(metadata) if metadata.is_dir() => list(directory),
        _ => Ok(Vec::new()),
    }
}

fn lstat(path: &Path) -> Result<Metadata, GcError> {
    fs::symlink_metadata(path).map_err(|cause| unreadable(path, cause))
}

fn unreadable(path: &Path, cause: io::Error) -> GcError {
    GcError::Io { doing: "read", path: path.to_owned(), cause }
}
