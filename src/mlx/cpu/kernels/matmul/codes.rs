//! How packed weights are coded: from a group's scale and bias, and the bytes of a block, to 32 f32.

use super::simd::Simd;

/// A coding of packed weights.
pub(super) trait Code: Copy + Send + Sync + 'static {
    const BITS: usize;
    const NIBBLES: bool = false;
    /// Whether groups have a bias, and 32 weights or more.
    const AFFINE: bool = true;
    /// Whether a block holds two groups.
    const HALVES: bool = false;
    /// Scale and bias in the form that unpacking wants.
    type Group<S: Simd>: Copy;

    /// From the scales of the halves of a block (the same but for [`HALVES`](Self::HALVES)) and the bias.
    ///
    /// # Safety
    /// As for [`Source`](super::source::Source).
    unsafe fn group<S: Simd>(scale: [f32; 2], bias: f32) -> Self::Group<S>;
    /// # Safety
    /// As for [`Source`](super::source::Source).
    unsafe fn block<S: Simd>(from: *const u8, group: Self::Group<S>) -> S::Block;
}

#[derive(Clone, Copy)]
pub(super) struct Nibbles;

impl Code for Nibbles {
    const BITS: usize = 4;
    const NIBBLES: bool = true;
    type Group<S: Simd> = S::Table;

    #[inline(always)]
    unsafe fn group<S: Simd>([scale, _]: [f32; 2], bias: f32) -> Self::Group<S> {
        // SAFETY: the caller's promise.
        unsafe { S::table::<false>(scale, bias) }
    }

    #[inline(always)]
    unsafe fn block<S: Simd>(from: *const u8, group: Self::Group<S>) -> S::Block {
        // SAFETY: the caller's promise.
        unsafe { S::nibbles::<false, false>(from, [group, group]) }
    }
}

/// 4-bit floats; `HALVES`: in groups of 16.
#[derive(Clone, Copy)]
pub(super) struct Fp4<const HALVES: bool>;

impl<const HALVES: bool> Code for Fp4<HALVES> {
    const BITS: usize = 4;
    const NIBBLES: bool = true;
    const AFFINE: bool = false;
    const HALVES: bool = HALVES;
    type Group<S: Simd> = [S::Table; 2];

    #[inline(always)]
    unsafe fn group<S: Simd>(scale: [f32; 2], _bias: f32) -> Self::Group<S> {
        // SAFETY: the caller's promise.
        unsafe { [S::table::<true>(scale[0], 0.0), S::table::<true>(scale[1], 0.0)] }
    }

    #[inline(always)]
    unsafe fn block<S: Simd>(from: *const u8, group: Self::Group<S>) -> S::Block {
        // SAFETY: the caller's promise.
        unsafe { S::nibbles::<true, HALVES>(from, group) }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Bytes;

impl Code for Bytes {
    const BITS: usize = 8;
    type Group<S: Simd> = (S::F, S::F);

    #[inline(always)]
    unsafe fn group<S: Simd>([scale, _]: [f32; 2], bias: f32) -> Self::Group<S> {
        // SAFETY: the caller's promise.
        unsafe { (S::splat(scale), S::splat(bias)) }
    }

    #[inline(always)]
    unsafe fn block<S: Simd>(from: *const u8, (scale, bias): Self::Group<S>) -> S::Block {
        // SAFETY: the caller's promise.
        unsafe { S::bytes(from, scale, bias) }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Fp8;

impl Code for Fp8 {
    const BITS: usize = 8;
    const AFFINE: bool = false;
    type Group<S: Simd> = S::F;

    #[inline(always)]
    unsafe fn group<S: Simd>([scale, _]: [f32; 2], _bias: f32) -> Self::Group<S> {
        // SAFETY: the caller's promise.
        unsafe { S::splat(scale) }
    }

    #[inline(always)]
    unsafe fn block<S: Simd>(from: *const u8, scale: Self::Group<S>) -> S::Block {
        // SAFETY: the caller's promise.
        unsafe { S::fp8s(from, scale) }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Bits<const BITS: usize>;

impl<const BITS: usize> Code for Bits<BITS> {
    const BITS: usize = BITS;
    type Group<S: Simd> = (S::F, S::F);

    #[inline(always)]
    unsafe fn group<S: Simd>([scale, _]: [f32; 2], bias: f32) -> Self::Group<S> {
        // SAFETY: the caller's promise.
        unsafe { (S::splat(scale), S::splat(bias)) }
    }

    #[inline(always)]
    unsafe fn block<S: Simd>(from: *const u8, (scale, bias): Self::Group<S>) -> S::Block {
        // SAFETY: the caller's promise.
        unsafe { S::bits::<BITS>(from, scale, bias) }
    }
}
