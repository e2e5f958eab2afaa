use half::bf16;
use proptest::prelude::*;

use super::test_weights::{KINDS, Kind, Owned, Random, Stored, Storing};
use super::*;
use crate::coding::QuantMode;

fn run(matmul: &Matmul<'_>, isa: Isa, pool: &Pool, x: Floats<'_>, kind: Kind) -> Owned {
    let rows = matmul.gather.map_or(x.len() / matmul.inputs(), |gather| gather.experts.len());
    let mut y = Owned::new(kind, &vec![f32::NAN; rows * matmul.outputs()]);
    matmul.run(isa, pool, x, y.floats_mut()).unwrap();
    y
}

fn run_f32(matmul: &Matmul<'_>, isa: Isa, pool: &Pool, x: &[f32]) -> Vec<f32> {
    match run(matmul, isa, pool, x.into(), Kind::F32) {
        Owned::F32(y) => y,
        _ => unreachable!(),
    }
}

/// The largest error, in units of the typical size of an output's products.
fn error(matmul: &Matmul<'_>, x: &[f32], y: &[f32]) -> f64 {
    let mut worst: f64 = 0.0;
    for (at, (y, expected)) in y.iter().zip(reference::matmul(matmul, x)).enumerate() {
        assert!(y.is_finite(), "output {at}: {y}");
        worst = worst.max((f64::from(*y) - expected.value).abs() / (expected.size + 1e-30));
    }
    worst
}

/// The bound of exact precision: 1e-6 of a typical output for each doubling of the root of K.
fn exact_bound(inputs: usize) -> f64 {
    1e-6 * (inputs as f64).sqrt()
}

#[test]
fn every_storage_matches_the_reference_on_every_instruction_set() {
    let pool = Pool::new(2).unwrap();
    let mut random = Random(1);
    for storing in Storing::all() {
        for transpose in [true, false] {
            for m in [1, 2, 5] {
                // K and N off every block: 3 groups, or odd lengths for dense weights.
                let packed = (3 * storing.group()).max(33);
                let (rows, columns) = if storing.group() == 1 {
                    (37, 75)
                } else {
                    (37, packed / storing.group() * storing.group())
                };
                let stored = Stored::random(&mut random, storing, 1, rows, columns);
                let matmul = Matmul { transpose, ..Matmul::transposed(stored.matrix()) };
                let x = random.floats(m * matmul.inputs());
                for isa in Isa::available() {
                    let y = run_f32(&matmul, isa, &pool, &x);
                    let error = error(&matmul, &x, &y);
                    let bound = exact_bound(matmul.inputs());
                    assert!(
                        error < bound,
                        "{storing:?} transpose {transpose} M {m} {isa:?}: {error:e} {bound:e}"
                    );
                }
            }
        }
    }
}

#[test]
fn long_rows_span_segments() {
    let pool = Pool::new(2).unwrap();
    let mut random = Random(2);
    let storings = [
        Storing::Dense(Kind::Bf16),
        Storing::Packed(QuantMode::Affine, 4, 64, Kind::Bf16),
        Storing::Packed(QuantMode::Affine, 8, 32, Kind::F16),
        Storing::Packed(QuantMode::Nvfp4, 4, 16, Kind::F32),
    ];
    for storing in storings {
        for columns in [768, 800, 2048 + 32] {
            let columns = columns / storing.group() * storing.group();
            let stored = Stored::random(&mut random, storing, 1, 9, columns);
            let matmul = Matmul::transposed(stored.matrix());
            let x = random.floats(7 * columns);
            for isa in Isa::available() {
                let y = run_f32(&matmul, isa, &pool, &x);
                assert!(error(&matmul, &x, &y) < exact_bound(columns), "{storing:?} {columns} {isa:?}");
            }
        }
    }
}

/// Checks that each row of a call with `m` rows has the bits it has alone, on pools of several sizes.
fn assert_rows_do_not_depend_on_others(matmul: &Matmul<'_>, isa: Isa, x: &[f32], kind: Kind, what: &str) {
    let (inputs, outputs) = (matmul.inputs(), matmul.outputs());
    let x = Owned::new(kind, x);
    let all: Vec<_> = [1, 2, 5]
        .map(|threads| run(matmul, isa, &Pool::new(threads).unwrap(), x.floats(), kind).bits())
        .to_vec();
    assert!(all.iter().all(|bits| *bits == all[0]), "{what}: threads");
    let alone = Pool::new(1).unwrap();
    let rows = all[0].len() / outputs;
    for row in 0..rows {
        let slice = row * inputs..(row + 1) * inputs;
        let x = match &x {
            Owned::F32(x) => Floats::F32(&x[slice]),
            Owned::F16(x) => Floats::F16(&x[slice]),
            Owned::Bf16(x) => Floats::Bf16(&x[slice]),
        };
        let bits = run(matmul, isa, &alone, x, kind).bits();
        assert!(bits == all[0][row * outputs..(row + 1) * outputs], "{what}: row {row} of {rows}");
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_among_others() {
    let mut random = Random(3);
    for (index, storing) in Storing::all().into_iter().enumerate() {
        for transpose in [true, false] {
            let (rows, columns): (_, usize) = if transpose { (35, 800) } else { (100, 160) };
            let columns = columns.next_multiple_of(storing.group());
            let stored = Stored::random(&mut random, storing, 1, rows, columns);
            let m = [3, 4, 8, 17, 25][index % 5];
            for isa in Isa::available() {
                let precisions = if transpose && has_integers(isa) {
                    vec![Precision::Exact, Precision::Int16, Precision::Int8]
                } else {
                    vec![Precision::Exact]
                };
                for precision in precisions {
                    let matmul = Matmul { transpose, precision, ..Matmul::transposed(stored.matrix()) };
                    let x = random.floats(m * matmul.inputs());
                    let what = format!("{storing:?} transpose {transpose} {isa:?} {precision:?}");
                    assert_rows_do_not_depend_on_others(&matmul, isa, &x, KINDS[index % 3], &what);
                }
            }
        }
    }
}

#[test]
fn many_rows_have_the_bits_of_one() {
    let mut random = Random(4);
    let stored =
        Stored::random(&mut random, Storing::Packed(QuantMode::Affine, 4, 64, Kind::Bf16), 1, 40, 64);
    let matmul = Matmul::transposed(stored.matrix());
    for m in [64, 97, 130, 400] {
        let x = random.floats(m * 64);
        let what = format!("M {m}");
        assert_rows_do_not_depend_on_others(&matmul, Isa::detect(), &x, Kind::Bf16, &what);
        let matmul = Matmul { precision: Precision::Int8, ..matmul };
        assert_rows_do_not_depend_on_others(&matmul, Isa::detect(), &x, Kind::Bf16, &what);
    }
}

#[test]
fn results_are_rounded_once_to_the_type_asked_for() {
    let pool = Pool::new(2).unwrap();
    let mut random = Random(5);
    let stored = Stored::random(&mut random, Storing::Packed(QuantMode::Affine, 4, 32, Kind::F32), 1, 71, 96);
    let bias = random.floats(71);
    for transpose in [true, false] {
        for isa in Isa::available() {
            let matmul = Matmul { transpose, ..Matmul::transposed(stored.matrix()) };
            let x = random.floats(4 * matmul.inputs());
            let wide = run_f32(&matmul, isa, &pool, &x);
            for kind in KINDS {
                let y = run(&matmul, isa, &pool, x.as_slice().into(), kind);
                assert_eq!(y.bits(), Owned::new(kind, &wide).bits(), "{isa:?} {kind:?}");
                // x in a narrow type is what its f32 values are.
                let narrow = Owned::new(kind, &x);
                let widened = narrow.floats().to_f32();
                let from_narrow = run(&matmul, isa, &pool, narrow.floats(), Kind::F32);
                let from_wide = run(&matmul, isa, &pool, widened.as_slice().into(), Kind::F32);
                assert_eq!(from_narrow.bits(), from_wide.bits(), "{isa:?} {kind:?}");
                if transpose {
                    let bias = Owned::new(kind, &bias);
                    let biased = Matmul { bias: Some(bias.floats()), ..matmul };
                    let values = bias.floats().to_f32();
                    let expected: Vec<_> =
                        wide.iter().zip(values.iter().cycle()).map(|(y, b)| y + b).collect();
                    let y = run(&biased, isa, &pool, x.as_slice().into(), Kind::F32);
                    assert_eq!(y.bits(), Owned::F32(expected).bits(), "{isa:?} {kind:?}");
                }
            }
        }
    }
}

#[test]
fn gathered_rows_have_the_bits_of_single_matrices() {
    let pool = Pool::new(3).unwrap();
    let mut random = Random(6);
    let (experts, rows) = (5, 33);
    for storing in [
        Storing::Dense(Kind::F16),
        Storing::Packed(QuantMode::Affine, 4, 64, Kind::F16),
        Storing::Packed(QuantMode::Mxfp4, 4, 32, Kind::F32),
    ] {
        for transpose in [true, false] {
            let stored = Stored::random(&mut random, storing, experts, rows, 128);
            for isa in Isa::available() {
                for precision in [Precision::Exact, Precision::Int8] {
                    let matmul = Matmul { transpose, precision, ..Matmul::transposed(stored.matrix()) };
                    let (inputs, outputs) = (matmul.inputs(), matmul.outputs());
                    let bias = random.floats(experts * outputs);
                    let x = random.floats(6 * inputs);
                    let x_rows = [5, 0, 0, 1, 2, 2, 2, 4, 3, 3, 1];
                    let chosen = [4, 4, 0, 4, 4, 1, 0, 4, 4, 4, 0];
                    let gather = Gather { x_rows: Some(&x_rows), experts: &chosen };
                    let gathered =
                        Matmul { gather: Some(gather), bias: Some(bias.as_slice().into()), ..matmul };
                    let y = run_f32(&gathered, isa, &pool, &x);
                    if precision == Precision::Exact {
                        assert!(
                            error(
                                &Matmul { bias: None, ..gathered },
                                &x,
                                &run_f32(&Matmul { bias: None, ..gathered }, isa, &pool, &x)
                            ) < exact_bound(inputs)
                        );
                    }
                    for (row, (&x_row, &expert)) in x_rows.iter().zip(&chosen).enumerate() {
                        let one = Gather { x_rows: None, experts: &[expert] };
                        let single = Matmul { gather: Some(one), ..gathered };
                        let x = &x[x_row as usize * inputs..][..inputs];
                        let alone = run_f32(&single, isa, &pool, x);
                        assert_eq!(alone, y[row * outputs..][..outputs], "{storing:?} {isa:?} row {row}");
                    }
                }
            }
        }
    }
}

#[test]
fn integer_modes_are_as_close_as_their_rounding_and_the_same_on_every_instruction_set() {
    let sets: Vec<_> = Isa::available().into_iter().filter(|isa| has_integers(*isa)).collect();
    let pool = Pool::new(2).unwrap();
    let mut random = Random(7);
    for bits in [4, 8] {
        for (group, kind) in [(32, Kind::F16), (64, Kind::Bf16), (128, Kind::F32)] {
            for (rows, columns) in [(33, 128), (70, 896), (16, 1664)] {
                let storing = Storing::Packed(QuantMode::Affine, bits, group, kind);
                let stored = Stored::random(&mut random, storing, 1, rows, columns);
                for m in [1, 6, 13] {
                    let x = random.floats(m * columns);
                    // Half a step of a uniform value rounded to 255 or 65535 steps, some standard deviations out.
                    for (precision, bound) in [(Precision::Int16, 1e-4), (Precision::Int8, 2e-2)] {
                        let matmul = Matmul { precision, ..Matmul::transposed(stored.matrix()) };
                        let mut first = None;
                        for &isa in &sets {
                            assert_eq!(matmul.effective_precision(isa), precision);
                            let y = run_f32(&matmul, isa, &pool, &x);
                            let error = error(&matmul, &x, &y);
                            assert!(error < bound, "{storing:?} {columns} {precision:?}: {error:e}");
                            // And it is not the exact kernel that ran.
                            let exact = Matmul { precision: Precision::Exact, ..matmul };
                            assert_ne!(y, run_f32(&exact, isa, &pool, &x));
                            let first = first.get_or_insert_with(|| y.clone());
                            assert_eq!(y, *first, "{isa:?} {storing:?} {columns} {precision:?}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn integer_modes_fall_back_to_exact_where_there_is_no_kernel() {
    let pool = Pool::new(1).unwrap();
    let mut random = Random(8);
    let stored = Stored::random(&mut random, Storing::Packed(QuantMode::Affine, 4, 32, Kind::F32), 1, 5, 64);
    let x = random.floats(64);
    for isa in Isa::available().into_iter().filter(|isa| !has_integers(*isa)) {
        let exact = Matmul::transposed(stored.matrix());
        let int8 = Matmul { precision: Precision::Int8, ..exact };
        assert_eq!(int8.effective_precision(isa), Precision::Exact);
        assert_eq!(run_f32(&int8, isa, &pool, &x), run_f32(&exact, isa, &pool, &x));
    }
}

#[test]
fn not_a_number_and_infinity_stay_in_their_rows() {
    let pool = Pool::new(2).unwrap();
    let mut random = Random(9);
    let stored = Stored::random(&mut random, Storing::Packed(QuantMode::Affine, 4, 32, Kind::F32), 1, 40, 96);
    for isa in Isa::available() {
        for precision in [Precision::Exact, Precision::Int16, Precision::Int8] {
            let matmul = Matmul { precision, ..Matmul::transposed(stored.matrix()) };
            let mut x = random.floats(5 * 96);
            let clean = run_f32(&matmul, isa, &pool, &x);
            x[96 + 7] = f32::NAN;
            x[3 * 96] = f32::INFINITY;
            let y = run_f32(&matmul, isa, &pool, &x);
            for row in [0, 2, 4] {
                assert_eq!(y[row * 40..][..40], clean[row * 40..][..40], "{isa:?} {precision:?}");
            }
            assert!(y[40..80].iter().all(|y| y.is_nan()), "{isa:?} {precision:?}");
            assert!(y[120..160].iter().all(|y| !y.is_finite()), "{isa:?} {precision:?}");
        }
    }
}

#[test]
fn bfloat16_rounding_keeps_nan_and_ties_to_even() {
    let values = [1.0, f32::from_bits(0x3f80_8000), f32::from_bits(0x3f81_8000), f32::NAN, f32::MAX, -0.0];
    for isa in Isa::available() {
        let pool = Pool::new(1).unwrap();
        let weights = [1.0f32];
        let matmul = Matmul::transposed(Matrix::dense(weights.as_slice().into(), 1, 1, 1).unwrap());
        let y = run(&matmul, isa, &pool, values.as_slice().into(), Kind::Bf16);
        let Owned::Bf16(y) = y else { unreachable!() };
        for (y, value) in y.iter().zip(values) {
            // -0 * 1 + 0 is 0.
            let expected = bf16::from_f32(value + 0.0);
            assert!(y.to_bits() == expected.to_bits() || (y.is_nan() && value.is_nan()), "{value} {y}");
        }
    }
}

#[derive(serde::Deserialize)]
struct Recorded {
    mode: String,
    bits: u8,
    group_size: u32,
    words: Vec<u32>,
    scales: Vec<f32>,
    biases: Option<Vec<f32>>,
    values: Vec<f32>,
}

#[test]
fn weights_are_what_mlx_dequantizes() {
    let text = include_str!("../../../../../fixtures/kernels/dequantize.json");
    let cases: Vec<Recorded> = serde_json::from_str(text).unwrap();
    assert_eq!(cases.len(), 11);
    let pool = Pool::new(1).unwrap();
    for case in cases {
        let columns = case.values.len();
        let mode = [QuantMode::Affine, QuantMode::Mxfp4, QuantMode::Nvfp4, QuantMode::Mxfp8]
            .into_iter()
            .find(|mode| mode.name() == case.mode)
            .unwrap();
        let quantization = QuantParams { bits: case.bits, group_size: case.group_size, mode };
        let codes: Vec<u8> = case.scales.iter().map(|scale| *scale as u8).collect();
        let scales = match &case.biases {
            Some(biases) => {
                Scales::Affine { scales: case.scales.as_slice().into(), biases: biases.as_slice().into() }
            }
            None => Scales::Byte(&codes),
        };
        let matrix = Matrix::packed(&case.words, scales, quantization, 1, 1, columns).unwrap();
        for (column, value) in case.values.iter().enumerate() {
            let ours = reference::weight(&matrix, 0, 0, column);
            // MLX rounds the product before it adds the bias.
            let slack = if mode == QuantMode::Affine { 2e-7 * (1.0 + f64::from(*value).abs()) } else { 0.0 };
            assert!((ours - f64::from(*value)).abs() <= slack, "{} {column}: {ours} {value}", case.mode);
        }
        // With the unit matrix for x, kernels return the weights themselves.
        let mut unit = vec![0f32; columns * columns];
        (0..columns).for_each(|column| unit[column * columns + column] = 1.0);
        for isa in Isa::available() {
            let one = [1.0f32];
            let by_column = run_f32(&Matmul::transposed(matrix), isa, &pool, &unit);
            let by_row = run_f32(&Matmul::plain(matrix), isa, &pool, &one);
            for (column, value) in case.values.iter().enumerate() {
                let slack = if mode == QuantMode::Affine { 2e-7 * (1.0 + value.abs()) } else { 0.0 };
                assert!((by_column[column] - value).abs() <= slack, "{isa:?} {} {column}", case.mode);
                assert_eq!(by_row[column], by_column[column], "{isa:?} {} {column}", case.mode);
            }
        }
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused_and_nothing_is_written() {
    let pool = Pool::new(1).unwrap();
    let weights = vec![0f32; 6];
    let values = || Floats::F32(&weights);
    assert!(matches!(
        Matrix::dense(values(), 1, 2, 4),
        Err(MatmulError::Length { wanted: 8, actual: 6, .. })
    ));
    assert!(matches!(Matrix::dense(values(), 1, 0, 3), Err(MatmulError::Empty { .. })));
    assert_eq!(Matrix::dense(values(), usize::MAX, 2, 3).unwrap_err(), MatmulError::TooLarge);
    let words = vec![0u32; 8];
    let quantization = |mode, bits, group_size| QuantParams { mode, bits, group_size };
    let affine = |count: usize| Scales::Affine {
        scales: Floats::F32(&weights[..count]),
        biases: Floats::F32(&weights[..count]),
    };
    let four = quantization(QuantMode::Affine, 4, 32);
    assert!(Matrix::packed(&words, affine(2), four, 1, 1, 64).is_ok());
    assert!(matches!(Matrix::packed(&words, affine(3), four, 1, 1, 64), Err(MatmulError::Length { .. })));
    assert!(matches!(Matrix::packed(&words, affine(2), four, 1, 1, 48), Err(MatmulError::Group { .. })));
    assert!(matches!(Matrix::packed(&words, affine(2), four, 1, 1, 0), Err(MatmulError::Empty { .. })));
    assert_eq!(
        Matrix::packed(&words, affine(2), four, 1, usize::MAX, 64).unwrap_err(),
        MatmulError::TooLarge
    );
    assert_eq!(
        Matrix::packed(&words, Scales::Byte(&[0, 0]), four, 1, 1, 64).unwrap_err(),
        MatmulError::ScaleType
    );
    for (mode, bits, group) in [
        (QuantMode::Affine, 7, 32),
        (QuantMode::Affine, 4, 16),
        (QuantMode::Affine, 0, 64),
        (QuantMode::Mxfp4, 4, 64),
        (QuantMode::Nvfp4, 8, 16),
    ] {
        let result = Matrix::packed(&words, affine(2), quantization(mode, bits, group), 1, 1, 64);
        assert!(matches!(result, Err(MatmulError::Quantization { .. })), "{mode:?} {bits} {group}");
    }

    let matmul = Matmul::transposed(Matrix::dense(values(), 1, 2, 3).unwrap());
    let mut y = vec![7f32; 4];
    let check = |matmul: &Matmul<'_>, x: &[f32], y: &mut [f32]| {
        matmul.run(Isa::detect(), &pool, x.into(), y.into()).unwrap_err()
    };
    assert!(matches!(check(&matmul, &[0.0; 7], &mut y), MatmulError::Length { what: "x (whole rows)", .. }));
    assert!(matches!(check(&matmul, &[0.0; 9], &mut y), MatmulError::Length { what: "y", .. }));
    let biased = Matmul { bias: Some(Floats::F32(&weights[..3])), ..matmul };
    assert!(matches!(check(&biased, &[0.0; 6], &mut y), MatmulError::Length { what: "bias", .. }));
    let gather = |x_rows, experts| Matmul { gather: Some(Gather { x_rows, experts }), ..matmul };
    assert!(matches!(
        check(&gather(None, &[0, 1]), &[0.0; 6], &mut y),
        MatmulError::Index { what: "expert", index: 1, count: 1 }
    ));
    assert!(matches!(
        check(&gather(Some(&[0, 2]), &[0, 0]), &[0.0; 6], &mut y),
        MatmulError::Index { what: "x row", index: 2, count: 2 }
    ));
    assert!(matches!(
        check(&gather(Some(&[0]), &[0, 0]), &[0.0; 6], &mut y),
        MatmulError::Length { what: "x_rows", .. }
    ));
    let stacked = Matmul::transposed(Matrix::dense(values(), 2, 1, 3).unwrap());
    assert_eq!(check(&stacked, &[0.0; 12], &mut y), MatmulError::Experts { experts: 2 });
    assert_eq!(y, [7.0; 4]);
    // No rows at all is no error.
    matmul.run(Isa::detect(), &pool, Floats::F32(&[]), FloatsMut::F32(&mut [])).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn random_shapes_match_the_reference_and_do_not_depend_on_company(
        storing in prop::sample::select(Storing::all()),
        transpose: bool,
        (m, rows, groups) in (1usize..20, 1usize..80, 1usize..5),
        threads in 1usize..4,
        seed: u64,
        precision in prop::sample::select(vec![Precision::Exact, Precision::Int16, Precision::Int8]),
    ) {
        let mut random = Random(seed);
        let columns = if storing.group() == 1 { groups * 27 } else { groups * storing.group() };
        let stored = Stored::random(&mut random, storing, 1, rows, columns);
        let matmul = Matmul { transpose, precision, ..Matmul::transposed(stored.matrix()) };
        let (inputs, outputs) = (matmul.inputs(), matmul.outputs());
        let x = random.floats(m * inputs);
        let pool = Pool::new(threads).unwrap();
        for isa in Isa::available() {
            let y = run_f32(&matmul, isa, &pool, &x);
            let bound = match matmul.effective_precision(isa) {
                Precision::Exact => exact_bound(inputs),
                Precision::Int16 => 2e-4,
                Precision::Int8 => 4e-2,
            };
            let error = error(&matmul, &x, &y);
            prop_assert!(error < bound, "{:?} {:?}: {:e}", storing, isa, error);
            let row = (seed % m as u64) as usize;
            let alone = run_f32(&matmul, isa, &pool, &x[row * inputs..][..inputs]);
            prop_assert_eq!(&alone[..], &y[row * outputs..][..outputs]);
        }
    }
}
