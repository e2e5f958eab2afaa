//! The slow and obvious matmul: every weight from its definition, sums in f64.

use half::f16;

use super::matrix::Storage;
use super::{Matmul, Matrix, Scales};
use crate::coding::QuantMode;

/// The magnitudes of 4-bit floats (e2m1); bit 3 of the code is the sign.
pub const FP4: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// An 8-bit float (e4m3) as MLX reads it: a half with the exponent moved, so that codes 0x7f and 0xff are ±480.
pub fn e4m3(code: u8) -> f32 {
    let magnitude = f16::from_bits(u16::from(code & 0x7f) << 7).to_f32() * 256.0;
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// A power of two (e8m0) as MLX reads it: the exponent of an f32, so that code 255 is infinite.
pub fn e8m0(code: u8) -> f32 {
    if code == 0 { f32::from_bits(0x40_0000) } else { f32::from_bits(u32::from(code) << 23) }
}

/// One weight, dequantized in f64 (exact for finite scales, but for the last bits of the affine sum).
///
/// # Panics
/// When an index is out of range.
pub fn weight(matrix: &Matrix<'_>, expert: usize, row: usize, column: usize) -> f64 {
    assert!(expert < matrix.experts && row < matrix.rows && column < matrix.columns, "index out of range");
    let row = expert * matrix.rows + row;
    match &matrix.storage {
        Storage::Dense(values) => values.get(row * matrix.columns + column).map_or(0.0, f64::from),
        Storage::Packed { words, scales, quantization } => {
            let bits = quantization.bits as usize;
            let first = row * matrix.columns * bits + column * bits;
            let bit = |index: usize| (words[index / 32] >> (index % 32)) & 1;
            let code = (0..bits).map(|offset| bit(first + offset) << offset).sum::<u32>();
            let group = (row * matrix.columns + column) / quantization.group_size as usize;
            let level = match quantization.mode {
                QuantMode::Affine => f64::from(code),
                QuantMode::Mxfp4 | QuantMode::Nvfp4 => {
                    let magnitude = f64::from(FP4[code as usize & 7]);
                    if code & 8 == 0 { magnitude } else { -magnitude }
                }
                QuantMode::Mxfp8 => f64::from(e4m3(code as u8)),
            };
            match scales {
                Scales::Affine { scales, biases } => {
                    let value = |floats: &super::Floats| floats.get(group).map_or(0.0, f64::from);
                    level * value(scales) + value(biases)
                }
                Scales::Byte(scales) if quantization.mode == QuantMode::Nvfp4 => {
                    level * f64::from(e4m3(scales[group]))
                }
                Scales::Byte(scales) => level * f64::from(e8m0(scales[group])),
            }
        }
    }
}

/// All weights of a stack, `[experts, rows, columns]`.
pub fn dequantize(matrix: &Matrix<'_>) -> Vec<f64> {
    let mut weights = Vec::new();
    for expert in 0..matrix.experts {
        for row in 0..matrix.rows {
            weights.extend((0..matrix.columns).map(|column| weight(matrix, expert, row, column)));
        }
    }
    weights
}

/// What a product adds up, before rounding to the type of the result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sum {
    /// The output.
    pub value: f64,
    /// The root of the summed squares of `x * (|w| + 1)`: what an error of the output is to be measured by. (The 1
    /// stands for the parts of an affine weight, which may cancel.)
    pub size: f64,
}

/// `matmul` on `x`, output by output. Shapes must fit.
///
/// # Panics
/// When they do not.
pub fn matmul(matmul: &Matmul<'_>, x: &[f32]) -> Vec<Sum> {
    let (inputs, outputs) = (matmul.inputs(), matmul.outputs());
    let weights = dequantize(&matmul.weights);
    let y_rows = matmul.gather.map_or(x.len() / inputs, |gather| gather.experts.len());
    let mut y = Vec::with_capacity(y_rows * outputs);
    for row in 0..y_rows {
        let expert = matmul.gather.map_or(0, |gather| gather.experts[row] as usize);
        let x_row = matmul.gather.and_then(|gather| gather.x_rows).map_or(row, |rows| rows[row] as usize);
        let x = &x[x_row * inputs..(x_row + 1) * inputs];
        let weights = &weights[expert * inputs * outputs..(expert + 1) * inputs * outputs];
        for output in 0..outputs {
            let bias = matmul.bias.and_then(|bias| bias.get(expert * outputs + output));
            let mut sum = Sum { value: bias.map_or(0.0, f64::from), size: 0.0 };
            for (input, &x) in x.iter().enumerate() {
                let at = if matmul.transpose { output * inputs + input } else { input * outputs + output };
                sum.value += f64::from(x) * weights[at];
                sum.size += (f64::from(x) * (weights[at].abs() + 1.0)).powi(2);
            }
            y.push(Sum { size: sum.size.sqrt(), ..sum });
        }
    }
    y
}
