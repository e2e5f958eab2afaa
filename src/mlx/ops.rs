//! Element-wise operations, reductions, products and selections.

use mlx_sys as ffi;

use super::array::{Array, with_vector};
use super::dtype::Dtype;
use super::error::Result;

macro_rules! unary {
    ($($(#[$doc:meta])* $name:ident => $ffi:ident;)*) => {
        impl Array { $(
            $(#[$doc])*
            pub fn $name(&self) -> Result<Array> {
                // SAFETY: handles are valid for the call.
                Array::from_op(|out, stream| unsafe { ffi::$ffi(out, self.raw, stream) })
            }
        )* }
    };
}
unary! {
    /// `e^x`.
    exp => mlx_exp;
    /// Natural logarithm.
    log => mlx_log;
    /// `1 / (1 + e^-x)`.
    sigmoid => mlx_sigmoid;
    /// Error function.
    erf => mlx_erf;
    /// Hyperbolic tangent.
    tanh => mlx_tanh;
    /// `-x`.
    negative => mlx_negative;
    /// `x * x`.
    square => mlx_square;
    /// Square root.
    sqrt => mlx_sqrt;
    /// `1 / sqrt(x)`.
    rsqrt => mlx_rsqrt;
    /// `1 / x`.
    reciprocal => mlx_reciprocal;
    /// Cosine.
    cos => mlx_cos;
    /// Sine.
    sin => mlx_sin;
    /// Absolute value.
    abs => mlx_abs;
    /// Whether each element is NaN.
    isnan => mlx_isnan;
    /// Logical negation.
    logical_not => mlx_logical_not;
}

macro_rules! binary {
    ($($(#[$doc:meta])* $name:ident => $ffi:ident;)*) => {
        impl Array { $(
            $(#[$doc])*
            pub fn $name(&self, other: &Array) -> Result<Array> {
                // SAFETY: handles are valid for the call.
                Array::from_op(|out, stream| unsafe { ffi::$ffi(out, self.raw, other.raw, stream) })
            }
        )* }
    };
}
binary! {
    /// Element-wise sum, broadcasting.
    add => mlx_add;
    /// Element-wise difference, broadcasting.
    subtract => mlx_subtract;
    /// Element-wise product, broadcasting.
    multiply => mlx_multiply;
    /// Element-wise quotient, broadcasting.
    divide => mlx_divide;
    /// Element-wise power, broadcasting.
    power => mlx_power;
    /// Element-wise maximum, broadcasting.
    maximum => mlx_maximum;
    /// Element-wise minimum, broadcasting.
    minimum => mlx_minimum;
    /// `a < b`.
    less => mlx_less;
    /// `a <= b`.
    less_equal => mlx_less_equal;
    /// `a > b`.
    greater => mlx_greater;
    /// `a >= b`.
    greater_equal => mlx_greater_equal;
    /// `a == b`.
    equal => mlx_equal;
    /// Logical and.
    logical_and => mlx_logical_and;
    /// Bitwise and.
    bitwise_and => mlx_bitwise_and;
    /// `log(e^a + e^b)`.
    logaddexp => mlx_logaddexp;
    /// Matrix product over the last two axes.
    matmul => mlx_matmul;
}

impl Array {
    /// Converts the elements to `dtype`.
    pub fn astype(&self, dtype: Dtype) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe { ffi::mlx_astype(out, self.raw, dtype.raw(), stream) })
    }

    /// Sum with a scalar of this array's type.
    pub fn add_scalar(&self, value: f32) -> Result<Array> {
        self.add(&Array::scalar(value, self.dtype())?)
    }

    /// Product with a scalar of this array's type.
    pub fn multiply_scalar(&self, value: f32) -> Result<Array> {
        self.multiply(&Array::scalar(value, self.dtype())?)
    }

    /// Quotient by a scalar of this array's type.
    pub fn divide_scalar(&self, value: f32) -> Result<Array> {
        self.divide(&Array::scalar(value, self.dtype())?)
    }

    /// `self + a @ b`, as `nn.Linear` adds its bias.
    pub fn addmm(&self, a: &Array, b: &Array) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe { ffi::mlx_addmm(out, self.raw, a.raw, b.raw, 1.0, 1.0, stream) })
    }

    /// `beta * self + alpha * (a @ b)`.
    pub fn addmm_scaled(&self, a: &Array, b: &Array, alpha: f32, beta: f32) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe {
            ffi::mlx_addmm(out, self.raw, a.raw, b.raw, alpha, beta, stream)
        })
    }

    /// `condition ? a : b`, broadcasting; `self` is the condition.
    pub fn select(&self, a: &Array, b: &Array) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe { ffi::mlx_where(out, self.raw, a.raw, b.raw, stream) })
    }

    /// Softmax along `axis`; `precise` accumulates in f32.
    pub fn softmax(&self, axis: i32, precise: bool) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe { ffi::mlx_softmax_axis(out, self.raw, axis, precise, stream) })
    }

    /// `log(sum(exp(x)))` along `axis`.
    pub fn logsumexp(&self, axis: i32, keepdims: bool) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe {
            ffi::mlx_logsumexp_axis(out, self.raw, axis, keepdims, stream)
        })
    }

    /// `log(sum(exp(x)))` over all axes.
    pub fn logsumexp_all(&self, keepdims: bool) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe { ffi::mlx_logsumexp(out, self.raw, keepdims, stream) })
    }

    /// Sum along `axis`.
    pub fn sum(&self, axis: i32, keepdims: bool) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe { ffi::mlx_sum_axis(out, self.raw, axis, keepdims, stream) })
    }

    /// Largest element along `axis`.
    pub fn max(&self, axis: i32, keepdims: bool) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe { ffi::mlx_max_axis(out, self.raw, axis, keepdims, stream) })
    }

    /// Smallest element along `axis`.
    pub fn min(&self, axis: i32, keepdims: bool) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe { ffi::mlx_min_axis(out, self.raw, axis, keepdims, stream) })
    }

    /// Whether any element is true.
    pub fn any(&self) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe { ffi::mlx_any(out, self.raw, false, stream) })
    }

    /// Index of the largest element along `axis`, the first among equals; `uint32`.
    pub fn argmax(&self, axis: i32) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe { ffi::mlx_argmax_axis(out, self.raw, axis, false, stream) })
    }

    /// Indices that put the `kth` smallest element along `axis` in its place; `uint32`.
    pub fn argpartition(&self, kth: i32, axis: i32) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe { ffi::mlx_argpartition_axis(out, self.raw, kth, axis, stream) })
    }

    /// Ascending sort along `axis`.
    pub fn sort(&self, axis: i32) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe { ffi::mlx_sort_axis(out, self.raw, axis, stream) })
    }

    /// Indices of an ascending sort along `axis`; `uint32`.
    pub fn argsort(&self, axis: i32) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe { ffi::mlx_argsort_axis(out, self.raw, axis, stream) })
    }

    /// Cumulative sum along `axis`.
    pub fn cumsum(&self, axis: i32, reverse: bool, inclusive: bool) -> Result<Array> {
        let same = ffi::mlx_optional_dtype { value: 0, has_value: false };
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe {
            ffi::mlx_cumsum_axis(out, self.raw, axis, reverse, inclusive, same, stream)
        })
    }

    /// Joins arrays along `axis`.
    pub fn concatenate<'a>(arrays: impl IntoIterator<Item = &'a Array>, axis: i32) -> Result<Array> {
        with_vector(arrays, |vector| {
            // SAFETY: handles are valid for the call.
            Array::from_op(|out, stream| unsafe { ffi::mlx_concatenate_axis(out, vector, axis, stream) })
        })
    }
}

impl Array {
    /// Limits the elements to `low..=high`, scalars of this array's type.
    pub fn clip(&self, low: f32, high: f32) -> Result<Array> {
        let (low, high) = (Array::scalar(low, self.dtype())?, Array::scalar(high, self.dtype())?);
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe { ffi::mlx_clip(out, self.raw, low.raw, high.raw, stream) })
    }
}
