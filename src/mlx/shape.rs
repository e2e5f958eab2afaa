//! Making arrays, changing their shape, reading and writing parts of them.

use mlx_sys as ffi;

use super::array::Array;
use super::dtype::Dtype;
use super::error::{Error, Result};

/// Dimensions a slice may have; a stack array of this size spares an allocation a call.
const MAX_DIMS: usize = 8;
const ONES: [i32; MAX_DIMS] = [1; MAX_DIMS];

impl Array {
    /// Zeros of a shape and type.
    pub fn zeros(shape: &[i32], dtype: Dtype) -> Result<Array> {
        // SAFETY: the shape lives through the call.
        Array::from_op(|out, stream| unsafe {
            ffi::mlx_zeros(out, shape.as_ptr(), shape.len(), dtype.raw(), stream)
        })
    }

    /// An array filled with one value, rounded to `dtype`.
    pub fn full(shape: &[i32], value: f32, dtype: Dtype) -> Result<Array> {
        let value = Array::scalar(value, dtype)?;
        // SAFETY: the shape lives through the call.
        Array::from_op(|out, stream| unsafe {
            ffi::mlx_full(out, shape.as_ptr(), shape.len(), value.raw, dtype.raw(), stream)
        })
    }

    /// `start, start + step, …` up to but without `stop`.
    pub fn arange(start: f64, stop: f64, step: f64, dtype: Dtype) -> Result<Array> {
        // SAFETY: plain values.
        Array::from_op(|out, stream| unsafe { ffi::mlx_arange(out, start, stop, step, dtype.raw(), stream) })
    }

    /// The same elements in another shape; one dimension may be -1.
    pub fn reshape(&self, shape: &[i32]) -> Result<Array> {
        // SAFETY: handles and shape are valid for the call.
        Array::from_op(|out, stream| unsafe {
            ffi::mlx_reshape(out, self.raw, shape.as_ptr(), shape.len(), stream)
        })
    }

    /// Reorders the axes.
    pub fn transpose(&self, axes: &[i32]) -> Result<Array> {
        // SAFETY: handles and axes are valid for the call.
        Array::from_op(|out, stream| unsafe {
            ffi::mlx_transpose_axes(out, self.raw, axes.as_ptr(), axes.len(), stream)
        })
    }

    /// Reverses the axes (`.T`).
    pub fn t(&self) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe { ffi::mlx_transpose(out, self.raw, stream) })
    }

    /// Inserts an axis of size one.
    pub fn expand_dims(&self, axis: i32) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe { ffi::mlx_expand_dims(out, self.raw, axis, stream) })
    }

    /// Removes an axis of size one.
    pub fn squeeze(&self, axis: i32) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe { ffi::mlx_squeeze_axis(out, self.raw, axis, stream) })
    }

    /// Repeats the array to `shape` by numpy's broadcasting rules.
    pub fn broadcast_to(&self, shape: &[i32]) -> Result<Array> {
        // SAFETY: handles and shape are valid for the call.
        Array::from_op(|out, stream| unsafe {
            ffi::mlx_broadcast_to(out, self.raw, shape.as_ptr(), shape.len(), stream)
        })
    }

    /// The same elements, row-contiguous.
    pub fn contiguous(&self) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe { ffi::mlx_contiguous(out, self.raw, false, stream) })
    }

    /// Rotates the elements along `axis` by `shift`.
    pub fn roll(&self, shift: i32, axis: i32) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe { ffi::mlx_roll_axis(out, self.raw, &shift, 1, axis, stream) })
    }

    /// Elements `start..stop` along `axis`, all of the others. Negative axes count from the end.
    pub fn slice(&self, axis: i32, start: i32, stop: i32) -> Result<Array> {
        let (begin, end, dims) = self.slice_bounds(axis, start, stop)?;
        // SAFETY: `dims` of each bound are set; they live through the call.
        Array::from_op(|out, stream| unsafe {
            let (begin, end) = (begin.as_ptr(), end.as_ptr());
            ffi::mlx_slice(out, self.raw, begin, dims, end, dims, ONES.as_ptr(), dims, stream)
        })
    }

    /// The elements in reverse order along `axis`, without a copy.
    pub fn reverse(&self, axis: i32) -> Result<Array> {
        let length = self.dim(axis);
        let (mut begin, mut end, dims) = self.slice_bounds(axis, 0, length)?;
        let at = if axis < 0 { axis + dims as i32 } else { axis } as usize;
        let mut strides = ONES;
        // A stop before the first element is counted from the end, as Python writes `a[n - 1:-n - 1:-1]`.
        (begin[at], end[at], strides[at]) = (length - 1, -length - 1, -1);
        // SAFETY: `dims` of each bound are set; they live through the call.
        Array::from_op(|out, stream| unsafe {
            let (begin, end) = (begin.as_ptr(), end.as_ptr());
            ffi::mlx_slice(out, self.raw, begin, dims, end, dims, strides.as_ptr(), dims, stream)
        })
    }

    /// A copy with elements `start..start + update.dim(axis)` along `axis` replaced by `update`. Where nobody else
    /// holds the array, MLX writes in place.
    pub fn slice_update(&self, update: &Array, axis: i32, start: i32) -> Result<Array> {
        let (begin, end, dims) = self.slice_bounds(axis, start, start + update.dim(axis))?;
        // SAFETY: `dims` of each bound are set; they live through the call.
        Array::from_op(|out, stream| unsafe {
            let (begin, end) = (begin.as_ptr(), end.as_ptr());
            ffi::mlx_slice_update(
                out,
                self.raw,
                update.raw,
                begin,
                dims,
                end,
                dims,
                ONES.as_ptr(),
                dims,
                stream,
            )
        })
    }

    fn slice_bounds(
        &self,
        axis: i32,
        start: i32,
        stop: i32,
    ) -> Result<([i32; MAX_DIMS], [i32; MAX_DIMS], usize)> {
        let shape = self.shape();
        let dims = shape.len();
        let at = if axis < 0 { axis + dims as i32 } else { axis };
        if dims > MAX_DIMS || !(0..dims as i32).contains(&at) {
            return Err(Error::new(format!("cannot slice axis {axis} of {self:?}")));
        }
        let (mut begin, mut end) = ([0; MAX_DIMS], [0; MAX_DIMS]);
        end[..dims].copy_from_slice(shape);
        begin[at as usize] = start;
        end[at as usize] = stop;
        Ok((begin, end, dims))
    }

    /// Elements of `axis` at `indices` (`a[indices]` for axis 0).
    pub fn take(&self, indices: &Array, axis: i32) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe { ffi::mlx_take_axis(out, self.raw, indices.raw, axis, stream) })
    }

    /// For each position, the element that `indices` names along `axis`.
    pub fn take_along_axis(&self, indices: &Array, axis: i32) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe {
            ffi::mlx_take_along_axis(out, self.raw, indices.raw, axis, stream)
        })
    }

    /// A copy with the elements that `indices` names along `axis` set to `values` (broadcast).
    pub fn put_along_axis(&self, indices: &Array, values: &Array, axis: i32) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe {
            ffi::mlx_put_along_axis(out, self.raw, indices.raw, values.raw, axis, stream)
        })
    }

    /// Adds `updates[.., i]` to column `indices[i]` of a `[1, N]` array, repeats accumulating
    /// (`a.at[:, indices].add(updates)`).
    pub fn scatter_add_columns(&self, indices: &Array, updates: &Array) -> Result<Array> {
        let count = indices.dim(0);
        // MLX wants updates of shape indices.shape + slice shape; the slice spans the first axis here.
        let updates = updates.astype(self.dtype())?.broadcast_to(&[count])?.reshape(&[count, 1, 1])?;
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe {
            ffi::mlx_scatter_add_single(out, self.raw, indices.raw, updates.raw, 1, stream)
        })
    }
}
