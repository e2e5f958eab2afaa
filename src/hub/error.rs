//! What can go wrong between this machine and the hub.

use std::io;
use std::path::PathBuf;

use crate::checkpoint::atomic_file::AtomicFileError;
use crate::checkpoint::error::{shown_message, shown_name, shown_path};
use crate::checkpoint::hub_cache::HubCacheError;

/// Why something could not be fetched from the hub or sent to it. Each message is one line; [`HubError::hint`]
/// says what to do.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// A variable that cannot be used.
    #[error("{name} is `{}`: {problem}", shown_name(value))]
    Setting {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The network is switched off by a variable.
    #[error("{what} is not on this machine and HF_HUB_OFFLINE is set")]
    Offline {
        /// What was to be fetched.
        what: String,
    },
    /// Not a repository's name.
    #[error("`{}` is no hub id; it looks like org/name", shown_name(repo_id))]
    BadRepoId {
        /// What was given.
        repo_id: String,
    },
    /// The hub refuses.
    #[error("{action} failed (HTTP {status}): {}", shown_message(detail))]
    Status {
        /// What was tried.
        action: String,
        /// The HTTP status.
        status: u16,
        /// The hub's words.
        detail: String,
        /// What to do about it, if that is known.
        hint: Option<String>,
    },
    /// No answer.
    #[error("{action} failed: no answer from {}: {}", shown_name(host), shown_message(cause))]
    Unreachable {
        /// What was tried.
        action: String,
        /// Whom.
        host: String,
        /// What the network said.
        cause: String,
    },
    /// A redirect that is not followed.
    #[error("{action} failed: {problem}")]
    Redirect {
        /// What was tried.
        action: String,
        /// What is wrong with it.
        problem: String,
    },
    /// An answer that makes no sense.
    #[error("{action} failed: the hub's answer is not understood: {}", shown_message(problem))]
    Malformed {
        /// What was tried.
        action: String,
        /// What is wrong with the answer.
        problem: String,
    },
    /// A file name that would leave the directory.
    #[error("{repo_id} lists a file `{}`, which is no safe path; nothing was downloaded", shown_name(name))]
    UnsafeName {
        /// The repository.
        repo_id: String,
        /// The name.
        name: String,
    },
    /// The patterns leave nothing to do.
    #[error("no file of {0} matches the patterns")]
    NothingMatches(String),
    /// Several GGUF files, each a whole model.
    #[error("{repo_id} holds {} GGUF files and no safetensors: {}", files.len(), files.join(", "))]
    ManyGguf {
        /// The repository.
        repo_id: String,
        /// Their names.
        files: Vec<String>,
    },
    /// Another process has the lock.
    #[error("another download of {} is in progress{}", shown_name(file), holder.map(|pid| format!(" (pid {pid})")).unwrap_or_default())]
    Busy {
        /// The file.
        file: String,
        /// The process, when it says so.
        holder: Option<u32>,
    },
    /// The connection gave less than the file.
    #[error(
        "short download for {}: {have} of {size} bytes ({}); what there is is kept, run it again to resume",
        shown_name(file),
        shown_message(cause)
    )]
    Short {
        /// The file.
        file: String,
        /// Bytes that arrived.
        have: u64,
        /// Bytes there should be.
        size: u64,
        /// What the network said last.
        cause: String,
    },
    /// More or fewer bytes than the listing says.
    #[error("the hub lists {} with {listed} bytes but sends {sent}", shown_name(file))]
    WrongLength {
        /// The file.
        file: String,
        /// Bytes by the listing.
        listed: u64,
        /// Bytes by the transfer.
        sent: u64,
    },
    /// Other bytes than promised.
    #[error("checksum mismatch for {}; the partial file is removed, run it again", shown_name(file))]
    Mismatch {
        /// The file.
        file: String,
    },
    /// The file at the address is another one than was listed.
    #[error("{} changed on the hub during the download; run it again", shown_name(file))]
    Changed {
        /// The file.
        file: String,
    },
    /// The caller asked to stop.
    #[error("the transfer was cancelled")]
    Cancelled,
    /// No token where one is needed.
    #[error("no Hugging Face token is set")]
    NoToken,
    /// Nothing to upload.
    #[error("{} holds no file to upload", shown_path(.0))]
    NothingToUpload(PathBuf),
    /// The local disk.
    #[error("cannot {doing} {}: {cause}", shown_path(path))]
    Io {
        /// Reading, writing and so on.
        doing: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// A small file could not be written.
    #[error(transparent)]
    Write(#[from] AtomicFileError),
    /// The cache on this machine.
    #[error(transparent)]
    Cache(#[from] HubCacheError),
}

impl HubError {
    /// What to do about it, as a line of its own.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Status { hint, .. } => hint.clone(),
            Self::Offline { .. } => Some("unset HF_HUB_OFFLINE to use the network".to_owned()),
            Self::ManyGguf { files, .. } => {
                files.first().map(|file| format!("choose one: --include {}", shown_name(file)))
            }
            Self::NothingMatches(_) => Some("--include '*' takes every file".to_owned()),
            Self::Busy { .. } => Some("wait for it to end, or stop it; what it has is kept".to_owned()),
            Self::NoToken => Some("set HF_TOKEN to a token with write access".to_owned()),
            _ => None,
        }
    }

    pub(crate) fn io(doing: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> HubError {
        let path = path.into();
        move |cause| Self::Io { doing, path, cause }
    }
}
