//! What the kernels' tests share.

use half::{bf16, f16};

use super::{Floats, FloatsMut};
use crate::{Isa, Level, Pool};

/// Owned numbers of one of the three types.
#[derive(Clone, Debug)]
pub(super) enum Owned {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Type {
    F32,
    F16,
    Bf16,
}

impl Owned {
    pub(super) fn new(kind: Type, values: &[f32]) -> Self {
        match kind {
            Type::F32 => Self::F32(values.to_vec()),
            Type::F16 => Self::F16(values.iter().map(|x| f16::from_f32(*x)).collect()),
            Type::Bf16 => Self::Bf16(values.iter().map(|x| bf16::from_f32(*x)).collect()),
        }
    }

    pub(super) fn zeros(kind: Type, count: usize) -> Self {
        Self::new(kind, &vec![0.0; count])
    }

    pub(super) fn view_mut(&mut self) -> FloatsMut<'_> {
        match self {
            Self::F32(values) => FloatsMut::F32(values),
            Self::F16(values) => FloatsMut::F16(values),
            Self::Bf16(values) => FloatsMut::Bf16(values),
        }
    }

    pub(super) fn to_f32(&self) -> Vec<f32> {
        self.view().to_f32()
    }

    pub(super) fn view(&self) -> Floats<'_> {
        match self {
            Self::F32(values) => Floats::F32(values),
            Self::F16(values) => Floats::F16(values),
            Self::Bf16(values) => Floats::Bf16(values),
        }
    }
}

impl Type {
    pub(super) const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Bf16];

    /// The largest relative error of rounding to the type.
    pub(super) fn rounding(self) -> f32 {
        match self {
            Self::F32 => 2f32.powi(-24),
            Self::F16 => 2f32.powi(-11),
            Self::Bf16 => 2f32.powi(-8),
        }
    }
}

/// Checks every result against the plain expectation: `slack` in float32 plus the rounding of `kind`.
pub(super) fn assert_near(found: &[f32], expected: &[f64], kind: Type, slack: f64) {
    assert_eq!(found.len(), expected.len());
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(*found) - expected).abs();
        let allowed = slack + expected.abs() * f64::from(kind.rounding()) + 1e-7;
        assert!(error <= allowed, "{i}: {found} is not {expected}");
    }
}

/// Numbers from -1 to 1 that look random.
pub(super) fn noise(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..count)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

pub(super) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

pub(super) fn pools() -> Vec<Pool> {
    [1, 2, 5].map(|threads| Pool::new(threads).unwrap()).into()
}

/// The error function by its series and, from 2.5 on, by the continued fraction of its complement.
pub(super) fn erf_exact(x: f64) -> f64 {
    let z = x.abs();
    let value = if z < 2.5 {
        let (mut term, mut sum) = (z, z);
        for n in 1..80 {
            term *= -z * z / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        sum * std::f64::consts::FRAC_2_SQRT_PI
    } else {
        let fraction = (1..60).rev().fold(z, |below, n| z + f64::from(n) / 2.0 / below);
        1.0 - (-z * z).exp() / (std::f64::consts::PI.sqrt() * fraction)
    };
    value.copysign(x)
}

/// The instruction sets that these kernels tell apart.
pub(super) fn isas() -> Vec<Isa> {
    let all = Isa::available().into_iter();
    let best = Isa::detect();
    all.filter(|isa| *isa == best || isa.level() != Level::Avx512).collect()
}
