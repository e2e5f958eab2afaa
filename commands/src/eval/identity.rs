//! Which model a score is of: its name, and a fingerprint of its files.

use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use mlx_bun::checkpoint::source::ResolvedModel;
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};

use crate::error::Complaint;

/// Files up to this size are read whole; of larger ones the ends count.
const WHOLE: u64 = 1 << 20;
const END: u64 = 1 << 16;

/// A model.
pub struct Identity {
    /// Its id on the hub, else its path.
    pub name: String,
    /// Of its files.
    pub fingerprint: String,
    /// Bytes of its weights.
    pub weight_bytes: u64,
}

impl Identity {
    /// For the head of a file of samples.
    pub fn header(&self) -> Map<String, Value> {
        let (name, fingerprint) = (self.name.as_str(), self.fingerprint.as_str());
        Map::from_iter([("name".to_owned(), name.into()), ("fingerprint".to_owned(), fingerprint.into())])
    }
}

/// A model's identity.
///
/// # Errors
/// Its files cannot be read.
pub fn of_model(resolved: &ResolvedModel) -> Result<Identity, Complaint> {
    let path = resolved.source.path();
    let shown = || path.canonicalize().unwrap_or_else(|_| path.to_owned()).display().to_string();
    let weights = |path: &PathBuf| {
        let extension = path.extension().and_then(|extension| extension.to_str());
        matches!(extension, Some("safetensors" | "gguf"))
    };
    let files = files(path).map_err(|error| unreadable(path, &error))?;
    let sizes = files.iter().filter(|path| weights(path)).filter_map(|path| fs::metadata(path).ok());
    Ok(Identity {
        name: resolved.repo_id.clone().unwrap_or_else(shown),
        fingerprint: fingerprint(path)?,
        weight_bytes: sizes.map(|metadata| metadata.len()).sum(),
    })
}

fn unreadable(path: &Path, error: &io::Error) -> Complaint {
    Complaint::failure(format!("cannot read {}: {error}", path.display()))
}

/// The file itself, or those of a folder that say what a model is, sorted.
fn files(path: &Path) -> io::Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(path)? {
        let path = entry?.path();
        let extension = path.extension().and_then(|extension| extension.to_str());
        if path.is_file() && matches!(extension, Some("safetensors" | "gguf" | "json" | "jinja" | "model")) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// A hash of names, sizes and contents; the middle of large files does not count, which nobody changes alone.
///
/// # Errors
/// A file cannot be read.
pub fn fingerprint(path: &Path) -> Result<String, Complaint> {
    let mut hash = Sha256::new();
    for file in files(path).map_err(|error| unreadable(path, &error))? {
        add(&file, &mut hash).map_err(|error| unreadable(&file, &error))?;
    }
    Ok(hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect())
}

fn add(path: &Path, hash: &mut Sha256) -> io::Result<()> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    hash.update(path.file_name().unwrap_or_default().as_encoded_bytes());
    hash.update(length.to_le_bytes());
    let mut bytes = Vec::new();
    if length <= WHOLE {
        file.take(WHOLE).read_to_end(&mut bytes)?;
    } else {
        file.by_ref().take(END).read_to_end(&mut bytes)?;
        file.seek(SeekFrom::End(-(END as i64)))?;
        file.take(END).read_to_end(&mut bytes)?;
    }
    hash.update(&bytes);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_files_give_another_fingerprint() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| fs::write(folder.path().join(name), bytes).unwrap();
        write("config.json", b"{}");
        write("model.safetensors", &vec![1; 3 << 20]);
        let first = fingerprint(folder.path()).unwrap();
        write("README.md", b"notes");
        assert_eq!(fingerprint(folder.path()).unwrap(), first);
        write("config.json", b"{ }");
        let second = fingerprint(folder.path()).unwrap();
        assert_ne!(second, first);
        let mut bytes = vec![1; 3 << 20];
        bytes[(3 << 20) - 1] = 2;
        write("model.safetensors", &bytes);
        assert_ne!(fingerprint(folder.path()).unwrap(), second);
    }
}
