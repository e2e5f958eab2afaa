//! The growing cache in packed form (`QuantizedKVCache`), affine, groups along the head dimension.

use super::{STEP, grow};
use crate::checkpoint::{QuantMode, QuantParams};
use crate::mlx::{Array, Error, Result, quantize};

/// A packed `[B, kv_heads, T, head_dim]`.
#[derive(Clone, Debug)]
pub struct Packed {
    /// `uint32`, `[B, kv_heads, T, head_dim * bits / 32]`.
    pub weight: Array,
    /// `[B, kv_heads, T, head_dim / group_size]`, in the type of the keys.
    pub scales: Array,
    /// As the scales.
    pub biases: Array,
}

impl Packed {
    fn quantize(dense: &Array, scheme: QuantParams) -> Result<Self> {
        let (weight, scales, biases) = quantize(dense, scheme)?;
        let biases = biases.ok_or_else(|| Error::new("affine quantization returned no biases"))?;
        Ok(Self { weight, scales, biases })
    }

    /// Applies `change` to the three arrays.
    pub fn map(&self, change: impl Fn(&Array) -> Result<Array>) -> Result<Self> {
        Ok(Self {
            weight: change(&self.weight)?,
            scales: change(&self.scales)?,
            biases: change(&self.biases)?,
        })
    }

    fn arrays(&self) -> [&Array; 3] {
        [&self.weight, &self.scales, &self.biases]
    }

    fn grow(prefix: Option<&Self>, rows: &Self, positions: i32) -> Result<Self> {
        Ok(Self {
            weight: grow(prefix.map(|p| &p.weight), &rows.weight, positions)?,
            scales: grow(prefix.map(|p| &p.scales), &rows.scales, positions)?,
            biases: grow(prefix.map(|p| &p.biases), &rows.biases, positions)?,
        })
    }

    fn write(&self, rows: &Self, at: i32) -> Result<Self> {
        Ok(Self {
            weight: self.weight.slice_update(&rows.weight, 2, at)?,
            scales: self.scales.slice_update(&rows.scales, 2, at)?,
            biases: self.biases.slice_update(&rows.biases, 2, at)?,
        })
    }

    /// With scales and biases in the type of `rows`: a fused step kept keys in half precision, and the two 16-bit types
    /// together would become single precision.
    fn typed_like(self, rows: &Self) -> Result<Self> {
        let dtype = rows.scales.dtype();
        if self.scales.dtype() == dtype {
            return Ok(self);
        }
        Ok(Self { scales: self.scales.astype(dtype)?, biases: self.biases.astype(dtype)?, ..self })
    }

    fn first(&self, positions: i32) -> Result<Self> {
        self.map(|array| array.slice(2, 0, positions))
    }
}

/// Packed keys and values in buffers that grow by 256 positions; each step packs only its own rows.
#[derive(Clone, Debug)]
pub struct QuantizedKvCache {
    buffers: Option<(Packed, Packed)>,
    offset: i32,
    scheme: QuantParams,
}

impl QuantizedKvCache {
    pub(super) fn from_dense(
        dense: Option<(&Array, &Array)>,
        offset: i32,
        bits: u8,
        group_size: u32,
    ) -> Result<Self> {
        let scheme = QuantParams { bits, group_size, mode: QuantMode::Affine };
        let buffers = match dense {
            Some((keys, values)) => {
                Some((Packed::quantize(keys, scheme)?, Packed::quantize(values, scheme)?))
            }
            None => None,
        };
        Ok(Self { buffers, offset, scheme })
    }

    /// A cache over existing buffers of which `offset` positions are filled.
    pub fn from_state(keys: Packed, values: Packed, offset: i32, bits: u8, group_size: u32) -> Self {
        let scheme = QuantParams { bits, group_size, mode: QuantMode::Affine };
        Self { buffers: Some((keys, values)), offset, scheme }
    }

    /// Positions stored.
    pub fn offset(&self) -> i32 {
        self.offset
    }

    /// How keys and values are packed.
    pub fn scheme(&self) -> QuantParams {
        self.scheme
    }

    /// The buffers, the slack after `offset` included.
    pub fn buffers(&self) -> Option<(&Packed, &Packed)> {
        self.buffers.as_ref().map(|(keys, values)| (keys, values))
    }

    pub(super) fn arrays(&self) -> Vec<&Array> {
        self.buffers
            .iter()
            .flat_map(|(keys, values)| keys.arrays().into_iter().chain(values.arrays()))
            .collect()
    }

    pub(super) fn update_and_fetch(&mut self, keys: &Array, values: &Array) -> Result<(Packed, Packed)> {
        let (prev, added) = (self.offset, keys.dim(2));
        let next =
            prev.checked_add(added).ok_or_else(|| Error::new("the sequence exceeds 2^31 positions"))?;
        let rows = (Packed::quantize(keys, self.scheme)?, Packed::quantize(values, self.scheme)?);
        let buffers = match self.buffers.take() {
            Some((k, v)) => Some((k.typed_like(&rows.0)?, v.typed_like(&rows.1)?)),
            None => None,
        };
        let (k, v) = match buffers {
            Some((k, v)) if next <= k.weight.dim(2) => (k, v),
            old => {
                let positions = (STEP + added - 1) / STEP * STEP;
                let old = match old {
                    Some((k, v)) if prev % STEP != 0 => Some((k.first(prev)?, v.first(prev)?)),
                    other => other,
                };
                let (old_k, old_v) = (old.as_ref().map(|(k, _)| k), old.as_ref().map(|(_, v)| v));
                (Packed::grow(old_k, &rows.0, positions)?, Packed::grow(old_v, &rows.1, positions)?)
            }
        };
        let (k, v) = (k.write(&rows.0, prev)?, v.write(&rows.1, prev)?);
        self.offset = next;
        let fetched =
            if next == k.weight.dim(2) { (k.clone(), v.clone()) } else { (k.first(next)?, v.first(next)?) };
        self.buffers = Some((k, v));
        Ok(fetched)
    }

    pub(super) fn trim(&mut self, n: i32) -> i32 {
        let n = n.min(self.offset);
        self.offset -= n;
        n
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mlx::Dtype;

    #[test]
    fn rows_of_another_16_bit_type_make_no_single_precision() {
        let rows = |dtype, count: i32| {
            let numbers: Vec<f32> = (0..count * 64).map(|index| (index as f32).sin()).collect();
            Array::from_slice(&numbers, &[1, 1, count, 64]).unwrap().astype(dtype).unwrap()
        };
        let half = rows(Dtype::Float16, 3);
        let mut cache = QuantizedKvCache::from_dense(Some((&half, &half)), 3, 8, 64).unwrap();
        for added in [1, 300] {
            let new = rows(Dtype::Bfloat16, added);
            let (keys, values) = cache.update_and_fetch(&new, &new).unwrap();
            for packed in [keys, values] {
                assert_eq!(packed.scales.dtype(), Dtype::Bfloat16);
                assert_eq!(packed.biases.dtype(), Dtype::Bfloat16);
            }
        }
        assert_eq!(cache.offset(), 304);
    }
}
