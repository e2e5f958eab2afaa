//! A folder that goes when it is no longer needed.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::{fs, io};

use crate::child::GuardedFolder;

static COUNT: AtomicU64 = AtomicU64::new(0);

/// An empty folder among the system's temporary ones; removed with what is in it when dropped, and when this process is
/// gone.
#[derive(Debug)]
pub struct TempFolder {
    path: PathBuf,
    _guard: Option<GuardedFolder>,
}

impl TempFolder {
    /// Makes one.
    ///
    /// # Errors
    /// The system's temporary folder cannot be written.
    pub fn new() -> io::Result<Self> {
        loop {
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            let path = std::env::temp_dir().join(format!("mlx-bun-bench-{}-{count}", std::process::id()));
            match fs::create_dir(&path) {
                // Without a guard it stays behind when this process is killed, and nothing worse.
                Ok(()) => return Ok(Self { _guard: GuardedFolder::guard(&path).ok(), path }),
                // Left behind by a process of the same number.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => {
                    let cause = format!("cannot make the folder {}: {error}", path.display());
                    return Err(io::Error::new(error.kind(), cause));
                }
            }
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for TempFolder {
    fn drop(&mut self) {
        // What cannot be removed is left to the system.
        let _ = fs::remove_dir_all(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_its_own_and_goes() {
        let (a, b) = (TempFolder::new().unwrap(), TempFolder::new().unwrap());
        assert_ne!(a.path(), b.path());
        fs::write(a.path().join("x"), "y").unwrap();
        let path = a.path().to_owned();
        drop(a);
        assert!(!path.exists() && b.path().is_dir());
    }
}
