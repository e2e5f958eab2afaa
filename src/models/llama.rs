//! Llama, Mistral, SmolLM, MiniCPM5 (mlx-lm's `models/llama.py`).

use serde::Deserialize;
use serde_json::{Map, Value};

use super::fused::Fused;
use super::layers::{AttentionArgs, Decoder, Gate, GatedMlpArgs, Head, PreNormBlock};
use super::loader::{LoadError, Loader, NormKind, layer_count};
use super::rope::{Rope, RopeArgs};
use super::{ConfigError, Model, sliding};
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
    head_dim: Option<i32>,
    max_position_embeddings: Option<i32>,
    num_key_value_heads: Option<i32>,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    #[serde(default = "rope_theta")]
    rope_theta: f64,
    #[serde(default)]
    rope_traditional: bool,
    rope_scaling: Option<Map<String, Value>>,
    #[serde(default = "tied")]
    tie_word_embeddings: bool,
    layer_types: Option<Vec<String>>,
    sliding_window: Option<i32>,
}

fn rope_theta() -> f64 {
    10_000.0
}

fn tied() -> bool {
    true
}

impl ModelArgs {
    fn attention(&self) -> Result<AttentionArgs, ConfigError> {
        let head_dim = self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads.max(1));
        Ok(AttentionArgs {
            hidden_size: self.hidden_size,
            n_heads: self.num_attention_heads,
            n_kv_heads: self.num_key_value_heads.unwrap_or(self.num_attention_heads),
            head_dim,
            scale: f64::from(head_dim).powf(-0.5) as f32,
            qkv_bias: self.attention_bias,
            o_bias: self.attention_bias,
            qk_norm: None,
            rope: Rope::new(&RopeArgs {
                dims: head_dim,
                base: self.rope_theta,
                traditional: self.rope_traditional,
                scaling: self.rope_scaling.as_ref(),
                max_positions: self.max_position_embeddings,
            })?,
        })
    }

    fn mlp(&self) -> GatedMlpArgs {
        GatedMlpArgs {
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            bias: self.mlp_bias,
            gate: Gate::SwiGlu,
        }
    }

    fn layer_kinds(&self) -> Result<Vec<LayerKind>, ConfigError> {
        let Some(types) = &self.layer_types else { return Ok(vec![LayerKind::Full; self.num_hidden_layers]) };
        if !types.iter().any(|name| name == "full_attention") {
            return Err(ConfigError::new("layer_types", "must name `full_attention` at least once"));
        }
        let kind = |name: &String| match (name.as_str(), self.sliding_window) {
            ("sliding_attention", Some(window)) => sliding(window),
            ("sliding_attention", None) => {
                Err(ConfigError::new("sliding_window", "is needed by `layer_types`"))
            }
            _ => Ok(LayerKind::Full),
        };
        types.iter().map(kind).collect()
    }
}

/// Loads the family.
pub fn load(args: &ModelArgs, loader: &mut Loader) -> Result<Box<dyn Model>, LoadError> {
    let kinds = args.layer_kinds()?;
    let norm = NormKind::Rms { eps: args.rms_norm_eps };
    let (attention, mlp) = (args.attention()?, args.mlp());
    loader.ignore(|name| name.contains("self_attn.rotary_emb.inv_freq"));
    Ok(Box::new(Decoder {
        embed_tokens: loader.embedding("model.embed_tokens", args.vocab_size, args.hidden_size)?,
        embed_scale: None,
        layers: (0..kinds.len())
            .map(|index| {
                PreNormBlock::load(attention.clone(), mlp, norm, loader, &format!("model.layers.{index}"))
            })
            .collect::<Result<_, _>>()?,
        norm: loader.norm("model.norm", args.hidden_size, norm)?,
        head: Head::load(args.tie_word_embeddings, args.hidden_size, args.vocab_size, loader)?,
        kinds,
        max_positions: args.max_position_embeddings,
        vocab_size: args.vocab_size,
        head_dim: attention.head_dim,
        makes_own_cache: true,
        adapters: loader.adapters(),
        fused: Fused::default(),
    }))
}
