//! NEON: a vector is four registers of four lanes.

use std::arch::aarch64::*;
use std::arch::asm;

use half::{bf16, f16};

use super::{Kernel, LANES, Simd};
use crate::{Isa, Level};

/// Proof that this CPU has NEON.
#[derive(Clone, Copy, Debug)]
pub(super) struct Neon(());

impl Neon {
    /// The token, if `isa` licenses the instructions.
    pub(super) fn new(isa: Isa) -> Option<Self> {
        matches!(isa.level(), Level::Neon).then_some(Self(()))
    }
}

#[target_feature(enable = "neon")]
#[inline(never)]
fn entered<K: Kernel>(simd: Neon, kernel: K) -> K::Output {
    kernel.run(simd)
}

/// Evaluates intrinsics; the token proves that the CPU has them, and references that pointers are valid.
macro_rules! intrinsic {
    ($e:expr) => {{
        // SAFETY: a `Neon` exists only where an `Isa` says that the feature was detected; loads and stores go through references to
        // at least as many elements.
        unsafe { $e }
    }};
}

type V = [float32x4_t; 4];

/// Applies a function to all four registers.
macro_rules! quarters {
    ($op:ident($($v:expr),+)) => { [$op($($v[0]),+), $op($($v[1]),+), $op($($v[2]),+), $op($($v[3]),+)] };
}

/// Applies an intrinsic to all four registers.
macro_rules! each {
    ($op:ident($($v:expr),+)) => { intrinsic!(quarters!($op($($v),+))) };
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

#[inline(always)]
fn load_quarter(from: [f32; 4]) -> float32x4_t {
    intrinsic!(vld1q_f32(from.as_ptr()))
}

#[inline(always)]
fn load_quarter_f16(from: [f16; 4]) -> float32x4_t {
    widen_half(intrinsic!(vld1_u16(from.as_ptr().cast())))
}

#[inline(always)]
fn load_quarter_bf16(from: [bf16; 4]) -> float32x4_t {
    intrinsic!(vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from.as_ptr().cast()))))
}

/// `2^n`.
#[inline(always)]
fn power_of_two(n: int32x4_t) -> float32x4_t {
    intrinsic!(vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(n, vdupq_n_s32(127)))))
}

/// `v * 2^n` in two steps, so that each factor is a normal number.
#[inline(always)]
fn scale_quarter(v: float32x4_t, n: float32x4_t) -> float32x4_t {
    intrinsic!({
        let n = vcvtq_s32_f32(n);
        let half = vshrq_n_s32::<1>(n);
        vmulq_f32(vmulq_f32(v, power_of_two(half)), power_of_two(vsubq_s32(n, half)))
    })
}

/// All bits of the lanes `low..high`.
#[inline(always)]
fn lane_mask(low: i32, high: i32) -> uint32x4_t {
    intrinsic!({
        let lanes = vld1q_s32([0, 1, 2, 3].as_ptr());
        vandq_u32(vcgeq_s32(lanes, vdupq_n_s32(low)), vcltq_s32(lanes, vdupq_n_s32(high)))
    })
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
    const TILE_KEYS: usize = 2;
    const TILE_VECTORS: usize = 2;

    #[inline(always)]
    fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        intrinsic!(entered(self, kernel))
    }

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        intrinsic!([vdupq_n_f32(x); 4])
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> V {
        let q = from.as_chunks::<4>().0;
        quarters!(load_quarter(q))
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
        quarters!(load_quarter_f16(q))
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
        quarters!(load_quarter_bf16(q))
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
    fn load_u8(self, from: &[u32; LANES / 4]) -> V {
        widen_bytes(intrinsic!(vld1q_u8(from.as_ptr().cast())))
    }

    #[inline(always)]
    fn load_u4(self, from: &[u32; LANES / 8]) -> V {
        widen_bytes(intrinsic!({
            let bytes = vld1_u8(from.as_ptr().cast());
            let (low, high) = (vand_u8(bytes, vdup_n_u8(15)), vshr_n_u8::<4>(bytes));
            vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high))
        }))
    }

    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        each!(vaddq_f32(a, b))
    }

    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        each!(vsubq_f32(a, b))
    }

    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        each!(vmulq_f32(a, b))
    }

    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        each!(vdivq_f32(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: V, b: V, c: V) -> V {
        each!(vfmaq_f32(c, a, b))
    }

    #[inline(always)]
    fn neg_mul_add(self, a: V, b: V, c: V) -> V {
        each!(vfmsq_f32(c, a, b))
    }

    // `fmax` keeps a NaN of either side, hence the comparison.
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        let greater = each!(vcgtq_f32(a, b));
        each!(vbslq_f32(greater, a, b))
    }

    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        let less = each!(vcltq_f32(a, b));
        each!(vbslq_f32(less, a, b))
    }

    #[inline(always)]
    fn abs(self, v: V) -> V {
        each!(vabsq_f32(v))
    }

    #[inline(always)]
    fn copysign(self, v: V, sign: V) -> V {
        let mask = [intrinsic!(vdupq_n_u32(0x8000_0000)); 4];
        each!(vbslq_f32(mask, sign, v))
    }

    #[inline(always)]
    fn round(self, v: V) -> V {
        each!(vrndnq_f32(v))
    }

    #[inline(always)]
    fn floor(self, v: V) -> V {
        each!(vrndmq_f32(v))
    }

    #[inline(always)]
    fn scale2(self, v: V, n: V) -> V {
        quarters!(scale_quarter(v, n))
    }

    #[inline(always)]
    fn select_lt(self, a: V, b: V, yes: V, no: V) -> V {
        let less = each!(vcltq_f32(a, b));
        each!(vbslq_f32(less, yes, no))
    }

    #[inline(always)]
    fn keep_lanes(self, v: V, low: usize, high: usize, fill: V) -> V {
        let (low, high) = (low.min(LANES) as i32, high.min(LANES) as i32);
        let mask = [
            lane_mask(low, high),
            lane_mask(low - 4, high - 4),
            lane_mask(low - 8, high - 8),
            lane_mask(low - 12, high - 12),
        ];
        each!(vbslq_f32(mask, v, fill))
    }

    #[inline(always)]
    fn deinterleave(self, a: V, b: V) -> (V, V) {
        let (first, second) = ([a[0], a[2], b[0], b[2]], [a[1], a[3], b[1], b[3]]);
        (each!(vuzp1q_f32(first, second)), each!(vuzp2q_f32(first, second)))
    }

    #[inline(always)]
    fn interleave(self, even: V, odd: V) -> (V, V) {
        let (low, high) = (each!(vzip1q_f32(even, odd)), each!(vzip2q_f32(even, odd)));
        ([low[0], high[0], low[1], high[1]], [low[2], high[2], low[3], high[3]])
    }

    #[inline(always)]
    fn fold(self, v: [V; 4]) -> V {
        quarters!(fold_one(v))
    }

    #[inline(always)]
    fn merge_folded(self, [a, b, c, d]: [V; 4]) -> V {
        let (ab, cd) = (quarters!(add_pairs(a, b)), quarters!(add_pairs(c, d)));
        each!(vpaddq_f32(ab, cd))
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
