//! Our own operations in MLX's graph: a node whose CPU evaluation calls a Rust kernel.

use std::ffi::{CStr, CString, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use mlx_sys as ffi;

use super::array::Array;
use super::device::stream;
use super::dtype::Dtype;
use super::error::{Error, Result};

/// An array's memory as a kernel sees it, for the duration of one call.
#[repr(C)]
#[derive(Clone, Copy)]
struct RawView {
    data: *mut c_void,
    shape: *const i32,
    strides: *const i64,
    ndim: i32,
    dtype: i32,
}

/// One array of a kernel's call: element type, shape, strides in elements, and where the first element lies.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    data: *mut c_void,
    /// Dimensions, outermost first.
    pub shape: &'a [i32],
    /// Elements between neighbours along each dimension.
    pub strides: &'a [i64],
    /// Element type.
    pub dtype: Dtype,
}

impl View<'_> {
    /// The first element. The elements that shape and strides name may be read; those of outputs written.
    pub fn as_ptr(&self) -> *mut c_void {
        self.data
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().map(|&dim| dim as usize).product()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the elements lie in row-major order without gaps.
    pub fn is_dense(&self) -> bool {
        let mut expected = 1i64;
        self.shape.iter().zip(self.strides).rev().all(|(&dim, &stride)| {
            let fits = dim == 1 || stride == expected;
            expected *= i64::from(dim);
            fits
        })
    }
}

/// What a node computes. It runs on the stream's thread; outputs are allocated dense and uninitialised.
pub trait Kernel: Send + Sync + 'static {
    /// Fills the outputs from the inputs.
    ///
    /// # Errors
    /// Anything it cannot compute; the message surfaces from `eval`.
    fn run(&self, inputs: &[View], outputs: &[View]) -> std::result::Result<(), String>;
}

#[repr(C)]
struct RawOutput {
    shape: *const i32,
    ndim: i32,
    dtype: i32,
}

type Call = extern "C" fn(*mut c_void, *const RawView, usize, *const RawView, usize) -> *mut c_char;
type Drop = extern "C" fn(*mut c_void);

unsafe extern "C" {
    fn mlx_bun_cpu_kernel(
        object: *mut c_void,
        call: Call,
        drop: Drop,
        name: *const c_char,
        inputs: *const ffi::mlx_array,
        input_count: usize,
        outputs: *const RawOutput,
        output_count: usize,
        stream: ffi::mlx_stream,
        results: *mut ffi::mlx_array,
    ) -> *mut c_char;
    fn malloc(size: usize) -> *mut c_void;
    fn free(pointer: *mut c_void);
}

/// # Safety
/// `raw` points to `count` views whose shapes and strides hold `ndim` entries and outlive `'a`.
unsafe fn views<'a>(raw: *const RawView, count: usize) -> Vec<View<'a>> {
    let raw = match count {
        0 => &[], // an empty vector of C++ may hand over a null pointer
        // SAFETY: the caller vouches for `count` views.
        _ => unsafe { std::slice::from_raw_parts(raw, count) },
    };
    let view = |raw: &RawView| {
        let (shape, strides): (&[i32], &[i64]) = match raw.ndim as usize {
            0 => (&[], &[]),
            // SAFETY: see above.
            n => unsafe {
                (std::slice::from_raw_parts(raw.shape, n), std::slice::from_raw_parts(raw.strides, n))
            },
        };
        View { data: raw.data, shape, strides, dtype: Dtype::from_raw(raw.dtype as ffi::mlx_dtype) }
    };
    raw.iter().map(view).collect()
}

extern "C" fn call(
    object: *mut c_void,
    inputs: *const RawView,
    input_count: usize,
    outputs: *const RawView,
    output_count: usize,
) -> *mut c_char {
    let attempt = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the object was made by `Box::into_raw` in `custom` and lives until `release`.
        let kernel = unsafe { &*object.cast::<Arc<dyn Kernel>>() };
        // SAFETY: the primitive keeps the arrays alive through the call.
        let (inputs, outputs) = unsafe { (views(inputs, input_count), views(outputs, output_count)) };
        kernel.run(&inputs, &outputs)
    }));
    let message = match attempt {
        Ok(Ok(())) => return std::ptr::null_mut(),
        Ok(Err(message)) => message,
        Err(_) => "the kernel panicked".to_owned(),
    };
    let bytes = CString::new(message.replace('\0', " ")).unwrap_or_default().into_bytes_with_nul();
    // SAFETY: room for the bytes is allocated, checked and filled; the primitive frees it.
    unsafe {
        let copy = malloc(bytes.len()).cast::<u8>();
        if !copy.is_null() {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), copy, bytes.len());
        }
        copy.cast()
    }
}

extern "C" fn release(object: *mut c_void) {
    // SAFETY: made by `Box::into_raw` in `custom` and released once, by the primitive.
    drop(unsafe { Box::from_raw(object.cast::<Arc<dyn Kernel>>()) });
}

/// Adds a node with one output that `kernel` computes from `inputs` on the CPU.
pub fn custom(
    name: &CStr,
    kernel: Arc<dyn Kernel>,
    inputs: &[&Array],
    shape: &[i32],
    dtype: Dtype,
) -> Result<Array> {
    let stream = stream();
    let handles: Vec<ffi::mlx_array> = inputs.iter().map(|array| array.raw).collect();
    let output = RawOutput { shape: shape.as_ptr(), ndim: shape.len() as i32, dtype: dtype.raw() as i32 };
    let object = Box::into_raw(Box::new(kernel)).cast();
    let mut result = ffi::mlx_array_ { ctx: std::ptr::null_mut() };
    // SAFETY: handles and shapes live through the call; the primitive owns the object from here on.
    let message = unsafe {
        let (inputs, count) = (handles.as_ptr(), handles.len());
        mlx_bun_cpu_kernel(
            object,
            call,
            release,
            name.as_ptr(),
            inputs,
            count,
            &output,
            1,
            stream,
            &mut result,
        )
    };
    if message.is_null() {
        return Ok(Array::from_raw(result));
    }
    // SAFETY: a NUL-terminated string from `strdup`, freed once.
    let text = unsafe {
        let text = CStr::from_ptr(message).to_string_lossy().into_owned();
        free(message.cast());
        text
    };
    Err(Error::new(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mlx::eval;

    struct Double;

    impl Kernel for Double {
        fn run(&self, inputs: &[View], outputs: &[View]) -> std::result::Result<(), String> {
            let (x, y) = (inputs[0], outputs[0]);
            let (rows, columns) = (x.shape[0] as i64, x.shape[1] as i64);
            for index in 0..rows * columns {
                let at = index / columns * x.strides[0] + index % columns * x.strides[1];
                // SAFETY: the offsets are those of the view's elements; both hold f32.
                unsafe {
                    let value = *x.as_ptr().cast::<f32>().offset(at as isize);
                    *y.as_ptr().cast::<f32>().offset(index as isize) = 2.0 * value;
                }
            }
            Ok(())
        }
    }

    struct Fails;

    impl Kernel for Fails {
        fn run(&self, _: &[View], _: &[View]) -> std::result::Result<(), String> {
            Err("wrong shape".to_owned())
        }
    }

    struct Panics;

    impl Kernel for Panics {
        fn run(&self, _: &[View], outputs: &[View]) -> std::result::Result<(), String> {
            panic!("{} outputs", outputs.len())
        }
    }

    #[test]
    fn a_kernel_takes_part_in_the_graph_and_sees_strides() {
        let x = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3]).unwrap();
        let before = x.add_scalar(1.0).unwrap().t().unwrap();
        let doubled = custom(c"double", Arc::new(Double), &[&before], &[3, 2], Dtype::Float32).unwrap();
        let after = doubled.add_scalar(0.5).unwrap();
        assert_eq!(after.to_vec::<f32>().unwrap(), [4.5, 10.5, 6.5, 12.5, 8.5, 14.5]);
    }

    #[test]
    fn a_failing_or_panicking_kernel_is_an_error_and_the_stream_goes_on() {
        let x = Array::from_slice(&[1.0f32], &[1, 1]).unwrap();
        let failed = custom(c"fails", Arc::new(Fails), &[&x], &[1, 1], Dtype::Float32).unwrap();
        let error = failed.eval().unwrap_err().to_string();
        assert!(error.contains("[fails] wrong shape"), "{error}");
        let panicked = custom(c"panics", Arc::new(Panics), &[&x], &[1, 1], Dtype::Float32).unwrap();
        assert!(eval([&panicked]).unwrap_err().to_string().contains("panicked"));
        assert_eq!(x.add_scalar(1.0).unwrap().to_vec::<f32>().unwrap(), [2.0]);
    }
}
