//! Rows of x as the kernels want them, and memory for intermediate sums.

use std::cell::Cell;

use super::super::super::{Pool, PoolError};
use super::super::floats::Floats;
use super::simd::{BLOCK, Kernel, Simd};

/// f32 values in memory that starts on a cache line.
pub(super) struct Aligned(Vec<Line>);

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

impl Aligned {
    /// At least `count` values; all zero, unless memory of an earlier call is used again.
    pub(super) fn new(count: usize) -> Self {
        Self(vec![Line([0.0; 16]); count.div_ceil(16)])
    }

    pub(super) fn as_ptr(&self) -> *const f32 {
        self.0.as_ptr().cast()
    }

    pub(super) fn as_mut_ptr(&mut self) -> *mut f32 {
        self.0.as_mut_ptr().cast()
    }
}

thread_local! {
    static KEPT: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
}

/// Memory for intermediate values that a thread keeps for its next task. What it holds is left over from the last.
pub(super) struct Scratch(Aligned);

impl Scratch {
    pub(super) fn take(count: usize) -> Self {
        let kept = KEPT.take();
        let wanted = count.div_ceil(16);
        Self(if kept.len() >= wanted { Aligned(kept) } else { Aligned::new(count) })
    }

    pub(super) fn as_mut_ptr(&mut self) -> *mut f32 {
        self.0.as_mut_ptr()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        KEPT.set(std::mem::take(&mut self.0.0));
    }
}

/// Rows of x that are converted by one task.
const CHUNK: usize = 16 * 1024;

/// Writes a row as kernels want it: padded with zeros, and in [`Simd::NIBBLE_ORDER`] if they ask for it. `to` may be
/// `from`.
///
/// # Safety
/// The processor has the instructions of `S`; `from` holds `columns` values and `to` has room for `padded`, which is
/// a multiple of [`BLOCK`] with `nibbles`.
#[inline(always)]
pub(super) unsafe fn arrange<S: Simd>(
    from: *const f32,
    columns: usize,
    padded: usize,
    nibbles: bool,
    to: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if nibbles {
            let whole = columns / BLOCK * BLOCK;
            for start in (0..whole).step_by(BLOCK) {
                S::arrange_nibbles(from.add(start), to.add(start));
            }
            if whole < columns {
                let mut block = [0f32; BLOCK];
                std::ptr::copy_nonoverlapping(from.add(whole), block.as_mut_ptr(), columns - whole);
                S::arrange_nibbles(block.as_ptr(), to.add(whole));
            }
            return;
        }
        if !std::ptr::eq(from, to.cast_const()) {
            std::ptr::copy_nonoverlapping(from, to, columns);
        }
        for column in columns..padded {
            *to.add(column) = 0.0;
        }
    }
}

struct Rows<'a> {
    x: Floats<'a>,
    columns: usize,
    padded: usize,
    nibbles: bool,
    chunk: usize,
    rows: usize,
    to: *mut f32,
}

// SAFETY: each task writes its own rows of `to`.
unsafe impl Sync for Rows<'_> {}

impl<S: Simd> Kernel<S> for Rows<'_> {
    #[inline(always)]
    unsafe fn run(&self, task: usize) {
        for row in task * self.chunk..self.rows.min((task + 1) * self.chunk) {
            // SAFETY: the row lies in x, and `to` has `padded` values a row.
            unsafe {
                let to = self.to.add(row * self.padded);
                let first = row * self.columns;
                match self.x {
                    Floats::F32(x) => {
                        std::ptr::copy_nonoverlapping(x.as_ptr().add(first), to, self.columns);
                    }
                    Floats::F16(x) => S::widen_f16(x.as_ptr().add(first).cast(), self.columns, to),
                    Floats::Bf16(x) => S::widen_bf16(x.as_ptr().add(first).cast(), self.columns, to),
                }
                arrange::<S>(to, self.columns, self.padded, self.nibbles, to);
            }
        }
    }
}

/// All rows of x (`[rows, columns]`) as f32, each padded with zeros to `padded` values, which is a multiple of
/// [`BLOCK`] if `nibbles` asks for [`Simd::NIBBLE_ORDER`].
///
/// # Safety
/// The processor has the instructions of `S`; x has whole rows.
pub(super) unsafe fn widen<S: Simd>(
    pool: &Pool,
    x: Floats<'_>,
    columns: usize,
    padded: usize,
    nibbles: bool,
) -> Result<Aligned, PoolError> {
    let rows = x.len() / columns;
    let mut values = Aligned::new(rows * padded);
    let chunk = CHUNK.div_ceil(padded);
    let kernel = Rows { x, columns, padded, nibbles, chunk, rows, to: values.as_mut_ptr() };
    // SAFETY: the caller's promise.
    pool.run(rows.div_ceil(chunk), &|task| unsafe { S::enter(&kernel, task) })?;
    Ok(values)
}
