//! MLX arrays and operations: a thin, complete layer over mlx-c.
//!
//! Every operation is lazy, runs on the calling thread's default stream and returns a [`Result`]; nothing is
//! computed before [`eval`] or [`async_eval`]. Arrays belong to the thread that made them (they are neither
//! `Send` nor `Sync`). Names and argument orders follow `mlx.core`. Why this layer exists beside mlx-rs:
//! docs/design/mlx-binding.md.

mod array;
pub mod autograd;
mod compile;
mod compile_folder;
pub mod composed;
pub mod cpu_ops;
mod device;
mod device_info;
mod dtype;
mod error;
pub mod fast;
mod gather;
pub mod kernel;
mod linalg;
pub mod memory;
mod ops;
mod quantized;
pub mod random;
mod shape;
mod tensor;

pub use array::Array;
pub use compile::{Compiled, compile_available, set_compile};
pub use compile_folder::CompileFolder;
pub use device::{DeviceKind, async_eval, default_device, eval, set_default_device, synchronize, version};
pub use device_info::{DeviceInfo, device_info};
pub use dtype::Dtype;
pub use error::{Error, Result};
pub use gather::{gather_mm, gather_qmm};
pub use mlx_bun_cpu as cpu;
pub use quantized::{dequantize, quantize, quantized_matmul};
