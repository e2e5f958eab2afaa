//! What can go wrong with the registry and with queries to it.

use std::io;
use std::path::PathBuf;

use crate::checkpoint::error::{shown_name, shown_path};

/// Why the registry cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// Its database.
    #[error("the model registry {}: {cause}", shown_path(path))]
    Database {
        /// The file.
        path: PathBuf,
        /// What SQLite said.
        cause: rusqlite::Error,
    },
    /// A folder that cannot be listed.
    #[error("cannot read {}: {cause}", shown_path(path))]
    Read {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// A folder to scan that is none.
    #[error("{} is not a folder", shown_path(.0))]
    NotAFolder(PathBuf),
}

/// Why a query means no model.
#[derive(Debug, thiserror::Error)]
pub enum QueryError {
    /// Nothing matches.
    #[error("no model matches `{}`", shown_name(query))]
    NoMatch {
        /// The query.
        query: String,
    },
    /// Several repositories match.
    #[error("`{}` is ambiguous: {}", shown_name(query), repos.join(", "))]
    Ambiguous {
        /// The query.
        query: String,
        /// What it may mean.
        repos: Vec<String>,
    },
}
