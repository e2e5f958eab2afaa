//! Keys or values of a block in float32, whatever their storage.

use std::ops::Range;

use super::super::affine::{AffineRow, dequantize_row};
use super::super::simd::{Kernel, Simd, to_f32};
use super::block::Span;
use super::plan::{Tile, padded};
use super::{Floats, QuantizedHeads, Stored};

/// Writes the rows `seen` of a block that begins at position `first` in float32, padded with zeros.
pub(super) struct Convert<'t> {
    pub tile: &'t Tile,
    pub heads: &'t Stored<'t>,
    pub first: usize,
    pub seen: Span,
    pub to: &'t mut [f32],
}

impl Kernel for Convert<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { tile, heads, first, seen, to } = self;
        let (dim, width) = (heads.shape()[3], padded(heads.shape()[3]));
        let to = to[seen.low * width..seen.high * width].chunks_exact_mut(width);
        let positions = first + seen.low..first + seen.high;
        match heads {
            Stored::Dense(heads) => {
                let start = |position| heads.start(tile.batch, tile.kv_head, position);
                match heads.data {
                    Floats::F32(from) => {
                        for (position, to) in positions.zip(to) {
                            to_f32(s, &from[start(position)..][..dim], to);
                        }
                    }
                    Floats::F16(from) => {
                        for (position, to) in positions.zip(to) {
                            to_f32(s, &from[start(position)..][..dim], to);
                        }
                    }
                    Floats::Bf16(from) => {
                        for (position, to) in positions.zip(to) {
                            to_f32(s, &from[start(position)..][..dim], to);
                        }
                    }
                }
            }
            Stored::Quantized(q) => {
                let row = |position| q.row(tile.batch, tile.kv_head, position);
                match (q.scales, q.biases) {
                    (Floats::F32(scales), Floats::F32(biases)) => {
                        for (position, to) in positions.zip(to) {
                            dequantize_row(s, q.bits, q.group, row(position).of(scales, biases), to);
                        }
                    }
                    (Floats::F16(scales), Floats::F16(biases)) => {
                        for (position, to) in positions.zip(to) {
                            dequantize_row(s, q.bits, q.group, row(position).of(scales, biases), to);
                        }
                    }
                    (Floats::Bf16(scales), Floats::Bf16(biases)) => {
                        for (position, to) in positions.zip(to) {
                            dequantize_row(s, q.bits, q.group, row(position).of(scales, biases), to);
                        }
                    }
                    // Refused when the view was made.
                    _ => to.for_each(|to| to.fill(f32::NAN)),
                }
            }
        }
    }
}

/// Where one row of a quantized cache lies.
struct QuantizedRow<'a> {
    words: &'a [u32],
    groups: Range<usize>,
}

impl<'a> QuantizedRow<'a> {
    #[inline(always)]
    fn of<E>(self, scales: &'a [E], biases: &'a [E]) -> AffineRow<'a, E> {
        AffineRow { words: self.words, scales: &scales[self.groups.clone()], biases: &biases[self.groups] }
    }
}

impl<'a> QuantizedHeads<'a> {
    #[inline(always)]
    fn row(&self, batch: usize, head: usize, position: usize) -> QuantizedRow<'a> {
        let at = |strides: [usize; 3]| batch * strides[0] + head * strides[1] + position * strides[2];
        let (words, groups) = (at(self.code_strides), at(self.group_strides));
        let dim = self.shape[3];
        QuantizedRow {
            words: &self.codes[words..][..dim / 32 * self.bits],
            groups: groups..groups + dim / self.group,
        }
    }
}
