//! Downloads into a folder of the user's, laid out as `hf download --local-dir` does (huggingface_hub
//! `_local_folder.py`): the files themselves, and what is known about them under `.cache/huggingface/download`.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::error::HubError;
use super::listing::{RepoFile, RepoListing};
use super::transfer::Place;
use crate::checkpoint::atomic_file::write_bytes_atomically;

pub(super) struct LocalDir<'a> {
    directory: &'a Path,
}

impl<'a> LocalDir<'a> {
    pub(super) fn new(directory: &'a Path) -> Self {
        Self { directory }
    }

    fn state(&self, file: &RepoFile, suffix: &str) -> PathBuf {
        self.directory.join(".cache/huggingface/download").join(format!("{}{suffix}", file.path))
    }

    pub(super) fn place(&self, file: &RepoFile) -> Place {
        Place {
            target: self.directory.join(&file.path),
            incomplete: self.state(file, &format!(".{}.incomplete", file.id.hex())),
            lock: self.state(file, ".lock"),
        }
    }

    /// Whether the file is there with the right bytes. They are hashed unless it was left alone since its download.
    pub(super) fn has(&self, file: &RepoFile) -> Result<bool, HubError> {
        let path = self.directory.join(&file.path);
        let Ok(metadata) = fs::metadata(&path) else { return Ok(false) };
        if !metadata.is_file() || metadata.len() != file.size {
            return Ok(false);
        }
        if self.recorded(file, metadata.modified().ok()) {
            return Ok(true);
        }
        let failed = |cause| HubError::Io { doing: "read", path: path.clone(), cause };
        file.id.is_of(File::open(&path).map_err(failed)?).map_err(failed)
    }

    /// Whether the record says so, and the file has not been written since.
    fn recorded(&self, file: &RepoFile, modified: Option<SystemTime>) -> bool {
        let Ok(text) = fs::read_to_string(self.state(file, ".metadata")) else { return false };
        let mut lines = text.lines().skip(1);
        let same = lines.next() == Some(file.id.hex());
        let at: Option<f64> = lines.next().and_then(|line| line.parse().ok());
        let modified = modified.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        // A second of grace, as file systems round their times.
        same && at.zip(modified).is_some_and(|(at, modified)| modified.as_secs_f64() - 1.0 <= at)
    }

    /// Records what the file is.
    pub(super) fn record(&self, listing: &RepoListing, file: &RepoFile) -> Result<(), HubError> {
        let path = self.state(file, ".metadata");
        let folder = path.parent().unwrap_or(self.directory);
        fs::create_dir_all(folder).map_err(HubError::io("create", folder))?;
        let ignore = self.directory.join(".cache/huggingface/.gitignore");
        if !ignore.exists() {
            fs::write(&ignore, "*").map_err(HubError::io("write", &ignore))?;
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let text = format!("{}\n{}\n{now}\n", listing.commit, file.id.hex());
        write_bytes_atomically(&path, text.as_bytes())?;
        Ok(())
    }
}
