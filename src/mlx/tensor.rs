//! Checkpoint tensors as arrays, without a copy where the device reads host memory.

use std::ffi::c_void;
use std::sync::Arc;

use mlx_sys as ffi;

use super::array::Array;
use super::dtype::Dtype;
use super::error::{Error, Result};
use super::kernel::{Drop, array_of};
use crate::checkpoint::tensor::{Tensor, TensorData};

extern "C" fn release(payload: *mut c_void) {
    // SAFETY: made by `Box::into_raw` in `from_tensor` and released once, by the array.
    drop(unsafe { Box::from_raw(payload.cast::<TensorData>()) });
}

impl Array {
    /// An array over a tensor's bytes. Where MLX takes them a mapped tensor stays mapped: pages are read when they are
    /// used, and the mapping lives as long as the array. Elsewhere, and when they are misaligned, they are copied.
    pub fn from_tensor(tensor: &Tensor) -> Result<Self> {
        let dtype = Dtype::from(tensor.dtype);
        let shape =
            tensor.shape.iter().map(|&dim| i32::try_from(dim)).collect::<std::result::Result<Vec<_>, _>>();
        let Ok(shape) = shape else {
            return Err(Error::new(format!("a dimension of {:?} exceeds 2^31", tensor.shape)));
        };
        let bytes = tensor.bytes();
        let size: usize = tensor.shape.iter().product();
        if Some(bytes.len()) != size.checked_mul(dtype.size()) {
            return Err(Error::new(format!("{} bytes do not fill {:?}", bytes.len(), tensor.shape)));
        }
        let aligned = bytes.as_ptr().addr().is_multiple_of(dtype.size());
        let (payload, drop): (_, Option<Drop>) = match aligned && !bytes.is_empty() {
            true => (Box::into_raw(Box::new(tensor.data.clone())).cast(), Some(release)),
            false => (std::ptr::null_mut(), None),
        };
        // SAFETY: the bytes fill the shape. The payload owns (a reference to) the mapping or the buffer until it is
        // released, and MLX does not write to arrays that were made from outside data.
        let array = unsafe { array_of(bytes.as_ptr().cast(), &shape, dtype, payload, drop) }?;
        // SAFETY: an array made from data has it at once.
        let copied = unsafe { ffi::mlx_array_data_uint8(array.raw) } != bytes.as_ptr();
        if copied {
            // MLX's CPU build takes no foreign memory: without this the model would be in memory twice while it loads.
            tensor.data.release();
        }
        Ok(array)
    }

    /// A copy of the elements as a tensor that a file can hold; computes the array first.
    ///
    /// # Errors
    /// When the computation fails, or files do not hold the type.
    pub fn to_tensor(&self) -> Result<Tensor> {
        let Some(dtype) = self.dtype().stored() else {
            return Err(Error::new(format!("no tensor of type {}", self.dtype().name())));
        };
        let shape = self.shape().iter().map(|&size| usize::try_from(size).unwrap_or(0)).collect();
        Ok(Tensor { dtype, shape, data: TensorData::Owned(Arc::new(self.to_bytes()?)) })
    }
}
