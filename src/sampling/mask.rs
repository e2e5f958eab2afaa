//! Tokens that may be chosen at all, as a grammar says (`structured::grammar`).

use crate::mlx::{Array, Error, Result};

/// Logits `[1, V]` with minus infinity for every id whose bit is not set. `allowed` holds a bit an id, the lowest
/// first, in `ceil(V / 32)` words. It comes after the processors and before the log-probabilities, so that these are
/// of what can be chosen.
///
/// # Errors
/// There are not as many bits.
pub fn keep_allowed(logits: &Array, allowed: &[u32]) -> Result<Array> {
    let vocab_size = usize::try_from(logits.dim(-1)).unwrap_or(0);
    if allowed.len() != vocab_size.div_ceil(32) {
        let words = allowed.len();
        return Err(Error::new(format!("a mask of {words} words does not fit a vocabulary of {vocab_size}")));
    }
    let bits: Vec<bool> = allowed
        .iter()
        .flat_map(|word| (0..32).map(move |bit| word >> bit & 1 == 1))
        .take(vocab_size)
        .collect();
    let allowed = Array::from_slice(&bits, &[1, logits.dim(-1)])?;
    allowed.select(logits, &Array::scalar(f32::NEG_INFINITY, logits.dtype())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_without_a_bit_cannot_be_chosen() {
        let logits: Vec<f32> = (0..35).map(|value| value as f32).collect();
        let logits = Array::from_slice(&logits, &[1, 35]).unwrap();
        let masked = keep_allowed(&logits, &[1 << 31 | 1, 0b010]).unwrap().to_f32_vec().unwrap();
        let kept: Vec<usize> = (0..35).filter(|&id| masked[id] == id as f32).collect();
        assert_eq!(kept, [0, 31, 33]);
        assert!(
            masked.iter().enumerate().all(|(id, &value)| kept.contains(&id) || value == f32::NEG_INFINITY)
        );
        assert!(keep_allowed(&logits, &[0]).is_err());
    }
}
