//! The few vector operations that the exact kernels are made of, one implementation for each instruction set.
//!
//! Weights come in blocks of 32, as f32. Kernels are generic over [`Simd`] and inlined as a whole into
//! [`Simd::enter`], the one function that is compiled for the instruction set; so everything between is
//! `#[inline(always)]` and free of closures.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod plain;

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::Avx512;
#[cfg(target_arch = "aarch64")]
pub(super) use neon::Neon;
pub(super) use plain::Plain;

/// Weights in a block.
pub(super) const BLOCK: usize = 32;

/// Work that is compiled once for each instruction set.
pub(super) trait Kernel<S: Simd>: Sync {
    /// Does one task.
    ///
    /// # Safety
    /// The processor has the instructions of `S`; the operands were checked.
    unsafe fn run(&self, task: usize);
}

/// Vector operations. `F` holds [`LANES`](Self::LANES) f32, `Block` holds [`BLOCK`] of them.
///
/// # Safety
/// All functions: the processor has the instructions, pointers are valid for what the function says it touches (no
/// alignment needed).
pub(super) trait Simd: Copy + Send + Sync + 'static {
    /// A vector of f32.
    type F: Copy;
    /// 32 f32.
    type Block: Copy;
    /// What the 16 values of a nibble stand for.
    type Table: Copy;

    /// f32 in a vector.
    const LANES: usize;
    /// Rows of weights that a tile of `x · Wᵀ` covers (4 or 8), chosen so that 3 rows of x fit in the registers.
    const TILE: usize;
    /// Blocks of columns that a tile of `x · W` covers (1 or 4), likewise.
    const COLUMN_BLOCKS: usize;
    /// Which nibble (element) of 16 bytes stands at each position of an unpacked block.
    const NIBBLE_ORDER: [u8; BLOCK];

    /// Runs a task compiled for this instruction set.
    unsafe fn enter<K: Kernel<Self>>(kernel: &K, task: usize);

    unsafe fn zero() -> Self::F;
    unsafe fn splat(value: f32) -> Self::F;
    unsafe fn load(from: *const f32) -> Self::F;
    unsafe fn store(to: *mut f32, value: Self::F);
    /// `a * b + c`.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The sum of each vector's lanes, by the balanced tree, to `to[0..4]`.
    unsafe fn sum4(vectors: [Self::F; 4], to: *mut f32);

    unsafe fn block_store(to: *mut f32, block: Self::Block);
    /// Adds `block[i] * x[i]` to the accumulator, lowest positions first.
    unsafe fn block_dot(block: Self::Block, x: *const f32, accumulator: Self::F) -> Self::F;
    /// Adds `block[i] * x` to the vectors that make up `accumulators[0..32]`.
    unsafe fn block_axpy(block: Self::Block, x: Self::F, accumulators: *mut Self::F);

    /// 32 f32.
    unsafe fn f32s(from: *const f32) -> Self::Block;
    /// 32 f16.
    unsafe fn f16s(from: *const u16) -> Self::Block;
    /// 32 bf16.
    unsafe fn bf16s(from: *const u16) -> Self::Block;
    /// What the nibbles of a group stand for: affine levels, or with `FP4` 4-bit floats (then without `bias`).
    unsafe fn table<const FP4: bool>(scale: f32, bias: f32) -> Self::Table;
    /// 16 bytes of nibbles in [`NIBBLE_ORDER`](Self::NIBBLE_ORDER); with `HALVES` the first 16 elements are of one
    /// group and the last of another.
    unsafe fn nibbles<const FP4: bool, const HALVES: bool>(
        from: *const u8,
        tables: [Self::Table; 2],
    ) -> Self::Block;
    /// 32 bytes of affine 8-bit levels.
    unsafe fn bytes(from: *const u8, scale: Self::F, bias: Self::F) -> Self::Block;
    /// `4 * BITS` bytes of affine levels of `BITS` (2 to 8) bits.
    unsafe fn bits<const BITS: usize>(from: *const u8, scale: Self::F, bias: Self::F) -> Self::Block;
    /// 32 bytes of 8-bit floats (e4m3).
    unsafe fn fp8s(from: *const u8, scale: Self::F) -> Self::Block;

    /// Converts `count` f16.
    unsafe fn widen_f16(from: *const u16, count: usize, to: *mut f32);
    /// Converts `count` bf16.
    unsafe fn widen_bf16(from: *const u16, count: usize, to: *mut f32);
    /// Converts `count` f16, and may write up to 15 values more: whole vectors can be read again at once, parts of
    /// them only after they have reached the cache.
    #[inline(always)]
    unsafe fn scales_f16(from: *const u16, count: usize, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { Self::widen_f16(from, count, to) };
    }
    /// Converts `count` bf16, and may write up to 15 values more.
    #[inline(always)]
    unsafe fn scales_bf16(from: *const u16, count: usize, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { Self::widen_bf16(from, count, to) };
    }
    /// Rounds to f16, to nearest even.
    unsafe fn narrow_f16(from: &[f32], to: *mut u16);
    /// Rounds to bf16, to nearest even.
    #[inline(always)]
    unsafe fn narrow_bf16(from: &[f32], to: *mut u16) {
        for (index, value) in from.iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { *to.add(index) = bf16_bits(*value) };
        }
    }

    /// Brings 32 values into [`NIBBLE_ORDER`](Self::NIBBLE_ORDER); `to` may be `from`.
    #[inline(always)]
    unsafe fn arrange_nibbles(from: *const f32, to: *mut f32) {
        // SAFETY: the caller's promise; an order's entries are below the size of a block.
        unsafe {
            let block = from.cast::<[f32; BLOCK]>().read_unaligned();
            for (position, &element) in Self::NIBBLE_ORDER.iter().enumerate() {
                *to.add(position) = block[usize::from(element) % BLOCK];
            }
        }
    }

    /// Asks for the cache line at `from`, which need not be valid.
    unsafe fn prefetch(from: *const u8);
}

/// bf16 nearest to a value, ties to even; NaN stays NaN.
#[inline(always)]
fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    (if value.is_nan() { bits | 0x40_0000 } else { rounded } >> 16) as u16
}

/// Where each of 16 values of `bits` bits begins: the byte, and the shift within 16 bits from there.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const fn bit_fields(bits: usize) -> ([u8; 64], [i32; 16]) {
    let mut bytes = [0x80; 64];
    let mut shifts = [0; 16];
    let mut index = 0;
    while index < 16 {
        let first = index * bits;
        bytes[index * 4] = (first / 8) as u8;
        if first / 8 + 1 < 2 * bits {
            bytes[index * 4 + 1] = (first / 8 + 1) as u8;
        }
        shifts[index] = (first % 8) as i32;
        index += 1;
    }
    (bytes, shifts)
}
