//! NEON: a vector is four registers of four lanes.

use std::arch::aarch64::*;
use std::arch::asm;

use half::{bf16, f16};

use super::{Kernel, LANES, Portable, Simd};
use crate::mlx::cpu::{Isa, Level};

/// Proof that this CPU has NEON.
#[derive(Clone, Copy, Debug)]
pub(super) struct Neon(());

/// Compiles `kernel` with these instructions and runs it; on [`Portable`] if `isa` does not license them.
pub(super) fn enter<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    #[target_feature(enable = "neon")]
    fn entered<K: Kernel>(simd: Neon, kernel: K) -> K::Output {
        kernel.run(simd)
    }
    if !matches!(isa.level(), Level::Neon) {
        return kernel.run(Portable);
    }
    // SAFETY: an `Isa` of this level exists only where its instructions were detected.
    unsafe { entered(Neon(()), kernel) }
}

/// Evaluates intrinsics; the token proves that the CPU has them, and references that pointers are valid.
macro_rules! intrinsic {
    ($e:expr) => {{
        // SAFETY: a `Neon` exists only where the feature was detected; loads and stores go through references to
        // at least as many elements.
        unsafe { $e }
    }};
}

type V = [float32x4_t; 4];

#[inline(always)]
fn map(v: V, f: impl Fn(float32x4_t) -> float32x4_t) -> V {
    v.map(f)
}

#[inline(always)]
fn zip(a: V, b: V, f: impl Fn(float32x4_t, float32x4_t) -> float32x4_t) -> V {
    [f(a[0], b[0]), f(a[1], b[1]), f(a[2], b[2]), f(a[3], b[3])]
}

/// Four half-precision numbers widened; the intrinsic for it is newer than the oldest compiler supported.
#[inline(always)]
fn widen_half(bits: uint16x4_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: `fcvtl` reads and writes registers only and belongs to the base architecture.
    unsafe {
        asm!("fcvtl {0:v}.4s, {1:v}.4h", lateout(vreg) wide, in(vreg) bits, options(pure, nomem, nostack));
    }
    wide
}

/// Four numbers rounded to half precision, to nearest with ties to even.
#[inline(always)]
fn narrow_half(v: float32x4_t) -> uint16x4_t {
    let bits: uint16x4_t;
    // SAFETY: `fcvtn` reads and writes registers only and belongs to the base architecture.
    unsafe {
        asm!("fcvtn {0:v}.4h, {1:v}.4s", lateout(vreg) bits, in(vreg) v, options(pure, nomem, nostack));
    }
    bits
}

/// The numbers of 16 bytes.
#[inline(always)]
fn widen_bytes(bytes: uint8x16_t) -> V {
    intrinsic!({
        let (low, high) = (vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes));
        [
            vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))),
            vcvtq_f32_u32(vmovl_high_u16(low)),
            vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))),
            vcvtq_f32_u32(vmovl_high_u16(high)),
        ]
    })
}

/// Lane pairs 0 and 1 of both, then lane pairs 2 and 3 of both, added: `a0+a2 a1+a3 b0+b2 b1+b3`.
#[inline(always)]
fn add_pairs(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    intrinsic!({
        let (a, b) = (vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b));
        let low = vreinterpretq_f32_f64(vzip1q_f64(a, b));
        vaddq_f32(low, vreinterpretq_f32_f64(vzip2q_f64(a, b)))
    })
}

/// Lane `i` + lane `i + 8`, then `i` + `i + 4`.
#[inline(always)]
fn fold_one(v: V) -> float32x4_t {
    intrinsic!(vaddq_f32(vaddq_f32(v[0], v[2]), vaddq_f32(v[1], v[3])))
}

impl Simd for Neon {
    type V = V;
    const TILE_ROWS: usize = 2;
    const TILE_VECTORS: usize = 2;

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        intrinsic!([vdupq_n_f32(x); 4])
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> V {
        let q = from.as_chunks::<4>().0;
        let at = |i: usize| intrinsic!(vld1q_f32(q[i].as_ptr()));
        [at(0), at(1), at(2), at(3)]
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; LANES], v: V) {
        for (to, v) in to.as_chunks_mut::<4>().0.iter_mut().zip(v) {
            intrinsic!(vst1q_f32(to.as_mut_ptr(), v));
        }
    }

    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> V {
        let q = from.as_chunks::<4>().0;
        let at = |i: usize| widen_half(intrinsic!(vld1_u16(q[i].as_ptr().cast())));
        [at(0), at(1), at(2), at(3)]
    }

    #[inline(always)]
    fn store_f16(self, to: &mut [f16; LANES], v: V) {
        for (to, v) in to.as_chunks_mut::<4>().0.iter_mut().zip(v) {
            intrinsic!(vst1_u16(to.as_mut_ptr().cast(), narrow_half(v)));
        }
    }

    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> V {
        let q = from.as_chunks::<4>().0;
        let at = |i: usize| {
            intrinsic!(vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(q[i].as_ptr().cast()))))
        };
        [at(0), at(1), at(2), at(3)]
    }

    #[inline(always)]
    fn store_bf16(self, to: &mut [bf16; LANES], v: V) {
        for (to, v) in to.as_chunks_mut::<4>().0.iter_mut().zip(v) {
            intrinsic!({
                let bits = vreinterpretq_u32_f32(v);
                let high = vshrq_n_u32::<16>(bits);
                let odd = vandq_u32(high, vdupq_n_u32(1));
                let bias = vaddq_u32(odd, vdupq_n_u32(0x7fff));
                let rounded = vshrq_n_u32::<16>(vaddq_u32(bits, bias));
                let quiet = vorrq_u32(high, vdupq_n_u32(0x40));
                let rounded = vbslq_u32(vceqq_f32(v, v), rounded, quiet);
                vst1_u16(to.as_mut_ptr().cast(), vmovn_u32(rounded))
            });
        }
    }

    #[inline(always)]
    fn load_u8(self, from: &[u8; LANES]) -> V {
        widen_bytes(intrinsic!(vld1q_u8(from.as_ptr())))
    }

    #[inline(always)]
    fn load_u4(self, from: &[u8; LANES / 2]) -> V {
        widen_bytes(intrinsic!({
            let bytes = vld1_u8(from.as_ptr());
            let (low, high) = (vand_u8(bytes, vdup_n_u8(15)), vshr_n_u8::<4>(bytes));
            vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high))
        }))
    }

    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        zip(a, b, |a, b| intrinsic!(vaddq_f32(a, b)))
    }

    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        zip(a, b, |a, b| intrinsic!(vsubq_f32(a, b)))
    }

    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        zip(a, b, |a, b| intrinsic!(vmulq_f32(a, b)))
    }

    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        zip(a, b, |a, b| intrinsic!(vdivq_f32(a, b)))
    }

    #[inline(always)]
    fn mul_add(self, a: V, b: V, c: V) -> V {
        let at = |i: usize| intrinsic!(vfmaq_f32(c[i], a[i], b[i]));
        [at(0), at(1), at(2), at(3)]
    }

    #[inline(always)]
    fn neg_mul_add(self, a: V, b: V, c: V) -> V {
        let at = |i: usize| intrinsic!(vfmsq_f32(c[i], a[i], b[i]));
        [at(0), at(1), at(2), at(3)]
    }

    // `fmax` keeps a NaN of either side, hence the comparison.
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        zip(a, b, |a, b| intrinsic!(vbslq_f32(vcgtq_f32(a, b), a, b)))
    }

    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        zip(a, b, |a, b| intrinsic!(vbslq_f32(vcltq_f32(a, b), a, b)))
    }

    #[inline(always)]
    fn abs(self, v: V) -> V {
        map(v, |v| intrinsic!(vabsq_f32(v)))
    }

    #[inline(always)]
    fn copysign(self, v: V, sign: V) -> V {
        zip(v, sign, |v, sign| intrinsic!(vbslq_f32(vdupq_n_u32(0x8000_0000), sign, v)))
    }

    #[inline(always)]
    fn round(self, v: V) -> V {
        map(v, |v| intrinsic!(vrndnq_f32(v)))
    }

    #[inline(always)]
    fn floor(self, v: V) -> V {
        map(v, |v| intrinsic!(vrndmq_f32(v)))
    }

    #[inline(always)]
    fn scale2(self, v: V, n: V) -> V {
        // In two steps, so that each factor is a normal number.
        zip(v, n, |v, n| {
            intrinsic!({
                let power = |n| {
                    let biased = vaddq_s32(n, vdupq_n_s32(127));
                    vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased))
                };
                let n = vcvtq_s32_f32(n);
                let half = vshrq_n_s32::<1>(n);
                vmulq_f32(vmulq_f32(v, power(half)), power(vsubq_s32(n, half)))
            })
        })
    }

    #[inline(always)]
    fn select_lt(self, a: V, b: V, yes: V, no: V) -> V {
        let at = |i: usize| intrinsic!(vbslq_f32(vcltq_f32(a[i], b[i]), yes[i], no[i]));
        [at(0), at(1), at(2), at(3)]
    }

    #[inline(always)]
    fn keep_lanes(self, v: V, low: usize, high: usize, fill: V) -> V {
        let (low, high) = (low.min(LANES) as i32, high.min(LANES) as i32);
        let at = |i: usize| {
            intrinsic!({
                let first = 4 * i as i32;
                let lanes = vld1q_s32([0, 1, 2, 3].as_ptr());
                let over = vcgeq_s32(lanes, vdupq_n_s32(low - first));
                let under = vcltq_s32(lanes, vdupq_n_s32(high - first));
                vbslq_f32(vandq_u32(over, under), v[i], fill[i])
            })
        };
        [at(0), at(1), at(2), at(3)]
    }

    #[inline(always)]
    fn deinterleave(self, a: V, b: V) -> (V, V) {
        let even = |a, b| intrinsic!(vuzp1q_f32(a, b));
        let odd = |a, b| intrinsic!(vuzp2q_f32(a, b));
        (
            [even(a[0], a[1]), even(a[2], a[3]), even(b[0], b[1]), even(b[2], b[3])],
            [odd(a[0], a[1]), odd(a[2], a[3]), odd(b[0], b[1]), odd(b[2], b[3])],
        )
    }

    #[inline(always)]
    fn interleave(self, even: V, odd: V) -> (V, V) {
        let low = |i: usize| intrinsic!(vzip1q_f32(even[i], odd[i]));
        let high = |i: usize| intrinsic!(vzip2q_f32(even[i], odd[i]));
        ([low(0), high(0), low(1), high(1)], [low(2), high(2), low(3), high(3)])
    }

    #[inline(always)]
    fn fold(self, v: [V; 4]) -> V {
        v.map(fold_one)
    }

    #[inline(always)]
    fn merge_folded(self, [a, b, c, d]: [V; 4]) -> V {
        let at = |i: usize| intrinsic!(vpaddq_f32(add_pairs(a[i], b[i]), add_pairs(c[i], d[i])));
        [at(0), at(1), at(2), at(3)]
    }

    #[inline(always)]
    fn sum(self, v: V) -> f32 {
        let four = fold_one(v);
        let two = add_pairs(four, four);
        intrinsic!(vgetq_lane_f32::<0>(two) + vgetq_lane_f32::<1>(two))
    }

    #[inline(always)]
    fn largest(self, v: V) -> f32 {
        intrinsic!(vmaxvq_f32(vmaxq_f32(vmaxq_f32(v[0], v[1]), vmaxq_f32(v[2], v[3]))))
    }
}
