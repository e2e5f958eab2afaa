//! The array handle: ownership, shape, host values in and out.

use std::fmt;

use half::{bf16, f16};
use mlx_sys as ffi;

use super::device::stream;
use super::dtype::Dtype;
use super::error::{Error, Result, check, last_error};
use super::kernel::array_of;

/// An n-dimensional array, or the promise of one. Cloning shares the data.
pub struct Array {
    pub(super) raw: ffi::mlx_array,
}

const EMPTY: ffi::mlx_array = ffi::mlx_array_ { ctx: std::ptr::null_mut() };

/// The handle mlx-c reads as "argument not given".
pub(super) fn optional(array: Option<&Array>) -> ffi::mlx_array {
    array.map_or(EMPTY, |array| array.raw)
}

impl Drop for Array {
    fn drop(&mut self) {
        // SAFETY: `raw` is owned and freed once.
        unsafe { ffi::mlx_array_free(self.raw) };
    }
}

impl Clone for Array {
    fn clone(&self) -> Self {
        let mut raw = EMPTY;
        // SAFETY: both handles are valid; this copies a shared pointer and cannot fail but for lack of memory,
        // which leaves an empty handle that every operation refuses.
        unsafe { ffi::mlx_array_set(&mut raw, self.raw) };
        Self { raw }
    }
}

impl fmt::Debug for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Array({:?}, {})", self.shape(), self.dtype().name())
    }
}

/// Host types that have an MLX element type of the same layout.
pub trait Element: Copy + 'static {
    /// The MLX type.
    const DTYPE: Dtype;
}

macro_rules! elements {
    ($($host:ty => $dtype:ident),* $(,)?) => { $(impl Element for $host { const DTYPE: Dtype = Dtype::$dtype; })* };
}
elements! {
    bool => Bool, u8 => Uint8, u16 => Uint16, u32 => Uint32, u64 => Uint64, i8 => Int8, i16 => Int16,
    i32 => Int32, i64 => Int64, f16 => Float16, f32 => Float32, bf16 => Bfloat16,
}

impl Array {
    /// Runs one operation of mlx-c on the calling thread's stream.
    #[inline]
    pub(super) fn from_op(op: impl FnOnce(*mut ffi::mlx_array, ffi::mlx_stream) -> i32) -> Result<Self> {
        let stream = stream();
        let mut out = Self { raw: EMPTY };
        if op(&mut out.raw, stream) == 0 { Ok(out) } else { Err(last_error()) }
    }

    pub(super) fn from_raw(raw: ffi::mlx_array) -> Self {
        Self { raw }
    }

    /// Copies `data` into an array of `shape`.
    ///
    /// # Errors
    /// When the shape does not describe `data.len()` elements.
    pub fn from_slice<T: Element>(data: &[T], shape: &[i32]) -> Result<Self> {
        let size = shape.iter().try_fold(1usize, |size, &dim| size.checked_mul(usize::try_from(dim).ok()?));
        if size != Some(data.len()) {
            return Err(Error::new(format!("{} values do not fill the shape {shape:?}", data.len())));
        }
        // SAFETY: `data` holds as many elements of this type as the shape asks for; they are copied.
        unsafe { array_of(data.as_ptr().cast(), shape, T::DTYPE, std::ptr::null_mut(), None) }
    }

    /// A scalar of `dtype`, rounded as `mlx.core` rounds a Python float that meets an array of that type.
    pub fn scalar(value: f32, dtype: Dtype) -> Result<Self> {
        match dtype {
            Dtype::Float32 => Self::from_slice(&[value], &[]),
            Dtype::Bfloat16 => Self::from_slice(&[bf16::from_f32(value)], &[]),
            Dtype::Float16 => Self::from_slice(&[f16::from_f32(value)], &[]),
            Dtype::Bool => Self::from_slice(&[value != 0.0], &[]),
            Dtype::Int32 => Self::from_slice(&[value as i32], &[]),
            Dtype::Uint32 => Self::from_slice(&[value as u32], &[]),
            other => Err(Error::new(format!("no scalar of type {}", other.name()))),
        }
    }

    /// Dimensions, outermost first.
    pub fn shape(&self) -> &[i32] {
        // SAFETY: the pointer is to the array's own shape, which does not change while the array lives.
        unsafe {
            match ffi::mlx_array_ndim(self.raw) {
                0 => &[],
                n => std::slice::from_raw_parts(ffi::mlx_array_shape(self.raw), n),
            }
        }
    }

    /// Number of dimensions.
    pub fn ndim(&self) -> usize {
        // SAFETY: the handle is valid.
        unsafe { ffi::mlx_array_ndim(self.raw) }
    }

    /// Size of dimension `axis`; negative axes count from the end. Zero when there is no such axis.
    pub fn dim(&self, axis: i32) -> i32 {
        let shape = self.shape();
        let index = if axis < 0 { axis + shape.len() as i32 } else { axis };
        usize::try_from(index).ok().and_then(|index| shape.get(index).copied()).unwrap_or(0)
    }

    /// Number of elements.
    pub fn size(&self) -> usize {
        // SAFETY: the handle is valid.
        unsafe { ffi::mlx_array_size(self.raw) }
    }

    /// Bytes the elements take.
    pub fn nbytes(&self) -> usize {
        // SAFETY: the handle is valid.
        unsafe { ffi::mlx_array_nbytes(self.raw) }
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        // SAFETY: the handle is valid.
        Dtype::from_raw(unsafe { ffi::mlx_array_dtype(self.raw) })
    }

    /// Computes the array and waits for it.
    pub fn eval(&self) -> Result<()> {
        // SAFETY: the handle is valid.
        check(unsafe { ffi::mlx_array_eval(self.raw) })
    }

    /// The array computed and in row-major order: itself where it is so already, which costs no evaluation.
    pub fn dense(&self) -> Result<Array> {
        let (mut available, mut row_major) = (false, false);
        // SAFETY: the handle is valid; the order in memory is only known, and only asked for, once it is computed.
        unsafe {
            check(ffi::_mlx_array_is_available(&mut available, self.raw))?;
            if available {
                check(ffi::_mlx_array_is_row_contiguous(&mut row_major, self.raw))?;
            }
        }
        if row_major {
            return Ok(self.clone());
        }
        let dense = self.contiguous()?;
        dense.eval()?;
        Ok(dense)
    }

    /// The value of a one-element `uint32` array, as samplers return it; computes the array first.
    pub fn item_u32(&self) -> Result<u32> {
        if self.size() != 1 || self.dtype() != Dtype::Uint32 {
            return Err(Error::new(format!("expected one uint32, got {self:?}")));
        }
        let mut value = 0;
        // SAFETY: one element of that type, checked above; mlx-c evaluates before it reads.
        check(unsafe { ffi::mlx_array_item_uint32(&mut value, self.raw) })?;
        Ok(value)
    }

    /// The elements in row-major order; computes the array first.
    ///
    /// # Errors
    /// When `T` is not the array's element type, or the computation fails.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        if self.dtype() != T::DTYPE {
            return Err(Error::new(format!("expected {} elements, got {self:?}", T::DTYPE.name())));
        }
        let bytes = self.to_bytes()?;
        let mut out = Vec::<T>::with_capacity(self.size());
        // SAFETY: `bytes` holds exactly `size` elements of `T`'s layout, copied byte for byte into fresh room
        // for that many.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), out.as_mut_ptr().cast::<u8>(), bytes.len());
            out.set_len(self.size());
        }
        Ok(out)
    }

    /// The elements converted to `f32`, in row-major order; computes the array first.
    pub fn to_f32_vec(&self) -> Result<Vec<f32>> {
        self.astype(Dtype::Float32)?.to_vec()
    }

    /// The raw bytes of the elements in row-major order; computes the array first.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let dense = self.dense()?;
        // SAFETY: the array is evaluated and row-contiguous, so `nbytes` bytes lie behind its data pointer, which
        // `mlx_array_data_uint8` returns for any type.
        let bytes = unsafe {
            let data = ffi::mlx_array_data_uint8(dense.raw);
            if data.is_null() { &[] } else { std::slice::from_raw_parts(data, dense.nbytes()) }
        };
        Ok(bytes.to_vec())
    }
}

/// Lends mlx-c a vector of the arrays.
pub(super) fn with_vector<'a, R>(
    arrays: impl IntoIterator<Item = &'a Array>,
    use_it: impl FnOnce(ffi::mlx_vector_array) -> R,
) -> R {
    let handles: Vec<ffi::mlx_array> = arrays.into_iter().map(|array| array.raw).collect();
    // SAFETY: mlx-c copies the handles; the vector is freed after its use.
    unsafe {
        let vector = ffi::mlx_vector_array_new_data(handles.as_ptr(), handles.len());
        let result = use_it(vector);
        ffi::mlx_vector_array_free(vector);
        result
    }
}

/// Takes the arrays out of a vector that mlx-c filled, and frees it.
pub(super) fn take_vector(vector: ffi::mlx_vector_array) -> Result<Vec<Array>> {
    // SAFETY: indices are below the vector's size; the vector is freed once.
    unsafe {
        let arrays = (0..ffi::mlx_vector_array_size(vector))
            .map(|index| {
                let mut out = Array { raw: EMPTY };
                check(ffi::mlx_vector_array_get(&mut out.raw, vector, index)).map(|()| out)
            })
            .collect();
        ffi::mlx_vector_array_free(vector);
        arrays
    }
}
