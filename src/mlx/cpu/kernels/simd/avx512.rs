//! AVX-512: a vector is one register.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{Kernel, LANES, Simd};
use crate::{Isa, Level};

/// Proof that this CPU has AVX-512 F, BW, DQ and VL, and AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub(super) struct Avx512(());

impl Avx512 {
    /// The token, if `isa` licenses the instructions.
    pub(super) fn new(isa: Isa) -> Option<Self> {
        matches!(isa.level(), Level::Avx512 | Level::Avx512Vnni).then_some(Self(()))
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
#[inline(never)]
fn entered<K: Kernel>(simd: Avx512, kernel: K) -> K::Output {
    kernel.run(simd)
}

/// Evaluates intrinsics; the token proves that the CPU has them, and references that pointers are valid.
macro_rules! intrinsic {
    ($e:expr) => {{
        // SAFETY: an `Avx512` exists only where an `Isa` says that its features were detected; loads and stores go through references
        // to 16 elements, unaligned.
        unsafe { $e }
    }};
}

/// In each quarter of the registers: `a0+a2 a1+a3 b0+b2 b1+b3`.
#[inline(always)]
fn add_pairs(a: __m512, b: __m512) -> __m512 {
    intrinsic!({
        let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
        let low = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
        _mm512_add_ps(low, _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)))
    })
}

impl Simd for Avx512 {
    type V = __m512;
    const TILE_ROWS: usize = 4;
    const TILE_KEYS: usize = 4;
    const TILE_VECTORS: usize = 4;

    #[inline(always)]
    fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        intrinsic!(entered(self, kernel))
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        intrinsic!(_mm512_set1_ps(x))
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> __m512 {
        intrinsic!(_mm512_loadu_ps(from.as_ptr()))
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; LANES], v: __m512) {
        intrinsic!(_mm512_storeu_ps(to.as_mut_ptr(), v))
    }

    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> __m512 {
        intrinsic!(_mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())))
    }

    #[inline(always)]
    fn store_f16(self, to: &mut [f16; LANES], v: __m512) {
        intrinsic!(_mm256_storeu_si256(
            to.as_mut_ptr().cast(),
            _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(v)
        ))
    }

    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> __m512 {
        intrinsic!({
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        })
    }

    // The instruction for this (AVX512_BF16) flushes subnormals, so it is not used.
    #[inline(always)]
    fn store_bf16(self, to: &mut [bf16; LANES], v: __m512) {
        intrinsic!({
            let bits = _mm512_castps_si512(v);
            let high = _mm512_srli_epi32::<16>(bits);
            let odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
            let bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
            let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, bias));
            let quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
            let rounded = _mm512_mask_mov_epi32(rounded, nan, quiet);
            _mm256_storeu_si256(to.as_mut_ptr().cast(), _mm512_cvtepi32_epi16(rounded))
        })
    }

    #[inline(always)]
    fn load_u8(self, from: &[u32; LANES / 4]) -> __m512 {
        intrinsic!(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.as_ptr().cast()))))
    }

    #[inline(always)]
    fn load_u4(self, from: &[u32; LANES / 8]) -> __m512 {
        intrinsic!({
            let word = (u64::from(from[0]) | u64::from(from[1]) << 32) as i64;
            let low = _mm_cvtsi64_si128(word & 0x0f0f_0f0f_0f0f_0f0f);
            let high = _mm_cvtsi64_si128(word >> 4 & 0x0f0f_0f0f_0f0f_0f0f);
            _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(low, high)))
        })
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        intrinsic!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        intrinsic!(_mm512_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        intrinsic!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        intrinsic!(_mm512_div_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        intrinsic!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn neg_mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        intrinsic!(_mm512_fnmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        intrinsic!(_mm512_max_ps(a, b))
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        intrinsic!(_mm512_min_ps(a, b))
    }

    #[inline(always)]
    fn abs(self, v: __m512) -> __m512 {
        intrinsic!(_mm512_abs_ps(v))
    }

    #[inline(always)]
    fn copysign(self, v: __m512, sign: __m512) -> __m512 {
        intrinsic!({
            let mask = _mm512_set1_ps(-0.0);
            _mm512_or_ps(_mm512_andnot_ps(mask, v), _mm512_and_ps(mask, sign))
        })
    }

    #[inline(always)]
    fn round(self, v: __m512) -> __m512 {
        intrinsic!(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(v))
    }

    #[inline(always)]
    fn floor(self, v: __m512) -> __m512 {
        intrinsic!(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(v))
    }

    #[inline(always)]
    fn scale2(self, v: __m512, n: __m512) -> __m512 {
        intrinsic!(_mm512_scalef_ps(v, n))
    }

    #[inline(always)]
    fn select_lt(self, a: __m512, b: __m512, yes: __m512, no: __m512) -> __m512 {
        intrinsic!(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), no, yes))
    }

    #[inline(always)]
    fn keep_lanes(self, v: __m512, low: usize, high: usize, fill: __m512) -> __m512 {
        let (low, high) = (1u32 << low.min(LANES), 1u32 << high.min(LANES));
        let mask = ((high - 1) & !(low - 1)) as u16;
        intrinsic!(_mm512_mask_blend_ps(mask, fill, v))
    }

    #[inline(always)]
    fn deinterleave(self, a: __m512, b: __m512) -> (__m512, __m512) {
        intrinsic!({
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
            (_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b))
        })
    }

    #[inline(always)]
    fn interleave(self, even: __m512, odd: __m512) -> (__m512, __m512) {
        intrinsic!({
            let low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            let high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
            (_mm512_permutex2var_ps(even, low, odd), _mm512_permutex2var_ps(even, high, odd))
        })
    }

    #[inline(always)]
    fn fold(self, [a, b, c, d]: [__m512; 4]) -> __m512 {
        // Quarters of a register are numbered 0 to 3; quarter i + quarter i + 2 first, then the two left.
        intrinsic!({
            let ab = _mm512_add_ps(
                _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b),
                _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b),
            );
            let cd = _mm512_add_ps(
                _mm512_shuffle_f32x4::<0b01_00_01_00>(c, d),
                _mm512_shuffle_f32x4::<0b11_10_11_10>(c, d),
            );
            _mm512_add_ps(
                _mm512_shuffle_f32x4::<0b10_00_10_00>(ab, cd),
                _mm512_shuffle_f32x4::<0b11_01_11_01>(ab, cd),
            )
        })
    }

    #[inline(always)]
    fn merge_folded(self, [a, b, c, d]: [__m512; 4]) -> __m512 {
        intrinsic!({
            let (ab, cd) = (add_pairs(a, b), add_pairs(c, d));
            _mm512_add_ps(
                _mm512_shuffle_ps::<0b10_00_10_00>(ab, cd),
                _mm512_shuffle_ps::<0b11_01_11_01>(ab, cd),
            )
        })
    }

    #[inline(always)]
    fn sum(self, v: __m512) -> f32 {
        intrinsic!({
            let eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
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
    fn largest(self, v: __m512) -> f32 {
        intrinsic!(_mm512_reduce_max_ps(v))
    }
}
