//! Random data for the tests of matrix products.

use half::{bf16, f16};

use super::{Floats, FloatsMut, Matrix, Scales};
use crate::coding::{QuantMode, QuantParams};

/// A small generator: tests need many values, not good ones.
pub(super) struct Random(pub u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 29) ^ (self.0 >> 47)
    }

    pub(super) fn word(&mut self) -> u32 {
        self.next() as u32
    }

    /// From -1 to 1.
    pub(super) fn float(&mut self) -> f32 {
        self.word() as i32 as f32 / i32::MAX as f32
    }

    pub(super) fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.float()).collect()
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    F32,
    F16,
    Bf16,
}

pub(super) const KINDS: [Kind; 3] = [Kind::F32, Kind::F16, Kind::Bf16];

#[derive(Clone, Debug)]
pub(super) enum Owned {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

impl Owned {
    pub(super) fn new(kind: Kind, values: &[f32]) -> Self {
        match kind {
            Kind::F32 => Self::F32(values.to_vec()),
            Kind::F16 => Self::F16(values.iter().map(|value| f16::from_f32(*value)).collect()),
            Kind::Bf16 => Self::Bf16(values.iter().map(|value| bf16::from_f32(*value)).collect()),
        }
    }

    pub(super) fn floats(&self) -> Floats<'_> {
        match self {
            Self::F32(values) => values.as_slice().into(),
            Self::F16(values) => values.as_slice().into(),
            Self::Bf16(values) => values.as_slice().into(),
        }
    }

    pub(super) fn floats_mut(&mut self) -> FloatsMut<'_> {
        match self {
            Self::F32(values) => values.as_mut_slice().into(),
            Self::F16(values) => values.as_mut_slice().into(),
            Self::Bf16(values) => values.as_mut_slice().into(),
        }
    }

    pub(super) fn bits(&self) -> Vec<u32> {
        match self {
            Self::F32(values) => values.iter().map(|value| value.to_bits()).collect(),
            Self::F16(values) => values.iter().map(|value| value.to_bits().into()).collect(),
            Self::Bf16(values) => values.iter().map(|value| value.to_bits().into()).collect(),
        }
    }
}

/// A storage of weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Storing {
    Dense(Kind),
    Packed(QuantMode, u8, u32, Kind),
}

impl Storing {
    pub(super) fn all() -> Vec<Self> {
        let mut all: Vec<_> = KINDS.map(Self::Dense).to_vec();
        let mut kinds = KINDS.into_iter().cycle();
        for bits in [2, 3, 4, 5, 6, 8] {
            for group in [32, 64, 128] {
                all.extend(kinds.next().map(|kind| Self::Packed(QuantMode::Affine, bits, group, kind)));
            }
            // So that not each width always meets the same type.
            kinds.next();
        }
        all.push(Self::Packed(QuantMode::Mxfp4, 4, 32, Kind::F32));
        all.push(Self::Packed(QuantMode::Nvfp4, 4, 16, Kind::F32));
        all.push(Self::Packed(QuantMode::Mxfp8, 8, 32, Kind::F32));
        all
    }

    /// What the columns must be a multiple of.
    pub(super) fn group(self) -> usize {
        match self {
            Self::Dense(_) => 1,
            Self::Packed(_, _, group, _) => group as usize,
        }
    }
}

pub(super) enum Weights {
    Dense(Owned),
    Affine(Vec<u32>, Owned, Owned),
    Byte(Vec<u32>, Vec<u8>),
}

pub(super) struct Stored {
    weights: Weights,
    storing: Storing,
    experts: usize,
    rows: usize,
    columns: usize,
}

impl Stored {
    pub(super) fn random(
        random: &mut Random,
        storing: Storing,
        experts: usize,
        rows: usize,
        columns: usize,
    ) -> Self {
        let count = experts * rows * columns;
        let weights = match storing {
            Storing::Dense(kind) => Weights::Dense(Owned::new(kind, &random.floats(count))),
            Storing::Packed(mode, bits, group, kind) => {
                let words = (0..count * bits as usize / 32).map(|_| random.word()).collect();
                let groups = count / group as usize;
                match mode {
                    QuantMode::Affine => {
                        let scale = 1.0 / f32::from(1u16 << bits);
                        let scales: Vec<_> = (0..groups).map(|_| (1.5 + random.float()) * scale).collect();
                        let biases: Vec<_> = (0..groups).map(|_| random.float() - 0.8).collect();
                        Weights::Affine(words, Owned::new(kind, &scales), Owned::new(kind, &biases))
                    }
                    QuantMode::Nvfp4 => {
                        Weights::Byte(words, (0..groups).map(|_| random.word() as u8).collect())
                    }
                    _ => Weights::Byte(words, (0..groups).map(|_| 120 + random.word() as u8 % 10).collect()),
                }
            }
        };
        Self { weights, storing, experts, rows, columns }
    }

    pub(super) fn matrix(&self) -> Matrix<'_> {
        let (experts, rows, columns) = (self.experts, self.rows, self.columns);
        let (words, scales) = match &self.weights {
            Weights::Dense(values) => {
                return Matrix::dense(values.floats(), experts, rows, columns).unwrap();
            }
            Weights::Affine(words, scales, biases) => {
                (words, Scales::Affine { scales: scales.floats(), biases: biases.floats() })
            }
            Weights::Byte(words, scales) => (words, Scales::Byte(scales)),
        };
        let Storing::Packed(mode, bits, group_size, _) = self.storing else { unreachable!() };
        let quantization = QuantParams { bits, group_size, mode };
        Matrix::packed(words, scales, quantization, experts, rows, columns).unwrap()
    }
}
