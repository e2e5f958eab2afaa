//! A result that several tasks write, each its own pieces.

use std::marker::PhantomData;
use std::ops::Range;

/// An exclusively borrowed slice, handed out in pieces.
pub(super) struct Pieces<'a, T> {
    base: *mut T,
    length: usize,
    exclusive: PhantomData<&'a mut [T]>,
}

// SAFETY: only makes `&mut [T]` that the callers of `piece` keep disjoint, which `T: Send` lets other threads have.
unsafe impl<T: Send> Sync for Pieces<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Pieces<'_, T> {}

impl<'a, T> Pieces<'a, T> {
    pub(super) fn new(whole: &'a mut [T]) -> Self {
        Self { base: whole.as_mut_ptr(), length: whole.len(), exclusive: PhantomData }
    }

    /// A part to read. Panics when it reaches past the end.
    ///
    /// # Safety
    /// No piece that overlaps may be alive at once.
    pub(super) unsafe fn part(&self, range: Range<usize>) -> &[T] {
        assert!(range.start <= range.end && range.end <= self.length, "part outside its slice");
        // SAFETY: in bounds by the assertion, not written by the contract.
        unsafe { std::slice::from_raw_parts(self.base.add(range.start), range.len()) }
    }

    /// Where an element lies. Panics when it is past the end.
    pub(super) fn place(&self, index: usize) -> *mut T {
        assert!(index < self.length, "place outside its slice");
        self.base.wrapping_add(index)
    }

    /// One piece. Panics when it reaches past the end.
    ///
    /// # Safety
    /// No two pieces that overlap may be alive at once.
    // The exclusive borrow is held by `Pieces`; the contract above keeps the pieces apart.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn piece(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.length, "piece outside its slice");
        // SAFETY: in bounds by the assertion, exclusive by the contract.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(range.start), range.len()) }
    }
}
