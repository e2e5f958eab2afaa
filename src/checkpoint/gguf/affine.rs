//! Q4_0, Q4_1 and Q8_0 in MLX's affine layout, without loss.
//!
//! MLX holds a row as `bits`-wide unsigned integers, first element in the lowest bits of the first `u32`,
//! and a scale and a bias for each group of 32; an element is `q * scale + bias`. With ggml's block scale `d`:
//!
//! | type | q                | scale | bias   |
//! |------|------------------|-------|--------|
//! | Q4_1 | as stored        | d     | m      |
//! | Q4_0 | as stored        | d     | -8 d   |
//! | Q8_0 | stored + 128     | d     | -128 d |
//!
//! These are the same real numbers. In `f32` they are also the same bits as ggml's, fused or not:
//! `q * scale` has at most 8 + 11 significant bits, so it is exact; for Q4_0 and Q8_0 the sum is exact as well
//! (only the sign of a zero can differ), and for Q4_1 it is rounded once on either side. In half precision
//! `q * scale` is rounded, as for any MLX model. The bias is a power of two times `d`, hence exact unless it
//! overflows; a tensor with a block where it does, or whose scale is not finite, is dequantized instead.

use half::f16;

use super::ggml_type::GgmlType;

/// Elements that share a scale, in ggml and here.
pub const GROUP: usize = 32;

/// Bits an element keeps in the affine layout, if `kind` fits it.
pub fn bits(kind: GgmlType) -> Option<usize> {
    match kind {
        GgmlType::Q4_0 | GgmlType::Q4_1 => Some(4),
        GgmlType::Q8_0 => Some(8),
        _ => None,
    }
}

/// Where repacked blocks go: packed integers, half-precision scales and biases, all little-endian.
pub struct Target<'a> {
    /// `bits` times four bytes a block.
    pub weight: &'a mut [u8],
    /// Two bytes a block.
    pub scales: &'a mut [u8],
    /// Two bytes a block.
    pub biases: &'a mut [u8],
}

/// Repacks whole blocks. Returns whether all of them could be held exactly; what is written otherwise is
/// of no use.
#[must_use]
pub fn repack(kind: GgmlType, source: &[u8], target: Target<'_>) -> bool {
    match kind {
        GgmlType::Q4_0 => each(source, target, |block: &[u8; 18], weight: &mut [u8; 16]| {
            nibbles(&block[2..], weight);
            offset_by([block[0], block[1]], -8.0)
        }),
        GgmlType::Q4_1 => each(source, target, |block: &[u8; 20], weight: &mut [u8; 16]| {
            nibbles(&block[4..], weight);
            finite([block[0], block[1]], [block[2], block[3]])
        }),
        GgmlType::Q8_0 => each(source, target, |block: &[u8; 34], weight: &mut [u8; 32]| {
            for (out, byte) in weight.as_chunks_mut::<8>().0.iter_mut().zip(block[2..].as_chunks::<8>().0) {
                // Adding 128 to a signed byte flips its top bit.
                *out = (u64::from_le_bytes(*byte) ^ 0x8080_8080_8080_8080).to_le_bytes();
            }
            offset_by([block[0], block[1]], -128.0)
        }),
        _ => false,
    }
}

type ScaleAndBias = ([u8; 2], [u8; 2]);

fn each<const BYTES: usize, const PACKED: usize>(
    source: &[u8],
    target: Target<'_>,
    convert: impl Fn(&[u8; BYTES], &mut [u8; PACKED]) -> Option<ScaleAndBias>,
) -> bool {
    let blocks = source.as_chunks::<BYTES>().0.iter();
    let weights = target.weight.as_chunks_mut::<PACKED>().0.iter_mut();
    let scales = target.scales.as_chunks_mut::<2>().0.iter_mut();
    let biases = target.biases.as_chunks_mut::<2>().0.iter_mut();
    for (((block, weight), scale), bias) in blocks.zip(weights).zip(scales).zip(biases) {
        match convert(block, weight) {
            Some(pair) => (*scale, *bias) = pair,
            None => return false,
        }
    }
    true
}

/// ggml keeps elements 0 to 15 in the low halves of sixteen bytes and 16 to 31 in the high ones; MLX wants
/// neighbours in one byte. Eight bytes at a time: keep one half of each and close the gaps.
fn nibbles(stored: &[u8], weight: &mut [u8; 16]) {
    let (low, high) = weight.split_at_mut(8);
    let halves = low.as_chunks_mut::<4>().0.iter_mut().zip(high.as_chunks_mut::<4>().0);
    for (bytes, (low, high)) in stored.as_chunks::<8>().0.iter().zip(halves) {
        let bytes = u64::from_le_bytes(*bytes);
        *low = gather_low_nibbles(bytes).to_le_bytes();
        *high = gather_low_nibbles(bytes >> 4).to_le_bytes();
    }
}

fn gather_low_nibbles(bytes: u64) -> u32 {
    let nibbles = bytes & 0x0f0f_0f0f_0f0f_0f0f;
    let bytes = (nibbles | nibbles >> 4) & 0x00ff_00ff_00ff_00ff;
    let words = (bytes | bytes >> 8) & 0x0000_ffff_0000_ffff;
    (words | words >> 16) as u32
}

fn offset_by(scale: [u8; 2], factor: f32) -> Option<ScaleAndBias> {
    let product = f16::from_le_bytes(scale).to_f32() * factor;
    let bias = f16::from_f32(product);
    (bias.to_f32() == product && bias.is_finite()).then(|| (scale, bias.to_le_bytes()))
}

fn finite(scale: [u8; 2], bias: [u8; 2]) -> Option<ScaleAndBias> {
    (f16::from_le_bytes(scale).is_finite() && f16::from_le_bytes(bias).is_finite()).then_some((scale, bias))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repacked(kind: GgmlType, block: &[u8], bits: usize) -> Option<Vec<f32>> {
        let (mut weight, mut scale, mut bias) = (vec![0; bits * 4], [0; 2], [0; 2]);
        let target = Target { weight: &mut weight, scales: &mut scale, biases: &mut bias };
        if !repack(kind, block, target) {
            return None;
        }
        let (scale, bias) = (f16::from_le_bytes(scale).to_f32(), f16::from_le_bytes(bias).to_f32());
        let element = |index: usize| {
            let bit = index * bits;
            let word = u32::from_le_bytes(weight[bit / 32 * 4..][..4].try_into().unwrap());
            (word >> (bit % 32)) & ((1 << bits) - 1)
        };
        Some((0..GROUP).map(|index| element(index) as f32 * scale + bias).collect())
    }

    fn block(kind: GgmlType, scale: f16, minimum: f16) -> Vec<u8> {
        let mut block = scale.to_le_bytes().to_vec();
        if kind == GgmlType::Q4_1 {
            block.extend(minimum.to_le_bytes());
        }
        let quants = kind.block_bytes() - block.len();
        block.extend((0..quants).map(|index| (index * 89 + 17) as u8));
        block
    }

    /// Every half-precision scale there is: equal to the dequantized block, or refused because the bias
    /// overflows or the scale is no number.
    #[test]
    fn every_scale_is_exact_or_refused() {
        for kind in [GgmlType::Q4_0, GgmlType::Q4_1, GgmlType::Q8_0] {
            let bits = bits(kind).unwrap();
            for pattern in 0..=u16::MAX {
                let scale = f16::from_bits(pattern);
                let block = block(kind, scale, f16::from_bits(pattern.rotate_left(5)));
                let mut expected = vec![0; GROUP * 4];
                super::super::blocks::dequantize(kind, &block, &mut expected);
                let expected: Vec<f32> =
                    expected.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
                match repacked(kind, &block, bits) {
                    Some(found) => assert_eq!(found, expected, "{kind:?} {scale:e}"),
                    None => {
                        let limit = match kind {
                            GgmlType::Q4_0 => 65504.0 / 8.0,
                            GgmlType::Q8_0 => 65504.0 / 128.0,
                            _ => 65504.0,
                        };
                        let numbers = expected.iter().all(|value| value.is_finite());
                        assert!(!numbers || scale.to_f32().abs() > limit, "{kind:?} {scale:e}");
                    }
                }
            }
        }
    }
}
