//! Affine quantization of a group: unsigned integers with a scale and a bias (MLX
//! `backend/cpu/quantized.cpp`, `quantize`).

/// Added to a number in `[0, 2^22]` it leaves the nearest integer, ties to even, in the lowest bits.
const ROUNDING: f32 = 8_388_608.0;
/// Scales below are taken for this.
const SMALLEST_SCALE: f32 = 1e-7;
/// The largest group.
const MAX_GROUP: usize = 128;
/// Codes that fill whole bytes whatever their width.
const PACK: usize = 8;

/// Codes `values` (a multiple of 8, at most 128) with `bits` bits each, packed from the lowest bit on into
/// `bits` bytes for 8 of them. Returns the scale and the bias.
pub(super) fn quantize_group(values: &[f32], bits: u8, packed: &mut [u8]) -> (f32, f32) {
    match bits {
        2 => group::<2>(values, packed),
        3 => group::<3>(values, packed),
        4 => group::<4>(values, packed),
        5 => group::<5>(values, packed),
        6 => group::<6>(values, packed),
        _ => group::<8>(values, packed),
    }
}

fn group<const BITS: usize>(values: &[f32], packed: &mut [u8]) -> (f32, f32) {
    let largest_code = ((1u32 << BITS) - 1) as f32;
    let (scale, bias) = scale_and_bias(values, largest_code);
    let mut codes = [0u8; MAX_GROUP];
    for (code, value) in codes.iter_mut().zip(values) {
        let exact = ((value - bias) / scale).clamp(0.0, largest_code);
        *code = (exact + ROUNDING).to_bits() as u8;
    }
    for (codes, bytes) in codes.as_chunks::<PACK>().0.iter().zip(packed.as_chunks_mut::<BITS>().0) {
        let word =
            codes.iter().enumerate().fold(0u64, |word, (at, code)| word | u64::from(*code) << (at * BITS));
        bytes.copy_from_slice(&word.to_le_bytes()[..BITS]);
    }
    (scale, bias)
}

/// The scale is negative where the largest value is the one that must be exact.
fn scale_and_bias(values: &[f32], largest_code: f32) -> (f32, f32) {
    let (lows, highs) = values.as_chunks::<PACK>().0.iter().fold(
        ([f32::INFINITY; PACK], [f32::NEG_INFINITY; PACK]),
        |(mut lows, mut highs), chunk| {
            for ((low, high), value) in lows.iter_mut().zip(&mut highs).zip(chunk) {
                *low = if *value < *low { *value } else { *low };
                *high = if *value > *high { *value } else { *high };
            }
            (lows, highs)
        },
    );
    let low = lows.iter().copied().fold(f32::INFINITY, f32::min);
    let high = highs.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let low_is_edge = low.abs() > high.abs();
    let step = ((high - low) / largest_code).max(SMALLEST_SCALE);
    let (edge, scale) = if low_is_edge { (low, step) } else { (high, -step) };
    match (edge / scale).round_ties_even() {
        0.0 => (scale, 0.0),
        code => (edge / code, edge),
    }
}
