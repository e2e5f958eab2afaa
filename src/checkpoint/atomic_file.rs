//! Files that are there whole or not at all: written beside under another name, synced, renamed.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::error::shown_path;

/// How the names of temporary files end.
const TEMPORARY: &str = ".tmp";
/// A file that is being written is written to more often than this.
const ABANDONED: Duration = Duration::from_secs(3600);

/// Why a file was not written. What was there before is still there.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}: {cause}", shown_path(path))]
pub struct AtomicFileError {
    /// The file that was to be written.
    pub path: PathBuf,
    /// What the system said.
    pub cause: io::Error,
}

/// Writes a file through `write` and puts it in place of `path` once its bytes are on the disk.
///
/// A reader sees the old file or the new one, never a part. A symbolic link stays and the file behind it is
/// replaced, with its permissions; anything else that is not a regular file (a directory, a device) is
/// refused. After an error the half-written file is gone.
///
/// # Errors
/// When the directory is missing or not writable, the disk is full, or `write` fails.
pub fn write_atomically(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> Result<(), AtomicFileError> {
    replace(path, write).map_err(|cause| AtomicFileError { path: path.to_owned(), cause })
}

fn replace(path: &Path, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> io::Result<()> {
    let (target, permissions) = match fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => (fs::canonicalize(path)?, Some(metadata.permissions())),
        Ok(_) => return Err(io::Error::other("it exists and is not a regular file")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => (path.to_owned(), None),
        Err(error) => return Err(error),
    };
    let directory = match target.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let (file, unfinished) = create_beside(&target, directory, permissions.as_ref())?;
    let mut writer = BufWriter::with_capacity(1 << 20, file);
    write(&mut writer)?;
    let file = writer.into_inner().map_err(io::IntoInnerError::into_error)?;
    file.sync_all()?;
    drop(file);
    unfinished.rename_to(&target)?;
    // Without this the rename itself may be lost in a crash.
    File::open(directory)?.sync_all()
}

/// A temporary file that is removed unless it is renamed.
struct Unfinished {
    path: Option<PathBuf>,
}

impl Unfinished {
    fn rename_to(mut self, target: &Path) -> io::Result<()> {
        if let Some(path) = &self.path {
            fs::rename(path, target)?;
        }
        self.path = None;
        Ok(())
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            // The error that brought us here is the one to report.
            let _ = fs::remove_file(path);
        }
    }
}

fn create_beside(
    target: &Path,
    directory: &Path,
    permissions: Option<&Permissions>,
) -> io::Result<(File, Unfinished)> {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let name = target.file_name().ok_or_else(|| io::Error::other("it has no file name"))?;
    // A name may be as long as the file system allows, so only its start goes into the temporary one.
    let start = format!(".{}.", name.to_string_lossy().chars().take(40).collect::<String>());
    remove_abandoned(directory, &start);
    loop {
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let path = directory.join(format!("{start}{}-{number}{TEMPORARY}", std::process::id()));
        match OpenOptions::new().write(true).create_new(true).open(&path) {
            Ok(file) => {
                let unfinished = Unfinished { path: Some(path) };
                if let Some(permissions) = permissions {
                    file.set_permissions(permissions.clone())?;
                }
                return Ok((file, unfinished));
            }
            // Left over from a process that had our id.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
}

/// Removes temporary files that begin like this one's and that nobody has written to for long: their writers were
/// killed.
fn remove_abandoned(directory: &Path, start: &str) {
    let is_old = |metadata: fs::Metadata| {
        metadata.modified().ok().and_then(|time| time.elapsed().ok()).is_some_and(|age| age > ABANDONED)
    };
    remove_temporary(directory, |entry, name| {
        Some(name) == start.get(1..start.len().saturating_sub(1)) && entry.metadata().is_ok_and(is_old)
    });
}

/// Removes the temporary files of killed writers, whatever their age: for those who know that nobody else writes into the
/// directory. `is_ours` says whether a file may be of that name; of long names it sees the first 40 characters.
pub fn remove_unfinished(directory: &Path, is_ours: impl Fn(&str) -> bool) {
    remove_temporary(directory, |_, name| is_ours(name));
}

/// Removes what is called `.NAME.PROCESS-NUMBER.tmp`, where `choose` wants it to, given `NAME`.
fn remove_temporary(directory: &Path, choose: impl Fn(&fs::DirEntry, &str) -> bool) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let parts =
            name.to_str().and_then(|name| name.strip_prefix('.')?.strip_suffix(TEMPORARY)?.rsplit_once('.'));
        let chosen = parts.is_some_and(|(name, numbers)| {
            let is_temporary = numbers.split_once('-').is_some_and(|(process, number)| {
                [process, number].iter().all(|part| part.parse::<u64>().is_ok())
            });
            is_temporary && choose(&entry, name)
        });
        if chosen {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Writes these bytes as a whole file; see [`write_atomically`].
///
/// # Errors
/// As [`write_atomically`].
pub fn write_bytes_atomically(path: &Path, bytes: &[u8]) -> Result<(), AtomicFileError> {
    write_atomically(path, |writer| writer.write_all(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn what_killed_writers_left_goes_after_a_while() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("out.gguf");
        for (name, hours) in [(".out.gguf.7-0.tmp", 2), (".out.gguf.8-1.tmp", 0), (".out.gguf.mine.tmp", 2)] {
            let file = File::create(directory.path().join(name)).unwrap();
            file.set_modified(std::time::SystemTime::now() - ABANDONED * hours).unwrap();
        }
        write_bytes_atomically(&path, b"new").unwrap();
        assert_eq!(names(directory.path()), [".out.gguf.8-1.tmp", ".out.gguf.mine.tmp", "out.gguf"]);
        remove_unfinished(directory.path(), |name| name == "in.gguf");
        assert_eq!(names(directory.path()).len(), 3);
        remove_unfinished(directory.path(), |name| name == "out.gguf");
        assert_eq!(names(directory.path()), [".out.gguf.mine.tmp", "out.gguf"]);
    }

    #[test]
    fn a_file_is_created_and_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.bin");
        write_bytes_atomically(&path, b"one").unwrap();
        write_bytes_atomically(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(names(directory.path()), ["a.bin"]);
    }

    #[test]
    fn a_full_disk_leaves_the_old_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.bin");
        write_bytes_atomically(&path, b"old").unwrap();
        let error = write_atomically(&path, |writer| {
            writer.write_all(&[0; 100])?;
            Err(io::ErrorKind::StorageFull.into())
        })
        .unwrap_err();
        assert!(error.to_string().starts_with("cannot write ") && !error.to_string().contains('\n'));
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(names(directory.path()), ["a.bin"]);
    }

    #[test]
    fn a_missing_directory_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let error = write_bytes_atomically(&directory.path().join("no/a.bin"), b"x").unwrap_err().to_string();
        assert!(error.contains("a.bin: "), "{error}");
    }

    #[cfg(unix)]
    #[test]
    fn directories_and_sockets_are_not_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        for path in [directory.path(), &socket] {
            let error = write_bytes_atomically(path, b"x").unwrap_err().to_string();
            assert!(error.ends_with("it exists and is not a regular file"), "{error}");
        }
    }

    #[test]
    fn the_longest_name_can_be_written() {
        let directory = tempfile::tempdir().unwrap();
        write_bytes_atomically(&directory.path().join("n".repeat(255)), b"x").unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn links_and_permissions_stay() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let directory = tempfile::tempdir().unwrap();
        let (file, link) = (directory.path().join("file"), directory.path().join("link"));
        write_bytes_atomically(&file, b"one").unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
        symlink("file", &link).unwrap();
        write_bytes_atomically(&link, b"two").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&file).unwrap(), b"two");
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    }
}
