//! Our CPU kernels as operations on arrays.
//!
//! On a plain CPU, MLX's own kernels are scalar and accumulate in the activations' type; ours are neither. Layers that
//! are loaded after [`enable`] ask [`kernels`] for a handle and compute through its methods, one a node of the graph;
//! without a handle they use MLX's operations, bit for bit as mlx-lm does.
//!
//! # Gradients
//! Each node's gradient is that of the same operation built of MLX's own ([`Kernel::stock`]), except products with
//! weights, whose gradient is a product by our kernels again. So `value_and_grad` works through every layer, its
//! forward pass is the one that inference runs, and there is no second set of derivatives to keep correct.
//!
//! # Errors
//! Shapes and types are checked when a node is made, where an error names the caller, and again where memory is
//! touched. What fails there, panics included, surfaces from evaluation as MLX's own failures do.
//!
//! [`Kernel::stock`]: super::kernel::Kernel::stock

mod activation;
mod attention;
mod attention_operands;
mod decoder;
mod embedding;
mod experts;
mod filling;
mod linear;
mod matrix;
mod norm;
mod operands;
mod precision;
mod rope;
mod vocabulary;

#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::sync::Arc;

pub use super::cpu::kernels::activation::Activation;
pub use super::cpu::kernels::matmul::takes_integers;
pub use attention::{AttentionArgs, KeysValues, PackedHeads};
pub use decoder::{
    DecoderPlan, DecoderRow, FusedDecoder, KvShape, KvStore, KvType, LayerPlan, NormPlan, ProjectionPlan,
};
pub use filling::{filling_caches, positions_to_follow};
pub use matrix::MatrixKind;
pub use precision::{AUTO, CpuPrecision, PrecisionError};
pub use rope::Rotation;

use super::cpu::isa::IsaError;
pub use super::cpu::pool::PoolError;
use super::cpu::pool::default_threads;
use super::cpu::{Isa, Pool};
use super::device::{DeviceKind, default_device};
use super::error::{Error, Result};

/// How our kernels run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Settings<'a> {
    /// 1 to 64 threads; `None` for the physical cores.
    pub threads: Option<usize>,
    /// Vector instructions, as in [`Isa::from_setting`].
    pub isa: Option<&'a str>,
    /// Arithmetic of products with quantized weights.
    pub precision: CpuPrecision,
}

/// Why our kernels cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum EnableError {
    /// Instructions that there are not.
    #[error(transparent)]
    Isa(#[from] IsaError),
    /// No such number of threads, or the system has no more.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// The processor's instructions and the threads that run kernels.
#[derive(Debug)]
struct Workers {
    isa: Isa,
    pool: Pool,
}

/// Our kernels, ready to run: what a layer keeps that computes with them. Clones share the threads.
#[derive(Clone, Debug)]
pub struct Kernels {
    workers: Arc<Workers>,
    precision: CpuPrecision,
}

thread_local! {
    static CURRENT: RefCell<Option<Kernels>> = const { RefCell::new(None) };
}

/// Uses our kernels for layers that the calling thread loads from now on, if the default device is a CPU. Threads
/// already started are kept if the settings still fit them.
///
/// # Errors
/// Instructions that the processor does not have, or threads that cannot be started.
pub fn enable(settings: Settings) -> std::result::Result<(), EnableError> {
    if default_device() != DeviceKind::Cpu {
        return Ok(());
    }
    let isa = Isa::from_setting(settings.isa)?;
    let threads = settings.threads.unwrap_or_else(default_threads);
    let fits = |workers: &Workers| workers.isa == isa && workers.pool.threads() == threads;
    let kept = kernels().map(|kernels| kernels.workers).filter(|workers| fits(workers));
    let kernels = match kept {
        Some(workers) => Kernels { workers, precision: settings.precision },
        None => Kernels::new(isa, threads, settings.precision)?,
    };
    CURRENT.set(Some(kernels));
    Ok(())
}

/// Uses MLX's own kernels for layers that the calling thread loads from now on.
pub fn disable() {
    CURRENT.set(None);
}

/// Whether layers that the calling thread loads now use our kernels.
pub fn enabled() -> bool {
    CURRENT.with_borrow(Option::is_some)
}

/// The kernels for a layer that the calling thread loads now; `None` leaves it to MLX.
pub fn kernels() -> Option<Kernels> {
    CURRENT.with_borrow(Clone::clone)
}

impl Kernels {
    /// Starts `threads` threads, 1 to 64.
    ///
    /// # Errors
    /// When the number is out of range or the system refuses a thread.
    pub fn new(isa: Isa, threads: usize, precision: CpuPrecision) -> std::result::Result<Self, PoolError> {
        let pool = Pool::new(threads)?;
        Ok(Self { workers: Arc::new(Workers { isa, pool }), precision })
    }

    /// The instructions in use.
    pub fn isa(&self) -> Isa {
        self.workers.isa
    }

    /// The threads.
    pub fn pool(&self) -> &Pool {
        &self.workers.pool
    }

    /// Arithmetic of products with quantized weights.
    pub fn precision(&self) -> CpuPrecision {
        self.precision
    }
}

/// A refusal before a node is made.
fn refuse<T>(op: &str, problem: impl std::fmt::Display) -> Result<T> {
    Err(Error::new(format!("[{op}] {problem}")))
}
