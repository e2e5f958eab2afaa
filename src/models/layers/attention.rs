//! Multi-head attention with rotary positions over any cache, and its masks.

use std::cell::RefCell;
use std::rc::Rc;

use super::{Linear, RmsNorm};
use crate::cache::{Attended, JoinedRows, LayerCache, Packed, causal_mask, places, ragged_mask};
use crate::checkpoint::QuantParams;
use crate::mlx::cpu_ops::{self, Kernels, KeysValues, PackedHeads};
use crate::mlx::fast::{self, Mask};
use crate::mlx::{Array, Dtype, Error, Result, quantized_matmul};
use crate::models::loader::{LoadError, Loader, NormKind};
use crate::models::rope::Rope;

/// The shape of a layer's attention.
#[derive(Clone, Debug)]
pub struct AttentionArgs {
    /// Features in and out.
    pub hidden_size: i32,
    /// Query heads.
    pub n_heads: i32,
    /// Key and value heads; divides `n_heads`.
    pub n_kv_heads: i32,
    /// Features a head.
    pub head_dim: i32,
    /// Factor on the scores before softmax.
    pub scale: f32,
    /// Whether q, k and v have biases.
    pub qkv_bias: bool,
    /// Whether the output projection has one.
    pub o_bias: bool,
    /// A norm on each head's queries and keys, before the rotation.
    pub qk_norm: Option<NormKind>,
    /// The rotation.
    pub rope: Rope,
}

/// What the rows of a pass attend to.
pub enum Context<'a> {
    /// Rows of equal places: one mask, and one cache that holds them all.
    Together {
        /// For all rows.
        mask: &'a Mask,
        /// Of all rows.
        cache: Option<&'a mut LayerCache>,
    },
    /// Each row is a sequence of its own, with its own place, and any kind of cache will do. MLX's attention takes
    /// growing caches together; the others are attended to one after another, without padding.
    Apart {
        /// A mask and a cache for each row.
        rows: Vec<(&'a Mask, &'a mut LayerCache)>,
        /// What layers of equal places share.
        places: &'a Places,
    },
}

/// Where the rows of a step stand, for layers whose rows stand alike: made by the first that asks.
#[derive(Default)]
pub struct Places(RefCell<Option<(Vec<i32>, Array, Mask)>>);

impl Places {
    /// The offsets as an array, and the mask of rows that are padded to the longest.
    fn of(&self, offsets: &[i32]) -> Result<(Array, Mask)> {
        let mut known = self.0.borrow_mut();
        let (_, places, mask) = match &mut *known {
            Some(known) if known.0 == offsets => known,
            other => {
                let places = places(offsets)?;
                let mask = Mask::Array(ragged_mask(offsets, &places)?);
                other.insert((offsets.to_vec(), places, mask))
            }
        };
        Ok((places.clone(), mask.clone()))
    }
}

/// `q_proj`, `k_proj`, `v_proj`, `o_proj` and, in some families, `q_norm` and `k_norm`.
#[derive(Clone)]
pub struct Attention {
    pub(crate) q_proj: Linear,
    pub(crate) k_proj: Linear,
    pub(crate) v_proj: Linear,
    pub(crate) o_proj: Linear,
    pub(crate) q_norm: Option<RmsNorm>,
    pub(crate) k_norm: Option<RmsNorm>,
    pub(crate) args: AttentionArgs,
    /// Our own attention, where it is used.
    kernels: Option<Kernels>,
}

impl Attention {
    /// Takes the layer's tensors below `path`.
    pub fn load(
        args: AttentionArgs,
        loader: &mut Loader,
        path: &str,
    ) -> std::result::Result<Self, LoadError> {
        let (dim, n_heads, n_kv_heads, head_dim) =
            (args.hidden_size, args.n_heads, args.n_kv_heads, args.head_dim);
        if n_kv_heads <= 0 || n_heads % n_kv_heads != 0 {
            let text = format!("must divide num_attention_heads: {n_heads} / {n_kv_heads}");
            return Err(crate::models::ConfigError::new("num_key_value_heads", text).into());
        }
        let norm = |loader: &mut Loader, name: &str| {
            args.qk_norm.map(|kind| loader.norm(&format!("{path}.{name}"), head_dim, kind)).transpose()
        };
        Ok(Self {
            q_proj: loader.linear(&format!("{path}.q_proj"), dim, n_heads * head_dim, args.qkv_bias)?,
            k_proj: loader.linear(&format!("{path}.k_proj"), dim, n_kv_heads * head_dim, args.qkv_bias)?,
            v_proj: loader.linear(&format!("{path}.v_proj"), dim, n_kv_heads * head_dim, args.qkv_bias)?,
            o_proj: loader.linear(&format!("{path}.o_proj"), n_heads * head_dim, dim, args.o_bias)?,
            q_norm: norm(loader, "q_norm")?,
            k_norm: norm(loader, "k_norm")?,
            args,
            kernels: cpu_ops::kernels(),
        })
    }

    /// `[B, L, hidden_size]` to the same.
    pub fn forward(&self, x: &Array, context: Context) -> Result<Array> {
        let out = self.o_proj.forward(&self.attended(x, context)?)?;
        if out.ndim() == x.ndim() { Ok(out) } else { out.reshape(x.shape()) }
    }

    /// What `o_proj` takes for `x`: the heads' results, `[B, L, heads * dim]` or that many rows.
    pub(crate) fn attended(&self, x: &Array, context: Context) -> Result<Array> {
        let (batch, length) = (x.dim(0), x.dim(1));
        let rows = self.q_proj.rows(x)?;
        let queries = self.q_proj.forward(&rows)?;
        let (keys, values) = (self.k_proj.forward(&rows)?, self.v_proj.forward(&rows)?);
        match context {
            Context::Together { mask, cache } => {
                self.attend_projected([&queries, &keys, &values], batch, length, mask, cache)
            }
            Context::Apart { mut rows, places } => {
                if let Some(joined) = self.joined(&mut rows)? {
                    return self.attend_joined([&queries, &keys, &values], &mut joined.borrow_mut(), places);
                }
                let outputs = (0i32..).zip(rows).map(|(row, (mask, cache))| {
                    let part = |array: &Array| match array.ndim() {
                        2 => array.slice(0, row * length, (row + 1) * length),
                        _ => array.slice(0, row, row + 1),
                    };
                    let (queries, keys, values) = (part(&queries)?, part(&keys)?, part(&values)?);
                    self.attend_projected([&queries, &keys, &values], 1, length, mask, Some(cache))
                });
                Array::concatenate(&outputs.collect::<Result<Vec<_>>>()?, 0)
            }
        }
    }

    /// The rows' caches together, where MLX's attention can take them so. Ours computes a row in any company as alone.
    fn joined(&self, rows: &mut [(&Mask, &mut LayerCache)]) -> Result<Option<Rc<RefCell<JoinedRows>>>> {
        if self.kernels.is_some() || self.args.rope.depends_on_length() {
            return Ok(None);
        }
        JoinedRows::of(&mut rows.iter_mut().map(|(_, cache)| &mut **cache).collect::<Vec<_>>())
    }

    /// [`attend_projected`](Self::attend_projected) of one position of each row, all at once.
    fn attend_joined(
        &self,
        [queries, keys, values]: [&Array; 3],
        rows: &mut JoinedRows,
        places: &Places,
    ) -> Result<Array> {
        let (args, batch) = (&self.args, rows.offsets().len() as i32);
        let (places, mask) = places.of(rows.offsets())?;
        let turned = |x: &Array, heads, norm: Option<&RmsNorm>| {
            let x = split_heads(x, batch, 1, heads)?;
            match norm {
                Some(norm) => args.rope.forward_at(&norm.forward(&x)?, &places),
                None => args.rope.forward_at(&x, &places),
            }
        };
        let mut shape = queries.shape().to_vec();
        let queries = turned(queries, args.n_heads, self.q_norm.as_ref())?;
        let keys = turned(keys, args.n_kv_heads, self.k_norm.as_ref())?;
        let values = split_heads(values, batch, 1, args.n_kv_heads)?;
        let (keys, values) = rows.update_and_fetch(&keys, &values, &places)?;
        let heads = fast::scaled_dot_product_attention(&queries, &keys, &values, args.scale, &mask, None)?;
        if let Some(last) = shape.last_mut() {
            *last = -1;
        }
        heads.transpose(&[0, 2, 1, 3])?.reshape(&shape)
    }

    /// Attention over projected queries, keys and values, `[…, heads * dim]` of `B * L` rows each; returns heads as the
    /// output projection takes them.
    fn attend_projected(
        &self,
        [queries, keys, values]: [&Array; 3],
        batch: i32,
        length: i32,
        mask: &Mask,
        cache: Option<&mut LayerCache>,
    ) -> Result<Array> {
        let args = &self.args;
        let mut shape = queries.shape().to_vec();
        let values = split_heads(values, batch, length, args.n_kv_heads)?;
        let offset = cache.as_ref().map_or(0, |cache| cache.offset());
        let place =
            |x: &Array, heads, norm: Option<&RmsNorm>| self.place(x, batch, length, heads, norm, offset);
        let queries = place(queries, args.n_heads, self.q_norm.as_ref())?;
        let keys = place(keys, args.n_kv_heads, self.k_norm.as_ref())?;
        match &self.kernels {
            Some(kernels) => attend_ours(kernels, &queries, &keys, &values, cache, args.scale, mask),
            None => {
                let heads = attend(&queries, &keys, &values, cache, args.scale, mask)?;
                // `[B, heads, L, dim]` to the rows of the projections.
                if let Some(last) = shape.last_mut() {
                    *last = -1;
                }
                heads.transpose(&[0, 2, 1, 3])?.reshape(&shape)
            }
        }
    }

    /// Norms and rotates projected heads, `[…, heads * dim]` of `B * L` rows to `[B, heads, L, dim]`.
    fn place(
        &self,
        x: &Array,
        batch: i32,
        length: i32,
        heads: i32,
        norm: Option<&RmsNorm>,
        offset: i32,
    ) -> Result<Array> {
        let rope = &self.args.rope;
        if self.kernels.is_some() {
            // Our norm and rotation take heads where they lie.
            return match norm {
                Some(norm) => rope.forward_tokens(&norm.forward(x)?, heads, offset),
                None => rope.forward_tokens(x, heads, offset),
            };
        }
        let x = split_heads(x, batch, length, heads)?;
        match norm {
            Some(norm) => rope.forward(&norm.forward(&x)?, offset),
            None => rope.forward(&x, offset),
        }
    }
}

/// `[…, heads * dim]` of `B * L` rows to `[B, heads, L, dim]`.
fn split_heads(x: &Array, batch: i32, length: i32, heads: i32) -> Result<Array> {
    x.reshape(&[batch, length, heads, -1])?.transpose(&[0, 2, 1, 3])
}

/// The mask for hidden states `h`, `[B, L, D]` (`create_attention_mask` of base.py); built once a layer kind.
pub(crate) fn attention_mask(h: &Array, cache: Option<&LayerCache>, window: Option<i32>) -> Result<Mask> {
    let length = h.dim(1);
    match (cache, window) {
        (Some(cache), window) => cache.make_mask(length, window),
        (None, _) if length == 1 => Ok(Mask::None),
        (None, Some(window)) if length > window => causal_mask(length, 0, Some(window)).map(Mask::Array),
        (None, _) => Ok(Mask::Causal),
    }
}

/// Appends to the cache and attends (`scaled_dot_product_attention` of base.py). Shapes as in [`fast`].
fn attend(
    queries: &Array,
    keys: &Array,
    values: &Array,
    cache: Option<&mut LayerCache>,
    scale: f32,
    mask: &Mask,
) -> Result<Array> {
    let Some(cache) = cache else {
        return fast::scaled_dot_product_attention(queries, keys, values, scale, mask, None);
    };
    match cache.update_and_fetch(keys, values)? {
        Attended::Dense(keys, values) => {
            fast::scaled_dot_product_attention(queries, &keys, &values, scale, mask, None)
        }
        Attended::Quantized { keys, values, cache } => {
            quantized_attention(queries, &keys, &values, scale, mask, cache.scheme())
        }
    }
}

/// As [`attend`], by our kernels, which read packed keys and values as they are. `[B, L, heads * dim]`.
fn attend_ours(
    kernels: &Kernels,
    queries: &Array,
    keys: &Array,
    values: &Array,
    cache: Option<&mut LayerCache>,
    scale: f32,
    mask: &Mask,
) -> Result<Array> {
    let args = cpu_ops::AttentionArgs { scale, mask, sinks: None };
    let Some(cache) = cache else {
        return kernels.attention(queries, KeysValues::Dense(keys, values), &args);
    };
    match cache.update_and_fetch(keys, values)? {
        Attended::Dense(keys, values) => kernels.attention(queries, KeysValues::Dense(&keys, &values), &args),
        Attended::Quantized { keys, values, cache } => {
            let packed = KeysValues::Packed(heads_of(&keys), heads_of(&values), cache.scheme());
            kernels.attention(queries, packed, &args)
        }
    }
}

fn heads_of(packed: &Packed) -> PackedHeads<'_> {
    PackedHeads { weight: &packed.weight, scales: &packed.scales, biases: &packed.biases }
}

/// `quantized_scaled_dot_product_attention` of base.py, operation for operation.
fn quantized_attention(
    queries: &Array,
    keys: &Packed,
    values: &Packed,
    scale: f32,
    mask: &Mask,
    scheme: QuantParams,
) -> Result<Array> {
    let [batch, heads, length, dims] = *queries.shape() else {
        return Err(Error::new(format!("attention needs four axes, got {queries:?}")));
    };
    let kv_heads = keys.weight.dim(-3);
    let repeats = heads / kv_heads;
    let mut queries = queries.multiply_scalar(scale)?;
    let (mut keys, mut values) = (keys.clone(), values.clone());
    if repeats > 1 {
        queries = queries.reshape(&[batch, kv_heads, repeats, length, dims])?;
        keys = keys.map(|array| array.expand_dims(-3))?;
        values = values.map(|array| array.expand_dims(-3))?;
    }
    let mut scores =
        quantized_matmul(&queries, &keys.weight, &keys.scales, Some(&keys.biases), true, scheme)?;
    let mask = match mask {
        Mask::None => None,
        Mask::Causal => {
            let total = scores.dim(-1);
            Some(causal_mask(length, total - length, None)?)
        }
        Mask::Array(mask) if repeats > 1 && mask.ndim() > 3 => Some(mask.expand_dims(-3)?),
        Mask::Array(mask) => Some(mask.clone()),
    };
    if let Some(mask) = mask {
        scores = if mask.dtype() == Dtype::Bool {
            let lowest = Array::scalar(scores.dtype().finite_min(), scores.dtype())?;
            mask.select(&scores, &lowest)?
        } else {
            scores.add(&mask)?
        };
    }
    let scores = scores.softmax(-1, true)?;
    let out = quantized_matmul(&scores, &values.weight, &values.scales, Some(&values.biases), false, scheme)?;
    if repeats > 1 { out.reshape(&[batch, heads, length, dims]) } else { Ok(out) }
}
