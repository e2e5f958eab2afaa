//! Our own operations in MLX's graph: a node whose CPU evaluation calls a Rust kernel.

use std::ffi::{CStr, CString, c_char, c_void};
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use mlx_sys as ffi;

use super::array::Array;
use super::autograd;
use super::cpu::allocation;
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

impl<'a> View<'a> {
    /// An evaluated array's memory.
    ///
    /// # Safety
    /// The array is evaluated, and it lives and nobody writes to it while the view is used.
    pub(super) unsafe fn of(array: &'a Array) -> Self {
        // SAFETY: the handle is valid and the array evaluated; shape and strides are its own.
        unsafe {
            let ndim = ffi::mlx_array_ndim(array.raw);
            let strides: &[i64] = match ndim {
                0 => &[],
                // Sizes and signed strides have the same layout.
                _ => std::slice::from_raw_parts(ffi::mlx_array_strides(array.raw).cast(), ndim),
            };
            let data = ffi::mlx_array_data_uint8(array.raw).cast_mut().cast();
            View { data, shape: array.shape(), strides, dtype: array.dtype() }
        }
    }
}

#[cfg(test)]
impl<'a> View<'a> {
    /// A view of f32 values for tests, whose shape and strides must stay in the buffer that `data` points into.
    pub(super) fn over(data: &'a [f32], shape: &'a [i32], strides: &'a [i64]) -> Self {
        Self { data: data.as_ptr().cast_mut().cast(), shape, strides, dtype: Dtype::Float32 }
    }
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

    /// The outputs built of MLX's own operations: what gradients are taken of, unless [`vjp`](Self::vjp) knows
    /// them.
    ///
    /// # Errors
    /// When the kernel has no such form; a gradient through the node is then an error.
    fn stock(&self, _inputs: &[Array]) -> Result<Vec<Array>> {
        Err(Error::new("has no gradient"))
    }

    /// The gradients of the inputs numbered `wrt`, given those of the outputs. `None` leaves them to MLX and
    /// [`stock`](Self::stock).
    fn vjp(&self, _inputs: &[Array], _cotangents: &[Array], _wrt: &[usize]) -> Option<Result<Vec<Array>>> {
        None
    }
}

#[repr(C)]
struct RawOutput {
    shape: *const i32,
    ndim: i32,
    dtype: i32,
}

type Call = extern "C" fn(*mut c_void, *const RawView, usize, *const RawView, usize) -> *mut c_char;
type Vjp = extern "C" fn(
    *mut c_void,
    *const ffi::mlx_array,
    usize,
    *const ffi::mlx_array,
    usize,
    *const i32,
    usize,
    *mut ffi::mlx_array,
) -> *mut c_char;
pub(super) type Drop = extern "C" fn(*mut c_void);

unsafe extern "C" {
    fn mlx_bun_cpu_kernel(
        object: *mut c_void,
        call: Call,
        vjp: Vjp,
        drop: Drop,
        name: *const c_char,
        inputs: *const ffi::mlx_array,
        input_count: usize,
        outputs: *const RawOutput,
        output_count: usize,
        stream: ffi::mlx_stream,
        results: *mut ffi::mlx_array,
    ) -> *mut c_char;
    fn mlx_bun_array(
        data: *mut c_void,
        shape: *const i32,
        ndim: i32,
        dtype: i32,
        payload: *mut c_void,
        drop: Option<Drop>,
        result: *mut ffi::mlx_array,
    ) -> *mut c_char;
    static mlx_bun_no_memory: c_char;
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
    match attempt {
        Ok(Ok(())) => std::ptr::null_mut(),
        Ok(Err(message)) => for_cpp(&message),
        Err(_) => for_cpp("the kernel panicked"),
    }
}

/// Called by the primitive around allocations whose failure it handles.
#[unsafe(no_mangle)]
extern "C" fn mlx_bun_fallible(step: i32) {
    allocation::shift(step);
}

/// A message that the primitive frees.
fn for_cpp(message: &str) -> *mut c_char {
    // SAFETY: `malloc` takes any size.
    allocation::fallibly(|| message_in(message, |size| unsafe { malloc(size) }))
}

/// A message in memory from `allocate`; if there is none, one that needs none, since null would mean success.
fn message_in(message: &str, allocate: impl FnOnce(usize) -> *mut c_void) -> *mut c_char {
    let bytes = CString::new(message.replace('\0', " ")).unwrap_or_default().into_bytes_with_nul();
    // SAFETY: room for the bytes is allocated, checked and filled; the primitive frees it.
    unsafe {
        let copy = allocate(bytes.len()).cast::<u8>();
        if copy.is_null() {
            return (&raw const mlx_bun_no_memory).cast_mut();
        }
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), copy, bytes.len());
        copy.cast()
    }
}

extern "C" fn vjp(
    object: *mut c_void,
    primals: *const ffi::mlx_array,
    primal_count: usize,
    cotangents: *const ffi::mlx_array,
    cotangent_count: usize,
    wrt: *const i32,
    wrt_count: usize,
    results: *mut ffi::mlx_array,
) -> *mut c_char {
    let attempt = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the primitive gives away handles of its own, whose counts it states.
        let (primals, cotangents) =
            unsafe { (owned(primals, primal_count), owned(cotangents, cotangent_count)) };
        // SAFETY: `wrt_count` numbers of inputs, none if that is 0.
        let wrt: Vec<usize> = (0..wrt_count).map(|i| unsafe { *wrt.add(i) } as usize).collect();
        // SAFETY: as in `call`.
        let kernel = unsafe { &*object.cast::<Arc<dyn Kernel>>() };
        gradients(kernel, primals, &cotangents, wrt)
    }));
    match attempt {
        Ok(Ok(gradients)) if gradients.len() == wrt_count => {
            for (index, gradient) in gradients.into_iter().enumerate() {
                let gradient = ManuallyDrop::new(gradient);
                // SAFETY: the primitive has room for `wrt_count` handles, and takes them over.
                unsafe { *results.add(index) = gradient.raw };
            }
            std::ptr::null_mut()
        }
        Ok(Ok(gradients)) => for_cpp(&format!("{} gradients for {wrt_count} inputs", gradients.len())),
        Ok(Err(error)) => for_cpp(&error.to_string()),
        Err(_) => for_cpp("the kernel's gradient panicked"),
    }
}

/// # Safety
/// `handles` points to `count` handles that the caller gives away.
unsafe fn owned(handles: *const ffi::mlx_array, count: usize) -> Vec<Array> {
    // SAFETY: the caller vouches for `count` handles; none is read when that is 0.
    (0..count).map(|index| Array::from_raw(unsafe { *handles.add(index) })).collect()
}

/// The kernel's own gradients, or those of its stock form as a function of the inputs `wrt` alone: MLX differentiates
/// no packed words or indices.
fn gradients(
    kernel: &Arc<dyn Kernel>,
    primals: Vec<Array>,
    cotangents: &[Array],
    wrt: Vec<usize>,
) -> Result<Vec<Array>> {
    if let Some(gradients) = kernel.vjp(&primals, cotangents, &wrt) {
        return gradients;
    }
    let variables: Vec<Array> = wrt.iter().map(|&index| primals[index].clone()).collect();
    let kernel = Arc::clone(kernel);
    let stock = move |variables: &[Array]| {
        let mut inputs = primals.clone();
        for (&index, variable) in wrt.iter().zip(variables) {
            inputs[index] = variable.clone();
        }
        kernel.stock(&inputs)
    };
    autograd::vjp(stock, &variables, cotangents).map(|(_, gradients)| gradients)
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
    custom_many(name, kernel, inputs, [(shape, dtype)]).map(|[output]| output)
}

/// As [`custom`], with an output for each shape and type.
pub fn custom_many<const N: usize>(
    name: &CStr,
    kernel: Arc<dyn Kernel>,
    inputs: &[&Array],
    outputs: [(&[i32], Dtype); N],
) -> Result<[Array; N]> {
    let stream = stream();
    let handles: Vec<ffi::mlx_array> = inputs.iter().map(|array| array.raw).collect();
    let outputs = outputs.map(|(shape, dtype)| RawOutput {
        shape: shape.as_ptr(),
        ndim: shape.len() as i32,
        dtype: dtype.raw() as i32,
    });
    let object = Box::into_raw(Box::new(kernel)).cast();
    let mut results = [ffi::mlx_array_ { ctx: std::ptr::null_mut() }; N];
    // SAFETY: handles and shapes live through the call; the primitive owns the object from here on.
    let message = unsafe {
        mlx_bun_cpu_kernel(
            object,
            call,
            vjp,
            release,
            name.as_ptr(),
            handles.as_ptr(),
            handles.len(),
            outputs.as_ptr(),
            N,
            stream,
            results.as_mut_ptr(),
        )
    };
    // SAFETY: what the call returned.
    unsafe { outcome(message) }.map(|()| results.map(Array::from_raw))
}

/// # Safety
/// `message` comes from a function of ours in C++: null, or a string that is given away.
unsafe fn outcome(message: *mut c_char) -> Result<()> {
    if message.is_null() {
        return Ok(());
    }
    // SAFETY: a NUL-terminated string from `strdup`, freed once, or the one that is never freed.
    let text = unsafe {
        let text = CStr::from_ptr(message).to_string_lossy().into_owned();
        if !std::ptr::eq(message, &raw const mlx_bun_no_memory) {
            free(message.cast());
        }
        text
    };
    Err(Error::new(text))
}

/// An array over memory that `drop` releases, or a copy where `drop` is `None` or MLX takes no foreign memory.
///
/// # Errors
/// When there is not enough memory.
///
/// # Safety
/// `data` holds the elements of `shape`, which are not written to until `drop` is called.
pub(super) unsafe fn array_of(
    data: *const c_void,
    shape: &[i32],
    dtype: Dtype,
    payload: *mut c_void,
    drop: Option<Drop>,
) -> Result<Array> {
    stream();
    let mut raw = ffi::mlx_array_ { ctx: std::ptr::null_mut() };
    // SAFETY: the caller's promise; the shape lives through the call.
    unsafe {
        let (ndim, dtype) = (shape.len() as i32, dtype.raw() as i32);
        outcome(mlx_bun_array(data.cast_mut(), shape.as_ptr(), ndim, dtype, payload, drop, &mut raw))?;
    }
    Ok(Array::from_raw(raw))
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
    fn an_error_without_memory_for_its_message_is_still_an_error() {
        let message = message_in("wrong shape", |_| std::ptr::null_mut());
        // SAFETY: as a primitive would return it.
        let error = unsafe { outcome(message) }.unwrap_err().to_string();
        assert!(error.contains("not enough memory"), "{error}");
        // SAFETY: as above.
        assert_eq!(unsafe { outcome(for_cpp("wrong shape")) }.unwrap_err().to_string(), "wrong shape");
    }

    #[test]
    fn an_array_that_does_not_fit_into_memory_is_an_error() {
        let x = Array::from_slice(&[1.0f32], &[1, 1]).unwrap();
        let huge = [i32::MAX, i32::MAX];
        let array = custom(c"double", Arc::new(Double), &[&x], &huge, Dtype::Float32).unwrap();
        let error = array.eval().unwrap_err().to_string();
        assert!(error.contains("not enough memory"), "{error}");
        assert_eq!(x.add_scalar(1.0).unwrap().to_vec::<f32>().unwrap(), [2.0]);
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
