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
        let mut block = [0f32; BLOCK];
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
                for column in self.columns..self.padded {
                    *to.add(column) = 0.0;
                }
                if self.nibbles {
                    for start in (0..self.padded).step_by(BLOCK) {
                        std::ptr::copy_nonoverlapping(to.add(start), block.as_mut_ptr(), BLOCK);
                        for (position, &element) in S::NIBBLE_ORDER.iter().enumerate() {
                            *to.add(start + position) = block[usize::from(element) % BLOCK];
                        }
                    }
                }
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
