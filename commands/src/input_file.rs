//! A file that the user names as input: read only when it is a regular one of sensible size. A device has no end, and a
//! pipe may have no writer.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use crate::error::Complaint;

/// Checks that `file` is a regular file, or a link to one, of at most `most` bytes.
///
/// # Errors
/// It is not.
pub fn check(file: &Path, most: u64) -> Result<(), Complaint> {
    let shown = file.display();
    let failed = |problem: String| Complaint::failure(format!("cannot read `{shown}`: {problem}"));
    let metadata = std::fs::metadata(file).map_err(|error| failed(error.to_string()))?;
    if metadata.is_dir() {
        return Err(failed("it is a folder".to_owned()));
    }
    if !metadata.is_file() {
        return Err(failed("it is a device or a pipe, no regular file".to_owned()));
    }
    if metadata.len() > most {
        let size = metadata.len() >> 20;
        return Err(failed(format!("it has {size} MiB, and at most {} are read", most >> 20)));
    }
    Ok(())
}

/// The whole file, of at most `most` bytes.
///
/// # Errors
/// It is larger, no regular file, or cannot be read.
pub fn read(file: &Path, most: u64) -> Result<Vec<u8>, Complaint> {
    check(file, most)?;
    let mut bytes = Vec::new();
    let read = File::open(file).and_then(|opened| opened.take(most).read_to_end(&mut bytes));
    read.map_err(|error| Complaint::failure(format!("cannot read `{}`: {error}", file.display())))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_pipes_and_huge_files_are_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        for file in [Path::new("/dev/zero"), &pipe] {
            let error = read(file, 1 << 20).unwrap_err().to_string();
            assert!(error.ends_with("it is a device or a pipe, no regular file"), "{error}");
        }
        assert!(read(folder.path(), 9).unwrap_err().to_string().ends_with("it is a folder"));
        assert!(read(&folder.path().join("absent"), 9).is_err());
        let huge = folder.path().join("huge");
        File::create(&huge).unwrap().set_len(3 << 20).unwrap();
        let error = read(&huge, 1 << 20).unwrap_err().to_string();
        assert!(error.ends_with("it has 3 MiB, and at most 1 are read"), "{error}");
        assert_eq!(read(&huge, 3 << 20).unwrap().len(), 3 << 20);
    }
}
