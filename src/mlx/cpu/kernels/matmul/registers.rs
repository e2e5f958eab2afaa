//! `x · Wᵀ` for few rows of x: weights are unpacked in registers and used at once, at the speed of memory.
//!
//! Some rows of weights go together, so that chains of additions overlap. Each combination is compiled by itself: inside
//! the function that chooses among them, its loop would run out of registers.

use std::ops::Range;

use super::ahead::Ahead;
use super::rows::STRIDE;
use super::simd::{BLOCK, Kernel, Simd};
use super::source::{CHUNK, Source, WideScales};

/// Rows of weights whose lanes are added up together.
pub(super) const QUAD: usize = 4;

/// `M` rows of x times some rows of weights.
pub(super) struct Registers<W, const M: usize> {
    pub source: W,
    pub ahead: Ahead,
    pub inputs: usize,
    /// Rows of weights, counted through all stacked matrices.
    pub rows: Range<usize>,
    /// Padded to whole blocks.
    pub x: [*const f32; M],
    /// Room for the scales of four rows of weights.
    pub scales: WideScales,
    /// Output `i` of row `m` goes to `values[m * STRIDE + i]`.
    pub values: *mut f32,
}

/// As [`Registers`], `R` rows of weights at a time, of which `G` (1 or 2) blocks share a group.
struct Together<'a, W, const M: usize, const R: usize, const G: usize> {
    all: &'a Registers<W, M>,
    /// Rows of x whose outputs are wanted.
    wanted: usize,
}

// SAFETY: used by the thread that makes it.
unsafe impl<W, const M: usize, const R: usize, const G: usize> Sync for Together<'_, W, M, R, G> {}

impl<W, const M: usize> Registers<W, M> {
    /// Computes the outputs of the first `wanted` rows of x, `R` (4, 2 or 1) rows of weights at a time.
    ///
    /// # Safety
    /// The processor has the instructions of `S`; all rows lie in the matrix, and there are no fewer than [`QUAD`] or
    /// `R` is 1; at each output there is room for four values.
    #[inline(always)]
    pub(super) unsafe fn enter<S: Simd, const R: usize>(&self, wanted: usize)
    where
        W: Source<S>,
    {
        // SAFETY: the caller's promise.
        unsafe {
            if self.source.pairs() {
                S::enter(&Together::<W, M, R, 2> { all: self, wanted }, 0);
            } else {
                S::enter(&Together::<W, M, R, 1> { all: self, wanted }, 0);
            }
        }
    }
}

impl<S: Simd, W: Source<S>, const M: usize, const R: usize, const G: usize> Kernel<S>
    for Together<'_, W, M, R, G>
{
    #[inline(always)]
    unsafe fn run(&self, _task: usize) {
        let Range { start, end } = self.all.rows;
        let quad = QUAD.min(end - start);
        let mut next = start;
        while next < end {
            // The last four may compute some outputs again.
            let first = next.min(end - quad);
            // SAFETY: the caller's promise.
            unsafe {
                if R == QUAD {
                    let sums = self.dots(first);
                    for m in 0..M {
                        if m < self.wanted {
                            let four = [sums[m][0], sums[m][1 % R], sums[m][2 % R], sums[m][3 % R]];
                            S::sum4(four, self.all.values.add(m * STRIDE + first - start));
                        }
                    }
                } else {
                    let mut four = [[S::zero(); QUAD]; M];
                    for done in (0..quad).step_by(R) {
                        let sums = self.dots(first + done);
                        for m in 0..M {
                            for r in 0..R {
                                four[m][done + r] = sums[m][r];
                            }
                        }
                    }
                    for m in 0..self.wanted {
                        S::sum4(four[m], self.all.values.add(m * STRIDE + first - start));
                    }
                }
            }
            next += quad;
        }
    }
}

impl<W, const M: usize, const R: usize, const G: usize> Together<'_, W, M, R, G> {
    /// Rows `row` to `row + R` of the weights with the rows of x.
    #[inline(always)]
    unsafe fn dots<S: Simd>(&self, row: usize) -> [[S::F; R]; M]
    where
        W: Source<S>,
    {
        let Registers { ref source, ahead, inputs, x, scales, .. } = *self.all;
        let coming = source.address(row, 0).wrapping_add(ahead.bytes);
        // SAFETY: the caller's promise; x is padded to whole blocks; a prefetch of any address is allowed.
        unsafe {
            source.fetch_scales(row + ahead.rows, R);
            let mut sums = [[S::zero(); R]; M];
            for start in (0..inputs).step_by(CHUNK) {
                let length = CHUNK.min(inputs - start);
                let width = source.widen_scales((row, R), (start, length), scales);
                let mut from = [source.address(row, start); R];
                let mut scales = [scales; R];
                for r in 1..R {
                    from[r] = source.address(row + r, start);
                    scales[r] = scales[0].row(r, width);
                }
                let x = x.map(|x| x.wrapping_add(start));
                let blocks = length / BLOCK;
                let mut index = 0;
                while index + G <= blocks {
                    let mut groups = [self.group::<S>(scales[0], index); R];
                    for r in 1..R {
                        groups[r] = self.group::<S>(scales[r], index);
                    }
                    for index in index..index + G {
                        self.fetch::<S>(coming, start / BLOCK + index);
                        for r in 0..R {
                            let place = from[r].add(source.bytes(index * BLOCK));
                            let block = source.block_at(place, groups[r]);
                            for m in 0..M {
                                sums[m][r] = S::block_dot(block, x[m].add(index * BLOCK), sums[m][r]);
                            }
                        }
                    }
                    index += G;
                }
                // With two blocks a group, a whole one and a part may be left.
                while index * BLOCK < length {
                    let left = BLOCK.min(length - index * BLOCK);
                    for r in 0..R {
                        let place = from[r].add(source.bytes(index * BLOCK));
                        let block = source.part_at(place, self.group::<S>(scales[r], index), left);
                        for m in 0..M {
                            sums[m][r] = S::block_dot(block, x[m].add(index * BLOCK), sums[m][r]);
                        }
                    }
                    index += 1;
                }
            }
            sums
        }
    }

    /// Asks for what comes while block `index` of each row is used.
    #[inline(always)]
    unsafe fn fetch<S: Simd>(&self, coming: *const u8, index: usize)
    where
        W: Source<S>,
    {
        let bytes = R * self.all.source.bytes(BLOCK);
        for line in 0..bytes.div_ceil(64) {
            let place = match self.all.ahead.apart {
                None => coming.wrapping_add(index * bytes + line * 64),
                Some(apart) => {
                    let line = index * bytes / 64 + line;
                    coming.wrapping_add(line % R * apart + line / R * 64)
                }
            };
            // SAFETY: a prefetch of any address is allowed.
            unsafe { S::prefetch(place) };
        }
    }

    /// The group of a block.
    #[inline(always)]
    unsafe fn group<S: Simd>(&self, scales: WideScales, index: usize) -> W::Group
    where
        W: Source<S>,
    {
        // SAFETY: the caller's promise.
        unsafe {
            if G == 1 {
                self.all.source.wide_group::<false>(scales, index)
            } else {
                self.all.source.wide_group::<true>(scales, index)
            }
        }
    }
}
