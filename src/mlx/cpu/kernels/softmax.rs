//! Softmax, its logarithm's denominator, the largest entry and the largest few, over the last axis.
//!
//! A row is cut into blocks of [`BLOCK`] whatever the number of threads; a block gives its largest entry and the sum
//! of `e^(x - largest)`, and blocks are merged in order.

use std::cmp::Ordering;

use super::super::{Isa, Pool};
use super::error::{KernelError, expect};
use super::floats::{Floats, FloatsMut};
use super::simd::{self, Element, Kernel, LANES, Simd, load_part, math, store_part};
use super::views::Rows;
use super::with_floats;

/// Elements of a block.
const BLOCK: usize = 4096;

/// `e^(x - logsumexp(x))`, row by row, into `out` (`[count, width]`, the type of `x`).
///
/// # Errors
/// When types or shapes do not fit together, or the work fails.
pub fn softmax(isa: Isa, pool: &Pool, x: &Rows<'_>, out: FloatsMut<'_>) -> Result<(), KernelError> {
    let op = "softmax";
    expect(op, "the number of results", x.count * x.width, out.len())?;
    let sums = row_sums(isa, pool, x)?;
    match (x.data, out) {
        (Floats::F32(from), FloatsMut::F32(out)) => weigh(isa, pool, x, from, &sums, out),
        (Floats::F16(from), FloatsMut::F16(out)) => weigh(isa, pool, x, from, &sums, out),
        (Floats::Bf16(from), FloatsMut::Bf16(out)) => weigh(isa, pool, x, from, &sums, out),
        _ => Err(KernelError::MixedTypes { op, what: "input and output" }),
    }
}

/// `ln(sum(e^x))` of each row into `out` (`[count]`). A row without entries, or with none above -inf, gives -inf.
///
/// # Errors
/// When `out` does not fit, or the work fails.
pub fn logsumexp(isa: Isa, pool: &Pool, x: &Rows<'_>, out: &mut [f32]) -> Result<(), KernelError> {
    expect("logsumexp", "the number of results", x.count, out.len())?;
    for (out, sum) in out.iter_mut().zip(row_sums(isa, pool, x)?) {
        *out = sum.origin() + (f64::from(sum.sum).ln() as f32);
    }
    Ok(())
}

/// The index of the largest entry of each row into `out` (`[count]`). Of equal ones the first counts; NaN never does,
/// unless a row has nothing else: then, as in an empty row, the index is 0.
///
/// # Errors
/// When `out` does not fit, or the work fails.
pub fn argmax(isa: Isa, pool: &Pool, x: &Rows<'_>, out: &mut [u32]) -> Result<(), KernelError> {
    expect("argmax", "the number of results", x.count, out.len())?;
    out.fill(0);
    let blocks = per_block(pool, x, |row, start, end| {
        with_floats!(x.data, from => {
            let from = &from[row * x.stride + start..row * x.stride + end];
            simd::run(isa, Largest(from)).map(|(value, index)| (value, index + start))
        })
    })?;
    for (out, blocks) in out.iter_mut().zip(blocks.chunks(x.width.div_ceil(BLOCK).max(1))) {
        let mut best: Option<(f32, usize)> = None;
        for block in blocks.iter().flatten() {
            if best.is_none_or(|best| block.0 > best.0) {
                best = Some(*block);
            }
        }
        if let Some((_, index)) = best {
            *out = index as u32;
        }
    }
    Ok(())
}

/// The `k` largest entries of one row with their indices, largest first; of equal ones the first comes first. NaN is
/// left out, so there may be fewer than `k`.
pub fn top_k(isa: Isa, row: Floats<'_>, k: usize) -> Vec<(u32, f32)> {
    if k == 0 {
        return Vec::new();
    }
    let mut found = with_floats!(row, row => simd::run(isa, Candidates { row, k }));
    found.sort_unstable_by(larger_first);
    found.truncate(k);
    found
}

/// Neither is NaN.
fn larger_first(a: &(u32, f32), b: &(u32, f32)) -> Ordering {
    b.1.partial_cmp(&a.1).unwrap_or(Ordering::Equal).then(a.0.cmp(&b.0))
}

/// The largest entry and the sum of the exponentials of what is left when it is subtracted.
#[derive(Clone, Copy, Debug)]
struct Sum {
    largest: f32,
    sum: f32,
}

impl Sum {
    const EMPTY: Self = Self { largest: f32::NEG_INFINITY, sum: 0.0 };

    #[inline(always)]
    fn origin(self) -> f32 {
        if self.largest == f32::NEG_INFINITY { 0.0 } else { self.largest }
    }
}

/// Calls `work` for each block of each row and returns the results in order.
fn per_block<T: Clone + Default + Send>(
    pool: &Pool,
    x: &Rows<'_>,
    work: impl Fn(usize, usize, usize) -> T + Sync,
) -> Result<Vec<T>, KernelError> {
    let blocks = x.width.div_ceil(BLOCK);
    let mut results = vec![T::default(); x.count * blocks];
    // A block takes about a microsecond.
    let each = if results.len() < 4 { 4 } else { 2 };
    pool.run_chunks_mut(&mut results, each, &|task, results| {
        for (i, result) in results.iter_mut().enumerate() {
            let (row, block) = ((task * each + i) / blocks, (task * each + i) % blocks);
            *result = work(row, block * BLOCK, x.width.min((block + 1) * BLOCK));
        }
    })?;
    Ok(results)
}

fn row_sums(isa: Isa, pool: &Pool, x: &Rows<'_>) -> Result<Vec<Sum>, KernelError> {
    let blocks = per_block(pool, x, |row, start, end| {
        with_floats!(x.data, from => {
            Some(simd::run(isa, BlockSum(&from[row * x.stride + start..row * x.stride + end])))
        })
    })?;
    if x.width == 0 {
        return Ok(vec![Sum::EMPTY; x.count]);
    }
    Ok(blocks.chunks(x.width.div_ceil(BLOCK)).map(|blocks| simd::run(isa, Merge(blocks))).collect())
}

/// [`Sum`] of one block.
struct BlockSum<'a, E>(&'a [E]);

impl<E: Element> Kernel for BlockSum<'_, E> {
    type Output = Sum;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Sum {
        let lowest = s.splat(f32::NEG_INFINITY);
        let (chunks, rest) = self.0.as_chunks::<LANES>();
        let tail = s.keep_lanes(load_part(s, rest), 0, rest.len(), lowest);
        let mut largest = [tail, lowest, lowest, lowest];
        let (fours, left) = chunks.as_chunks::<4>();
        for four in fours {
            for i in 0..4 {
                largest[i] = s.max(E::load(s, &four[i]), largest[i]);
            }
        }
        for (i, chunk) in left.iter().enumerate() {
            largest[i] = s.max(E::load(s, chunk), largest[i]);
        }
        let [a, b, c, d] = largest;
        let mut sum = Sum { largest: s.largest(s.max(s.max(a, b), s.max(c, d))), sum: 0.0 };
        let origin = s.splat(sum.origin());
        let mut sums = [math::exp_weight(s, s.sub(tail, origin)), s.splat(0.0), s.splat(0.0), s.splat(0.0)];
        for four in fours {
            for i in 0..4 {
                sums[i] = s.add(sums[i], math::exp_weight(s, s.sub(E::load(s, &four[i]), origin)));
            }
        }
        for (i, chunk) in left.iter().enumerate() {
            sums[i] = s.add(sums[i], math::exp_weight(s, s.sub(E::load(s, chunk), origin)));
        }
        let [a, b, c, d] = sums;
        sum.sum = s.sum(s.add(s.add(a, b), s.add(c, d)));
        sum
    }
}

/// [`Sum`] of a row from those of its blocks.
struct Merge<'a>(&'a [Option<Sum>]);

impl Kernel for Merge<'_> {
    type Output = Sum;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Sum {
        let mut row = Sum::EMPTY;
        for block in self.0.iter().flatten() {
            row.largest = if row.largest > block.largest { row.largest } else { block.largest };
        }
        let origin = s.splat(row.origin());
        for blocks in self.0.chunks(LANES) {
            let (mut largest, mut sums) = ([f32::NEG_INFINITY; LANES], [0.0; LANES]);
            for (i, block) in blocks.iter().enumerate() {
                let block = block.unwrap_or(Sum::EMPTY);
                (largest[i], sums[i]) = (block.largest, block.sum);
            }
            let factors = math::exp_weight(s, s.sub(s.load(&largest), origin));
            row.sum += s.sum(s.mul(s.load(&sums), factors));
        }
        row
    }
}

/// The last step of [`softmax`] for one element type.
fn weigh<E: Element>(
    isa: Isa,
    pool: &Pool,
    x: &Rows<'_>,
    from: &[E],
    sums: &[Sum],
    out: &mut [E],
) -> Result<(), KernelError> {
    let (width, stride) = (x.width, x.stride);
    if width == 0 {
        return Ok(());
    }
    // Whole rows when they are short, else a row at a time: its blocks are cut inside.
    let each = (2 * BLOCK / width).max(1);
    let columns = width.min(2 * BLOCK);
    let across = width.div_ceil(columns);
    let out = super::pieces::Pieces::new(out);
    Ok(pool.run(x.count.div_ceil(each) * across, &|task| {
        let (first, start) = (task / across * each, task % across * columns);
        let end = width.min(start + columns);
        for row in first..x.count.min(first + each) {
            // SAFETY: two tasks differ in their rows or in their columns.
            let out = unsafe { out.piece(row * width + start..row * width + end) };
            let from = &from[row * stride + start..row * stride + end];
            simd::run(isa, Weigh { from, sum: sums[row], out });
        }
    })?)
}

struct Weigh<'a, E> {
    from: &'a [E],
    sum: Sum,
    out: &'a mut [E],
}

impl<E: Element> Kernel for Weigh<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (origin, inverse) = (s.splat(self.sum.origin()), s.splat(1.0 / self.sum.sum));
        let (chunks, rest) = self.from.as_chunks::<LANES>();
        let (out, out_rest) = self.out.as_chunks_mut::<LANES>();
        for (from, out) in chunks.iter().zip(out) {
            let power = math::exp_weight(s, s.sub(E::load(s, from), origin));
            E::store(s, out, s.mul(power, inverse));
        }
        let power = math::exp_weight(s, s.sub(load_part(s, rest), origin));
        store_part(s, out_rest, s.mul(power, inverse));
    }
}

/// The largest entry that is not NaN and its index.
struct Largest<'a, E>(&'a [E]);

impl<E: Element> Kernel for Largest<'_, E> {
    type Output = Option<(f32, usize)>;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Option<(f32, usize)> {
        let lowest = s.splat(f32::NEG_INFINITY);
        let (mut best, mut place) = (lowest, s.splat(-1.0));
        let (chunks, rest) = self.0.as_chunks::<LANES>();
        // A lane keeps the number of the chunk in which it was largest first; blocks are short enough for float32.
        for (i, chunk) in chunks.iter().enumerate() {
            let v = E::load(s, chunk);
            place = s.select_lt(best, v, s.splat(i as f32), place);
            best = s.select_lt(best, v, v, best);
        }
        let v = s.keep_lanes(load_part(s, rest), 0, rest.len(), lowest);
        place = s.select_lt(best, v, s.splat(chunks.len() as f32), place);
        best = s.select_lt(best, v, v, best);
        let (mut values, mut places) = ([0.0; LANES], [0.0; LANES]);
        s.store(&mut values, best);
        s.store(&mut places, place);
        let mut found: Option<(f32, usize)> = None;
        for lane in 0..LANES {
            if places[lane] < 0.0 {
                continue;
            }
            let (value, index) = (values[lane], places[lane] as usize * LANES + lane);
            if found.is_none_or(|best| value > best.0 || (value == best.0 && index < best.1)) {
                found = Some((value, index));
            }
        }
        // Nothing above -inf: the first -inf, if there is one.
        found.or_else(|| {
            let index = self.0.iter().position(|x| !is_nan(s, *x))?;
            Some((f32::NEG_INFINITY, index))
        })
    }
}

#[inline(always)]
fn is_nan<S: Simd, E: Element>(s: S, x: E) -> bool {
    let mut lanes = [0.0; LANES];
    s.store(&mut lanes, x.splat(s));
    lanes[0].is_nan()
}

/// A superset of the `k` largest entries: what was not below the `k`-th largest of those before it.
struct Candidates<'a, E> {
    row: &'a [E],
    k: usize,
}

impl<E: Element> Kernel for Candidates<'_, E> {
    type Output = Vec<(u32, f32)>;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Vec<(u32, f32)> {
        let room = (2 * self.k).max(1024);
        let mut found: Vec<(u32, f32)> = Vec::with_capacity(room + LANES);
        let mut threshold = f32::NEG_INFINITY;
        let (mut lanes, mut flags) = ([0.0; LANES], [0.0; LANES]);
        for (i, chunk) in self.row.chunks(LANES).enumerate() {
            let v = match <&[E; LANES]>::try_from(chunk) {
                Ok(chunk) => E::load(s, chunk),
                Err(_) => s.keep_lanes(load_part(s, chunk), 0, chunk.len(), s.splat(f32::NAN)),
            };
            let below = s.select_lt(v, s.splat(threshold), s.splat(1.0), s.splat(0.0));
            s.store(&mut flags, below);
            if s.sum(below) == LANES as f32 {
                continue;
            }
            s.store(&mut lanes, v);
            for (lane, x) in lanes.iter().enumerate() {
                if flags[lane] == 0.0 && !x.is_nan() {
                    found.push(((i * LANES + lane) as u32, *x));
                }
            }
            if found.len() >= room && self.k < found.len() {
                found.select_nth_unstable_by(self.k - 1, larger_first);
                found.truncate(self.k);
                threshold = found[self.k - 1].1;
            }
        }
        found
    }
}

#[cfg(test)]
#[path = "softmax_tests.rs"]
mod tests;
