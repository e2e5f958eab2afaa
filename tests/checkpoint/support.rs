//! Small checkpoints and caches in temporary directories.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use mlx_bun::checkpoint::ElementType;
use mlx_bun::checkpoint::safetensors_writer::write_safetensors;
use tempfile::TempDir;

/// A directory that goes away with the test.
pub struct Folder(TempDir);

impl Folder {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// A snapshot of a one-tensor model.
    pub fn snapshot() -> Self {
        let folder = Self::new();
        folder.write("config.json", r#"{"model_type":"llama"}"#);
        folder.weights("model.safetensors", &["a"]);
        folder
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        path
    }

    /// A safetensors file of 4-byte tensors with these names.
    pub fn weights(&self, name: &str, tensors: &[&str]) -> PathBuf {
        let path = self.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let tensors = tensors.iter().map(|tensor| (*tensor, ElementType::F32, [1].as_slice(), [0; 4]));
        write_safetensors(&path, tensors, &BTreeMap::new()).unwrap();
        path
    }

    /// A shard index with these tensor and shard names.
    pub fn index(&self, entries: &[(&str, &str)]) -> PathBuf {
        let map: serde_json::Map<_, _> =
            entries.iter().map(|(tensor, shard)| ((*tensor).to_owned(), (*shard).into())).collect();
        let index = serde_json::json!({"metadata": {"total_size": 8}, "weight_map": map});
        self.write("model.safetensors.index.json", index.to_string())
    }
}

/// The bytes of a safetensors file with this header and so many bytes of data.
pub fn safetensors_bytes(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

/// Asserts that a message is one line without a full stop that contains all parts.
#[track_caller]
pub fn assert_message(error: &dyn std::error::Error, parts: &[&str]) {
    let message = error.to_string();
    assert!(!message.contains('\n') && !message.ends_with('.'), "{message}");
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}
