//! Model families: one file each, named after its mlx-lm file.
//!
//! To add a family: write its file (arguments, loading; shared blocks come from [`layers`]), add its line to
//! [`FAMILIES`], add its goldens.

pub mod activations;
pub mod fused;
mod gemma3_text;
pub mod layers;
mod llama;
pub mod loader;
pub mod pieces;
mod qwen2;
mod qwen3;
pub mod rope;

use crate::cache::{LayerCache, LayerKind};
use crate::checkpoint::{Config, Taken, TensorSource};
use crate::lora::{Adapter, AdapterSet, Adapters};
use crate::mlx::{Array, Dtype, Result};
use loader::{LoadError, Loader};

/// A language model: token ids to logits.
pub trait Model {
    /// Ids `[B, L]` (`uint32` or `int32`) to logits `[B, L, vocab]`; appends to the caches when given, one a layer.
    fn forward(&self, inputs: &Array, cache: Option<&mut [LayerCache]>) -> Result<Array>;

    /// One token of each of several sequences: ids `[rows]` to logits `[1, vocab]` of each row; row `i` appends to
    /// `caches[i]`, one cache a layer. Sequences may differ in length and in the kinds of their caches.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    fn forward_rows(&self, tokens: &Array, caches: &mut [&mut [LayerCache]]) -> Result<Vec<Array>> {
        let rows = (0i32..).zip(caches).map(|(row, caches)| {
            let ids = tokens.slice(0, row, row + 1)?.expand_dims(0)?;
            self.forward(&ids, Some(caches))?.squeeze(1)
        });
        rows.collect()
    }

    /// Ids `[B, L]` to hidden states `[B, L, hidden]` after the final norm; otherwise as [`forward`](Self::forward).
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    fn hidden(&self, inputs: &Array, cache: Option<&mut [LayerCache]>) -> Result<Array>;

    /// Does now what the first step would have to do before it: weights are computed, so that those who wait for a first
    /// token, or time it, do not wait for them.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    fn prepare(&self) -> Result<()> {
        Ok(())
    }

    /// What it consists of, if its layers can be told apart: for those who run or change parts of it.
    fn pieces(&self) -> Option<pieces::Pieces> {
        None
    }

    /// What each layer attends to, in order.
    fn layer_kinds(&self) -> &[LayerKind];

    /// The most tokens of a prompt that [`forward`](Self::forward) computes before anybody can stop it, where all layers
    /// of a sequence with these caches are computed as one: feeding more in parts of this size changes no bit. `None`
    /// where layers are computed one by one.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    fn rows_at_once(&self, _caches: &[LayerCache]) -> Result<Option<usize>> {
        Ok(None)
    }

    /// Its linear modules, and what adapters put on them.
    fn adapters(&self) -> &Adapters;

    /// Whether mlx-lm's file defines `make_cache`; such a model ignores `max_kv_size` there.
    fn makes_own_cache(&self) -> bool;

    /// Positions the model was trained for, where the config says.
    fn max_positions(&self) -> Option<i32>;

    /// Rows of the embedding: ids must lie below.
    fn vocab_size(&self) -> i32;

    /// Features a head, which a quantized cache packs in groups.
    fn head_dim(&self) -> i32;
}

/// A config value that the family cannot use.
#[derive(Clone, Debug, thiserror::Error)]
#[error("config.json: `{field}` {problem}")]
pub struct ConfigError {
    field: String,
    problem: String,
}

impl ConfigError {
    /// `problem` completes the sentence that begins with the field's name.
    pub fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { field: field.into(), problem: problem.into() }
    }
}

impl From<crate::mlx::Error> for ConfigError {
    fn from(error: crate::mlx::Error) -> Self {
        Self::new("rope_scaling", format!("does not work out: {error}"))
    }
}

/// A layer that slides over `sliding_window` positions.
fn sliding(window: i32) -> std::result::Result<LayerKind, ConfigError> {
    match window {
        1.. => Ok(LayerKind::Sliding { window }),
        _ => Err(ConfigError::new("sliding_window", format!("is {window}, and must be at least 1"))),
    }
}

type Load = fn(&mut Loader) -> std::result::Result<Box<dyn Model>, LoadError>;

/// `model_type` to family; the name is the file's, mlx-lm's and the config's.
const FAMILIES: &[(&str, Load)] = &[
    ("gemma3_text", |loader| gemma3_text::load(&loader.args()?, loader)),
    ("llama", |loader| llama::load(&loader.args()?, loader)),
    ("qwen2", |loader| qwen2::load(&loader.args()?, loader)),
    ("qwen3", |loader| qwen3::load(&loader.args()?, loader)),
];

/// The families there are, sorted.
pub fn families() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().map(|(name, _)| *name)
}

/// Builds the model of a checkpoint. Weights stay mapped; nothing is read before it is used.
///
/// # Errors
/// An unknown family, a config value it cannot use, or tensors that are missing, misshapen or left over.
pub fn load(
    config: &Config,
    tensors: TensorSource,
    compute_dtype: Option<Dtype>,
) -> std::result::Result<Box<dyn Model>, LoadError> {
    Ok(load_with(config, Loader::new(config, tensors, compute_dtype))?.0)
}

/// [`load`] with an adapter that is active from the start, or with whole weights in place of the checkpoint's.
///
/// # Errors
/// As [`load`], and when the adapter does not fit.
pub fn load_adapted(
    config: &Config,
    mut tensors: TensorSource,
    compute_dtype: Option<Dtype>,
    adapter: Option<Adapter>,
) -> std::result::Result<Box<dyn Model>, LoadError> {
    if let Some(whole) = adapter.as_ref().and_then(Adapter::whole) {
        whole.replace(&mut tensors)?;
        return load(config, tensors, compute_dtype);
    }
    let model = load(config, tensors, compute_dtype)?;
    if let Some(adapter) = adapter {
        let adapters = model.adapters();
        adapters.activate(&AdapterSet::new(vec![adapters.fit(adapter)?])?);
    }
    Ok(model)
}

/// The tensors that a family takes of a checkpoint, those that a converted model consists of. Builds no network and
/// touches no weights.
///
/// # Errors
/// As [`load`].
pub fn inventory(config: &Config, tensors: TensorSource) -> std::result::Result<Vec<Taken>, LoadError> {
    Ok(load_with(config, Loader::new(config, tensors, None).without_weights())?.1)
}

fn load_with(
    config: &Config,
    mut loader: Loader,
) -> std::result::Result<(Box<dyn Model>, Vec<Taken>), LoadError> {
    let family = config.family()?;
    let Some((_, load)) = FAMILIES.iter().find(|(name, _)| *name == family) else {
        let supported = families().collect::<Vec<_>>().join(", ");
        return Err(LoadError::UnknownFamily { family: family.to_owned(), supported });
    };
    let model = load(&mut loader)?;
    let taken = loader.taken();
    loader.finish(family)?;
    Ok((model, taken))
}

#[cfg(test)]
mod tests {
    use super::rope::{Rope, RopeArgs};
    use super::*;

    #[test]
    fn a_window_holds_at_least_the_position_itself() {
        assert_eq!(sliding(1).unwrap(), LayerKind::Sliding { window: 1 });
        for window in [0, -1, i32::MIN] {
            let error = sliding(window).unwrap_err().to_string();
            assert!(error.starts_with("config.json: `sliding_window` is "), "{error}");
        }
    }

    #[test]
    fn odd_heads_are_refused_by_name_whatever_the_rotation() {
        for dims in [1, 3, 127] {
            for kind in ["default", "llama3", "yarn", "no such"] {
                let scaling = serde_json::json!({"rope_type": kind});
                let scaling = scaling.as_object();
                let args = RopeArgs { dims, base: 1e4, traditional: false, scaling, max_positions: None };
                let error = Rope::new(&args).err().unwrap().to_string();
                assert!(
                    error.starts_with("config.json: `head_dim` is ") && error.contains("even"),
                    "{error}"
                );
            }
        }
    }

    /// Angles are made before a tensor could contradict the config.
    #[test]
    fn heads_of_absurd_width_are_refused_at_once() {
        let rope = |dims| {
            Rope::new(&RopeArgs { dims, base: 1e4, traditional: false, scaling: None, max_positions: None })
        };
        assert!(rope(128).is_ok());
        for dims in [0, -2, 100_000_000, i32::MAX] {
            let error = rope(dims).err().unwrap().to_string();
            assert!(error.starts_with("config.json: `head_dim` is "), "{error}");
        }
    }
}
