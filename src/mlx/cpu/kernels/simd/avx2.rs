//! AVX2 with FMA and F16C: a vector is two registers, lanes 0 to 7 and 8 to 15.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{Kernel, LANES, Simd};
use crate::{Isa, Level};

/// Proof that this CPU has AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub(super) struct Avx2(());

impl Avx2 {
    /// The token, if `isa` licenses the instructions.
    pub(super) fn new(isa: Isa) -> Option<Self> {
        matches!(isa.level(), Level::Avx2).then_some(Self(()))
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline(never)]
fn entered<K: Kernel>(simd: Avx2, kernel: K) -> K::Output {
    kernel.run(simd)
}

/// Evaluates intrinsics; the token proves that the CPU has them, and references that pointers are valid.
macro_rules! intrinsic {
    ($e:expr) => {{
        // SAFETY: an `Avx2` exists only where an `Isa` says that its features were detected; loads and stores go through references
        // to at least as many elements, unaligned.
        unsafe { $e }
    }};
}

type V = [__m256; 2];

/// Applies an intrinsic to both registers.
macro_rules! both {
    ($op:ident($($v:expr),+)) => { intrinsic!([$op($($v[0]),+), $op($($v[1]),+)]) };
}

/// The halves of 16 elements.
#[inline(always)]
fn halves<T>(from: &[T; LANES]) -> (&[T; 8], &[T; 8]) {
    let halves = from.as_chunks::<8>().0;
    (&halves[0], &halves[1])
}

#[inline(always)]
fn widen_bf16(from: &[bf16; 8]) -> __m256 {
    intrinsic!({
        let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.as_ptr().cast()));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
    })
}

#[inline(always)]
fn narrow_bf16(v: __m256) -> __m128i {
    intrinsic!({
        let bits = _mm256_castps_si256(v);
        let high = _mm256_srli_epi32::<16>(bits);
        let odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
        let bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
        let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, bias));
        let quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
        let rounded = _mm256_blendv_epi8(rounded, quiet, nan);
        let low = _mm256_castsi256_si128(rounded);
        _mm_packus_epi32(low, _mm256_extracti128_si256::<1>(rounded))
    })
}

/// The numbers of 16 bytes.
#[inline(always)]
fn widen_bytes(bytes: __m128i) -> V {
    intrinsic!([
        _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
        _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(bytes, bytes))),
    ])
}

/// `2^n`.
#[inline(always)]
fn power_of_two(n: __m256i) -> __m256 {
    intrinsic!({
        let biased = _mm256_add_epi32(n, _mm256_set1_epi32(127));
        _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
    })
}

/// `v * 2^n` in two steps, so that each factor is a normal number.
#[inline(always)]
fn scale_half(v: __m256, n: __m256) -> __m256 {
    intrinsic!({
        let n = _mm256_cvtps_epi32(n);
        let half = _mm256_srai_epi32::<1>(n);
        let v = _mm256_mul_ps(v, power_of_two(half));
        _mm256_mul_ps(v, power_of_two(_mm256_sub_epi32(n, half)))
    })
}

/// All bits of the lanes `low..high`.
#[inline(always)]
fn lane_mask(low: i32, high: i32) -> __m256 {
    intrinsic!({
        let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        let over = _mm256_cmpgt_epi32(lanes, _mm256_set1_epi32(low - 1));
        let under = _mm256_cmpgt_epi32(_mm256_set1_epi32(high), lanes);
        _mm256_castsi256_ps(_mm256_and_si256(over, under))
    })
}

/// Even and odd elements of 16.
#[inline(always)]
fn split(a: __m256, b: __m256) -> (__m256, __m256) {
    intrinsic!({
        // Pairs come out as a0 b0 a1 b1; the 64-bit permutation puts them in order.
        let even = _mm256_castps_pd(_mm256_shuffle_ps::<0b10_00_10_00>(a, b));
        let odd = _mm256_castps_pd(_mm256_shuffle_ps::<0b11_01_11_01>(a, b));
        (
            _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(even)),
            _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(odd)),
        )
    })
}

/// The inverse of [`split`].
#[inline(always)]
fn join(even: __m256, odd: __m256) -> V {
    intrinsic!({
        let (low, high) = (_mm256_unpacklo_ps(even, odd), _mm256_unpackhi_ps(even, odd));
        [_mm256_permute2f128_ps::<0x20>(low, high), _mm256_permute2f128_ps::<0x31>(low, high)]
    })
}

/// `a0+a1 b0+b1`, of halves of the registers.
#[inline(always)]
fn add_halves(a: __m256, b: __m256) -> __m256 {
    intrinsic!(_mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b)))
}

/// In each half of the registers: `a0+a2 a1+a3 b0+b2 b1+b3`.
#[inline(always)]
fn add_pairs(a: __m256, b: __m256) -> __m256 {
    intrinsic!({
        let (a, b) = (_mm256_castps_pd(a), _mm256_castps_pd(b));
        let low = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
        _mm256_add_ps(low, _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)))
    })
}

/// In each half of the registers: `a0+a1 a2+a3 b0+b1 b2+b3`.
#[inline(always)]
fn add_neighbours(a: __m256, b: __m256) -> __m256 {
    intrinsic!(_mm256_add_ps(
        _mm256_shuffle_ps::<0b10_00_10_00>(a, b),
        _mm256_shuffle_ps::<0b11_01_11_01>(a, b)
    ))
}

impl Simd for Avx2 {
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
        intrinsic!([_mm256_set1_ps(x); 2])
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> V {
        let (low, high) = halves(from);
        intrinsic!([_mm256_loadu_ps(low.as_ptr()), _mm256_loadu_ps(high.as_ptr())])
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; LANES], v: V) {
        let to = to.as_mut_ptr();
        intrinsic!({
            _mm256_storeu_ps(to, v[0]);
            _mm256_storeu_ps(to.add(8), v[1]);
        });
    }

    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> V {
        let (low, high) = halves(from);
        intrinsic!([
            _mm256_cvtph_ps(_mm_loadu_si128(low.as_ptr().cast())),
            _mm256_cvtph_ps(_mm_loadu_si128(high.as_ptr().cast())),
        ])
    }

    #[inline(always)]
    fn store_f16(self, to: &mut [f16; LANES], v: V) {
        let to = to.as_mut_ptr();
        intrinsic!({
            _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[0]));
            _mm_storeu_si128(to.add(8).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[1]));
        });
    }

    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> V {
        let (low, high) = halves(from);
        [widen_bf16(low), widen_bf16(high)]
    }

    #[inline(always)]
    fn store_bf16(self, to: &mut [bf16; LANES], v: V) {
        let to = to.as_mut_ptr();
        intrinsic!({
            _mm_storeu_si128(to.cast(), narrow_bf16(v[0]));
            _mm_storeu_si128(to.add(8).cast(), narrow_bf16(v[1]));
        });
    }

    #[inline(always)]
    fn load_u8(self, from: &[u32; LANES / 4]) -> V {
        widen_bytes(intrinsic!(_mm_loadu_si128(from.as_ptr().cast())))
    }

    #[inline(always)]
    fn load_u4(self, from: &[u32; LANES / 8]) -> V {
        widen_bytes(intrinsic!({
            let word = (u64::from(from[0]) | u64::from(from[1]) << 32) as i64;
            let low = _mm_cvtsi64_si128(word & 0x0f0f_0f0f_0f0f_0f0f);
            let high = _mm_cvtsi64_si128(word >> 4 & 0x0f0f_0f0f_0f0f_0f0f);
            _mm_unpacklo_epi8(low, high)
        }))
    }

    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        both!(_mm256_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        both!(_mm256_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        both!(_mm256_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        both!(_mm256_div_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: V, b: V, c: V) -> V {
        both!(_mm256_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn neg_mul_add(self, a: V, b: V, c: V) -> V {
        both!(_mm256_fnmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        both!(_mm256_max_ps(a, b))
    }

    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        both!(_mm256_min_ps(a, b))
    }

    #[inline(always)]
    fn abs(self, v: V) -> V {
        let sign = self.splat(-0.0);
        both!(_mm256_andnot_ps(sign, v))
    }

    #[inline(always)]
    fn copysign(self, v: V, sign: V) -> V {
        let mask = self.splat(-0.0);
        let (v, sign) = (both!(_mm256_andnot_ps(mask, v)), both!(_mm256_and_ps(mask, sign)));
        both!(_mm256_or_ps(v, sign))
    }

    #[inline(always)]
    fn round(self, v: V) -> V {
        intrinsic!([
            _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(v[0]),
            _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(v[1]),
        ])
    }

    #[inline(always)]
    fn floor(self, v: V) -> V {
        both!(_mm256_floor_ps(v))
    }

    #[inline(always)]
    fn scale2(self, v: V, n: V) -> V {
        [scale_half(v[0], n[0]), scale_half(v[1], n[1])]
    }

    #[inline(always)]
    fn select_lt(self, a: V, b: V, yes: V, no: V) -> V {
        intrinsic!([
            _mm256_blendv_ps(no[0], yes[0], _mm256_cmp_ps::<_CMP_LT_OQ>(a[0], b[0])),
            _mm256_blendv_ps(no[1], yes[1], _mm256_cmp_ps::<_CMP_LT_OQ>(a[1], b[1])),
        ])
    }

    #[inline(always)]
    fn keep_lanes(self, v: V, low: usize, high: usize, fill: V) -> V {
        let (low, high) = (low.min(LANES) as i32, high.min(LANES) as i32);
        let mask = [lane_mask(low, high), lane_mask(low - 8, high - 8)];
        both!(_mm256_blendv_ps(fill, v, mask))
    }

    #[inline(always)]
    fn deinterleave(self, a: V, b: V) -> (V, V) {
        let (low, high) = (split(a[0], a[1]), split(b[0], b[1]));
        ([low.0, high.0], [low.1, high.1])
    }

    #[inline(always)]
    fn interleave(self, even: V, odd: V) -> (V, V) {
        (join(even[0], odd[0]), join(even[1], odd[1]))
    }

    #[inline(always)]
    fn fold(self, [a, b, c, d]: [V; 4]) -> V {
        let (a, b) = (intrinsic!(_mm256_add_ps(a[0], a[1])), intrinsic!(_mm256_add_ps(b[0], b[1])));
        let (c, d) = (intrinsic!(_mm256_add_ps(c[0], c[1])), intrinsic!(_mm256_add_ps(d[0], d[1])));
        [add_halves(a, b), add_halves(c, d)]
    }

    #[inline(always)]
    fn merge_folded(self, [a, b, c, d]: [V; 4]) -> V {
        [
            add_neighbours(add_pairs(a[0], b[0]), add_pairs(c[0], d[0])),
            add_neighbours(add_pairs(a[1], b[1]), add_pairs(c[1], d[1])),
        ]
    }

    #[inline(always)]
    fn sum(self, v: V) -> f32 {
        intrinsic!({
            let eight = _mm256_add_ps(v[0], v[1]);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        })
    }

    #[inline(always)]
    fn prefetch<T>(self, from: &[T], bytes: usize) {
        let place = from.as_ptr().cast::<i8>().wrapping_add(bytes);
        intrinsic!(_mm_prefetch::<_MM_HINT_T0>(place));
    }

    #[inline(always)]
    fn largest(self, v: V) -> f32 {
        intrinsic!({
            let eight = _mm256_max_ps(v[0], v[1]);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        })
    }
}
