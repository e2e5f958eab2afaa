//! Errors of MLX: mlx-c reports them through one process-wide handler, kept here per thread.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Once;

use mlx_sys as ffi;

/// What MLX said about an operation that failed.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    message: String,
}

impl Error {
    /// An error of ours in the same currency, for checks made before MLX is called.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into() }
    }
}

/// The result of an MLX operation.
pub type Result<T> = std::result::Result<T, Error>;

thread_local! {
    static LAST: RefCell<Option<String>> = const { RefCell::new(None) };
}

extern "C" fn record(message: *const c_char, _data: *mut c_void) {
    if message.is_null() {
        return;
    }
    // SAFETY: mlx-c passes a NUL-terminated string that lives for the duration of the call.
    let text = unsafe { CStr::from_ptr(message) }.to_string_lossy();
    // mlx-c appends " at <its source file>:<line>", which helps nobody who uses the tool.
    let text = text.rsplit_once(" at ").map_or(text.as_ref(), |(what, _)| what).to_owned();
    LAST.with(|last| *last.borrow_mut() = Some(text));
}

/// Installs the error handler; without it mlx-c ends the process on the first error.
pub(super) fn initialise() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler is a plain function and needs no data.
        unsafe { ffi::mlx_set_error_handler(Some(record), std::ptr::null_mut(), None) };
    });
}

/// Turns a status of mlx-c into a [`Result`].
pub(super) fn check(status: c_int) -> Result<()> {
    if status == 0 { Ok(()) } else { Err(last_error()) }
}

/// The message of the operation that just failed on this thread.
pub(super) fn last_error() -> Error {
    let message = LAST.with(|last| last.borrow_mut().take());
    Error::new(message.unwrap_or_else(|| "MLX reported a failure without a message".to_owned()))
}
