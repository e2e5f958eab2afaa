//! Where MLX puts the functions that it compiles on a Linux CPU.
//!
//! MLX has `g++` write shared libraries into `$TMPDIR/mlx/<version>/cpu` and loads what it finds there. In a temporary
//! folder that everybody shares, two processes load each other's half-written files, a broken file breaks every later
//! run, and other users can plant code. So each process has a folder of its own, of which it makes MLX's temporary
//! folder; it starts with what earlier runs kept, and keeps what it compiled once its work has succeeded.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

const LOCK: &str = "lock";
const RUN: &str = "run-";

/// A process's folder; goes away with this value.
#[derive(Debug)]
pub struct CompileFolder {
    own: PathBuf,
    /// Where MLX writes.
    libraries: PathBuf,
    /// What runs keep for each other; `None` where nothing can be kept.
    kept: Option<PathBuf>,
    /// Tells other processes that the folder is in use.
    _lock: File,
}

impl CompileFolder {
    /// Makes a folder below `cache`, or below `fallback` where `cache` cannot be written, and makes it the process's
    /// temporary folder.
    ///
    /// # Errors
    /// Neither can be written.
    ///
    /// # Safety
    /// No other thread may read or write the environment meanwhile.
    pub unsafe fn claim(cache: &Path, fallback: &Path) -> io::Result<Self> {
        let version = super::version();
        let folder = cache.join("compiled");
        let made = private(&folder.join(&version)).and_then(|kept| {
            sweep(&folder);
            Self::make(&folder, &version, Some(kept))
        });
        let made = made.or_else(|_| Self::make(fallback, &version, None))?;
        // SAFETY: as this function's.
        unsafe { std::env::set_var("TMPDIR", &made.own) };
        Ok(made)
    }

    fn make(parent: &Path, version: &str, kept: Option<PathBuf>) -> io::Result<Self> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let own = parent.join(format!("{RUN}{}-{since:x}", std::process::id()));
        // Fails if it is there: nobody can have prepared it.
        DirBuilder::new().mode(0o700).create(&own)?;
        // Locked before it has its name: without it a folder is never taken for abandoned.
        let unnamed = own.join("lock.new");
        let lock = File::create_new(&unnamed)?;
        lock.lock()?;
        fs::rename(&unnamed, own.join(LOCK))?;
        let libraries = private(&own.join("mlx").join(version).join("cpu"))?;
        if let Some(kept) = &kept {
            for library in shared_libraries(kept) {
                link(&library, &libraries);
            }
        }
        Ok(Self { own, libraries, kept, _lock: lock })
    }

    /// Keeps what was compiled, for later runs; call it when all of it was used with success.
    pub fn keep(&self) {
        for library in shared_libraries(&self.libraries) {
            if let Some(kept) = &self.kept {
                link(&library, kept);
            }
        }
    }
}

impl Drop for CompileFolder {
    fn drop(&mut self) {
        // Whatever stays is swept by a later run.
        let _ = fs::remove_dir_all(&self.own);
    }
}

/// A folder for this user alone.
fn private(folder: &Path) -> io::Result<PathBuf> {
    DirBuilder::new().mode(0o700).recursive(true).create(folder)?;
    Ok(folder.to_owned())
}

fn shared_libraries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.filter(|path| path.extension().is_some_and(|extension| extension == "so")).collect()
}

/// A second name for a file, at once and whole; where that fails, MLX compiles once more.
fn link(file: &Path, folder: &Path) {
    if let Some(name) = file.file_name() {
        let _ = fs::hard_link(file, folder.join(name));
    }
}

/// Removes the folders of processes that are gone.
fn sweep(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let is_run = entry.file_name().to_string_lossy().starts_with(RUN);
        let abandoned = || File::open(entry.path().join(LOCK)).is_ok_and(|lock| lock.try_lock().is_ok());
        if is_run && abandoned() {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn make(cache: &Path) -> CompileFolder {
        let kept = private(&cache.join("1.0")).unwrap();
        sweep(cache);
        CompileFolder::make(cache, "1.0", Some(kept)).unwrap()
    }

    fn entries(folder: &Path) -> usize {
        fs::read_dir(folder).unwrap().count()
    }

    #[test]
    fn what_was_kept_is_there_for_the_next_and_nothing_else() {
        let cache = tempfile::tempdir().unwrap();
        let (one, other) = (make(cache.path()), make(cache.path()));
        fs::write(one.libraries.join("f.so"), "whole").unwrap();
        fs::write(one.libraries.join("f.cpp"), "source").unwrap();
        fs::write(other.libraries.join("g.so"), "half").unwrap();
        one.keep();
        drop((one, other));
        assert_eq!(entries(cache.path()), 1, "own folders stay behind");
        let next = make(cache.path());
        assert_eq!(fs::read_to_string(next.libraries.join("f.so")).unwrap(), "whole");
        assert_eq!(entries(&next.libraries), 1);
    }

    #[test]
    fn only_abandoned_folders_are_swept() {
        let cache = tempfile::tempdir().unwrap();
        let alive = make(cache.path());
        let dead = cache.path().join("run-1-0");
        fs::create_dir(&dead).unwrap();
        fs::write(dead.join(LOCK), "").unwrap();
        drop(make(cache.path()));
        assert!(alive.own.exists() && !dead.exists());
    }
}
