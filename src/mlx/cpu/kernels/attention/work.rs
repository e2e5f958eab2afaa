//! Attention cut into tasks.
//!
//! A tile is a few query positions of all heads that share keys. Normally a task walks over all blocks of a tile.
//! When there are fewer tiles than threads (one token, few heads) the blocks of a tile are split over several tasks,
//! each block's result is kept, and they are merged in the order in which one task would have.

use std::cell::Cell;
use std::ops::Range;

use super::super::pieces::Pieces;
use super::super::simd::{self, Element, Kernel, LANES, Simd, to_f32};
use super::block::{
    BLOCK, BlockRows, Factors, MAX_ROWS, Span, State, Weights, add_values, merge_states, merge_values,
    scores, weigh,
};
use super::convert::Convert;
use super::output::Output;
use super::plan::{Plan, SERIAL_WORK, Tile, padded};
use super::{Attention, Floats, FloatsMut, Isa, KernelError, Layout, Mask, Pool, Stored};

/// From this many rows on, half-precision keys and values are converted once a block instead of once a row tile.
const CONVERT_ROWS: usize = 12;

thread_local! {
    static SCRATCH: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

pub(super) fn run(
    isa: Isa,
    pool: &Pool,
    a: &Attention<'_>,
    layout: Layout,
    out: FloatsMut<'_>,
) -> Result<(), KernelError> {
    if out.is_empty() {
        return Ok(());
    }
    let plan = Plan::new(a, pool.threads());
    let out = Output::new(a, layout, out);
    if plan.splits > 1 {
        return run_split(isa, pool, a, plan, &out);
    }
    let whole = |unit: usize| attend(isa, a, plan.tile(a, unit), 0..plan.blocks, Target::Whole(&out));
    if plan.serial {
        pool.run(1, &|_| (0..plan.units).for_each(&whole))?;
    } else {
        pool.run(plan.units, &whole)?;
    }
    Ok(())
}

/// As [`run`], with the blocks of each tile spread over `plan.splits` tasks.
fn run_split(
    isa: Isa,
    pool: &Pool,
    a: &Attention<'_>,
    plan: Plan,
    out: &Output<'_>,
) -> Result<(), KernelError> {
    let rows = plan.tile_rows();
    let width = padded(a.values.shape()[3]);
    // One entry a tile, block and row.
    let mut states = vec![State::EMPTY; plan.units * plan.blocks * rows];
    let mut values = vec![0.0; states.len() * width];
    let (state_pieces, value_pieces) = (Pieces::new(&mut states), Pieces::new(&mut values));
    pool.run(plan.units * plan.splits, &|task| {
        let (unit, split) = (task / plan.splits, task % plan.splits);
        let blocks = plan.split(split);
        let (first, last) = (unit * plan.blocks + blocks.start, unit * plan.blocks + blocks.end);
        // SAFETY: each pair of tile and split is one task, and splits of a tile have no block in common.
        let (states, values) = unsafe {
            (
                state_pieces.piece(first * rows..last * rows),
                value_pieces.piece(first * rows * width..last * rows * width),
            )
        };
        attend(isa, a, plan.tile(a, unit), blocks, Target::Blocks { states, values, rows });
    })?;
    let combine = |unit: usize| {
        let each = plan.blocks * rows;
        let states = &states[unit * each..][..each];
        let values = &values[unit * each * width..][..each * width];
        simd::run(isa, Combine { a, tile: plan.tile(a, unit), states, values, rows, out });
    };
    if values.len() * 2 < SERIAL_WORK {
        pool.run(1, &|_| (0..plan.units).for_each(&combine))?;
    } else {
        pool.run(plan.units, &combine)?;
    }
    Ok(())
}

/// Computes some blocks of a tile.
pub(super) fn attend(isa: Isa, a: &Attention<'_>, tile: Tile, blocks: Range<usize>, target: Target<'_>) {
    let mut scratch = SCRATCH.take();
    simd::run(isa, Attend { a, tile, blocks, scratch: &mut scratch, target });
    SCRATCH.set(scratch);
}

/// Where the results of [`Attend`] go.
pub(super) enum Target<'t> {
    /// Merged and written out.
    Whole(&'t Output<'t>),
    /// Kept apart for [`Combine`]: `[blocks, rows]`.
    Blocks { states: &'t mut [State], values: &'t mut [f32], rows: usize },
}

/// Some blocks of one tile.
struct Attend<'t> {
    a: &'t Attention<'t>,
    tile: Tile,
    blocks: Range<usize>,
    scratch: &'t mut Vec<f32>,
    target: Target<'t>,
}

impl Kernel for Attend<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { a, tile, blocks, scratch, mut target } = self;
        let (key_width, value_width) = (padded(a.queries.shape[3]), padded(a.values.shape()[3]));
        let rows = tile.rows();
        scratch.resize((rows + BLOCK) * (key_width + value_width) + LANES, 0.0);
        // A vector that straddles two cache lines is slow to load.
        let skipped = scratch.as_ptr().align_offset(64).min(LANES);
        let (queries, rest) = scratch[skipped..].split_at_mut(rows * key_width);
        let (key_block, rest) = rest.split_at_mut(BLOCK * key_width);
        let (value_block, results) = rest.split_at_mut(BLOCK * value_width);
        load_queries(s, a, &tile, queries);
        results.fill(0.0);
        let mut states: Vec<State> = (0..rows).map(|row| tile.initial(a, row)).collect();
        let queries = queries.as_chunks::<LANES>().0;
        let first_block = blocks.start;
        for block in blocks {
            let spans = [tile.span(a, 0, block), tile.span(a, rows - 1, block)];
            // Later positions see later keys, so the first and last row bound all others.
            let all = Span { low: spans[0].low, high: spans[1].high };
            let mut step = Step {
                a,
                tile: &tile,
                block,
                count: all.high,
                queries,
                states: &mut states,
                results: results.as_chunks_mut().0,
                keep: false,
            };
            if let Target::Blocks { states, values, rows } = &mut target {
                let (first, width) = ((block - first_block) * *rows, value_width);
                step.states = &mut states[first..][..*rows];
                step.results = values[first * width..][..*rows * width].as_chunks_mut().0;
                step.keep = true;
            }
            if all.is_empty() {
                continue;
            }
            step.run(s, all, key_block, value_block);
        }
        if let Target::Whole(out) = target {
            let vectors = value_width / LANES;
            for (row, state) in states.iter().enumerate() {
                let values = &mut results.as_chunks_mut().0[row * vectors..][..vectors];
                // SAFETY: this task alone has the tile.
                unsafe { out.write(s, &tile, row, values, state.sum) };
            }
        }
    }
}

/// The tile's queries in float32, scaled, padded to vectors with zeros.
#[inline(always)]
fn load_queries<S: Simd>(s: S, a: &Attention<'_>, tile: &Tile, to: &mut [f32]) {
    let dim = a.queries.shape[3];
    let scale = s.splat(a.scale);
    for (row, to) in to.chunks_mut(padded(dim).max(1)).enumerate() {
        let start = a.queries.start(tile.batch, tile.head(row), tile.position(row));
        match a.queries.data {
            Floats::F32(from) => to_f32(s, &from[start..][..dim], to),
            Floats::F16(from) => to_f32(s, &from[start..][..dim], to),
            Floats::Bf16(from) => to_f32(s, &from[start..][..dim], to),
        }
        for v in to.as_chunks_mut::<LANES>().0 {
            let scaled = s.mul(s.load(v), scale);
            s.store(v, scaled);
        }
    }
}

/// One block of one tile.
struct Step<'t> {
    a: &'t Attention<'t>,
    tile: &'t Tile,
    block: usize,
    /// Keys of the block that some row sees, counted from its start.
    count: usize,
    queries: &'t [[f32; LANES]],
    states: &'t mut [State],
    results: &'t mut [[f32; LANES]],
    /// Whether the block's results stay apart instead of being merged to those before it.
    keep: bool,
}

impl Step<'_> {
    #[inline(always)]
    fn run<S: Simd>(&mut self, s: S, seen: Span, key_block: &mut [f32], value_block: &mut [f32]) {
        let a = self.a;
        if let (Stored::Dense(keys), Stored::Dense(values)) = (&a.keys, &a.values) {
            let start = |heads: &super::Heads<'_>| {
                heads.start(self.tile.batch, self.tile.kv_head, self.block * BLOCK)
            };
            let (k, v) = (start(keys), start(values));
            let whole = keys.shape[3].is_multiple_of(LANES) && values.shape[3].is_multiple_of(LANES);
            let few = self.tile.rows() < CONVERT_ROWS;
            // Many rows reuse a block long enough for the next to arrive.
            let view = |heads: &super::Heads<'_>| (heads.strides[2], heads.shape[3], few);
            let (key_view, value_view) = (view(keys), view(values));
            match (keys.data, values.data) {
                (Floats::F32(keys), Floats::F32(values)) if whole => {
                    return self.tiles(s, rows_of(keys, k, key_view), rows_of(values, v, value_view));
                }
                (Floats::F16(keys), Floats::F16(values)) if whole && few => {
                    return self.tiles(s, rows_of(keys, k, key_view), rows_of(values, v, value_view));
                }
                (Floats::Bf16(keys), Floats::Bf16(values)) if whole && few => {
                    return self.tiles(s, rows_of(keys, k, key_view), rows_of(values, v, value_view));
                }
                _ => {}
            }
        }
        let (tile, first) = (self.tile, self.block * BLOCK);
        s.enter(Convert { tile, heads: &a.keys, first, seen, to: &mut *key_block });
        s.enter(Convert { tile, heads: &a.values, first, seen, to: &mut *value_block });
        let (key_width, value_width) = (padded(a.queries.shape[3]), padded(a.values.shape()[3]));
        self.tiles(
            s,
            rows_of(key_block, 0, (key_width, key_width, false)),
            rows_of(value_block, 0, (value_width, value_width, false)),
        );
    }

    /// All rows, a few at a time.
    #[inline(always)]
    fn tiles<S: Simd, E: Element>(&mut self, s: S, keys: BlockRows<'_, E>, values: BlockRows<'_, E>) {
        let rows = self.tile.rows();
        let mut first = 0;
        while first < rows {
            let left = (rows - first).min(S::TILE_ROWS);
            match left {
                4 if S::TILE_ROWS >= 4 => s.enter(RowTile::<E, 4> { step: self, first, keys, values }),
                3 if S::TILE_ROWS >= 3 => s.enter(RowTile::<E, 3> { step: self, first, keys, values }),
                2 => s.enter(RowTile::<E, 2> { step: self, first, keys, values }),
                _ => s.enter(RowTile::<E, 1> { step: self, first, keys, values }),
            }
            first += left;
        }
    }

    /// What the array mask adds to a row's scores.
    #[inline(always)]
    fn bias<S: Simd>(&self, s: S, row: usize, to: &mut Weights) {
        let Some(mask) = &self.a.mask else { return };
        let to = &mut to.0[..self.count];
        let (tile, key) = (self.tile, self.block * BLOCK);
        let (Mask::Bool { strides, .. } | Mask::Additive { strides, .. }) = mask;
        let start = tile.batch * strides[0]
            + tile.head(row) * strides[1]
            + tile.position(row) * strides[2]
            + key * strides[3];
        match mask {
            Mask::Bool { allowed, strides } => {
                for (key, to) in to.iter_mut().enumerate() {
                    *to = if allowed[start + key * strides[3]] == 0 { f32::NEG_INFINITY } else { 0.0 };
                }
            }
            Mask::Additive { bias, strides } => {
                let count = to.len();
                match bias {
                    Floats::F32(from) if strides[3] == 1 => to_f32(s, &from[start..][..count], to),
                    Floats::F16(from) if strides[3] == 1 => to_f32(s, &from[start..][..count], to),
                    Floats::Bf16(from) if strides[3] == 1 => to_f32(s, &from[start..][..count], to),
                    _ => {
                        for (key, to) in to.iter_mut().enumerate() {
                            *to = bias.get(start + key * strides[3]).unwrap_or(f32::NAN);
                        }
                    }
                }
            }
        }
    }
}

/// The rows `first..first + R` of a step.
struct RowTile<'s, 't, E, const R: usize> {
    step: &'s mut Step<'t>,
    first: usize,
    keys: BlockRows<'s, E>,
    values: BlockRows<'s, E>,
}

impl<E: Element, const R: usize> Kernel for RowTile<'_, '_, E, R> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { step, first, keys, values } = self;
        let (mut spans, mut count) = ([Span::default(); R], 0);
        for (r, span) in spans.iter_mut().enumerate() {
            *span = step.tile.span(step.a, first + r, step.block);
            if !span.is_empty() {
                count = count.max(span.high);
            }
        }
        if count == 0 {
            return;
        }
        let (key_vectors, vectors) = (keys.width / LANES, values.width / LANES);
        let mut weights = [Weights::ZERO; R];
        scores(s, &step.queries[first * key_vectors..], keys, count, &mut weights);
        let mut blocks = [State::EMPTY; R];
        for r in 0..R {
            blocks[r] = if step.a.mask.is_some() {
                let mut bias = Weights::ZERO;
                step.bias(s, first + r, &mut bias);
                weigh(s, &mut weights[r], spans[r], Some(&bias))
            } else {
                weigh(s, &mut weights[r], spans[r], None)
            };
        }
        let results = &mut step.results[first * vectors..][..R * vectors];
        let Some(states) = step.states[first..].first_chunk_mut::<R>() else { return };
        if step.keep {
            *states = blocks;
            add_values(s, &weights, &spans, values, None, results);
        } else {
            let factors = merge_states(s, states, &blocks);
            add_values(s, &weights, &spans, values, Some(&factors), results);
        }
    }
}

/// Rows from `start` on; the view is stride and width.
#[inline(always)]
fn rows_of<E>(data: &[E], start: usize, (stride, width, streamed): (usize, usize, bool)) -> BlockRows<'_, E> {
    BlockRows { data: &data[start..], stride, width, streamed }
}

/// Merges the blocks of one tile that [`Attend`] kept apart.
pub(super) struct Combine<'t> {
    pub a: &'t Attention<'t>,
    pub tile: Tile,
    pub states: &'t [State],
    pub values: &'t [f32],
    /// Rows between two blocks.
    pub rows: usize,
    pub out: &'t Output<'t>,
}

impl Kernel for Combine<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let vectors = padded(self.a.values.shape()[3]) / LANES;
        let values = self.values.as_chunks::<LANES>().0;
        let mut sums = vec![[0.0; LANES]; vectors * MAX_ROWS];
        let rows = self.tile.rows();
        let mut first = 0;
        while first < rows {
            let count = (rows - first).min(MAX_ROWS);
            sums.fill([0.0; LANES]);
            let mut states = [State::EMPTY; MAX_ROWS];
            for (r, state) in states.iter_mut().enumerate().take(count) {
                *state = self.tile.initial(self.a, first + r);
            }
            for (block, kept) in self.states.chunks(self.rows).enumerate() {
                let mut blocks = [State::EMPTY; MAX_ROWS];
                blocks[..count].copy_from_slice(&kept[first..][..count]);
                let factors: [Factors; MAX_ROWS] = merge_states(s, &mut states, &blocks);
                for r in 0..count {
                    if self.tile.span(self.a, first + r, block).is_empty() {
                        continue;
                    }
                    let from = &values[(block * self.rows + first + r) * vectors..][..vectors];
                    for (to, from) in sums[r * vectors..].iter_mut().zip(from) {
                        let merged = merge_values(s, s.load(to), s.load(from), factors[r]);
                        s.store(to, merged);
                    }
                }
            }
            for (r, sums) in sums.chunks_mut(vectors.max(1)).enumerate().take(count) {
                // SAFETY: this task alone has the tile.
                unsafe { self.out.write(s, &self.tile, first + r, sums, states[r].sum) };
            }
            first += count;
        }
    }
}
