//! What every step does with its logits.

use std::sync::Arc;

use super::operands::{Ordered, Run, floats_mut, nth, text};
use super::{Kernels, refuse};
use crate::mlx::cpu::kernels::softmax::{argmax, logsumexp};
use crate::mlx::cpu::kernels::{FloatsMut, Rows};
use crate::mlx::kernel::{Kernel, View, custom};
use crate::mlx::{Array, Dtype, Result};

/// Results of a task: a few microseconds.
const CHUNK: usize = 16 * 1024;

impl Kernels {
    /// `x - logsumexp(x)` along the last axis of float32 `[…, V]`.
    ///
    /// # Errors
    /// Another type, or a scalar.
    pub fn log_probabilities(&self, x: &Array) -> Result<Array> {
        if x.dtype() != Dtype::Float32 || x.ndim() == 0 || x.size() == 0 {
            return refuse("log_probabilities", format!("{x:?} is no float32 [..., V]"));
        }
        let node = LogProbabilities { kernels: self.clone() };
        custom(c"log_probabilities", Arc::new(node), &[x], x.shape(), Dtype::Float32)
    }

    /// The index of the largest entry along the last axis of `[…, V]`, the first of equal ones.
    ///
    /// # Errors
    /// A type that is no floating-point one, or a scalar.
    pub fn argmax(&self, x: &Array) -> Result<Array> {
        let Some((_, rows)) = x.shape().split_last().filter(|_| x.size() > 0) else {
            return refuse("argmax", format!("{x:?} has no last axis"));
        };
        if !x.dtype().is_floating() {
            return refuse("argmax", format!("{x:?} is not floating-point"));
        }
        let node = Argmax { kernels: self.clone() };
        custom(c"argmax", Arc::new(node), &[x], rows, Dtype::Uint32)
    }
}

fn width(view: &View) -> usize {
    view.shape.last().map_or(1, |&width| width.max(1) as usize)
}

struct LogProbabilities {
    kernels: Kernels,
}

impl Kernel for LogProbabilities {
    fn run(&self, inputs: &[View], outputs: &[View]) -> Run<()> {
        let view = nth(inputs, 0)?;
        let (x, width) = (Ordered::new(view)?, width(view));
        let (Ordered::F32(values), FloatsMut::F32(out)) = (&x, floats_mut(nth(outputs, 0)?)?) else {
            return Err("expected float32".into());
        };
        let (isa, pool) = (self.kernels.isa(), self.kernels.pool());
        let rows = Rows::dense(x.floats(), width).map_err(text)?;
        let mut sums = vec![0.0; rows.count()];
        logsumexp(isa, pool, &rows, &mut sums).map_err(text)?;
        let subtract = |task: usize, out: &mut [f32]| {
            let first = task * CHUNK;
            let mut index = 0;
            while index < out.len() {
                let row = (first + index) / width;
                let end = out.len().min((row + 1) * width - first);
                let from = &values[first + index..first + end];
                for (out, value) in out[index..end].iter_mut().zip(from) {
                    *out = value - sums[row];
                }
                index = end;
            }
        };
        pool.run_chunks_mut(out, CHUNK, &subtract).map_err(text)
    }

    fn stock(&self, inputs: &[Array]) -> Result<Vec<Array>> {
        Ok(vec![inputs[0].subtract(&inputs[0].logsumexp(-1, true)?)?])
    }
}

struct Argmax {
    kernels: Kernels,
}

impl Kernel for Argmax {
    fn run(&self, inputs: &[View], outputs: &[View]) -> Run<()> {
        let view = nth(inputs, 0)?;
        let x = Ordered::new(view)?;
        let rows = Rows::dense(x.floats(), width(view)).map_err(text)?;
        let out = nth(outputs, 0)?;
        if out.dtype != Dtype::Uint32 || !out.is_dense() || out.len() != rows.count() {
            return Err("the result does not fit".into());
        }
        // SAFETY: the output is allocated dense for this call alone and holds one number a row.
        let out = unsafe { std::slice::from_raw_parts_mut(out.as_ptr().cast::<u32>(), rows.count()) };
        argmax(self.kernels.isa(), self.kernels.pool(), &rows, out).map_err(text)
    }

    fn stock(&self, inputs: &[Array]) -> Result<Vec<Array>> {
        Ok(vec![inputs[0].argmax(-1)?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mlx::cpu::Isa;
    use crate::mlx::cpu_ops::CpuPrecision;

    #[test]
    fn rows_give_log_probabilities_and_their_largest() {
        let kernels = Kernels::new(Isa::detect(), 2, CpuPrecision::Exact).unwrap();
        let (rows, width) = (3, 20_011);
        let values: Vec<f32> = (0..rows * width).map(|i| ((i * 7919) % 10_007) as f32 / 1000.0).collect();
        let x = Array::from_slice(&values, &[rows, width]).unwrap();
        let found = kernels.log_probabilities(&x).unwrap();
        let stock = x.subtract(&x.logsumexp(-1, true).unwrap()).unwrap();
        let (found, stock) = (found.to_f32_vec().unwrap(), stock.to_f32_vec().unwrap());
        assert!(found.iter().zip(&stock).all(|(a, b)| (a - b).abs() < 1e-5));
        let best = kernels.argmax(&x).unwrap();
        assert_eq!(best.shape(), [3]);
        assert_eq!(best.to_vec::<u32>().unwrap(), x.argmax(-1).unwrap().to_vec::<u32>().unwrap());
        assert!(kernels.argmax(&best).is_err());
        assert!(kernels.log_probabilities(&best).is_err());
    }
}
