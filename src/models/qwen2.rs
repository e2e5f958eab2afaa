//! Qwen2 and Qwen2.5 (mlx-lm's `models/qwen2.py`): Llama with biases on q, k and v.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::Model;
use super::fused::Fused;
use super::layers::{AttentionArgs, Decoder, Gate, GatedMlpArgs, Head, PreNormBlock};
use super::loader::{LoadError, Loader, NormKind, layer_count};
use super::rope::{Rope, RopeArgs};
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
    #[serde(default = "max_positions")]
    max_position_embeddings: i32,
    #[serde(default = "rope_theta")]
    rope_theta: f64,
    #[serde(default)]
    rope_traditional: bool,
    rope_scaling: Option<Map<String, Value>>,
    #[serde(default = "tied")]
    tie_word_embeddings: bool,
}

fn max_positions() -> i32 {
    32_768
}

fn rope_theta() -> f64 {
    1_000_000.0
}

fn tied() -> bool {
    true
}

/// Loads the family.
pub fn load(args: &ModelArgs, loader: &mut Loader) -> Result<Box<dyn Model>, LoadError> {
    let head_dim = args.hidden_size / args.num_attention_heads.max(1);
    let attention = AttentionArgs {
        hidden_size: args.hidden_size,
        n_heads: args.num_attention_heads,
        n_kv_heads: args.num_key_value_heads,
        head_dim,
        scale: f64::from(head_dim).powf(-0.5) as f32,
        qkv_bias: true,
        o_bias: false,
        qk_norm: None,
        rope: Rope::new(&RopeArgs {
            dims: head_dim,
            base: args.rope_theta,
            traditional: args.rope_traditional,
            scaling: args.rope_scaling.as_ref(),
            max_positions: Some(args.max_position_embeddings),
        })?,
    };
    let mlp = GatedMlpArgs {
        hidden_size: args.hidden_size,
        intermediate_size: args.intermediate_size,
        bias: false,
        gate: Gate::SwiGlu,
    };
    let norm = NormKind::Rms { eps: args.rms_norm_eps };
    loader.ignore(|name| name.contains("self_attn.rotary_emb.inv_freq"));
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
        head_dim,
        makes_own_cache: false,
        adapters: loader.adapters(),
        fused: Fused::default(),
    }))
}
