//! What the tasks of each phase do.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::super::phases::run_phases;
use super::super::super::{Isa, Pool};
use super::super::activation::Activate;
use super::super::attention::{Attention, PartialPieces, Staged, Stored};
use super::super::embedding::open_rows;
use super::super::error::KernelError;
use super::super::floats::Floats;
use super::super::matmul::{Arranged, Arrangement, Part, Precision, RowList};
use super::super::pieces::Pieces;
use super::super::simd;
use super::super::views::Heads;
use super::buffers::{Place, Workspace, lock};
use super::cut::{Cut, SHARE};
use super::kv::{KvStore, Set};
use super::row_kernels::{AddRow, NormRow, TurnHeads};
use super::step::{Phase, Sequence, Step};
use super::{AttentionBlock, Decoder, Norm, OP, Projection};

/// Outputs that are computed before they are used further, if there are many rows: few, so that they stay in cache.
const STRIP: usize = 64;

/// What all tasks of a step share.
pub(super) struct Run<'a> {
    isa: Isa,
    threads: usize,
    decoder: &'a Decoder<'a>,
    tokens: &'a [u32],
    sequences: &'a [Sequence<'a>],
    /// The first row of each sequence, and how its attention is cut.
    cuts: Vec<(usize, Staged)>,
    logits: bool,
    rows: usize,
    precision: Precision,
    all: &'a RowList,
    operands: Vec<(Arrangement, usize, Arranged)>,
    hidden: Pieces<'a, f32>,
    queries: Pieces<'a, f32>,
    keys: Pieces<'a, f32>,
    values: Pieces<'a, f32>,
    attended: Pieces<'a, f32>,
    delta: Pieces<'a, f32>,
    gated: Pieces<'a, f32>,
    partials: PartialPieces<'a>,
    out: Pieces<'a, f32>,
    places: &'a [std::sync::Mutex<Place>],
    failed: AtomicBool,
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
        let (mut cuts, mut first, mut states) = (Vec::with_capacity(step.sequences.len()), 0, 0);
        for sequence in step.sequences {
            let Some((store, layer)) = sequence.stores.iter().zip(&step.decoder.layers).next() else {
                continue;
            };
            // SAFETY: only shapes are looked at.
            let attention =
                unsafe { attention(step.decoder, &layer.attention, store, &queries[..], first, sequence)? };
            let staged = Staged::new(&attention, pool.threads(), states);
            cuts.push((first, staged));
            first += sequence.length;
            states += staged.states();
        }
        partials.reserve(states, step.decoder.head_dim);
        Ok(Self {
            isa,
            threads: pool.threads(),
            decoder: step.decoder,
            tokens: step.tokens,
            sequences: step.sequences,
            cuts,
            logits: step.logits,
            rows: step.tokens.len(),
            precision: *precision,
            all,
            operands: operands.iter_mut().map(|(kind, columns, o)| (*kind, *columns, o.view())).collect(),
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
            failed: AtomicBool::new(false),
        })
    }

    pub(super) fn phases(&self, pool: &Pool, phases: &[Phase]) -> Result<(), KernelError> {
        let tasks: Vec<usize> = phases.iter().map(|&phase| self.tasks(phase)).collect();
        run_phases(pool, &tasks, &|phase, task, place| {
            self.task(phases[phase], task, &mut lock(&self.places[place]));
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

    fn cut(&self, projections: &[&Projection<'_>]) -> Cut {
        let total = projections.iter().map(|p| p.matrix.rows()).sum();
        let matrix = &projections[0].matrix;
        let arrangement = Arrangement::new(self.isa, matrix, self.precision);
        Cut::new(self.rows, total, matrix.columns(), arrangement, self.threads)
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
            Phase::Combine(_) => self.cuts.iter().map(|(_, cut)| cut.combinations()).sum(),
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

    fn task(&self, phase: Phase, task: usize, place: &mut Place) {
        let decoder = self.decoder;
        // SAFETY (of all that follows): the phases keep apart what writes a buffer and what reads it; the tasks of a
        // phase have different rows or outputs.
        match phase {
            Phase::Embed => self.embed(self.rows_of(task)),
            Phase::AttentionInput(index) => {
                let added = index.checked_sub(1).and_then(|last| decoder.layers[last].mlp.post_norm.as_ref());
                let layer = &decoder.layers[index].attention;
                let next = [&layer.q, &layer.k, &layer.v];
                self.rows_of(task).for_each(|row| self.norm_row(row, added, &layer.norm, &next, place));
            }
            Phase::Qkv(index) => {
                let layer = &decoder.layers[index].attention;
                let targets = [(&layer.q, &self.queries), (&layer.k, &self.keys), (&layer.v, &self.values)];
                self.products(task, &targets);
            }
            Phase::Heads(index) => self.rows_of(task).for_each(|row| self.turn_row(row, index, place)),
            Phase::Attend(index) => self.attend(task, index, false),
            Phase::Combine(index) => self.attend(task, index, true),
            Phase::AttentionOutput(index) => {
                let o = &decoder.layers[index].attention.o;
                self.rows_of(task).for_each(|row| self.arrange(row, &self.attended, &[o]));
            }
            Phase::Output(index) => {
                let layer = &decoder.layers[index].attention;
                self.add_product(task, &layer.o, layer.post_norm.is_some(), place);
            }
            Phase::MlpInput(index) => {
                let added = decoder.layers[index].attention.post_norm.as_ref();
                let layer = &decoder.layers[index].mlp;
                let next = [&layer.gate, &layer.up];
                self.rows_of(task).for_each(|row| self.norm_row(row, added, &layer.norm, &next, place));
            }
            Phase::GateUp(index) => self.gate(task, index, place),
            Phase::MlpMiddle(index) => {
                let down = &decoder.layers[index].mlp.down;
                self.rows_of(task).for_each(|row| self.arrange(row, &self.gated, &[down]));
            }
            Phase::Down(index) => {
                let layer = &decoder.layers[index].mlp;
                self.add_product(task, &layer.down, layer.post_norm.is_some(), place);
            }
            Phase::Finish => self.rows_of(task).for_each(|row| self.finish_row(row, place)),
            Phase::HeadInput => {
                self.rows_of(task)
                    .for_each(|row| self.norm_row(row, None, &decoder.norm, &[&decoder.head], place));
            }
            Phase::Head => self.products(task, &[(&decoder.head, &self.out)]),
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
    ) {
        let normed = &mut place.row[..self.decoder.hidden()];
        self.add_delta(row, added, normed);
        let range = row * normed.len()..(row + 1) * normed.len();
        // SAFETY: the row is this task's.
        let hidden = unsafe { self.hidden.part(range) };
        simd::run(self.isa, NormRow { from: hidden, norm, to: normed });
        self.arrange_for(row, normed.as_ptr(), next);
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
        if !self.logits {
            let range = row * width..(row + 1) * width;
            // SAFETY: the row is this task's.
            unsafe { self.out.piece(range.clone()).copy_from_slice(self.hidden.part(range)) };
        }
    }

    fn arrange(&self, row: usize, from: &Pieces<'_, f32>, next: &[&Projection<'_>]) {
        let width = next[0].matrix.columns();
        // SAFETY: nobody writes `from` in this phase.
        let values = unsafe { from.part(row * width..(row + 1) * width) };
        self.arrange_for(row, values.as_ptr(), next);
    }

    /// Arranges a row once for each arrangement that the products want.
    fn arrange_for(&self, row: usize, values: *const f32, next: &[&Projection<'_>]) {
        for (index, projection) in next.iter().enumerate() {
            let operand = self.operand(projection);
            let before = next[..index].iter().any(|p| self.operand(p) == operand);
            if !before {
                // SAFETY: the workspace has the row, which is this task's.
                unsafe { self.operands[operand].2.set(self.isa, row, values) };
            }
        }
    }

    fn operand(&self, projection: &Projection<'_>) -> usize {
        let matrix = &projection.matrix;
        let wanted = (Arrangement::new(self.isa, matrix, self.precision), matrix.columns());
        // The workspace was made for all matrices of the decoder.
        self.operands.iter().position(|&(kind, columns, _)| (kind, columns) == wanted).unwrap_or(0)
    }

    /// A part of one of several products of the same rows, written where it belongs.
    fn products(&self, mut task: usize, targets: &[(&Projection<'_>, &Pieces<'_, f32>)]) {
        let projections: [&Projection<'_>; 3] =
            std::array::from_fn(|index| targets[index.min(targets.len() - 1)].0);
        let cut = self.cut(&projections[..targets.len()]);
        for (projection, to) in targets {
            let outputs = projection.matrix.rows();
            let count = cut.tasks(outputs);
            if task < count {
                let (rows, outputs_range) = cut.part(outputs, task);
                let to = to.place(rows.start * outputs + outputs_range.start);
                self.multiply(projection, rows, outputs_range, to, outputs);
                return;
            }
            task -= count;
        }
    }

    fn multiply(
        &self,
        projection: &Projection<'_>,
        rows: Range<usize>,
        outputs: Range<usize>,
        to: *mut f32,
        stride: usize,
    ) {
        let x = self.operands[self.operand(projection)].2;
        let Projection { matrix, bias } = projection;
        let part = Part { matrix, bias: *bias, x, all: self.all, rows, outputs };
        // SAFETY: the operand was arranged in the phase before; the place is this task's.
        if unsafe { part.run(self.isa, to, stride) }.is_err() {
            self.failed.store(true, Ordering::Relaxed);
        }
    }

    /// A part of a product that is added to the hidden state, or put aside to be normed.
    fn add_product(&self, task: usize, projection: &Projection<'_>, aside: bool, place: &mut Place) {
        let width = projection.matrix.rows();
        let (rows, outputs) = self.cut(&[projection]).part(width, task);
        if aside {
            let to = self.delta.place(rows.start * width + outputs.start);
            self.multiply(projection, rows, outputs, to, width);
            return;
        }
        let strip = if rows.len() > 4 { STRIP } else { outputs.len() };
        for first in outputs.clone().step_by(strip.max(1)) {
            let strip = first..outputs.end.min(first + strip);
            let count = strip.len();
            place.first.resize(rows.len() * count, 0.0);
            self.multiply(projection, rows.clone(), strip, place.first.as_mut_ptr(), count);
            for (row, added) in rows.clone().zip(place.first.chunks_exact(count)) {
                // SAFETY: the place is this task's.
                let hidden = unsafe { self.hidden.piece(row * width + first..row * width + first + count) };
                simd::run(self.isa, AddRow { to: hidden, from: added });
            }
        }
    }

    fn gate(&self, task: usize, index: usize, place: &mut Place) {
        let layer = &self.decoder.layers[index].mlp;
        let width = layer.gate.matrix.rows();
        let (rows, outputs) = self.cut(&[&layer.gate]).part(width, task);
        let strip = if rows.len() > 4 { STRIP } else { outputs.len() };
        for first in outputs.clone().step_by(strip.max(1)) {
            let strip = first..outputs.end.min(first + strip);
            let count = strip.len();
            place.first.resize(rows.len() * count, 0.0);
            place.second.resize(rows.len() * count, 0.0);
            self.multiply(&layer.gate, rows.clone(), strip.clone(), place.first.as_mut_ptr(), count);
            self.multiply(&layer.up, rows.clone(), strip, place.second.as_mut_ptr(), count);
            let gates = place.first.chunks_exact(count).zip(place.second.chunks_exact(count));
            for (row, (gate, up)) in rows.clone().zip(gates) {
                // SAFETY: the place is this task's.
                let out = unsafe { self.gated.piece(row * width + first..row * width + first + count) };
                simd::run(self.isa, Activate { activation: layer.activation, x: gate, up: Some(up), out });
            }
        }
    }

    /// Norms and turns the queries and keys of a row, and stores its keys and values.
    fn turn_row(&self, row: usize, index: usize, place: &mut Place) {
        let (decoder, layer) = (self.decoder, &self.decoder.layers[index].attention);
        let sequence = self.cuts.partition_point(|(first, _)| *first <= row) - 1;
        let position = self.sequences[sequence].position + row - self.cuts[sequence].0;
        let store = &self.sequences[sequence].stores[index];
        let dim = decoder.head_dim;
        let (queries, keys) = (decoder.heads * dim, decoder.kv_heads * dim);
        // SAFETY: the row is this task's.
        let (queries, keys, values) = unsafe {
            (
                self.queries.piece(row * queries..(row + 1) * queries),
                self.keys.piece(row * keys..(row + 1) * keys),
                self.values.piece(row * keys..(row + 1) * keys),
            )
        };
        let rope = &decoder.ropes[layer.rope];
        let Some(angles) = place.angles.get_mut(layer.rope) else { return };
        let norms = layer.qk_norm.as_ref();
        let scratch = &mut place.row[..dim];
        let position_number = position as i32;
        let q_norm = norms.map(|(q, _)| q);
        simd::run(
            self.isa,
            TurnHeads { rope, angles, norm: q_norm, scratch, position: position_number, heads: queries, dim },
        );
        let scratch = &mut place.row[..dim];
        let k_norm = norms.map(|(_, k)| k);
        simd::run(
            self.isa,
            TurnHeads { rope, angles, norm: k_norm, scratch, position: position_number, heads: keys, dim },
        );
        let pairs = keys.chunks_exact_mut(dim).zip(values.chunks_exact_mut(dim));
        for (head, (key, value)) in pairs.enumerate() {
            simd::run(self.isa, Set { store, head, position, key, value });
        }
    }

    fn attend(&self, mut task: usize, index: usize, combine: bool) {
        for ((first, staged), sequence) in self.cuts.iter().zip(self.sequences) {
            let count = if combine { staged.combinations() } else { staged.tasks() };
            if task >= count {
                task -= count;
                continue;
            }
            let (store, layer) = (&sequence.stores[index], &self.decoder.layers[index].attention);
            let width = self.decoder.heads * self.decoder.head_dim;
            // SAFETY: queries and stores are only read in this phase; the tasks of a plan are disjoint.
            unsafe {
                let queries = self.queries.part(0..self.rows * width);
                match attention(self.decoder, layer, store, queries, *first, sequence) {
                    Ok(attention) if combine => {
                        let out = (*first, &self.attended);
                        staged.combine(self.isa, &attention, task, &self.partials, out);
                    }
                    Ok(attention) => {
                        let out = (*first, &self.attended);
                        staged.attend(self.isa, &attention, task, &self.partials, out);
                    }
                    Err(_) => self.failed.store(true, Ordering::Relaxed),
                }
            }
            return;
        }
    }
}

/// The attention of a sequence whose rows begin at `first`.
///
/// # Safety
/// Nobody writes to the store while the result is used.
unsafe fn attention<'a>(
    decoder: &Decoder<'_>,
    layer: &AttentionBlock<'_>,
    store: &'a KvStore,
    queries: &'a [f32],
    first: usize,
    sequence: &Sequence<'_>,
) -> Result<Attention<'a>, KernelError> {
    let (heads, dim) = (decoder.heads, decoder.head_dim);
    let queries = &queries[first * heads * dim..];
    // SAFETY: the caller's promise.
    let (keys, values) = unsafe { store.views(sequence.position + sequence.length)? };
    Ok(Attention {
        queries: Heads::new(
            Floats::F32(queries),
            [1, heads, sequence.length, dim],
            [0, dim, heads * dim, 1],
        )?,
        keys: Stored::Dense(keys),
        values: Stored::Dense(values),
        scale: layer.scale,
        causal: true,
        window: layer.window,
        mask: None,
        sinks: None,
    })
}
