//! The decoder-only transformer: embedding, blocks, final norm, head.

use super::attention::attention_mask;
use super::{Attention, AttentionArgs, Embedding, GatedMlp, GatedMlpArgs, Linear, RmsNorm};
use crate::cache::{LayerCache, LayerKind};
use crate::mlx::fast::Mask;
use crate::mlx::{Array, Result};
use crate::models::Model;
use crate::models::loader::{LoadError, Loader, NormKind};

/// One layer of a decoder.
pub trait Block {
    /// `[B, L, hidden_size]` to the same.
    fn forward(&self, x: &Array, mask: &Mask, cache: Option<&mut LayerCache>) -> Result<Array>;
}

/// `h = x + attention(norm(x)); h + mlp(norm(h))`.
pub struct PreNormBlock {
    pub(crate) self_attn: Attention,
    pub(crate) mlp: GatedMlp,
    pub(crate) input_layernorm: RmsNorm,
    pub(crate) post_attention_layernorm: RmsNorm,
}

impl PreNormBlock {
    /// Takes the layer's tensors below `path`.
    pub fn load(
        attention: AttentionArgs,
        mlp: GatedMlpArgs,
        norm: NormKind,
        loader: &mut Loader,
        path: &str,
    ) -> std::result::Result<Self, LoadError> {
        let dim = mlp.hidden_size;
        Ok(Self {
            self_attn: Attention::load(attention, loader, &format!("{path}.self_attn"))?,
            mlp: GatedMlp::load(mlp, loader, &format!("{path}.mlp"))?,
            input_layernorm: loader.norm(&format!("{path}.input_layernorm"), dim, norm)?,
            post_attention_layernorm: loader.norm(&format!("{path}.post_attention_layernorm"), dim, norm)?,
        })
    }
}

impl Block for PreNormBlock {
    fn forward(&self, x: &Array, mask: &Mask, cache: Option<&mut LayerCache>) -> Result<Array> {
        let r = self.self_attn.forward(&self.input_layernorm.forward(x)?, mask, cache)?;
        let (h, normed) = self.post_attention_layernorm.forward_sum(x, &r)?;
        let r = self.mlp.forward(&normed)?;
        h.add(&r)
    }
}

/// From the last hidden state to logits.
pub enum Head {
    /// The embedding's own matrix.
    Tied,
    /// `lm_head`.
    Linear(Linear),
}

impl Head {
    /// `lm_head`, or the embedding when the config ties them; a stored `lm_head` is then left aside.
    pub fn load(
        tied: bool,
        hidden_size: i32,
        vocab_size: i32,
        loader: &mut Loader,
    ) -> std::result::Result<Self, LoadError> {
        if tied {
            loader.ignore(|name| name == "lm_head.weight");
            return Ok(Self::Tied);
        }
        Ok(Self::Linear(loader.linear("lm_head", hidden_size, vocab_size, false)?))
    }
}

/// A language model of equal blocks.
pub struct Decoder<B> {
    /// Token embedding.
    pub embed_tokens: Embedding,
    /// A factor on the embedding's output, in its type (Gemma).
    pub embed_scale: Option<Array>,
    /// The blocks.
    pub layers: Vec<B>,
    /// What each block attends to.
    pub kinds: Vec<LayerKind>,
    /// Final norm.
    pub norm: RmsNorm,
    /// Head.
    pub head: Head,
    /// Positions the model was trained for, where the config says.
    pub max_positions: Option<i32>,
    /// Rows of the embedding.
    pub vocab_size: i32,
    /// Features a head.
    pub head_dim: i32,
    /// Whether mlx-lm's file defines `make_cache`, which then ignores `max_kv_size`.
    pub makes_own_cache: bool,
}

impl<B: Block> Model for Decoder<B> {
    fn forward(&self, inputs: &Array, mut cache: Option<&mut [LayerCache]>) -> Result<Array> {
        let mut h = self.embed_tokens.forward(inputs)?;
        if let Some(scale) = &self.embed_scale {
            h = h.multiply(&scale.astype(h.dtype())?)?;
        }
        let masks = Masks::new(&self.kinds, &h, cache.as_deref())?;
        for (index, layer) in self.layers.iter().enumerate() {
            let cache = cache.as_mut().and_then(|cache| cache.get_mut(index));
            h = layer.forward(&h, masks.of(self.kinds[index]), cache)?;
        }
        let out = self.norm.forward(&h)?;
        match &self.head {
            Head::Tied => self.embed_tokens.as_linear(&out),
            Head::Linear(lm_head) => lm_head.forward(&out),
        }
    }

    fn layer_kinds(&self) -> &[LayerKind] {
        &self.kinds
    }

    fn makes_own_cache(&self) -> bool {
        self.makes_own_cache
    }

    fn max_positions(&self) -> Option<i32> {
        self.max_positions
    }

    fn vocab_size(&self) -> i32 {
        self.vocab_size
    }

    fn head_dim(&self) -> i32 {
        self.head_dim
    }
}

/// One mask a layer kind, made from the first layer of that kind.
struct Masks {
    full: Mask,
    sliding: Mask,
}

impl Masks {
    fn new(kinds: &[LayerKind], h: &Array, cache: Option<&[LayerCache]>) -> Result<Self> {
        let first = |wanted: fn(&LayerKind) -> bool| -> Result<Mask> {
            let Some(index) = kinds.iter().position(wanted) else { return Ok(Mask::None) };
            let window = match kinds[index] {
                LayerKind::Full => None,
                LayerKind::Sliding { window } => Some(window),
            };
            attention_mask(h, cache.and_then(|cache| cache.get(index)), window)
        };
        Ok(Self {
            full: first(|kind| matches!(kind, LayerKind::Full))?,
            sliding: first(|kind| matches!(kind, LayerKind::Sliding { .. }))?,
        })
    }

    fn of(&self, kind: LayerKind) -> &Mask {
        match kind {
            LayerKind::Full => &self.full,
            LayerKind::Sliding { .. } => &self.sliding,
        }
    }
}
