//! Attention for callers that are parallel themselves. Where the blocks of a tile are split over tasks, whoever ends
//! the last of them combines their results. The bits are those of [`attention`](super::attention).

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::super::pieces::Pieces;
use super::super::simd;
use super::block::State;
use super::output::Output;
use super::plan::{Plan, padded};
use super::work::{Combine, Target, attend};
use super::{Attention, Isa};

/// Results of blocks whose tile is split over tasks, for one sequence after the other.
#[derive(Default)]
pub(in super::super) struct Partials {
    states: Vec<State>,
    values: Vec<f32>,
    /// Tasks of each tile that are done.
    done: Vec<AtomicUsize>,
}

/// Parts of [`Partials`] that tasks write.
pub(in super::super) struct PartialPieces<'a> {
    states: Pieces<'a, State>,
    values: Pieces<'a, f32>,
    done: &'a [AtomicUsize],
}

impl Partials {
    /// Makes room for `tiles` tiles and `states` states of `width` values.
    pub fn reserve(&mut self, tiles: usize, states: usize, width: usize) {
        if self.states.len() < states {
            self.states.resize(states, State::EMPTY);
        }
        let values = states * padded(width);
        if self.values.len() < values {
            self.values.resize(values, 0.0);
        }
        self.done.clear();
        self.done.resize_with(tiles, AtomicUsize::default);
    }

    pub fn pieces(&mut self) -> PartialPieces<'_> {
        let Self { states, values, done } = self;
        PartialPieces { states: Pieces::new(states), values: Pieces::new(values), done }
    }
}

/// How a call is cut: depends on shapes only.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Staged {
    plan: Plan,
    width: usize,
    /// Where its tiles and its states begin among those of other sequences.
    first: (usize, usize),
}

impl Staged {
    /// A plan whose tiles and partial results begin at `first`.
    pub fn new(attention: &Attention<'_>, threads: usize, first: (usize, usize)) -> Self {
        let width = padded(attention.values.shape()[3]);
        Self { plan: Plan::new(attention, threads), width, first }
    }

    /// Tiles and states that tasks keep apart.
    pub fn parts(&self) -> (usize, usize) {
        let plan = &self.plan;
        if plan.splits > 1 { (plan.units, plan.units * plan.blocks * plan.tile_rows()) } else { (0, 0) }
    }

    /// Tasks.
    pub fn tasks(&self) -> usize {
        self.plan.units * self.plan.splits
    }

    /// Whether each head of keys is one tile.
    pub fn is_by_head(&self) -> bool {
        self.plan.tiles == 1
    }

    /// The head of keys that a task deals with, if the batch is 1.
    pub fn head(&self, task: usize) -> usize {
        task / self.plan.splits / self.plan.tiles
    }

    /// Does a task. The same plan may be gone through several times, one after the other.
    ///
    /// # Safety
    /// `attention` has the shapes of the plan and valid views; `out` holds its results from a token on, in which
    /// other threads write other tasks' rows; each task is done once.
    pub unsafe fn attend(
        &self,
        isa: Isa,
        attention: &Attention<'_>,
        task: usize,
        partials: &PartialPieces<'_>,
        (first_token, out): (usize, &Pieces<'_, f32>),
    ) {
        let plan = &self.plan;
        let out = Output::shared(attention, first_token, out);
        if plan.splits == 1 {
            let tile = plan.tile(attention, task);
            attend(isa, attention, tile, 0..plan.blocks, Target::Whole(&out));
            return;
        }
        let (unit, blocks, rows) = (task / plan.splits, plan.split(task % plan.splits), plan.tile_rows());
        let place = |block| self.first.1 + (unit * plan.blocks + block) * rows;
        let piece = |blocks: Range<usize>| {
            let states = place(blocks.start)..place(blocks.end);
            let values = states.start * self.width..states.end * self.width;
            // SAFETY: splits of a tile have no block in common, and each is one task; the last to end has all.
            unsafe { (partials.states.piece(states), partials.values.piece(values)) }
        };
        let tile = plan.tile(attention, unit);
        {
            let (states, values) = piece(blocks.clone());
            // Blocks that no row sees are passed over, and the memory remembers other layers.
            states.fill(State::EMPTY);
            attend(isa, attention, tile, blocks, Target::Blocks { states, values, rows });
        }
        let done = partials.done[self.first.0 + unit].fetch_add(1, Ordering::AcqRel) + 1;
        if done.is_multiple_of(plan.splits) {
            let (states, values) = piece(0..plan.blocks);
            simd::run(isa, Combine { a: attention, tile, states, values, rows, out: &out });
        }
    }
}
