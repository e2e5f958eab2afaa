//! `mx.compile`: fusing a function of arrays.
//!
//! mlx-lm compiles its activations and samplers, and MLX's fused kernels round differently from the separate
//! operations, so the same functions must be compiled here to give the same bits. On a Linux CPU, MLX fuses by
//! running a C++ compiler at run time; see [`compile_available`].

use std::cell::Cell;
use std::ffi::c_void;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use mlx_sys as ffi;

use super::array::{Array, take_vector, with_vector};
use super::device::{DeviceKind, default_device, stream};
use super::error::{Error, Result, check};

pub(super) type Function = Box<dyn Fn(&[Array]) -> Result<Vec<Array>>>;

/// A function of arrays that MLX traces once and then replays fused.
pub struct Compiled {
    closure: ffi::mlx_closure,
}

thread_local! {
    static ENABLED: Cell<bool> = const { Cell::new(true) };
    static FAILURE: Cell<Option<Error>> = const { Cell::new(None) };
}

/// Switches compilation on or off for functions compiled from now on by the calling thread.
pub fn set_compile(enabled: bool) {
    ENABLED.set(enabled);
}

/// Whether compiled functions can run here: always on a GPU; on a CPU only where MLX finds the C++ compiler it
/// calls (`g++`).
pub fn compile_available() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    if default_device() == DeviceKind::Gpu || cfg!(target_os = "macos") {
        return true;
    }
    *FOUND.get_or_init(|| {
        let probe =
            Command::new("g++").arg("-dumpversion").stdout(Stdio::null()).stderr(Stdio::null()).status();
        probe.is_ok_and(|status| status.success())
    })
}

extern "C" fn call(
    out: *mut ffi::mlx_vector_array,
    inputs: ffi::mlx_vector_array,
    payload: *mut c_void,
) -> i32 {
    let attempt = std::panic::catch_unwind(|| {
        // SAFETY: the payload is the boxed function given to mlx-c below; it outlives the closure.
        let function = unsafe { &*payload.cast::<Function>() };
        // SAFETY: indices are below the size; `inputs` stays mlx-c's.
        let arrays: Result<Vec<Array>> = unsafe {
            (0..ffi::mlx_vector_array_size(inputs))
                .map(|index| {
                    let mut raw = ffi::mlx_array_new();
                    check(ffi::mlx_vector_array_get(&mut raw, inputs, index)).map(|()| Array::from_raw(raw))
                })
                .collect()
        };
        arrays.and_then(|arrays| function(&arrays))
    });
    match attempt {
        Ok(Ok(results)) => {
            let handles: Vec<_> = results.iter().map(|array| array.raw).collect();
            // SAFETY: mlx-c copies the handles into the vector that it asked for.
            unsafe { ffi::mlx_vector_array_set_data(out, handles.as_ptr(), handles.len()) }
        }
        Ok(Err(error)) => {
            FAILURE.set(Some(error));
            1
        }
        Err(_) => {
            FAILURE.set(Some(Error::new("a function of arrays panicked")));
            1
        }
    }
}

extern "C" fn release(payload: *mut c_void) {
    // SAFETY: made by `Box::into_raw` below and released once.
    drop(unsafe { Box::from_raw(payload.cast::<Function>()) });
}

/// Hands a function to mlx-c, which drops it with the last copy of the closure.
pub(super) fn closure(function: Function) -> ffi::mlx_closure {
    stream();
    let payload = Box::into_raw(Box::new(function));
    // SAFETY: the payload is released by mlx-c through `release` when the last closure goes.
    unsafe { ffi::mlx_closure_new_func_payload(Some(call), payload.cast(), Some(release)) }
}

/// What made the last function called on this thread fail, or else what MLX said.
pub(super) fn checked(status: i32) -> Result<()> {
    check(status).map_err(|error| FAILURE.take().unwrap_or(error))
}

impl Compiled {
    /// Compiles `function`. `shapeless` lets one trace serve inputs of any shape (the function must not read
    /// shapes then).
    pub fn new(function: impl Fn(&[Array]) -> Result<Vec<Array>> + 'static, shapeless: bool) -> Result<Self> {
        let plain = closure(Box::new(function));
        // SAFETY: the handles are valid and freed once.
        unsafe {
            if !ENABLED.get() {
                return Ok(Self { closure: plain });
            }
            let mut closure = ffi::mlx_closure_new();
            let status = ffi::mlx_compile(&mut closure, plain, shapeless);
            ffi::mlx_closure_free(plain);
            let compiled = Self { closure };
            check(status).map(|()| compiled)
        }
    }

    /// Calls the function.
    pub fn call<'a>(&self, inputs: impl IntoIterator<Item = &'a Array>) -> Result<Vec<Array>> {
        with_vector(inputs, |vector| {
            // SAFETY: handles are valid for the call; `take_vector` frees the result.
            let (status, results) = unsafe {
                let mut out = ffi::mlx_vector_array_new();
                let status = ffi::mlx_closure_apply(&mut out, self.closure, vector);
                (status, take_vector(out))
            };
            checked(status)?;
            results
        })
    }

    /// Calls a function of one result.
    pub fn call_one<'a>(&self, inputs: impl IntoIterator<Item = &'a Array>) -> Result<Array> {
        self.call(inputs)?.pop().ok_or_else(|| Error::new("the compiled function returned nothing"))
    }
}

impl Drop for Compiled {
    fn drop(&mut self) {
        // SAFETY: owned and freed once.
        unsafe { ffi::mlx_closure_free(self.closure) };
    }
}
