//! Caches and models in temporary directories.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use mlx_bun::checkpoint::ElementType;
use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::checkpoint::hub_cache::HubCache;
use mlx_bun::checkpoint::safetensors_writer::write_safetensors;
use tempfile::TempDir;

/// A Hugging Face cache and this program's own.
pub struct Cache {
    pub home: TempDir,
}

impl Cache {
    pub fn new() -> Self {
        let home = tempfile::tempdir().unwrap();
        fs::create_dir(home.path().join("hub")).unwrap();
        Self { home }
    }

    pub fn root(&self) -> PathBuf {
        // As the collector reports it: without links in the path.
        self.home.path().canonicalize().unwrap().join("hub")
    }

    pub fn hub(&self) -> HubCache {
        HubCache::at(self.root())
    }

    pub fn environment(&self) -> Environment {
        let home = self.home.path().to_str().unwrap();
        let own = self.home.path().join("own");
        Environment::from_pairs([
            ("HOME", home),
            ("HF_HUB_CACHE", self.root().to_str().unwrap()),
            ("MLX_BUN_CACHE", own.to_str().unwrap()),
        ])
    }

    pub fn write(&self, path: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        path
    }

    pub fn link(&self, path: &str, target: &str) {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(target, path).unwrap();
    }

    /// A file of a snapshot, with its blob.
    pub fn file(&self, repo: &str, commit: &str, name: &str, blob: &str) {
        let content = format!("bytes of {blob}");
        self.write(&format!("models--{repo}/blobs/{blob}"), content);
        let up = "../".repeat(name.split('/').count() + 1);
        self.link(&format!("models--{repo}/snapshots/{commit}/{name}"), &format!("{up}blobs/{blob}"));
    }

    pub fn named(&self, repo: &str, name: &str, commit: &str) {
        self.write(&format!("models--{repo}/refs/{name}"), commit);
    }

    pub fn exists(&self, path: &str) -> bool {
        fs::symlink_metadata(self.root().join(path)).is_ok()
    }

    /// A model's snapshot of real files.
    pub fn model(&self, repo: &str, commit: &str, config: &str, floats: usize) {
        let folder = format!("models--{repo}/snapshots/{commit}");
        self.write(&format!("{folder}/config.json"), config);
        weights(&self.root().join(&folder).join("model.safetensors"), &[("a.weight", floats)]);
    }
}

/// A safetensors file of float32 tensors of these lengths.
pub fn weights(path: &Path, tensors: &[(&str, usize)]) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let data: Vec<(&str, [usize; 1], Vec<u8>)> =
        tensors.iter().map(|(name, size)| (*name, [*size], vec![0; size * 4])).collect();
    let tensors =
        data.iter().map(|(name, shape, bytes)| (*name, ElementType::F32, shape.as_slice(), bytes.as_slice()));
    write_safetensors(path, tensors, &BTreeMap::new()).unwrap();
}

/// Every path below a directory with its content, links followed; what cannot be read has none.
pub fn contents(directory: &Path) -> BTreeMap<PathBuf, Option<Vec<u8>>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![directory.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap().map(Result::unwrap) {
            match entry.file_type().unwrap().is_dir() {
                true => folders.push(entry.path()),
                false => {
                    found.insert(entry.path(), fs::read(entry.path()).ok());
                }
            }
        }
    }
    found
}
