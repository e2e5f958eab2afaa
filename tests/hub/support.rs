//! A client for the stand-in hub.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mlx_bun::checkpoint::hub_cache::HubCache;
use mlx_bun::hub::{DownloadRequest, Downloaded, HubClient, HubError, HubSettings, Retry, Token};
use tempfile::TempDir;

use crate::stand_in::StandIn;

pub const REPO: &str = "org/name";

/// A hub with one small model, and a client with an empty cache.
pub struct World {
    pub hub: StandIn,
    pub storage: StandIn,
    pub home: TempDir,
    pub settings: HubSettings,
}

impl World {
    pub fn new() -> Self {
        let (hub, storage) = StandIn::start();
        hub.add(&storage, REPO, "config.json", br#"{"model_type":"llama"}"#, false);
        hub.add(&storage, REPO, "model.safetensors", &weights(), true);
        hub.add(&storage, REPO, "README.md", b"---\nlicense: mit\n---\n", false);
        hub.add(&storage, REPO, "pytorch_model.bin", b"pickle", true);
        let home = tempfile::tempdir().unwrap();
        let settings = HubSettings {
            endpoint: hub.address.clone(),
            token: Token::new("hf_secret"),
            offline: false,
            cache: HubCache::at(home.path().join("hub")),
            metadata_timeout: Duration::from_secs(10),
            download_timeout: Duration::from_secs(10),
            certificates: None,
            retry: Retry { tries: 5, wait: Duration::from_millis(1), longest: Duration::from_secs(1) },
        };
        Self { hub, storage, home, settings }
    }

    pub fn client(&self) -> HubClient {
        HubClient::new(self.settings.clone()).unwrap()
    }

    pub fn get(&self) -> Result<Downloaded, HubError> {
        self.client().download(&request(), &())
    }

    pub fn repo(&self) -> PathBuf {
        self.settings.cache.repo(REPO)
    }

    /// The path of the request for the weights, at the hub and at its storage.
    pub fn weight_paths() -> (String, String) {
        let hub = format!("/{REPO}/resolve/{}/model.safetensors", crate::stand_in::COMMIT);
        (hub, format!("/objects/{}", crate::stand_in::sha256(&weights())))
    }
}

pub fn request() -> DownloadRequest {
    DownloadRequest { repo_id: REPO.to_owned(), workers: 4, ..DownloadRequest::default() }
}

/// Bytes that differ everywhere.
pub fn weights() -> Vec<u8> {
    (0..30_000u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect()
}

/// Every file below a directory with its bytes; links are marked with where they lead.
pub fn tree(directory: &Path) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut folders = vec![directory.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap().map(Result::unwrap) {
            let path = entry.path();
            let name = path.strip_prefix(directory).unwrap().to_str().unwrap().to_owned();
            let kind = entry.file_type().unwrap();
            if kind.is_dir() {
                folders.push(path);
            } else if kind.is_symlink() {
                found.insert(name, format!("-> {}", fs::read_link(&path).unwrap().display()));
            } else {
                found.insert(name, format!("{} bytes", fs::metadata(&path).unwrap().len()));
            }
        }
    }
    found
}
