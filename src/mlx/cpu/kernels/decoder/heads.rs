//! What the tasks of attention do: heads are normed, turned and stored, and attend.

use std::sync::atomic::Ordering;

use super::super::attention::{Attention, Stored};
use super::super::error::KernelError;
use super::super::floats::Floats;
use super::super::simd;
use super::super::views::Heads;
use super::buffers::Place;
use super::kv::{KvStore, Set};
use super::row_kernels::TurnHeads;
use super::step::Sequence;
use super::tasks::Run;
use super::{AttentionBlock, Decoder};

impl Run<'_> {
    /// Norms and turns the queries and keys of a row, and stores its keys and values.
    pub(super) fn turn_row(&self, row: usize, index: usize, place: &mut Place) {
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

    pub(super) fn attend(&self, mut task: usize, index: usize, place: &mut Place) {
        for ((first, staged), sequence) in self.cuts.iter().zip(self.sequences) {
            let count = staged.tasks();
            if task >= count {
                task -= count;
                continue;
            }
            let (store, layer) = (&sequence.stores[index], &self.decoder.layers[index].attention);
            let width = self.decoder.heads * self.decoder.head_dim;
            if self.few {
                self.turn_queries(index, (*first, sequence), staged.head(task), place);
            }
            // SAFETY: queries and stores are only read in this phase; the tasks of a plan are disjoint.
            unsafe {
                let queries =
                    if self.few { &place.queries[..] } else { self.queries.part(0..self.rows * width) };
                match attention(self.decoder, layer, store, queries, *first, sequence) {
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

    /// Norms and turns the queries that share a head of keys, for this thread alone.
    fn turn_queries(
        &self,
        index: usize,
        (first, sequence): (usize, &Sequence<'_>),
        head: usize,
        place: &mut Place,
    ) {
        let (decoder, layer) = (self.decoder, &self.decoder.layers[index].attention);
        let dim = decoder.head_dim;
        let group = decoder.heads / decoder.kv_heads * dim;
        let (rope, norm) = (&decoder.ropes[layer.rope], layer.qk_norm.as_ref().map(|(q, _)| q));
        let Some(angles) = place.angles.get_mut(layer.rope) else { return };
        let scratch = &mut place.row[..dim];
        for row in first..first + sequence.length {
            let position = (sequence.position + row - first) as i32;
            let start = (row * decoder.kv_heads + head) * group;
            let heads = &mut place.queries[start..start + group];
            // SAFETY: nobody writes queries in this phase.
            heads.copy_from_slice(unsafe { self.queries.part(start..start + group) });
            simd::run(self.isa, TurnHeads { rope, angles, norm, scratch, position, heads, dim });
        }
    }

    /// Norms, turns and stores all new keys and values.
    pub(super) fn store_rows(&self, index: usize, place: &mut Place) {
        let (decoder, layer) = (self.decoder, &self.decoder.layers[index].attention);
        let dim = decoder.head_dim;
        let width = decoder.kv_heads * dim;
        let (rope, norm) = (&decoder.ropes[layer.rope], layer.qk_norm.as_ref().map(|(_, k)| k));
        let Some(angles) = place.angles.get_mut(layer.rope) else { return };
        let scratch = &mut place.row[..dim];
        for ((first, _), sequence) in self.cuts.iter().zip(self.sequences) {
            for row in *first..first + sequence.length {
                let position = sequence.position + row - first;
                let range = row * width..(row + 1) * width;
                // SAFETY: the products that write them are done, and nobody else reads them.
                let (keys, values) = unsafe { (self.keys.piece(range.clone()), self.values.piece(range)) };
                let turn =
                    TurnHeads { rope, angles, norm, scratch, position: position as i32, heads: keys, dim };
                simd::run(self.isa, turn);
                let store = &sequence.stores[index];
                let pairs = keys.chunks_exact_mut(dim).zip(values.chunks_exact_mut(dim));
                for (head, (key, value)) in pairs.enumerate() {
                    simd::run(self.isa, Set { store, head, position, key, value });
                }
            }
        }
    }
}

/// The attention of a sequence whose rows begin at `first`.
///
/// # Safety
/// Nobody writes to the store while the result is used.
pub(super) unsafe fn attention<'a>(
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
