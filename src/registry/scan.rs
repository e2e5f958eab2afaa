//! Looks for models in the Hugging Face cache and in the user's folders. What has not changed since the last look
//! is not opened again.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde::Serialize;

use super::database::Stamped;
use super::error::RegistryError;
use super::facts;
use super::model::Model;
use crate::checkpoint::hub_cache::repo_of_folder;

/// Folders in folders are followed so deep: `models/org/name`.
const DEEPEST: usize = 3;

/// What a scan found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ScanReport {
    /// Models there are now.
    pub models: usize,
    /// Of these, new or changed ones.
    pub read: usize,
    /// Models that are gone.
    pub removed: usize,
    /// Directories that look like a model but cannot be used, and why.
    pub skipped: Vec<(PathBuf, String)>,
}

/// A model that was found, and what it looked like.
pub(super) struct Found {
    pub model: Model,
    pub stamp: String,
    /// Whether it was read now.
    pub fresh: bool,
}

/// Collects models; `known` are those of earlier scans.
pub(super) struct Scanner<'a> {
    pub known: &'a HashMap<PathBuf, Stamped>,
    pub found: Vec<Found>,
    pub skipped: Vec<(PathBuf, String)>,
}

impl Scanner<'_> {
    /// The Hugging Face cache. Files that lead out of it count as missing.
    pub(super) fn hub_cache(&mut self, root: &Path) -> Result<(), RegistryError> {
        let Ok(inside) = root.canonicalize() else { return Ok(()) };
        let usable = |path: &Path| path.canonicalize().is_ok_and(|path| path.starts_with(&inside));
        for folder in directories(root)? {
            let name = file_name(&folder);
            let Some(repo_id) = repo_of_folder(&name).filter(|_| usable(&folder)) else { continue };
            let snapshots = folder.join("snapshots");
            let main = fs::read_to_string(folder.join("refs/main")).unwrap_or_default();
            let mut revisions = Vec::new();
            for snapshot in directories(&snapshots).unwrap_or_default() {
                let from = self.found.len();
                self.directory(&snapshot, &repo_id, &usable);
                for found in &mut self.found[from..] {
                    found.model.revision = Some(file_name(&snapshot));
                }
                revisions.extend(from..self.found.len());
            }
            self.choose_canonical(&revisions, main.trim());
        }
        Ok(())
    }

    /// The revision that the repository's name stands for: that of `main`, else the newest one.
    fn choose_canonical(&mut self, revisions: &[usize], main: &str) {
        let rank = |&at: &usize| {
            let Some(Found { model, .. }) = self.found.get(at) else { return (false, 0, None) };
            let named = model.revision.as_deref() == Some(main);
            (named, model.scanned_at, Some(std::cmp::Reverse(model.path.clone())))
        };
        let best = revisions.iter().copied().max_by_key(rank);
        for &at in revisions {
            if let Some(found) = self.found.get_mut(at) {
                found.model.canonical = Some(at) == best;
            }
        }
    }

    /// A folder of the user's and those in it. Links to folders are not followed: they lead out, or to what is listed
    /// already.
    pub(super) fn user_folder(&mut self, folder: &Path) {
        let from = self.found.len();
        self.below(folder, folder, DEEPEST);
        for found in &mut self.found[from..] {
            found.model.canonical = true;
        }
    }

    fn below(&mut self, top: &Path, folder: &Path, depth: usize) {
        let name = |path: &Path| match path.strip_prefix(top) {
            Ok(below) if below.components().next().is_some() => below.to_string_lossy().into_owned(),
            _ => file_name(path),
        };
        if folder.join("config.json").is_file() {
            self.directory(folder, &name(folder), &|path: &Path| path.exists());
            return;
        }
        let Ok(entries) = fs::read_dir(folder) else { return };
        let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        paths.sort();
        for path in paths {
            if path.is_symlink() && path.is_dir() {
                continue;
            }
            if path.is_dir() && depth > 0 && !file_name(&path).starts_with('.') {
                self.below(top, &path, depth - 1);
            } else if path.is_file() && path.extension().is_some_and(|kind| kind.eq_ignore_ascii_case("gguf"))
            {
                let id = name(&path.with_extension(""));
                self.one(&path, stamp(std::slice::from_ref(&path)), |path| facts::of_gguf(path, &id));
            }
        }
    }

    fn directory(&mut self, directory: &Path, repo_id: &str, usable: &dyn Fn(&Path) -> bool) {
        let Ok(entries) = fs::read_dir(directory) else { return };
        let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        paths.sort();
        self.one(directory, stamp(&paths), |path| facts::of_directory(path, repo_id, usable));
    }

    fn one(&mut self, path: &Path, stamp: String, read: impl FnOnce(&Path) -> Result<Model, String>) {
        if let Some(known) = self.known.get(path).filter(|known| known.stamp == stamp) {
            self.found.push(Found { model: known.model.clone(), stamp, fresh: false });
            return;
        }
        match read(path) {
            Ok(mut model) => {
                model.scanned_at = chrono::Utc::now().timestamp();
                self.found.push(Found { model, stamp, fresh: true });
            }
            Err(reason) => self.skipped.push((path.to_owned(), reason)),
        }
    }
}

/// What changes when files do: how many, how large, how new.
fn stamp(paths: &[PathBuf]) -> String {
    let (mut bytes, mut newest, mut missing) = (0u64, 0, 0);
    for path in paths {
        match fs::metadata(path) {
            Ok(metadata) => {
                bytes = bytes.wrapping_add(metadata.len());
                let modified = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
                newest = newest.max(modified.map_or(0, |modified| modified.as_nanos()));
            }
            Err(_) => missing += 1,
        }
    }
    format!("{} {bytes} {newest} {missing}", paths.len())
}

fn directories(folder: &Path) -> Result<Vec<PathBuf>, RegistryError> {
    let entries =
        fs::read_dir(folder).map_err(|cause| RegistryError::Read { path: folder.to_owned(), cause })?;
    let mut paths: Vec<PathBuf> =
        entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| path.is_dir()).collect();
    paths.sort();
    Ok(paths)
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}
