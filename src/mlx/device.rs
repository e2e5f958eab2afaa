//! Devices, the calling thread's stream, and evaluation.

use std::cell::Cell;
use std::ffi::CStr;

use mlx_sys as ffi;

use super::array::{Array, with_vector};
use super::error::{self, Result, check};

/// Where operations run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// The host's processor.
    Cpu,
    /// Metal or CUDA, whichever libmlx was built for.
    Gpu,
}

impl DeviceKind {
    pub(super) fn raw(self) -> ffi::mlx_device_type {
        match self {
            Self::Cpu => ffi::mlx_device_type__MLX_CPU,
            Self::Gpu => ffi::mlx_device_type__MLX_GPU,
        }
    }
}

const NO_STREAM: ffi::mlx_stream = ffi::mlx_stream_ { ctx: std::ptr::null_mut() };

thread_local! {
    // One handle a thread for its whole life: asking MLX for the default stream costs two allocations a call,
    // which would show beside operations of half a microsecond.
    static STREAM: Cell<ffi::mlx_stream> = const { Cell::new(NO_STREAM) };
}

/// The calling thread's default stream on the default device.
#[inline]
pub(super) fn stream() -> ffi::mlx_stream {
    let cached = STREAM.get();
    if !cached.ctx.is_null() {
        return cached;
    }
    error::initialise();
    // SAFETY: plain constructors of mlx-c; the device handle is freed here, the stream lives as long as the thread.
    unsafe {
        let mut device = ffi::mlx_device_new();
        ffi::mlx_get_default_device(&mut device);
        let mut fresh = ffi::mlx_stream_new();
        ffi::mlx_get_default_stream(&mut fresh, device);
        ffi::mlx_device_free(device);
        STREAM.set(fresh);
        fresh
    }
}

/// The device that new operations of this process use.
pub fn default_device() -> DeviceKind {
    error::initialise();
    let mut kind = ffi::mlx_device_type__MLX_CPU;
    // SAFETY: as above; the handle is freed before returning.
    unsafe {
        let mut device = ffi::mlx_device_new();
        ffi::mlx_get_default_device(&mut device);
        ffi::mlx_device_get_type(&mut kind, device);
        ffi::mlx_device_free(device);
    }
    if kind == ffi::mlx_device_type__MLX_GPU { DeviceKind::Gpu } else { DeviceKind::Cpu }
}

/// Chooses the device for operations made from now on by this thread and by threads that start later.
pub fn set_default_device(kind: DeviceKind) -> Result<()> {
    error::initialise();
    // SAFETY: the device handle is freed here; dropping our cached stream makes the next operation ask anew.
    unsafe {
        let device = ffi::mlx_device_new_type(kind.raw(), 0);
        let status = ffi::mlx_set_default_device(device);
        ffi::mlx_device_free(device);
        check(status)?;
        let old = STREAM.replace(NO_STREAM);
        if !old.ctx.is_null() {
            ffi::mlx_stream_free(old);
        }
    }
    Ok(())
}

/// Computes the arrays and waits for them.
pub fn eval<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> Result<()> {
    // SAFETY: the vector is valid for the call.
    with_vector(arrays, |vector| check(unsafe { ffi::mlx_eval(vector) }))
}

/// Starts computing the arrays; reading one waits for it.
pub fn async_eval<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> Result<()> {
    // SAFETY: the vector is valid for the call.
    with_vector(arrays, |vector| check(unsafe { ffi::mlx_async_eval(vector) }))
}

/// Waits until the calling thread's stream has nothing left to do.
pub fn synchronize() -> Result<()> {
    // SAFETY: `stream` returns a live handle.
    check(unsafe { ffi::mlx_synchronize(stream()) })
}

/// The version of libmlx that is loaded, as in `0.32.2`.
pub fn version() -> String {
    error::initialise();
    // SAFETY: the string is filled by mlx-c, copied, then freed.
    unsafe {
        let mut text = ffi::mlx_string_new();
        ffi::mlx_version(&mut text);
        let data = ffi::mlx_string_data(text);
        let version =
            if data.is_null() { String::new() } else { CStr::from_ptr(data).to_string_lossy().into_owned() };
        ffi::mlx_string_free(text);
        version
    }
}
