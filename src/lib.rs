//! The mlx-bun engine: loads language models and generates text with MLX.
//!
//! Layers, each knowing only those below it: [`checkpoint`] and [`tokenizer`] read what a model ships; [`mlx`] is
//! the array library; [`models`] holds one file a family over [`cache`]; [`sampling`] picks tokens; [`structured`]
//! finds tool calls in text and keeps tokens to grammars; [`generate`] drives them, [`scheduler`] for many requests at
//! once; [`load`] brings a model's parts together; [`train`] fine-tunes; [`hub`] fetches and sends models, [`registry`]
//! knows those on this machine, [`record`] keeps what was measured. The engine parses no arguments, serves no HTTP and
//! prints nothing.

pub mod cache;
pub mod checkpoint;
pub mod generate;
pub mod hub;
pub mod levers;
pub mod load;
pub mod lora;
pub mod mlx;
pub mod models;
pub mod perplexity;
pub mod quantize;
pub mod record;
pub mod registry;
pub mod sampling;
pub mod scheduler;
pub mod structured;
pub mod tokenizer;
pub mod train;
