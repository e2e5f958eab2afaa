//! Whole weights (`fine_tune_type: full`): what mlx-lm's `load_adapters` puts in place of the model's own
//! (`tuner/utils.py`, `model.load_weights(…, strict=False)`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::adapter::listed;
use super::error::AdapterError;
use crate::checkpoint::safetensors::SafetensorsFile;
use crate::checkpoint::{Tensor, TensorSource};
use crate::mlx::Dtype;

/// Weights of a model that was trained itself, mapped.
#[derive(Clone, Debug)]
pub struct WholeWeights {
    file: PathBuf,
    tensors: BTreeMap<String, Tensor>,
}

impl WholeWeights {
    pub(super) fn open(file: &Path) -> Result<Self, AdapterError> {
        let stored = SafetensorsFile::open(file)?;
        let tensors: BTreeMap<_, _> =
            stored.tensors().map(|(name, tensor)| (name.to_owned(), tensor)).collect();
        if tensors.is_empty() {
            return Err(AdapterError::Empty { path: file.to_owned() });
        }
        Ok(Self { file: file.to_owned(), tensors })
    }

    /// How many tensors there are.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Puts them in place of the model's tensors of the same names; the types are theirs.
    ///
    /// # Errors
    /// Names that the model does not have, other shapes, or a weight that is packed there.
    pub fn replace(&self, model: &mut TensorSource) -> Result<(), AdapterError> {
        let unknown: Vec<String> =
            self.tensors.keys().filter(|name| !model.contains(name)).cloned().collect();
        if !unknown.is_empty() {
            return Err(AdapterError::UnknownTensors { path: self.file.clone(), names: listed(&unknown) });
        }
        for (name, tensor) in &self.tensors {
            let packed =
                name.strip_suffix(".weight").is_some_and(|path| model.contains(&format!("{path}.scales")));
            if packed {
                return Err(AdapterError::Packed { path: self.file.clone(), tensor: name.clone() });
            }
            let Some(old) = model.get(name) else { continue };
            if old.shape != tensor.shape {
                return Err(AdapterError::TensorShape {
                    path: self.file.clone(),
                    tensor: name.clone(),
                    found: tensor.shape.clone(),
                    expected: old.shape.clone(),
                });
            }
            let (wanted, given) = (Dtype::from(old.dtype), Dtype::from(tensor.dtype));
            if wanted.is_floating() && !given.is_floating() {
                return Err(AdapterError::Type { module: name.clone(), dtype: given.name() });
            }
        }
        self.tensors.iter().for_each(|(name, tensor)| model.insert(name.clone(), tensor.clone()));
        Ok(())
    }
}
