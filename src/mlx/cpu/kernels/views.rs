//! Strided views: what MLX hands over when a tensor is a slice or a transpose of a larger buffer.

use super::error::{KernelError, expect_reach};
use super::floats::Floats;

/// Rows `[count, width]` whose elements are adjacent; `stride` elements lie between the starts of two rows.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    pub(super) data: Floats<'a>,
    pub(super) count: usize,
    pub(super) width: usize,
    pub(super) stride: usize,
}

impl<'a> Rows<'a> {
    /// A view; `stride` may be 0 (one row, repeated).
    ///
    /// # Errors
    /// When it reaches past the end of `data`.
    pub fn new(data: Floats<'a>, count: usize, width: usize, stride: usize) -> Result<Self, KernelError> {
        expect_reach("rows", "the buffer", [count, width], [stride, 1], data.len())?;
        Ok(Self { data, count, width, stride })
    }

    /// Rows that follow each other without gaps.
    ///
    /// # Errors
    /// When `data` is no whole number of rows.
    pub fn dense(data: Floats<'a>, width: usize) -> Result<Self, KernelError> {
        let count = data.len().checked_div(width).unwrap_or(0);
        super::error::expect("rows", "the number of elements", count * width, data.len())?;
        Ok(Self { data, count, width, stride: width })
    }

    /// The number of rows.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The elements of a row.
    pub fn width(&self) -> usize {
        self.width
    }
}

/// Heads `[batch, heads, length, dim]` whose last dimension is adjacent.
#[derive(Clone, Copy, Debug)]
pub struct Heads<'a> {
    pub(super) data: Floats<'a>,
    pub(super) shape: [usize; 4],
    /// Of the first three dimensions.
    pub(super) strides: [usize; 3],
    /// Position `p` lies where `p % ring` would; 0 for none.
    pub(super) ring: usize,
}

impl<'a> Heads<'a> {
    /// A view with strides in elements; 0 repeats.
    ///
    /// # Errors
    /// When the last stride is not 1 (and the dimension larger than 1) or the view reaches past the end of `data`.
    pub fn new(data: Floats<'a>, shape: [usize; 4], strides: [usize; 4]) -> Result<Self, KernelError> {
        if shape[3] > 1 && strides[3] != 1 {
            let (op, what, rule) = ("heads", "the stride of the last dimension", "1: copy the array");
            return Err(KernelError::Unsupported { op, what, found: strides[3], rule });
        }
        expect_reach("heads", "the buffer", shape, strides, data.len())?;
        Ok(Self { data, shape, strides: [strides[0], strides[1], strides[2]], ring: 0 })
    }

    /// A view of one sequence in a ring of `ring` positions (a multiple of 64) a head: `[1, heads, ring, dim]`, row-major,
    /// of which the last ones up to position `length` are of interest.
    ///
    /// # Errors
    /// When the ring reaches past the end of `data` or its size is wrong.
    pub(super) fn ring(
        data: Floats<'a>,
        [heads, length, dim]: [usize; 3],
        ring: usize,
    ) -> Result<Self, KernelError> {
        if ring == 0 || !ring.is_multiple_of(64) {
            let (op, what, rule) = ("heads", "the ring", "a multiple of 64");
            return Err(KernelError::Unsupported { op, what, found: ring, rule });
        }
        let whole = Self::dense(data, [1, heads, ring, dim])?;
        Ok(Self { shape: [1, heads, length, dim], ring, ..whole })
    }

    /// A row-major view without gaps.
    ///
    /// # Errors
    /// When the view reaches past the end of `data`.
    pub fn dense(data: Floats<'a>, shape: [usize; 4]) -> Result<Self, KernelError> {
        Self::new(data, shape, dense_strides(shape))
    }

    /// Batch, heads, length, dim.
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// Where the row of a position starts.
    pub(super) fn start(&self, batch: usize, head: usize, position: usize) -> usize {
        let slot = position.checked_rem(self.ring).unwrap_or(position);
        batch * self.strides[0] + head * self.strides[1] + slot * self.strides[2]
    }
}

/// Strides of a row-major array. Saturates, so that an absurd shape is found too long for its buffer.
pub(super) fn dense_strides(shape: [usize; 4]) -> [usize; 4] {
    let mut strides = [1usize; 4];
    for i in (0..3).rev() {
        strides[i] = strides[i + 1].saturating_mul(shape[i + 1]);
    }
    strides
}
