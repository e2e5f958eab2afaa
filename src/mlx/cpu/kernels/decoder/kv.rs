//! Keys and values of one layer and one sequence, written while a step runs.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

use half::f16;
use memmap2::MmapMut;

use super::super::error::KernelError;
use super::super::floats::Floats;
use super::super::simd::{Element as _, Kernel, LANES, Simd, from_f32};
use super::super::views::Heads;
use super::{MOST_ROWS, OP};

/// The type of stored numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvType {
    /// Half precision. What does not fit becomes the largest number that does.
    F16,
    /// Single precision.
    F32,
}

impl KvType {
    /// Bytes of a number.
    pub fn size(self) -> usize {
        match self {
            Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// The shape of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Heads of keys and of values.
    pub heads: usize,
    /// Numbers of a head.
    pub dim: usize,
    /// Positions that queries see, counted back from their own; `None` for all.
    pub window: Option<usize>,
    /// How numbers are stored.
    pub kind: KvType,
}

/// Keys and values, each `[heads, capacity, dim]`. With a window it is a ring: position `p` lies at `p % capacity`.
///
/// Numbers are read and written through a shared reference, without locks: see [`set`](Self::set).
#[derive(Debug)]
pub struct KvStore {
    shape: KvShape,
    capacity: usize,
    keys: NonNull<u8>,
    values: NonNull<u8>,
    /// Both, on pages of their own: those that no position has reached take no memory.
    memory: MmapMut,
    /// Whether a step uses it.
    claimed: AtomicBool,
}

// SAFETY: plain numbers; the functions that access them say who may do what.
unsafe impl Send for KvStore {}
// SAFETY: as above.
unsafe impl Sync for KvStore {}

impl KvStore {
    /// A store for `positions` positions, or for the window and a chunk if that is less.
    ///
    /// # Errors
    /// When a dimension is zero or the sizes overflow.
    pub fn new(shape: KvShape, positions: usize) -> Result<Self, KernelError> {
        let refuse = |what, found, rule| Err(KernelError::Unsupported { op: OP, what, found, rule });
        if shape.heads == 0 || shape.dim == 0 || shape.window == Some(0) {
            return refuse("a dimension of the cache", 0, "at least 1");
        }
        let whole = |positions: usize| positions.max(1).checked_next_multiple_of(64);
        let capacity = match shape.window {
            None => whole(positions),
            // Always the same, since a ring cannot grow in place: where a position lies depends on it.
            Some(window) => window.checked_add(MOST_ROWS).and_then(whole),
        };
        let bytes = capacity.and_then(|capacity| {
            capacity.checked_mul(shape.heads)?.checked_mul(shape.dim)?.checked_mul(shape.kind.size())
        });
        let refuse_positions = |rule| refuse("the number of positions", positions, rule);
        let (Some(capacity), Some(bytes)) = (capacity, bytes) else { return refuse_positions("less") };
        let Some(both) = bytes.checked_mul(2).filter(|&both| isize::try_from(both).is_ok()) else {
            return refuse_positions("less");
        };
        let Ok(mut memory) = MmapMut::map_anon(both) else {
            return refuse_positions("less: there is not enough memory");
        };
        let (keys, values) = memory.split_at_mut(bytes);
        let [keys, values] = [keys, values].map(|part| NonNull::from(part).cast());
        Ok(Self { shape, capacity, keys, values, memory, claimed: AtomicBool::new(false) })
    }

    /// Takes the store for a step; `None` while another step, or another sequence of this one, has it.
    pub(super) fn claim(&self) -> Option<Claim<'_>> {
        (!self.claimed.swap(true, Ordering::Acquire)).then_some(Claim(self))
    }

    /// What it was made for.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Whether positions up to `length` fit.
    pub fn fits(&self, length: usize) -> bool {
        self.shape.window.is_some() || length <= self.capacity
    }

    /// Bytes that keys and values take.
    pub fn bytes(&self) -> usize {
        self.memory.len()
    }

    fn place(&self, head: usize, position: usize) -> usize {
        debug_assert!(head < self.shape.heads && self.fits(position + 1));
        (head * self.capacity + position % self.capacity) * self.shape.dim
    }

    /// Writes a key and a value.
    ///
    /// # Safety
    /// Head and position exist; nobody reads or writes this place meanwhile.
    #[inline(always)]
    pub(super) unsafe fn set<S: Simd>(
        &self,
        s: S,
        head: usize,
        position: usize,
        key: &mut [f32],
        value: &mut [f32],
    ) {
        let (place, dim) = (self.place(head, position), self.shape.dim);
        for (numbers, to) in [(key, self.keys), (value, self.values)] {
            // SAFETY: the place lies in the store; the caller's promise.
            unsafe {
                match self.shape.kind {
                    KvType::F32 => {
                        std::slice::from_raw_parts_mut(to.as_ptr().cast::<f32>().add(place), dim)
                            .copy_from_slice(&numbers[..dim]);
                    }
                    KvType::F16 => {
                        clamp(s, numbers);
                        let to = to.as_ptr().cast::<f16>().add(place);
                        from_f32(s, &numbers[..dim], std::slice::from_raw_parts_mut(to, dim));
                    }
                }
            }
        }
    }

    /// Keys and values of the first `length` positions, as attention takes them.
    ///
    /// # Safety
    /// Nobody writes while the views are used.
    pub(super) unsafe fn views(&self, length: usize) -> Result<(Heads<'_>, Heads<'_>), KernelError> {
        let count = self.shape.heads * self.capacity * self.shape.dim;
        let view = |memory: NonNull<u8>| {
            // SAFETY: the memory holds so many numbers, all bits of which are numbers; the caller's promise.
            let data = unsafe {
                match self.shape.kind {
                    KvType::F16 => {
                        Floats::F16(std::slice::from_raw_parts(memory.as_ptr().cast::<f16>(), count))
                    }
                    KvType::F32 => {
                        Floats::F32(std::slice::from_raw_parts(memory.as_ptr().cast::<f32>(), count))
                    }
                }
            };
            Heads::ring(data, [self.shape.heads, length, self.shape.dim], self.capacity)
        };
        Ok((view(self.keys)?, view(self.values)?))
    }

    /// Takes positions over from another store of the same shape but for its capacity.
    ///
    /// # Safety
    /// Both have the positions, nobody else uses either meanwhile.
    pub unsafe fn copy_from(&self, from: &Self, positions: Range<usize>) {
        let bytes = self.shape.dim * self.shape.kind.size();
        for head in 0..self.shape.heads {
            for position in positions.clone() {
                let source = from.place(head, position) * self.shape.kind.size();
                let target = self.place(head, position) * self.shape.kind.size();
                for (to, from) in [(self.keys, from.keys), (self.values, from.values)] {
                    // SAFETY: both places lie in their stores, which are not the same.
                    unsafe {
                        let (from, to) = (from.as_ptr().add(source), to.as_ptr().add(target));
                        std::ptr::copy_nonoverlapping(from, to, bytes);
                    }
                }
            }
        }
    }

    /// The bytes of keys and values of some positions, `[heads, positions, dim]`.
    ///
    /// # Safety
    /// The positions exist; nobody writes meanwhile.
    pub unsafe fn read(&self, positions: Range<usize>) -> (Vec<u8>, Vec<u8>) {
        let size = self.shape.kind.size();
        let copy = |memory: NonNull<u8>| {
            let mut bytes = Vec::with_capacity(self.shape.heads * positions.len() * self.shape.dim * size);
            for head in 0..self.shape.heads {
                for position in positions.clone() {
                    let place = self.place(head, position) * size;
                    // SAFETY: the place lies in the store; the caller's promise.
                    bytes.extend_from_slice(unsafe {
                        std::slice::from_raw_parts(memory.as_ptr().add(place), self.shape.dim * size)
                    });
                }
            }
            bytes
        };
        (copy(self.keys), copy(self.values))
    }

    /// Writes keys and values, `[heads, count, dim]` in float32, at `start` and on. Returns whether their lengths fit.
    ///
    /// # Safety
    /// Nobody else uses the store meanwhile.
    pub unsafe fn write(&self, start: usize, count: usize, keys: &[f32], values: &[f32]) -> bool {
        let KvShape { heads, dim, kind, .. } = self.shape;
        let fits =
            self.fits(start + count) && keys.len() == heads * count * dim && values.len() == keys.len();
        if !fits {
            return false;
        }
        for (numbers, to) in [(keys, self.keys), (values, self.values)] {
            for (index, row) in numbers.chunks_exact(dim).enumerate() {
                let place = self.place(index / count, start + index % count);
                for (i, &number) in row.iter().enumerate() {
                    // SAFETY: the place lies in the store; the caller's promise.
                    unsafe {
                        match kind {
                            KvType::F32 => *to.as_ptr().cast::<f32>().add(place + i) = number,
                            KvType::F16 => {
                                let number = if number.is_nan() { number } else { number.clamp(-MOST, MOST) };
                                *to.as_ptr().cast::<f16>().add(place + i) = f16::from_f32(number);
                            }
                        }
                    }
                }
            }
        }
        true
    }
}

/// The right to use a store, until it is dropped.
pub(super) struct Claim<'a>(&'a KvStore);

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.0.claimed.store(false, Ordering::Release);
    }
}

/// The largest number of half precision.
const MOST: f32 = 65504.0;

#[inline(always)]
fn clamp<S: Simd>(s: S, numbers: &mut [f32]) {
    let (most, least) = (s.splat(MOST), s.splat(-MOST));
    let (chunks, rest) = numbers.as_chunks_mut::<LANES>();
    for chunk in chunks {
        // NaN stays NaN.
        let v = s.min(most, s.max(least, f32::load(s, chunk)));
        s.store(chunk, v);
    }
    for number in rest {
        *number = if number.is_nan() { *number } else { number.clamp(-MOST, MOST) };
    }
}

/// Writes one key and value, compiled for the processor.
pub(super) struct Set<'a> {
    pub store: &'a KvStore,
    pub head: usize,
    pub position: usize,
    pub key: &'a mut [f32],
    pub value: &'a mut [f32],
}

impl Kernel for Set<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: whoever makes one promises what `set` asks for.
        unsafe { self.store.set(s, self.head, self.position, self.key, self.value) };
    }
}
