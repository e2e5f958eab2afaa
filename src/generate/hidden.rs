//! Hidden states for embeddings.

use crate::mlx::{self, Array, Dtype};
use crate::models::Model;

/// The hidden state at the last of `tokens`, after the final norm, in float32, not normalised.
///
/// # Errors
/// MLX's.
pub fn last_hidden(model: &dyn Model, tokens: &[u32]) -> Result<Vec<f32>, mlx::Error> {
    let length = tokens.len() as i32;
    let ids = Array::from_slice(tokens, &[1, length])?;
    let hidden = model.hidden(&ids, None)?;
    let last = hidden.slice(1, length - 1, length)?.astype(Dtype::Float32)?.to_f32_vec()?;
    mlx::memory::clear_cache()?;
    Ok(last)
}
