//! The result, written by many tasks, each its own rectangle.

use std::marker::PhantomData;

use super::super::floats::{Floats, FloatsMut};
use super::schedule::Pair;
use super::simd::Simd;

#[derive(Clone, Copy)]
enum Base {
    F32(*mut f32),
    F16(*mut u16),
    Bf16(*mut u16),
}

/// `[M, N]` values of one of three types, and what is added to them.
pub(super) struct Output<'a> {
    base: Base,
    columns: usize,
    bias: Option<Floats<'a>>,
    bias_stride: usize,
    exclusive: PhantomData<&'a mut [f32]>,
}

// SAFETY: the pointer stands for an exclusive borrow that is split into rectangles, each written by one task.
unsafe impl Sync for Output<'_> {}

impl<'a> Output<'a> {
    /// `bias_by_expert`: the bias has a row for each expert.
    pub(super) fn new(
        y: FloatsMut<'a>,
        columns: usize,
        bias: Option<Floats<'a>>,
        bias_by_expert: bool,
    ) -> Self {
        let base = match y {
            FloatsMut::F32(values) => Base::F32(values.as_mut_ptr()),
            // `half`'s types are transparent wrappers of u16.
            FloatsMut::F16(values) => Base::F16(values.as_mut_ptr().cast()),
            FloatsMut::Bf16(values) => Base::Bf16(values.as_mut_ptr().cast()),
        };
        let bias_stride = if bias_by_expert { columns } else { 0 };
        Self { base, columns, bias, bias_stride, exclusive: PhantomData }
    }

    /// Results that go to a part of a larger array: output `first + i` of row `r` to `base[r * stride + first + i]`.
    pub(super) fn at(base: *mut f32, stride: usize, bias: Option<Floats<'a>>) -> Self {
        Self { base: Base::F32(base), columns: stride, bias, bias_stride: 0, exclusive: PhantomData }
    }

    /// Adds the bias to `values`, which are outputs `first` and on of one row, and writes them.
    ///
    /// # Safety
    /// The row and the outputs lie in `y`, the expert has a bias if there is one, no other thread writes here, and
    /// the processor has the instructions of `S`.
    #[inline(always)]
    pub(super) unsafe fn write<S: Simd>(&self, pair: Pair, expert: usize, first: usize, values: &mut [f32]) {
        let bias = expert * self.bias_stride + first;
        match &self.bias {
            None => {}
            Some(Floats::F32(all)) => add(values, &all[bias..], |value| *value),
            Some(Floats::F16(all)) => add(values, &all[bias..], |value| value.to_f32()),
            Some(Floats::Bf16(all)) => add(values, &all[bias..], |value| value.to_f32()),
        }
        let offset = pair.y as usize * self.columns + first;
        // SAFETY: the caller's promise.
        unsafe {
            match self.base {
                Base::F32(base) => copy::<S>(values, base.wrapping_add(offset)),
                Base::F16(base) => S::narrow_f16(values, base.add(offset)),
                Base::Bf16(base) => S::narrow_bf16(values, base.add(offset)),
            }
        }
    }
}

/// Copies a few vectors without a call.
///
/// # Safety
/// The processor has the instructions of `S`; there is room for the values.
#[inline(always)]
unsafe fn copy<S: Simd>(values: &[f32], to: *mut f32) {
    let whole = values.len() / S::LANES * S::LANES;
    // SAFETY: the caller's promise.
    unsafe {
        for at in (0..whole).step_by(S::LANES) {
            S::store(to.add(at), S::load(values.as_ptr().add(at)));
        }
        for at in whole..values.len() {
            *to.add(at) = values[at];
        }
    }
}

#[inline(always)]
fn add<T>(values: &mut [f32], bias: &[T], convert: impl Fn(&T) -> f32) {
    for (value, bias) in values.iter_mut().zip(bias) {
        *value += convert(bias);
    }
}
