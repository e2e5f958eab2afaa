//! Activations and their products with a second input, element by element.
//!
//! Everything is computed in float32 and rounded once: `silu(gate) * up` in bfloat16 rounds the product only.

use super::super::{Isa, Pool};
use super::SERIAL_ELEMENTS;
use super::error::{KernelError, expect};
use super::floats::{Floats, FloatsMut};
use super::pieces::Pieces;
use super::simd::{self, Element, Kernel, LANES, Simd, load_part, math, store_part};
use super::views::Rows;

/// An activation function.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `x`.
    Identity,
    /// `x / (1 + e^-x)`; with a product, SwiGLU.
    Silu,
    /// `x (1 + erf(x / √2)) / 2`.
    Gelu,
    /// `x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2`.
    GeluTanh,
    /// `x / (1 + e^(-1.702 x))`.
    GeluQuick,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)²`.
    ReluSquared,
    /// `1 / (1 + e^-x)`.
    Sigmoid,
    /// `tanh(x / cap) cap`.
    Softcap(f32),
}

/// `activation(x)` into `out` (`[count, width]`, the type of `x`).
///
/// # Errors
/// When types or shapes do not fit together, or the work fails.
pub fn activate(
    isa: Isa,
    pool: &Pool,
    activation: Activation,
    x: &Rows<'_>,
    out: FloatsMut<'_>,
) -> Result<(), KernelError> {
    let op = "activate";
    expect(op, "the number of results", x.count * x.width, out.len())?;
    match (x.data, out) {
        (Floats::F32(from), FloatsMut::F32(out)) => spread(isa, pool, activation, (from, x), None, out),
        (Floats::F16(from), FloatsMut::F16(out)) => spread(isa, pool, activation, (from, x), None, out),
        (Floats::Bf16(from), FloatsMut::Bf16(out)) => spread(isa, pool, activation, (from, x), None, out),
        _ => Err(KernelError::MixedTypes { op, what: "input and output" }),
    }
}

/// `activation(gate) * up` into `out` (`[count, width]`), all of one type. `gate` and `up` may be halves of one
/// wider array.
///
/// # Errors
/// When types or shapes do not fit together, or the work fails.
pub fn activate_gated(
    isa: Isa,
    pool: &Pool,
    activation: Activation,
    gate: &Rows<'_>,
    up: &Rows<'_>,
    out: FloatsMut<'_>,
) -> Result<(), KernelError> {
    let op = "activate_gated";
    expect(op, "the number of rows of up", gate.count, up.count)?;
    expect(op, "the width of up", gate.width, up.width)?;
    expect(op, "the number of results", gate.count * gate.width, out.len())?;
    match (gate.data, up.data, out) {
        (Floats::F32(a), Floats::F32(b), FloatsMut::F32(out)) => {
            spread(isa, pool, activation, (a, gate), Some((b, up)), out)
        }
        (Floats::F16(a), Floats::F16(b), FloatsMut::F16(out)) => {
            spread(isa, pool, activation, (a, gate), Some((b, up)), out)
        }
        (Floats::Bf16(a), Floats::Bf16(b), FloatsMut::Bf16(out)) => {
            spread(isa, pool, activation, (a, gate), Some((b, up)), out)
        }
        _ => Err(KernelError::MixedTypes { op, what: "gate, up and output" }),
    }
}

/// Cuts the rows into tasks: some whole rows, or a part of one.
fn spread<E: Element>(
    isa: Isa,
    pool: &Pool,
    activation: Activation,
    x: (&[E], &Rows<'_>),
    up: Option<(&[E], &Rows<'_>)>,
    out: &mut [E],
) -> Result<(), KernelError> {
    let (count, width) = (x.1.count, x.1.width);
    if width == 0 {
        return Ok(());
    }
    let each = SERIAL_ELEMENTS / 2;
    let (rows, columns) = ((each / width).max(1), each.min(width));
    let across = width.div_ceil(columns);
    let out = Pieces::new(out);
    let row_tasks = count.div_ceil(rows);
    Ok(pool.run(row_tasks * across, &|task| {
        let column = task % across * columns;
        let end = width.min(column + columns);
        let first = task / across * rows;
        for row in first..count.min(first + rows) {
            // SAFETY: two tasks differ in their rows or in their columns.
            let out = unsafe { out.piece(row * width + column..row * width + end) };
            let part = |(data, view): (_, &Rows<'_>)| part(data, row * view.stride + column, out.len());
            simd::run(isa, Activate { activation, x: part(x), up: up.map(part), out });
        }
    })?)
}

fn part<E>(data: &[E], start: usize, length: usize) -> &[E] {
    &data[start..][..length]
}

/// One run of elements.
pub(super) struct Activate<'a, E> {
    pub activation: Activation,
    pub x: &'a [E],
    pub up: Option<&'a [E]>,
    pub out: &'a mut [E],
}

impl<E: Element> Kernel for Activate<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let activation = self.activation;
        let (x, x_rest) = self.x.as_chunks::<LANES>();
        let (out, out_rest) = self.out.as_chunks_mut::<LANES>();
        match self.up.map(|up| up.as_chunks::<LANES>()) {
            Some((up, up_rest)) => {
                for ((x, up), out) in x.iter().zip(up).zip(out) {
                    let v = apply(s, activation, E::load(s, x));
                    E::store(s, out, s.mul(v, E::load(s, up)));
                }
                if !x_rest.is_empty() {
                    let v = apply(s, activation, load_part(s, x_rest));
                    store_part(s, out_rest, s.mul(v, load_part(s, up_rest)));
                }
            }
            None => {
                for (x, out) in x.iter().zip(out) {
                    E::store(s, out, apply(s, activation, E::load(s, x)));
                }
                if !x_rest.is_empty() {
                    store_part(s, out_rest, apply(s, activation, load_part(s, x_rest)));
                }
            }
        }
    }
}

/// `activation` of 16 lanes.
#[inline(always)]
pub(super) fn apply<S: Simd>(s: S, activation: Activation, x: S::V) -> S::V {
    let (half, one) = (s.splat(0.5), s.splat(1.0));
    match activation {
        Activation::Identity => x,
        Activation::Silu => silu(s, x, x),
        Activation::Gelu => {
            let erf = math::erf(s, s.mul(x, s.splat(std::f32::consts::FRAC_1_SQRT_2)));
            s.mul(s.mul(half, x), s.add(one, erf))
        }
        Activation::GeluTanh => {
            let cubic = s.mul_add(s.mul(s.mul(x, x), x), s.splat(0.044_715), x);
            let tanh = math::tanh(s, s.mul(cubic, s.splat(0.797_884_6)));
            s.mul(s.mul(half, x), s.add(one, tanh))
        }
        Activation::GeluQuick => silu(s, x, s.mul(x, s.splat(1.702))),
        Activation::Relu => s.max(s.splat(0.0), x),
        Activation::ReluSquared => {
            let x = s.max(s.splat(0.0), x);
            s.mul(x, x)
        }
        Activation::Sigmoid => silu(s, one, x),
        Activation::Softcap(cap) => {
            let cap = s.splat(cap);
            s.mul(math::tanh(s, s.div(x, cap)), cap)
        }
    }
}

/// `x / (1 + e^-y)`.
#[inline(always)]
fn silu<S: Simd>(s: S, x: S::V, y: S::V) -> S::V {
    s.div(x, s.add(s.splat(1.0), math::exp(s, s.sub(s.splat(0.0), y))))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Owned, Type, assert_near, bits, erf_exact, isas, noise, pools};
    use super::*;

    const ALL: [Activation; 9] = [
        Activation::Identity,
        Activation::Silu,
        Activation::Gelu,
        Activation::GeluTanh,
        Activation::GeluQuick,
        Activation::Relu,
        Activation::ReluSquared,
        Activation::Sigmoid,
        Activation::Softcap(30.0),
    ];

    fn reference(activation: Activation, x: f64) -> f64 {
        match activation {
            Activation::Identity => x,
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::Gelu => 0.5 * x * (1.0 + erf_exact(x / 2f64.sqrt())),
            Activation::GeluTanh => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
                0.5 * x * (1.0 + inner.tanh())
            }
            Activation::GeluQuick => x / (1.0 + (-1.702 * x).exp()),
            Activation::Relu => x.max(0.0),
            Activation::ReluSquared => x.max(0.0).powi(2),
            Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
            Activation::Softcap(cap) => (x / f64::from(cap)).tanh() * f64::from(cap),
        }
    }

    #[test]
    fn activations_agree_with_the_reference_whatever_the_cut() {
        let pools = pools();
        for kind in Type::ALL {
            for (count, width, gap) in [(1, 5, 0), (3, 100, 7), (9, 1536, 1536), (1, 20_000, 0)] {
                let wide: Vec<f32> = noise(1, count * (width + gap)).iter().map(|x| 12.0 * x).collect();
                let (x, y) = (Owned::new(kind, &wide), Owned::new(kind, &noise(2, count * (width + gap))));
                let gate = Rows::new(x.view(), count, width, width + gap).unwrap();
                let up = Rows::new(y.view(), count, width, width + gap).unwrap();
                for activation in ALL {
                    let compute = |isa, pool: &Pool, gated: bool| {
                        let mut out = Owned::zeros(kind, count * width);
                        if gated {
                            activate_gated(isa, pool, activation, &gate, &up, out.view_mut()).unwrap();
                        } else {
                            activate(isa, pool, activation, &gate, out.view_mut()).unwrap();
                        }
                        out.to_f32()
                    };
                    for gated in [false, true] {
                        let found = compute(Isa::detect(), &pools[1], gated);
                        let (x, y) = (x.to_f32(), y.to_f32());
                        let expected: Vec<f64> = (0..count * width)
                            .step_by(7)
                            .map(|i| {
                                let at = i / width * (width + gap) + i % width;
                                let factor = if gated { f64::from(y[at]) } else { 1.0 };
                                reference(activation, f64::from(x[at])) * factor
                            })
                            .collect();
                        let sampled: Vec<f32> = found.iter().copied().step_by(7).collect();
                        assert_near(&sampled, &expected, kind, 2e-5);
                        for isa in isas() {
                            assert_eq!(
                                bits(&compute(isa, &pools[isa.level() as usize % 3], gated)),
                                bits(&found)
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn extremes_stay_finite_where_the_function_is() {
        let x = [-1e30, -200.0, -0.0, 0.0, 200.0, 1e30, f32::INFINITY, f32::NAN];
        let rows = Rows::dense(Floats::F32(&x), 8).unwrap();
        for isa in isas() {
            for activation in ALL {
                let mut out = [7.0; 8];
                let pool = Pool::new(1).unwrap();
                activate(isa, &pool, activation, &rows, FloatsMut::F32(&mut out)).unwrap();
                assert!(out[7].is_nan() && !out[..7].iter().any(|x| x.is_nan()), "{activation:?} {out:?}");
                if matches!(activation, Activation::Silu | Activation::Gelu | Activation::GeluTanh) {
                    assert_eq!((out[1], out[4]), (-0.0, 200.0), "{activation:?}");
                }
            }
        }
    }

    #[test]
    fn mixed_types_are_refused() {
        let pool = Pool::new(1).unwrap();
        let rows = Rows::dense(Floats::F32(&[0.0; 4]), 4).unwrap();
        let mut out = Owned::zeros(Type::F16, 4);
        let error = activate(Isa::PLAIN, &pool, Activation::Silu, &rows, out.view_mut()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "activate: input and output have different element types; convert them first"
        );
    }
}
