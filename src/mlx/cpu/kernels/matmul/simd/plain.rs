//! No intrinsics: 8 lanes that the compiler maps to what the target has. Products are rounded before they are
//! added, since a fused multiply-add in software would be very slow.
#![allow(unsafe_op_in_unsafe_fn, reason = "raw loads and stores; `Simd` states what callers promise")]

use half::f16;

use super::super::reference::{FP4 as FP4_MAGNITUDES, e4m3};
use super::{BLOCK, Kernel, Simd};

#[derive(Clone, Copy)]
pub(in super::super) struct Plain;

const LANES: usize = 8;

/// All low nibbles, then all high ones.
pub(super) const fn nibble_order() -> [u8; BLOCK] {
    let mut order = [0; BLOCK];
    let mut byte = 0;
    while byte < BLOCK / 2 {
        order[byte] = 2 * byte as u8;
        order[byte + BLOCK / 2] = 2 * byte as u8 + 1;
        byte += 1;
    }
    order
}

#[inline(always)]
fn fp4(code: u8) -> f32 {
    let magnitude = FP4_MAGNITUDES[usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

impl Simd for Plain {
    type F = [f32; LANES];
    type Block = [f32; BLOCK];
    /// Scale and bias.
    type Table = (f32, f32);

    const LANES: usize = LANES;
    const TILE: usize = 4;
    const COLUMN_BLOCKS: usize = 1;
    const NIBBLE_ORDER: [u8; BLOCK] = nibble_order();

    #[inline(always)]
    unsafe fn enter<K: Kernel<Self>>(kernel: &K, task: usize) {
        kernel.run(task);
    }

    #[inline(always)]
    unsafe fn zero() -> [f32; LANES] {
        [0.0; LANES]
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> [f32; LANES] {
        [value; LANES]
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> [f32; LANES] {
        from.cast::<[f32; LANES]>().read_unaligned()
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, value: [f32; LANES]) {
        to.cast::<[f32; LANES]>().write_unaligned(value);
    }

    #[inline(always)]
    unsafe fn fma(a: [f32; LANES], b: [f32; LANES], mut c: [f32; LANES]) -> [f32; LANES] {
        for lane in 0..LANES {
            c[lane] += a[lane] * b[lane];
        }
        c
    }

    #[inline(always)]
    unsafe fn sum4(vectors: [[f32; LANES]; 4], to: *mut f32) {
        for (index, v) in vectors.iter().enumerate() {
            let quarter = [v[0] + v[4], v[1] + v[5], v[2] + v[6], v[3] + v[7]];
            *to.add(index) = (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
        }
    }

    #[inline(always)]
    unsafe fn block_store(to: *mut f32, block: [f32; BLOCK]) {
        to.cast::<[f32; BLOCK]>().write_unaligned(block);
    }

    #[inline(always)]
    unsafe fn block_dot(block: [f32; BLOCK], x: *const f32, mut accumulator: Self::F) -> Self::F {
        for index in 0..BLOCK {
            accumulator[index % LANES] += block[index] * *x.add(index);
        }
        accumulator
    }

    #[inline(always)]
    unsafe fn block_axpy(block: [f32; BLOCK], x: Self::F, accumulators: *mut Self::F) {
        for index in 0..BLOCK {
            (*accumulators.add(index / LANES))[index % LANES] += block[index] * x[index % LANES];
        }
    }

    #[inline(always)]
    unsafe fn f32s(from: *const f32) -> [f32; BLOCK] {
        from.cast::<[f32; BLOCK]>().read_unaligned()
    }

    #[inline(always)]
    unsafe fn f16s(from: *const u16) -> [f32; BLOCK] {
        let mut block = [0.0; BLOCK];
        Self::widen_f16(from, BLOCK, block.as_mut_ptr());
        block
    }

    #[inline(always)]
    unsafe fn bf16s(from: *const u16) -> [f32; BLOCK] {
        let mut block = [0.0; BLOCK];
        Self::widen_bf16(from, BLOCK, block.as_mut_ptr());
        block
    }

    #[inline(always)]
    unsafe fn table<const FP4: bool>(scale: f32, bias: f32) -> (f32, f32) {
        (scale, bias)
    }

    #[inline(always)]
    unsafe fn nibbles<const FP4: bool, const HALVES: bool>(
        from: *const u8,
        tables: [(f32, f32); 2],
    ) -> [f32; BLOCK] {
        let mut block = [0.0; BLOCK];
        for byte in 0..BLOCK / 2 {
            let codes = *from.add(byte);
            let (scale, bias) = tables[if HALVES { byte / 8 } else { 0 }];
            for (half, code) in [codes & 15, codes >> 4].into_iter().enumerate() {
                block[byte + half * BLOCK / 2] =
                    if FP4 { fp4(code) * scale } else { f32::from(code) * scale + bias };
            }
        }
        block
    }

    #[inline(always)]
    unsafe fn bytes(from: *const u8, scale: Self::F, bias: Self::F) -> [f32; BLOCK] {
        let mut block = [0.0; BLOCK];
        for (index, value) in block.iter_mut().enumerate() {
            *value = f32::from(*from.add(index)) * scale[0] + bias[0];
        }
        block
    }

    #[inline(always)]
    unsafe fn bits<const BITS: usize>(from: *const u8, scale: Self::F, bias: Self::F) -> [f32; BLOCK] {
        let mut block = [0.0; BLOCK];
        for eight in 0..BLOCK / 8 {
            let mut stream = [0u8; 8];
            std::ptr::copy_nonoverlapping(from.add(eight * BITS), stream.as_mut_ptr(), BITS);
            let stream = u64::from_le_bytes(stream);
            for index in 0..8 {
                let level = (stream >> (index * BITS)) & ((1 << BITS) - 1);
                block[eight * 8 + index] = level as f32 * scale[0] + bias[0];
            }
        }
        block
    }

    #[inline(always)]
    unsafe fn fp8s(from: *const u8, scale: Self::F) -> [f32; BLOCK] {
        let mut block = [0.0; BLOCK];
        for (index, value) in block.iter_mut().enumerate() {
            *value = e4m3(*from.add(index)) * scale[0];
        }
        block
    }

    #[inline(always)]
    unsafe fn widen_f16(from: *const u16, count: usize, to: *mut f32) {
        for index in 0..count {
            *to.add(index) = f16::from_bits(*from.add(index)).to_f32();
        }
    }

    #[inline(always)]
    unsafe fn widen_bf16(from: *const u16, count: usize, to: *mut f32) {
        for index in 0..count {
            *to.add(index) = f32::from_bits(u32::from(*from.add(index)) << 16);
        }
    }

    #[inline(always)]
    unsafe fn narrow_f16(from: &[f32], to: *mut u16) {
        for (index, value) in from.iter().enumerate() {
            *to.add(index) = f16::from_f32(*value).to_bits();
        }
    }

    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
}
