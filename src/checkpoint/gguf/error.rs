//! What can be wrong with a GGUF file.

use std::path::PathBuf;

/// A GGUF file that cannot be loaded, and why.
#[derive(Debug, thiserror::Error)]
#[error("cannot load {}: {fault}", path.display())]
pub struct GgufError {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub fault: Fault,
}

/// The reasons for which a GGUF file is refused. Names out of the file are quoted and escaped, so that a
/// message stays one line.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The file cannot be opened or mapped.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// The magic is absent.
    #[error("it is not a GGUF file (it does not start with `GGUF`)")]
    NotGguf,
    /// Written for a big-endian machine.
    #[error("it is big-endian; convert it with `gguf-convert-endian` of PyPI's gguf")]
    BigEndian,
    /// A version this reader does not know.
    #[error(
        "GGUF version {0} is not supported, only 2 and 3; convert the model again with a recent llama.cpp"
    )]
    Version(u32),
    /// The file ends inside something, or something claims more than the file holds.
    #[error("the file ends at byte {length}, inside {what}; it is cut short or damaged")]
    Truncated {
        /// What was being read.
        what: &'static str,
        /// Bytes there are.
        length: usize,
    },
    /// A count or size beyond what any model needs.
    #[error("{what} is {value}, above the limit of {limit}")]
    TooLarge {
        /// What is counted.
        what: &'static str,
        /// The value in the file.
        value: u64,
        /// The largest accepted.
        limit: u64,
    },
    /// A metadata key or tensor name that is not UTF-8.
    #[error("{what} at byte {at} is not UTF-8")]
    NotUtf8 {
        /// What was being read.
        what: &'static str,
        /// Where it lies.
        at: usize,
    },
    /// The same metadata key twice.
    #[error("metadata key {0:?} occurs twice")]
    DuplicateKey(String),
    /// A metadata value that cannot be used.
    #[error("metadata key {key:?} {problem}")]
    Key {
        /// The key.
        key: String,
        /// What is wrong, as a predicate.
        problem: String,
    },
    /// A metadata key the model needs.
    #[error("metadata key {0:?} is missing")]
    MissingKey(String),
    /// The same tensor name twice.
    #[error("tensor {0:?} occurs twice")]
    DuplicateTensor(String),
    /// A tensor that cannot be used.
    #[error("tensor {name:?} {problem}")]
    Tensor {
        /// Its name in the file.
        name: String,
        /// What is wrong, as a predicate.
        problem: String,
    },
    /// Two tensors that claim the same bytes.
    #[error("tensors {first:?} and {second:?} overlap")]
    Overlap {
        /// The one that starts first.
        first: String,
        /// The one that starts inside it.
        second: String,
    },
    /// A tensor the model needs.
    #[error("tensor {0:?} is missing")]
    MissingTensor(&'static str),
    /// Tensors that the architecture has no place for.
    #[error("architecture {architecture} has no place for {names}")]
    UnknownTensors {
        /// The architecture.
        architecture: &'static str,
        /// The first few names, quoted, and how many more there are.
        names: String,
    },
    /// `general.architecture` names none that is supported.
    #[error("architecture {0:?} is not supported; supported are llama, qwen2, qwen3 and gemma3")]
    Architecture(String),
    /// One of several files that make up a model.
    #[error("it is one of {0} parts of a split model; join them with `llama-gguf-split --merge`")]
    Split(u64),
    /// The vocabulary, merges or special tokens cannot make a tokenizer.
    #[error("its tokenizer cannot be used: {0}")]
    Tokenizer(String),
}

impl Fault {
    pub(super) fn key(key: &str, problem: impl Into<String>) -> Self {
        Self::Key { key: key.to_owned(), problem: problem.into() }
    }

    pub(super) fn tensor(name: &str, problem: impl Into<String>) -> Self {
        Self::Tensor { name: name.to_owned(), problem: problem.into() }
    }
}
