use super::super::testing::{Owned, Type, assert_near, bits, isas, noise, pools};
use super::*;

fn logits(kind: Type, count: usize, width: usize) -> Owned {
    Owned::new(kind, &noise(3, count * width).iter().map(|x| 20.0 * x).collect::<Vec<_>>())
}

#[test]
fn softmax_and_logsumexp_agree_with_the_reference_whatever_the_cut() {
    let pools = pools();
    for kind in Type::ALL {
        for (count, width) in [(1, 1), (3, 17), (70, 100), (2, 4096), (1, 30_001)] {
            let x = logits(kind, count, width);
            let rows = Rows::dense(x.view(), width).unwrap();
            let compute = |isa, pool: &Pool, rows: &Rows<'_>| {
                let mut out = Owned::zeros(kind, rows.count * width);
                softmax(isa, pool, rows, out.view_mut()).unwrap();
                let mut sums = vec![0.0; rows.count];
                logsumexp(isa, pool, rows, &mut sums).unwrap();
                (out.to_f32(), sums)
            };
            let plain = compute(Isa::PLAIN, &pools[0], &rows);
            let x = x.to_f32();
            for row in [0, count - 1] {
                let x: Vec<f64> = x[row * width..][..width].iter().map(|x| f64::from(*x)).collect();
                let sum: f64 = x.iter().map(|x| x.exp()).sum();
                let expected: Vec<f64> = x.iter().map(|x| x.exp() / sum).collect();
                assert_near(&plain.0[row * width..][..width], &expected, kind, 1e-7);
                assert!((f64::from(plain.1[row]) - sum.ln()).abs() < 3e-6);
            }
            for isa in isas() {
                for pool in &pools {
                    let found = compute(isa, pool, &rows);
                    assert_eq!((bits(&found.0), bits(&found.1)), (bits(&plain.0), bits(&plain.1)));
                }
                let alone = compute(isa, &pools[1], &Rows { count: 1, ..rows });
                assert_eq!((bits(&alone.0), bits(&alone.1)), (bits(&plain.0[..width]), bits(&plain.1[..1])));
            }
        }
    }
}

#[test]
fn hidden_entries_and_nan_follow_the_mathematics() {
    let pool = Pool::new(1).unwrap();
    let low = f32::NEG_INFINITY;
    let x = [1.0, low, 1.0, low, low, low, 0.0, f32::NAN, 0.0];
    let rows = Rows::dense(Floats::F32(&x), 3).unwrap();
    for isa in isas() {
        let (mut out, mut sums) = ([7.0; 9], [0.0; 3]);
        softmax(isa, &pool, &rows, FloatsMut::F32(&mut out)).unwrap();
        assert_eq!(out[..3], [0.5, 0.0, 0.5]);
        assert!(out[3..].iter().all(|x| x.is_nan()), "{out:?}");
        logsumexp(isa, &pool, &rows, &mut sums).unwrap();
        assert!((sums[0] - 1.693_147_2).abs() < 1e-6 && sums[1] == low && sums[2].is_nan());
    }
}

#[test]
fn the_first_of_equal_largest_entries_wins_and_nan_never_does() {
    let pools = pools();
    let check = |row: &[f32], expected: u32| {
        for kind in Type::ALL {
            let x = Owned::new(kind, row);
            for isa in isas() {
                let mut out = [9];
                let rows = Rows::new(x.view(), 1, row.len(), row.len()).unwrap();
                argmax(isa, &pools[1], &rows, &mut out).unwrap();
                assert_eq!(out[0], expected);
            }
        }
    };
    let mut row = vec![-1.0; 50_000];
    check(&row, 0);
    for place in [49_999, 49_152, 16_384, 4096, 4095, 100, 16, 3] {
        row[place] = 1.0;
        check(&row, place as u32);
    }
    row[2] = f32::NAN;
    check(&row, 3);
    let low = f32::NEG_INFINITY;
    check(&[f32::NAN, low, low], 1);
    check(&[f32::NAN; 40], 0);
    check(&[low; 40], 0);
    check(&[], 0);
    check(&[0.0, f32::INFINITY, f32::INFINITY], 1);
}

#[test]
fn several_rows_each_have_their_own_largest() {
    let x = logits(Type::F16, 9, 5000);
    let rows = Rows::dense(x.view(), 5000).unwrap();
    let mut out = [0; 9];
    argmax(Isa::detect(), &pools()[2], &rows, &mut out).unwrap();
    for (found, row) in out.iter().zip(x.to_f32().chunks(5000)) {
        let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        assert_eq!(*found as usize, row.iter().position(|x| *x == best).unwrap());
    }
}

#[test]
fn the_largest_few_are_those_of_a_full_sort() {
    for kind in Type::ALL {
        for (width, k) in [(10, 3), (10, 20), (50_000, 1), (50_000, 40), (50_000, 2000), (0, 4), (9, 0)] {
            let x = logits(kind, 1, width);
            let mut expected: Vec<(u32, f32)> =
                x.to_f32().into_iter().enumerate().map(|(i, x)| (i as u32, x)).collect();
            expected.sort_by(larger_first);
            expected.truncate(k);
            for isa in isas() {
                assert_eq!(top_k(isa, x.view(), k), expected);
            }
        }
    }
    assert_eq!(top_k(Isa::detect(), Floats::F32(&[f32::NAN, 1.0, f32::NAN]), 2), [(1, 1.0)]);
}
