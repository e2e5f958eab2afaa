//! What an adapter adds to one linear module (mlx-lm `tuner/lora.py`, `tuner/dora.py`).

use crate::mlx::{Array, Dtype, Result, random};

/// `scale * a @ b` beside a weight, and for DoRA the length that each row of the sum gets.
#[derive(Clone, Debug)]
pub struct LowRank {
    /// `[in, rank]`; for an embedding `[rows, rank]`.
    pub a: Array,
    /// `[rank, out]`; for an embedding `[rank, features]`.
    pub b: Array,
    /// What the product is multiplied by.
    pub scale: f32,
    /// DoRA's magnitudes, one a row of the weight.
    pub magnitude: Option<Array>,
    /// Whether the weight is an embedding, whose rows are what goes in.
    pub embedding: bool,
    /// While training, what is left out of the input.
    pub dropout: Option<Dropout>,
}

/// Zeroes some of the input of an adapter, as the key says (`nn.Dropout`).
#[derive(Clone, Debug)]
pub struct Dropout {
    /// Of each number to be zeroed, in `[0, 1)`.
    pub probability: f64,
    /// Decides which.
    pub key: Array,
}

impl Dropout {
    fn apply(&self, x: &Array) -> Result<Array> {
        let kept = 1.0 - self.probability;
        let mask = random::bernoulli(kept as f32, x.shape(), &self.key)?;
        mask.multiply(x)?.multiply_scalar((1.0 / kept) as f32)
    }
}

impl LowRank {
    /// What is added to a module's output for input `x`: `[…, in]` to `[…, out]`, in the type of `x`. For an embedding,
    /// that of the head that is tied to it.
    pub fn product(&self, x: &Array) -> Result<Array> {
        let dropped = self.dropout.as_ref().map(|dropout| dropout.apply(x)).transpose()?;
        let (dtype, x) = (x.dtype(), dropped.as_ref().unwrap_or(x));
        let z = if self.embedding {
            x.matmul(&self.b.t()?)?.matmul(&self.a.t()?)?
        } else {
            x.matmul(&self.a)?.matmul(&self.b)?
        };
        Array::scalar(self.scale, z.dtype())?.multiply(&z)?.astype(dtype)
    }

    /// What is added to the rows `ids` of an embedding, in the adapter's own type.
    pub fn rows(&self, ids: &Array) -> Result<Array> {
        let rows = self.a.take(ids, 0)?;
        if self.magnitude.is_some() {
            // mlx-lm's DoRA multiplies before the product, its LoRA after.
            return Array::scalar(self.scale, rows.dtype())?.multiply(&rows)?.matmul(&self.b);
        }
        let z = rows.matmul(&self.b)?;
        Array::scalar(self.scale, z.dtype())?.multiply(&z)
    }

    /// The change of a weight `[out, in]`, in the adapter's own type.
    pub fn delta(&self) -> Result<Array> {
        let scaled = |factor: &Array| Array::scalar(self.scale, factor.dtype())?.multiply(factor);
        if self.embedding {
            scaled(&self.a)?.matmul(&self.b)
        } else {
            scaled(&self.b.t()?)?.matmul(&self.a.t()?)
        }
    }

    /// The factor of each row, `[out]` float32, that DoRA puts on the adapted `weight`; `None` without magnitudes.
    pub fn row_factors(&self, weight: &Array) -> Result<Option<Array>> {
        let Some(magnitude) = &self.magnitude else { return Ok(None) };
        let adapted = weight.astype(Dtype::Float32)?.add(&self.delta()?.astype(Dtype::Float32)?)?;
        // Gradients go through the magnitude only (mlx-lm's `mx.stop_gradient`).
        let length = adapted.square()?.sum(1, false)?.sqrt()?.stop_gradient()?;
        Ok(Some(magnitude.astype(Dtype::Float32)?.divide(&length)?))
    }

    /// The factors of the rows `ids` of an embedding, `[…, 1]`, given those rows with the adapter on them.
    pub fn rows_factors(&self, ids: &Array, adapted: &Array) -> Result<Option<Array>> {
        let Some(magnitude) = &self.magnitude else { return Ok(None) };
        let length = adapted.square()?.sum(-1, false)?.sqrt()?.stop_gradient()?;
        magnitude.take(ids, 0)?.divide(&length)?.expand_dims(-1).map(Some)
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
            embedding: false,
            dropout: None,
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
