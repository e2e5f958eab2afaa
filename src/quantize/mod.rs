//! Quantizing models: the codes of MLX's four modes, which module gets which, and the conversion of a model on disk.

mod affine;
mod allocator;
pub mod calibration;
mod convert;
mod float_codes;
mod kv_config;
mod numbers;
mod pack;
mod recipe;
mod sensitivity;
mod source;
mod step;
mod unpack;

pub use allocator::{Allocation, Sensitivity, allocate};
pub use convert::{
    Action, ConvertError, ConvertOptions, Converted, OnProgress, Progress, convert, fuse, saved_config,
};
pub use kv_config::{KvLayer, kv_config};
pub use numbers::FloatType;
pub use pack::{Packed, quantize};
pub use recipe::{Predicate, Recipe, RecipeError};
pub use sensitivity::{SweepError, SweepOptions, sweep};
pub use source::{KV_CONFIG_NAME, SourceFiles, SourceModel, block_index};
pub use step::Kept;
pub use unpack::dequantize;
