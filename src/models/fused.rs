//! Decoders whose layers fit a description run as one node a step instead of one an operation.
//!
//! A family says what its layer consists of ([`Block::describe`]); nobody else knows which way ran. The description
//! covers pre-norm layers of attention and a gated feed-forward part, with or without biases, norms on queries and
//! keys and norms on the results, full or sliding attention. What does not fit (other caches, a rotation that depends
//! on the length, layers of other shapes) runs an operation at a time, on the same kernels.
//!
//! [`Block::describe`]: super::layers::Block::describe

use std::cell::OnceCell;

use super::layers::{Attention, GatedMlp, Linear, RmsNorm, Weight};
use crate::cache::{LayerCache, LayerKind};
use crate::mlx::cpu_ops::{
    self, DecoderPlan, DecoderRow, FusedDecoder, Kernels, KvShape, KvType, LayerPlan, NormPlan,
    ProjectionPlan,
};
use crate::mlx::{Array, Dtype, Result};

/// What a layer consists of:
/// `h = x + post_attention_norm(attention(input_norm(x)))`, `h + post_mlp_norm(mlp(mlp_norm(h)))`.
pub struct BlockDescription<'a> {
    /// Before attention.
    pub input_norm: &'a RmsNorm,
    /// Attention.
    pub attention: &'a Attention,
    /// On its result, where there is one.
    pub post_attention_norm: Option<&'a RmsNorm>,
    /// Before the feed-forward part.
    pub mlp_norm: &'a RmsNorm,
    /// The feed-forward part.
    pub mlp: &'a GatedMlp,
    /// On its result, where there is one.
    pub post_mlp_norm: Option<&'a RmsNorm>,
}

impl BlockDescription<'_> {
    /// Whether an adapter is on one of its modules; those run an operation at a time.
    pub fn is_adapted(&self) -> bool {
        let (attention, mlp) = (self.attention, self.mlp);
        [&attention.q_proj, &attention.k_proj, &attention.v_proj, &attention.o_proj]
            .into_iter()
            .chain([&mlp.gate_proj, &mlp.up_proj, &mlp.down_proj])
            .any(Linear::is_adapted)
    }
}

/// What a decoder consists of.
pub struct DecoderDescription<'a> {
    /// Token embedding.
    pub embedding: &'a Weight,
    /// A factor on it.
    pub embedding_scale: Option<f32>,
    /// The layers.
    pub layers: Vec<BlockDescription<'a>>,
    /// What each attends to.
    pub kinds: &'a [LayerKind],
    /// Final norm.
    pub norm: &'a RmsNorm,
    /// From the normed state to logits.
    pub head: ProjectionPlan<'a>,
}

/// A decoder's fused form, made when it is first needed; models that use MLX's operations never make one.
#[derive(Debug)]
pub struct Fused {
    kernels: Option<Kernels>,
    decoder: OnceCell<Option<(FusedDecoder, KvType)>>,
}

impl Default for Fused {
    /// For a model that the calling thread loads now.
    fn default() -> Self {
        Self { kernels: cpu_ops::kernels(), decoder: OnceCell::new() }
    }
}

impl Fused {
    /// Feeds ids `[B, L]` and returns logits `[B, L, vocabulary]`; `None`, with nothing changed that shows, if the
    /// model or its caches do not fit.
    ///
    /// # Errors
    /// As for any forward pass.
    pub fn forward<'a>(
        &self,
        inputs: &Array,
        caches: &mut [LayerCache],
        describe: impl FnOnce() -> Result<Option<DecoderDescription<'a>>>,
    ) -> Result<Option<Array>> {
        let Some(kernels) = &self.kernels else { return Ok(None) };
        let decoder = match self.decoder.get() {
            Some(decoder) => decoder,
            None => {
                let description = describe()?;
                let decoder = match description.as_ref().map(plan).transpose()?.flatten() {
                    // As wide as mlx-lm's caches, which have the model's type.
                    Some(plan) => {
                        let wide = plan.norm.weight.dtype() == Dtype::Float32;
                        let kind = if wide { KvType::F32 } else { KvType::F16 };
                        Some((FusedDecoder::new(kernels, &plan)?, kind))
                    }
                    None => None,
                };
                self.decoder.get_or_init(|| decoder)
            }
        };
        let (Some((decoder, kind)), &[batch, length]) = (decoder, inputs.shape()) else { return Ok(None) };
        let offset = caches.first().map_or(0, LayerCache::offset);
        if batch < 1 || length < 1 || caches.iter().any(|cache| cache.offset() != offset) {
            return Ok(None);
        }
        let shapes: Vec<_> = decoder.stores(*kind).collect();
        let fits = |(cache, shape): (&LayerCache, &KvShape)| cache.can_store(*shape, batch);
        if caches.len() != shapes.len() || !caches.iter().zip(&shapes).all(fits) {
            return Ok(None);
        }
        for (cache, shape) in caches.iter_mut().zip(&shapes) {
            cache.store(*shape, batch)?;
        }
        let stores = caches.iter_mut().filter_map(|cache| cache.reserve(length).transpose());
        let stores = stores.collect::<Result<Vec<_>>>()?;
        let position = offset.max(0) as usize;
        let rows = (0..batch as usize).map(|row| DecoderRow {
            position,
            stores: stores.iter().filter_map(|layer| layer.get(row).cloned()).collect(),
        });
        // The layers of a sequence wait for the same steps.
        let after: Vec<Array> = caches.first().into_iter().flat_map(LayerCache::arrays).cloned().collect();
        let after: Vec<&Array> = after.iter().collect();
        let (logits, pending) = decoder.step(inputs, rows.collect(), &after)?;
        caches.iter_mut().for_each(|cache| cache.advance(length, &pending));
        Ok(Some(logits))
    }
}

fn weight(weight: &Weight) -> ProjectionPlan<'_> {
    let mut arrays = weight.arrays().into_iter();
    ProjectionPlan { kind: weight.kind(), arrays: [arrays.next(), arrays.next(), arrays.next()], bias: None }
}

/// A linear layer as the kernels take it.
pub fn linear(layer: &Linear) -> ProjectionPlan<'_> {
    ProjectionPlan { bias: layer.bias(), ..weight(layer.weight()) }
}

/// An embedding's matrix as a head.
pub fn tied(embedding: &Weight) -> ProjectionPlan<'_> {
    weight(embedding)
}

fn norm(norm: &RmsNorm) -> NormPlan<'_> {
    NormPlan { weight: norm.weight(), eps: norm.eps() }
}

/// `None` when the layers are not alike, or turn by angles that depend on the length.
fn plan<'a>(description: &DecoderDescription<'a>) -> Result<Option<DecoderPlan<'a>>> {
    let Some(first) = description.layers.first().map(|layer| &layer.attention.args) else { return Ok(None) };
    let shape = [first.n_heads, first.n_kv_heads, first.head_dim];
    let mut layers = Vec::with_capacity(description.layers.len());
    for (layer, kind) in description.layers.iter().zip(description.kinds) {
        let (attention, mlp) = (layer.attention, layer.mlp);
        let args = &attention.args;
        if [args.n_heads, args.n_kv_heads, args.head_dim] != shape || args.rope.depends_on_length() {
            return Ok(None);
        }
        let window = match *kind {
            LayerKind::Full => None,
            LayerKind::Sliding { window } => match usize::try_from(window) {
                Ok(window) if window > 0 => Some(window),
                _ => return Ok(None),
            },
        };
        layers.push(LayerPlan {
            input_norm: norm(layer.input_norm),
            q: linear(&attention.q_proj),
            k: linear(&attention.k_proj),
            v: linear(&attention.v_proj),
            o: linear(&attention.o_proj),
            qk_norm: match (&attention.q_norm, &attention.k_norm) {
                (Some(q), Some(k)) => Some([norm(q), norm(k)]),
                _ => None,
            },
            rotation: args.rope.rotation(0)?,
            window,
            scale: args.scale,
            post_attention_norm: layer.post_attention_norm.map(norm),
            mlp_norm: norm(layer.mlp_norm),
            gate: linear(&mlp.gate_proj),
            up: linear(&mlp.up_proj),
            down: linear(&mlp.down_proj),
            activation: mlp.gate.activation(),
            post_mlp_norm: layer.post_mlp_norm.map(norm),
        });
    }
    let size = |number: i32| usize::try_from(number).unwrap_or(0);
    Ok(Some(DecoderPlan {
        embedding: weight(description.embedding),
        embedding_scale: description.embedding_scale,
        heads: size(shape[0]),
        kv_heads: size(shape[1]),
        head_dim: size(shape[2]),
        layers,
        norm: norm(description.norm),
        head: description.head,
    }))
}
