//! Our operations against MLX's, whatever the strides, the rows that share a call and the threads.

mod attention;
mod elementwise;
mod errors;
mod gradients;
mod products;

use super::{CpuPrecision, Kernels};
use crate::checkpoint::{QuantMode, QuantParams};
use crate::mlx::cpu::Isa;
use crate::mlx::{Array, Dtype, quantize};

fn kernels(threads: usize) -> Kernels {
    Kernels::new(Isa::detect(), threads, CpuPrecision::Exact).unwrap()
}

const AFFINE4: QuantParams = QuantParams { bits: 4, group_size: 32, mode: QuantMode::Affine };

/// Numbers from -1 to 1 that look random.
fn noise(seed: u64, shape: &[i32]) -> Array {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1);
    let values: Vec<f32> = (0..shape.iter().product::<i32>())
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / 8_388_608.0 - 1.0
        })
        .collect();
    Array::from_slice(&values, shape).unwrap()
}

/// The same numbers as a view that is no run of memory: rows of a wider array, its axes in another order.
fn strided(x: &Array) -> Array {
    let width = x.dim(-1);
    let wide = Array::concatenate([x, x], -1).unwrap().contiguous().unwrap();
    wide.eval().unwrap();
    wide.slice(-1, width, 2 * width).unwrap()
}

/// The same numbers, the last axis stored as the outermost.
fn turned(x: &Array) -> Array {
    let last = x.ndim() as i32 - 1;
    let forward: Vec<i32> = [last].into_iter().chain(0..last).collect();
    let back: Vec<i32> = (1..=last).chain([0]).collect();
    let stored = x.transpose(&forward).unwrap().contiguous().unwrap();
    stored.eval().unwrap();
    stored.transpose(&back).unwrap()
}

/// Words, scales and biases of a packed matrix.
fn pack(weight: &Array, params: QuantParams) -> Vec<Array> {
    let (words, scales, biases) = quantize(weight, params).unwrap();
    [words, scales].into_iter().chain(biases).collect()
}

fn refs(arrays: &[Array]) -> Vec<&Array> {
    arrays.iter().collect()
}

fn assert_close(found: &Array, expected: &Array, tolerance: f32) {
    assert_eq!(found.shape(), expected.shape());
    let (found, expected) = (found.to_f32_vec().unwrap(), expected.to_f32_vec().unwrap());
    for (i, (a, b)) in found.iter().zip(&expected).enumerate() {
        assert!((a - b).abs() <= tolerance * (1.0 + b.abs()), "{i}: {a} is not {b}");
    }
}

fn bits(x: &Array) -> Vec<u8> {
    x.to_bytes().unwrap()
}

fn rows(x: &Array, axis: i32, start: i32, stop: i32) -> Array {
    x.slice(axis, start, stop).unwrap()
}

fn cast(x: &Array, dtype: Dtype) -> Array {
    x.astype(dtype).unwrap()
}
