//! Models on disk: HF snapshots (config.json, safetensors shards) and GGUF files, read without MLX.

pub mod gguf;
pub mod tensor;
