//! The float modes: 4- and 8-bit floats with one scale a group (MLX `ops.cpp`, `fp_quantize`).
//!
//! MLX computes these in the weight's own type, so every step is rounded to it.

use super::numbers::FloatType;

/// The largest 4-bit float (E2M1).
const LARGEST_E2M1: f32 = 6.0;
/// The largest 8-bit float (E4M3).
const LARGEST_E4M3: f32 = 448.0;
/// Magnitudes above which an E2M1 code is left for the next; a tie takes the smaller one.
const E2M1_MIDPOINTS: [f32; 7] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];

/// What a group's numbers are divided by, and the byte that stands for it.
type Scale = (u8, f32);

/// mxfp4: `packed` takes half a byte a number. Returns the scale's byte.
pub(super) fn mxfp4_group(values: &[f32], kind: FloatType, packed: &mut [u8]) -> u8 {
    let (byte, scale) = power_of_two(values, LARGEST_E2M1, kind);
    pack_e2m1(values, scale, kind, packed);
    byte
}

/// nvfp4: as mxfp4 with an E4M3 scale.
pub(super) fn nvfp4_group(values: &[f32], kind: FloatType, packed: &mut [u8]) -> u8 {
    let byte = to_e4m3(kind.round(magnitude(values) / LARGEST_E2M1));
    pack_e2m1(values, kind.round(from_e4m3(byte)), kind, packed);
    byte
}

/// mxfp8: a byte a number. Returns the scale's byte.
pub(super) fn mxfp8_group(values: &[f32], kind: FloatType, packed: &mut [u8]) -> u8 {
    let (byte, scale) = power_of_two(values, LARGEST_E4M3, kind);
    for (value, code) in values.iter().zip(packed) {
        *code = to_e4m3(kind.round(value / scale));
    }
    byte
}

fn magnitude(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |largest, value| if value.abs() > largest { value.abs() } else { largest })
}

/// The least power of two by which the largest number becomes no more than `largest`.
fn power_of_two(values: &[f32], largest: f32, kind: FloatType) -> Scale {
    let exact = kind.round(magnitude(values) / largest);
    let exponent = if exact == 0.0 { 0 } else { ceil_log2(exact) };
    ((exponent + 127) as u8, kind.round((exponent as f32).exp2()))
}

/// The logarithm to base 2 of a positive number, rounded up.
fn ceil_log2(value: f32) -> i32 {
    const SUBNORMAL_SHIFT: i32 = 64;
    let (value, shift) = match value.is_normal() {
        true => (value, 0),
        false => (value * (SUBNORMAL_SHIFT as f32).exp2(), SUBNORMAL_SHIFT),
    };
    let (exponent, mantissa) = (value.to_bits() >> 23, value.to_bits() & 0x7f_ffff);
    exponent as i32 - 127 + i32::from(mantissa != 0) - shift
}

fn pack_e2m1(values: &[f32], scale: f32, kind: FloatType, packed: &mut [u8]) {
    for (pair, byte) in values.as_chunks::<2>().0.iter().zip(packed) {
        let [low, high] = pair.map(|value| to_e2m1(kind.round(value / scale)));
        *byte = low | high << 4;
    }
}

/// The nearest code; a number that rounds to zero loses its sign, and no number at all (division by a scale of
/// zero) is zero, too.
fn to_e2m1(value: f32) -> u8 {
    if !value.is_finite() {
        return 0;
    }
    let code = E2M1_MIDPOINTS.iter().map(|midpoint| u8::from(value.abs() > *midpoint)).sum::<u8>();
    if code > 0 && value < 0.0 { code | 8 } else { code }
}

/// Nearest E4M3 code, ties to even, saturating (MLX `backend/cpu/unary_ops.h`, `ToFP8`).
fn to_e4m3(value: f32) -> u8 {
    const SMALLEST_SATURATED: u32 = 543 << 21;
    const SMALLEST_NORMAL: u32 = 121 << 23;
    const DENORMAL: u32 = 141 << 23;
    let sign = value.to_bits() & 0x8000_0000;
    let bits = value.to_bits() ^ sign;
    let code = if bits >= SMALLEST_SATURATED {
        0x7e
    } else if bits < SMALLEST_NORMAL {
        let shifted = f32::from_bits(bits) + f32::from_bits(DENORMAL);
        shifted.to_bits().wrapping_sub(DENORMAL) as u8
    } else {
        let odd = (bits >> 20) & 1;
        let rebased = bits.wrapping_add((7u32.wrapping_sub(127) << 23).wrapping_add(0x7_ffff));
        (rebased.wrapping_add(odd) >> 20) as u8
    };
    code | (sign >> 24) as u8
}

/// The number that an E4M3 code without a sign stands for.
fn from_e4m3(code: u8) -> f32 {
    half::f16::from_bits(u16::from(code & 0x7f) << 7).to_f32() * 256.0
}
