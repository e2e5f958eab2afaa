//! Locks that huggingface_hub's processes and ours respect: `flock` on a file under `.locks`, which the system
//! releases when its holder dies, however it dies.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

/// A lock that is held until it is dropped.
#[derive(Debug)]
pub struct FileLock {
    // Closing the file releases the lock.
    _file: File,
}

/// What came of asking for a lock.
#[derive(Debug)]
pub enum Locked {
    /// It is ours.
    Mine(FileLock),
    /// Somebody else has it; their process id where they left it.
    Theirs(Option<u32>),
}

/// How a lock is to be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// By one alone.
    Exclusive,
    /// By many who do not disturb each other.
    Shared,
}

/// Asks for the lock of this file, which is made if it is not there. Does not wait.
///
/// # Errors
/// The file cannot be made. A file system without locks counts as one where nobody else is.
pub fn try_lock(path: &Path, sharing: Sharing) -> io::Result<Locked> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
    let outcome = match sharing {
        Sharing::Exclusive => file.try_lock(),
        Sharing::Shared => file.try_lock_shared(),
    };
    match outcome {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Ok(Locked::Theirs(holder(&mut file))),
        Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {}
        Err(TryLockError::Error(error)) => return Err(error),
    }
    if sharing == Sharing::Exclusive {
        // Only for messages: a full disk must not keep us from working.
        let _ = file.set_len(0).and_then(|()| file.write_all(std::process::id().to_string().as_bytes()));
    }
    Ok(Locked::Mine(FileLock { _file: file }))
}

fn holder(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.rewind().ok()?;
    file.take(16).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

/// Where the lock of a blob is (huggingface_hub `file_download.py`).
pub fn blob_lock(cache_root: &Path, repo_folder: &str, blob: &str) -> PathBuf {
    cache_root.join(".locks").join(repo_folder).join(format!("{blob}.lock"))
}

/// Our own lock of a whole repository: downloads share it, the collector of old snapshots wants it alone.
pub fn repo_lock(cache_root: &Path, repo_folder: &str) -> PathBuf {
    blob_lock(cache_root, repo_folder, "mlx-bun")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_names_its_holder_and_ends_with_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = blob_lock(folder.path(), "models--a--b", "etag");
        let mine = try_lock(&path, Sharing::Exclusive).unwrap();
        assert!(matches!(mine, Locked::Mine(_)));
        let second = try_lock(&path, Sharing::Shared).unwrap();
        assert!(matches!(second, Locked::Theirs(Some(pid)) if pid == std::process::id()), "{second:?}");
        drop(mine);
        let shared = try_lock(&path, Sharing::Shared).unwrap();
        assert!(matches!(shared, Locked::Mine(_)));
        assert!(matches!(try_lock(&path, Sharing::Shared).unwrap(), Locked::Mine(_)));
        assert!(matches!(try_lock(&path, Sharing::Exclusive).unwrap(), Locked::Theirs(_)));
    }
}
