//! MLX's affine groups: `code * scale + bias`, codes of 2 to 8 bits as one little-endian stream of bits a row.

use super::error::KernelError;
use super::floats::Floats;
use super::simd::{Element, LANES, Simd};

/// Bits of a code that MLX packs.
pub(super) const WIDTHS: [usize; 6] = [2, 3, 4, 5, 6, 8];

/// Elements that may share a scale.
pub(super) const GROUPS: [usize; 3] = [32, 64, 128];

/// Affine groups of one row.
#[derive(Clone, Copy)]
pub(super) struct AffineRow<'a, E> {
    pub words: &'a [u32],
    /// One entry a group, as in `biases`.
    pub scales: &'a [E],
    pub biases: &'a [E],
}

/// Writes a row's values in float32 to `to`, which holds whole groups.
#[inline(always)]
pub(super) fn dequantize_row<S: Simd, E: Element>(
    s: S,
    bits: usize,
    group: usize,
    row: AffineRow<'_, E>,
    to: &mut [f32],
) {
    let to = to.as_chunks_mut::<LANES>().0;
    let vectors = group / LANES;
    let entries = row.scales.iter().zip(row.biases).enumerate();
    for (g, (scale, bias)) in entries {
        let (scale, bias) = (scale.splat(s), bias.splat(s));
        let to = &mut to[g * vectors..][..vectors];
        // Sixteen codes take half a word a bit.
        let words = &row.words[g * vectors * bits / 2..][..vectors * bits / 2];
        match bits {
            4 => {
                for (to, words) in to.iter_mut().zip(words.as_chunks().0) {
                    s.store(to, s.mul_add(s.load_u4(words), scale, bias));
                }
            }
            8 => {
                for (to, words) in to.iter_mut().zip(words.as_chunks().0) {
                    s.store(to, s.mul_add(s.load_u8(words), scale, bias));
                }
            }
            _ => {
                for (i, to) in to.iter_mut().enumerate() {
                    let codes = spread(words, bits, i * LANES);
                    s.store(to, s.mul_add(s.load_u8(&codes), scale, bias));
                }
            }
        }
    }
}

/// The codes `first..first + 16`, a byte each.
#[inline(always)]
fn spread(words: &[u32], bits: usize, first: usize) -> [u32; LANES / 4] {
    let mut spread = [0; LANES / 4];
    for i in 0..LANES {
        let bit = (first + i) * bits;
        let high = words.get(bit / 32 + 1).copied().unwrap_or(0);
        let pair = u64::from(words[bit / 32]) | u64::from(high) << 32;
        let code = (pair >> (bit % 32)) as u32 & ((1 << bits) - 1);
        spread[i / 4] |= code << (8 * (i % 4));
    }
    spread
}

/// Checks the widths of affine groups of `dim` values a row.
pub(super) fn check(op: &'static str, bits: usize, group: usize, dim: usize) -> Result<(), KernelError> {
    if !WIDTHS.contains(&bits) {
        return Err(KernelError::Unsupported { op, what: "bits", found: bits, rule: "2, 3, 4, 5, 6 or 8" });
    }
    if !GROUPS.contains(&group) {
        return Err(KernelError::Unsupported { op, what: "the group", found: group, rule: "32, 64 or 128" });
    }
    if !dim.is_multiple_of(group) {
        let (what, rule) = ("the quantized dimension", "a multiple of the group");
        return Err(KernelError::Unsupported { op, what, found: dim, rule });
    }
    Ok(())
}

/// Checks that scales and biases have one type.
pub(super) fn expect_one_type(
    op: &'static str,
    scales: &Floats<'_>,
    biases: &Floats<'_>,
) -> Result<(), KernelError> {
    if std::mem::discriminant(scales) == std::mem::discriminant(biases) {
        Ok(())
    } else {
        Err(KernelError::MixedTypes { op, what: "scales and biases" })
    }
}
