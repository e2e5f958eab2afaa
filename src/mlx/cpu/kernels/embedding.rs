//! Rows of an embedding table, dense or quantized.

use std::sync::LazyLock;

use super::super::{Isa, Pool};
use super::affine::{AffineRow, dequantize_row};
use super::error::{KernelError, expect};
use super::floats::{Floats, FloatsMut};
use super::matmul::reference::{FP4, e4m3, e8m0};
use super::matmul::{Matrix, Scales, Storage};
use super::simd::{self, Element, Kernel, Simd, from_f32, to_f32};
use super::{SERIAL_ELEMENTS, with_floats, with_floats_mut};
use crate::coding::{QuantMode, QuantParams};

const OP: &str = "embedding";

/// The rows `indices` of `table` into `out` (`[indices, columns]`), rounded to its type. Stacked matrices count as
/// one with all their rows.
///
/// # Errors
/// When an index is past the end, `out` does not fit, or the work fails.
pub fn embedding(
    isa: Isa,
    pool: &Pool,
    table: &Matrix<'_>,
    indices: &[u32],
    out: FloatsMut<'_>,
) -> Result<(), KernelError> {
    let (rows, width) = (table.experts * table.rows, table.columns);
    if let Some(&index) = indices.iter().find(|&&index| index as usize >= rows) {
        return Err(KernelError::IndexOutOfRange { op: OP, index, rows });
    }
    expect(OP, "the number of results", indices.len().saturating_mul(width), out.len())?;
    let each = (SERIAL_ELEMENTS / 2 / width.max(1)).max(1);
    let out = match (&table.storage, out) {
        (Storage::Dense(Floats::F32(values)), FloatsMut::F32(out)) => {
            return copy(pool, values, width, indices, each, out);
        }
        (Storage::Dense(Floats::F16(values)), FloatsMut::F16(out)) => {
            return copy(pool, values, width, indices, each, out);
        }
        (Storage::Dense(Floats::Bf16(values)), FloatsMut::Bf16(out)) => {
            return copy(pool, values, width, indices, each, out);
        }
        (_, out) => out,
    };
    with_floats_mut!(out, out => {
        Ok(pool.run_chunks_mut(out, each * width, &|task, out| {
            open_rows(isa, table, &indices[task * each..], out);
        })?)
    })
}

/// Rows that are converted on the way.
pub(super) fn open_rows<O: Element>(isa: Isa, table: &Matrix<'_>, indices: &[u32], out: &mut [O]) {
    let width = table.columns;
    match &table.storage {
        Storage::Dense(values) => with_floats!(values, values => {
            simd::run(isa, Convert { values, width, indices, out });
        }),
        Storage::Packed { words, scales, quantization } => {
            let rows = PackedRows { words, width, quantization: *quantization, indices, out };
            match scales {
                Scales::Affine { scales: Floats::F32(scales), biases: Floats::F32(biases) } => {
                    simd::run(isa, Affine { rows, scales, biases });
                }
                Scales::Affine { scales: Floats::F16(scales), biases: Floats::F16(biases) } => {
                    simd::run(isa, Affine { rows, scales, biases });
                }
                Scales::Affine { scales: Floats::Bf16(scales), biases: Floats::Bf16(biases) } => {
                    simd::run(isa, Affine { rows, scales, biases });
                }
                // A matrix has scales and biases of one type.
                Scales::Affine { .. } => {}
                Scales::Byte(scales) => simd::run(isa, Coded { rows, scales }),
            }
        }
    }
}

/// Rows of the same type.
fn copy<T: Copy + Send + Sync>(
    pool: &Pool,
    values: &[T],
    width: usize,
    indices: &[u32],
    each: usize,
    out: &mut [T],
) -> Result<(), KernelError> {
    Ok(pool.run_chunks_mut(out, each * width, &|task, out| {
        for (index, out) in indices[task * each..].iter().zip(out.chunks_mut(width)) {
            out.copy_from_slice(&values[*index as usize * width..][..width]);
        }
    })?)
}

/// Rows of another type.
struct Convert<'a, E, O> {
    values: &'a [E],
    width: usize,
    indices: &'a [u32],
    out: &'a mut [O],
}

impl<E: Element, O: Element> Kernel for Convert<'_, E, O> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut row = vec![0.0; self.width];
        for (index, out) in self.indices.iter().zip(self.out.chunks_mut(self.width)) {
            to_f32(s, &self.values[*index as usize * self.width..][..self.width], &mut row);
            from_f32(s, &row, out);
        }
    }
}

/// Rows of packed codes.
struct PackedRows<'a, O> {
    words: &'a [u32],
    width: usize,
    quantization: QuantParams,
    indices: &'a [u32],
    out: &'a mut [O],
}

/// Rows in affine groups.
struct Affine<'a, E, O> {
    rows: PackedRows<'a, O>,
    scales: &'a [E],
    biases: &'a [E],
}

impl<E: Element, O: Element> Kernel for Affine<'_, E, O> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let PackedRows { words, width, quantization, indices, out } = self.rows;
        let (bits, group) = (quantization.bits as usize, quantization.group_size as usize);
        let (each, groups) = (width / 32 * bits, width / group);
        let mut row = vec![0.0; width];
        for (index, out) in indices.iter().zip(out.chunks_mut(width)) {
            let index = *index as usize;
            let affine = AffineRow {
                words: &words[index * each..][..each],
                scales: &self.scales[index * groups..][..groups],
                biases: &self.biases[index * groups..][..groups],
            };
            dequantize_row(s, bits, group, affine, &mut row);
            from_f32(s, &row, out);
        }
    }
}

/// All 8-bit floats (e4m3).
static E4M3: LazyLock<[f32; 256]> = LazyLock::new(|| std::array::from_fn(|code| e4m3(code as u8)));

/// Rows of 4- or 8-bit floats.
struct Coded<'a, O> {
    rows: PackedRows<'a, O>,
    scales: &'a [u8],
}

impl<O: Element> Kernel for Coded<'_, O> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let PackedRows { words, width, quantization, indices, out } = self.rows;
        let (bits, group) = (quantization.bits as usize, quantization.group_size as usize);
        let (groups, group_words) = (width / group, group * bits / 32);
        let mut row = vec![0.0; width];
        for (index, out) in indices.iter().zip(out.chunks_mut(width)) {
            let first = *index as usize * groups;
            let scales = &self.scales[first..][..groups];
            let words = words[first * group_words..].chunks_exact(group_words);
            for ((to, words), scale) in row.chunks_exact_mut(group).zip(words).zip(scales) {
                let scale = if quantization.mode == QuantMode::Nvfp4 {
                    E4M3[usize::from(*scale)]
                } else {
                    e8m0(*scale)
                };
                for (to, word) in to.chunks_exact_mut(32 / bits).zip(words) {
                    for (i, to) in to.iter_mut().enumerate() {
                        let code = word >> (i * bits);
                        *to = scale
                            * if bits == 8 {
                                E4M3[code as usize & 255]
                            } else {
                                FP4[code as usize & 7].copysign(if code & 8 == 0 { 1.0 } else { -1.0 })
                            };
                    }
                }
            }
            from_f32(s, &row, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::matmul::reference::dequantize;
    use super::super::testing::{Owned, Type, bits, isas, noise, pools};
    use super::*;

    fn affine(bits: usize, group: usize) -> QuantParams {
        QuantParams { bits: bits as u8, group_size: group as u32, mode: QuantMode::Affine }
    }

    /// `mx.quantize` (0.32.2) of `((37 i) mod 64) / 8 - 4`, group 32, and the first six of `mx.dequantize`.
    #[test]
    fn all_widths_are_packed_as_mlx_does() {
        let cases: [(usize, &[u32], f32, [f32; 6]); 5] = [
            (2, &[0xcb76_2dd8, 0xdd8b_76ed], 2.0, [-4.0, 0.0, -2.0, 2.0, -2.0, 2.0]),
            (3, &[0x9513_ac68, 0xcefa_a677, 0xef2a_2758], 1.0, [-4.0, 1.0, -3.0, 2.0, -2.0, 3.0]),
            (
                5,
                &[0xf8ac_1640, 0xe664_d413, 0xb748_b0e1, 0xdc55_c92f, 0xf2f0_6a05],
                0.25,
                [-4.0, 0.5, -2.75, 2.0, -1.5, 3.0],
            ),
            (
                6,
                &[0x54bc_a940, 0x2368_0dee, 0xac68_7c5f, 0x64fd_ad50, 0x2778_4ee2, 0xed6c_4c9c],
                0.125,
                [-4.0, 0.625, -2.75, 1.875, -1.5, 3.125],
            ),
            (
                8,
                &[
                    0xbf29_9600,
                    0x0c7a_e851,
                    0x5dcb_35a2,
                    0xaf18_86f4,
                    0xff6a_d741,
                    0x4dbb_2592,
                    0x9e08_76e4,
                    0xf059_c731,
                ],
                0.030_769_23,
                [-4.0, 0.615_384_6, -2.738_461_5, 1.876_923_1, -1.507_692_3, 3.138_461_6],
            ),
        ];
        let pool = Pool::new(1).unwrap();
        for (bits, codes, scale, expected) in cases {
            for isa in isas() {
                let (scales, biases) = (Floats::F32(std::slice::from_ref(&scale)), Floats::F32(&[-4.0]));
                let scales = Scales::Affine { scales, biases };
                let table = Matrix::packed(codes, scales, affine(bits, 32), 1, 1, 32).unwrap();
                let mut out = [0.0; 32];
                embedding(isa, &pool, &table, &[0], FloatsMut::F32(&mut out)).unwrap();
                let near = out.iter().zip(expected).all(|(x, y)| (x - y).abs() < 1e-6);
                assert!(near, "{bits} bits: {:?}", &out[..6]);
            }
        }
    }

    #[test]
    fn rows_of_every_table_and_type_are_found() {
        let pools = pools();
        let indices = [3, 0, 6, 3, 1];
        for kind in Type::ALL {
            for out_kind in Type::ALL {
                let values = Owned::new(kind, &noise(1, 7 * 100));
                let table = Matrix::dense(values.view(), 1, 7, 100).unwrap();
                for isa in isas() {
                    let mut out = Owned::zeros(out_kind, 500);
                    embedding(isa, &pools[1], &table, &indices, out.view_mut()).unwrap();
                    let all = values.to_f32();
                    let rows: Vec<f32> =
                        indices.iter().flat_map(|i| all[*i as usize * 100..][..100].to_vec()).collect();
                    assert_eq!(bits(&out.to_f32()), bits(&Owned::new(out_kind, &rows).to_f32()));
                }
            }
        }
    }

    #[test]
    fn quantized_tables_of_every_mode_width_group_and_type() {
        let pools = pools();
        let (rows, width) = (9, 256);
        let mut modes: Vec<QuantParams> = [2, 3, 4, 5, 6, 8]
            .iter()
            .flat_map(|bits| [32, 64, 128].map(|group| affine(*bits, group)))
            .collect();
        modes.push(QuantParams { bits: 4, group_size: 32, mode: QuantMode::Mxfp4 });
        modes.push(QuantParams { bits: 4, group_size: 16, mode: QuantMode::Nvfp4 });
        modes.push(QuantParams { bits: 8, group_size: 32, mode: QuantMode::Mxfp8 });
        for quantization in modes {
            for kind in Type::ALL {
                let groups = rows * width / quantization.group_size as usize;
                let random =
                    |count| noise(5, count).into_iter().map(|x| x.to_bits().wrapping_mul(0x9e37_79b1));
                let words: Vec<u32> = random(rows * width / 32 * quantization.bits as usize).collect();
                let bytes: Vec<u8> = random(groups).map(|x| 90 + (x >> 24) as u8 % 60).collect();
                let (s, b) = (Owned::new(kind, &noise(6, groups)), Owned::new(kind, &noise(7, groups)));
                let scales = match quantization.mode {
                    QuantMode::Affine => Scales::Affine { scales: s.view(), biases: b.view() },
                    _ => Scales::Byte(&bytes),
                };
                let table = Matrix::packed(&words, scales, quantization, 1, rows, width).unwrap();
                let all = dequantize(&table);
                let indices: Vec<u32> = (0..200).map(|i| i * 7 % 9).collect();
                let expected: Vec<f32> = indices
                    .iter()
                    .flat_map(|row| all[*row as usize * width..][..width].iter().map(|x| *x as f32))
                    .collect();
                for isa in isas() {
                    let mut out = vec![0.0; expected.len()];
                    embedding(isa, &pools[2], &table, &indices, FloatsMut::F32(&mut out)).unwrap();
                    assert_eq!(bits(&out), bits(&expected), "{quantization:?}");
                }
            }
        }
    }

    #[test]
    fn an_index_past_the_table_is_refused() {
        let pool = Pool::new(1).unwrap();
        let table = Matrix::dense(Floats::F32(&[0.0; 12]), 1, 3, 4).unwrap();
        let error = embedding(Isa::PLAIN, &pool, &table, &[0, 3], FloatsMut::F32(&mut [0.0; 8])).unwrap_err();
        assert_eq!(error.to_string(), "embedding: index 3 is outside the table's 3 rows");
        assert!(embedding(Isa::PLAIN, &pool, &table, &[0], FloatsMut::F32(&mut [0.0; 5])).is_err());
    }
}
