//! What can go wrong with a tokenizer.

use std::path::PathBuf;

/// An error from loading or using a tokenizer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// The model directory has no tokenizer.json.
    #[error("`{}` is missing: {hint}", path.display())]
    Missing {
        /// The file looked for.
        path: PathBuf,
        /// What can be done, from what else the directory holds.
        hint: &'static str,
    },
    /// A file exists and cannot be read.
    #[error("cannot read `{}`: {cause}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        cause: std::io::Error,
    },
    /// A file is not JSON.
    #[error("`{file}` is {problem}; download it again")]
    Json {
        /// The file.
        file: String,
        /// Where the text breaks off or goes wrong.
        problem: String,
    },
    /// A file is JSON and not what a tokenizer needs.
    #[error("`{file}` cannot be used: {reason}")]
    Invalid {
        /// The file.
        file: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A token that the vocabulary does not have.
    #[error("`{0}` is not a token of this tokenizer; give one of its tokens or a token id")]
    UnknownToken(String),
    /// Tokens have no bytes of their own.
    #[error(
        "the tokenizer's `{0}` decoder joins tokens by their neighbours; grammars need a byte-level or SentencePiece tokenizer"
    )]
    NoBytes(String),
    /// The tokenizer failed on a text.
    #[error("cannot tokenize the text: {0}")]
    Encode(String),
}
