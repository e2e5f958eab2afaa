//! Borrowed floating-point data in one of the three types that models use.

use half::{bf16, f16};

/// A slice of f32, f16 or bf16 values.
#[derive(Clone, Copy, Debug)]
pub enum Floats<'a> {
    /// IEEE single precision.
    F32(&'a [f32]),
    /// IEEE half precision.
    F16(&'a [f16]),
    /// bfloat16.
    Bf16(&'a [bf16]),
}

impl<'a> Floats<'a> {
    /// How many values.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::F16(values) => values.len(),
            Self::Bf16(values) => values.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// One value; `None` past the end.
    pub fn get(&self, index: usize) -> Option<f32> {
        match self {
            Self::F32(values) => values.get(index).copied(),
            Self::F16(values) => values.get(index).map(|value| value.to_f32()),
            Self::Bf16(values) => values.get(index).map(|value| value.to_f32()),
        }
    }

    /// All values, converted.
    pub fn to_f32(&self) -> Vec<f32> {
        match self {
            Self::F32(values) => values.to_vec(),
            Self::F16(values) => values.iter().map(|value| value.to_f32()).collect(),
            Self::Bf16(values) => values.iter().map(|value| value.to_f32()).collect(),
        }
    }
}

impl<'a> From<&'a [f32]> for Floats<'a> {
    fn from(values: &'a [f32]) -> Self {
        Self::F32(values)
    }
}

impl<'a> From<&'a [f16]> for Floats<'a> {
    fn from(values: &'a [f16]) -> Self {
        Self::F16(values)
    }
}

impl<'a> From<&'a [bf16]> for Floats<'a> {
    fn from(values: &'a [bf16]) -> Self {
        Self::Bf16(values)
    }
}

/// A slice of f32, f16 or bf16 values to write. Values are rounded to nearest, ties to even.
#[derive(Debug)]
pub enum FloatsMut<'a> {
    /// IEEE single precision.
    F32(&'a mut [f32]),
    /// IEEE half precision.
    F16(&'a mut [f16]),
    /// bfloat16.
    Bf16(&'a mut [bf16]),
}

impl FloatsMut<'_> {
    /// How many values.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::F16(values) => values.len(),
            Self::Bf16(values) => values.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<'a> From<&'a mut [f32]> for FloatsMut<'a> {
    fn from(values: &'a mut [f32]) -> Self {
        Self::F32(values)
    }
}

impl<'a> From<&'a mut [f16]> for FloatsMut<'a> {
    fn from(values: &'a mut [f16]) -> Self {
        Self::F16(values)
    }
}

impl<'a> From<&'a mut [bf16]> for FloatsMut<'a> {
    fn from(values: &'a mut [bf16]) -> Self {
        Self::Bf16(values)
    }
}
