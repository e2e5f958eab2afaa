//! What a task of many rows of x keeps in first-level cache: levels and scales of a segment of K, unpacked once for all.

use super::super::prepare::Scratch;

/// Columns of a segment of K, whole lines of weights: its panel takes 24 KB at most.
pub(super) const SEGMENT: usize = 768;
/// Groups of a segment at most.
const MOST_GROUPS: usize = SEGMENT / 32;

/// Memory of a task.
pub(super) struct Room {
    _scratch: Scratch,
    /// `[words, parts, outputs]` levels of a segment.
    pub panel: *mut u32,
    /// `[groups, outputs]`.
    pub scales: *mut f32,
    pub biases: *mut f32,
    /// `[rows, outputs]`.
    pub values: *mut f32,
}

impl Room {
    /// For panels of so many outputs, of which each word holds the levels of `columns` columns.
    pub(super) fn new(outputs: usize, columns: usize, rows: usize) -> Self {
        let (levels, scales) = (SEGMENT / columns * outputs, MOST_GROUPS * outputs);
        let mut scratch = Scratch::take(levels + 2 * scales + rows * outputs);
        let panel = scratch.as_mut_ptr();
        let place = |offset: usize| panel.wrapping_add(offset);
        let (biases, values) = (place(levels + scales), place(levels + 2 * scales));
        Self { panel: panel.cast(), scales: place(levels), biases, values, _scratch: scratch }
    }
}

/// Levels and scales of a segment of K, as in [`Room`].
pub(super) struct Step {
    pub panel: *const u32,
    pub scales: *const f32,
    pub biases: *const f32,
    /// Its first column.
    pub start: usize,
    /// Its columns.
    pub length: usize,
}

/// Rows of a tile, of `most` at most, so that all tiles of `rows` have about as many.
pub(super) fn tile_rows(rows: usize, most: usize) -> usize {
    rows.div_ceil(rows.div_ceil(most))
}
