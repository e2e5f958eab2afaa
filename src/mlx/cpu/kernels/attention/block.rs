//! One block of keys and values against a few query rows: the arithmetic of attention.
//!
//! Keys are cut into blocks of [`BLOCK`], counted from the first. A block of a row gives the largest score `m`, the
//! sum `l` of `e^(score - m)` and the products with the values `o`; blocks are merged in order. Nothing in here
//! depends on which rows share a call, so a query gets the same bits alone and among others.
// Loops over small fixed arrays are written with indices, which are what becomes registers.
#![allow(clippy::needless_range_loop)]

use super::super::simd::{Element, LANES, Simd, math};

/// Keys a block.
pub(super) const BLOCK: usize = 64;

const VECTORS: usize = BLOCK / LANES;

/// The most rows of a tile: those of [`Simd::TILE_ROWS`].
pub(super) const MAX_ROWS: usize = 4;

/// Scores, then weights, of a row in a block; on a cache line, since a vector that straddles two is slow to load.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Weights(pub [f32; BLOCK]);

impl Weights {
    pub(super) const ZERO: Self = Self([0.0; BLOCK]);
}

/// Rows of keys or values of one head.
#[derive(Clone, Copy)]
pub(super) struct BlockRows<'a, E> {
    pub data: &'a [E],
    pub stride: usize,
    /// Elements of a row: a multiple of 16.
    pub width: usize,
    /// Whether the rows come from memory, and those of the next block will be wanted.
    pub streamed: bool,
}

impl<'a, E> BlockRows<'a, E> {
    #[inline(always)]
    fn row(&self, index: usize) -> &'a [[E; LANES]] {
        self.data[index * self.stride..][..self.width].as_chunks().0
    }

    /// Asks for the row that has this place in the next block.
    #[inline(always)]
    fn prefetch_next<S: Simd>(&self, s: S, row: &[[E; LANES]]) {
        if self.streamed {
            let ahead = BLOCK * self.stride * size_of::<E>();
            for line in (0..self.width * size_of::<E>()).step_by(64) {
                s.prefetch(row, ahead + line);
            }
        }
    }
}

/// The keys of a block that a row sees.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Span {
    pub low: usize,
    pub high: usize,
}

impl Span {
    pub(super) fn is_empty(self) -> bool {
        self.low >= self.high
    }
}

/// The running result of a row, apart from its values.
#[derive(Clone, Copy)]
pub(super) struct State {
    /// The largest score so far.
    pub largest: f32,
    /// The sum of `e^(score - largest)`.
    pub sum: f32,
}

impl State {
    pub(super) const EMPTY: Self = Self { largest: f32::NEG_INFINITY, sum: 0.0 };

    /// What exponents are taken relative to: without a visible key any finite number will do.
    #[inline(always)]
    fn origin(largest: f32) -> f32 {
        if largest == f32::NEG_INFINITY { 0.0 } else { largest }
    }
}

/// How the values of a block are added to those before it: `old * o.0 + new * o.1`.
pub(super) type Factors = (f32, f32);

/// Products of `R` queries and `K` keys, summed over the vectors of a row but not across lanes.
#[inline(always)]
fn products<S: Simd, E: Element, const R: usize, const K: usize>(
    s: S,
    queries: [&[[f32; LANES]]; R],
    keys: [&[[E; LANES]]; K],
    vectors: usize,
) -> [[S::V; K]; R] {
    let mut sums = [[s.splat(0.0); K]; R];
    for v in 0..vectors {
        let mut key = [s.splat(0.0); K];
        for k in 0..K {
            key[k] = E::load(s, &keys[k][v]);
        }
        for r in 0..R {
            let query = s.load(&queries[r][v]);
            for k in 0..K {
                sums[r][k] = s.mul_add(query, key[k], sums[r][k]);
            }
        }
    }
    sums
}

/// `queries · keys` for `R` rows of `queries`, for keys below `count`; later ones are whatever.
#[inline(always)]
pub(super) fn scores<S: Simd, E: Element, const R: usize>(
    s: S,
    queries: &[[f32; LANES]],
    keys: BlockRows<'_, E>,
    count: usize,
    to: &mut [Weights; R],
) {
    let vectors = keys.width / LANES;
    let mut rows_of_queries = [&queries[..0]; R];
    for (r, row) in rows_of_queries.iter_mut().enumerate() {
        *row = &queries[r * vectors..][..vectors];
    }
    let queries = rows_of_queries;
    for first in (0..count).step_by(LANES) {
        let mut folds = [[s.splat(0.0); 4]; R];
        for quad in 0..4 {
            // Keys past the end are the last one again; their scores are not used.
            let at = first + quad;
            let rows = [
                &keys.row(at.min(count - 1))[..vectors],
                &keys.row((at + 4).min(count - 1))[..vectors],
                &keys.row((at + 8).min(count - 1))[..vectors],
                &keys.row((at + 12).min(count - 1))[..vectors],
            ];
            for row in &rows {
                keys.prefetch_next(s, row);
            }
            if S::TILE_KEYS == 4 {
                let sums = products(s, queries, rows, vectors);
                for r in 0..R {
                    folds[r][quad] = s.fold(sums[r]);
                }
            } else {
                let [a, b, c, d] = rows;
                let low = products(s, queries, [a, b], vectors);
                let high = products(s, queries, [c, d], vectors);
                for r in 0..R {
                    folds[r][quad] = s.fold([low[r][0], low[r][1], high[r][0], high[r][1]]);
                }
            }
        }
        for r in 0..R {
            s.store(&mut to[r].0.as_chunks_mut().0[first / LANES], s.merge_folded(folds[r]));
        }
    }
}

/// Turns a row's scores into weights `e^(score - largest)`, zero outside `span`, and returns the block's state.
/// `bias` is added to the scores first; where it is -inf the key is hidden, whatever its score.
#[inline(always)]
pub(super) fn weigh<S: Simd>(s: S, weights: &mut Weights, span: Span, bias: Option<&Weights>) -> State {
    let hidden = s.splat(f32::NEG_INFINITY);
    let mut scores = [hidden; VECTORS];
    let mut largest = hidden;
    for (i, from) in weights.0.as_chunks().0.iter().enumerate() {
        let mut score = s.load(from);
        if let Some(bias) = bias {
            let bias = s.load(&bias.0.as_chunks().0[i]);
            score = s.select_lt(bias, s.splat(f32::MIN), hidden, s.add(score, bias));
        }
        let first = i * LANES;
        scores[i] =
            s.keep_lanes(score, span.low.saturating_sub(first), span.high.saturating_sub(first), hidden);
        largest = s.max(largest, scores[i]);
    }
    let largest = s.largest(largest);
    let origin = s.splat(State::origin(largest));
    for (score, to) in scores.iter_mut().zip(weights.0.as_chunks_mut().0) {
        *score = math::exp_weight(s, s.sub(*score, origin));
        s.store(to, *score);
    }
    let [a, b, c, d] = scores;
    State { largest, sum: s.sum(s.add(s.add(a, b), s.add(c, d))) }
}

/// Adds the states of `R` blocks to those before them.
#[inline(always)]
pub(super) fn merge_states<S: Simd, const R: usize>(
    s: S,
    states: &mut [State; R],
    blocks: &[State; R],
) -> [Factors; R] {
    let mut exponents = [0.0; LANES];
    for r in 0..R {
        let (old, new) = (states[r].largest, blocks[r].largest);
        let largest = if old > new { old } else { new };
        let origin = State::origin(largest);
        exponents[r] = old - origin;
        exponents[r + LANES / 2] = new - origin;
        states[r].largest = largest;
    }
    let powers = math::exp_weight(s, s.load(&exponents));
    s.store(&mut exponents, powers);
    let mut factors = [(0.0, 0.0); R];
    for r in 0..R {
        let (old, new) = (exponents[r], exponents[r + LANES / 2]);
        states[r].sum = blocks[r].sum.mul_add(new, states[r].sum * old);
        factors[r] = (old, new);
    }
    factors
}

/// `old * factors.0 + new * factors.1`.
#[inline(always)]
pub(super) fn merge_values<S: Simd>(s: S, old: S::V, new: S::V, factors: Factors) -> S::V {
    s.mul_add(new, s.splat(factors.1), s.mul(old, s.splat(factors.0)))
}

/// Weights times values for the vectors `first..first + C` of `R` rows, into `to` (rows of `values.width`): merged
/// by `factors`, or as they are when there are none. Rows with an empty span are left alone.
#[inline(always)]
fn add_panel<S: Simd, E: Element, const R: usize, const C: usize>(
    s: S,
    weights: &[Weights; R],
    spans: &[Span; R],
    values: BlockRows<'_, E>,
    first: usize,
    factors: Option<&[Factors; R]>,
    to: &mut [[f32; LANES]],
) {
    let mut sums = [[s.splat(0.0); C]; R];
    // Keys that all rows see, and around them those that some do.
    let (mut low, mut high, mut start, mut end) = (0, BLOCK, BLOCK, 0);
    for span in spans {
        (low, high) = (low.max(span.low), high.min(span.high));
        if !span.is_empty() {
            (start, end) = (start.min(span.low), end.max(span.high));
        }
    }
    if low >= high {
        (low, high) = (end, end);
    }
    for (keys, shared) in [(start..low, false), (low..high, true), (high..end, false)] {
        for key in keys {
            let row = values.row(key);
            if first == 0 {
                values.prefetch_next(s, row);
            }
            let row = &row[first..first + C];
            let mut value = [s.splat(0.0); C];
            for c in 0..C {
                value[c] = E::load(s, &row[c]);
            }
            for r in 0..R {
                if shared || (spans[r].low <= key && key < spans[r].high) {
                    let weight = s.splat(weights[r].0[key]);
                    for c in 0..C {
                        sums[r][c] = s.mul_add(weight, value[c], sums[r][c]);
                    }
                }
            }
        }
    }
    let width = values.width / LANES;
    for r in 0..R {
        if spans[r].is_empty() {
            continue;
        }
        let to = &mut to[r * width + first..][..C];
        for c in 0..C {
            let sum = match factors {
                Some(factors) => merge_values(s, s.load(&to[c]), sums[r][c], factors[r]),
                None => sums[r][c],
            };
            s.store(&mut to[c], sum);
        }
    }
}

/// [`add_panel`] for all vectors of the rows.
#[inline(always)]
pub(super) fn add_values<S: Simd, E: Element, const R: usize>(
    s: S,
    weights: &[Weights; R],
    spans: &[Span; R],
    values: BlockRows<'_, E>,
    factors: Option<&[Factors; R]>,
    to: &mut [[f32; LANES]],
) {
    let vectors = values.width / LANES;
    let mut first = 0;
    while first + 4 <= vectors && S::TILE_VECTORS == 4 {
        add_panel::<S, E, R, 4>(s, weights, spans, values, first, factors, to);
        first += 4;
    }
    while first + 2 <= vectors {
        add_panel::<S, E, R, 2>(s, weights, spans, values, first, factors, to);
        first += 2;
    }
    if first < vectors {
        add_panel::<S, E, R, 1>(s, weights, spans, values, first, factors, to);
    }
}
