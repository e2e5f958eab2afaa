//! `mx.quantize` without MLX: the same bits, on all cores, without a copy of the whole weight in memory.

use super::affine;
use super::float_codes::{mxfp4_group, mxfp8_group, nvfp4_group};
use super::numbers::FloatType;
use crate::checkpoint::{QuantMode, QuantParams};
use crate::mlx::cpu::{Pool, PoolError};

/// Groups that one thread takes at a time.
const GROUPS_A_TASK: usize = 1024;

/// A packed weight, little-endian and row-major.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packed {
    /// `uint32`, `[…, columns * bits / 32]`.
    pub weight: Vec<u8>,
    /// `[…, columns / group_size]`: of the weight's type in affine mode, else `uint8`.
    pub scales: Vec<u8>,
    /// As the scales; empty unless the mode is affine.
    pub biases: Vec<u8>,
}

/// A part of the work: numbers, and where their codes go.
struct Task<'a> {
    values: &'a [u8],
    weight: &'a mut [u8],
    scales: &'a mut [u8],
    biases: &'a mut [u8],
}

/// Packs a weight whose rows are whole groups, as `mx.quantize` does on a CPU. `weight` holds finite numbers of type
/// `kind`; a group that does not fill up at the end is left out.
///
/// # Errors
/// When a thread of the pool panicked.
pub fn quantize(
    weight: &[u8],
    kind: FloatType,
    params: QuantParams,
    pool: &Pool,
) -> Result<Packed, PoolError> {
    let size = kind.element().size();
    let group = params.group_size as usize;
    let groups = weight.len() / (group * size);
    let scale_size = if params.mode.has_biases() { size } else { 1 };
    let bias_size = if params.mode.has_biases() { size } else { 0 };
    let packed_size = group * usize::from(params.bits) / 8;
    let mut packed = Packed {
        weight: vec![0; groups * packed_size],
        scales: vec![0; groups * scale_size],
        biases: vec![0; groups * bias_size],
    };
    let mut biases = packed.biases.chunks_mut((GROUPS_A_TASK * bias_size).max(1));
    let mut tasks: Vec<Task> = weight
        .chunks(GROUPS_A_TASK * group * size)
        .zip(packed.weight.chunks_mut(GROUPS_A_TASK * packed_size))
        .zip(packed.scales.chunks_mut(GROUPS_A_TASK * scale_size))
        .map(|((values, weight), scales)| Task {
            values,
            weight,
            scales,
            biases: biases.next().unwrap_or_default(),
        })
        .collect();
    pool.run_chunks_mut(&mut tasks, 1, &|_, tasks| {
        for task in tasks {
            task.run(kind, params);
        }
    })?;
    Ok(packed)
}

impl Task<'_> {
    fn run(&mut self, kind: FloatType, params: QuantParams) {
        let group = params.group_size as usize;
        let mut values = vec![0.0f32; group];
        let stored = self.values.chunks_exact(group * kind.element().size());
        let packed = self.weight.chunks_exact_mut(group * usize::from(params.bits) / 8);
        for (index, (stored, packed)) in stored.zip(packed).enumerate() {
            kind.decode_into(stored, &mut values);
            let float_group = match params.mode {
                QuantMode::Affine => {
                    let (scale, bias) = affine::quantize_group(&values, params.bits, packed);
                    kind.put(scale, self.scales, index);
                    kind.put(bias, self.biases, index);
                    continue;
                }
                QuantMode::Mxfp4 => mxfp4_group,
                QuantMode::Nvfp4 => nvfp4_group,
                QuantMode::Mxfp8 => mxfp8_group,
            };
            if let Some(scale) = self.scales.get_mut(index) {
                *scale = float_group(&values, kind, packed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mlx::{self, Array, Dtype};

    fn params() -> Vec<QuantParams> {
        let affine = [2, 3, 4, 5, 6, 8].into_iter().flat_map(|bits| {
            [32, 64, 128].map(|group_size| QuantParams { bits, group_size, mode: QuantMode::Affine })
        });
        affine
            .chain([QuantMode::Mxfp4, QuantMode::Nvfp4, QuantMode::Mxfp8].map(QuantMode::defaults))
            .collect()
    }

    /// Numbers of many magnitudes, with zeros, constant groups, ties and outliers among them.
    fn weights(count: usize) -> Vec<f32> {
        let mut state = 0x2545_f491_4f6c_dd1du64;
        let mut random = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
        };
        (0..count)
            .map(|index| match (index / 128) % 16 {
                0 => 0.0,
                1 => 0.75,
                2 => -1e-9 * random(),
                3 => (random() * 16.0).round() / 4.0,
                4 => random() * 3e4,
                5 => random().abs() + 0.1,
                6 => -random().abs() - 0.1,
                7 if index % 32 == 5 => 40.0,
                8 => random() * 2f32.powi((index / 64 % 24) as i32 - 20),
                9 => {
                    if random() > 0.0 {
                        -0.0
                    } else {
                        0.0
                    }
                }
                10 => random() * 1e-7,
                _ => random() * 0.2,
            })
            .collect()
    }

    fn compare(kind: FloatType, dtype: Dtype, rows: i32, columns: i32) {
        let pool = Pool::new(2).unwrap();
        let bytes = kind.encode(&weights((rows * columns) as usize));
        let array = Array::from_slice(&kind.decode(&bytes), &[rows, columns]).unwrap().astype(dtype).unwrap();
        for params in params() {
            let ours = quantize(&bytes, kind, params, &pool).unwrap();
            let (weight, scales, biases) = mlx::quantize(&array, params).unwrap();
            let theirs = Packed {
                weight: weight.to_bytes().unwrap(),
                scales: scales.to_bytes().unwrap(),
                biases: biases.map(|biases| biases.to_bytes().unwrap()).unwrap_or_default(),
            };
            let first = |ours: &[u8], theirs: &[u8]| {
                let at = ours.iter().zip(theirs).position(|(a, b)| a != b);
                (ours.len() == theirs.len() && at.is_none(), at)
            };
            assert_eq!(first(&ours.scales, &theirs.scales), (true, None), "scales, {kind:?} {params}");
            assert_eq!(first(&ours.biases, &theirs.biases), (true, None), "biases, {kind:?} {params}");
            assert_eq!(first(&ours.weight, &theirs.weight), (true, None), "weight, {kind:?} {params}");
        }
    }

    #[test]
    fn every_mode_has_the_bits_of_mlx() {
        compare(FloatType::Bfloat16, Dtype::Bfloat16, 48, 1024);
        compare(FloatType::Float32, Dtype::Float32, 48, 1024);
        compare(FloatType::Float16, Dtype::Float16, 48, 1024);
    }
}
