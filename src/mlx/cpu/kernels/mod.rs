//! The kernels. All take slices, an [`Isa`](super::Isa) and a [`Pool`](super::Pool), check every shape, and return
//! a typed error instead of touching memory they were not given.

// Register blocks index several arrays in step; an iterator over one of them says less.
#![allow(clippy::needless_range_loop)]

pub mod activation;
mod affine;
pub mod attention;
pub mod decoder;
pub mod embedding;
pub mod error;
pub mod floats;
pub mod matmul;
pub mod norm;
mod pieces;
pub mod rope;
mod simd;
pub mod softmax;
#[cfg(test)]
mod testing;
pub mod views;

use std::borrow::Cow;

pub use error::KernelError;
pub use floats::{Floats, FloatsMut};
pub use views::{Heads, Rows};

/// Elements below which an element-wise operation runs on one thread: a few microseconds.
const SERIAL_ELEMENTS: usize = 32_768;

/// Evaluates an expression with the slice inside a [`Floats`], whatever its type.
macro_rules! with_floats {
    ($floats:expr, $values:ident => $body:expr) => {
        match $floats {
            $crate::kernels::Floats::F32($values) => $body,
            $crate::kernels::Floats::F16($values) => $body,
            $crate::kernels::Floats::Bf16($values) => $body,
        }
    };
}

/// Evaluates an expression with the slice inside a [`FloatsMut`], whatever its type.
macro_rules! with_floats_mut {
    ($floats:expr, $values:ident => $body:expr) => {
        match $floats {
            $crate::kernels::FloatsMut::F32($values) => $body,
            $crate::kernels::FloatsMut::F16($values) => $body,
            $crate::kernels::FloatsMut::Bf16($values) => $body,
        }
    };
}

use {with_floats, with_floats_mut};

/// The values in float32.
fn widen(isa: super::Isa, values: Floats<'_>) -> Cow<'_, [f32]> {
    struct Widen<'a, E>(&'a [E]);
    impl<E: simd::Element> simd::Kernel for Widen<'_, E> {
        type Output = Vec<f32>;

        #[inline(always)]
        fn run<S: simd::Simd>(self, s: S) -> Vec<f32> {
            let mut wide = vec![0.0; self.0.len()];
            simd::to_f32(s, self.0, &mut wide);
            wide
        }
    }
    match values {
        Floats::F32(values) => Cow::Borrowed(values),
        Floats::F16(values) => Cow::Owned(simd::run(isa, Widen(values))),
        Floats::Bf16(values) => Cow::Owned(simd::run(isa, Widen(values))),
    }
}
