//! Scaled dot-product attention over keys and values as caches hold them: slices of larger buffers, plain or packed.

use std::sync::Arc;

use super::attention_operands::{HeadOperand, MaskOperand, PackedOperand};
use super::operands::{Ordered, Run, floats_mut, nth, text};
use super::{Kernels, refuse};
use crate::checkpoint::{QuantMode, QuantParams};
use crate::mlx::cpu::kernels::attention::{self as kernel, Attention, Layout, Stored};
use crate::mlx::fast::{self, Mask};
use crate::mlx::kernel::{Kernel, View, custom};
use crate::mlx::{Array, Dtype, Result, dequantize};

/// Packed `[B, kv_heads, T, dim]`, affine, in groups along `dim`.
#[derive(Clone, Copy, Debug)]
pub struct PackedHeads<'a> {
    /// `uint32`, `[B, kv_heads, T, dim * bits / 32]`.
    pub weight: &'a Array,
    /// `[B, kv_heads, T, dim / group_size]`.
    pub scales: &'a Array,
    /// As the scales.
    pub biases: &'a Array,
}

impl<'a> PackedHeads<'a> {
    fn arrays(&self) -> [&'a Array; 3] {
        [self.weight, self.scales, self.biases]
    }
}

/// Keys and values.
#[derive(Clone, Copy, Debug)]
pub enum KeysValues<'a> {
    /// `[B, kv_heads, T, dim]` each.
    Dense(&'a Array, &'a Array),
    /// The same, packed; attention reads them as they are.
    Packed(PackedHeads<'a>, PackedHeads<'a>, QuantParams),
}

/// What attention takes besides queries, keys and values.
#[derive(Clone, Copy, Debug)]
pub struct AttentionArgs<'a> {
    /// Factor on the scores.
    pub scale: f32,
    /// What a query may attend to.
    pub mask: &'a Mask,
    /// A logit a head, `[heads]`, that takes part in the softmax and has no value.
    pub sinks: Option<&'a Array>,
}

impl Kernels {
    /// `softmax(q k^T * scale + mask) v` with `queries` `[B, heads, L, dim]`, laid out as the output projection takes
    /// it: `[B, L, heads * value_dim]`. A query that may attend to nothing gets zeros.
    ///
    /// # Errors
    /// Shapes or types that do not fit together.
    pub fn attention(&self, queries: &Array, keys_values: KeysValues, args: &AttentionArgs) -> Result<Array> {
        const OP: &str = "attention";
        let &[batch, heads, length, _] = queries.shape() else {
            return refuse(OP, format!("queries {queries:?} are not [B, heads, L, dim]"));
        };
        let mut inputs = vec![queries];
        let (value_dim, packed) = match keys_values {
            KeysValues::Dense(keys, values) => {
                inputs.extend([keys, values]);
                (values.dim(-1), None)
            }
            KeysValues::Packed(keys, values, params) => {
                if params.mode != QuantMode::Affine {
                    return refuse(OP, format!("keys packed in the mode {} are unknown", params.mode.name()));
                }
                inputs.extend(keys.arrays().into_iter().chain(values.arrays()));
                (values.scales.dim(-1).saturating_mul(params.group_size as i32), Some(params))
            }
        };
        let kv_heads = inputs[1].dim(1);
        for array in &inputs[1..] {
            if array.ndim() != 4 || array.dim(0) != batch || array.dim(1) != kv_heads {
                return refuse(OP, format!("{array:?} is not of the batch or heads of {queries:?}"));
            }
        }
        if kv_heads < 1 || heads % kv_heads != 0 {
            return refuse(OP, format!("{heads} query heads are no multiple of {kv_heads} key heads"));
        }
        let positions = inputs[1].dim(2);
        if matches!(args.mask, Mask::Causal) && positions < length {
            return refuse(OP, format!("{positions} keys are too few for {length} causal queries"));
        }
        let mask = match args.mask {
            Mask::Array(mask) => {
                check_mask(mask, [batch, heads, length, positions])?;
                inputs.push(mask);
                true
            }
            _ => false,
        };
        if let Some(sinks) = args.sinks {
            if sinks.shape() != [heads] {
                return refuse(OP, format!("sinks {sinks:?} are not one a head of {heads}"));
            }
            inputs.push(sinks);
        }
        let node = Sdpa {
            kernels: self.clone(),
            scale: args.scale,
            causal: matches!(args.mask, Mask::Causal),
            packed,
            mask,
            sinks: args.sinks.is_some(),
        };
        let shape = [batch, length, heads.saturating_mul(value_dim)];
        custom(c"attention", Arc::new(node), &inputs, &shape, queries.dtype())
    }
}

fn check_mask(mask: &Array, area: [i32; 4]) -> Result<()> {
    let fits = |(&dim, &wanted): (&i32, &i32)| dim == 1 || dim == wanted;
    let broadcasts = mask.ndim() <= 4 && mask.shape().iter().rev().zip(area.iter().rev()).all(fits);
    let known = mask.dtype() == Dtype::Bool || mask.dtype().is_floating() && mask.dtype() != Dtype::Float64;
    if broadcasts && known {
        return Ok(());
    }
    refuse("attention", format!("the mask {mask:?} does not broadcast to {area:?}"))
}

/// Inputs: queries, keys and values (one array each, or three), perhaps a mask, perhaps sinks.
struct Sdpa {
    kernels: Kernels,
    scale: f32,
    causal: bool,
    packed: Option<QuantParams>,
    mask: bool,
    sinks: bool,
}

impl Sdpa {
    /// Arrays of keys, as of values.
    fn parts(&self) -> usize {
        if self.packed.is_some() { 3 } else { 1 }
    }
}

impl Kernel for Sdpa {
    fn run(&self, inputs: &[View], outputs: &[View]) -> Run<()> {
        let parts = self.parts();
        let rest = inputs.get(1 + 2 * parts..).ok_or("keys or values are missing")?;
        let queries = HeadOperand::new(nth(inputs, 0)?)?;
        let keys = KeyOperand::new(&inputs[1..1 + parts], self.packed)?;
        let values = KeyOperand::new(&inputs[1 + parts..1 + 2 * parts], self.packed)?;
        let (queries, keys, values) = (queries.heads()?, keys.stored()?, values.stored()?);
        let [batch, heads, length, _] = queries.shape();
        let area = [batch, heads, length, keys.shape()[2]];
        let mask = rest.first().filter(|_| self.mask).map(|mask| MaskOperand::new(mask, area)).transpose()?;
        let sinks = rest.get(usize::from(self.mask)).filter(|_| self.sinks).map(Ordered::new).transpose()?;
        let attention = Attention {
            queries,
            keys,
            values,
            scale: self.scale,
            causal: self.causal,
            window: None,
            mask: mask.as_ref().map(MaskOperand::mask),
            sinks: sinks.as_ref().map(Ordered::floats),
        };
        let out = floats_mut(nth(outputs, 0)?)?;
        let (isa, pool) = (self.kernels.isa(), self.kernels.pool());
        kernel::attention(isa, pool, &attention, Layout::TokensFirst, out).map_err(text)
    }

    fn stock(&self, inputs: &[Array]) -> Result<Vec<Array>> {
        let parts = self.parts();
        let dense = |arrays: &[Array]| match self.packed {
            None => Ok(arrays[0].clone()),
            Some(params) => dequantize(&arrays[0], &arrays[1], Some(&arrays[2]), params),
        };
        let queries = &inputs[0];
        let (keys, values) = (dense(&inputs[1..])?, dense(&inputs[1 + parts..])?);
        let rest = &inputs[1 + 2 * parts..];
        let mask = match rest.first().filter(|_| self.mask) {
            Some(mask) if mask.dtype() == Dtype::Bool => Mask::Array(mask.clone()),
            // MLX refuses masks of a wider type than the result's.
            Some(mask) => Mask::Array(mask.astype(queries.dtype())?),
            None if self.causal => Mask::Causal,
            None => Mask::None,
        };
        let sinks = rest.get(usize::from(self.mask)).filter(|_| self.sinks);
        let out = fast::scaled_dot_product_attention(queries, &keys, &values, self.scale, &mask, sinks)?;
        let out = out.transpose(&[0, 2, 1, 3])?.reshape(&[queries.dim(0), queries.dim(2), -1])?;
        Ok(vec![out])
    }
}

/// Keys or values.
enum KeyOperand<'a> {
    Dense(HeadOperand<'a>),
    Packed(PackedOperand<'a>),
}

impl<'a> KeyOperand<'a> {
    fn new(views: &[View<'a>], packed: Option<QuantParams>) -> Run<Self> {
        Ok(match packed {
            None => Self::Dense(HeadOperand::new(nth(views, 0)?)?),
            Some(params) => Self::Packed(PackedOperand::new(views, params)?),
        })
    }

    fn stored(&self) -> Run<Stored<'_>> {
        match self {
            Self::Dense(heads) => heads.heads().map(Stored::Dense),
            Self::Packed(heads) => heads.heads().map(Stored::Quantized),
        }
    }
}
