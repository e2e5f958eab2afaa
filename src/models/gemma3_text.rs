//! Gemma 3, text (mlx-lm's `models/gemma3_text.py`): sliding and full layers in turn, four norms a block.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::activations::clip_residual;
use super::fused::{BlockDescription, Fused};
use super::layers::{
    Attention, AttentionArgs, Block, Context, Decoder, Gate, GatedMlp, GatedMlpArgs, Head, RmsNorm,
};
use super::loader::{LoadError, Loader, NormKind, layer_count};
use super::rope::{Rope, RopeArgs};
use super::{ConfigError, Model, sliding};
use crate::cache::LayerKind;
use crate::mlx::{Array, Dtype, Result};

/// `ModelArgs`.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
pub struct ModelArgs {
    hidden_size: i32,
    #[serde(deserialize_with = "layer_count")]
    num_hidden_layers: usize,
    intermediate_size: i32,
    num_attention_heads: i32,
    head_dim: i32,
    rms_norm_eps: f32,
    vocab_size: i32,
    num_key_value_heads: i32,
    rope_theta: f64,
    rope_local_base_freq: f64,
    query_pre_attn_scalar: f64,
    sliding_window: i32,
    sliding_window_pattern: usize,
    max_position_embeddings: i32,
    rope_scaling: Option<Map<String, Value>>,
}

impl Default for ModelArgs {
    fn default() -> Self {
        Self {
            hidden_size: 1152,
            num_hidden_layers: 26,
            intermediate_size: 6912,
            num_attention_heads: 4,
            head_dim: 256,
            rms_norm_eps: 1e-6,
            vocab_size: 262_144,
            num_key_value_heads: 1,
            rope_theta: 1_000_000.0,
            rope_local_base_freq: 10_000.0,
            query_pre_attn_scalar: 256.0,
            sliding_window: 512,
            sliding_window_pattern: 6,
            max_position_embeddings: 32_768,
            rope_scaling: None,
        }
    }
}

impl ModelArgs {
    fn layer_kind(&self, index: usize) -> std::result::Result<LayerKind, ConfigError> {
        if (index + 1).is_multiple_of(self.sliding_window_pattern.max(1)) {
            Ok(LayerKind::Full)
        } else {
            sliding(self.sliding_window)
        }
    }

    fn attention(&self, kind: LayerKind) -> std::result::Result<AttentionArgs, LoadError> {
        let local = RopeArgs {
            dims: self.head_dim,
            base: self.rope_local_base_freq,
            traditional: false,
            scaling: None,
            max_positions: None,
        };
        let rope = match kind {
            LayerKind::Sliding { .. } => local,
            LayerKind::Full => RopeArgs {
                base: self.rope_theta,
                scaling: self.rope_scaling.as_ref(),
                max_positions: Some(self.max_position_embeddings),
                ..local
            },
        };
        Ok(AttentionArgs {
            hidden_size: self.hidden_size,
            n_heads: self.num_attention_heads,
            n_kv_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
            scale: self.query_pre_attn_scalar.powf(-0.5) as f32,
            qkv_bias: false,
            o_bias: false,
            qk_norm: Some(self.norm()),
            rope: Rope::new(&rope)?,
        })
    }

    fn norm(&self) -> NormKind {
        NormKind::GemmaRms { eps: self.rms_norm_eps }
    }
}

struct TransformerBlock {
    self_attn: Attention,
    mlp: GatedMlp,
    input_layernorm: RmsNorm,
    post_attention_layernorm: RmsNorm,
    pre_feedforward_layernorm: RmsNorm,
    post_feedforward_layernorm: RmsNorm,
}

impl TransformerBlock {
    fn load(args: &ModelArgs, index: usize, loader: &mut Loader) -> std::result::Result<Self, LoadError> {
        let path = format!("model.layers.{index}");
        let mlp = GatedMlpArgs {
            hidden_size: args.hidden_size,
            intermediate_size: args.intermediate_size,
            bias: false,
            gate: Gate::GeGlu,
        };
        let attention = args.attention(args.layer_kind(index)?)?;
        let self_attn = Attention::load(attention, loader, &format!("{path}.self_attn"))?;
        let mlp = GatedMlp::load(mlp, loader, &format!("{path}.mlp"))?;
        let mut norm = |name: &str| loader.norm(&format!("{path}.{name}"), args.hidden_size, args.norm());
        Ok(Self {
            self_attn,
            mlp,
            input_layernorm: norm("input_layernorm")?,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            pre_feedforward_layernorm: norm("pre_feedforward_layernorm")?,
            post_feedforward_layernorm: norm("post_feedforward_layernorm")?,
        })
    }
}

impl Block for TransformerBlock {
    fn forward(&self, x: &Array, context: Context) -> Result<Array> {
        let r = self.self_attn.forward(&self.input_layernorm.forward(x)?, context)?;
        let h = clip_residual(x, &self.post_attention_layernorm.forward(&r)?)?;
        let r = self.mlp.forward(&self.pre_feedforward_layernorm.forward(&h)?)?;
        clip_residual(&h, &self.post_feedforward_layernorm.forward(&r)?)
    }

    fn describe(&self) -> Option<BlockDescription<'_>> {
        Some(BlockDescription {
            input_norm: &self.input_layernorm,
            attention: &self.self_attn,
            post_attention_norm: Some(&self.post_attention_layernorm),
            mlp_norm: &self.pre_feedforward_layernorm,
            mlp: &self.mlp,
            post_mlp_norm: Some(&self.post_feedforward_layernorm),
        })
    }
}

/// Loads the family.
pub fn load(args: &ModelArgs, loader: &mut Loader) -> std::result::Result<Box<dyn Model>, LoadError> {
    // The scale is rounded to bfloat16 whatever the model's type, then cast.
    let embed_scale = Array::scalar(f64::from(args.hidden_size).sqrt() as f32, Dtype::Bfloat16)?;
    let tied = !loader.contains("lm_head.weight");
    Ok(Box::new(Decoder {
        embed_tokens: loader.embedding("model.embed_tokens", args.vocab_size, args.hidden_size)?,
        embed_scale: Some(embed_scale),
        layers: (0..args.num_hidden_layers)
            .map(|index| TransformerBlock::load(args, index, loader))
            .collect::<std::result::Result<_, _>>()?,
        norm: loader.norm("model.norm", args.hidden_size, args.norm())?,
        head: Head::load(tied, args.hidden_size, args.vocab_size, loader)?,
        kinds: (0..args.num_hidden_layers)
            .map(|index| args.layer_kind(index))
            .collect::<std::result::Result<_, _>>()?,
        max_positions: Some(args.max_position_embeddings),
        vocab_size: args.vocab_size,
        head_dim: args.head_dim,
        makes_own_cache: true,
        adapters: loader.adapters(),
        fused: Fused::default(),
    }))
}
