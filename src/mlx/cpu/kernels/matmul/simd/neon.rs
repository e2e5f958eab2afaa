//! NEON of 64-bit Arm: 4 lanes.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "each function is a few intrinsics; `Simd` states what callers promise"
)]

use std::arch::aarch64::*;

use super::super::reference::FP4 as FP4_MAGNITUDES;
use super::plain::{Plain, nibble_order};
use super::{BLOCK, Kernel, Simd, bit_fields};

#[derive(Clone, Copy)]
pub(in super::super) struct Neon;

/// Vectors in a block.
const VECTORS: usize = BLOCK / 4;

// Not inlined into the kernels that enter others: those have loops which need all registers.
#[inline(never)]
#[target_feature(enable = "neon")]
unsafe fn enter<K: Kernel<Neon>>(kernel: &K, task: usize) {
    kernel.run(task);
}

#[inline(always)]
unsafe fn affine(levels: uint32x4_t, scale: float32x4_t, bias: float32x4_t) -> float32x4_t {
    vfmaq_f32(bias, vcvtq_f32_u32(levels), scale)
}

/// 16 bytes as four vectors of 32-bit integers.
#[inline(always)]
unsafe fn widen_bytes(bytes: uint8x16_t) -> [uint32x4_t; 4] {
    let low = vmovl_u8(vget_low_u8(bytes));
    let high = vmovl_high_u8(bytes);
    [vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low), vmovl_u16(vget_low_u16(high)), vmovl_high_u16(high)]
}

/// Twice the values of 16 4-bit floats: small integers, by look-up.
#[inline(always)]
unsafe fn fp4_doubled(codes: uint8x16_t) -> [float32x4_t; 4] {
    let mut doubled = [0i8; 16];
    for code in 0..8 {
        doubled[code] = (2.0 * FP4_MAGNITUDES[code]) as i8;
        doubled[code + 8] = -doubled[code];
    }
    let values = vqtbl1q_s8(vld1q_s8(doubled.as_ptr()), codes);
    let (low, high) = (vmovl_s8(vget_low_s8(values)), vmovl_high_s8(values));
    [
        vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
        vcvtq_f32_s32(vmovl_high_s16(low)),
        vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
        vcvtq_f32_s32(vmovl_high_s16(high)),
    ]
}

impl Simd for Neon {
    type F = float32x4_t;
    type Block = [float32x4_t; VECTORS];
    /// Scale and bias.
    type Table = (float32x4_t, float32x4_t);

    const LANES: usize = 4;
    const TILE: usize = 8;
    const COLUMN_BLOCKS: usize = 1;
    const NIBBLE_ORDER: [u8; BLOCK] = nibble_order();

    #[inline(always)]
    unsafe fn enter<K: Kernel<Self>>(kernel: &K, task: usize) {
        enter(kernel, task);
    }

    #[inline(always)]
    unsafe fn zero() -> float32x4_t {
        vdupq_n_f32(0.0)
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> float32x4_t {
        vdupq_n_f32(value)
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> float32x4_t {
        vld1q_f32(from)
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, value: float32x4_t) {
        vst1q_f32(to, value);
    }

    #[inline(always)]
    unsafe fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        vfmaq_f32(c, a, b)
    }

    #[inline(always)]
    unsafe fn sum4([a, b, c, d]: [float32x4_t; 4], to: *mut f32) {
        // Lanes 0 and 2, 1 and 3 of each, interleaved; then the two sums.
        let ab = vaddq_f32(vzip1q_f32(a, b), vzip2q_f32(a, b));
        let cd = vaddq_f32(vzip1q_f32(c, d), vzip2q_f32(c, d));
        let low = vcombine_f32(vget_low_f32(ab), vget_low_f32(cd));
        let high = vcombine_f32(vget_high_f32(ab), vget_high_f32(cd));
        vst1q_f32(to, vaddq_f32(low, high));
    }

    #[inline(always)]
    unsafe fn block_store(to: *mut f32, block: Self::Block) {
        for (index, vector) in block.into_iter().enumerate() {
            vst1q_f32(to.add(index * 4), vector);
        }
    }

    #[inline(always)]
    unsafe fn block_dot(block: Self::Block, x: *const f32, mut accumulator: float32x4_t) -> float32x4_t {
        for (index, vector) in block.into_iter().enumerate() {
            accumulator = vfmaq_f32(accumulator, vector, vld1q_f32(x.add(index * 4)));
        }
        accumulator
    }

    #[inline(always)]
    unsafe fn block_axpy(block: Self::Block, x: float32x4_t, accumulators: *mut float32x4_t) {
        for (index, vector) in block.into_iter().enumerate() {
            let accumulator = accumulators.add(index);
            *accumulator = vfmaq_f32(*accumulator, vector, x);
        }
    }

    #[inline(always)]
    unsafe fn f32s(from: *const f32) -> Self::Block {
        let mut block = [vdupq_n_f32(0.0); VECTORS];
        for (index, vector) in block.iter_mut().enumerate() {
            *vector = vld1q_f32(from.add(index * 4));
        }
        block
    }

    #[inline(always)]
    unsafe fn f16s(from: *const u16) -> Self::Block {
        let mut values = [0.0; BLOCK];
        Self::widen_f16(from, BLOCK, values.as_mut_ptr());
        Self::f32s(values.as_ptr())
    }

    #[inline(always)]
    unsafe fn bf16s(from: *const u16) -> Self::Block {
        let mut block = [vdupq_n_f32(0.0); VECTORS];
        for (index, vector) in block.iter_mut().enumerate() {
            let values = vmovl_u16(vld1_u16(from.add(index * 4)));
            *vector = vreinterpretq_f32_u32(vshlq_n_u32::<16>(values));
        }
        block
    }

    #[inline(always)]
    unsafe fn table<const FP4: bool>(scale: f32, bias: f32) -> Self::Table {
        (vdupq_n_f32(scale), vdupq_n_f32(bias))
    }

    #[inline(always)]
    unsafe fn nibbles<const FP4: bool, const HALVES: bool>(
        from: *const u8,
        tables: [Self::Table; 2],
    ) -> Self::Block {
        let packed = vld1q_u8(from);
        let mut block = [vdupq_n_f32(0.0); VECTORS];
        for (half, codes) in
            [vandq_u8(packed, vdupq_n_u8(15)), vshrq_n_u8::<4>(packed)].into_iter().enumerate()
        {
            if FP4 {
                for (index, doubled) in fp4_doubled(codes).into_iter().enumerate() {
                    let (scale, _) = tables[if HALVES { index / 2 } else { 0 }];
                    let value = vmulq_f32(doubled, vdupq_n_f32(0.5));
                    block[half * 4 + index] = vmulq_f32(value, scale);
                }
            } else {
                for (index, levels) in widen_bytes(codes).into_iter().enumerate() {
                    block[half * 4 + index] = affine(levels, tables[0].0, tables[0].1);
                }
            }
        }
        block
    }

    #[inline(always)]
    unsafe fn bytes(from: *const u8, scale: float32x4_t, bias: float32x4_t) -> Self::Block {
        let mut block = [vdupq_n_f32(0.0); VECTORS];
        for half in 0..2 {
            for (index, levels) in widen_bytes(vld1q_u8(from.add(half * 16))).into_iter().enumerate() {
                block[half * 4 + index] = affine(levels, scale, bias);
            }
        }
        block
    }

    #[inline(always)]
    unsafe fn bits<const BITS: usize>(from: *const u8, scale: float32x4_t, bias: float32x4_t) -> Self::Block {
        let (bytes, shifts) = const { bit_fields(BITS) };
        let mask = vdupq_n_u32((1 << BITS) - 1);
        let mut block = [vdupq_n_f32(0.0); VECTORS];
        for half in 0..2 {
            let mut stream = [0u8; 16];
            std::ptr::copy_nonoverlapping(from.add(half * 2 * BITS), stream.as_mut_ptr(), 2 * BITS);
            let stream = vld1q_u8(stream.as_ptr());
            for four in 0..4 {
                // Indices out of range look up 0.
                let fields = vqtbl1q_u8(stream, vld1q_u8(bytes.as_ptr().add(four * 16)));
                let right = vnegq_s32(vld1q_s32(shifts.as_ptr().add(four * 4)));
                let levels = vshlq_u32(vreinterpretq_u32_u8(fields), right);
                block[half * 4 + four] = affine(vandq_u32(levels, mask), scale, bias);
            }
        }
        block
    }

    #[inline(always)]
    unsafe fn fp8s(from: *const u8, scale: float32x4_t) -> Self::Block {
        let mut halves = [0u16; BLOCK];
        for (index, half) in halves.iter_mut().enumerate() {
            let code = u16::from(*from.add(index));
            *half = ((code & 0x7f) << 7) | ((code & 0x80) << 8);
        }
        let mut block = Self::f16s(halves.as_ptr());
        for vector in &mut block {
            *vector = vmulq_f32(vmulq_f32(*vector, vdupq_n_f32(256.0)), scale);
        }
        block
    }

    #[inline(always)]
    unsafe fn widen_f16(from: *const u16, count: usize, to: *mut f32) {
        // `half` uses the conversion instructions of Arm.
        Plain::widen_f16(from, count, to);
    }

    #[inline(always)]
    unsafe fn widen_bf16(from: *const u16, count: usize, to: *mut f32) {
        Plain::widen_bf16(from, count, to);
    }

    #[inline(always)]
    unsafe fn narrow_f16(from: &[f32], to: *mut u16) {
        Plain::narrow_f16(from, to);
    }

    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {
        // The prefetch intrinsic is not stable; the hardware prefetcher follows rows well.
    }
}
