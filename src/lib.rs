//! The mlx-bun engine: loads language models and generates text with MLX.
//!
//! Layers, each knowing only those below it: [`checkpoint`] and [`tokenizer`] read what a model ships; [`mlx`] is
//! the array library; [`models`] holds one file a family over [`cache`]; [`sampling`] picks tokens; [`generate`]
//! drives them; [`load`] brings a model's parts together. The engine parses no arguments, speaks no HTTP and prints nothing.

pub mod cache;
pub mod checkpoint;
pub mod generate;
pub mod load;
pub mod lora;
pub mod mlx;
pub mod models;
pub mod perplexity;
pub mod quantize;
pub mod sampling;
pub mod tokenizer;
