//! Numbers into ggml's blocks, as ggml's reference (`quantize_row_*_ref` in ggml-quants.c) and PyPI gguf's
//! `quants.quantize` make them; and MLX's affine groups of 32 moved into blocks where these hold the same numbers.

use half::f16;

use super::affine::GROUP;
use super::ggml_type::GgmlType;

/// Encodes numbers whose count is a multiple of the block's elements. `None` when one does not fit the type, half
/// precision being the narrowest here.
pub fn encode(kind: GgmlType, values: &[f32]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(values.len() / kind.block_elements() * kind.block_bytes());
    let fits = match kind {
        GgmlType::F32 => {
            values.iter().for_each(|value| out.extend(value.to_le_bytes()));
            true
        }
        GgmlType::F16 => values.iter().all(|&value| put_half(value, &mut out)),
        GgmlType::Q4_0 => blocks(values).all(|block| q4_0(block, &mut out)),
        GgmlType::Q4_1 => blocks(values).all(|block| q4_1(block, &mut out)),
        GgmlType::Q8_0 => blocks(values).all(|block| q8_0(block, &mut out)),
        _ => false,
    };
    fits.then_some(out)
}

fn blocks(values: &[f32]) -> impl Iterator<Item = &[f32; GROUP]> {
    values.as_chunks::<GROUP>().0.iter()
}

/// Writes a number in half precision; whether it is finite there.
fn put_half(value: f32, out: &mut Vec<u8>) -> bool {
    let half = f16::from_f32(value);
    out.extend(half.to_le_bytes());
    half.is_finite()
}

fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

fn q4_0(block: &[f32; GROUP], out: &mut Vec<u8>) -> bool {
    let largest =
        block.iter().fold(0.0f32, |best, &value| if value.abs() > best.abs() { value } else { best });
    let scale = largest / -8.0;
    let inverse = inverse(scale);
    let fits = put_half(scale, out);
    nibbles(block, out, |value| (value * inverse + 8.5) as u8);
    fits
}

fn q4_1(block: &[f32; GROUP], out: &mut Vec<u8>) -> bool {
    let low = block.iter().copied().fold(f32::INFINITY, f32::min);
    let high = block.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let scale = (high - low) / 15.0;
    let inverse = inverse(scale);
    let fits = put_half(scale, out) & put_half(low, out);
    nibbles(block, out, |value| ((value - low) * inverse + 0.5) as u8);
    fits
}

fn q8_0(block: &[f32; GROUP], out: &mut Vec<u8>) -> bool {
    let largest = block.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    let scale = largest / 127.0;
    let inverse = inverse(scale);
    let fits = put_half(scale, out);
    out.extend(block.iter().map(|value| ((value * inverse).round() as i8).cast_unsigned()));
    fits
}

/// Sixteen bytes: elements 0 to 15 in the low halves, 16 to 31 in the high ones.
fn nibbles(block: &[f32; GROUP], out: &mut Vec<u8>, code: impl Fn(f32) -> u8) {
    let (low, high) = block.split_at(GROUP / 2);
    out.extend(low.iter().zip(high).map(|(&low, &high)| code(low).min(15) | code(high).min(15) << 4));
}

/// One group of 32 in MLX's affine layout.
#[derive(Clone, Copy, Debug)]
pub struct AffineGroup<'a> {
    /// Its packed integers: 16 bytes at 4 bits, 32 at 8.
    pub packed: &'a [u8],
    /// What they are multiplied by.
    pub scale: f32,
    /// What is added.
    pub bias: f32,
}

impl AffineGroup<'_> {
    /// Appends the block of `kind` that stands for the same numbers; `false`, with nothing of use appended, when there
    /// is none.
    pub fn encode(self, kind: GgmlType, out: &mut Vec<u8>) -> bool {
        let exact =
            |value: f32| Some(f16::from_f32(value)).filter(|half| half.to_f32() == value && half.is_finite());
        let Some(scale) = exact(self.scale) else { return false };
        out.extend(scale.to_le_bytes());
        match kind {
            GgmlType::Q4_0 if self.bias == self.scale * -8.0 => self.nibbles(out),
            GgmlType::Q4_1 => match exact(self.bias) {
                Some(bias) => {
                    out.extend(bias.to_le_bytes());
                    self.nibbles(out)
                }
                None => false,
            },
            GgmlType::Q8_0 if self.bias == self.scale * -128.0 => {
                out.extend(self.packed.iter().map(|code| code ^ 0x80));
                self.packed.len() == GROUP
            }
            _ => false,
        }
    }

    /// MLX keeps neighbours in one byte, ggml those that are sixteen apart.
    fn nibbles(self, out: &mut Vec<u8>) -> bool {
        let Ok(packed) = <&[u8; 16]>::try_from(self.packed) else { return false };
        let code = |index: usize| (packed[index / 2] >> (index % 2 * 4)) & 15;
        out.extend((0..16).map(|index| code(index) | code(index + 16) << 4));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::affine::{Target, bits, repack};
    use super::super::blocks::dequantize;
    use super::*;

    const KINDS: [GgmlType; 3] = [GgmlType::Q4_0, GgmlType::Q4_1, GgmlType::Q8_0];

    fn sample() -> Vec<f32> {
        (0..GROUP * 64)
            .map(|i| ((i * 7919 % 1013) as f32 / 506.5 - 1.0) * 2f32.powi((i / 32 % 12) as i32 - 8))
            .collect()
    }

    fn decoded(kind: GgmlType, bytes: &[u8]) -> Vec<f32> {
        let mut out = vec![0; bytes.len() / kind.block_bytes() * GROUP * 4];
        dequantize(kind, bytes, &mut out);
        out.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    #[test]
    fn errors_stay_below_one_step() {
        for (kind, steps) in KINDS.into_iter().zip([8.0, 15.0, 127.0]) {
            let values = sample();
            let back = decoded(kind, &encode(kind, &values).unwrap());
            for (group, values) in values.chunks(GROUP).enumerate() {
                let reach = values.iter().fold(0.0f32, |most, value| most.max(value.abs()));
                let step = if kind == GgmlType::Q4_1 { 2.0 * reach / steps } else { reach / steps };
                for (index, value) in values.iter().enumerate() {
                    let error = (back[group * GROUP + index] - value).abs();
                    assert!(error <= step * 1.01, "{kind:?} {value} {error}");
                }
            }
        }
    }

    /// What the reader makes of blocks becomes the same blocks again.
    #[test]
    fn affine_groups_go_back_into_the_blocks_they_came_from() {
        for kind in KINDS {
            let stored = encode(kind, &sample()).unwrap();
            let (bits, count) = (bits(kind).unwrap(), stored.len() / kind.block_bytes());
            let (mut weight, mut scales, mut biases) =
                (vec![0; count * bits * 4], vec![0; count * 2], vec![0; count * 2]);
            assert!(repack(
                kind,
                &stored,
                Target { weight: &mut weight, scales: &mut scales, biases: &mut biases }
            ));
            let half = |bytes: &[u8], index: usize| {
                f16::from_le_bytes([bytes[index * 2], bytes[index * 2 + 1]]).to_f32()
            };
            let mut again = Vec::new();
            for group in 0..count {
                let packed = &weight[group * bits * 4..][..bits * 4];
                let group = AffineGroup { packed, scale: half(&scales, group), bias: half(&biases, group) };
                assert!(group.encode(kind, &mut again));
            }
            assert_eq!(again, stored, "{kind:?}");
        }
        let group = AffineGroup { packed: &[0; 32], scale: 1.0, bias: -127.0 };
        assert!(!group.encode(GgmlType::Q8_0, &mut Vec::new()));
        let group = AffineGroup { packed: &[0; 16], scale: 1.0 + 1e-6, bias: 0.0 };
        assert!(!group.encode(GgmlType::Q4_1, &mut Vec::new()));
    }

    #[test]
    fn what_half_precision_cannot_hold_is_refused() {
        assert!(encode(GgmlType::F16, &[65504.0, -65504.0]).is_some());
        assert!(encode(GgmlType::F16, &[70000.0]).is_none());
        assert!(encode(GgmlType::Q4_1, &[-1e6; 32]).is_none());
        assert!(encode(GgmlType::F32, &[1e30]).is_some());
    }
}
