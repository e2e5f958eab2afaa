//! AVX2 with FMA and F16C: 8 lanes.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "each function is a few intrinsics; `Simd` states what callers promise"
)]

use std::arch::x86_64::*;

use super::super::reference::FP4 as FP4_MAGNITUDES;
use super::plain::nibble_order;
use super::{BLOCK, Kernel, Simd, bit_fields};

#[derive(Clone, Copy)]
pub(in super::super) struct Avx2;

// Not inlined into the kernels that enter others: those have loops which need all registers.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
unsafe fn enter<K: Kernel<Avx2>>(kernel: &K, task: usize) {
    kernel.run(task);
}

#[inline(always)]
unsafe fn affine(levels: __m256i, scale: __m256, bias: __m256) -> __m256 {
    _mm256_fmadd_ps(_mm256_cvtepi32_ps(levels), scale, bias)
}

/// Bytes `first` to `first + 7` of 16 that both halves hold, as 32-bit integers.
#[inline(always)]
unsafe fn widen_bytes<const UPPER: bool>(bytes: __m256i) -> __m256i {
    const Z: i8 = -1;
    let spread = if UPPER {
        _mm256_setr_epi8(
            8, Z, Z, Z, 9, Z, Z, Z, 10, Z, Z, Z, 11, Z, Z, Z, 12, Z, Z, Z, 13, Z, Z, Z, 14, Z, Z, Z, 15, Z,
            Z, Z,
        )
    } else {
        _mm256_setr_epi8(
            0, Z, Z, Z, 1, Z, Z, Z, 2, Z, Z, Z, 3, Z, Z, Z, 4, Z, Z, Z, 5, Z, Z, Z, 6, Z, Z, Z, 7, Z, Z, Z,
        )
    };
    _mm256_shuffle_epi8(bytes, spread)
}

/// 4-bit floats: the magnitude by look-up of the low 3 bits, the sign from bit 3.
#[inline(always)]
unsafe fn fp4(codes: __m256i, scale: __m256) -> __m256 {
    let magnitudes = _mm256_permutevar8x32_ps(_mm256_loadu_ps(FP4_MAGNITUDES.as_ptr()), codes);
    let sign = _mm256_and_si256(_mm256_slli_epi32::<28>(codes), _mm256_set1_epi32(i32::MIN));
    _mm256_mul_ps(_mm256_xor_ps(magnitudes, _mm256_castsi256_ps(sign)), scale)
}

impl Simd for Avx2 {
    type F = __m256;
    type Block = [__m256; 4];
    /// Scale and bias.
    type Table = (__m256, __m256);

    const LANES: usize = 8;
    const TILE: usize = 4;
    const COLUMN_BLOCKS: usize = 1;
    const NIBBLE_ORDER: [u8; BLOCK] = nibble_order();

    #[inline(always)]
    unsafe fn enter<K: Kernel<Self>>(kernel: &K, task: usize) {
        enter(kernel, task);
    }

    #[inline(always)]
    unsafe fn zero() -> __m256 {
        _mm256_setzero_ps()
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m256 {
        _mm256_set1_ps(value)
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m256 {
        _mm256_loadu_ps(from)
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, value: __m256) {
        _mm256_storeu_ps(to, value);
    }

    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        _mm256_fmadd_ps(a, b, c)
    }

    #[inline(always)]
    unsafe fn sum4(vectors: [__m256; 4], to: *mut f32) {
        let mut halves = [_mm_setzero_ps(); 4];
        for (half, vector) in halves.iter_mut().zip(vectors) {
            *half = _mm_add_ps(_mm256_castps256_ps128(vector), _mm256_extractf128_ps::<1>(vector));
        }
        let [a, b, c, d] = halves;
        let ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
        let cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
        _mm_storeu_ps(to, _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab)));
    }

    #[inline(always)]
    unsafe fn block_store(to: *mut f32, block: [__m256; 4]) {
        for (index, vector) in block.into_iter().enumerate() {
            _mm256_storeu_ps(to.add(index * 8), vector);
        }
    }

    #[inline(always)]
    unsafe fn block_dot(block: [__m256; 4], x: *const f32, mut accumulator: __m256) -> __m256 {
        for (index, vector) in block.into_iter().enumerate() {
            accumulator = _mm256_fmadd_ps(vector, _mm256_loadu_ps(x.add(index * 8)), accumulator);
        }
        accumulator
    }

    #[inline(always)]
    unsafe fn block_axpy(block: [__m256; 4], x: __m256, accumulators: *mut __m256) {
        for (index, vector) in block.into_iter().enumerate() {
            let accumulator = accumulators.add(index);
            *accumulator = _mm256_fmadd_ps(vector, x, *accumulator);
        }
    }

    #[inline(always)]
    unsafe fn f32s(from: *const f32) -> [__m256; 4] {
        [
            _mm256_loadu_ps(from),
            _mm256_loadu_ps(from.add(8)),
            _mm256_loadu_ps(from.add(16)),
            _mm256_loadu_ps(from.add(24)),
        ]
    }

    #[inline(always)]
    unsafe fn f16s(from: *const u16) -> [__m256; 4] {
        let mut block = [_mm256_setzero_ps(); 4];
        for (index, vector) in block.iter_mut().enumerate() {
            *vector = _mm256_cvtph_ps(_mm_loadu_si128(from.add(index * 8).cast()));
        }
        block
    }

    #[inline(always)]
    unsafe fn bf16s(from: *const u16) -> [__m256; 4] {
        let mut block = [_mm256_setzero_ps(); 4];
        for (index, vector) in block.iter_mut().enumerate() {
            let values = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(index * 8).cast()));
            *vector = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(values));
        }
        block
    }

    #[inline(always)]
    unsafe fn table<const FP4: bool>(scale: f32, bias: f32) -> Self::Table {
        (_mm256_set1_ps(scale), _mm256_set1_ps(bias))
    }

    #[inline(always)]
    unsafe fn nibbles<const FP4: bool, const HALVES: bool>(
        from: *const u8,
        tables: [Self::Table; 2],
    ) -> [__m256; 4] {
        let packed = _mm256_broadcastsi128_si256(_mm_loadu_si128(from.cast()));
        let mask = _mm256_set1_epi8(15);
        let even = _mm256_and_si256(packed, mask);
        let odd = _mm256_and_si256(_mm256_srli_epi16::<4>(packed), mask);
        let codes = [
            widen_bytes::<false>(even),
            widen_bytes::<true>(even),
            widen_bytes::<false>(odd),
            widen_bytes::<true>(odd),
        ];
        let mut block = [_mm256_setzero_ps(); 4];
        for index in 0..4 {
            let (scale, bias) = tables[if HALVES { index % 2 } else { 0 }];
            block[index] = if FP4 { fp4(codes[index], scale) } else { affine(codes[index], scale, bias) };
        }
        block
    }

    #[inline(always)]
    unsafe fn bytes(from: *const u8, scale: __m256, bias: __m256) -> [__m256; 4] {
        let mut block = [_mm256_setzero_ps(); 4];
        for (index, vector) in block.iter_mut().enumerate() {
            let levels = _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.add(index * 8).cast()));
            *vector = affine(levels, scale, bias);
        }
        block
    }

    #[inline(always)]
    unsafe fn bits<const BITS: usize>(from: *const u8, scale: __m256, bias: __m256) -> [__m256; 4] {
        let (bytes, shifts) = const { bit_fields(BITS) };
        let mask = _mm256_set1_epi32((1 << BITS) - 1);
        let mut block = [_mm256_setzero_ps(); 4];
        for half in 0..2 {
            let mut stream = [0u8; 16];
            std::ptr::copy_nonoverlapping(from.add(half * 2 * BITS), stream.as_mut_ptr(), 2 * BITS);
            let stream = _mm256_broadcastsi128_si256(_mm_loadu_si128(stream.as_ptr().cast()));
            for eight in 0..2 {
                let bytes = _mm256_loadu_si256(bytes.as_ptr().add(eight * 32).cast());
                let shifts = _mm256_loadu_si256(shifts.as_ptr().add(eight * 8).cast());
                let fields = _mm256_srlv_epi32(_mm256_shuffle_epi8(stream, bytes), shifts);
                block[half * 2 + eight] = affine(_mm256_and_si256(fields, mask), scale, bias);
            }
        }
        block
    }

    #[inline(always)]
    unsafe fn fp8s(from: *const u8, scale: __m256) -> [__m256; 4] {
        let mut block = [_mm256_setzero_ps(); 4];
        for (index, vector) in block.iter_mut().enumerate() {
            let codes = _mm_cvtepu8_epi16(_mm_loadl_epi64(from.add(index * 8).cast()));
            // As halves: exponent and mantissa 7 bits up, the sign one further.
            let shifted = _mm_slli_epi16::<7>(codes);
            let halves = _mm_add_epi16(shifted, _mm_and_si128(shifted, _mm_set1_epi16(0x4000)));
            let values = _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(256.0));
            *vector = _mm256_mul_ps(values, scale);
        }
        block
    }

    #[inline(always)]
    unsafe fn widen_f16(from: *const u16, count: usize, to: *mut f32) {
        let whole = count / 8 * 8;
        for index in (0..whole).step_by(8) {
            let values = _mm_loadu_si128(from.add(index).cast());
            _mm256_storeu_ps(to.add(index), _mm256_cvtph_ps(values));
        }
        for index in whole..count {
            let value = _mm_cvtsi32_si128(i32::from(*from.add(index)));
            *to.add(index) = _mm_cvtss_f32(_mm_cvtph_ps(value));
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
        let whole = from.len() / 8 * 8;
        for index in (0..whole).step_by(8) {
            let values = _mm256_loadu_ps(from.as_ptr().add(index));
            let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values);
            _mm_storeu_si128(to.add(index).cast(), halves);
        }
        for index in whole..from.len() {
            let half = _mm_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm_set_ss(from[index]));
            *to.add(index) = _mm_extract_epi16::<0>(half) as u16;
        }
    }

    #[inline(always)]
    unsafe fn prefetch(from: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(from.cast());
    }
}
