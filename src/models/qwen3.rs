//! Qwen3, dense (mlx-lm's `models/qwen3.py`): each head's queries and keys are normed before the rotation.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::fused::Fused;
use super::layers::{AttentionArgs, Decoder, Gate, GatedMlpArgs, Head, PreNormBlock};
use super::loader::{LoadError, Loader, NormKind, layer_count};
use super::rope::{Rope, RopeArgs};
use super::{ConfigError, Model};
use crate::cache::LayerKind;

/// `ModelArgs`.
#[derive(Clone, Debug, Deserialize)]
pub struct ModelArgs {
    hidden_size: i32,
    #[serde(deserialize_with = "layer_count")]
    num_hidden_layers: usize,
    intermediate_size: i32,
    num_attention_heads: i32,
    rms_norm_eps: f32,
    vocab_size: i32,
    num_key_value_heads: i32,
    max_position_embeddings: i32,
    head_dim: i32,
    tie_word_embeddings: bool,
    rope_theta: Option<f64>,
    rope_scaling: Option<Map<String, Value>>,
    /// transformers 5 nests `rope_theta` and the scaling in here.
    rope_parameters: Option<Map<String, Value>>,
}

impl ModelArgs {
    fn rope(&self) -> Result<Rope, ConfigError> {
        let nested = self.rope_parameters.as_ref().filter(|map| !map.is_empty());
        let theta = nested.and_then(|map| map.get("rope_theta")).and_then(Value::as_f64);
        Rope::new(&RopeArgs {
            dims: self.head_dim,
            base: self
                .rope_theta
                .or(theta)
                .ok_or_else(|| ConfigError::new("rope_theta", "is missing, here and in `rope_parameters`"))?,
            traditional: false,
            scaling: self.rope_scaling.as_ref().or(nested),
            max_positions: Some(self.max_position_embeddings),
        })
    }
}

/// Loads the family.
pub fn load(args: &ModelArgs, loader: &mut Loader) -> Result<Box<dyn Model>, LoadError> {
    let norm = NormKind::Rms { eps: args.rms_norm_eps };
    let attention = AttentionArgs {
        hidden_size: args.hidden_size,
        n_heads: args.num_attention_heads,
        n_kv_heads: args.num_key_value_heads,
        head_dim: args.head_dim,
        scale: f64::from(args.head_dim).powf(-0.5) as f32,
        qkv_bias: false,
        o_bias: false,
        qk_norm: Some(norm),
        rope: args.rope()?,
    };
    let mlp = GatedMlpArgs {
        hidden_size: args.hidden_size,
        intermediate_size: args.intermediate_size,
        bias: false,
        gate: Gate::SwiGlu,
    };
    Ok(Box::new(Decoder {
        embed_tokens: loader.embedding("model.embed_tokens", args.vocab_size, args.hidden_size)?,
        embed_scale: None,
        layers: (0..args.num_hidden_layers)
            .map(|index| {
                PreNormBlock::load(attention.clone(), mlp, norm, loader, &format!("model.layers.{index}"))
            })
            .collect::<Result<_, _>>()?,
        norm: loader.norm("model.norm", args.hidden_size, norm)?,
        head: Head::load(args.tie_word_embeddings, args.hidden_size, args.vocab_size, loader)?,
        kinds: vec![LayerKind::Full; args.num_hidden_layers],
        max_positions: Some(args.max_position_embeddings),
        vocab_size: args.vocab_size,
        head_dim: args.head_dim,
        makes_own_cache: false,
        adapters: loader.adapters(),
        fused: Fused::default(),
    }))
}
