//! Scaled dot-product attention: `softmax(q · kᵀ · scale + mask) · v`.
//!
//! One query token and many, heads that share keys (GQA), causal order, sliding windows, array masks, sinks, dense
//! and affine-quantized caches given as strided views. Everything is accumulated in float32.
//!
//! A query's result has the same bits whether it is computed alone or with others, however many threads there are
//! and however a prompt is cut into chunks, as long as its visible keys lie at the same indices: keys are summed in
//! one order, described in [`block`].

mod block;
mod convert;
mod output;
mod plan;
pub mod reference;
mod staged;
#[cfg(test)]
mod tests;
mod work;

use std::ops::Range;

pub(super) use staged::{PartialPieces, Partials, Staged};

use super::super::{Isa, Pool};
use super::affine;
use super::error::{KernelError, expect, expect_reach};
use super::floats::{Floats, FloatsMut};
use super::views::Heads;

const OP: &str = "attention";

/// Keys or values as MLX's `QuantizedKVCache` holds them: `[batch, heads, length, dim]` in affine groups along the
/// last dimension.
#[derive(Clone, Copy, Debug)]
pub struct QuantizedHeads<'a> {
    codes: &'a [u32],
    scales: Floats<'a>,
    biases: Floats<'a>,
    shape: [usize; 4],
    code_strides: [usize; 3],
    group_strides: [usize; 3],
    bits: usize,
    group: usize,
}

impl<'a> QuantizedHeads<'a> {
    /// A view. `shape` counts values; `code_strides` counts words of `codes` and `group_strides` entries of `scales`
    /// and of `biases`, both for the first three dimensions (the last is adjacent). `bits` is 2, 3, 4, 5, 6 or 8,
    /// `group` 32, 64 or 128.
    ///
    /// # Errors
    /// When a width is not among these, `dim` is no multiple of `group`, the types of scales and biases differ or
    /// a view reaches past the end of its buffer.
    pub fn new(
        codes: &'a [u32],
        scales: Floats<'a>,
        biases: Floats<'a>,
        shape: [usize; 4],
        code_strides: [usize; 3],
        group_strides: [usize; 3],
        bits: usize,
        group: usize,
    ) -> Result<Self, KernelError> {
        affine::check(OP, bits, group, shape[3])?;
        let [b, h, t, dim] = shape;
        let reach = |what, [x, y, z]: [usize; 3], last, found| {
            expect_reach(OP, what, [b, h, t, last], [x, y, z, 1], found)
        };
        reach("the codes", code_strides, dim / 32 * bits, codes.len())?;
        reach("the scales", group_strides, dim / group, scales.len())?;
        reach("the biases", group_strides, dim / group, biases.len())?;
        affine::expect_one_type(OP, &scales, &biases)?;
        Ok(Self { codes, scales, biases, shape, code_strides, group_strides, bits, group })
    }
}

/// Keys or values.
#[derive(Clone, Copy, Debug)]
pub enum Stored<'a> {
    /// Plain numbers.
    Dense(Heads<'a>),
    /// Affine groups.
    Quantized(QuantizedHeads<'a>),
}

impl Stored<'_> {
    /// Batch, heads, length, dim.
    pub fn shape(&self) -> [usize; 4] {
        match self {
            Self::Dense(heads) => heads.shape,
            Self::Quantized(heads) => heads.shape,
        }
    }
}

/// An array mask over `[batch, heads, length, keys]`; a stride of 0 repeats along a dimension.
#[derive(Clone, Copy, Debug)]
pub enum Mask<'a> {
    /// Keys where the byte is not 0 are visible.
    Bool {
        /// One byte a key.
        allowed: &'a [u8],
        /// Strides in elements.
        strides: [usize; 4],
    },
    /// Added to the scores; -inf hides a key.
    Additive {
        /// One number a key.
        bias: Floats<'a>,
        /// Strides in elements.
        strides: [usize; 4],
    },
}

/// What to compute.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// `[batch, heads, length, dim]`.
    pub queries: Heads<'a>,
    /// `[batch, kv_heads, keys, dim]`; `heads` is a multiple of `kv_heads`.
    pub keys: Stored<'a>,
    /// `[batch, kv_heads, keys, value_dim]`.
    pub values: Stored<'a>,
    /// The factor of the scores.
    pub scale: f32,
    /// Whether a query sees no key after its own; the last query stands at the last key.
    pub causal: bool,
    /// How many keys a query sees, its own included, counted backwards from its own; implies `causal`.
    pub window: Option<usize>,
    /// Applied besides `causal` and `window`.
    pub mask: Option<Mask<'a>>,
    /// A logit a head that takes part in the softmax and has no value.
    pub sinks: Option<Floats<'a>>,
}

impl Attention<'_> {
    /// The keys that the query at `position` may see, by `causal` and `window`.
    pub(self) fn visible(&self, position: usize) -> Range<usize> {
        let (length, keys) = (self.queries.shape[2], self.keys.shape()[2]);
        if !self.causal && self.window.is_none() {
            return 0..keys;
        }
        let end = keys - length + position + 1;
        end.saturating_sub(self.window.unwrap_or(end))..end
    }

    fn check(&self, out: usize) -> Result<(), KernelError> {
        let [batch, heads, length, dim] = self.queries.shape;
        let ([key_batch, kv_heads, keys, key_dim], values) = (self.keys.shape(), self.values.shape());
        expect(OP, "the batch of the keys", batch, key_batch)?;
        expect(OP, "the batch of the values", batch, values[0])?;
        expect(OP, "the heads of the values", kv_heads, values[1])?;
        expect(OP, "the length of the values", keys, values[2])?;
        expect(OP, "the dimension of the keys", dim, key_dim)?;
        let refuse = |what, found, rule| Err(KernelError::Unsupported { op: OP, what, found, rule });
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return refuse("the number of query heads", heads, "a multiple of the key heads");
        }
        if (self.causal || self.window.is_some()) && keys < length {
            return refuse("the number of keys", keys, "at least that of the queries under a causal mask");
        }
        if self.window == Some(0) {
            return refuse("the window", 0, "at least 1");
        }
        let area = [batch, heads, length, keys];
        match &self.mask {
            None => {}
            Some(Mask::Bool { allowed, strides }) => {
                expect_reach(OP, "the mask", area, *strides, allowed.len())?;
            }
            Some(Mask::Additive { bias, strides }) => {
                expect_reach(OP, "the mask", area, *strides, bias.len())?;
            }
        }
        if let Some(sinks) = &self.sinks {
            expect(OP, "the number of sinks", heads, sinks.len())?;
        }
        let rows = batch.checked_mul(heads).and_then(|rows| rows.checked_mul(length));
        let needed = rows.and_then(|rows| rows.checked_mul(values[3])).unwrap_or(usize::MAX);
        expect(OP, "the number of results", needed, out)
    }
}

/// How results are laid out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// `[batch, heads, length, value_dim]`.
    #[default]
    HeadsFirst,
    /// `[batch, length, heads, value_dim]`, as the output projection takes it.
    TokensFirst,
}

/// Computes attention into `out`, rounded to its type. A query that sees no key gets zeros.
///
/// # Errors
/// When shapes do not fit together, or the work fails.
pub fn attention(
    isa: Isa,
    pool: &Pool,
    attention: &Attention<'_>,
    layout: Layout,
    out: FloatsMut<'_>,
) -> Result<(), KernelError> {
    attention.check(out.len())?;
    work::run(isa, pool, attention, layout, out)
}
