//! Putting downloaded files where huggingface_hub looks for them: blobs by their hash, snapshots as links to them,
//! and a ref that names the commit, written last.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::error::HubError;
use super::listing::{RepoFile, RepoListing};
use super::lock::blob_lock;
use super::transfer::Place;
use crate::checkpoint::atomic_file::write_bytes_atomically;
use crate::checkpoint::hub_cache::{HubCache, repo_folder};

const TAG: &str = "Signature: 8a477f597d28d172789f06886806bc55\n\
# This file is a cache directory tag.\n\
# For information about cache directory tags, see:\n\
#\thttps://bford.info/cachedir/\n";

/// A repository's folder in the cache.
pub(super) struct RepoStore<'a> {
    cache: &'a HubCache,
    folder: String,
    repo: PathBuf,
    snapshot: PathBuf,
}

impl<'a> RepoStore<'a> {
    pub(super) fn new(cache: &'a HubCache, listing: &RepoListing) -> Self {
        let repo = cache.repo(&listing.repo_id);
        let snapshot = repo.join("snapshots").join(&listing.commit);
        Self { cache, folder: repo_folder(&listing.repo_id), repo, snapshot }
    }

    /// The snapshot's directory.
    pub(super) fn snapshot(&self) -> &Path {
        &self.snapshot
    }

    /// Where a file's bytes go.
    pub(super) fn place(&self, file: &RepoFile) -> Place {
        let target = self.blob(file);
        let mut incomplete = target.clone().into_os_string();
        incomplete.push(".incomplete");
        let lock = blob_lock(self.cache.root(), &self.folder, file.id.hex());
        Place { target, incomplete: incomplete.into(), lock }
    }

    fn blob(&self, file: &RepoFile) -> PathBuf {
        self.repo.join("blobs").join(file.id.hex())
    }

    /// Whether the blob is there with its right size, in the repository or in the cache's shared store.
    pub(super) fn has(&self, file: &RepoFile) -> bool {
        let blob = self.blob(file);
        let right_size =
            fs::metadata(&blob).is_ok_and(|metadata| metadata.is_file() && metadata.len() == file.size);
        right_size && self.is_inside(&blob)
    }

    /// Whether a path stays in the cache when all links are followed.
    fn is_inside(&self, path: &Path) -> bool {
        match (path.canonicalize(), self.cache.root().canonicalize()) {
            (Ok(path), Ok(root)) => path.starts_with(root),
            _ => false,
        }
    }

    /// Links the snapshot's file to its blob; copies it where links are not supported.
    pub(super) fn link(&self, file: &RepoFile) -> Result<(), HubError> {
        let pointer = self.snapshot.join(&file.path);
        let depth = file.path.split('/').count() + 1;
        let target: PathBuf = (0..depth).map(|_| "..").chain(["blobs", file.id.hex()]).collect();
        if fs::read_link(&pointer).is_ok_and(|existing| existing == target) {
            return Ok(());
        }
        let folder = pointer.parent().unwrap_or(&self.snapshot);
        let failed = |cause| HubError::Io { doing: "link", path: pointer.clone(), cause };
        fs::create_dir_all(folder).map_err(failed)?;
        let beside = folder.join(format!(".{}.{}.tmp", file.id.hex(), std::process::id()));
        match fs::remove_file(&beside) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        if symlink(&target, &beside).is_err() {
            fs::copy(self.blob(file), &beside).map_err(failed)?;
        }
        fs::rename(&beside, &pointer).map_err(failed)
    }

    /// Names the commit, so that the snapshot counts from now on.
    pub(super) fn publish(&self, listing: &RepoListing, revision: &str) -> Result<(), HubError> {
        self.tag_cache();
        if revision == listing.commit {
            return Ok(());
        }
        let path = self.repo.join("refs").join(revision);
        let folder = path.parent().unwrap_or(&self.repo);
        fs::create_dir_all(folder).map_err(HubError::io("create", folder))?;
        write_bytes_atomically(&path, listing.commit.as_bytes())?;
        Ok(())
    }

    /// Tells backup programs that all this can be had again. A courtesy: failing is no matter.
    fn tag_cache(&self) {
        let tag = self.cache.root().join("CACHEDIR.TAG");
        if !tag.exists() {
            let _ = fs::write(tag, TAG);
        }
    }
}

#[cfg(unix)]
fn symlink(target: &Path, link: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

#[cfg(not(unix))]
fn symlink(_target: &Path, _link: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}
