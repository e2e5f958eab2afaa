//! AVX2 with FMA and F16C: a vector is two registers, lanes 0 to 7 and 8 to 15.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{Kernel, LANES, Portable, Simd};
use crate::mlx::cpu::{Isa, Level};

/// Proof that this CPU has AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub(super) struct Avx2(());

/// Compiles `kernel` with these instructions and runs it; on [`Portable`] if `isa` does not license them.
pub(super) fn enter<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    #[target_feature(enable = "avx2,fma,f16c")]
    fn entered<K: Kernel>(simd: Avx2, kernel: K) -> K::Output {
        kernel.run(simd)
    }
    if !matches!(isa.level(), Level::Avx2) {
        return kernel.run(Portable);
    }
    // SAFETY: an `Isa` of this level exists only where its instructions were detected.
    unsafe { entered(Avx2(()), kernel) }
}

/// Evaluates intrinsics; the token proves that the CPU has them, and references that pointers are valid.
macro_rules! intrinsic {
    ($e:expr) => {{
        // SAFETY: an `Avx2` exists only where its features were detected; loads and stores go through references
        // to at least as many elements, unaligned.
        unsafe { $e }
    }};
}

type V = [__m256; 2];

#[inline(always)]
fn map(v: V, f: impl Fn(__m256) -> __m256) -> V {
    [f(v[0]), f(v[1])]
}

#[inline(always)]
fn zip(a: V, b: V, f: impl Fn(__m256, __m256) -> __m256) -> V {
    [f(a[0], b[0]), f(a[1], b[1])]
}

/// The halves of 16 elements.
#[inline(always)]
fn halves<T>(from: &[T; LANES]) -> (&[T; 8], &[T; 8]) {
    let halves = from.as_chunks::<8>().0;
    (&halves[0], &halves[1])
}

impl Simd for Avx2 {
    type V = V;
    const TILE_ROWS: usize = 2;
    const TILE_VECTORS: usize = 2;

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
        for (to, v) in to.as_chunks_mut::<8>().0.iter_mut().zip(v) {
            intrinsic!(_mm256_storeu_ps(to.as_mut_ptr(), v));
        }
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
        for (to, v) in to.as_chunks_mut::<8>().0.iter_mut().zip(v) {
            intrinsic!(_mm_storeu_si128(
                to.as_mut_ptr().cast(),
                _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)
            ));
        }
    }

    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> V {
        let widen = |from: &[bf16; 8]| {
            intrinsic!({
                let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.as_ptr().cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
            })
        };
        let (low, high) = halves(from);
        [widen(low), widen(high)]
    }

    #[inline(always)]
    fn store_bf16(self, to: &mut [bf16; LANES], v: V) {
        for (to, v) in to.as_chunks_mut::<8>().0.iter_mut().zip(v) {
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
                let packed = _mm_packus_epi32(low, _mm256_extracti128_si256::<1>(rounded));
                _mm_storeu_si128(to.as_mut_ptr().cast(), packed)
            });
        }
    }

    #[inline(always)]
    fn load_u8(self, from: &[u8; LANES]) -> V {
        let widen = |from: &[u8; 8]| {
            intrinsic!({
                let bytes = _mm_cvtsi64_si128(i64::from_le_bytes(*from));
                _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes))
            })
        };
        let (low, high) = halves(from);
        [widen(low), widen(high)]
    }

    #[inline(always)]
    fn load_u4(self, from: &[u8; LANES / 2]) -> V {
        intrinsic!({
            let word = i64::from_le_bytes(*from);
            let low = _mm_cvtsi64_si128(word & 0x0f0f_0f0f_0f0f_0f0f);
            let high = _mm_cvtsi64_si128(word >> 4 & 0x0f0f_0f0f_0f0f_0f0f);
            let bytes = _mm_unpacklo_epi8(low, high);
            [
                _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
                _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(bytes, bytes))),
            ]
        })
    }

    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        zip(a, b, |a, b| intrinsic!(_mm256_add_ps(a, b)))
    }

    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        zip(a, b, |a, b| intrinsic!(_mm256_sub_ps(a, b)))
    }

    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        zip(a, b, |a, b| intrinsic!(_mm256_mul_ps(a, b)))
    }

    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        zip(a, b, |a, b| intrinsic!(_mm256_div_ps(a, b)))
    }

    #[inline(always)]
    fn mul_add(self, a: V, b: V, c: V) -> V {
        intrinsic!([_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])])
    }

    #[inline(always)]
    fn neg_mul_add(self, a: V, b: V, c: V) -> V {
        intrinsic!([_mm256_fnmadd_ps(a[0], b[0], c[0]), _mm256_fnmadd_ps(a[1], b[1], c[1])])
    }

    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        zip(a, b, |a, b| intrinsic!(_mm256_max_ps(a, b)))
    }

    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        zip(a, b, |a, b| intrinsic!(_mm256_min_ps(a, b)))
    }

    #[inline(always)]
    fn abs(self, v: V) -> V {
        map(v, |v| intrinsic!(_mm256_andnot_ps(_mm256_set1_ps(-0.0), v)))
    }

    #[inline(always)]
    fn copysign(self, v: V, sign: V) -> V {
        zip(v, sign, |v, sign| {
            intrinsic!({
                let mask = _mm256_set1_ps(-0.0);
                _mm256_or_ps(_mm256_andnot_ps(mask, v), _mm256_and_ps(mask, sign))
            })
        })
    }

    #[inline(always)]
    fn round(self, v: V) -> V {
        map(v, |v| intrinsic!(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(v)))
    }

    #[inline(always)]
    fn floor(self, v: V) -> V {
        map(v, |v| intrinsic!(_mm256_floor_ps(v)))
    }

    #[inline(always)]
    fn scale2(self, v: V, n: V) -> V {
        // In two steps, so that each factor is a normal number.
        zip(v, n, |v, n| {
            intrinsic!({
                let power = |n| {
                    let biased = _mm256_add_epi32(n, _mm256_set1_epi32(127));
                    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
                };
                let n = _mm256_cvtps_epi32(n);
                let half = _mm256_srai_epi32::<1>(n);
                _mm256_mul_ps(_mm256_mul_ps(v, power(half)), power(_mm256_sub_epi32(n, half)))
            })
        })
    }

    #[inline(always)]
    fn select_lt(self, a: V, b: V, yes: V, no: V) -> V {
        let select = |i: usize| {
            intrinsic!(_mm256_blendv_ps(no[i], yes[i], _mm256_cmp_ps::<_CMP_LT_OQ>(a[i], b[i])))
        };
        [select(0), select(1)]
    }

    #[inline(always)]
    fn keep_lanes(self, v: V, low: usize, high: usize, fill: V) -> V {
        let (low, high) = (low.min(LANES) as i32, high.min(LANES) as i32);
        let keep = |v, fill, first: i32| {
            intrinsic!({
                let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                let over = _mm256_cmpgt_epi32(lanes, _mm256_set1_epi32(low - first - 1));
                let under = _mm256_cmpgt_epi32(_mm256_set1_epi32(high - first), lanes);
                _mm256_blendv_ps(fill, v, _mm256_castsi256_ps(_mm256_and_si256(over, under)))
            })
        };
        [keep(v[0], fill[0], 0), keep(v[1], fill[1], 8)]
    }

    #[inline(always)]
    fn deinterleave(self, a: V, b: V) -> (V, V) {
        let split = |a: __m256, b: __m256| {
            intrinsic!({
                // Quarters come out as a0 b0 a1 b1; the 64-bit permutation puts them in order.
                let order = |v| {
                    _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(_mm256_castps_pd(v)))
                };
                let even = order(_mm256_shuffle_ps::<0b10_00_10_00>(a, b));
                (even, order(_mm256_shuffle_ps::<0b11_01_11_01>(a, b)))
            })
        };
        let (low, high) = (split(a[0], a[1]), split(b[0], b[1]));
        ([low.0, high.0], [low.1, high.1])
    }

    #[inline(always)]
    fn interleave(self, even: V, odd: V) -> (V, V) {
        let join = |even: __m256, odd: __m256| {
            intrinsic!({
                let (low, high) = (_mm256_unpacklo_ps(even, odd), _mm256_unpackhi_ps(even, odd));
                [_mm256_permute2f128_ps::<0x20>(low, high), _mm256_permute2f128_ps::<0x31>(low, high)]
            })
        };
        (join(even[0], odd[0]), join(even[1], odd[1]))
    }

    #[inline(always)]
    fn fold(self, v: [V; 4]) -> V {
        let [a, b, c, d] = v.map(|v| intrinsic!(_mm256_add_ps(v[0], v[1])));
        let pair = |a: __m256, b: __m256| {
            intrinsic!(_mm256_add_ps(
                _mm256_permute2f128_ps::<0x20>(a, b),
                _mm256_permute2f128_ps::<0x31>(a, b)
            ))
        };
        [pair(a, b), pair(c, d)]
    }

    #[inline(always)]
    fn merge_folded(self, [a, b, c, d]: [V; 4]) -> V {
        let merge = |i: usize| {
            intrinsic!({
                let pairs = |a, b| {
                    let (a, b) = (_mm256_castps_pd(a), _mm256_castps_pd(b));
                    let low = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
                    _mm256_add_ps(low, _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)))
                };
                let (ab, cd) = (pairs(a[i], b[i]), pairs(c[i], d[i]));
                _mm256_add_ps(
                    _mm256_shuffle_ps::<0b10_00_10_00>(ab, cd),
                    _mm256_shuffle_ps::<0b11_01_11_01>(ab, cd),
                )
            })
        };
        [merge(0), merge(1)]
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
    fn largest(self, v: V) -> f32 {
        intrinsic!({
            let eight = _mm256_max_ps(v[0], v[1]);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        })
    }
}
