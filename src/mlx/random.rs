//! Seeded random numbers with the key sequence of `mx.random`.

use std::time::{SystemTime, UNIX_EPOCH};

use mlx_sys as ffi;

use super::array::{Array, optional};
use super::error::Result;

/// The state that `mx.random.seed` sets and each draw advances: the same seed gives mlx-lm's draws.
#[derive(Clone, Debug)]
pub struct RandomState {
    key: Array,
}

impl RandomState {
    /// As after `mx.random.seed(seed)`.
    pub fn from_seed(seed: u64) -> Result<Self> {
        // SAFETY: plain values.
        Ok(Self { key: Array::from_op(|out, _| unsafe { ffi::mlx_random_key(out, seed) })? })
    }

    /// A state nobody can predict from the last one, for requests without a seed.
    pub fn from_clock() -> Result<Self> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self::from_seed(since.as_nanos() as u64)
    }

    /// The key of the next draw; the state moves on.
    pub fn next_key(&mut self) -> Result<Array> {
        let (state, key) = split(&self.key)?;
        self.key = state;
        Ok(key)
    }

    /// The key itself; compiled samplers pass it in and out.
    pub fn key(&self) -> &Array {
        &self.key
    }

    /// Replaces the key, as a compiled sampler returned it.
    pub fn set_key(&mut self, key: Array) {
        self.key = key;
    }
}

/// Splits a key into the sequence's next state and the key to draw with.
pub fn split(key: &Array) -> Result<(Array, Array)> {
    // SAFETY: handles are valid for the call.
    let both = Array::from_op(|out, stream| unsafe { ffi::mlx_random_split_num(out, key.raw, 2, stream) })?;
    Ok((both.slice(0, 0, 1)?.squeeze(0)?, both.slice(0, 1, 2)?.squeeze(0)?))
}

/// Samples an index along the last axis from unnormalised log-probabilities; `uint32`.
pub fn categorical(logits: &Array, key: &Array) -> Result<Array> {
    // SAFETY: handles are valid for the call.
    Array::from_op(|out, stream| unsafe { ffi::mlx_random_categorical(out, logits.raw, -1, key.raw, stream) })
}

/// A uniform draw in `[0, 1)`, a float32 scalar.
pub fn uniform(key: &Array) -> Result<Array> {
    let (low, high) = (Array::from_slice(&[0.0f32], &[])?, Array::from_slice(&[1.0f32], &[])?);
    let dtype = super::Dtype::Float32.raw();
    // SAFETY: handles are valid for the call; an empty shape is a scalar.
    Array::from_op(|out, stream| unsafe {
        ffi::mlx_random_uniform(out, low.raw, high.raw, [].as_ptr(), 0, dtype, optional(Some(key)), stream)
    })
}

/// Uniform draws in `[low, high)`, float32.
pub fn uniform_between(low: f32, high: f32, shape: &[i32], key: &Array) -> Result<Array> {
    let (low, high) = (Array::from_slice(&[low], &[])?, Array::from_slice(&[high], &[])?);
    let dtype = super::Dtype::Float32.raw();
    // SAFETY: handles and shape are valid for the call.
    Array::from_op(|out, stream| unsafe {
        ffi::mlx_random_uniform(
            out,
            low.raw,
            high.raw,
            shape.as_ptr(),
            shape.len(),
            dtype,
            optional(Some(key)),
            stream,
        )
    })
}

/// Draws that are true with `probability`.
pub fn bernoulli(probability: f32, shape: &[i32], key: &Array) -> Result<Array> {
    let probability = Array::from_slice(&[probability], &[])?;
    // SAFETY: handles and shape are valid for the call.
    Array::from_op(|out, stream| unsafe {
        ffi::mlx_random_bernoulli(
            out,
            probability.raw,
            shape.as_ptr(),
            shape.len(),
            optional(Some(key)),
            stream,
        )
    })
}

/// The numbers `0..count` in a random order; `uint32`.
pub fn permutation(count: i32, key: &Array) -> Result<Array> {
    // SAFETY: handles are valid for the call.
    Array::from_op(|out, stream| unsafe { ffi::mlx_random_permutation_arange(out, count, key.raw, stream) })
}
