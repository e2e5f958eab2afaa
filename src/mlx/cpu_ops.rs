//! Our CPU kernels as operations on arrays.
//!
//! On a plain CPU, MLX's own kernels are scalar and accumulate in the activations' type; ours are neither. They
//! are used by layers where [`enable`] was called, which callers do unless mlx-lm's bits are asked for.

use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use half::{bf16, f16};

use super::array::Array;
use super::cpu::kernels::matmul::{Matmul, Matrix, Precision, Scales};
use super::cpu::kernels::{Floats, FloatsMut};
use super::cpu::pool::default_threads;
use super::cpu::{Isa, Pool};
use super::device::{DeviceKind, default_device};
use super::dtype::Dtype;
use super::error::{Error, Result};
use super::kernel::{Kernel, View, custom};
use crate::checkpoint::QuantParams;

/// The processor's instructions and the threads that run kernels, for the whole process.
struct Workers {
    isa: Isa,
    pool: Pool,
}

static WORKERS: OnceLock<Workers> = OnceLock::new();
static ENABLED: AtomicBool = AtomicBool::new(false);

/// Uses our kernels for layers that are loaded from now on, if the default device is a CPU.
///
/// `threads` is 1 to 64, `None` for the physical cores; `isa` as in [`Isa::from_setting`]. Both are fixed by the
/// first call.
///
/// # Errors
/// Instructions that the processor does not have, or threads that cannot be started.
pub fn enable(threads: Option<usize>, isa: Option<&str>) -> Result<()> {
    if default_device() != DeviceKind::Cpu {
        return Ok(());
    }
    if WORKERS.get().is_none() {
        let isa = Isa::from_setting(isa).map_err(|error| Error::new(error.to_string()))?;
        let pool = Pool::new(threads.unwrap_or_else(default_threads))
            .map_err(|error| Error::new(error.to_string()))?;
        // Another thread may have been first; its workers are as good.
        let _ = WORKERS.set(Workers { isa, pool });
    }
    ENABLED.store(true, Ordering::Relaxed);
    Ok(())
}

/// Uses MLX's own kernels for layers that are loaded from now on.
pub fn disable() {
    ENABLED.store(false, Ordering::Relaxed);
}

/// Whether layers loaded now use our kernels.
pub fn enabled() -> bool {
    ENABLED.load(Ordering::Relaxed)
}

fn workers() -> std::result::Result<&'static Workers, String> {
    WORKERS.get().ok_or_else(|| "the kernels' threads were never started".to_owned())
}

/// `x @ weight.T + bias` for one weight matrix, dense or quantized.
#[derive(Debug)]
pub struct LinearKernel {
    /// `None` for a dense matrix.
    params: Option<QuantParams>,
    output: usize,
    input: usize,
}

impl LinearKernel {
    /// A kernel for a matrix `[output, input]`; `params` when it is packed.
    pub fn new(params: Option<QuantParams>, output: i32, input: i32) -> Arc<Self> {
        Arc::new(Self { params, output: output.max(0) as usize, input: input.max(0) as usize })
    }

    /// The product of `x`, `[…, input]`, with the matrix: `weight` is one dense array, or the packed words, scales
    /// and biases.
    pub fn apply(self: &Arc<Self>, x: &Array, weight: &[&Array], bias: Option<&Array>) -> Result<Array> {
        let mut shape = x.shape().to_vec();
        if let Some(last) = shape.last_mut() {
            *last = self.output as i32;
        }
        let inputs: Vec<&Array> = [x].into_iter().chain(weight.iter().copied()).chain(bias).collect();
        custom(c"linear", self.clone(), &inputs, &shape, x.dtype())
    }
}

impl Kernel for LinearKernel {
    fn run(&self, inputs: &[View], outputs: &[View]) -> std::result::Result<(), String> {
        let Workers { isa, pool } = workers()?;
        let (x, rest) = inputs.split_first().ok_or("linear needs an input")?;
        let taken = match self.params {
            None => 1,
            Some(params) => 2 + usize::from(params.mode.has_biases()),
        };
        let weight = rest.get(..taken).ok_or("linear needs a weight")?;
        let matrix = match self.params {
            None => Matrix::dense(floats(&weight[0])?, 1, self.output, self.input),
            Some(params) => {
                let scales = match weight.get(2) {
                    Some(biases) => Scales::Affine { scales: floats(&weight[1])?, biases: floats(biases)? },
                    None => Scales::Byte(dense::<u8>(&weight[1], Dtype::Uint8)?),
                };
                let words = dense::<u32>(&weight[0], Dtype::Uint32)?;
                Matrix::packed(words, scales, params, 1, self.output, self.input)
            }
        };
        let mut product = Matmul::transposed(matrix.map_err(|error| error.to_string())?);
        product.precision = Precision::Exact;
        product.bias = rest.get(taken).map(floats).transpose()?;
        let y = floats_mut(outputs.first().ok_or("linear needs an output")?)?;
        let result = if x.is_dense() {
            product.run(*isa, pool, floats(x)?, y)
        } else {
            product.run(*isa, pool, Floats::F32(&gathered(x)?), y)
        };
        result.map_err(|error| error.to_string())
    }
}

/// The elements of a dense view.
fn dense<'a, T>(view: &View<'a>, dtype: Dtype) -> std::result::Result<&'a [T], String> {
    if view.dtype != dtype || size_of::<T>() != dtype.size() {
        return Err(format!("expected {}, got {}", dtype.name(), view.dtype.name()));
    }
    if !view.is_dense() {
        return Err(format!("a weight of shape {:?} is not contiguous", view.shape));
    }
    if view.is_empty() {
        return Ok(&[]);
    }
    // SAFETY: a dense view of this type holds `len` elements from its pointer on; the primitive keeps them alive
    // through the call, and nobody writes to a node's inputs.
    Ok(unsafe { slice::from_raw_parts(view.as_ptr().cast(), view.len()) })
}

fn floats<'a>(view: &View<'a>) -> std::result::Result<Floats<'a>, String> {
    match view.dtype {
        Dtype::Float32 => dense::<f32>(view, Dtype::Float32).map(Floats::F32),
        Dtype::Float16 => dense::<f16>(view, Dtype::Float16).map(Floats::F16),
        Dtype::Bfloat16 => dense::<bf16>(view, Dtype::Bfloat16).map(Floats::Bf16),
        other => Err(format!("expected floating-point values, got {}", other.name())),
    }
}

fn floats_mut<'a>(view: &View<'a>) -> std::result::Result<FloatsMut<'a>, String> {
    if !view.is_dense() || view.is_empty() {
        return Err(format!("an output of shape {:?} cannot be filled", view.shape));
    }
    // SAFETY: outputs are allocated dense for this call alone; every bit pattern is a value of these types.
    unsafe {
        Ok(match view.dtype {
            Dtype::Float32 => FloatsMut::F32(slice::from_raw_parts_mut(view.as_ptr().cast(), view.len())),
            Dtype::Float16 => FloatsMut::F16(slice::from_raw_parts_mut(view.as_ptr().cast(), view.len())),
            Dtype::Bfloat16 => FloatsMut::Bf16(slice::from_raw_parts_mut(view.as_ptr().cast(), view.len())),
            other => return Err(format!("cannot write {}", other.name())),
        })
    }
}

/// The elements of any view, in row-major order, as f32.
fn gathered(view: &View) -> std::result::Result<Vec<f32>, String> {
    let mut out = Vec::with_capacity(view.len());
    let mut index = vec![0i32; view.shape.len()];
    for _ in 0..view.len() {
        let at: i64 = index.iter().zip(view.strides).map(|(&i, &stride)| i64::from(i) * stride).sum();
        let at = at as isize;
        // SAFETY: shape and strides name elements of the array's buffer.
        out.push(unsafe {
            match view.dtype {
                Dtype::Float32 => *view.as_ptr().cast::<f32>().offset(at),
                Dtype::Float16 => (*view.as_ptr().cast::<f16>().offset(at)).to_f32(),
                Dtype::Bfloat16 => (*view.as_ptr().cast::<bf16>().offset(at)).to_f32(),
                other => return Err(format!("expected floating-point values, got {}", other.name())),
            }
        });
        for (i, &dim) in index.iter_mut().zip(view.shape).rev() {
            *i += 1;
            if *i < dim {
                break;
            }
            *i = 0;
        }
    }
    Ok(out)
}
