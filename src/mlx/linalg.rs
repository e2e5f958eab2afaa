//! Linear algebra and the reductions that quantization methods need.

use std::ffi::CStr;

use mlx_sys as ffi;

use super::array::{Array, with_vector};
use super::error::Result;

impl Array {
    /// Lower Cholesky factor of a positive definite matrix, the upper one if `upper`. On CPUs only.
    pub fn cholesky(&self, upper: bool) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe { ffi::mlx_linalg_cholesky(out, self.raw, upper, stream) })
    }

    /// The inverse of a matrix, given its lower Cholesky factor. On CPUs only.
    pub fn cholesky_inverse(&self) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe { ffi::mlx_linalg_cholesky_inv(out, self.raw, false, stream) })
    }

    /// The diagonal of a matrix; a matrix with this diagonal for a vector.
    pub fn diag(&self) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe { ffi::mlx_diag(out, self.raw, 0, stream) })
    }

    /// Each element rounded to the nearest integer, ties to even.
    pub fn round(&self) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe { ffi::mlx_round(out, self.raw, 0, stream) })
    }

    /// Sum of all elements.
    pub fn sum_all(&self) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe { ffi::mlx_sum(out, self.raw, false, stream) })
    }

    /// Mean of all elements.
    pub fn mean_all(&self) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe { ffi::mlx_mean(out, self.raw, false, stream) })
    }

    /// Mean over several axes.
    pub fn mean(&self, axes: &[i32]) -> Result<Array> {
        // SAFETY: handles and axes are valid for the call.
        Array::from_op(|out, stream| unsafe {
            ffi::mlx_mean_axes(out, self.raw, axes.as_ptr(), axes.len(), false, stream)
        })
    }

    /// Limits the elements to `low..=high`, arrays that broadcast.
    pub fn clip_between(&self, low: &Array, high: &Array) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe { ffi::mlx_clip(out, self.raw, low.raw, high.raw, stream) })
    }

    /// `mx.einsum`.
    pub fn einsum<'a>(subscripts: &CStr, operands: impl IntoIterator<Item = &'a Array>) -> Result<Array> {
        with_vector(operands, |vector| {
            // SAFETY: handles and the string are valid for the call.
            Array::from_op(|out, stream| unsafe { ffi::mlx_einsum(out, subscripts.as_ptr(), vector, stream) })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_times_its_inverse_is_the_identity() {
        let a = Array::from_slice(&[4.0f32, 2.0, 2.0, 3.0], &[2, 2]).unwrap();
        let factor = a.cholesky(false).unwrap();
        let inverse = factor.cholesky_inverse().unwrap();
        let product = a.matmul(&inverse).unwrap().to_vec::<f32>().unwrap();
        assert!(product.iter().zip([1.0, 0.0, 0.0, 1.0]).all(|(a, b)| (a - b).abs() < 1e-5), "{product:?}");
        assert_eq!(a.diag().unwrap().to_vec::<f32>().unwrap(), [4.0, 3.0]);
        assert_eq!(a.mean_all().unwrap().to_vec::<f32>().unwrap(), [2.75]);
        assert_eq!(a.sum_all().unwrap().to_vec::<f32>().unwrap(), [11.0]);
        let upper = a.cholesky(true).unwrap().to_vec::<f32>().unwrap();
        assert_eq!((upper[0], upper[1], upper[2]), (2.0, 1.0, 0.0));
        let outer = Array::einsum(c"ij,kj->ik", [&a, &a]).unwrap().to_vec::<f32>().unwrap();
        assert_eq!(outer, [20.0, 14.0, 14.0, 13.0]);
        let rounded = Array::from_slice(&[0.5f32, 1.5, -2.6], &[3]).unwrap().round().unwrap();
        assert_eq!(rounded.to_vec::<f32>().unwrap(), [0.0, 2.0, -3.0]);
    }
}
