//! MLX's affine groups: `code * scale + bias`, codes of 2 to 8 bits as one little-endian stream of bits a row.

use super::error::KernelError;
use super::floats::Floats;
use super::simd::{Element, LANES, Simd, load_part};

/// Bits of a code that MLX packs.
pub(super) const WIDTHS: [usize; 6] = [2, 3, 4, 5, 6, 8];

/// Elements that may share a scale.
pub(super) const GROUPS: [usize; 3] = [32, 64, 128];

/// The codes `first..first + 16` of a row; `first` is a multiple of 16.
#[inline(always)]
fn codes<S: Simd>(s: S, words: &[u32], bits: usize, first: usize) -> S::V {
    let at = |i: usize| words.get(i).copied().unwrap_or(0);
    let word = first * bits / 32;
    match bits {
        4 => {
            let pair = u64::from(at(word)) | u64::from(at(word + 1)) << 32;
            s.load_u4(&pair.to_le_bytes())
        }
        8 => {
            let mut bytes = [0; LANES];
            for (i, to) in bytes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                *to = at(word + i).to_le_bytes();
            }
            s.load_u8(&bytes)
        }
        _ => {
            let mut bytes = [0; LANES];
            for (i, to) in bytes.iter_mut().enumerate() {
                let bit = (first + i) * bits;
                let pair = u64::from(at(bit / 32)) | u64::from(at(bit / 32 + 1)) << 32;
                *to = (pair >> (bit % 32)) as u8 & ((1 << bits) - 1);
            }
            s.load_u8(&bytes)
        }
    }
}

/// Writes a row's values, in float32, to `to`, whose length is a multiple of 32; `scales` and `biases` have one
/// entry for every `group` of them.
#[inline(always)]
pub(super) fn dequantize_row<S: Simd, E: Element>(
    s: S,
    bits: usize,
    group: usize,
    words: &[u32],
    scales: &[E],
    biases: &[E],
    to: &mut [f32],
) {
    for (i, span) in to.chunks_mut(LANES * group).enumerate() {
        // Sixteen groups at a time, since half-precision scales convert best as a vector.
        let (mut scale, mut bias) = ([0.0; LANES], [0.0; LANES]);
        let part = i * LANES..scales.len().min((i + 1) * LANES);
        s.store(&mut scale, load_part(s, &scales[part.clone()]));
        s.store(&mut bias, load_part(s, &biases[part]));
        for (j, to) in span.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            let code = codes(s, words, bits, i * LANES * group + j * LANES);
            let of = j * LANES / group;
            s.store(to, s.mul_add(code, s.splat(scale[of]), s.splat(bias[of])));
        }
    }
}

/// Checks the widths of affine groups of `dim` values a row.
pub(super) fn check(
    op: &'static str,
    bits: usize,
    group: usize,
    dim: usize,
) -> Result<(), KernelError> {
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
