//! Gradients of functions of arrays (`mx.value_and_grad`, `mx.vjp`).

use mlx_sys as ffi;

use super::array::{Array, take_vector, with_vector};
use super::compile::{checked, closure};
use super::error::{Error, Result};

/// A function and its gradients with respect to some of its arguments.
pub struct ValueAndGrad {
    closure: ffi::mlx_closure_value_and_grad,
}

/// The gradients of `function`'s first result, a scalar, with respect to the arguments numbered `argnums`.
///
/// # Errors
/// When `argnums` is empty or MLX refuses it.
pub fn value_and_grad(
    function: impl Fn(&[Array]) -> Result<Vec<Array>> + 'static,
    argnums: &[i32],
) -> Result<ValueAndGrad> {
    if argnums.is_empty() {
        return Err(Error::new("value_and_grad needs the number of at least one argument"));
    }
    let plain = closure(Box::new(function));
    // SAFETY: the handles are valid and freed once; the numbers live through the call.
    unsafe {
        let mut closure = ffi::mlx_closure_value_and_grad_new();
        let status = ffi::mlx_value_and_grad(&mut closure, plain, argnums.as_ptr(), argnums.len());
        ffi::mlx_closure_free(plain);
        let function = ValueAndGrad { closure };
        checked(status).map(|()| function)
    }
}

impl ValueAndGrad {
    /// The function's results and the gradients, in the order of the argument numbers. All lazy.
    ///
    /// # Errors
    /// When the function fails, its first result is no scalar, or an operation has no gradient.
    pub fn call<'a>(
        &self,
        arguments: impl IntoIterator<Item = &'a Array>,
    ) -> Result<(Vec<Array>, Vec<Array>)> {
        with_vector(arguments, |vector| {
            // SAFETY: handles are valid for the call; `take_vector` frees the results.
            let (status, values, gradients) = unsafe {
                let mut values = ffi::mlx_vector_array_new();
                let mut gradients = ffi::mlx_vector_array_new();
                let status =
                    ffi::mlx_closure_value_and_grad_apply(&mut values, &mut gradients, self.closure, vector);
                (status, take_vector(values), take_vector(gradients))
            };
            checked(status)?;
            Ok((values?, gradients?))
        })
    }
}

impl Drop for ValueAndGrad {
    fn drop(&mut self) {
        // SAFETY: owned and freed once.
        unsafe { ffi::mlx_closure_value_and_grad_free(self.closure) };
    }
}

/// The results of `function` at `primals`, and its gradients there: `cotangents`, one a result, times the Jacobian.
///
/// # Errors
/// When the function fails, the cotangents do not match its results, or an operation has no gradient.
pub fn vjp(
    function: impl Fn(&[Array]) -> Result<Vec<Array>> + 'static,
    primals: &[Array],
    cotangents: &[Array],
) -> Result<(Vec<Array>, Vec<Array>)> {
    let plain = closure(Box::new(function));
    let (status, values, gradients) = with_vector(primals, |primals| {
        with_vector(cotangents, |cotangents| {
            // SAFETY: handles are valid for the call; `take_vector` frees the results.
            unsafe {
                let mut values = ffi::mlx_vector_array_new();
                let mut gradients = ffi::mlx_vector_array_new();
                let status = ffi::mlx_vjp(&mut values, &mut gradients, plain, primals, cotangents);
                (status, take_vector(values), take_vector(gradients))
            }
        })
    });
    // SAFETY: owned and freed once.
    unsafe { ffi::mlx_closure_free(plain) };
    checked(status)?;
    Ok((values?, gradients?))
}

impl Array {
    /// The same values, which gradients do not pass.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn stop_gradient(&self) -> Result<Array> {
        // SAFETY: handles are valid for the call.
        Array::from_op(|out, stream| unsafe { ffi::mlx_stop_gradient(out, self.raw, stream) })
    }

    /// The same values, which are not computed before `dependencies` are.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn after<'a>(&self, dependencies: impl IntoIterator<Item = &'a Array>) -> Result<Array> {
        let (status, results) = with_vector([self], |inputs| {
            with_vector(dependencies, |dependencies| {
                // SAFETY: handles are valid for the call; `take_vector` frees the results.
                unsafe {
                    let mut results = ffi::mlx_vector_array_new();
                    let status = ffi::mlx_depends(&mut results, inputs, dependencies);
                    (status, take_vector(results))
                }
            })
        });
        checked(status)?;
        results?.pop().ok_or_else(|| Error::new("mx.depends returned nothing"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gradient_of_a_sum_of_squares_is_twice_the_argument() {
        let function = |x: &[Array]| Ok(vec![x[0].square()?.multiply(&x[1])?.sum(0, false)?]);
        let gradient = value_and_grad(function, &[0]).unwrap();
        let x = Array::from_slice(&[1.0f32, -2.0, 3.0], &[3]).unwrap();
        let weight = Array::from_slice(&[1.0f32, 10.0, 100.0], &[3]).unwrap();
        let (values, gradients) = gradient.call([&x, &weight]).unwrap();
        assert_eq!(values[0].to_vec::<f32>().unwrap(), [941.0]);
        assert_eq!(gradients.len(), 1);
        assert_eq!(gradients[0].to_vec::<f32>().unwrap(), [2.0, -40.0, 600.0]);
    }

    #[test]
    fn a_vector_jacobian_product_takes_a_cotangent_a_result() {
        let function = |x: &[Array]| Ok(vec![x[0].square()?, x[0].multiply_scalar(3.0)?]);
        let x = Array::from_slice(&[2.0f32, 5.0], &[2]).unwrap();
        let ones = Array::from_slice(&[1.0f32, 1.0], &[2]).unwrap();
        let (_, gradients) = vjp(function, std::slice::from_ref(&x), &[ones.clone(), ones.clone()]).unwrap();
        assert_eq!(gradients[0].to_vec::<f32>().unwrap(), [7.0, 13.0]);
        assert!(vjp(function, &[x], &[ones]).is_err());
    }

    #[test]
    fn what_fails_inside_is_the_error_and_a_vector_has_no_gradient() {
        let x = Array::from_slice(&[2.0f32, 5.0], &[2]).unwrap();
        let fails = value_and_grad(|_| Err(Error::new("no such layer")), &[0]).unwrap();
        assert_eq!(fails.call([&x]).unwrap_err().to_string(), "no such layer");
        let vector = value_and_grad(|x| Ok(vec![x[0].square()?]), &[0]).unwrap();
        assert!(vector.call([&x]).is_err());
        assert!(value_and_grad(|x| Ok(x.to_vec()), &[]).is_err());
    }
}
