//! What the tasks of each phase do.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::super::super::phases::run_phases;
use super::super::super::{Isa, Pool};
use super::super::activation::Activate;
use super::super::attention::{PartialPieces, Staged};
use super::super::embedding::open_rows;
use super::super::error::KernelError;
use super::super::matmul::{Arrangement, Part, Precision, RowList};
use super::super::pieces::Pieces;
use super::super::simd;
use super::buffers::{ArrangedList, FEW_ROWS, Place, Workspace, lock};
use super::cut::{Cut, SHARE};
use super::heads::attention;
use super::row_kernels::{AddRow, NormRow};
use super::step::{Phase, Sequence, Step, Wanted};
use super::{Decoder, Layer, Norm, OP, Projection};

/// Outputs that are computed before they are used further, if there are many rows: few, so that they stay in cache.
const STRIP: usize = 64;

/// What all tasks of a step share.
pub(super) struct Run<'a> {
    pub(super) isa: Isa,
    pub(super) threads: usize,
    pub(super) decoder: &'a Decoder<'a>,
    pub(super) tokens: &'a [u32],
    pub(super) sequences: &'a [Sequence<'a>],
    /// The first row of each sequence, and how its attention is cut.
    pub(super) cuts: Vec<(usize, Staged)>,
    pub(super) wanted: Wanted,
    pub(super) rows: usize,
    /// Whether each thread prepares rows for itself.
    pub(super) few: bool,
    pub(super) precision: Precision,
    pub(super) all: &'a RowList,
    pub(super) operands: ArrangedList,
    /// As the operands, of each place.
    pub(super) own: Vec<ArrangedList>,
    pub(super) hidden: Pieces<'a, f32>,
    pub(super) queries: Pieces<'a, f32>,
    pub(super) keys: Pieces<'a, f32>,
    pub(super) values: Pieces<'a, f32>,
    pub(super) attended: Pieces<'a, f32>,
    pub(super) delta: Pieces<'a, f32>,
    pub(super) gated: Pieces<'a, f32>,
    pub(super) partials: PartialPieces<'a>,
    pub(super) out: Pieces<'a, f32>,
    pub(super) places: &'a [std::sync::Mutex<Place>],
    /// Tasks of each layer that projected queries, keys and values.
    projected: Vec<AtomicUsize>,
    pub(super) failed: AtomicBool,
    /// The cut of each shape of products.
    product_cuts: Vec<(ProductShape, Cut)>,
}

/// What the cut of some products of the same rows depends on: the outputs of each, and what they have in common.
#[derive(Clone, Copy, PartialEq, Eq)]
struct ProductShape {
    outputs: [usize; 3],
    inputs: usize,
    arrangement: Arrangement,
}

impl<'a> Run<'a> {
    pub(super) fn new(
        step: &Step<'a>,
        isa: Isa,
        pool: &Pool,
        workspace: &'a mut Workspace,
        out: &'a mut [f32],
    ) -> Result<Self, KernelError> {
        let Workspace {
            precision,
            all,
            operands,
            hidden,
            queries,
            keys,
            values,
            attended,
            delta,
            gated,
            partials,
            places,
            ..
        } = workspace;
        let (mut cuts, mut first, mut parts) = (Vec::with_capacity(step.sequences.len()), 0, (0, 0));
        for sequence in step.sequences {
            let Some((store, layer)) = sequence.stores.iter().zip(&step.decoder.layers).next() else {
                continue;
            };
            // SAFETY: only shapes are looked at.
            let attention =
                unsafe { attention(step.decoder, &layer.attention, store, &queries[..], first, sequence)? };
            let staged = Staged::new(&attention, pool.threads(), parts);
            cuts.push((first, staged));
            first += sequence.length;
            let (tiles, states) = staged.parts();
            parts = (parts.0 + tiles, parts.1 + states);
        }
        partials.reserve(parts.0, parts.1, step.decoder.head_dim);
        let rows = step.tokens.len();
        // The norm of a result is added to the hidden state, which is for one thread to do.
        let normed_after =
            |layer: &Layer<'_>| layer.attention.post_norm.is_some() || layer.mlp.post_norm.is_some();
        let few = rows <= FEW_ROWS
            && cuts.iter().all(|(_, cut)| cut.is_by_head())
            && !step.decoder.layers.iter().any(normed_after);
        let own = places.iter().map(|place| {
            let mut place = lock(place);
            place.ready = None;
            place.operands.views()
        });
        Ok(Self {
            isa,
            threads: pool.threads(),
            decoder: step.decoder,
            tokens: step.tokens,
            sequences: step.sequences,
            cuts,
            wanted: step.wanted,
            rows,
            few,
            precision: *precision,
            all,
            operands: operands.views(),
            own: own.collect(),
            hidden: Pieces::new(hidden),
            queries: Pieces::new(queries),
            keys: Pieces::new(keys),
            values: Pieces::new(values),
            attended: Pieces::new(attended),
            delta: Pieces::new(delta),
            gated: Pieces::new(gated),
            partials: partials.pieces(),
            out: Pieces::new(out),
            places,
            projected: step.decoder.layers.iter().map(|_| AtomicUsize::new(0)).collect(),
            failed: AtomicBool::new(false),
            product_cuts: Vec::new(),
        }
        .with_cuts())
    }

    /// Whether there are so few rows that phases which prepare rows are left out.
    pub(super) fn is_few(&self) -> bool {
        self.few
    }

    pub(super) fn phases(&self, pool: &Pool, phases: &[Phase]) -> Result<(), KernelError> {
        let tasks: Vec<usize> = phases.iter().map(|&phase| self.tasks(phase)).collect();
        run_phases(pool, &tasks, &|phase, task, place| {
            let operands = if self.few { &self.own[place] } else { &self.operands };
            self.task(phases[phase], task, &mut lock(&self.places[place]), operands);
        })?;
        if self.failed.load(Ordering::Relaxed) {
            let (what, rule) = ("a product of the model", "one that its kernel can compute");
            return Err(KernelError::Unsupported { op: OP, what, found: 0, rule });
        }
        Ok(())
    }

    /// Rows of a task that works on whole rows.
    fn rows_each(&self) -> usize {
        self.rows.div_ceil(self.threads * SHARE).min(16)
    }

    fn row_tasks(&self) -> usize {
        self.rows.div_ceil(self.rows_each())
    }

    fn rows_of(&self, task: usize) -> Range<usize> {
        let each = self.rows_each();
        task * each..self.rows.min((task + 1) * each)
    }

    /// How products of the same rows are cut.
    fn cut(&self, projections: &[&Projection<'_>]) -> Cut {
        let shape = self.product_shape(projections);
        let known = self.product_cuts.iter().find(|(known, _)| *known == shape);
        known.map_or_else(|| self.new_cut(shape), |(_, cut)| *cut)
    }

    fn product_shape(&self, projections: &[&Projection<'_>]) -> ProductShape {
        let outputs = std::array::from_fn(|index| projections.get(index).map_or(0, |p| p.matrix.rows()));
        let matrix = &projections[0].matrix;
        let arrangement = Arrangement::new(self.isa, matrix, self.precision);
        ProductShape { outputs, inputs: matrix.columns(), arrangement }
    }

    fn new_cut(&self, ProductShape { outputs, inputs, arrangement }: ProductShape) -> Cut {
        Cut::new(self.rows, &outputs, inputs, arrangement, self.threads)
    }

    /// Works out the cuts of all products once, since every task of every layer asks for its own.
    fn with_cuts(mut self) -> Self {
        let decoder = self.decoder;
        let layers = decoder.layers.iter().flat_map(|Layer { attention, mlp }| {
            let qkv = self.product_shape(&[&attention.q, &attention.k, &attention.v]);
            let others = [&attention.o, &mlp.gate, &mlp.down].map(|one| self.product_shape(&[one]));
            [qkv].into_iter().chain(others)
        });
        let shapes: Vec<_> = layers.chain([self.product_shape(&[&decoder.head])]).collect();
        for shape in shapes {
            if !self.product_cuts.iter().any(|(known, _)| *known == shape) {
                let cut = self.new_cut(shape);
                self.product_cuts.push((shape, cut));
            }
        }
        self
    }

    fn tasks(&self, phase: Phase) -> usize {
        let layer = |index: usize| &self.decoder.layers[index];
        let product = |projections: &[&Projection<'_>]| {
            let cut = self.cut(projections);
            projections.iter().map(|p| cut.tasks(p.matrix.rows())).sum()
        };
        match phase {
            Phase::Embed
            | Phase::AttentionInput(_)
            | Phase::Heads(_)
            | Phase::AttentionOutput(_)
            | Phase::MlpInput(_)
            | Phase::MlpMiddle(_)
            | Phase::Finish
            | Phase::HeadInput => self.row_tasks(),
            Phase::Attend(_) => self.cuts.iter().map(|(_, cut)| cut.tasks()).sum(),
            Phase::Qkv(index) => {
                let attention = &layer(index).attention;
                product(&[&attention.q, &attention.k, &attention.v])
            }
            Phase::Output(index) => product(&[&layer(index).attention.o]),
            Phase::GateUp(index) => product(&[&layer(index).mlp.gate]),
            Phase::Down(index) => product(&[&layer(index).mlp.down]),
            Phase::Head => product(&[&self.decoder.head]),
        }
    }

    fn task(&self, phase: Phase, task: usize, place: &mut Place, operands: &ArrangedList) {
        let decoder = self.decoder;
        if self.few && place.ready != Some(phase) {
            place.ready = Some(phase);
            self.prepare(phase, 0..self.rows, place, operands);
        }
        // SAFETY (of all that follows): the phases keep apart what writes a buffer and what reads it; the tasks of a
        // phase have different rows or outputs.
        match phase {
            Phase::Embed => self.embed(self.rows_of(task)),
            Phase::AttentionInput(index) => {
                self.prepare(Phase::Qkv(index), self.rows_of(task), place, operands)
            }
            Phase::Qkv(index) => {
                let layer = &decoder.layers[index].attention;
                let targets = [(&layer.q, &self.queries), (&layer.k, &self.keys), (&layer.v, &self.values)];
                self.products(task, &targets, operands);
                if self.few && self.projected[index].fetch_add(1, Ordering::AcqRel) + 1 == self.tasks(phase) {
                    self.store_rows(index, place);
                }
            }
            Phase::Heads(index) => self.rows_of(task).for_each(|row| self.turn_row(row, index, place)),
            Phase::Attend(index) => self.attend(task, index, place),
            Phase::AttentionOutput(index) => {
                self.prepare(Phase::Output(index), self.rows_of(task), place, operands);
            }
            Phase::Output(index) => {
                let layer = &decoder.layers[index].attention;
                self.add_product(task, &layer.o, layer.post_norm.is_some(), place, operands);
            }
            Phase::MlpInput(index) => self.prepare(Phase::GateUp(index), self.rows_of(task), place, operands),
            Phase::GateUp(index) => self.gate(task, index, place, operands),
            Phase::MlpMiddle(index) => self.prepare(Phase::Down(index), self.rows_of(task), place, operands),
            Phase::Down(index) => {
                let layer = &decoder.layers[index].mlp;
                self.add_product(task, &layer.down, layer.post_norm.is_some(), place, operands);
            }
            Phase::Finish => self.rows_of(task).for_each(|row| self.finish_row(row, place)),
            Phase::HeadInput => self.prepare(Phase::Head, self.rows_of(task), place, operands),
            Phase::Head => self.products(task, &[(&decoder.head, &self.out)], operands),
        }
    }

    /// Norms and arranges the rows that the products of a phase multiply.
    fn prepare(&self, phase: Phase, rows: Range<usize>, place: &mut Place, operands: &ArrangedList) {
        let layers = &self.decoder.layers;
        for row in rows {
            match phase {
                Phase::Qkv(index) => {
                    let added = index.checked_sub(1).and_then(|last| layers[last].mlp.post_norm.as_ref());
                    let layer = &layers[index].attention;
                    let next = [&layer.q, &layer.k, &layer.v];
                    self.norm_row(row, added, &layer.norm, &next, place, operands);
                }
                Phase::Output(index) => {
                    self.arrange(row, &self.attended, &layers[index].attention.o, operands)
                }
                Phase::GateUp(index) => {
                    let added = layers[index].attention.post_norm.as_ref();
                    let layer = &layers[index].mlp;
                    self.norm_row(row, added, &layer.norm, &[&layer.gate, &layer.up], place, operands);
                }
                Phase::Down(index) => self.arrange(row, &self.gated, &layers[index].mlp.down, operands),
                Phase::Head => {
                    let decoder = self.decoder;
                    self.norm_row(row, None, &decoder.norm, &[&decoder.head], place, operands);
                }
                _ => {}
            }
        }
    }

    fn embed(&self, rows: Range<usize>) {
        let width = self.decoder.hidden();
        // SAFETY: rows of this task alone.
        let hidden = unsafe { self.hidden.piece(rows.start * width..rows.end * width) };
        open_rows(self.isa, &self.decoder.embedding, &self.tokens[rows], hidden);
        if let Some(scale) = self.decoder.embedding_scale {
            hidden.iter_mut().for_each(|value| *value *= scale);
        }
    }

    /// Adds what is outstanding, norms and arranges a row for the products that follow.
    fn norm_row(
        &self,
        row: usize,
        added: Option<&Norm>,
        norm: &Norm,
        next: &[&Projection<'_>],
        place: &mut Place,
        operands: &ArrangedList,
    ) {
        let normed = &mut place.row[..self.decoder.hidden()];
        self.add_delta(row, added, normed);
        let range = row * normed.len()..(row + 1) * normed.len();
        // SAFETY: the row is this task's.
        let hidden = unsafe { self.hidden.part(range) };
        simd::run(self.isa, NormRow { from: hidden, norm, to: normed });
        self.arrange_for(row, normed.as_ptr(), next, operands);
    }

    /// Adds the normed delta to a row of the hidden state.
    fn add_delta(&self, row: usize, norm: Option<&Norm>, scratch: &mut [f32]) {
        let Some(norm) = norm else { return };
        let range = row * scratch.len()..(row + 1) * scratch.len();
        // SAFETY: the row is this task's.
        let (hidden, delta) = unsafe { (self.hidden.piece(range.clone()), self.delta.part(range)) };
        simd::run(self.isa, NormRow { from: delta, norm, to: scratch });
        simd::run(self.isa, AddRow { to: hidden, from: scratch });
    }

    fn finish_row(&self, row: usize, place: &mut Place) {
        let width = self.decoder.hidden();
        let added = self.decoder.layers.last().and_then(|layer| layer.mlp.post_norm.as_ref());
        self.add_delta(row, added, &mut place.row[..width]);
        if self.wanted == Wanted::Hidden {
            let range = row * width..(row + 1) * width;
            // SAFETY: the row is this task's.
            unsafe { self.out.piece(range.clone()).copy_from_slice(self.hidden.part(range)) };
        }
    }

    fn arrange(&self, row: usize, from: &Pieces<'_, f32>, next: &Projection<'_>, operands: &ArrangedList) {
        let width = next.matrix.columns();
        // SAFETY: nobody writes `from` in this phase.
        let values = unsafe { from.part(row * width..(row + 1) * width) };
        self.arrange_for(row, values.as_ptr(), &[next], operands);
    }

    /// Arranges a row once for each arrangement that the products want.
    fn arrange_for(&self, row: usize, values: *const f32, next: &[&Projection<'_>], operands: &ArrangedList) {
        for (index, projection) in next.iter().enumerate() {
            let operand = self.operand(projection);
            let before = next[..index].iter().any(|p| self.operand(p) == operand);
            let Some(operand) = operand else {
                self.failed.store(true, Ordering::Relaxed);
                continue;
            };
            if !before {
                // SAFETY: the operand has the row, which is this task's, or this thread's.
                unsafe { operands[operand].2.set(self.isa, row, values) };
            }
        }
    }

    fn operand(&self, projection: &Projection<'_>) -> Option<usize> {
        let matrix = &projection.matrix;
        let wanted = (Arrangement::new(self.isa, matrix, self.precision), matrix.columns());
        self.operands.iter().position(|&(kind, columns, _)| (kind, columns) == wanted)
    }

    /// A part of one of several products of the same rows, written where it belongs.
    fn products(
        &self,
        mut task: usize,
        targets: &[(&Projection<'_>, &Pieces<'_, f32>)],
        operands: &ArrangedList,
    ) {
        let projections: [&Projection<'_>; 3] =
            std::array::from_fn(|index| targets[index.min(targets.len() - 1)].0);
        let cut = self.cut(&projections[..targets.len()]);
        for (projection, to) in targets {
            let outputs = projection.matrix.rows();
            let count = cut.tasks(outputs);
            if task < count {
                let (rows, outputs_range) = cut.part(outputs, task);
                let to = to.place(rows.start * outputs + outputs_range.start);
                self.multiply(projection, (rows, outputs_range), to, outputs, operands);
                return;
            }
            task -= count;
        }
    }

    fn multiply(
        &self,
        projection: &Projection<'_>,
        (rows, outputs): (Range<usize>, Range<usize>),
        to: *mut f32,
        stride: usize,
        operands: &ArrangedList,
    ) {
        let Some(operand) = self.operand(projection) else {
            self.failed.store(true, Ordering::Relaxed);
            return;
        };
        let x = operands[operand].2;
        let Projection { matrix, bias } = projection;
        let part = Part { matrix, bias: *bias, x, all: self.all, rows, outputs };
        // SAFETY: the operand was arranged before; the place is this task's.
        if unsafe { part.run(self.isa, to, stride) }.is_err() {
            self.failed.store(true, Ordering::Relaxed);
        }
    }

    /// A part of a product that is added to the hidden state, or put aside to be normed.
    fn add_product(
        &self,
        task: usize,
        projection: &Projection<'_>,
        aside: bool,
        place: &mut Place,
        operands: &ArrangedList,
    ) {
        let width = projection.matrix.rows();
        let (rows, outputs) = self.cut(&[projection]).part(width, task);
        if aside {
            let to = self.delta.place(rows.start * width + outputs.start);
            self.multiply(projection, (rows, outputs), to, width, operands);
            return;
        }
        let strip = if rows.len() > 4 { STRIP } else { outputs.len() };
        for first in outputs.clone().step_by(strip.max(1)) {
            let strip = first..outputs.end.min(first + strip);
            let count = strip.len();
            place.first.resize(rows.len() * count, 0.0);
            self.multiply(projection, (rows.clone(), strip), place.first.as_mut_ptr(), count, operands);
            for (row, added) in rows.clone().zip(place.first.chunks_exact(count)) {
                // SAFETY: the place is this task's.
                let hidden = unsafe { self.hidden.piece(row * width + first..row * width + first + count) };
                simd::run(self.isa, AddRow { to: hidden, from: added });
            }
        }
    }

    fn gate(&self, task: usize, index: usize, place: &mut Place, operands: &ArrangedList) {
        let layer = &self.decoder.layers[index].mlp;
        let width = layer.gate.matrix.rows();
        let (rows, outputs) = self.cut(&[&layer.gate]).part(width, task);
        let strip = if rows.len() > 4 { STRIP } else { outputs.len() };
        for first in outputs.clone().step_by(strip.max(1)) {
            let strip = first..outputs.end.min(first + strip);
            let count = strip.len();
            place.first.resize(rows.len() * count, 0.0);
            place.second.resize(rows.len() * count, 0.0);
            let part = (rows.clone(), strip);
            self.multiply(&layer.gate, part.clone(), place.first.as_mut_ptr(), count, operands);
            self.multiply(&layer.up, part, place.second.as_mut_ptr(), count, operands);
            let gates = place.first.chunks_exact(count).zip(place.second.chunks_exact(count));
            for (row, (gate, up)) in rows.clone().zip(gates) {
                // SAFETY: the place is this task's.
                let out = unsafe { self.gated.piece(row * width + first..row * width + first + count) };
                simd::run(self.isa, Activate { activation: layer.activation, x: gate, up: Some(up), out });
            }
        }
    }
}
