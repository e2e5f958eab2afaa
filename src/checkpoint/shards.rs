//! The weights of a snapshot directory: one safetensors file or several with an index.
//!
//! mlx-lm loads whatever `model*.safetensors` matches (`utils.py`, `load_model`). So does this, and where
//! there is a `model.safetensors.index.json` its promises are checked as well.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;

use super::error::{CheckpointError, shown_message, shown_name};
use super::json;
use super::safetensors::{SafetensorsFile, StringPairs};
use super::tensor::Tensor;

/// File that maps tensors to shards.
pub(super) const INDEX_NAME: &str = "model.safetensors.index.json";
const SINGLE_NAME: &str = "model.safetensors";

/// The weights of a model, mapped.
#[derive(Clone, Debug)]
pub struct Weights {
    /// Every tensor by name.
    pub tensors: BTreeMap<String, Tensor>,
    /// What messages call the files: the name of the only one, or their number.
    pub label: String,
}

/// Maps the weights of a snapshot directory.
///
/// An index whose shards are not all there is ignored when a `model.safetensors` that it does not name holds
/// the model: conversions leave such stale indices behind.
///
/// # Errors
/// When a file is missing, broken or outside the directory, a tensor is not in the shard that the index
/// names, or is in two shards.
pub fn open_weights(directory: &Path) -> Result<Weights, CheckpointError> {
    let mut names = matching_files(directory)?;
    let index = ShardIndex::read(directory)?;
    if let Some(index) = &index {
        let single_is_extra = names.contains(SINGLE_NAME) && !index.shards.contains_key(SINGLE_NAME);
        match index.first_missing(directory) {
            Some(_) if single_is_extra => {
                names.retain(|name| !index.shards.contains_key(name));
                return open_files(directory, &names).map(|(weights, _)| weights);
            }
            Some(missing) => return Err(missing),
            None if single_is_extra => {
                names.remove(SINGLE_NAME);
            }
            None => {}
        }
        names.extend(index.shards.keys().cloned());
    }
    if names.is_empty() {
        return Err(CheckpointError::NoWeights { directory: directory.to_owned() });
    }
    let (weights, owners) = open_files(directory, &names)?;
    if let Some(index) = &index {
        index.check(directory, &owners)?;
    }
    Ok(weights)
}

type Owners = BTreeMap<String, String>;

fn open_files(directory: &Path, names: &BTreeSet<String>) -> Result<(Weights, Owners), CheckpointError> {
    let mut tensors = BTreeMap::new();
    let mut owners = Owners::new();
    for name in names {
        let file = SafetensorsFile::open(&directory.join(name))?;
        for (tensor, view) in file.tensors() {
            if let Some(first) = owners.insert(tensor.to_owned(), name.clone()) {
                return Err(CheckpointError::InTwoShards {
                    tensor: tensor.to_owned(),
                    first: directory.join(first),
                    second: directory.join(name),
                });
            }
            tensors.insert(tensor.to_owned(), view);
        }
    }
    let label = match names.first() {
        Some(name) if names.len() == 1 => name.clone(),
        _ => format!("the {} shards", names.len()),
    };
    Ok((Weights { tensors, label }, owners))
}

/// Names that `model*.safetensors` matches.
fn matching_files(directory: &Path) -> Result<BTreeSet<String>, CheckpointError> {
    let unreadable = |cause| CheckpointError::Read { file: directory.to_owned(), cause };
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(directory).map_err(unreadable)? {
        let name = entry.map_err(unreadable)?.file_name();
        if let Some(name) = name.to_str().filter(|name| is_weight_file(name)) {
            names.insert(name.to_owned());
        }
    }
    Ok(names)
}

/// Whether mlx-lm would load a file of this name.
pub(super) fn is_weight_file(name: &str) -> bool {
    name.strip_prefix("model").is_some_and(|rest| rest.ends_with(".safetensors"))
}

/// `model.safetensors.index.json`, by shard.
#[derive(Debug)]
pub(super) struct ShardIndex {
    /// The tensors of each shard.
    pub(super) shards: BTreeMap<String, Vec<String>>,
}

impl ShardIndex {
    /// Reads the index of a directory; `None` when it has none.
    ///
    /// # Errors
    /// When it is broken, lists a tensor twice, or names a file outside the directory.
    pub(super) fn read(directory: &Path) -> Result<Option<Self>, CheckpointError> {
        #[derive(Deserialize)]
        struct File {
            weight_map: StringPairs,
        }
        let index = directory.join(INDEX_NAME);
        let Some(text) = json::read_bytes(&index)? else { return Ok(None) };
        let broken = |message: String| CheckpointError::Json { file: index.clone(), message };
        let file: File = serde_json::from_slice(&text)
            .map_err(|error| broken(format!("not a valid index: {}", shown_message(&error.to_string()))))?;

        let mut shards = BTreeMap::<String, Vec<String>>::new();
        let mut seen = BTreeSet::new();
        for (tensor, shard) in file.weight_map.0 {
            if !is_plain_name(&shard) {
                return Err(CheckpointError::UnsafeShardName { index, tensor, shard });
            }
            if !seen.insert(tensor.clone()) {
                return Err(broken(format!("tensor `{}` is listed twice", shown_name(&tensor))));
            }
            shards.entry(shard).or_default().push(tensor);
        }
        Ok(Some(Self { shards }))
    }

    /// The error about the first shard that is not there.
    fn first_missing(&self, directory: &Path) -> Option<CheckpointError> {
        let (shard, tensors) = self.shards.iter().find(|(shard, _)| !directory.join(shard).exists())?;
        Some(CheckpointError::MissingShard {
            directory: directory.to_owned(),
            shard: shard.clone(),
            tensors: tensors.len(),
        })
    }

    fn check(&self, directory: &Path, owners: &Owners) -> Result<(), CheckpointError> {
        for (shard, tensors) in &self.shards {
            if let Some(tensor) = tensors.iter().find(|tensor| owners.get(*tensor) != Some(shard)) {
                let (shard, tensor) = (directory.join(shard), tensor.clone());
                return Err(CheckpointError::NotInShard { shard, tensor });
            }
        }
        Ok(())
    }
}

/// Whether joining `name` to a directory stays in that directory, on any system.
pub(super) fn is_plain_name(name: &str) -> bool {
    let path = PathBuf::from(name);
    let mut components = path.components();
    let plain = matches!((components.next(), components.next()), (Some(Component::Normal(part)), None) if part == name);
    plain && !name.contains(['/', '\\', ':', '\0'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shard_names_are_plain() {
        for name in ["model-00001-of-00002.safetensors", "a..b", "..."] {
            assert!(is_plain_name(name), "{name}");
        }
        for name in ["", ".", "..", "../a", "/a", "a/b", "a/", "./a", "a\\b", "c:a", "a\0"] {
            assert!(!is_plain_name(name), "{name}");
        }
    }

    #[test]
    fn weight_files_are_those_of_the_glob() {
        for name in ["model.safetensors", "model-1-of-2.safetensors", "model_extra.safetensors"] {
            assert!(is_weight_file(name), "{name}");
        }
        for name in
            ["adapters.safetensors", "model.safetensors.index.json", "mymodel.safetensors", "model.bin"]
        {
            assert!(!is_weight_file(name), "{name}");
        }
    }
}
