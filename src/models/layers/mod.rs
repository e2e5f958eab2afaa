//! What families share. A family file picks from these and keeps what is its own.

mod attention;
mod decoder;
mod linear;
mod mlp;
mod norm;

pub(crate) use attention::attention_mask;
pub use attention::{Attention, AttentionArgs, Context};
pub use decoder::{Block, Decoder, Head, PreNormBlock};
pub use linear::{Embedding, Linear, Weight};
pub use mlp::{Gate, GatedMlp, GatedMlpArgs};
pub use norm::RmsNorm;
