//! Dequantization to single precision, bit for bit as ggml's reference (`dequantize_row_*` in
//! ggml-quants.c) and PyPI gguf's `quants.dequantize` compute it: the same products and sums in the same
//! order. This file has the types with blocks of 32 and the plain ones; [`super::k_quants`] the rest.

use half::{bf16, f16};

use super::ggml_type::GgmlType;
use super::k_quants;

/// Dequantizes whole blocks of `kind` into little-endian `f32`s.
///
/// `source` is a multiple of the block's bytes and `out` has four bytes for each element of those blocks.
pub fn dequantize(kind: GgmlType, source: &[u8], out: &mut [u8]) {
    match kind {
        GgmlType::F32 => out.copy_from_slice(source),
        GgmlType::F16 => each(source, out, |&block, value: &mut [f32; 1]| {
            value[0] = f16::from_le_bytes(block).to_f32();
        }),
        GgmlType::BF16 => each(source, out, |&block, value: &mut [f32; 1]| {
            value[0] = bf16::from_le_bytes(block).to_f32();
        }),
        GgmlType::Q4_0 => each(source, out, q4_0),
        GgmlType::Q4_1 => each(source, out, q4_1),
        GgmlType::Q5_0 => each(source, out, q5_0),
        GgmlType::Q5_1 => each(source, out, q5_1),
        GgmlType::Q8_0 => each(source, out, q8_0),
        GgmlType::Q2_K => each(source, out, k_quants::q2_k),
        GgmlType::Q3_K => each(source, out, k_quants::q3_k),
        GgmlType::Q4_K => each(source, out, k_quants::q4_k),
        GgmlType::Q5_K => each(source, out, k_quants::q5_k),
        GgmlType::Q6_K => each(source, out, k_quants::q6_k),
        GgmlType::Q8_K => each(source, out, k_quants::q8_k),
    }
}

fn each<const BYTES: usize, const ELEMENTS: usize>(
    source: &[u8],
    out: &mut [u8],
    decode: impl Fn(&[u8; BYTES], &mut [f32; ELEMENTS]),
) {
    let mut values = [0.0; ELEMENTS];
    for (block, out) in source.as_chunks::<BYTES>().0.iter().zip(out.chunks_exact_mut(4 * ELEMENTS)) {
        decode(block, &mut values);
        for (out, value) in out.as_chunks_mut::<4>().0.iter_mut().zip(values) {
            *out = value.to_le_bytes();
        }
    }
}

/// The half-precision number at byte `at` of a block.
pub(super) fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

// Blocks of 32 keep elements 0 to 15 in the low halves of their sixteen bytes and 16 to 31 in the high ones.

fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    for (index, &byte) in block[2..].iter().enumerate() {
        out[index] = scale * (f32::from(byte & 15) - 8.0);
        out[index + 16] = scale * (f32::from(byte >> 4) - 8.0);
    }
}

fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    for (index, &byte) in block[4..].iter().enumerate() {
        out[index] = scale * f32::from(byte & 15) + minimum;
        out[index + 16] = scale * f32::from(byte >> 4) + minimum;
    }
}

/// Element `index` of the 5-bit types: four bits from `low`, the fifth from bit `index` of `high`.
fn five_bits(high: &[u8], low: &[u8], index: usize) -> f32 {
    let nibble = (low[index % 16] >> (index / 16 * 4)) & 15;
    let fifth = (high[index / 8] >> (index % 8)) & 1;
    f32::from(nibble | fifth << 4)
}

fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    for (index, out) in out.iter_mut().enumerate() {
        *out = scale * (five_bits(&block[2..6], &block[6..], index) - 16.0);
    }
}

fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    for (index, out) in out.iter_mut().enumerate() {
        *out = scale * five_bits(&block[4..8], &block[8..], index) + minimum;
    }
}

fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    for (out, &byte) in out.iter_mut().zip(&block[2..]) {
        *out = f32::from(byte.cast_signed()) * scale;
    }
}
