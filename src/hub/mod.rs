//! The Hugging Face hub over the network: what a repository holds, fetching it into the cache that every Hugging
//! Face program shares, and sending a folder to it.
//!
//! Downloads can be cut at any byte and at any instruction: a file grows as `.incomplete`, is checked against its
//! hash and renamed; a snapshot counts once its ref is written, which is last.

mod digest;
mod download;
mod error;
mod http;
mod listing;
mod local_dir;
pub mod lock;
pub mod patterns;
mod progress;
mod settings;
mod store;
mod transfer;
mod upload;
mod url;

pub use digest::ContentId;
pub use download::{DownloadRequest, Downloaded};
pub use error::HubError;
pub use http::{HubClient, trusting};
pub use listing::{RepoFile, RepoListing};
pub use progress::TransferProgress;
pub use settings::{HubSettings, Retry, Token};
pub use upload::{UploadRequest, Uploaded};
