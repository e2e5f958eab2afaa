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
        let (Some((decoder, kind)), &[batch, length]) = (self.decoder(describe)?, inputs.shape()) else {
            return Ok(None);
        };
        let shapes: Vec<_> = decoder.stores(*kind).collect();
        if batch < 1 || length < 1 || !fits(caches, &shapes, batch) {
            return Ok(None);
        }
        let rows = reserve(caches, &shapes, batch, length)?;
        let after = last_steps([&*caches]);
        let (logits, pending) = decoder.step(inputs, rows, &after.iter().collect::<Vec<_>>())?;
        caches.iter_mut().for_each(|cache| cache.advance(length, &pending));
        Ok(Some(logits))
    }

    /// One token of each of some sequences: ids `[rows]` to logits `[rows, vocabulary]`; otherwise as
    /// [`forward`](Self::forward).
    ///
    /// # Errors
    /// As for any forward pass.
    pub fn forward_rows<'a>(
        &self,
        tokens: &Array,
        caches: &mut [&mut [LayerCache]],
        describe: impl FnOnce() -> Result<Option<DecoderDescription<'a>>>,
    ) -> Result<Option<Array>> {
        let Some((decoder, kind)) = self.decoder(describe)? else { return Ok(None) };
        let shapes: Vec<_> = decoder.stores(*kind).collect();
        if !caches.iter().all(|caches| fits(caches, &shapes, 1)) {
            return Ok(None);
        }
        let rows = caches.iter_mut().map(|caches| reserve(caches, &shapes, 1, 1));
        let rows = rows.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
        let after = last_steps(caches.iter().map(|caches| &**caches));
        let tokens = tokens.expand_dims(1)?;
        let (logits, pending) = decoder.step(&tokens, rows, &after.iter().collect::<Vec<_>>())?;
        caches.iter_mut().flat_map(|caches| caches.iter_mut()).for_each(|cache| cache.advance(1, &pending));
        logits.squeeze(1).map(Some)
    }

    /// Whether [`forward_rows`](Self::forward_rows) would take a sequence with these caches.
    ///
    /// # Errors
    /// As for any forward pass.
    pub fn takes<'a>(
        &self,
        caches: &[LayerCache],
        describe: impl FnOnce() -> Result<Option<DecoderDescription<'a>>>,
    ) -> Result<bool> {
        Ok(self.rows_at_once(caches, describe)?.is_some())
    }

    /// The tokens of a prompt that are computed before anybody can stop it, of a sequence with these caches; `None` if
    /// they do not fit.
    ///
    /// # Errors
    /// As for any forward pass.
    pub fn rows_at_once<'a>(
        &self,
        caches: &[LayerCache],
        describe: impl FnOnce() -> Result<Option<DecoderDescription<'a>>>,
    ) -> Result<Option<usize>> {
        let Some((decoder, kind)) = self.decoder(describe)? else { return Ok(None) };
        let fits = fits(caches, &decoder.stores(*kind).collect::<Vec<_>>(), 1);
        Ok(fits.then(|| decoder.rows_at_once()))
    }

    /// Makes the fused form, if there is one, before it is needed.
    ///
    /// # Errors
    /// As for any forward pass.
    pub fn prepare<'a>(
        &self,
        describe: impl FnOnce() -> Result<Option<DecoderDescription<'a>>>,
    ) -> Result<()> {
        self.decoder(describe).map(drop)
    }

    /// Makes the fused form when it is first asked for.
    fn decoder<'a>(
        &self,
        describe: impl FnOnce() -> Result<Option<DecoderDescription<'a>>>,
    ) -> Result<Option<&(FusedDecoder, KvType)>> {
        let Some(kernels) = &self.kernels else { return Ok(None) };
        if let Some(decoder) = self.decoder.get() {
            return Ok(decoder.as_ref());
        }
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
        Ok(self.decoder.get_or_init(|| decoder).as_ref())
    }
}

/// Whether the caches of a batch of sequences of one length can be stored.
fn fits(caches: &[LayerCache], shapes: &[KvShape], batch: i32) -> bool {
    let offset = caches.first().map_or(0, LayerCache::offset);
    caches.len() == shapes.len()
        && caches.iter().all(|cache| cache.offset() == offset)
        && caches.iter().zip(shapes).all(|(cache, shape)| cache.can_store(*shape, batch))
}

/// Stores caches that [`fits`] and makes room for `length` positions of each sequence, and for those known to follow.
fn reserve(
    caches: &mut [LayerCache],
    shapes: &[KvShape],
    batch: i32,
    length: i32,
) -> Result<Vec<DecoderRow>> {
    let position = caches.first().map_or(0, LayerCache::offset).max(0) as usize;
    let following = i32::try_from(cpu_ops::positions_to_follow()).unwrap_or(i32::MAX);
    for (cache, shape) in caches.iter_mut().zip(shapes) {
        cache.store(*shape, batch, length.saturating_add(following))?;
    }
    let stores = caches.iter_mut().filter_map(|cache| cache.reserve(length, following).transpose());
    let stores = stores.collect::<Result<Vec<_>>>()?;
    let row = |row| DecoderRow {
        position,
        stores: stores.iter().filter_map(|layer| layer.get(row).cloned()).collect(),
    };
    Ok((0..batch.max(0) as usize).map(row).collect())
}

/// What the next step must wait for; the layers of a sequence wait for the same.
fn last_steps<'a>(sequences: impl IntoIterator<Item = &'a [LayerCache]>) -> Vec<Array> {
    sequences.into_iter().filter_map(<[_]>::first).flat_map(LayerCache::arrays).cloned().collect()
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
