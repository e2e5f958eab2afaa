//! A decoder taken apart, for methods that run its layers one by one or put other weights into it. The pieces share
//! the model's arrays.

use super::fused::BlockDescription;
use super::layers::{Attention, Context, Embedding, GatedMlp, Head, Linear, RmsNorm, Weight, attention_mask};
use crate::cache::{LayerCache, LayerKind};
use crate::mlx::fast::Mask;
use crate::mlx::{Array, Result, cpu_ops};

/// A decoder.
#[derive(Clone)]
pub struct Pieces {
    /// Token embedding.
    pub embed_tokens: Embedding,
    /// A factor on it.
    pub embed_scale: Option<Array>,
    /// The layers.
    pub blocks: Vec<BlockPieces>,
    /// What each attends to.
    pub kinds: Vec<LayerKind>,
    /// Final norm.
    pub norm: RmsNorm,
    /// From the normed state to logits.
    pub head: Head,
}

/// A layer: `h = x + post_attention_norm(attention(input_norm(x)))`, `h + post_mlp_norm(mlp(mlp_norm(h)))`.
#[derive(Clone)]
pub struct BlockPieces {
    /// Before attention.
    pub input_norm: RmsNorm,
    /// Attention.
    pub attention: Attention,
    /// On its result, where there is one.
    pub post_attention_norm: Option<RmsNorm>,
    /// Before the feed-forward part.
    pub mlp_norm: RmsNorm,
    /// The feed-forward part.
    pub mlp: GatedMlp,
    /// On its result, where there is one.
    pub post_mlp_norm: Option<RmsNorm>,
}

/// What the linear modules of a layer take, each `[B, L, features]`.
#[derive(Clone, Debug)]
pub struct LayerInputs {
    /// `q_proj`, `k_proj` and `v_proj`.
    pub attention: Array,
    /// `o_proj`.
    pub output: Array,
    /// `gate_proj` and `up_proj`.
    pub mlp: Array,
    /// `down_proj`.
    pub down: Array,
}

impl BlockPieces {
    pub(crate) fn of(block: &BlockDescription<'_>) -> Self {
        Self {
            input_norm: block.input_norm.clone(),
            attention: block.attention.clone(),
            post_attention_norm: block.post_attention_norm.cloned(),
            mlp_norm: block.mlp_norm.clone(),
            mlp: block.mlp.clone(),
            post_mlp_norm: block.post_mlp_norm.cloned(),
        }
    }

    /// `[B, L, hidden_size]` to the same.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn forward(&self, x: &Array, mask: &Mask) -> Result<Array> {
        self.forward_after(x, mask, None)
    }

    /// [`BlockPieces::forward`] of what comes after the positions in `cache`, which grows.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn forward_after(&self, x: &Array, mask: &Mask, cache: Option<&mut LayerCache>) -> Result<Array> {
        let h = self.after_attention(
            x,
            self.attention.forward(&self.input_norm.forward(x)?, Context::Together { mask, cache })?,
        )?;
        let out = self.mlp.forward(&self.mlp_norm.forward(&h)?)?;
        self.after_mlp(&h, out)
    }

    /// [`BlockPieces::forward`], and what its modules took.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn forward_observed(&self, x: &Array, mask: &Mask) -> Result<(Array, LayerInputs)> {
        let rows = |x: &Array, like: &Array| x.reshape(&[like.dim(0), like.dim(1), -1]);
        let attention = self.input_norm.forward(x)?;
        let output = rows(&self.attention.attended(&attention, Context::Together { mask, cache: None })?, x)?;
        let h = self.after_attention(x, self.attention.o_proj.forward(&output)?)?;
        let mlp = self.mlp_norm.forward(&h)?;
        let down = rows(&self.mlp.gated(&mlp)?, x)?;
        let out = self.after_mlp(&h, self.mlp.down_proj.forward(&down)?)?;
        Ok((out, LayerInputs { attention, output, mlp, down }))
    }

    fn after_attention(&self, x: &Array, out: Array) -> Result<Array> {
        match &self.post_attention_norm {
            Some(norm) => super::activations::clip_residual(x, &norm.forward(&out)?),
            None => x.add(&out),
        }
    }

    fn after_mlp(&self, h: &Array, out: Array) -> Result<Array> {
        match &self.post_mlp_norm {
            Some(norm) => super::activations::clip_residual(h, &norm.forward(&out)?),
            None => h.add(&out),
        }
    }

    /// Its linear modules and their paths below the layer's.
    pub fn linears(&mut self) -> [(&'static str, &mut Linear); 7] {
        [
            ("self_attn.q_proj", &mut self.attention.q_proj),
            ("self_attn.k_proj", &mut self.attention.k_proj),
            ("self_attn.v_proj", &mut self.attention.v_proj),
            ("self_attn.o_proj", &mut self.attention.o_proj),
            ("mlp.gate_proj", &mut self.mlp.gate_proj),
            ("mlp.up_proj", &mut self.mlp.up_proj),
            ("mlp.down_proj", &mut self.mlp.down_proj),
        ]
    }
}

impl Pieces {
    /// Whether any of its layers' products can be computed in integers (`--cpu-precision`), given a processor for it.
    pub fn takes_integers(&mut self) -> bool {
        let mut linears = self.blocks.iter_mut().flat_map(BlockPieces::linears);
        linears.any(|(_, linear)| linear.weight().params().is_some_and(cpu_ops::takes_integers))
    }

    /// Ids `[B, L]` to the first hidden state.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn embed(&self, ids: &Array) -> Result<Array> {
        let h = self.embed_tokens.forward(ids)?;
        match &self.embed_scale {
            Some(scale) => h.multiply(&scale.astype(h.dtype())?),
            None => Ok(h),
        }
    }

    /// The mask of layer `index` for hidden states `[B, L, hidden_size]` from the first position on.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn mask(&self, index: usize, h: &Array) -> Result<Mask> {
        let window = match self.kinds.get(index) {
            Some(LayerKind::Sliding { window }) => Some(*window),
            _ => None,
        };
        attention_mask(h, None, window)
    }

    /// Ids `[B, L]` to logits `[B, L, vocab]`.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn forward(&self, ids: &Array) -> Result<Array> {
        let mut h = self.embed(ids)?;
        for (index, block) in self.blocks.iter().enumerate() {
            h = block.forward(&h, &self.mask(index, &h)?)?;
        }
        self.logits(&h)
    }

    /// The last hidden state to logits.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn logits(&self, h: &Array) -> Result<Array> {
        let out = self.norm.forward(h)?;
        match &self.head {
            Head::Tied => self.embed_tokens.as_linear(&out),
            Head::Linear(lm_head) => lm_head.forward(&out),
        }
    }

    /// Every matrix by the path of its module: the embedding, those of the layers, the head if it has its own.
    pub fn weights(&self) -> Vec<(String, Weight)> {
        let mut copy = self.clone();
        let mut weights = Vec::new();
        copy.visit(&mut |path, weight| {
            weights.push((path.to_owned(), weight.clone()));
            Ok(weight)
        })
        .map_or_else(|_: crate::mlx::Error| Vec::new(), |()| weights)
    }

    /// Replaces every matrix by what `change` makes of it, in the order of [`Pieces::weights`].
    ///
    /// # Errors
    /// What `change` returns.
    pub fn visit(&mut self, change: &mut dyn FnMut(&str, Weight) -> Result<Weight>) -> Result<()> {
        let embedding = self.embed_tokens.weight().clone();
        self.embed_tokens = self.embed_tokens.clone().with_weight(change("model.embed_tokens", embedding)?);
        for (index, block) in self.blocks.iter_mut().enumerate() {
            for (name, linear) in block.linears() {
                let weight = change(&format!("model.layers.{index}.{name}"), linear.weight().clone())?;
                *linear = linear.clone().with_weight(weight);
            }
        }
        if let Head::Linear(lm_head) = &mut self.head {
            let weight = change("lm_head", lm_head.weight().clone())?;
            *lm_head = lm_head.clone().with_weight(weight);
        }
        Ok(())
    }

    /// Replaces every norm by what `change` makes of it; paths are those of mlx-lm's modules.
    ///
    /// # Errors
    /// What `change` returns.
    pub fn visit_norms(&mut self, change: &mut dyn FnMut(&str, &RmsNorm) -> Result<RmsNorm>) -> Result<()> {
        for (index, block) in self.blocks.iter_mut().enumerate() {
            let path = |name: &str| format!("model.layers.{index}.{name}");
            // With norms on results, what comes before the feed-forward part has a name of its own.
            let sandwiched = block.post_mlp_norm.is_some();
            let mlp_norm = if sandwiched { "pre_feedforward_layernorm" } else { "post_attention_layernorm" };
            block.input_norm = change(&path("input_layernorm"), &block.input_norm)?;
            block.mlp_norm = change(&path(mlp_norm), &block.mlp_norm)?;
            let optional = [
                ("post_attention_layernorm", &mut block.post_attention_norm),
                ("post_feedforward_layernorm", &mut block.post_mlp_norm),
                ("self_attn.q_norm", &mut block.attention.q_norm),
                ("self_attn.k_norm", &mut block.attention.k_norm),
            ];
            for (name, norm) in optional {
                if let Some(norm) = norm {
                    *norm = change(&path(name), norm)?;
                }
            }
        }
        self.norm = change("model.norm", &self.norm)?;
        Ok(())
    }
}
