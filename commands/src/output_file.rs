//! A file that the user names as output: checked before the work, which may take an hour.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use crate::error::Complaint;

/// Checks that `file` can be written, and that what it replaces is of its own kind: a slip of the hand must not cost
/// anybody their weights. `kind` completes "exists and is no …".
///
/// # Errors
/// Its folder is not there, it is a folder itself, or it holds something else.
pub fn check(file: &Path, kind: &str, is_that_kind: impl FnOnce(&Path) -> bool) -> Result<(), Complaint> {
    let shown = file.display();
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
        return Err(Complaint::failure(format!(
            "cannot write `{shown}`: there is no folder `{}`",
            folder.display()
        )));
    }
    if file.is_dir() {
        return Err(Complaint::failure(format!("cannot write `{shown}`: it is a folder")));
    }
    // To look into a pipe or a device may take for ever.
    if file.exists() && !file.is_file() {
        return Err(Complaint::failure(format!("cannot write `{shown}`: it is not a regular file")));
    }
    if file.exists() && !is_that_kind(file) {
        return Err(Complaint::failure(format!("`{shown}` exists and is no {kind}, so it is not replaced"))
            .hint("give another name, or remove the file"));
    }
    Ok(())
}

/// The first bytes of a file, fewer if it has fewer: enough to tell its kind, however large it is.
pub fn beginning(file: &Path, bytes: u64) -> std::io::Result<Vec<u8>> {
    let mut found = Vec::new();
    File::open(file)?.take(bytes).read_to_end(&mut found)?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_its_own_kind_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("out");
        assert!(check(&file, "table", |_| false).is_ok());
        std::fs::write(&file, "weights").unwrap();
        assert!(check(&file, "table", |_| true).is_ok());
        let error = check(&file, "table", |_| false).unwrap_err().to_string();
        assert!(error.ends_with("exists and is no table, so it is not replaced"), "{error}");
        assert!(check(folder.path(), "table", |_| true).is_err());
        let error = check(Path::new("/dev/null"), "table", |_| true).unwrap_err().to_string();
        assert_eq!(error, "cannot write `/dev/null`: it is not a regular file");
        assert_eq!(beginning(&file, 3).unwrap(), b"wei");
        assert_eq!(beginning(&file, 300).unwrap(), b"weights");
        assert!(check(&folder.path().join("absent/out"), "table", |_| true).is_err());
    }
}
