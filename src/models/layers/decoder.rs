//! The decoder-only transformer: embedding, blocks, final norm, head.

use super::attention::{Context, Places, attention_mask};
use super::{Attention, AttentionArgs, Embedding, GatedMlp, GatedMlpArgs, Linear, RmsNorm};
use crate::cache::{LayerCache, LayerKind};
use crate::lora::Adapters;
use crate::mlx::fast::Mask;
use crate::mlx::{Array, Result};
use crate::models::Model;
use crate::models::fused::{self, BlockDescription, DecoderDescription, Fused};
use crate::models::loader::{LoadError, Loader, NormKind};
use crate::models::pieces::{BlockPieces, Pieces};

/// One layer of a decoder.
pub trait Block {
    /// `[B, L, hidden_size]` to the same.
    fn forward(&self, x: &Array, context: Context) -> Result<Array>;

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
    fn forward(&self, x: &Array, context: Context) -> Result<Array> {
        let r = self.self_attn.forward(&self.input_layernorm.forward(x)?, context)?;
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
    /// What adapters put on the linear layers.
    pub adapters: Adapters,
    /// All of it as one node, where that is possible.
    pub fused: Fused,
}

impl<B: Block> Decoder<B> {
    fn describe(&self) -> Result<Option<DecoderDescription<'_>>> {
        let layers: Option<Vec<_>> = self.layers.iter().map(Block::describe).collect();
        let Some(layers) = layers else { return Ok(None) };
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

impl<B: Block> Decoder<B> {
    /// The fused form, unless adapters change the layers now.
    fn fused(&self) -> Option<&Fused> {
        (!self.adapters.any_active()).then_some(&self.fused)
    }

    fn embed(&self, ids: &Array) -> Result<Array> {
        let h = self.embed_tokens.forward(ids)?;
        match &self.embed_scale {
            Some(scale) => h.multiply(&scale.astype(h.dtype())?),
            None => Ok(h),
        }
    }

    fn logits(&self, out: &Array) -> Result<Array> {
        match &self.head {
            Head::Tied => self.embed_tokens.as_linear(out),
            Head::Linear(lm_head) => lm_head.forward(out),
        }
    }

    /// [`Model::forward_rows`] an operation at a time: rows share every product with weights, and attend apart.
    fn forward_apart(&self, tokens: &Array, caches: &mut [&mut [LayerCache]]) -> Result<Vec<Array>> {
        let mut h = self.embed(&tokens.expand_dims(1)?)?;
        let masks = caches.iter().map(|caches| Masks::new(&self.kinds, &h, Some(caches)));
        let masks = masks.collect::<Result<Vec<_>>>()?;
        let places = Places::default();
        for (index, layer) in self.layers.iter().enumerate() {
            let rows = caches.iter_mut().zip(&masks);
            let rows = rows
                .filter_map(|(caches, masks)| Some((masks.of(self.kinds[index]), caches.get_mut(index)?)))
                .collect();
            h = layer.forward(&h, Context::Apart { rows, places: &places })?;
        }
        rows_of(&self.logits(&self.norm.forward(&h)?)?.squeeze(1)?)
    }

    /// [`Model::forward_rows`] of rows of which only some fit the fused form: each is computed as it is alone.
    fn forward_parted(
        &self,
        tokens: &Array,
        caches: &mut [&mut [LayerCache]],
        fit: &[bool],
    ) -> Result<Vec<Array>> {
        let mut logits: Vec<Option<Array>> = vec![None; fit.len()];
        for part in [true, false] {
            let places: Vec<u32> =
                (0u32..).zip(fit).filter(|(_, fit)| **fit == part).map(|(place, _)| place).collect();
            let rows = caches.iter_mut().zip(fit).filter(|(_, fit)| **fit == part);
            let mut rows: Vec<&mut [LayerCache]> = rows.map(|(caches, _)| &mut **caches).collect();
            let chosen = Array::from_slice(&places, &[places.len() as i32])?;
            let part = self.forward_rows(&tokens.take(&chosen, 0)?, &mut rows)?;
            for (place, row) in places.into_iter().zip(part) {
                logits[place as usize] = Some(row);
            }
        }
        Ok(logits.into_iter().flatten().collect())
    }
}

impl<B: Block> Model for Decoder<B> {
    fn forward(&self, inputs: &Array, mut cache: Option<&mut [LayerCache]>) -> Result<Array> {
        if let (Some(caches), Some(fused)) = (&mut cache, self.fused())
            && let Some(logits) = fused.forward(inputs, caches, || self.describe())?
        {
            return Ok(logits);
        }
        self.logits(&self.hidden(inputs, cache)?)
    }

    fn forward_rows(&self, tokens: &Array, caches: &mut [&mut [LayerCache]]) -> Result<Vec<Array>> {
        let Some(fused) = self.fused() else { return self.forward_apart(tokens, caches) };
        let takes = |caches: &&mut [LayerCache]| fused.takes(caches, || self.describe());
        let fit = caches.iter().map(takes).collect::<Result<Vec<_>>>()?;
        if !fit.contains(&true) {
            return self.forward_apart(tokens, caches);
        }
        if fit.contains(&false) {
            return self.forward_parted(tokens, caches, &fit);
        }
        match fused.forward_rows(tokens, caches, || self.describe())? {
            Some(logits) => rows_of(&logits),
            None => self.forward_apart(tokens, caches),
        }
    }

    fn hidden(&self, inputs: &Array, mut cache: Option<&mut [LayerCache]>) -> Result<Array> {
        let mut h = self.embed(inputs)?;
        let masks = Masks::new(&self.kinds, &h, cache.as_deref())?;
        for (index, layer) in self.layers.iter().enumerate() {
            let cache = cache.as_mut().and_then(|cache| cache.get_mut(index));
            h = layer.forward(&h, Context::Together { mask: masks.of(self.kinds[index]), cache })?;
        }
        self.norm.forward(&h)
    }

    fn prepare(&self) -> Result<()> {
        self.fused().map_or(Ok(()), |fused| fused.prepare(|| self.describe()))
    }

    fn rows_at_once(&self, caches: &[LayerCache]) -> Result<Option<usize>> {
        let Some(fused) = self.fused() else { return Ok(None) };
        fused.rows_at_once(caches, || self.describe())
    }

    fn adapters(&self) -> &Adapters {
        &self.adapters
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

/// `[rows, vocab]` to as many `[1, vocab]`.
fn rows_of(logits: &Array) -> Result<Vec<Array>> {
    (0..logits.dim(0)).map(|row| logits.slice(0, row, row + 1)).collect()
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
