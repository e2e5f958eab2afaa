//! Element types of the kernels' inputs and outputs: float32, float16 and bfloat16, all computed on as float32.

use half::{bf16, f16};

use super::{LANES, Simd};

/// An element type; `f16` and `bf16` round to nearest, ties to even, when stored.
pub(crate) trait Element: Copy + Default + Send + Sync + 'static {
    fn load<S: Simd>(simd: S, from: &[Self; LANES]) -> S::V;
    fn store<S: Simd>(simd: S, to: &mut [Self; LANES], v: S::V);

    /// `self` in all lanes.
    #[inline(always)]
    fn splat<S: Simd>(self, simd: S) -> S::V {
        Self::load(simd, &[self; LANES])
    }
}

impl Element for f32 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[Self; LANES]) -> S::V {
        simd.load(from)
    }

    #[inline(always)]
    fn store<S: Simd>(simd: S, to: &mut [Self; LANES], v: S::V) {
        simd.store(to, v);
    }
}

impl Element for f16 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[Self; LANES]) -> S::V {
        simd.load_f16(from)
    }

    #[inline(always)]
    fn store<S: Simd>(simd: S, to: &mut [Self; LANES], v: S::V) {
        simd.store_f16(to, v);
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[Self; LANES]) -> S::V {
        simd.load_bf16(from)
    }

    #[inline(always)]
    fn store<S: Simd>(simd: S, to: &mut [Self; LANES], v: S::V) {
        simd.store_bf16(to, v);
    }
}

/// Loads fewer than 16 elements; the other lanes are zero.
#[inline(always)]
pub(crate) fn load_part<S: Simd, E: Element>(simd: S, from: &[E]) -> S::V {
    let mut full = [E::default(); LANES];
    for (to, from) in full.iter_mut().zip(from) {
        *to = *from;
    }
    E::load(simd, &full)
}

/// Stores the first lanes into fewer than 16 elements.
#[inline(always)]
pub(crate) fn store_part<S: Simd, E: Element>(simd: S, to: &mut [E], v: S::V) {
    let mut full = [E::default(); LANES];
    E::store(simd, &mut full, v);
    for (to, from) in to.iter_mut().zip(full) {
        *to = from;
    }
}

/// Widens `from` into the front of `to`; what is left of `to` up to a multiple of 16 is zeroed.
#[inline(always)]
pub(crate) fn to_f32<S: Simd, E: Element>(simd: S, from: &[E], to: &mut [f32]) {
    let (chunks, rest) = from.as_chunks::<LANES>();
    let (to_chunks, to_rest) = to.as_chunks_mut::<LANES>();
    for (from, to) in chunks.iter().zip(to_chunks.iter_mut()) {
        simd.store(to, E::load(simd, from));
    }
    if !rest.is_empty() {
        let v = load_part(simd, rest);
        match to_chunks.get_mut(chunks.len()) {
            Some(to) => simd.store(to, v),
            None => store_part(simd, to_rest, v),
        }
    }
}

/// Rounds the front of `from` into `to`.
#[inline(always)]
pub(crate) fn from_f32<S: Simd, E: Element>(simd: S, from: &[f32], to: &mut [E]) {
    let (chunks, rest) = to.as_chunks_mut::<LANES>();
    let done = chunks.len() * LANES;
    for (to, from) in chunks.iter_mut().zip(from.as_chunks::<LANES>().0) {
        E::store(simd, to, simd.load(from));
    }
    if let Some(from) = from.get(done..done + rest.len()).filter(|_| !rest.is_empty()) {
        let v = load_part(simd, from);
        store_part(simd, rest, v);
    }
}
