//! Rows of a data set, and what they are to a model: tokens, and where the part begins that is to be learned.

mod files;
mod parquet;
mod rows;
mod tokens;

use std::path::PathBuf;

pub use files::{Splits, read};
pub use rows::{Content, Format, Row};
pub use tokens::{Learn, Preparation, Prepared, prepare};

use crate::checkpoint::error::shown_path;
use crate::checkpoint::json_lines::JsonLinesError;
use crate::perplexity;

/// Tokens that are learned from.
#[derive(Clone, Debug, PartialEq)]
pub struct Sequence {
    /// All of them.
    pub tokens: Vec<u32>,
    /// How many of them are only read; the rest is learned. Where everything is learned it is zero.
    pub prompt: usize,
}

impl Sequence {
    /// Tokens that are predicted and count.
    pub fn learned(&self) -> usize {
        self.tokens.len().saturating_sub(self.prompt.max(1))
    }
}

/// A row as a model sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct Example {
    /// One; or two, the answer that is preferred and the one that is not.
    pub sequences: Vec<Sequence>,
    /// Fields of the row, by which mlx-lm sorts.
    pub fields: usize,
}

impl Example {
    /// Tokens of its longest sequence.
    pub fn length(&self) -> usize {
        self.sequences.iter().map(|sequence| sequence.tokens.len()).max().unwrap_or(0)
    }
}

/// Why there is nothing to learn from.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A file, or a row of one.
    #[error(transparent)]
    File(#[from] JsonLinesError),
    /// A Parquet file.
    #[error("{}: {problem}", shown_path(path))]
    Parquet {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A row of a Parquet file.
    #[error("{}, row {row}: {problem}", shown_path(path))]
    ParquetRow {
        /// The file.
        path: PathBuf,
        /// Its row, from 1.
        row: usize,
        /// What is wrong.
        problem: String,
    },
    /// No such data.
    #[error("{} is neither a folder nor a .jsonl or .parquet file", shown_path(path))]
    NotData {
        /// What was given.
        path: PathBuf,
    },
    /// A folder without it.
    #[error("{} has no {name}.jsonl and no {name}.parquet", shown_path(path))]
    NoSplit {
        /// The folder.
        path: PathBuf,
        /// The split.
        name: &'static str,
    },
    /// A file without rows.
    #[error("{} has no rows", shown_path(path))]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// A row that cannot be made tokens of.
    #[error("{}, line {line}: {cause}", shown_path(path))]
    Row {
        /// The file.
        path: PathBuf,
        /// Its line, from 1.
        line: usize,
        /// What is wrong.
        cause: perplexity::DatasetError,
    },
    /// Texts whose prompt is to be masked.
    #[error(
        "{}, line {line}: a row with `text` has no prompt to mask; use `messages` or `prompt` and `completion`",
        shown_path(path)
    )]
    NoPrompt {
        /// The file.
        path: PathBuf,
        /// Its line, from 1.
        line: usize,
    },
    /// Rows of the wrong kind.
    #[error("{}, line {line}: {problem}", shown_path(path))]
    Kind {
        /// The file.
        path: PathBuf,
        /// Its line, from 1.
        line: usize,
        /// What is wrong.
        problem: String,
    },
}
