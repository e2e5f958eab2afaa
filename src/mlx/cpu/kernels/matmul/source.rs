//! Weights as blocks of 32 f32, whatever their storage.

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use super::super::floats::Floats;
use super::MatmulError;
use super::codes::{Bits, Bytes, Code, Fp4, Fp8, Nibbles};
use super::dense::Dense;
use super::matrix::{Matrix, Scales, Storage};
use super::reference::{e4m3, e8m0};
use super::simd::{BLOCK, Simd};
use crate::coding::QuantMode;

/// The most weights of a row that are opened at once: whole groups of every size, and 8 rows of them as f32 fit in
/// 24 KB of first-level cache.
pub(super) const SEGMENT: usize = 768;

/// Places for the scales of a segment: groups at the smallest group, one more that stands for a missing half block,
/// and room for a whole vector at the end.
const MOST_GROUPS: usize = SEGMENT / 16 + 16;

/// The most columns whose scales are made wide at once: whole groups of every size.
pub(super) const CHUNK: usize = 96 * 128;

/// Places for the scales of a chunk of four rows: groups at the smallest group, one more that stands for a missing half
/// block, and room for a whole vector at the end.
const MOST_SCALES: usize = (4 * (CHUNK / 16 + 1)).next_multiple_of(16) + 16;

/// Rows of weights that can be read in blocks.
///
/// # Safety
/// All functions: the processor has the instructions of `S`; rows and columns lie in the matrix.
pub(super) trait Source<S: Simd>: Copy + Send + Sync {
    /// Whether blocks come in [`Simd::NIBBLE_ORDER`] instead of in the order of the columns.
    const NIBBLES: bool;
    /// Part of a row, ready to be read.
    type Segment: Copy;
    /// What blocks of one group have in common.
    type Group: Copy;

    /// A segment to be filled.
    fn unopened() -> Self::Segment;
    /// Bytes that `columns` (a multiple of 32, or all) of a row take.
    fn bytes(&self, columns: usize) -> usize;
    /// Where a column of a row lies, which need not exist.
    fn address(&self, row: usize, column: usize) -> *const u8;
    /// Prepares columns `start` (a multiple of 32) to `start + length` of a row of all stacked matrices. Reading with
    /// `FETCH` will ask for the weights `ahead` bytes after those in use.
    unsafe fn open(&self, row: usize, start: usize, length: usize, ahead: usize, segment: &mut Self::Segment);
    /// Whether blocks `2 * n` and `2 * n + 1` of a row are of one group.
    fn pairs(&self) -> bool;
    /// The group of the block that begins at column `32 * index` of the segment.
    unsafe fn group(&self, segment: &Self::Segment, index: usize) -> Self::Group;
    /// The block that begins at column `32 * index` of the segment, all of it within the segment.
    unsafe fn block<const FETCH: bool>(
        &self,
        segment: &Self::Segment,
        group: Self::Group,
        index: usize,
    ) -> S::Block;
    /// The last block of a segment, `length` columns and then zeros.
    unsafe fn tail(&self, segment: &Self::Segment, index: usize, length: usize) -> S::Block;

    /// Writes the scales and biases of columns `start` to `start + length` (whole groups) of some rows, `[rows, width]`,
    /// and may write up to 15 values more. Returns the width.
    unsafe fn widen_scales(&self, rows: (usize, usize), columns: (usize, usize), to: WideScales) -> usize;
    /// Asks for the scales of some rows, which need not exist.
    unsafe fn fetch_scales(&self, row: usize, rows: usize);
    /// The group of block `index`, by the scales of its row from the first of these blocks on. `PAIRS` says what
    /// [`pairs`](Self::pairs) does.
    unsafe fn wide_group<const PAIRS: bool>(&self, scales: WideScales, index: usize) -> Self::Group;
    /// A block.
    unsafe fn block_at(&self, from: *const u8, group: Self::Group) -> S::Block;
    /// A block of which there are but `length` columns; the rest is zeros.
    unsafe fn part_at(&self, from: *const u8, group: Self::Group, length: usize) -> S::Block;
}

/// Where scales and biases lie as f32.
#[derive(Clone, Copy)]
pub(super) struct WideScales(pub *mut f32);

/// From scales to their biases.
const BIASES: usize = MOST_SCALES;

impl WideScales {
    /// f32 that there must be room for.
    pub(super) const SIZE: usize = 2 * MOST_SCALES;

    #[inline(always)]
    pub(super) fn row(self, row: usize, width: usize) -> Self {
        Self(self.0.wrapping_add(row * width))
    }
}

/// Something to do with weights of any storage.
pub(super) trait Visitor<S: Simd> {
    /// # Safety
    /// As for [`dispatch`].
    unsafe fn visit<W: Source<S>>(self, source: W) -> Result<(), MatmulError>;
}

/// Calls the visitor with the reader for the matrix's storage.
///
/// # Safety
/// The processor has the instructions of `S`.
pub(super) unsafe fn dispatch<S: Simd, V: Visitor<S>>(
    matrix: &Matrix<'_>,
    visitor: V,
) -> Result<(), MatmulError> {
    let columns = matrix.columns;
    // SAFETY: the caller's promise.
    unsafe {
        match &matrix.storage {
            Storage::Dense(Floats::F32(values)) => visitor.visit(Dense::<f32>::new(values.as_ptr(), columns)),
            Storage::Dense(Floats::F16(values)) => {
                visitor.visit(Dense::<half::f16>::new(values.as_ptr(), columns))
            }
            Storage::Dense(Floats::Bf16(values)) => {
                visitor.visit(Dense::<half::bf16>::new(values.as_ptr(), columns))
            }
            Storage::Packed { words, scales, quantization } => {
                let packed = Layout::new(words, scales, quantization.group_size as usize, columns);
                match (quantization.mode, quantization.bits) {
                    (QuantMode::Mxfp4, _) => visitor.visit(Packed::<Fp4<false>>::new(packed)),
                    (QuantMode::Nvfp4, _) => visitor.visit(Packed::<Fp4<true>>::new(packed.with_e4m3())),
                    (QuantMode::Mxfp8, _) => visitor.visit(Packed::<Fp8>::new(packed)),
                    (QuantMode::Affine, 2) => visitor.visit(Packed::<Bits<2>>::new(packed)),
                    (QuantMode::Affine, 3) => visitor.visit(Packed::<Bits<3>>::new(packed)),
                    (QuantMode::Affine, 4) => visitor.visit(Packed::<Nibbles>::new(packed)),
                    (QuantMode::Affine, 5) => visitor.visit(Packed::<Bits<5>>::new(packed)),
                    (QuantMode::Affine, 6) => visitor.visit(Packed::<Bits<6>>::new(packed)),
                    (QuantMode::Affine, _) => visitor.visit(Packed::<Bytes>::new(packed)),
                }
            }
        }
    }
}

#[derive(Clone, Copy)]
enum ScaleBase {
    F32(*const f32, *const f32),
    F16(*const u16, *const u16),
    Bf16(*const u16, *const u16),
    E8m0(*const u8),
    E4m3(*const u8),
}

/// Where packed weights and their scales lie.
#[derive(Clone, Copy)]
struct Layout {
    base: *const u8,
    scales: ScaleBase,
    columns: usize,
    /// log2 of the group.
    group_shift: u32,
}

impl Layout {
    fn new(words: &[u32], scales: &Scales<'_>, group: usize, columns: usize) -> Self {
        let scales = match scales {
            Scales::Affine { scales: Floats::F16(scales), biases: Floats::F16(biases) } => {
                ScaleBase::F16(scales.as_ptr().cast(), biases.as_ptr().cast())
            }
            Scales::Affine { scales: Floats::Bf16(scales), biases: Floats::Bf16(biases) } => {
                ScaleBase::Bf16(scales.as_ptr().cast(), biases.as_ptr().cast())
            }
            Scales::Affine { scales: Floats::F32(scales), biases: Floats::F32(biases) } => {
                ScaleBase::F32(scales.as_ptr(), biases.as_ptr())
            }
            // `Matrix::packed` lets no mixed types through.
            Scales::Affine { .. } => ScaleBase::F32(std::ptr::null(), std::ptr::null()),
            Scales::Byte(scales) => ScaleBase::E8m0(scales.as_ptr()),
        };
        Self { base: words.as_ptr().cast(), scales, columns, group_shift: group.trailing_zeros() }
    }

    fn with_e4m3(mut self) -> Self {
        if let ScaleBase::E8m0(scales) = self.scales {
            self.scales = ScaleBase::E4m3(scales);
        }
        self
    }
}

#[derive(Clone, Copy)]
struct Packed<C> {
    layout: Layout,
    code: PhantomData<C>,
}

impl<C> Packed<C> {
    fn new(layout: Layout) -> Self {
        Self { layout, code: PhantomData }
    }
}

// SAFETY: read-only use of slices that are borrowed for the whole call.
unsafe impl<C> Send for Packed<C> {}
// SAFETY: as above.
unsafe impl<C> Sync for Packed<C> {}

/// Packed weights and their scales as f32.
#[derive(Clone, Copy)]
struct Opened {
    from: *const u8,
    ahead: usize,
    /// Columns between the start of the first group and the start of the segment.
    offset: usize,
    scales: [MaybeUninit<f32>; MOST_GROUPS],
    biases: [MaybeUninit<f32>; MOST_GROUPS],
}

impl<S: Simd, C: Code> Source<S> for Packed<C> {
    const NIBBLES: bool = C::NIBBLES;
    type Segment = Opened;
    type Group = C::Group<S>;

    #[inline(always)]
    fn unopened() -> Opened {
        let unset = [MaybeUninit::uninit(); MOST_GROUPS];
        Opened { from: std::ptr::null(), ahead: 0, offset: 0, scales: unset, biases: unset }
    }

    #[inline(always)]
    fn bytes(&self, columns: usize) -> usize {
        columns * C::BITS / 8
    }

    #[inline(always)]
    fn address(&self, row: usize, column: usize) -> *const u8 {
        self.layout.base.wrapping_add((row * self.layout.columns + column) * C::BITS / 8)
    }

    #[inline(always)]
    unsafe fn open(&self, row: usize, start: usize, length: usize, ahead: usize, segment: &mut Opened) {
        segment.ahead = ahead;
        let Layout { base, scales, columns, group_shift } = self.layout;
        segment.offset = start & ((1 << group_shift) - 1);
        let first = row * (columns >> group_shift) + (start >> group_shift);
        let count = (segment.offset + length).div_ceil(1 << group_shift);
        let to_scales: *mut f32 = segment.scales.as_mut_ptr().cast();
        let to_biases: *mut f32 = segment.biases.as_mut_ptr().cast();
        // SAFETY: the columns lie in the row, so the groups do; a segment has fewer than `MOST_GROUPS`.
        unsafe {
            segment.from = base.add((row * columns + start) * C::BITS / 8);
            match scales {
                ScaleBase::Bf16(scales, biases) => {
                    S::scales_bf16(scales.add(first), count, to_scales);
                    S::scales_bf16(biases.add(first), count, to_biases);
                }
                ScaleBase::F16(scales, biases) => {
                    S::scales_f16(scales.add(first), count, to_scales);
                    S::scales_f16(biases.add(first), count, to_biases);
                }
                ScaleBase::F32(scales, biases) => {
                    std::ptr::copy_nonoverlapping(scales.add(first), to_scales, count);
                    std::ptr::copy_nonoverlapping(biases.add(first), to_biases, count);
                }
                ScaleBase::E8m0(scales) => {
                    for group in 0..count {
                        *to_scales.add(group) = e8m0(*scales.add(first + group));
                    }
                }
                ScaleBase::E4m3(scales) => {
                    for group in 0..count {
                        *to_scales.add(group) = e4m3(*scales.add(first + group));
                    }
                    *to_scales.add(count) = 0.0;
                }
            }
        }
    }

    #[inline(always)]
    fn pairs(&self) -> bool {
        C::AFFINE && self.layout.group_shift >= 6
    }

    #[inline(always)]
    unsafe fn group(&self, segment: &Opened, index: usize) -> C::Group<S> {
        // SAFETY: the block lies in the segment.
        unsafe {
            let group = (segment.offset + index * BLOCK) >> self.layout.group_shift;
            let (scale, bias) = self.scale(segment, group);
            C::group::<S>(scale, bias)
        }
    }

    #[inline(always)]
    unsafe fn block<const FETCH: bool>(
        &self,
        segment: &Opened,
        group: C::Group<S>,
        index: usize,
    ) -> S::Block {
        // SAFETY: the block lies in the segment.
        unsafe {
            let from = segment.from.add(index * BLOCK * C::BITS / 8);
            if FETCH {
                S::prefetch(from.wrapping_add(segment.ahead));
            }
            C::block::<S>(from, group)
        }
    }

    #[inline(always)]
    unsafe fn tail(&self, segment: &Opened, index: usize, length: usize) -> S::Block {
        let mut copy = [0u8; BLOCK];
        // SAFETY: `length` columns are left in the segment, fewer than a block.
        unsafe {
            let from = segment.from.add(index * BLOCK * C::BITS / 8);
            std::ptr::copy_nonoverlapping(from, copy.as_mut_ptr(), length * C::BITS / 8);
            C::block::<S>(copy.as_ptr(), <Self as Source<S>>::group(self, segment, index))
        }
    }

    #[inline(always)]
    unsafe fn widen_scales(
        &self,
        (row, rows): (usize, usize),
        (start, length): (usize, usize),
        WideScales(to): WideScales,
    ) -> usize {
        let Layout { scales, columns, group_shift, .. } = self.layout;
        let (across, groups) = (columns >> group_shift, length >> group_shift);
        let first = row * across + (start >> group_shift);
        let width = groups + usize::from(C::HALVES);
        // Rows that are wanted whole are one run.
        let (runs, count) = if width == across { (1, rows * groups) } else { (rows, groups) };
        // SAFETY: the groups lie in the matrix, and there is room for them.
        unsafe {
            for run in 0..runs {
                let (first, to) = (first + run * across, to.add(run * width));
                let to_biases = to.add(BIASES);
                match scales {
                    ScaleBase::Bf16(scales, biases) => {
                        S::scales_bf16(scales.add(first), count, to);
                        S::scales_bf16(biases.add(first), count, to_biases);
                    }
                    ScaleBase::F16(scales, biases) => {
                        S::scales_f16(scales.add(first), count, to);
                        S::scales_f16(biases.add(first), count, to_biases);
                    }
                    ScaleBase::F32(scales, biases) => {
                        std::ptr::copy_nonoverlapping(scales.add(first), to, count);
                        std::ptr::copy_nonoverlapping(biases.add(first), to_biases, count);
                    }
                    ScaleBase::E8m0(scales) => {
                        for group in 0..count {
                            *to.add(group) = e8m0(*scales.add(first + group));
                        }
                    }
                    ScaleBase::E4m3(scales) => {
                        for group in 0..count {
                            *to.add(group) = e4m3(*scales.add(first + group));
                        }
                        *to.add(count) = 0.0;
                    }
                }
            }
        }
        width
    }

    #[inline(always)]
    unsafe fn fetch_scales(&self, row: usize, rows: usize) {
        let Layout { scales, columns, group_shift, .. } = self.layout;
        let across = columns >> group_shift;
        let (first, count) = (row * across, rows * across);
        // SAFETY: a prefetch of any address is allowed.
        unsafe {
            match scales {
                ScaleBase::F32(scales, biases) => {
                    for at in (first..first + count).step_by(16) {
                        S::prefetch(scales.wrapping_add(at).cast());
                        S::prefetch(biases.wrapping_add(at).cast());
                    }
                }
                ScaleBase::F16(scales, biases) | ScaleBase::Bf16(scales, biases) => {
                    for at in (first..first + count).step_by(32) {
                        S::prefetch(scales.wrapping_add(at).cast());
                        S::prefetch(biases.wrapping_add(at).cast());
                    }
                }
                ScaleBase::E8m0(scales) | ScaleBase::E4m3(scales) => S::prefetch(scales.wrapping_add(first)),
            }
        }
    }

    #[inline(always)]
    unsafe fn wide_group<const PAIRS: bool>(
        &self,
        WideScales(from): WideScales,
        index: usize,
    ) -> C::Group<S> {
        // SAFETY: `widen_scales` has set the scales of all groups and, for halves, one more; it has set the biases
        // for affine codes.
        unsafe {
            if C::HALVES {
                let from = from.add(2 * index);
                return C::group::<S>([*from, *from.add(1)], 0.0);
            }
            let from = from.add(if PAIRS { index >> (self.layout.group_shift - 5) } else { index });
            let bias = if C::AFFINE { *from.add(BIASES) } else { 0.0 };
            C::group::<S>([*from, *from], bias)
        }
    }

    #[inline(always)]
    unsafe fn block_at(&self, from: *const u8, group: C::Group<S>) -> S::Block {
        // SAFETY: the caller's promise.
        unsafe { C::block::<S>(from, group) }
    }

    #[inline(always)]
    unsafe fn part_at(&self, from: *const u8, group: C::Group<S>, length: usize) -> S::Block {
        let mut copy = [0u8; BLOCK];
        // SAFETY: the caller's promise; fewer columns than a block.
        unsafe {
            std::ptr::copy_nonoverlapping(from, copy.as_mut_ptr(), length * C::BITS / 8);
            C::block::<S>(copy.as_ptr(), group)
        }
    }
}

impl<C: Code> Packed<C> {
    /// The scale of a group (of the halves of the block that begins with it) and the bias, where there is one.
    ///
    /// # Safety
    /// The group lies in the segment, which is open.
    #[inline(always)]
    unsafe fn scale(&self, segment: &Opened, group: usize) -> ([f32; 2], f32) {
        // SAFETY: `open` has set the scales of all groups of the segment and, for halves, one more; it has set
        // the biases for affine codes.
        unsafe {
            let scale = segment.scales.get_unchecked(group).assume_init();
            if C::HALVES {
                return ([scale, segment.scales.get_unchecked(group + 1).assume_init()], 0.0);
            }
            let bias = if C::AFFINE { segment.biases.get_unchecked(group).assume_init() } else { 0.0 };
            ([scale, scale], bias)
        }
    }
}
