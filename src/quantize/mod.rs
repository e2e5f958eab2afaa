//! Quantizing models: the codes of MLX's four modes, which module gets which, and the conversion of a model on disk.

mod affine;
mod float_codes;
mod numbers;
mod pack;

pub use numbers::FloatType;
pub use pack::{Packed, quantize};
