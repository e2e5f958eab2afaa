//! What is done to one row on vector registers.

use super::super::norm::rms_row;
use super::super::rope::{Angles, Rope, rotate};
use super::super::simd::{Kernel, LANES, Simd};
use super::Norm;

pub(super) struct NormRow<'a> {
    pub(super) from: &'a [f32],
    pub(super) norm: &'a Norm,
    pub(super) to: &'a mut [f32],
}

impl Kernel for NormRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        rms_row(s, self.from, &self.norm.weight, self.norm.eps, self.to);
    }
}

pub(super) struct AddRow<'a> {
    pub(super) to: &'a mut [f32],
    pub(super) from: &'a [f32],
}

impl Kernel for AddRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (to, to_rest) = self.to.as_chunks_mut::<LANES>();
        let (from, from_rest) = self.from.as_chunks::<LANES>();
        for (to, from) in to.iter_mut().zip(from) {
            let sum = s.add(s.load(to), s.load(from));
            s.store(to, sum);
        }
        for (to, from) in to_rest.iter_mut().zip(from_rest) {
            *to += from;
        }
    }
}

/// Norms and turns all heads of a row.
pub(super) struct TurnHeads<'a> {
    pub(super) rope: &'a Rope,
    pub(super) angles: &'a mut Angles,
    pub(super) norm: Option<&'a Norm>,
    pub(super) scratch: &'a mut [f32],
    pub(super) position: i32,
    pub(super) heads: &'a mut [f32],
    pub(super) dim: usize,
}

impl Kernel for TurnHeads<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { rope, angles, norm, scratch, position, heads, dim } = self;
        angles.set(s, rope, position);
        for head in heads.chunks_exact_mut(dim) {
            match norm {
                Some(norm) => rms_row(s, head, &norm.weight, norm.eps, scratch),
                None => scratch.copy_from_slice(head),
            }
            rotate(s, rope, angles, scratch, head);
        }
    }
}
