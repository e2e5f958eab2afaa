//! Attention in two steps, for callers that are parallel themselves: tasks attend, then results that were split over
//! tasks are combined. The bits are those of [`attention`](super::attention).

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
}

/// Parts of [`Partials`] that tasks write.
pub(in super::super) struct PartialPieces<'a> {
    states: Pieces<'a, State>,
    values: Pieces<'a, f32>,
}

impl Partials {
    /// Makes room for `states` states of `width` values.
    pub fn reserve(&mut self, states: usize, width: usize) {
        if self.states.len() < states {
            self.states.resize(states, State::EMPTY);
        }
        let values = states * padded(width);
        if self.values.len() < values {
            self.values.resize(values, 0.0);
        }
    }

    pub fn pieces(&mut self) -> PartialPieces<'_> {
        PartialPieces { states: Pieces::new(&mut self.states), values: Pieces::new(&mut self.values) }
    }
}

/// How a call is cut: depends on shapes only.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Staged {
    plan: Plan,
    width: usize,
    /// Where its states begin among those of other sequences.
    first: usize,
}

impl Staged {
    /// A plan whose partial results begin at state `first`.
    pub fn new(attention: &Attention<'_>, threads: usize, first: usize) -> Self {
        let width = padded(attention.values.shape()[3]);
        Self { plan: Plan::new(attention, threads), width, first }
    }

    /// States that tasks keep apart.
    pub fn states(&self) -> usize {
        if self.plan.splits > 1 { self.plan.units * self.plan.blocks * self.plan.tile_rows() } else { 0 }
    }

    /// Tasks of the first step.
    pub fn tasks(&self) -> usize {
        self.plan.units * self.plan.splits
    }

    /// The tasks of the second step.
    pub fn combinations(&self) -> usize {
        if self.plan.splits > 1 { self.plan.units } else { 0 }
    }

    /// Does a task of the first step.
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
        if plan.splits == 1 {
            let out = Output::shared(attention, first_token, out);
            let tile = plan.tile(attention, task);
            attend(isa, attention, tile, 0..plan.blocks, Target::Whole(&out));
            return;
        }
        let (unit, blocks, rows) = (task / plan.splits, plan.split(task % plan.splits), plan.tile_rows());
        let place = |block| self.first + (unit * plan.blocks + block) * rows;
        let (first, last) = (place(blocks.start), place(blocks.end));
        // SAFETY: splits of a tile have no block in common, and each is one task.
        let (states, values) = unsafe {
            let values = first * self.width..last * self.width;
            (partials.states.piece(first..last), partials.values.piece(values))
        };
        // Blocks that no row sees are passed over, and the memory remembers other layers.
        states.fill(State::EMPTY);
        attend(isa, attention, plan.tile(attention, unit), blocks, Target::Blocks { states, values, rows });
    }

    /// Does a task of the second step.
    ///
    /// # Safety
    /// As for [`attend`](Self::attend), all of whose tasks are done.
    pub unsafe fn combine(
        &self,
        isa: Isa,
        attention: &Attention<'_>,
        unit: usize,
        partials: &PartialPieces<'_>,
        (first_token, out): (usize, &Pieces<'_, f32>),
    ) {
        let rows = self.plan.tile_rows();
        let first = self.first + unit * self.plan.blocks * rows;
        let last = first + self.plan.blocks * rows;
        // SAFETY: nobody writes partial results any more.
        let (states, values) = unsafe {
            let values = first * self.width..last * self.width;
            (&*partials.states.piece(first..last), &*partials.values.piece(values))
        };
        let out = Output::shared(attention, first_token, out);
        let tile = self.plan.tile(attention, unit);
        simd::run(isa, Combine { a: attention, tile, states, values, rows, out: &out });
    }
}
