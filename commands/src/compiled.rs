//! The folder of functions that MLX compiles, from the first need of it to the end of the process.

use std::sync::{Mutex, PoisonError};

use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::mlx::{self, CompileFolder, DeviceKind};

use crate::error::Complaint;

static FOLDER: Mutex<Option<CompileFolder>> = Mutex::new(None);

/// Gives the process a folder of its own, where MLX compiles with `g++`: on a Linux CPU. Call it before other threads
/// work.
///
/// # Errors
/// There is no place that can be written.
pub fn claim() -> Result<(), Complaint> {
    let mut folder = FOLDER.lock().unwrap_or_else(PoisonError::into_inner);
    if folder.is_some() || mlx::default_device() != DeviceKind::Cpu || !cfg!(target_os = "linux") {
        return Ok(());
    }
    let (cache, fallback) = (Environment::of_process().mlx_bun_cache(), std::env::temp_dir());
    // SAFETY: other threads, if any, wait for a signal or for this one, and do not look at the environment.
    let claimed = unsafe { CompileFolder::claim(&cache, &fallback) };
    *folder = Some(claimed.map_err(|error| {
        Complaint::failure(format!(
            "MLX compiles fused functions, and neither `{}` nor `{}` can be written: {error}",
            cache.display(),
            fallback.display()
        ))
        .hint(
            "set TMPDIR to a folder that can be written, or give `--compiled-activations off` (the last bit may then \
             differ from mlx-lm's)",
        )
    })?);
    Ok(())
}

/// At the end of the process: keeps what was compiled if the work succeeded, and removes the folder.
pub fn settle(success: bool) {
    // Somebody who holds it is about to settle it.
    if let Ok(mut folder) = FOLDER.try_lock()
        && let Some(folder) = folder.take()
        && success
    {
        folder.keep();
    }
}
