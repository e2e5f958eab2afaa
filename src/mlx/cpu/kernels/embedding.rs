//! Rows of an embedding table, dense or in affine groups.

use super::super::{Isa, Pool};
use super::affine::{self, AffineRow, dequantize_row};
use super::error::{KernelError, expect};
use super::floats::{Floats, FloatsMut};
use super::simd::{self, Element, Kernel, Simd, from_f32, to_f32};
use super::{SERIAL_ELEMENTS, with_floats, with_floats_mut};

const OP: &str = "embedding";

/// A table `[rows, width]`.
#[derive(Clone, Copy, Debug)]
pub enum Table<'a> {
    /// Plain numbers, row-major.
    Dense {
        /// All rows.
        values: Floats<'a>,
        /// Elements of a row.
        width: usize,
    },
    /// MLX's affine groups along a row.
    Affine {
        /// `[rows, width * bits / 32]`.
        codes: &'a [u32],
        /// `[rows, width / group]`.
        scales: Floats<'a>,
        /// `[rows, width / group]`.
        biases: Floats<'a>,
        /// Elements of a row.
        width: usize,
        /// Bits of a code: 2, 3, 4, 5, 6 or 8.
        bits: usize,
        /// Elements that share a scale: 32, 64 or 128.
        group: usize,
    },
}

impl Table<'_> {
    fn width(&self) -> usize {
        match self {
            Self::Dense { width, .. } | Self::Affine { width, .. } => *width,
        }
    }

    /// Checks the table's own shape and returns its number of rows.
    fn rows(&self) -> Result<usize, KernelError> {
        let whole = |what, length: usize, each: usize| {
            let rows = length.checked_div(each).unwrap_or(0);
            expect(OP, what, rows * each, length).map(|()| rows)
        };
        match self {
            Self::Dense { values, width } => whole("the number of elements", values.len(), *width),
            Self::Affine { codes, scales, biases, width, bits, group } => {
                affine::check(OP, *bits, *group, *width)?;
                affine::expect_one_type(OP, scales, biases)?;
                let rows = whole("the number of words", codes.len(), width / 32 * bits)?;
                expect(OP, "the number of scales", rows * (width / group), scales.len())?;
                expect(OP, "the number of biases", rows * (width / group), biases.len())?;
                Ok(rows)
            }
        }
    }
}

/// The rows `indices` of `table` into `out` (`[indices, width]`), rounded to its type.
///
/// # Errors
/// When the table's parts or `out` do not fit together, an index is past the end, or the work fails.
pub fn embedding(
    isa: Isa,
    pool: &Pool,
    table: &Table<'_>,
    indices: &[u32],
    out: FloatsMut<'_>,
) -> Result<(), KernelError> {
    let (rows, width) = (table.rows()?, table.width());
    if let Some(&index) = indices.iter().find(|&&index| index as usize >= rows) {
        return Err(KernelError::IndexOutOfRange { op: OP, index, rows });
    }
    expect(OP, "the number of results", indices.len() * width, out.len())?;
    let each = (SERIAL_ELEMENTS / 2 / width.max(1)).max(1);
    let out = match (table, out) {
        (Table::Dense { values: Floats::F32(values), .. }, FloatsMut::F32(out)) => {
            return copy(pool, values, width, indices, each, out);
        }
        (Table::Dense { values: Floats::F16(values), .. }, FloatsMut::F16(out)) => {
            return copy(pool, values, width, indices, each, out);
        }
        (Table::Dense { values: Floats::Bf16(values), .. }, FloatsMut::Bf16(out)) => {
            return copy(pool, values, width, indices, each, out);
        }
        (_, out) => out,
    };
    with_floats_mut!(out, out => {
        Ok(pool.run_chunks_mut(out, each * width, &|task, out| {
            let indices = &indices[task * each..];
            match *table {
                Table::Dense { values, .. } => with_floats!(values, values => {
                    simd::run(isa, Convert { values, width, indices, out });
                }),
                Table::Affine { codes, scales, biases, bits, group, .. } => match (scales, biases) {
                    (Floats::F32(scales), Floats::F32(biases)) => {
                        simd::run(isa, Dequantize { codes, scales, biases, width, bits, group, indices, out });
                    }
                    (Floats::F16(scales), Floats::F16(biases)) => {
                        simd::run(isa, Dequantize { codes, scales, biases, width, bits, group, indices, out });
                    }
                    (Floats::Bf16(scales), Floats::Bf16(biases)) => {
                        simd::run(isa, Dequantize { codes, scales, biases, width, bits, group, indices, out });
                    }
                    // Refused above.
                    _ => {}
                },
            }
        })?)
    })
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

/// Rows in affine groups.
struct Dequantize<'a, E, O> {
    codes: &'a [u32],
    scales: &'a [E],
    biases: &'a [E],
    width: usize,
    bits: usize,
    group: usize,
    indices: &'a [u32],
    out: &'a mut [O],
}

impl<E: Element, O: Element> Kernel for Dequantize<'_, E, O> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (words, groups) = (self.width / 32 * self.bits, self.width / self.group);
        let mut row = vec![0.0; self.width];
        for (index, out) in self.indices.iter().zip(self.out.chunks_mut(self.width)) {
            let index = *index as usize;
            let affine = AffineRow {
                words: &self.codes[index * words..][..words],
                scales: &self.scales[index * groups..][..groups],
                biases: &self.biases[index * groups..][..groups],
            };
            dequantize_row(s, self.bits, self.group, affine, &mut row);
            from_f32(s, &row, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Owned, Type, bits, noise, pools};
    use super::*;

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
            for isa in Isa::available() {
                let (scales, biases) = (Floats::F32(std::slice::from_ref(&scale)), Floats::F32(&[-4.0]));
                let table = Table::Affine { codes, scales, biases, width: 32, bits, group: 32 };
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
                let table = Table::Dense { values: values.view(), width: 100 };
                for isa in Isa::available() {
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
    fn affine_tables_of_every_width_group_and_type() {
        let pools = pools();
        let (rows, width) = (9, 256);
        for code_bits in affine::WIDTHS {
            for group in affine::GROUPS {
                for kind in Type::ALL {
                    let codes: Vec<u32> = noise(5, rows * width / 32 * code_bits)
                        .iter()
                        .map(|x| x.to_bits().wrapping_mul(0x9e37_79b1))
                        .collect();
                    let scales = Owned::new(kind, &noise(6, rows * width / group));
                    let biases = Owned::new(kind, &noise(7, rows * width / group));
                    let (s, b) = (scales.view(), biases.view());
                    let table =
                        Table::Affine { codes: &codes, scales: s, biases: b, width, bits: code_bits, group };
                    let value = |row: usize, i: usize| {
                        let stream = &codes[row * width / 32 * code_bits..];
                        let code = (0..code_bits).fold(0, |code, bit| {
                            let at = i * code_bits + bit;
                            code | (stream[at / 32] >> (at % 32) & 1) << bit
                        });
                        let entry = (row * width + i) / group;
                        (code as f32).mul_add(s.get(entry).unwrap(), b.get(entry).unwrap())
                    };
                    let indices: Vec<u32> = (0..200).map(|i| i * 7 % 9).collect();
                    let expected: Vec<f32> = indices
                        .iter()
                        .flat_map(|row| (0..width).map(|i| value(*row as usize, i)).collect::<Vec<_>>())
                        .collect();
                    for isa in Isa::available() {
                        let mut out = vec![0.0; expected.len()];
                        embedding(isa, &pools[2], &table, &indices, FloatsMut::F32(&mut out)).unwrap();
                        assert_eq!(bits(&out), bits(&expected));
                    }
                }
            }
        }
    }

    #[test]
    fn an_index_past_the_table_is_refused() {
        let pool = Pool::new(1).unwrap();
        let table = Table::Dense { values: Floats::F32(&[0.0; 12]), width: 4 };
        let error = embedding(Isa::PLAIN, &pool, &table, &[0, 3], FloatsMut::F32(&mut [0.0; 8])).unwrap_err();
        assert_eq!(error.to_string(), "embedding: index 3 is outside the table's 3 rows");
        let ragged = Table::Dense { values: Floats::F32(&[0.0; 13]), width: 4 };
        assert!(embedding(Isa::PLAIN, &pool, &ragged, &[0], FloatsMut::F32(&mut [0.0; 4])).is_err());
        let codes = [0; 4];
        let bad = |bits, group, width| {
            let (scales, biases) = (Floats::F32(&[1.0]), Floats::F32(&[1.0]));
            let table = Table::Affine { codes: &codes, scales, biases, width, bits, group };
            embedding(Isa::PLAIN, &pool, &table, &[0], FloatsMut::F32(&mut [0.0; 32])).is_err()
        };
        assert!(bad(7, 32, 32) && bad(4, 16, 32) && bad(4, 32, 40) && bad(8, 32, 32));
    }
}
