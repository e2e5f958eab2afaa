//! How attention is cut into tiles and tasks. The result does not depend on it.

use std::ops::Range;

use super::super::simd::LANES;
use super::Attention;
use super::block::{BLOCK, Span, State};

/// Query rows of a tile, about: enough to pay for converting a block of keys, few enough for the cache.
pub(super) const TILE_ROWS: usize = 64;

/// Multiplications below which threads cost more than they save: about 5 microseconds of one core.
pub(super) const SERIAL_WORK: usize = 150_000;

/// The least multiplications of a task that splits a tile.
pub(super) const SPLIT_WORK: usize = 50_000;

pub(super) fn padded(dim: usize) -> usize {
    dim.next_multiple_of(LANES)
}

/// How the work is cut; the result does not depend on it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    /// Query heads that share keys.
    pub group: usize,
    /// Positions of a tile.
    pub positions: usize,
    /// Tiles a head of keys.
    pub tiles: usize,
    /// All tiles.
    pub units: usize,
    pub blocks: usize,
    /// Tasks a tile.
    pub splits: usize,
    pub serial: bool,
}

impl Plan {
    pub(super) fn new(a: &Attention<'_>, threads: usize) -> Self {
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

    pub(super) fn tile(&self, a: &Attention<'_>, unit: usize) -> Tile {
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

    pub(super) fn tile_rows(&self) -> usize {
        self.positions * self.group
    }

    pub(super) fn split(&self, index: usize) -> Range<usize> {
        let each = self.blocks.div_ceil(self.splits);
        (index * each).min(self.blocks)..((index + 1) * each).min(self.blocks)
    }
}

/// Query positions of the heads that share one head of keys. Row `r` is position `first + r / group` of head
/// `kv_head * group + r % group`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tile {
    pub batch: usize,
    pub kv_head: usize,
    pub first: usize,
    pub positions: usize,
    pub group: usize,
}

impl Tile {
    pub(super) fn rows(&self) -> usize {
        self.positions * self.group
    }

    pub(super) fn head(&self, row: usize) -> usize {
        self.kv_head * self.group + row % self.group
    }

    pub(super) fn position(&self, row: usize) -> usize {
        self.first + row / self.group
    }

    /// The keys of `block` that `row` sees.
    pub(super) fn span(&self, a: &Attention<'_>, row: usize, block: usize) -> Span {
        let visible = a.visible(self.position(row));
        let first = block * BLOCK;
        Span {
            low: visible.start.saturating_sub(first).min(BLOCK),
            high: visible.end.saturating_sub(first).min(BLOCK),
        }
    }

    /// Where `row` starts from: nothing, or its head's sink.
    pub(super) fn initial(&self, a: &Attention<'_>, row: usize) -> State {
        match a.sinks.and_then(|sinks| sinks.get(self.head(row))) {
            Some(sink) => State { largest: sink, sum: 1.0 },
            None => State::EMPTY,
        }
    }
}
