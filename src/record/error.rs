//! What can go wrong with the database of measurements.

use std::io;
use std::path::PathBuf;

use crate::checkpoint::error::shown_path;

/// Why the database cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// Its folder.
    #[error("cannot create the folder of the measurements {}: {cause}", shown_path(path))]
    Folder {
        /// The database.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// A file that is something else.
    #[error(
        "{} is not a database of measurements; move it away or set MLX_BUN_CACHE to another folder",
        shown_path(path)
    )]
    NotADatabase {
        /// The file.
        path: PathBuf,
    },
    /// SQLite.
    #[error("the measurements {}: {cause}", shown_path(path))]
    Database {
        /// The file.
        path: PathBuf,
        /// What SQLite said.
        cause: rusqlite::Error,
    },
    /// Another program has it open while it is to be archived.
    #[error("{} is in use by another program; try again when it has ended", shown_path(path))]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// Archiving.
    #[error("cannot rename {} to {}: {cause}", shown_path(path), shown_path(to))]
    Archive {
        /// The file.
        path: PathBuf,
        /// Its new name.
        to: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
}
