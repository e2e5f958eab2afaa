//! Activations rounded to integers, each group of a row with a scale of its own.

use std::ops::Range;

use super::super::super::super::Pool;
use super::super::super::floats::Floats;
use super::super::MatmulError;
use super::super::prepare::{Aligned, widen};
use super::super::simd::Avx2;
use super::packing::{Mode, Packing, Rounded};
use super::{Set, avx2, avx512};

/// Rounds row `row` of x, whose values are at `from`.
///
/// # Safety
/// The processor has the instructions of the packing's set; there are as many values as it says, and room in `to`.
pub(in super::super) unsafe fn round_row<M: Mode>(
    from: *const f32,
    packing: Packing,
    row: usize,
    to: Rounded,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match packing.set {
            Set::Vnni => avx512::round_row::<M>(from, packing, row, to),
            Set::Avx2 => avx2::round_row::<M>(from, packing, row, to),
        }
    }
}

/// Rounded rows of x.
pub(super) struct Activations {
    values: Aligned,
    scales: Aligned,
    sums: Aligned,
}

impl Activations {
    /// All rows of x.
    ///
    /// # Safety
    /// The processor has the instructions of the packing's set; x has whole rows, which are whole groups.
    pub(super) unsafe fn round<M: Mode>(
        pool: &Pool,
        x: Floats<'_>,
        packing: Packing,
    ) -> Result<Self, MatmulError> {
        let Packing { inputs, group, .. } = packing;
        let rows = x.len() / inputs;
        // SAFETY: both sets include AVX2.
        let wide = unsafe { widen::<Avx2>(pool, x, inputs, inputs, false)? };
        let mut rounded = Self {
            values: Aligned::new(rows * packing.rounded_words::<M>()),
            scales: Aligned::new(rows * (inputs / group)),
            sums: Aligned::new(rows * (inputs / group)),
        };
        let work = Work { from: wide.as_ptr(), to: rounded.view() };
        let chunk = (16 * 1024usize).div_ceil(inputs);
        // SAFETY: the caller's promise; each range has its own rows of the targets.
        pool.run_ranges(rows, chunk, &|range| unsafe { work.rows::<M>(range, packing) })?;
        Ok(rounded)
    }

    pub(super) fn view(&mut self) -> Rounded {
        Rounded {
            values: self.values.as_mut_ptr().cast(),
            scales: self.scales.as_mut_ptr(),
            sums: self.sums.as_mut_ptr(),
        }
    }
}

struct Work {
    from: *const f32,
    to: Rounded,
}

// SAFETY: x is only read, and tasks write disjoint rows.
unsafe impl Sync for Work {}

impl Work {
    unsafe fn rows<M: Mode>(&self, range: Range<usize>, packing: Packing) {
        for row in range {
            // SAFETY: the caller's promise.
            unsafe { round_row::<M>(self.from.add(row * packing.inputs), packing, row, self.to) };
        }
    }
}
