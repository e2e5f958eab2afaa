//! Which weights few rows of x ask for before they need them.

use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};

use super::packing::LINE;
use super::scales::ScaleTable;

/// Some rows of weights that are multiplied together: those far after them come to the second-level cache, where more of
/// them can be on their way at once, and those near to the first.
#[derive(Clone, Copy)]
pub(super) struct Fetching {
    rows: usize,
    /// From the start of the rows to the line that is asked for with their first.
    far: usize,
    /// Likewise, for short rows; of long ones, those of the same row that come next are asked for.
    near: Option<usize>,
    /// Rows from those in use to those whose scales are asked for.
    scale_rows: usize,
}

/// What passes while memory answers.
const LEAST_FAR: usize = 32 * 1024;
/// Rows that are short enough for the next ones to come to the first-level cache.
const MOST_NEAR: usize = 8 * 1024;
/// The line of a long row that is asked for: two after the one in use.
const IN_ROW: usize = 128;
/// Bytes of a line.
const BYTES: usize = LINE * 4;

impl Fetching {
    /// For so many rows of so many words.
    pub(super) fn new(row_words: usize, rows: usize) -> Self {
        let block = rows * row_words * 4;
        let scale_rows = LEAST_FAR.div_ceil(4 * block.max(1)) * rows;
        Self { rows, far: block.max(LEAST_FAR), near: (block <= MOST_NEAR).then_some(block), scale_rows }
    }

    /// What is asked for while these rows' scales are made wide.
    #[inline(always)]
    pub(super) fn with_scales(&self, rows: *const u8) -> *const u8 {
        rows.wrapping_add(self.far)
    }

    /// Asks for what is needed when the next rows are at this line. `rows` and `from` are where the rows and this line of
    /// row `index` begin; `fetched` lines of `lines` were asked for with the scales.
    ///
    /// # Safety
    /// A prefetch of any address is allowed.
    #[inline(always)]
    pub(super) unsafe fn fetch(
        &self,
        (rows, from): (*const u8, *const u8),
        (line, index): (usize, usize),
        (fetched, lines): (usize, usize),
    ) {
        let place = rows.wrapping_add((line * self.rows + index) * BYTES);
        let near = self.near.map_or(from.wrapping_add(IN_ROW), |near| place.wrapping_add(near));
        // SAFETY: a prefetch of any address is allowed.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(near.cast());
            if line + fetched < lines {
                let further = fetched * self.rows * BYTES;
                _mm_prefetch::<_MM_HINT_T1>(place.wrapping_add(self.far + further).cast());
            }
        }
    }

    /// Asks for the scales of rows that come after those from `row` on, which need not exist.
    ///
    /// # Safety
    /// A prefetch of any address is allowed.
    #[inline(always)]
    pub(super) unsafe fn fetch_scales(&self, table: &ScaleTable, row: usize) {
        let row = row + self.scale_rows;
        for at in (table.place(row, 0)..table.place(row + self.rows, 0)).step_by(BYTES) {
            // SAFETY: as above.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(table.scales.wrapping_add(at).cast());
                _mm_prefetch::<_MM_HINT_T0>(table.biases.wrapping_add(at).cast());
            }
        }
    }
}
