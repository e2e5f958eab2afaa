//! Why adapters and whole weights are refused.

use std::path::PathBuf;

use crate::checkpoint::CheckpointError;
use crate::checkpoint::error::{shown_name, shown_path};
use crate::mlx;

/// Why an adapter cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AdapterError {
    /// Nothing there.
    #[error(
        "{} is no adapter: it has neither adapters.safetensors nor adapter_model.safetensors",
        shown_path(path)
    )]
    NoWeights {
        /// The directory.
        path: PathBuf,
    },
    /// No adapter_config.json.
    #[error("{} has no adapter_config.json", shown_path(path))]
    NoConfig {
        /// The directory.
        path: PathBuf,
    },
    /// A file.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The config.
    #[error("adapter_config.json of {}: {problem}", shown_path(path))]
    Config {
        /// The directory.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// One of a pair.
    #[error(
        "{}: the adapter has only one of lora_a and lora_b for `{}`",
        shown_path(path),
        shown_name(module)
    )]
    Half {
        /// The file.
        path: PathBuf,
        /// The module.
        module: String,
    },
    /// Tensors that are no part of a LoRA or DoRA adapter.
    #[error(
        "{}: not part of a LoRA or DoRA adapter of linear modules or embeddings: {names}",
        shown_path(path)
    )]
    Foreign {
        /// The file.
        path: PathBuf,
        /// Their names.
        names: String,
    },
    /// Shapes that do not fit the model.
    #[error(
        "the adapter does not fit the model: `{}` maps {model_in} to {model_out}, the adapter has lora_a {a:?} and \
         lora_b {b:?}; was it trained for another base model?",
        shown_name(module)
    )]
    Shape {
        /// The module.
        module: String,
        /// Features into the module.
        model_in: i32,
        /// Features out of it.
        model_out: i32,
        /// Shape of the first factor as stored.
        a: Vec<usize>,
        /// Shape of the second.
        b: Vec<usize>,
    },
    /// Factors that are no numbers to compute with.
    #[error("the adapter's tensors for `{}` hold {dtype}, not floating-point numbers", shown_name(module))]
    Type {
        /// The module.
        module: String,
        /// What they hold.
        dtype: &'static str,
    },
    /// Modules that the model does not have.
    #[error(
        "the adapter does not fit the model, which has no linear module {names}; was it trained for another base model?"
    )]
    Unmatched {
        /// Their names.
        names: String,
    },
    /// A file of whole weights without any.
    #[error("{} has no tensors", shown_path(path))]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// Whole weights that the model does not have.
    #[error(
        "{}: the model has no tensor {names}; were the weights trained for another base model?",
        shown_path(path)
    )]
    UnknownTensors {
        /// The file.
        path: PathBuf,
        /// Their names.
        names: String,
    },
    /// Whole weights of another shape.
    #[error(
        "{}: `{}` has shape {found:?}, and the model's has {expected:?}; was it trained for another base model?",
        shown_path(path),
        shown_name(tensor)
    )]
    TensorShape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape.
        found: Vec<usize>,
        /// The model's.
        expected: Vec<usize>,
    },
    /// Whole weights for a packed one.
    #[error(
        "{}: `{}` is quantized in the model and cannot be replaced; name the model that was trained",
        shown_path(path),
        shown_name(tensor)
    )]
    Packed {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// Whole weights where adapters are switched on and off.
    #[error(
        "whole weights (`fine_tune_type` is `full`) replace the model's and cannot be switched on and off; load the \
         model with them, or fuse them into it"
    )]
    Mount,
    /// Several at once, one of them with magnitudes.
    #[error("DoRA adapters cannot be stacked on others; use one alone, or fuse it into the model")]
    Stack,
    /// MLX failed.
    #[error(transparent)]
    Mlx(#[from] mlx::Error),
}
