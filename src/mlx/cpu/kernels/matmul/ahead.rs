//! Which weights are asked for before they are needed.

use super::simd::Simd;

/// How far ahead weights are asked for, at most; farther ones would push those in use out of the cache.
const MOST_AHEAD: usize = 24 * 1024;
/// How far ahead at least: what passes while memory answers.
const LEAST_AHEAD: usize = 4096;
/// How far ahead in a long row, where the processor's own prefetching follows.
const ROW_AHEAD: usize = 2048;

/// Which cache lines are asked for while some rows of weights, which lie together, are multiplied.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    /// From a line of these rows to the one that is asked for.
    pub bytes: usize,
    /// Rows from those in use to those whose scales are asked for.
    pub rows: usize,
    /// From a row to the next where each is followed in its own course, because the rows after these are too far.
    pub apart: Option<usize>,
}

impl Ahead {
    /// For rows of so many bytes, of which `together` are multiplied at a time.
    pub(super) fn new(row_bytes: usize, together: usize) -> Self {
        let next_rows = together * row_bytes;
        let rows = LEAST_AHEAD.div_ceil(row_bytes.max(1)).next_multiple_of(together);
        if next_rows > MOST_AHEAD {
            Self { bytes: ROW_AHEAD, rows, apart: Some(row_bytes) }
        } else {
            Self { bytes: rows * row_bytes, rows, apart: None }
        }
    }
}

/// Packed weights that will be unpacked next; they are fetched while a tile is multiplied.
pub(super) struct Coming {
    pub from: *const u8,
    pub row_bytes: usize,
    /// Cache lines of each row.
    pub lines: usize,
    pub done: usize,
}

impl Coming {
    /// Asks for up to `count` more cache lines of `T` rows.
    #[inline(always)]
    pub(super) unsafe fn fetch<S: Simd, const T: usize>(&mut self, count: usize) {
        let last = (self.done + count).min(T * self.lines);
        for line in self.done..last {
            let from = self.from.wrapping_add(line % T * self.row_bytes + line / T * 64);
            // SAFETY: a prefetch of any address is allowed.
            unsafe { S::prefetch(from) };
        }
        self.done = last;
    }
}
