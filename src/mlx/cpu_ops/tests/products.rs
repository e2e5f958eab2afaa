//! Linear layers, experts, embeddings.

use super::*;
use crate::mlx::cpu::kernels::matmul::has_integers;
use crate::mlx::cpu_ops::{AUTO, MatrixKind};
use crate::mlx::{dequantize, quantized_matmul};

const CODINGS: [Option<QuantParams>; 4] = [
    None,
    Some(AFFINE4),
    Some(QuantParams { bits: 8, group_size: 64, mode: QuantMode::Affine }),
    Some(QuantParams { bits: 4, group_size: 32, mode: QuantMode::Mxfp4 }),
];

/// A matrix `[rows, columns]` as it is stored, and as numbers.
fn matrix(params: Option<QuantParams>, seed: u64, shape: &[i32]) -> (Vec<Array>, Array) {
    let dense = noise(seed, shape);
    match params {
        None => (vec![dense.clone()], dense),
        Some(params) => {
            let packed = pack(&dense, params);
            let open = dequantize(&packed[0], &packed[1], packed.get(2), params).unwrap();
            (packed, cast(&open, Dtype::Float32))
        }
    }
}

#[test]
fn linear_layers_agree_with_mlx_whatever_the_strides() {
    let kernels = kernels(2);
    for params in CODINGS {
        let (weight, open) = matrix(params, 1, &[96, 128]);
        let kind = MatrixKind::new(params, 96, 128);
        let bias = noise(3, &[96]);
        for shape in [&[128][..], &[1, 128], &[2, 3, 128], &[1, 70, 128]] {
            let x = noise(2, shape);
            let expected = x.matmul(&open.t().unwrap()).unwrap();
            for x in [x.clone(), strided(&x), turned(&x)] {
                let found = kernels.linear(&x, kind, &refs(&weight), None).unwrap();
                assert_close(&found, &expected, 1e-5);
                let found = kernels.linear(&x, kind, &refs(&weight), Some(&bias)).unwrap();
                assert_close(&found, &expected.add(&bias).unwrap(), 1e-5);
            }
        }
    }
}

#[test]
fn types_are_promoted_as_mlx_does() {
    let kernels = kernels(1);
    let kind = MatrixKind::new(Some(AFFINE4), 32, 64);
    for (x_type, scale_type) in [
        (Dtype::Bfloat16, Dtype::Bfloat16),
        (Dtype::Float32, Dtype::Bfloat16),
        (Dtype::Float16, Dtype::Bfloat16),
        (Dtype::Float16, Dtype::Float16),
    ] {
        let weight = pack(&cast(&noise(1, &[32, 64]), scale_type), AFFINE4);
        let x = cast(&noise(2, &[2, 64]), x_type);
        let found = kernels.linear(&x, kind, &refs(&weight), None).unwrap();
        let stock = quantized_matmul(&x, &weight[0], &weight[1], weight.get(2), true, AFFINE4).unwrap();
        assert_eq!(found.dtype(), stock.dtype());
    }
}

/// A row's bits depend neither on M, nor on what shares the call, nor on the threads, in every mode.
#[test]
fn products_do_not_depend_on_the_rows_or_threads_they_share() {
    let x = cast(&noise(2, &[1, 41, 128]), Dtype::Bfloat16);
    for params in CODINGS {
        let (weight, _) = matrix(params, 1, &[72, 128]);
        let weight: Vec<Array> = weight
            .iter()
            .map(|part| if part.dtype().is_floating() { cast(part, Dtype::Bfloat16) } else { part.clone() })
            .collect();
        let kind = MatrixKind::new(params, 72, 128);
        for precision in [CpuPrecision::Exact, CpuPrecision::Int16, CpuPrecision::Int8] {
            let mut whole = None;
            for threads in 1..=8 {
                let kernels = Kernels::new(Isa::detect(), threads, precision).unwrap();
                let product = |x: &Array| kernels.linear(x, kind, &refs(&weight), None).unwrap();
                let found = bits(&product(&x));
                assert_eq!(whole.get_or_insert_with(|| found.clone()), &found);
                for cut in [1, 2, 4, 40] {
                    let mut parts = bits(&product(&rows(&x, 1, 0, cut)));
                    parts.extend(bits(&product(&rows(&x, 1, cut, 41))));
                    assert_eq!(parts, found, "{params:?} {precision:?} cut at {cut}");
                }
            }
        }
    }
}

#[test]
fn modes_differ_for_any_number_of_rows() {
    if !has_integers(Isa::detect()) {
        return;
    }
    let (weight, _) = matrix(Some(AFFINE4), 1, &[64, 128]);
    let kind = MatrixKind::new(Some(AFFINE4), 64, 128);
    for count in [1, 8, 33] {
        let x = noise(2, &[count, 128]);
        let run = |precision| {
            let kernels = Kernels::new(Isa::detect(), 2, precision).unwrap();
            bits(&kernels.linear(&x, kind, &refs(&weight), None).unwrap())
        };
        let [exact, int16, int8] = [CpuPrecision::Exact, CpuPrecision::Int16, CpuPrecision::Int8].map(run);
        assert!(exact != int16 && exact != int8 && int16 != int8);
        assert_eq!(run(CpuPrecision::Auto), run(AUTO));
    }
}

#[test]
fn experts_multiply_the_rows_they_are_chosen_for() {
    let kernels = kernels(2);
    let indices = Array::from_slice(&[2u32, 0, 1, 1, 3, 2], &[1, 3, 2]).unwrap();
    for params in CODINGS {
        let (weight, open) = matrix(params, 1, &[4, 48, 64]);
        let kind = MatrixKind::stacked(params, 4, 48, 64);
        let bias = noise(5, &[4, 48]);
        for x in [noise(2, &[1, 3, 64]), noise(2, &[1, 3, 2, 64])] {
            let found = kernels.experts(&x, &indices, kind, &refs(&weight), Some(&bias)).unwrap();
            assert_eq!(found.shape(), [1, 3, 2, 48]);
            let each = x.reshape(&[-1, 64]).unwrap();
            for (slot, expert) in [2, 0, 1, 1, 3, 2].into_iter().enumerate() {
                let row = if x.ndim() == 3 { slot as i32 / 2 } else { slot as i32 };
                let expected = rows(&each, 0, row, row + 1)
                    .matmul(&rows(&open, 0, expert, expert + 1).squeeze(0).unwrap().t().unwrap())
                    .unwrap()
                    .add(&rows(&bias, 0, expert, expert + 1))
                    .unwrap();
                let found = rows(&found.reshape(&[6, 48]).unwrap(), 0, slot as i32, slot as i32 + 1);
                assert_close(&found, &expected, 1e-5);
            }
        }
    }
}

#[test]
fn embeddings_agree_with_mlx() {
    let kernels = kernels(2);
    let ids = Array::from_slice(&[3i32, 0, 31, 3, 17, 9], &[2, 3]).unwrap();
    for params in CODINGS {
        let (table, open) = matrix(params, 1, &[32, 128]);
        let kind = MatrixKind::new(params, 32, 128);
        for ids in [ids.clone(), cast(&ids, Dtype::Uint32), turned(&ids)] {
            let found = kernels.embedding(&ids, kind, &refs(&table)).unwrap();
            assert_close(&found, &open.take(&ids, 0).unwrap(), 1e-6);
            let expected = if params.is_some_and(|params| !params.mode.has_biases()) {
                Dtype::Bfloat16
            } else {
                Dtype::Float32
            };
            assert_eq!(found.dtype(), expected);
        }
    }
}
