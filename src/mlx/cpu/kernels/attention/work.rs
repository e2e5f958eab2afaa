//! Attention cut into tasks.
//!
//! A tile is a few query positions of all heads that share keys. Normally a task walks over all blocks of a tile.
//! When there are fewer tiles than threads (one token, few heads) the blocks of a tile are split over several tasks,
//! each block's result is kept, and they are merged in the order in which one task would have.

use std::cell::Cell;
use std::ops::Range;

use super::super::affine::{AffineRow, dequantize_row};
use super::super::pieces::Pieces;
use super::super::simd::{self, Element, Kernel, LANES, Simd, from_f32, to_f32};
use super::block::{
    BLOCK, BlockRows, Factors, MAX_ROWS, Span, State, Weights, add_values, merge_states, merge_values,
    scores, weigh,
};
use super::{Attention, Floats, FloatsMut, Isa, KernelError, Layout, Mask, Pool, QuantizedHeads, Stored};

/// Query rows of a tile, about: enough to pay for converting a block of keys, few enough for the cache.
const TILE_ROWS: usize = 64;

/// From this many rows on, half-precision keys and values are converted once a block instead of once a row tile.
const CONVERT_ROWS: usize = 12;

/// Multiplications below which threads cost more than they save: about 5 microseconds of one core.
const SERIAL_WORK: usize = 150_000;

/// The least multiplications of a task that splits a tile.
const SPLIT_WORK: usize = 50_000;

fn padded(dim: usize) -> usize {
    dim.next_multiple_of(LANES)
}

/// How the work is cut; the result does not depend on it.
#[derive(Clone, Copy, Debug)]
struct Plan {
    /// Query heads that share keys.
    group: usize,
    /// Positions of a tile.
    positions: usize,
    /// Tiles a head of keys.
    tiles: usize,
    /// All tiles.
    units: usize,
    blocks: usize,
    /// Tasks a tile.
    splits: usize,
    serial: bool,
}

impl Plan {
    fn new(a: &Attention<'_>, threads: usize) -> Self {
        let [batch, heads, length, dim] = a.queries.shape;
        let [_, kv_heads, keys, value_dim] = a.values.shape();
        let group = heads / kv_heads;
        let positions = (TILE_ROWS / group).clamp(1, length);
        let tiles = length.div_ceil(positions);
        let units = batch * kv_heads * tiles;
        let blocks = keys.div_ceil(BLOCK);
        let row_work = |keys: usize| (dim + value_dim).saturating_mul(keys);
        let work = row_work(keys).saturating_mul(batch * heads * length);
        let serial = threads == 1 || work < SERIAL_WORK;
        let mut splits = 1;
        if !serial && units < 3 * threads {
            let block_work = row_work(BLOCK * positions * group).max(1);
            let least = SPLIT_WORK.div_ceil(block_work).max(1);
            let wanted = (4 * threads).div_ceil(units);
            splits = blocks.div_ceil(blocks.div_ceil(wanted).max(least)).max(1);
        }
        Self { group, positions, tiles, units, blocks, splits, serial }
    }

    fn tile(&self, a: &Attention<'_>, unit: usize) -> Tile {
        let length = a.queries.shape[2];
        let kv_heads = a.keys.shape()[1];
        // Under a causal mask the last tiles have most to do, so they come first.
        let tile = self.tiles - 1 - unit % self.tiles;
        let first = tile * self.positions;
        let head = unit / self.tiles;
        Tile {
            batch: head / kv_heads,
            kv_head: head % kv_heads,
            first,
            positions: self.positions.min(length - first),
            group: self.group,
        }
    }

    fn tile_rows(&self) -> usize {
        self.positions * self.group
    }

    fn split(&self, index: usize) -> Range<usize> {
        let each = self.blocks.div_ceil(self.splits);
        (index * each).min(self.blocks)..((index + 1) * each).min(self.blocks)
    }
}

/// Query positions of the heads that share one head of keys. Row `r` is position `first + r / group` of head
/// `kv_head * group + r % group`.
#[derive(Clone, Copy, Debug)]
struct Tile {
    batch: usize,
    kv_head: usize,
    first: usize,
    positions: usize,
    group: usize,
}

impl Tile {
    fn rows(&self) -> usize {
        self.positions * self.group
    }

    fn head(&self, row: usize) -> usize {
        self.kv_head * self.group + row % self.group
    }

    fn position(&self, row: usize) -> usize {
        self.first + row / self.group
    }

    /// The keys of `block` that `row` sees.
    fn span(&self, a: &Attention<'_>, row: usize, block: usize) -> Span {
        let visible = a.visible(self.position(row));
        let first = block * BLOCK;
        Span {
            low: visible.start.saturating_sub(first).min(BLOCK),
            high: visible.end.saturating_sub(first).min(BLOCK),
        }
    }

    /// Where `row` starts from: nothing, or its head's sink.
    fn initial(&self, a: &Attention<'_>, row: usize) -> State {
        match a.sinks.and_then(|sinks| sinks.get(self.head(row))) {
            Some(sink) => State { largest: sink, sum: 1.0 },
            None => State::EMPTY,
        }
    }
}

/// The result's rows.
struct Output<'a> {
    pieces: OutputPieces<'a>,
    layout: Layout,
    heads: usize,
    length: usize,
    value_dim: usize,
}

enum OutputPieces<'a> {
    F32(Pieces<'a, f32>),
    F16(Pieces<'a, half::f16>),
    Bf16(Pieces<'a, half::bf16>),
}

impl<'a> Output<'a> {
    fn new(a: &Attention<'_>, layout: Layout, out: FloatsMut<'a>) -> Self {
        let [_, heads, length, _] = a.queries.shape;
        let pieces = match out {
            FloatsMut::F32(out) => OutputPieces::F32(Pieces::new(out)),
            FloatsMut::F16(out) => OutputPieces::F16(Pieces::new(out)),
            FloatsMut::Bf16(out) => OutputPieces::Bf16(Pieces::new(out)),
        };
        Self { pieces, layout, heads, length, value_dim: a.values.shape()[3] }
    }

    /// Divides a row by its sum and writes it.
    ///
    /// # Safety
    /// No other thread writes this row.
    #[inline(always)]
    unsafe fn write<S: Simd>(&self, s: S, tile: &Tile, row: usize, values: &mut [[f32; LANES]], sum: f32) {
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
        let range = index * self.value_dim..(index + 1) * self.value_dim;
        let values = values.as_flattened();
        // SAFETY: a row of the result belongs to one row of one tile, and each tile to one task.
        unsafe {
            match &self.pieces {
                OutputPieces::F32(out) => from_f32(s, values, out.piece(range)),
                OutputPieces::F16(out) => from_f32(s, values, out.piece(range)),
                OutputPieces::Bf16(out) => from_f32(s, values, out.piece(range)),
            }
        }
    }
}

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
    let whole = |unit: usize| {
        let mut scratch = SCRATCH.take();
        let tile = plan.tile(a, unit);
        let kernel =
            Attend { a, tile, blocks: 0..plan.blocks, scratch: &mut scratch, target: Target::Whole(&out) };
        simd::run(isa, kernel);
        SCRATCH.set(scratch);
    };
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
        let mut scratch = SCRATCH.take();
        let target = Target::Blocks { states, values, rows };
        simd::run(isa, Attend { a, tile: plan.tile(a, unit), blocks, scratch: &mut scratch, target });
        SCRATCH.set(scratch);
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

/// Where the results of [`Attend`] go.
enum Target<'t> {
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
            for row in 0..rows {
                let values = &mut results.as_chunks_mut().0[row * vectors..][..vectors];
                // SAFETY: this task alone has the tile.
                unsafe { out.write(s, &tile, row, values, states[row].sum) };
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
            let view = |heads: &super::Heads<'_>| (heads.strides[2], heads.shape[3]);
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
            rows_of(key_block, 0, (key_width, key_width)),
            rows_of(value_block, 0, (value_width, value_width)),
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

/// Writes the rows `seen` of a block that begins at position `first` in float32, padded with zeros.
struct Convert<'t> {
    tile: &'t Tile,
    heads: &'t Stored<'t>,
    first: usize,
    seen: Span,
    to: &'t mut [f32],
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

/// Rows from `start` on; the view is stride and width.
#[inline(always)]
fn rows_of<E>(data: &[E], start: usize, (stride, width): (usize, usize)) -> BlockRows<'_, E> {
    BlockRows { data: &data[start..], stride, width }
}

/// Merges the blocks of one tile that [`Attend`] kept apart.
struct Combine<'t> {
    a: &'t Attention<'t>,
    tile: Tile,
    states: &'t [State],
    values: &'t [f32],
    /// Rows between two blocks.
    rows: usize,
    out: &'t Output<'t>,
}

impl Kernel for Combine<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let vectors = padded(self.out.value_dim) / LANES;
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
