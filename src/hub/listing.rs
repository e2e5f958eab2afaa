//! What a repository holds at a revision: `GET /api/models/{id}/revision/{revision}?blobs=true`.

use std::path::{Component, Path};

use serde::Deserialize;

use super::digest::ContentId;
use super::error::HubError;
use super::http::{Call, HubClient, Payload};
use super::progress::TransferProgress;
use super::url::quote;
use crate::checkpoint::hub_cache::is_repo_id;

/// A repository at a commit.
#[derive(Clone, Debug)]
pub struct RepoListing {
    /// `org/name`, as it was asked for.
    pub repo_id: String,
    /// The commit hash.
    pub commit: String,
    /// Its files.
    pub files: Vec<RepoFile>,
}

/// One file of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepoFile {
    /// Path inside the repository, checked to stay there.
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// What its bytes hash to.
    pub id: ContentId,
}

#[derive(Deserialize)]
struct Answer {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    #[serde(alias = "oid")]
    sha256: String,
    size: Option<u64>,
}

impl HubClient {
    /// Lists a repository at a branch, tag or commit.
    ///
    /// # Errors
    /// The hub cannot be reached or refuses, or lists files that cannot be stored safely.
    pub fn list(
        &self,
        repo_id: &str,
        revision: &str,
        progress: &dyn TransferProgress,
    ) -> Result<RepoListing, HubError> {
        if !is_repo_id(repo_id) {
            return Err(HubError::BadRepoId { repo_id: repo_id.to_owned() });
        }
        if self.settings().offline {
            return Err(HubError::Offline { what: format!("{repo_id}@{revision}") });
        }
        let action = format!("listing {repo_id}@{revision}");
        let endpoint = &self.settings().endpoint;
        let call = Call {
            method: "GET",
            url: format!(
                "{endpoint}/api/models/{}/revision/{}?blobs=true",
                quote(repo_id, true),
                quote(revision, false)
            ),
            headers: Vec::new(),
            payload: Payload::None,
            timeout: self.settings().metadata_timeout,
            action: &action,
        };
        let value = self.json(&call, true, progress)?;
        let malformed = |problem: String| HubError::Malformed { action: action.clone(), problem };
        let answer: Answer = serde_json::from_value(value).map_err(|error| malformed(error.to_string()))?;
        if !is_commit(&answer.sha) {
            return Err(malformed(format!("`{}` is no commit", answer.sha)));
        }
        let file = |sibling| file(repo_id, sibling, &malformed);
        let files = answer.siblings.into_iter().map(file).collect::<Result<_, _>>()?;
        Ok(RepoListing { repo_id: repo_id.to_owned(), commit: answer.sha, files })
    }
}

fn file(
    repo_id: &str,
    sibling: Sibling,
    malformed: &dyn Fn(String) -> HubError,
) -> Result<RepoFile, HubError> {
    let path = sibling.rfilename;
    if !is_safe_path(&path) {
        return Err(HubError::UnsafeName { repo_id: repo_id.to_owned(), name: path });
    }
    let (id, size) = match &sibling.lfs {
        Some(lfs) => (ContentId::sha256(&lfs.sha256), lfs.size.or(sibling.size)),
        None => (sibling.blob_id.as_deref().and_then(ContentId::git_sha1), sibling.size),
    };
    match (id, size) {
        (Some(id), Some(size)) => Ok(RepoFile { path, size, id }),
        _ => Err(malformed(format!("file `{path}` is listed without its size or hash"))),
    }
}

/// Whether this is a commit hash.
pub(super) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// Whether joining the path to a directory stays in that directory, on any system.
pub(super) fn is_safe_path(path: &str) -> bool {
    let normal = Path::new(path).components().all(|part| matches!(part, Component::Normal(_)));
    let plain = !path.contains(['\\', ':', '\0', '\n', '\r']);
    normal && plain && !path.is_empty() && path.split('/').all(|part| !matches!(part, "" | "." | ".."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_stay_in_their_directory() {
        for path in ["config.json", "sub/dir/a.b", ".gitattributes", "..a", "größe"] {
            assert!(is_safe_path(path), "{path}");
        }
        for path in ["", ".", "..", "../a", "/a", "a/../b", "a/", "a//b", "./a", "a\\b", "c:a", "a\0", "a\nb"]
        {
            assert!(!is_safe_path(path), "{path}");
        }
    }
}
