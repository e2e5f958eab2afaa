//! The result of attention, written row by row.

use super::super::pieces::Pieces;
use super::super::simd::{LANES, Simd, from_f32};
use super::plan::Tile;
use super::{Attention, FloatsMut, Layout};

/// The result's rows.
pub(super) struct Output<'a> {
    pieces: OutputPieces<'a>,
    layout: Layout,
    heads: usize,
    length: usize,
    value_dim: usize,
    /// Rows of the result before the first.
    before: usize,
}

enum OutputPieces<'a> {
    F32(Pieces<'a, f32>),
    Shared(&'a Pieces<'a, f32>),
    F16(Pieces<'a, half::f16>),
    Bf16(Pieces<'a, half::bf16>),
}

impl<'a> Output<'a> {
    pub(super) fn new(a: &Attention<'_>, layout: Layout, out: FloatsMut<'a>) -> Self {
        let pieces = match out {
            FloatsMut::F32(out) => OutputPieces::F32(Pieces::new(out)),
            FloatsMut::F16(out) => OutputPieces::F16(Pieces::new(out)),
            FloatsMut::Bf16(out) => OutputPieces::Bf16(Pieces::new(out)),
        };
        Self::over(a, layout, pieces)
    }

    /// Results `[…, length, heads, value_dim]` that others share, each with its own rows: these begin at token `first`.
    pub(super) fn shared(a: &Attention<'_>, first: usize, out: &'a Pieces<'a, f32>) -> Self {
        let before = first * a.queries.shape[1];
        Self { before, ..Self::over(a, Layout::TokensFirst, OutputPieces::Shared(out)) }
    }

    fn over(a: &Attention<'_>, layout: Layout, pieces: OutputPieces<'a>) -> Self {
        let [_, heads, length, _] = a.queries.shape;
        Self { pieces, layout, heads, length, value_dim: a.values.shape()[3], before: 0 }
    }

    /// Divides a row by its sum and writes it.
    ///
    /// # Safety
    /// No other thread writes this row.
    #[inline(always)]
    pub(super) unsafe fn write<S: Simd>(
        &self,
        s: S,
        tile: &Tile,
        row: usize,
        values: &mut [[f32; LANES]],
        sum: f32,
    ) {
        let inverse = s.splat(if sum == 0.0 { 0.0 } else { 1.0 / sum });
        for v in values.iter_mut() {
            let scaled = s.mul(s.load(v), inverse);
            s.store(v, scaled);
        }
        let (head, position) = (tile.head(row), tile.position(row));
        let index = match self.layout {
            Layout::HeadsFirst => (tile.batch * self.heads + head) * self.length + position,
            Layout::TokensFirst => (tile.batch * self.length + position) * self.heads + head,
        };
        let index = self.before + index;
        let range = index * self.value_dim..(index + 1) * self.value_dim;
        let values = values.as_flattened();
        // SAFETY: a row of the result belongs to one row of one tile, and each tile to one task.
        unsafe {
            match &self.pieces {
                OutputPieces::F32(out) => from_f32(s, values, out.piece(range)),
                OutputPieces::Shared(out) => from_f32(s, values, out.piece(range)),
                OutputPieces::F16(out) => from_f32(s, values, out.piece(range)),
                OutputPieces::Bf16(out) => from_f32(s, values, out.piece(range)),
            }
        }
    }
}
