//! Activations as mlx-lm compiles them (`models/activations.py`, `nn/layers/activations.py`).
//!
//! MLX's fused kernels round differently from the separate operations, so each of these is one compiled
//! function, traced once a thread.

use crate::mlx::{Array, Compiled, Dtype, Result};

macro_rules! compiled {
    ($($(#[$doc:meta])* $name:ident($($arg:ident),+) = $body:expr;)*) => { $(
        $(#[$doc])*
        pub fn $name($($arg: &Array),+) -> Result<Array> {
            thread_local! {
                static FUSED: std::cell::OnceCell<Compiled> = const { std::cell::OnceCell::new() };
            }
            FUSED.with(|cell| {
                let fused = match cell.get() {
                    Some(fused) => fused,
                    None => {
                        let body: fn(&[Array]) -> Result<Array> = $body;
                        let fused = Compiled::new(move |inputs| Ok(vec![body(inputs)?]), true)?;
                        cell.get_or_init(|| fused)
                    }
                };
                fused.call_one([$($arg),+])
            })
        }
    )* };
}

/// `x * sigmoid(x)`, uncompiled.
fn silu(x: &Array) -> Result<Array> {
    x.multiply(&x.sigmoid()?)
}

compiled! {
    /// `silu(gate) * x`.
    swiglu(gate, x) = |inputs| silu(&inputs[0])?.multiply(&inputs[1]);

    /// The tanh approximation of GELU.
    gelu_approx(x) = |inputs| {
        let x = &inputs[0];
        let cube = x.power(&Array::scalar(3.0, x.dtype())?)?;
        let inner = x.add(&cube.multiply_scalar(0.044715)?)?.multiply_scalar(SQRT_2_OVER_PI)?;
        x.multiply_scalar(0.5)?.multiply(&inner.tanh()?.add_scalar(1.0)?)
    };

    /// `x + y`, kept finite in float16 (`gemma3_text.py`).
    clip_residual(x, y) = |inputs| {
        let (x, y) = (&inputs[0], &inputs[1]);
        if x.dtype() != Dtype::Float16 {
            return x.add(y);
        }
        let bound = f32::from(half::f16::MAX);
        let sum = x.astype(Dtype::Float32)?.add(&y.astype(Dtype::Float32)?)?;
        sum.clip(-bound, bound)?.astype(Dtype::Float16)
    };
}

/// `sqrt(2 / pi)`, rounded from double precision as Python computes it.
const SQRT_2_OVER_PI: f32 = 0.797_884_560_802_865_4_f64 as f32;
