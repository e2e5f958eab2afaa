//! RMS and layer normalization over the last axis, as `mlx.fast.rms_norm` and `mlx.fast.layer_norm`.
//!
//! A row is summed in four accumulators of 16 lanes whatever the other rows are, so its bits depend on nothing else.

use std::borrow::Cow;

use super::super::{Isa, Pool};
use super::error::{KernelError, expect};
use super::floats::{Floats, FloatsMut};
use super::pieces::Pieces;
use super::simd::{self, Element, Kernel, LANES, Simd, load_part, store_part};
use super::views::Rows;
use super::{SERIAL_ELEMENTS, with_floats, with_floats_mut};

/// `x / sqrt(mean(x^2) + eps) * weight`, row by row, into `out` (`[count, width]`).
///
/// # Errors
/// When the weight or `out` does not fit, or the work fails.
pub fn rms_norm(
    isa: Isa,
    pool: &Pool,
    x: &Rows<'_>,
    weight: Option<Floats<'_>>,
    eps: f32,
    out: FloatsMut<'_>,
) -> Result<(), KernelError> {
    let op = "rms_norm";
    normalize(op, isa, pool, x, Scaling::new(op, isa, x, weight, None, eps, false)?, out)
}

/// `(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`, row by row, into `out` (`[count, width]`).
///
/// # Errors
/// When the weight, the bias or `out` does not fit, or the work fails.
pub fn layer_norm(
    isa: Isa,
    pool: &Pool,
    x: &Rows<'_>,
    weight: Option<Floats<'_>>,
    bias: Option<Floats<'_>>,
    eps: f32,
    out: FloatsMut<'_>,
) -> Result<(), KernelError> {
    let op = "layer_norm";
    normalize(op, isa, pool, x, Scaling::new(op, isa, x, weight, bias, eps, true)?, out)
}

/// `sum = x + residual`, rounded to its type, and `out = rms_norm(sum)`: the same bits as the two steps apart.
///
/// # Errors
/// When types or shapes do not fit together, or the work fails.
pub fn add_rms_norm(
    isa: Isa,
    pool: &Pool,
    x: &Rows<'_>,
    residual: &Rows<'_>,
    weight: Option<Floats<'_>>,
    eps: f32,
    sum: FloatsMut<'_>,
    out: FloatsMut<'_>,
) -> Result<(), KernelError> {
    let op = "add_rms_norm";
    let scaling = Scaling::new(op, isa, x, weight, None, eps, false)?;
    expect(op, "the number of residual rows", x.count, residual.count)?;
    expect(op, "the width of the residual", x.width, residual.width)?;
    expect(op, "the number of sums", x.count * x.width, sum.len())?;
    expect(op, "the number of results", x.count * x.width, out.len())?;
    match (x.data, residual.data, sum) {
        (Floats::F32(a), Floats::F32(b), FloatsMut::F32(sum)) => {
            with_floats_mut!(out, out => add_rows(isa, pool, (a, x), (b, residual), &scaling, sum, out))
        }
        (Floats::F16(a), Floats::F16(b), FloatsMut::F16(sum)) => {
            with_floats_mut!(out, out => add_rows(isa, pool, (a, x), (b, residual), &scaling, sum, out))
        }
        (Floats::Bf16(a), Floats::Bf16(b), FloatsMut::Bf16(sum)) => {
            with_floats_mut!(out, out => add_rows(isa, pool, (a, x), (b, residual), &scaling, sum, out))
        }
        _ => Err(KernelError::MixedTypes { op, what: "x, the residual and their sum" }),
    }
}

/// [`rms_norm`] of one row.
#[inline(always)]
pub(super) fn rms_row<S: Simd>(s: S, from: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scaling = Scaling { weight: Some(Cow::Borrowed(weight)), bias: None, eps, centred: false };
    normalize_row(s, from, &scaling, out);
}

/// What is done to a row besides dividing it by its size.
struct Scaling<'a> {
    weight: Option<Cow<'a, [f32]>>,
    bias: Option<Cow<'a, [f32]>>,
    eps: f32,
    centred: bool,
}

impl<'a> Scaling<'a> {
    fn new(
        op: &'static str,
        isa: Isa,
        x: &Rows<'_>,
        weight: Option<Floats<'a>>,
        bias: Option<Floats<'a>>,
        eps: f32,
        centred: bool,
    ) -> Result<Self, KernelError> {
        if let Some(weight) = &weight {
            expect(op, "the length of the weight", x.width, weight.len())?;
        }
        if let Some(bias) = &bias {
            expect(op, "the length of the bias", x.width, bias.len())?;
        }
        let widened = |values: Option<Floats<'a>>| values.map(|values| super::widen(isa, values));
        Ok(Self { weight: widened(weight), bias: widened(bias), eps, centred })
    }
}

/// Rows of a task.
fn rows_each(width: usize) -> usize {
    (SERIAL_ELEMENTS / 2 / width.max(1)).max(1)
}

fn normalize(
    op: &'static str,
    isa: Isa,
    pool: &Pool,
    x: &Rows<'_>,
    scaling: Scaling<'_>,
    out: FloatsMut<'_>,
) -> Result<(), KernelError> {
    expect(op, "the number of results", x.count * x.width, out.len())?;
    let (width, stride, each) = (x.width, x.stride, rows_each(x.width));
    with_floats!(x.data, from => with_floats_mut!(out, out => {
        Ok(pool.run_chunks_mut(out, each * width, &|task, out| {
            let from = &from[task * each * stride..];
            simd::run(isa, Normalize { from, stride, width, scaling: &scaling, out });
        })?)
    }))
}

/// Consecutive rows.
struct Normalize<'a, E, O> {
    from: &'a [E],
    stride: usize,
    width: usize,
    scaling: &'a Scaling<'a>,
    out: &'a mut [O],
}

impl<E: Element, O: Element> Kernel for Normalize<'_, E, O> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (row, out) in self.out.chunks_mut(self.width).enumerate() {
            normalize_row(s, &self.from[row * self.stride..][..self.width], self.scaling, out);
        }
    }
}

/// One row.
#[inline(always)]
fn normalize_row<S: Simd, E: Element, O: Element>(s: S, from: &[E], scaling: &Scaling<'_>, out: &mut [O]) {
    let count = from.len() as f32;
    let zero = s.splat(0.0);
    let mean = s.splat(if scaling.centred { s.sum(sum_of(s, from, |v| v)) / count } else { 0.0 });
    // Lanes past the end are zero, which must stay out of the variance.
    let tail = from.len() % LANES;
    let squares = if scaling.centred {
        let (whole, rest) = from.split_at(from.len() - tail);
        let whole = sum_of(s, whole, |v| {
            let v = s.sub(v, mean);
            s.mul(v, v)
        });
        let rest = s.keep_lanes(s.sub(load_part(s, rest), mean), 0, tail, zero);
        s.mul_add(rest, rest, whole)
    } else {
        sum_of(s, from, |v| s.mul(v, v))
    };
    let factor = s.splat(1.0 / (s.sum(squares) / count + scaling.eps).sqrt());
    let shift = |v| if scaling.centred { s.sub(v, mean) } else { v };
    let (chunks, rest) = from.as_chunks::<LANES>();
    let (out_chunks, out_rest) = out.as_chunks_mut::<LANES>();
    for (i, (from, out)) in chunks.iter().zip(out_chunks).enumerate() {
        let mut v = s.mul(shift(E::load(s, from)), factor);
        if let Some(weight) = &scaling.weight {
            v = s.mul(v, s.load(&weight.as_chunks().0[i]));
        }
        if let Some(bias) = &scaling.bias {
            v = s.add(v, s.load(&bias.as_chunks().0[i]));
        }
        O::store(s, out, v);
    }
    if !rest.is_empty() {
        let start = from.len() - tail;
        let mut v = s.mul(shift(load_part(s, rest)), factor);
        if let Some(weight) = &scaling.weight {
            v = s.mul(v, load_part(s, &weight[start..]));
        }
        if let Some(bias) = &scaling.bias {
            v = s.add(v, load_part(s, &bias[start..]));
        }
        store_part(s, out_rest, v);
    }
}

/// The lane-wise sum of `f` of all vectors of a row, the last one filled up with zeros.
#[inline(always)]
fn sum_of<S: Simd, E: Element>(s: S, from: &[E], f: impl Fn(S::V) -> S::V) -> S::V {
    let mut sums = [s.splat(0.0); 4];
    let (fours, rest) = from.as_chunks::<{ 4 * LANES }>();
    for four in fours {
        let four = four.as_chunks::<LANES>().0;
        for i in 0..4 {
            sums[i] = s.add(sums[i], f(E::load(s, &four[i])));
        }
    }
    let (chunks, rest) = rest.as_chunks::<LANES>();
    for (i, chunk) in chunks.iter().enumerate() {
        sums[i] = s.add(sums[i], f(E::load(s, chunk)));
    }
    if !rest.is_empty() {
        sums[3] = s.add(sums[3], f(load_part(s, rest)));
    }
    let [a, b, c, d] = sums;
    s.add(s.add(a, b), s.add(c, d))
}

/// [`add_rms_norm`] for one element type.
fn add_rows<E: Element, O: Element>(
    isa: Isa,
    pool: &Pool,
    (a, x): (&[E], &Rows<'_>),
    (b, residual): (&[E], &Rows<'_>),
    scaling: &Scaling<'_>,
    sum: &mut [E],
    out: &mut [O],
) -> Result<(), KernelError> {
    let (count, width, each) = (x.count, x.width, rows_each(x.width));
    let (sum, out) = (Pieces::new(sum), Pieces::new(out));
    Ok(pool.run_ranges(count, each, &|rows| {
        let range = rows.start * width..rows.end * width;
        // SAFETY: the ranges of two tasks have no row in common.
        let (sum, out) = unsafe { (sum.piece(range.clone()), out.piece(range)) };
        let (a, b) = (&a[rows.start * x.stride..], &b[rows.start * residual.stride..]);
        simd::run(isa, AddNormalize { a, b, strides: (x.stride, residual.stride), width, scaling, sum, out });
    })?)
}

struct AddNormalize<'a, E, O> {
    a: &'a [E],
    b: &'a [E],
    strides: (usize, usize),
    width: usize,
    scaling: &'a Scaling<'a>,
    sum: &'a mut [E],
    out: &'a mut [O],
}

impl<E: Element, O: Element> Kernel for AddNormalize<'_, E, O> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let rows = self.sum.chunks_mut(self.width).zip(self.out.chunks_mut(self.width));
        for (row, (sum, out)) in rows.enumerate() {
            let a = &self.a[row * self.strides.0..][..self.width];
            let b = &self.b[row * self.strides.1..][..self.width];
            add(s, a, b, sum);
            normalize_row(s, sum, self.scaling, out);
        }
    }
}

#[inline(always)]
fn add<S: Simd, E: Element>(s: S, a: &[E], b: &[E], to: &mut [E]) {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let (to, to_rest) = to.as_chunks_mut::<LANES>();
    for ((a, b), to) in a.iter().zip(b).zip(to) {
        E::store(s, to, s.add(E::load(s, a), E::load(s, b)));
    }
    store_part(s, to_rest, s.add(load_part(s, a_rest), load_part(s, b_rest)));
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Owned, Type, assert_near, bits, isas, noise, pools};
    use super::*;

    /// Both norms written plainly.
    fn reference(x: &[f32], weight: &[f32], bias: Option<&[f32]>, eps: f64) -> Vec<f64> {
        let n = x.len() as f64;
        let x: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        let mean = if bias.is_some() { x.iter().sum::<f64>() / n } else { 0.0 };
        let size = (x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n + eps).sqrt();
        let bias = bias.map_or(vec![0.0; x.len()], <[f32]>::to_vec);
        let scaled = x.iter().zip(weight).map(|(x, w)| (x - mean) / size * f64::from(*w));
        scaled.zip(bias).map(|(x, b)| x + f64::from(b)).collect()
    }

    #[test]
    fn norms_agree_with_the_reference_and_do_not_depend_on_other_rows() {
        let pools = pools();
        for kind in Type::ALL {
            for weight_kind in [Type::F32, kind] {
                for width in [1, 15, 64, 80, 1001] {
                    let (count, stride) = (40, width + 3);
                    let x = Owned::new(kind, &noise(1, count * stride));
                    let weight = Owned::new(weight_kind, &noise(2, width));
                    let bias = Owned::new(weight_kind, &noise(3, width));
                    let rows = Rows::new(x.view(), count, width, stride).unwrap();
                    for with_bias in [false, true] {
                        let compute = |isa, pool: &Pool, rows: &Rows<'_>| {
                            let mut out = Owned::zeros(Type::F32, rows.count() * width);
                            let weight = Some(weight.view());
                            if with_bias {
                                let bias = Some(bias.view());
                                layer_norm(isa, pool, rows, weight, bias, 1e-5, out.view_mut()).unwrap();
                            } else {
                                rms_norm(isa, pool, rows, weight, 1e-5, out.view_mut()).unwrap();
                            }
                            out.to_f32()
                        };
                        let plain = compute(Isa::PLAIN, &pools[0], &rows);
                        let (x, w, b) = (x.to_f32(), weight.to_f32(), bias.to_f32());
                        for row in [0, 7, count - 1] {
                            let bias = with_bias.then_some(&b[..]);
                            let expected = reference(&x[row * stride..][..width], &w, bias, 1e-5);
                            let found = &plain[row * width..][..width];
                            // One element alone is centred to nothing, divided by almost nothing.
                            assert_near(found, &expected, Type::F32, 3e-6);
                        }
                        for isa in isas() {
                            for pool in &pools {
                                assert_eq!(bits(&compute(isa, pool, &rows)), bits(&plain));
                            }
                            let one = Rows { count: 1, ..rows };
                            assert_eq!(bits(&compute(isa, &pools[1], &one)), bits(&plain[..width]));
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn norms_without_parameters_equal_mlx() {
        let x = [1.0, -2.0, 3.0, 0.5, 4.0];
        let (w, b) = ([1.0, 2.0, 3.0, 4.0, 5.0], [0.1, 0.2, 0.3, 0.4, 0.5]);
        let rows = Rows::dense(Floats::F32(&x), 5).unwrap();
        let (isa, pool) = (Isa::detect(), Pool::new(1).unwrap());
        let mut out = [0.0; 5];
        rms_norm(isa, &pool, &rows, Some(Floats::F32(&w)), 1e-5, FloatsMut::F32(&mut out)).unwrap();
        let mlx = [0.406_557_5, -1.626_23, 3.659_017_3, 0.813_115, 8.131_15];
        assert_near(&out, &mlx, Type::F32, 1e-6);
        let (weight, bias) = (Some(Floats::F32(&w[..])), Some(Floats::F32(&b[..])));
        layer_norm(isa, &pool, &rows, weight, bias, 1e-5, FloatsMut::F32(&mut out)).unwrap();
        let mlx = [-0.043_673_8, -2.960_823_3, 2.742_454, -1.132_520_4, 6.965_319_6];
        assert_near(&out, &mlx, Type::F32, 1e-6);
        rms_norm(isa, &pool, &rows, None, 1e-5, FloatsMut::F32(&mut out)).unwrap();
        assert!((out[0] - 0.406_557_5).abs() < 1e-6 && (out[4] - 4.0 * out[0]).abs() < 1e-6);
    }

    #[test]
    fn the_fused_residual_gives_the_bits_of_the_two_steps() {
        for kind in Type::ALL {
            for (count, width) in [(1, 576), (40, 77), (300, 128)] {
                let (x, residual) = (
                    Owned::new(kind, &noise(1, count * width)),
                    Owned::new(kind, &noise(2, count * (width + 1))),
                );
                let weight = Owned::new(kind, &noise(3, width));
                let x = Rows::dense(x.view(), width).unwrap();
                let residual = Rows::new(residual.view(), count, width, width + 1).unwrap();
                for isa in isas() {
                    let pool = Pool::new(2).unwrap();
                    let (mut sum, mut out) =
                        (Owned::zeros(kind, count * width), Owned::zeros(kind, count * width));
                    let weight = Some(weight.view());
                    add_rms_norm(isa, &pool, &x, &residual, weight, 1e-6, sum.view_mut(), out.view_mut())
                        .unwrap();
                    let (a, b) = (x.data.to_f32(), residual.data.to_f32());
                    let added: Vec<f32> =
                        (0..count * width).map(|i| a[i] + b[i / width * (width + 1) + i % width]).collect();
                    assert_eq!(bits(&sum.to_f32()), bits(&Owned::new(kind, &added).to_f32()));
                    let mut apart = Owned::zeros(kind, count * width);
                    let rows = Rows::dense(sum.view(), width).unwrap();
                    rms_norm(isa, &pool, &rows, weight, 1e-6, apart.view_mut()).unwrap();
                    assert_eq!(bits(&out.to_f32()), bits(&apart.to_f32()));
                }
            }
        }
    }

    #[test]
    fn a_weight_of_another_length_is_refused() {
        let x = [0.0; 6];
        let rows = Rows::dense(Floats::F32(&x), 3).unwrap();
        let pool = Pool::new(1).unwrap();
        let weight = Some(Floats::F32(&x));
        let error = rms_norm(Isa::PLAIN, &pool, &rows, weight, 1e-5, FloatsMut::F32(&mut [0.0; 6]));
        assert_eq!(error.unwrap_err().to_string(), "rms_norm: the length of the weight is 6 but must be 3");
        assert!(rms_norm(Isa::PLAIN, &pool, &rows, None, 1e-5, FloatsMut::F32(&mut [0.0; 5])).is_err());
    }
}
