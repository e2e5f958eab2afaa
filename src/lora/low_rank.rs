//! What an adapter adds to one linear module (mlx-lm `tuner/lora.py`, `tuner/dora.py`).

use crate::mlx::{Array, Dtype, Result};

/// `scale * a @ b` beside a weight, and for DoRA the length that each row of the sum gets.
#[derive(Clone, Debug)]
pub struct LowRank {
    /// `[in, rank]`.
    pub a: Array,
    /// `[rank, out]`.
    pub b: Array,
    /// What the product is multiplied by.
    pub scale: f32,
    /// DoRA's magnitudes, `[out]`.
    pub magnitude: Option<Array>,
}

impl LowRank {
    /// What is added to a module's output for input `x`: `[…, in]` to `[…, out]`, in the type of `x`.
    pub fn product(&self, x: &Array) -> Result<Array> {
        let z = x.matmul(&self.a)?.matmul(&self.b)?;
        Array::scalar(self.scale, z.dtype())?.multiply(&z)?.astype(x.dtype())
    }

    /// The change of a weight `[out, in]`, in the adapter's own type.
    pub fn delta(&self) -> Result<Array> {
        let b = self.b.t()?;
        Array::scalar(self.scale, b.dtype())?.multiply(&b)?.matmul(&self.a.t()?)
    }

    /// The factor of each row, `[out]` float32, that DoRA puts on the adapted `weight`; `None` without magnitudes.
    pub fn row_factors(&self, weight: &Array) -> Result<Option<Array>> {
        let Some(magnitude) = &self.magnitude else { return Ok(None) };
        let adapted = weight.astype(Dtype::Float32)?.add(&self.delta()?.astype(Dtype::Float32)?)?;
        let length = adapted.square()?.sum(1, false)?.sqrt()?;
        Ok(Some(magnitude.astype(Dtype::Float32)?.divide(&length)?))
    }

    /// The adapted weight, in the type of `weight`.
    pub fn fuse(&self, weight: &Array) -> Result<Array> {
        let adapted = weight.add(&self.delta()?.astype(weight.dtype())?)?;
        match self.row_factors(weight)? {
            None => Ok(adapted),
            Some(factors) => adapted.multiply(&factors.expand_dims(1)?)?.astype(weight.dtype()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn array(values: &[f32], shape: &[i32]) -> Array {
        Array::from_slice(values, shape).unwrap()
    }

    #[test]
    fn the_fused_weight_does_what_the_adapter_does() {
        let weight = array(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3]);
        let low_rank = LowRank {
            a: array(&[0.5, -1.0, 2.0], &[3, 1]),
            b: array(&[1.0, -0.25], &[1, 2]),
            scale: 2.0,
            magnitude: None,
        };
        let x = array(&[1.0, -1.0, 0.5], &[1, 3]);
        let direct = x.matmul(&weight.t().unwrap()).unwrap().add(&low_rank.product(&x).unwrap()).unwrap();
        let fused = x.matmul(&low_rank.fuse(&weight).unwrap().t().unwrap()).unwrap();
        assert_eq!(direct.to_vec::<f32>().unwrap(), fused.to_vec::<f32>().unwrap());

        let dora = LowRank { magnitude: Some(array(&[10.0, 1.0], &[2])), ..low_rank };
        let rows =
            dora.fuse(&weight).unwrap().square().unwrap().sum(1, false).unwrap().to_vec::<f32>().unwrap();
        assert!((rows[0] - 100.0).abs() < 1e-3 && (rows[1] - 1.0).abs() < 1e-5, "{rows:?}");
    }
}
