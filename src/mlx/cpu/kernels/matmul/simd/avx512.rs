//! AVX-512 (F, BW, DQ, VL): 16 lanes.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "each function is a few intrinsics; `Simd` states what callers promise"
)]

use std::arch::x86_64::*;

use super::super::reference::FP4;
use super::{BLOCK, Kernel, Simd, bit_fields};

#[derive(Clone, Copy)]
pub(in super::super) struct Avx512;

// Not inlined into the kernels that enter others: those have loops which need all registers.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")]
unsafe fn enter<K: Kernel<Avx512>>(kernel: &K, task: usize) {
    kernel.run(task);
}

/// Lane `l` of vector `c` takes nibble `l / 4 + 4 c` of word `l % 4`.
const fn nibble_order() -> [u8; BLOCK] {
    let mut order = [0; BLOCK];
    let mut position = 0;
    while position < BLOCK {
        let (vector, lane) = (position / 16, position % 16);
        order[position] = (8 * (lane % 4) + lane / 4 + 4 * vector) as u8;
        position += 1;
    }
    order
}

/// Lanes whose word holds elements 16 to 31.
const UPPER: __mmask16 = 0b1100_1100_1100_1100;

static LEVELS: [f32; 16] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0];

static FP4_LEVELS: [f32; 16] = {
    let mut levels = [0.0; 16];
    let mut code = 0;
    while code < 8 {
        levels[code] = FP4[code];
        levels[code + 8] = -FP4[code];
        code += 1;
    }
    levels
};

#[inline(always)]
unsafe fn affine(levels: __m512i, scale: __m512, bias: __m512) -> __m512 {
    _mm512_fmadd_ps(_mm512_cvtepi32_ps(levels), scale, bias)
}

#[inline(always)]
fn tail_mask(count: usize) -> __mmask16 {
    if count >= 16 { !0 } else { (1 << count) - 1 }
}

impl Simd for Avx512 {
    type F = __m512;
    type Block = [__m512; 2];
    type Table = __m512;

    const LANES: usize = 16;
    const TILE: usize = 8;
    const COLUMN_BLOCKS: usize = 4;
    const NIBBLE_ORDER: [u8; BLOCK] = nibble_order();

    #[inline(always)]
    unsafe fn enter<K: Kernel<Self>>(kernel: &K, task: usize) {
        enter(kernel, task);
    }

    #[inline(always)]
    unsafe fn zero() -> __m512 {
        _mm512_setzero_ps()
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m512 {
        _mm512_set1_ps(value)
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        _mm512_loadu_ps(from)
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, value: __m512) {
        _mm512_storeu_ps(to, value);
    }

    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }

    #[inline(always)]
    unsafe fn sum4([a, b, c, d]: [__m512; 4], to: *mut f32) {
        // Quarters A0..A3 of each: first A0+A2 and A1+A3, then their sum, then the same within the quarters.
        let ab = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
        let cd = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xee>(c, d));
        let sum = _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(ab, cd), _mm512_shuffle_f32x4::<0xdd>(ab, cd));
        let sum = _mm512_add_ps(sum, _mm512_permute_ps::<0b01_00_11_10>(sum));
        let sum = _mm512_add_ps(sum, _mm512_permute_ps::<0b10_11_00_01>(sum));
        let first = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
        _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_permutexvar_ps(first, sum)));
    }

    #[inline(always)]
    unsafe fn block_store(to: *mut f32, block: [__m512; 2]) {
        _mm512_storeu_ps(to, block[0]);
        _mm512_storeu_ps(to.add(16), block[1]);
    }

    #[inline(always)]
    unsafe fn block_dot(block: [__m512; 2], x: *const f32, accumulator: __m512) -> __m512 {
        let accumulator = _mm512_fmadd_ps(block[0], _mm512_loadu_ps(x), accumulator);
        _mm512_fmadd_ps(block[1], _mm512_loadu_ps(x.add(16)), accumulator)
    }

    #[inline(always)]
    unsafe fn block_axpy(block: [__m512; 2], x: __m512, accumulators: *mut __m512) {
        *accumulators = _mm512_fmadd_ps(block[0], x, *accumulators);
        *accumulators.add(1) = _mm512_fmadd_ps(block[1], x, *accumulators.add(1));
    }

    #[inline(always)]
    unsafe fn f32s(from: *const f32) -> [__m512; 2] {
        [_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(16))]
    }

    #[inline(always)]
    unsafe fn f16s(from: *const u16) -> [__m512; 2] {
        let first = _mm256_loadu_si256(from.cast());
        let second = _mm256_loadu_si256(from.add(16).cast());
        [_mm512_cvtph_ps(first), _mm512_cvtph_ps(second)]
    }

    #[inline(always)]
    unsafe fn bf16s(from: *const u16) -> [__m512; 2] {
        let first = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
        let second = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.add(16).cast()));
        [
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(first)),
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(second)),
        ]
    }

    #[inline(always)]
    unsafe fn table<const FP4: bool>(scale: f32, bias: f32) -> __m512 {
        if FP4 {
            _mm512_mul_ps(_mm512_loadu_ps(FP4_LEVELS.as_ptr()), _mm512_set1_ps(scale))
        } else {
            let levels = _mm512_loadu_ps(LEVELS.as_ptr());
            _mm512_fmadd_ps(levels, _mm512_set1_ps(scale), _mm512_set1_ps(bias))
        }
    }

    #[inline(always)]
    unsafe fn nibbles<const FP4: bool, const HALVES: bool>(
        from: *const u8,
        tables: [__m512; 2],
    ) -> [__m512; 2] {
        let words = _mm512_broadcast_i32x4(_mm_loadu_si128(from.cast()));
        let shift = _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
        let first = _mm512_srlv_epi32(words, shift);
        let second = _mm512_srlv_epi32(words, _mm512_add_epi32(shift, _mm512_set1_epi32(16)));
        // A permute reads the low 4 bits of each lane.
        let mut block = [_mm512_permutexvar_ps(first, tables[0]), _mm512_permutexvar_ps(second, tables[0])];
        if HALVES {
            block[0] = _mm512_mask_permutexvar_ps(block[0], UPPER, first, tables[1]);
            block[1] = _mm512_mask_permutexvar_ps(block[1], UPPER, second, tables[1]);
        }
        block
    }

    #[inline(always)]
    unsafe fn bytes(from: *const u8, scale: __m512, bias: __m512) -> [__m512; 2] {
        let first = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()));
        let second = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.add(16).cast()));
        [affine(first, scale, bias), affine(second, scale, bias)]
    }

    #[inline(always)]
    unsafe fn bits<const BITS: usize>(from: *const u8, scale: __m512, bias: __m512) -> [__m512; 2] {
        let (bytes, shifts) = const { bit_fields(BITS) };
        let bytes = _mm512_loadu_si512(bytes.as_ptr().cast());
        let shifts = _mm512_loadu_si512(shifts.as_ptr().cast());
        let mask = _mm512_set1_epi32((1 << BITS) - 1);
        let valid = ((1u32 << (2 * BITS)) - 1) as __mmask16;
        let mut block = [_mm512_setzero_ps(); 2];
        for (half, block) in block.iter_mut().enumerate() {
            // Bytes that are masked off are not touched.
            let stream = _mm_maskz_loadu_epi8(valid, from.add(half * 2 * BITS).cast());
            let fields = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(stream), bytes);
            *block = affine(_mm512_and_si512(_mm512_srlv_epi32(fields, shifts), mask), scale, bias);
        }
        block
    }

    #[inline(always)]
    unsafe fn fp8s(from: *const u8, scale: __m512) -> [__m512; 2] {
        let mut block = [_mm512_setzero_ps(); 2];
        for (half, block) in block.iter_mut().enumerate() {
            let codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(from.add(half * 16).cast()));
            // As halves: exponent and mantissa 7 bits up, the sign one further.
            let shifted = _mm256_slli_epi16::<7>(codes);
            let sign = _mm256_and_si256(shifted, _mm256_set1_epi16(0x4000));
            let halves = _mm512_cvtph_ps(_mm256_add_epi16(shifted, sign));
            let values = _mm512_mul_ps(halves, _mm512_set1_ps(256.0));
            *block = _mm512_mul_ps(values, scale);
        }
        block
    }

    #[inline(always)]
    unsafe fn widen_f16(from: *const u16, count: usize, to: *mut f32) {
        for index in (0..count).step_by(16) {
            let mask = tail_mask(count - index);
            let values = _mm256_maskz_loadu_epi16(mask, from.add(index).cast());
            _mm512_mask_storeu_ps(to.add(index), mask, _mm512_cvtph_ps(values));
        }
    }

    #[inline(always)]
    unsafe fn widen_bf16(from: *const u16, count: usize, to: *mut f32) {
        for index in (0..count).step_by(16) {
            let mask = tail_mask(count - index);
            let values = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from.add(index).cast()));
            let values = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(values));
            _mm512_mask_storeu_ps(to.add(index), mask, values);
        }
    }

    #[inline(always)]
    unsafe fn scales_f16(from: *const u16, count: usize, to: *mut f32) {
        let whole = count / 16 * 16;
        for index in (0..whole).step_by(16) {
            let values = _mm256_loadu_si256(from.add(index).cast());
            _mm512_storeu_ps(to.add(index), _mm512_cvtph_ps(values));
        }
        if whole < count {
            let values = _mm256_maskz_loadu_epi16(tail_mask(count - whole), from.add(whole).cast());
            _mm512_storeu_ps(to.add(whole), _mm512_cvtph_ps(values));
        }
    }

    #[inline(always)]
    unsafe fn scales_bf16(from: *const u16, count: usize, to: *mut f32) {
        let whole = count / 16 * 16;
        for index in (0..whole).step_by(16) {
            let values = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.add(index).cast()));
            _mm512_storeu_ps(to.add(index), _mm512_castsi512_ps(_mm512_slli_epi32::<16>(values)));
        }
        if whole < count {
            let values = _mm256_maskz_loadu_epi16(tail_mask(count - whole), from.add(whole).cast());
            let values = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(values));
            _mm512_storeu_ps(to.add(whole), _mm512_castsi512_ps(values));
        }
    }

    #[inline(always)]
    unsafe fn narrow_f16(from: &[f32], to: *mut u16) {
        for index in (0..from.len()).step_by(16) {
            let mask = tail_mask(from.len() - index);
            let values = _mm512_maskz_loadu_ps(mask, from.as_ptr().add(index));
            let halves = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values);
            _mm256_mask_storeu_epi16(to.add(index).cast(), mask, halves);
        }
    }

    #[inline(always)]
    unsafe fn arrange_nibbles(from: *const f32, to: *mut f32) {
        let (low, high) = (_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(16)));
        let first = _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
        let second = _mm512_add_epi32(first, _mm512_set1_epi32(4));
        _mm512_storeu_ps(to, _mm512_permutex2var_ps(low, first, high));
        _mm512_storeu_ps(to.add(16), _mm512_permutex2var_ps(low, second, high));
    }

    #[inline(always)]
    unsafe fn prefetch(from: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(from.cast());
    }
}
