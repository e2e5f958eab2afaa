//! The decoder-only transformer: embedding, blocks, final norm, head.

use super::attention::attention_mask;
use super::{Attention, AttentionArgs, Embedding, GatedMlp, GatedMlpArgs, Linear, RmsNorm};
use crate::cache::{LayerCache, LayerKind};
use crate::mlx::fast::Mask;
use crate::mlx::{Array, Result};
use crate::models::Model;
use crate::models::fused::{self, BlockDescription, DecoderDescription, Fused};
use crate::models::loader::{LoadError, Loader, NormKind};
use crate::models::pieces::{BlockPieces, Pieces};

/// One layer of a decoder.
pub trait Block {
    /// `[B, L, hidden_size]` to the same.
    fn forward(&self, x: &Array, mask: &Mask, cache: Option<&mut LayerCache>) -> Result<Array>;

    /// What it consists of, if that can be told: then decoders run it fused with its neighbours.
    fn describe(&self) -> Option<BlockDescription<'_>> {
        None
    }
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

    fn describe(&self) -> Option<BlockDescription<'_>> {
        Some(BlockDescription {
            input_norm: &self.input_layernorm,
            attention: &self.self_attn,
            post_attention_norm: None,
            mlp_norm: &self.post_attention_layernorm,
            mlp: &self.mlp,
            post_mlp_norm: None,
        })
    }
}

/// From the last hidden state to logits.
#[derive(Clone)]
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
    /// All of it as one node, where that is possible.
    pub fused: Fused,
}

impl<B: Block> Decoder<B> {
    fn describe(&self) -> Result<Option<DecoderDescription<'_>>> {
        let layers: Option<Vec<_>> = self.layers.iter().map(Block::describe).collect();
        let Some(layers) = layers else { return Ok(None) };
        let head_is_adapted = matches!(&self.head, Head::Linear(lm_head) if lm_head.is_adapted());
        if self.embed_tokens.is_adapted()
            || head_is_adapted
            || layers.iter().any(BlockDescription::is_adapted)
        {
            return Ok(None);
        }
        let embedding_scale = match &self.embed_scale {
            Some(scale) => scale.to_f32_vec()?.first().copied(),
            None => None,
        };
        let embedding = self.embed_tokens.weight();
        Ok(Some(DecoderDescription {
            embedding,
            embedding_scale,
            layers,
            kinds: &self.kinds,
            norm: &self.norm,
            head: match &self.head {
                Head::Tied => fused::tied(embedding),
                Head::Linear(lm_head) => fused::linear(lm_head),
            },
        }))
    }
}

impl<B: Block> Model for Decoder<B> {
    fn forward(&self, inputs: &Array, mut cache: Option<&mut [LayerCache]>) -> Result<Array> {
        if let Some(caches) = &mut cache
            && let Some(logits) = self.fused.forward(inputs, caches, || self.describe())?
        {
            return Ok(logits);
        }
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

    fn pieces(&self) -> Option<Pieces> {
        let blocks: Option<Vec<_>> =
            self.layers.iter().map(|layer| Some(BlockPieces::of(&layer.describe()?))).collect();
        Some(Pieces {
            embed_tokens: self.embed_tokens.clone(),
            embed_scale: self.embed_scale.clone(),
            blocks: blocks?,
            kinds: self.kinds.clone(),
            norm: self.norm.clone(),
            head: self.head.clone(),
        })
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
