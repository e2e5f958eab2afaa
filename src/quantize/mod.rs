//! Quantizing models: the codes of MLX's four modes, which module gets which, and the conversion of a model on disk.

mod affine;
mod allocator;
mod awq;
pub mod calibration;
mod convert;
mod dwq;
mod dynamic_quant;
mod float_codes;
mod gguf_export;
mod gptq;
mod kv_config;
mod method;
mod numbers;
mod pack;
mod recipe;
mod sensitivity;
mod source;
mod step;
mod sweep_results;
mod unpack;

pub use allocator::{Allocation, Budget, Ends, Sensitivity, allocate};
pub use awq::{AwqLayer, AwqOptions, awq};
pub use convert::{
    Action, ConvertError, ConvertOptions, Converted, OnProgress, Progress, convert, fuse, planned_size,
    saved_config, write_as_is,
};
pub use dwq::{DwqOptions, DwqResult, dwq};
pub use dynamic_quant::{DynamicOptions, dynamic_allocation, dynamic_sensitivities};
pub use gguf_export::{GgufExportError, GgufExported, GgufFileType, export_gguf};
pub use gptq::{GptqOptions, gptq};
pub use kv_config::{KvLayer, kv_config};
pub use method::{MethodError, OnStep, Reworked, calibration_batch};
pub use numbers::FloatType;
pub use pack::{Packed, quantize};
pub use recipe::{Predicate, Recipe, RecipeError};
pub use sensitivity::{SweepError, SweepOptions, sweep};
pub use source::{KV_CONFIG_NAME, SourceFiles, SourceModel, block_index};
pub use step::Kept;
pub use sweep_results::is_sensitivities;
pub use unpack::dequantize;
