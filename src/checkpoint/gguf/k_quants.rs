//! The "k-quants": blocks of 256 elements whose sub-blocks have quantized scales of their own
//! (ggml-quants.c). Sixteen-element sub-blocks for Q2_K, Q3_K and Q6_K, thirty-two for Q4_K and Q5_K.

use super::blocks::half_at;

/// `d * scale * q - dmin * minimum`; a byte per sub-block holds scale (low) and minimum (high).
pub(super) fn q2_k(block: &[u8; 84], out: &mut [f32; 256]) {
    let (scales, quants) = (&block[..16], &block[16..80]);
    let (d, dmin) = (half_at(block, 80), half_at(block, 82));
    for (index, out) in out.iter_mut().enumerate() {
        let packed = scales[index / 16];
        let scale = d * f32::from(packed & 15);
        let minimum = dmin * f32::from(packed >> 4);
        *out = scale * f32::from(two_bits(quants, index)) - minimum;
    }
}

/// `d * (scale - 32) * (q - 4 or q)`: the third bit lies in a mask of its own, inverted.
pub(super) fn q3_k(block: &[u8; 110], out: &mut [f32; 256]) {
    let (mask, quants, packed) = (&block[..32], &block[32..96], &block[96..108]);
    let d = half_at(block, 108);
    for (index, out) in out.iter_mut().enumerate() {
        let sub = index / 16;
        let low = (packed[sub % 8] >> (sub / 8 * 4)) & 15;
        let high = (packed[8 + sub % 4] >> (sub / 4 * 2)) & 3;
        let scale = d * (f32::from(low | high << 4) - 32.0);
        let third = (mask[index % 32] >> (index / 32)) & 1;
        let offset = if third == 1 { 0.0 } else { 4.0 };
        *out = scale * (f32::from(two_bits(quants, index)) - offset);
    }
}

/// `d * scale * q - dmin * minimum`, 4 bits.
pub(super) fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let (scales, quants) = (&block[4..16], &block[16..]);
    for (sub, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, minimum) = scale_and_minimum(scales, sub);
        let (scale, minimum) = (d * scale, dmin * minimum);
        for (lane, out) in out.iter_mut().enumerate() {
            *out = scale * f32::from(nibble(quants, sub, lane)) - minimum;
        }
    }
}

/// `d * scale * q - dmin * minimum`, 5 bits: the fifth of sub-block `s` is bit `s` of 32 extra bytes.
pub(super) fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let (scales, high, quants) = (&block[4..16], &block[16..48], &block[48..]);
    for (sub, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, minimum) = scale_and_minimum(scales, sub);
        let (scale, minimum) = (d * scale, dmin * minimum);
        for (lane, out) in out.iter_mut().enumerate() {
            let fifth = (high[lane] >> sub) & 1;
            *out = scale * f32::from(nibble(quants, sub, lane) | fifth << 4) - minimum;
        }
    }
}

/// `d * scale * (q - 32)` with signed 8-bit scales.
pub(super) fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let d = half_at(block, 208);
    for (index, out) in out.iter_mut().enumerate() {
        // Each half of the block: 64 bytes of nibbles (two rounds over them), 32 bytes of bit pairs (four).
        let (part, within) = (index / 128, index % 128);
        let nibble = (low[part * 64 + within % 64] >> (within / 64 * 4)) & 15;
        let pair = (high[part * 32 + within % 32] >> (within / 32 * 2)) & 3;
        let scale = d * f32::from(scales[index / 16].cast_signed());
        *out = scale * (f32::from(nibble | pair << 4) - 32.0);
    }
}

/// `d * q` with a single-precision scale; the sums of sixteen at the end are for dot products only.
pub(super) fn q8_k(block: &[u8; 292], out: &mut [f32; 256]) {
    let d = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
    for (out, &byte) in out.iter_mut().zip(&block[4..260]) {
        *out = d * f32::from(byte.cast_signed());
    }
}

/// Bit pair `index` of Q2_K and Q3_K: each run of 32 bytes holds 128 elements, in four rounds.
fn two_bits(quants: &[u8], index: usize) -> u8 {
    let (part, within) = (index / 128, index % 128);
    (quants[part * 32 + within % 32] >> (within / 32 * 2)) & 3
}

/// Element `lane` of sub-block `sub` of Q4_K and Q5_K: each run of 32 bytes holds two sub-blocks.
fn nibble(quants: &[u8], sub: usize, lane: usize) -> u8 {
    (quants[sub / 2 * 32 + lane] >> (sub % 2 * 4)) & 15
}

/// The 6-bit scale and minimum of sub-block `sub`, packed in twelve bytes: four scales, four minimums, then
/// the low halves of the other four of both, whose high bits sit atop the first eight bytes.
fn scale_and_minimum(packed: &[u8], sub: usize) -> (f32, f32) {
    if sub < 4 {
        return (f32::from(packed[sub] & 63), f32::from(packed[sub + 4] & 63));
    }
    let (low, scale, minimum) = (packed[sub + 4], packed[sub - 4], packed[sub]);
    (f32::from((low & 15) | (scale >> 2 & 48)), f32::from((low >> 4) | (minimum >> 2 & 48)))
}
