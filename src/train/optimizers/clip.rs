//! Limiting the length of a gradient (`mlx.optimizers.clip_grad_norm`).

use crate::mlx::{Array, Dtype, Result};

/// The gradients scaled down so that their common norm is at most `limit`, and the norm before, a float32 scalar.
/// Without a limit they stay as they are.
///
/// # Errors
/// When MLX fails.
pub fn clip_by_norm(gradients: Vec<Array>, limit: Option<f32>) -> Result<(Vec<Array>, Array)> {
    let mut squares = Array::scalar(0.0, Dtype::Float32)?;
    for gradient in &gradients {
        squares = squares.add(&gradient.square()?.sum_all()?)?;
    }
    let norm = squares.sqrt()?;
    let Some(limit) = limit else { return Ok((gradients, norm)) };
    let factor = Array::scalar(limit, Dtype::Float32)?.divide(&norm.add_scalar(1e-6)?)?;
    let factor = factor.minimum(&Array::scalar(1.0, Dtype::Float32)?)?;
    let scaled = |gradient: &Array| gradient.multiply(&factor.astype(gradient.dtype())?);
    Ok((gradients.iter().map(scaled).collect::<Result<_>>()?, norm))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_long_gradients_are_shortened() {
        let gradient = Array::from_slice(&[3.0f32, 4.0], &[2]).unwrap();
        let clipped = |limit| {
            let (gradients, norm) = clip_by_norm(vec![gradient.clone()], limit).unwrap();
            (gradients[0].to_f32_vec().unwrap(), norm.to_f32_vec().unwrap()[0])
        };
        assert_eq!(clipped(None), (vec![3.0, 4.0], 5.0));
        assert_eq!(clipped(Some(6.0)), (vec![3.0, 4.0], 5.0));
        let (short, norm) = clipped(Some(1.0));
        assert!((short[0] - 0.6).abs() < 1e-6 && norm == 5.0, "{short:?}");
    }
}
