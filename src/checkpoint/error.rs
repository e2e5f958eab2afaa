//! What can be wrong with a model on disk, and how names from files are shown in messages.

use std::io;
use std::path::{Path, PathBuf};

use super::audit::AuditError;
use super::config_value::FieldError;
use super::quantization::QuantizationError;
use super::safetensors::HeaderError;

/// Why a checkpoint cannot be used. Each message is one line and names the file.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The file cannot be opened, read or mapped.
    #[error("cannot read {}: {cause}", shown_path(file))]
    Read {
        /// The file or directory.
        file: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// A directory, pipe or device where a file is needed.
    #[error("{} is not a regular file", shown_path(file))]
    NotAFile {
        /// The path.
        file: PathBuf,
    },
    /// A JSON file of absurd size.
    #[error("{} has {size} bytes; a JSON file of a model has at most {limit}", shown_path(file))]
    JsonTooLarge {
        /// The file.
        file: PathBuf,
        /// Its size in bytes.
        size: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// Not JSON, or not the JSON that is needed.
    #[error("{}: {message}", shown_path(file))]
    Json {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// A safetensors file whose header does not hold.
    #[error("{}: {cause}", shown_path(file))]
    Header {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        cause: HeaderError,
    },
    /// No weights at all.
    #[error("{} holds no model*.safetensors file", shown_path(directory))]
    NoWeights {
        /// The model's directory.
        directory: PathBuf,
    },
    /// The index names a shard outside the model's directory.
    #[error(
        "{}: tensor `{}` is mapped to `{}`; a shard must be a file name without a path",
        shown_path(index),
        shown_name(tensor),
        shown_name(shard)
    )]
    UnsafeShardName {
        /// The index file.
        index: PathBuf,
        /// The tensor mapped to it.
        tensor: String,
        /// The refused name.
        shard: String,
    },
    /// The index names a shard that is not there.
    #[error(
        "shard `{}` is missing from {}; {} of the index {} in it",
        shown_name(shard),
        shown_path(directory),
        count(*tensors, "tensor"),
        if *tensors == 1 { "lies" } else { "lie" }
    )]
    MissingShard {
        /// The model's directory.
        directory: PathBuf,
        /// The missing file.
        shard: String,
        /// How many tensors the index maps to it.
        tensors: usize,
    },
    /// The index promises a tensor that its shard does not hold.
    #[error(
        "{}: tensor `{}` is listed in the index but not in this shard",
        shown_path(shard),
        shown_name(tensor)
    )]
    NotInShard {
        /// The shard.
        shard: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// Two shards hold a tensor of one name.
    #[error("tensor `{}` is in both {} and {}", shown_name(tensor), shown_path(first), shown_path(second))]
    InTwoShards {
        /// The tensor.
        tensor: String,
        /// The shard that was read first.
        first: PathBuf,
        /// The other one.
        second: PathBuf,
    },
    /// A field of the config is missing or of the wrong kind.
    #[error("{origin}: {cause}")]
    Field {
        /// `config.json`, or what the config was made from.
        origin: String,
        /// The field and what is wrong with it.
        cause: FieldError,
    },
    /// The model wants to run Python code of its own.
    #[error(
        "{origin}: the model needs its own Python code (`model_file`: `{}`), which is never run; use a \
         checkpoint of a supported family",
        shown_name(model_file)
    )]
    CustomCode {
        /// `config.json`, or what the config was made from.
        origin: String,
        /// The Python file it names.
        model_file: String,
    },
    /// A quantization that cannot be read.
    #[error("{origin}: {cause}")]
    Quantization {
        /// `config.json`, or what the config was made from.
        origin: String,
        /// What is wrong with it.
        cause: QuantizationError,
    },
    /// The tensors are not those that the family needs.
    #[error(transparent)]
    Audit(#[from] AuditError),
}

const LONGEST_NAME: usize = 160;
const LONGEST_MESSAGE: usize = 300;

/// A number of things in words: `1 tensor`, `2 tensors`.
pub(crate) fn count(number: usize, thing: &str) -> String {
    if number == 1 { format!("1 {thing}") } else { format!("{number} {thing}s") }
}

/// A name from a file as messages show it: on one line, without control characters, of bounded length.
pub(crate) fn shown_name(name: &str) -> String {
    shorten(name, LONGEST_NAME)
}

/// A parser's message, on one line and of bounded length.
pub(crate) fn shown_message(message: &str) -> String {
    shorten(message, LONGEST_MESSAGE)
}

/// A path as messages show it: on one line, never shortened.
pub(crate) fn shown_path(path: &Path) -> String {
    shorten(&path.to_string_lossy(), usize::MAX)
}

fn shorten(text: &str, longest: usize) -> String {
    let mut shown = String::new();
    for (count, character) in text.chars().enumerate() {
        if count == longest {
            shown.push('…');
            break;
        }
        if character.is_control() {
            shown.extend(character.escape_default());
        } else {
            shown.push(character);
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_shown_on_one_line() {
        assert_eq!(shown_name("a\nb\u{1b}[31m"), "a\\nb\\u{1b}[31m");
        assert_eq!(shown_name("größe"), "größe");
    }

    #[test]
    fn long_names_are_cut() {
        let shown = shown_name(&"x".repeat(1_000_000));
        assert_eq!(shown.chars().count(), LONGEST_NAME + 1);
        assert!(shown.ends_with('…'));
    }
}
