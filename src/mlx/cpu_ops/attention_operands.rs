//! Attention's operands: views with strides, copied only where a row's elements are not adjacent.

use std::borrow::Cow;

use super::operands::{
    Ordered, Run, broadcast_strides, nth, ordered, shape, spanned, spanned_floats, strides, text,
};
use crate::checkpoint::QuantParams;
use crate::mlx::cpu::kernels::attention::{Mask, QuantizedHeads};
use crate::mlx::cpu::kernels::{Floats, Heads};
use crate::mlx::dtype::Dtype;
use crate::mlx::kernel::View;

/// Values of a view as they lie, or put in order.
enum Values<'a> {
    Spanned(Floats<'a>),
    Ordered(Ordered<'a>),
}

impl Values<'_> {
    fn floats(&self) -> Floats<'_> {
        match self {
            Self::Spanned(values) => *values,
            Self::Ordered(values) => values.floats(),
        }
    }
}

/// `[B, heads, L, dim]` of any strides.
pub(super) struct HeadOperand<'a> {
    values: Values<'a>,
    shape: [usize; 4],
    strides: [usize; 4],
}

impl<'a> HeadOperand<'a> {
    pub(super) fn new(view: &View<'a>) -> Run<Self> {
        let shape = shape::<4>(view)?;
        match strides::<4>(view) {
            Ok(strides) if shape[3] == 1 || strides[3] == 1 => {
                Ok(Self { values: Values::Spanned(spanned_floats(view)?), shape, strides })
            }
            _ => Self::in_order(view),
        }
    }

    fn in_order(view: &View<'a>) -> Run<Self> {
        let shape = shape::<4>(view)?;
        Ok(Self { values: Values::Ordered(Ordered::new(view)?), shape, strides: row_major(shape) })
    }

    pub(super) fn heads(&self) -> Run<Heads<'_>> {
        Heads::new(self.values.floats(), self.shape, self.strides).map_err(text)
    }
}

fn row_major([_, heads, length, dim]: [usize; 4]) -> [usize; 4] {
    [heads * length * dim, length * dim, dim, 1]
}

/// Packed words, scales and biases `[B, heads, L, …]`.
pub(super) struct PackedOperand<'a> {
    words: Cow<'a, [u32]>,
    word_strides: [usize; 4],
    scales: HeadOperand<'a>,
    biases: HeadOperand<'a>,
    params: QuantParams,
}

impl<'a> PackedOperand<'a> {
    pub(super) fn new(views: &[View<'a>], params: QuantParams) -> Run<Self> {
        let view = nth(views, 0)?;
        let word_shape = shape::<4>(view)?;
        let (words, word_strides) = match strides::<4>(view) {
            Ok(strides) if word_shape[3] == 1 || strides[3] == 1 => {
                (Cow::Borrowed(spanned::<u32>(view, Dtype::Uint32)?), strides)
            }
            _ => (ordered::<u32>(view, Dtype::Uint32)?, row_major(word_shape)),
        };
        let (scales, biases) = (nth(views, 1)?, nth(views, 2)?);
        let (mut s, mut b) = (HeadOperand::new(scales)?, HeadOperand::new(biases)?);
        if s.strides[..3] != b.strides[..3] {
            (s, b) = (HeadOperand::in_order(scales)?, HeadOperand::in_order(biases)?);
        }
        let dims = |shape: &[usize; 4]| [shape[0], shape[1], shape[2]];
        let words_needed = s.shape[3].checked_mul(params.group_size as usize * usize::from(params.bits) / 32);
        if s.shape != b.shape || dims(&word_shape) != dims(&s.shape) || words_needed != Some(word_shape[3]) {
            return Err(format!("packed shapes {word_shape:?}, {:?} and {:?} differ", s.shape, b.shape));
        }
        Ok(Self { words, word_strides, scales: s, biases: b, params })
    }

    pub(super) fn heads(&self) -> Run<QuantizedHeads<'_>> {
        let [batch, heads, length, groups] = self.scales.shape;
        let (bits, group) = (usize::from(self.params.bits), self.params.group_size as usize);
        let first = |strides: [usize; 4]| [strides[0], strides[1], strides[2]];
        QuantizedHeads::new(
            &self.words,
            self.scales.values.floats(),
            self.biases.values.floats(),
            [batch, heads, length, groups * group],
            first(self.word_strides),
            first(self.scales.strides),
            bits,
            group,
        )
        .map_err(text)
    }
}

/// A mask that is broadcast to `[B, heads, L, T]`.
pub(super) struct MaskOperand<'a> {
    values: MaskValues<'a>,
    strides: [usize; 4],
}

enum MaskValues<'a> {
    Allowed(&'a [u8]),
    Bias(Floats<'a>),
}

impl<'a> MaskOperand<'a> {
    pub(super) fn new(view: &View<'a>, area: [usize; 4]) -> Run<Self> {
        let values = match view.dtype {
            Dtype::Bool => MaskValues::Allowed(spanned::<u8>(view, Dtype::Bool)?),
            _ => MaskValues::Bias(spanned_floats(view)?),
        };
        Ok(Self { values, strides: broadcast_strides(view, area)? })
    }

    pub(super) fn mask(&self) -> Mask<'_> {
        let strides = self.strides;
        match self.values {
            MaskValues::Allowed(allowed) => Mask::Bool { allowed, strides },
            MaskValues::Bias(bias) => Mask::Additive { bias, strides },
        }
    }
}
