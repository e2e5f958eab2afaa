//! Dense weights as blocks of 32 f32.

use std::mem::MaybeUninit;

use super::simd::{BLOCK, Simd};
use super::source::{Source, WideScales};

/// A type of dense weights.
pub(super) trait Element: Copy + Send + Sync + 'static {
    /// # Safety
    /// As for [`Source`].
    unsafe fn block<S: Simd>(from: *const Self) -> S::Block;
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn block<S: Simd>(from: *const Self) -> S::Block {
        // SAFETY: the caller's promise.
        unsafe { S::f32s(from) }
    }
}

impl Element for half::f16 {
    #[inline(always)]
    unsafe fn block<S: Simd>(from: *const Self) -> S::Block {
        // SAFETY: the caller's promise; the type is a transparent u16.
        unsafe { S::f16s(from.cast()) }
    }
}

impl Element for half::bf16 {
    #[inline(always)]
    unsafe fn block<S: Simd>(from: *const Self) -> S::Block {
        // SAFETY: the caller's promise; the type is a transparent u16.
        unsafe { S::bf16s(from.cast()) }
    }
}

pub(super) struct Dense<T> {
    base: *const T,
    columns: usize,
}

impl<T> Dense<T> {
    pub(super) fn new(base: *const T, columns: usize) -> Self {
        Self { base, columns }
    }
}

impl<T> Clone for Dense<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Dense<T> {}

// SAFETY: read-only use of a slice that is borrowed for the whole call.
unsafe impl<T: Sync> Send for Dense<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Dense<T> {}

impl<S: Simd, T: Element> Source<S> for Dense<T> {
    const NIBBLES: bool = false;
    type Segment = (*const T, usize);
    type Group = ();

    #[inline(always)]
    fn unopened() -> Self::Segment {
        (std::ptr::null(), 0)
    }

    #[inline(always)]
    fn bytes(&self, columns: usize) -> usize {
        columns * size_of::<T>()
    }

    #[inline(always)]
    fn address(&self, row: usize, column: usize) -> *const u8 {
        self.base.wrapping_add(row * self.columns + column).cast()
    }

    #[inline(always)]
    unsafe fn open(
        &self,
        row: usize,
        start: usize,
        _length: usize,
        ahead: usize,
        segment: &mut Self::Segment,
    ) {
        // SAFETY: row and column lie in the matrix.
        *segment = (unsafe { self.base.add(row * self.columns + start) }, ahead);
    }

    #[inline(always)]
    fn pairs(&self) -> bool {
        true
    }

    #[inline(always)]
    unsafe fn group(&self, _segment: &Self::Segment, _index: usize) {}

    #[inline(always)]
    unsafe fn block<const FETCH: bool>(
        &self,
        (from, ahead): &Self::Segment,
        (): (),
        index: usize,
    ) -> S::Block {
        // SAFETY: the block lies in the row.
        unsafe {
            let from = from.add(index * BLOCK);
            if FETCH {
                let next = from.cast::<u8>().wrapping_add(*ahead);
                for line in (0..size_of::<[T; BLOCK]>()).step_by(64) {
                    S::prefetch(next.wrapping_add(line));
                }
            }
            T::block::<S>(from)
        }
    }

    #[inline(always)]
    unsafe fn tail(&self, (from, _): &Self::Segment, index: usize, length: usize) -> S::Block {
        let mut copy = MaybeUninit::<[T; BLOCK]>::zeroed();
        // SAFETY: `length` columns are left in the row, fewer than a block; all bits zero is a zero of all types.
        unsafe {
            std::ptr::copy_nonoverlapping(from.add(index * BLOCK), copy.as_mut_ptr().cast(), length);
            T::block::<S>(copy.as_ptr().cast())
        }
    }

    #[inline(always)]
    unsafe fn widen_scales(&self, _rows: (usize, usize), _columns: (usize, usize), _to: WideScales) -> usize {
        0
    }

    #[inline(always)]
    unsafe fn fetch_scales(&self, _row: usize, _rows: usize) {}

    #[inline(always)]
    unsafe fn wide_group<const PAIRS: bool>(&self, _scales: WideScales, _index: usize) {}

    #[inline(always)]
    unsafe fn block_at(&self, from: *const u8, (): ()) -> S::Block {
        // SAFETY: the caller's promise.
        unsafe { T::block::<S>(from.cast()) }
    }

    #[inline(always)]
    unsafe fn part_at(&self, from: *const u8, (): (), length: usize) -> S::Block {
        // SAFETY: the caller's promise.
        unsafe { <Self as Source<S>>::tail(self, &(from.cast(), 0), 0, length) }
    }
}
