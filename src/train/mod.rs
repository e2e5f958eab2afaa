//! Fine-tuning: rows to batches, losses and their gradients, optimizers, and the loop that puts them together.
//!
//! [`dataset`] makes tokens of rows, [`batches`] puts them into an order and pads them. [`parameters`] says what is
//! trained and where it lies in the network; [`network`] runs the model over a batch and takes gradients, in as little
//! memory as it is told to; [`losses`] are what is made small. [`trainer`] is the loop, which tells its caller what
//! happens ([`report`]) and can stop and go on ([`checkpoint`]). With MLX's own kernels the arithmetic is that of
//! `mlx_lm.lora`, operation for operation.

pub mod batches;
pub mod checkpoint;
pub mod dataset;
pub mod losses;
pub mod network;
pub mod optimizers;
pub mod output;
pub mod parameters;
mod ranks;
pub mod report;
pub mod rows;
pub mod trainer;
