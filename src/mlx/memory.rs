//! What MLX's allocator holds, in bytes.

use mlx_sys as ffi;

use super::device::stream;
use super::error::{Result, check};

fn read(call: impl FnOnce(*mut usize) -> i32) -> Result<usize> {
    stream();
    let mut value = 0;
    check(call(&mut value)).map(|()| value)
}

/// Bytes of live arrays.
pub fn active() -> Result<usize> {
    // SAFETY: writes one integer.
    read(|out| unsafe { ffi::mlx_get_active_memory(out) })
}

/// Bytes kept for reuse.
pub fn cached() -> Result<usize> {
    // SAFETY: writes one integer.
    read(|out| unsafe { ffi::mlx_get_cache_memory(out) })
}

/// Most bytes that were live at once since the start or the last [`reset_peak`].
pub fn peak() -> Result<usize> {
    // SAFETY: writes one integer.
    read(|out| unsafe { ffi::mlx_get_peak_memory(out) })
}

/// Starts measuring the peak anew.
pub fn reset_peak() -> Result<()> {
    stream();
    // SAFETY: no arguments.
    check(unsafe { ffi::mlx_reset_peak_memory() })
}

/// Gives the memory kept for reuse back to the system.
pub fn clear_cache() -> Result<()> {
    stream();
    // SAFETY: no arguments.
    check(unsafe { ffi::mlx_clear_cache() })
}
