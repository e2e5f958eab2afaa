//! Prompt caches in files: mlx-lm's `save_prompt_cache` and `load_prompt_cache` (cache.py).
//!
//! One safetensors file. Tensors are the flattened state of each layer (`<layer>.<index>`), with integers as
//! scalar arrays; the header's metadata is the flattened list of the caller's metadata (`0.<key>`), the class
//! names (`1.<layer>`) and the entries that stand for something other than an array (`2.<n>.0`, `2.<n>.1`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::cache::{
    KvCache, LayerCache, LayerKind, Packed, QuantizedKvCache, RotatingKvCache, make_prompt_cache,
};
use crate::checkpoint::safetensors::SafetensorsFile;
use crate::checkpoint::safetensors_writer::{WriteError, write_safetensors};
use crate::checkpoint::{CheckpointError, QuantMode, QuantParams, Tensor};
use crate::mlx::{self, Array, Dtype};
use crate::models::Model;

/// Why a prompt cache cannot be saved or loaded.
#[derive(Debug, thiserror::Error)]
pub enum PromptCacheError {
    /// The file cannot be read.
    #[error(transparent)]
    Read(#[from] CheckpointError),
    /// The file cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// MLX failed.
    #[error(transparent)]
    Mlx(#[from] mlx::Error),
    /// A safetensors file, but not a prompt cache that can be used.
    #[error("{}: not a prompt cache of this model: {problem}", file.display())]
    Content {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A cache whose layers do not fit the model's.
    #[error("the prompt cache has {found} layers, the model {expected}; make it with this model")]
    Layers {
        /// Layers in the file.
        found: usize,
        /// Layers of the model.
        expected: usize,
    },
    /// A layer's cache that the model could not have made.
    #[error("the prompt cache does not fit the model: layer {layer} {problem}; make it with this model")]
    Layer {
        /// The layer.
        layer: usize,
        /// What is wrong with its cache; completes the sentence.
        problem: String,
    },
}

/// A layer's state in mlx-lm's order.
enum Entry {
    Array(Array),
    Int(i32),
    None,
}

/// Flattened state with each entry's key below the layer's.
fn state(cache: &LayerCache) -> (&'static str, Vec<(String, Entry)>) {
    let numbered = |entries: Vec<Entry>| {
        entries.into_iter().enumerate().map(|(index, entry)| (index.to_string(), entry)).collect()
    };
    let pair = |buffers: Option<(&Array, &Array)>| match buffers {
        Some((keys, values)) => [Entry::Array(keys.clone()), Entry::Array(values.clone())],
        None => [Entry::None, Entry::None],
    };
    match cache {
        LayerCache::Plain(cache) => {
            let mut entries = Vec::from(pair(cache.buffers()));
            entries.push(Entry::Int(cache.offset()));
            ("KVCache", numbered(entries))
        }
        LayerCache::Rotating(cache) => {
            let mut entries = Vec::from(pair(cache.buffers()));
            entries.extend([cache.offset(), cache.keep(), cache.max_size(), cache.idx()].map(Entry::Int));
            ("RotatingKVCache", numbered(entries))
        }
        LayerCache::Quantized(cache) => {
            let mut entries = Vec::new();
            if let Some((keys, values)) = cache.buffers() {
                for (outer, packed) in [keys, values].into_iter().enumerate() {
                    for (inner, array) in
                        [&packed.weight, &packed.scales, &packed.biases].into_iter().enumerate()
                    {
                        entries.push((format!("{outer}.{inner}"), Entry::Array(array.clone())));
                    }
                }
            } else {
                entries.extend([("0".to_owned(), Entry::None), ("1".to_owned(), Entry::None)]);
            }
            let QuantParams { bits, group_size, .. } = cache.scheme();
            let scalars = [cache.offset(), group_size as i32, i32::from(bits)];
            let keyed = scalars.into_iter().enumerate();
            entries.extend(keyed.map(|(index, value)| ((index + 2).to_string(), Entry::Int(value))));
            ("QuantizedKVCache", entries)
        }
        // `save` exports before it asks.
        LayerCache::Stored(_) | LayerCache::Joined(_) => ("KVCache", Vec::new()),
    }
}

/// Writes the caches, all at once or not at all. `metadata` is the caller's.
pub fn save(
    path: &Path,
    caches: &[LayerCache],
    metadata: &BTreeMap<String, String>,
) -> Result<(), PromptCacheError> {
    let mut header: BTreeMap<String, String> =
        metadata.iter().map(|(key, value)| (format!("0.{key}"), value.clone())).collect();
    header.insert("2.0".to_owned(), String::new());
    let mut arrays = Vec::new();
    let mut special = 0;
    for (layer, cache) in caches.iter().enumerate() {
        let exported = cache.exported()?;
        let (class, entries) = state(exported.as_ref().unwrap_or(cache));
        header.insert(format!("1.{layer}"), class.to_owned());
        for (key, entry) in entries {
            let key = format!("{layer}.{key}");
            let (array, kind) = match entry {
                Entry::Array(array) => (array, None),
                Entry::Int(value) => (Array::from_slice(&[value], &[])?, Some("scalar")),
                Entry::None => (Array::zeros(&[0], Dtype::Float32)?, Some("none")),
            };
            if let Some(kind) = kind {
                special += 1;
                header.insert(format!("2.{special}.0"), key.clone());
                header.insert(format!("2.{special}.1"), kind.to_owned());
            }
            arrays.push((key, array));
        }
    }
    let mut tensors = Vec::new();
    for (key, array) in &arrays {
        let stored =
            array.dtype().stored().ok_or_else(|| mlx::Error::new(format!("cannot store {array:?}")))?;
        let shape: Vec<usize> = array.shape().iter().map(|&dim| dim as usize).collect();
        tensors.push((key.as_str(), stored, shape, array.to_bytes()?));
    }
    let borrowed = tensors.iter().map(|(key, stored, shape, bytes)| (*key, *stored, shape.as_slice(), bytes));
    Ok(write_safetensors(path, borrowed, &header)?)
}

/// Whether a file is what [`save`] writes, by its header; one that cannot be read is not.
pub fn is_prompt_cache(path: &Path) -> bool {
    SafetensorsFile::open(path).is_ok_and(|file| file.metadata().contains_key("1.0"))
}

/// Reads caches and the metadata they were saved with.
pub fn load(path: &Path) -> Result<(Vec<LayerCache>, BTreeMap<String, String>), PromptCacheError> {
    let file = SafetensorsFile::open(path)?;
    let tensors: BTreeMap<&str, Tensor> = file.tensors().collect();
    let header = file.metadata();
    let bad = |problem: String| PromptCacheError::Content { file: path.to_owned(), problem };
    let specials: BTreeMap<&str, &str> = (1..)
        .map_while(|index| {
            let part = |end| header.get(&format!("2.{index}.{end}")).map(String::as_str);
            Some((part(0)?, part(1)?))
        })
        .collect();
    let mut caches = Vec::new();
    for layer in 0.. {
        let Some(class) = header.get(&format!("1.{layer}")) else { break };
        let reader = LayerReader { layer, tensors: &tensors, specials: &specials };
        caches.push(reader.read(class).map_err(bad)?);
    }
    if caches.is_empty() {
        return Err(bad("its header names no layers".to_owned()));
    }
    let metadata =
        header.iter().filter_map(|(key, value)| Some((key.strip_prefix("0.")?.to_owned(), value.clone())));
    Ok((caches, metadata.collect()))
}

/// Reads one layer's entries.
struct LayerReader<'a> {
    layer: usize,
    tensors: &'a BTreeMap<&'a str, Tensor>,
    specials: &'a BTreeMap<&'a str, &'a str>,
}

impl LayerReader<'_> {
    fn read(&self, class: &str) -> Result<LayerCache, String> {
        match class {
            "KVCache" => {
                let offset = self.int("2", 0)?;
                let Some((keys, values)) = self.buffers(offset)? else {
                    return Ok(LayerCache::Plain(KvCache::default()));
                };
                Ok(LayerCache::Plain(KvCache::from_state(keys, values, offset)))
            }
            "RotatingKVCache" => {
                let (offset, keep, max_size, idx) =
                    (self.int("2", 0)?, self.int("3", 0)?, self.int("4", 1)?, self.int("5", 0)?);
                if keep >= max_size {
                    return Err(format!("layer {} keeps {keep} of {max_size} positions", self.layer));
                }
                let Some((keys, values)) = self.buffers(idx)? else {
                    return Ok(LayerCache::Rotating(RotatingKvCache::new(max_size, keep)));
                };
                let cache = RotatingKvCache::from_state(keys, values, offset, keep, max_size, idx);
                Ok(LayerCache::Rotating(cache))
            }
            "QuantizedKVCache" => {
                let (offset, group_size, bits) = (self.int("2", 0)?, self.int("3", 1)?, self.int("4", 1)?);
                let params = QuantParams::new(QuantMode::Affine, bits as u64, group_size as u64);
                let params = params.map_err(|error| error.to_string())?;
                let (keys, values) = (self.packed(0, offset, params)?, self.packed(1, offset, params)?);
                let cache =
                    QuantizedKvCache::from_state(keys, values, offset, params.bits, params.group_size);
                Ok(LayerCache::Quantized(cache))
            }
            other => Err(format!("layer {} has a cache of the unknown class `{other}`", self.layer)),
        }
    }

    fn tensor(&self, entry: &str) -> Result<&Tensor, String> {
        let key = format!("{}.{entry}", self.layer);
        self.tensors.get(key.as_str()).ok_or_else(|| format!("`{key}` is missing"))
    }

    fn is_none(&self, entry: &str) -> bool {
        self.specials.get(format!("{}.{entry}", self.layer).as_str()) == Some(&"none")
    }

    /// An integer of at least `least`.
    fn int(&self, entry: &str, least: i64) -> Result<i32, String> {
        let tensor = self.tensor(entry)?;
        let wrong = || format!("`{}.{entry}` is not a number >= {least}", self.layer);
        let value = match *tensor.bytes() {
            [a, b, c, d] => i64::from(i32::from_le_bytes([a, b, c, d])),
            [a, b, c, d, e, f, g, h] => i64::from_le_bytes([a, b, c, d, e, f, g, h]),
            _ => return Err(wrong()),
        };
        i32::try_from(value).ok().filter(|_| value >= least).ok_or_else(wrong)
    }

    /// A floating-point `[B, kv_heads, T, dim]` with `T >= filled`.
    fn array(&self, entry: &str, filled: i32) -> Result<Array, String> {
        let array = Array::from_tensor(self.tensor(entry)?).map_err(|error| error.to_string())?;
        if array.ndim() != 4 || array.dim(2) < filled {
            return Err(format!(
                "`{}.{entry}` has shape {:?}, expected 4 dimensions and at least {filled} positions",
                self.layer,
                array.shape()
            ));
        }
        Ok(array)
    }

    fn buffers(&self, filled: i32) -> Result<Option<(Array, Array)>, String> {
        if self.is_none("0") {
            return Ok(None);
        }
        Ok(Some((self.array("0", filled)?, self.array("1", filled)?)))
    }

    fn packed(&self, which: usize, filled: i32, params: QuantParams) -> Result<Packed, String> {
        let part = |index| self.array(&format!("{which}.{index}"), filled);
        let packed = Packed { weight: part(0)?, scales: part(1)?, biases: part(2)? };
        let head_dim = i64::from(packed.scales.dim(3)) * i64::from(params.group_size);
        let words = i64::from(packed.weight.dim(3)) * 32;
        if packed.weight.dtype() != Dtype::Uint32
            || words != head_dim * i64::from(params.bits)
            || packed.biases.shape() != packed.scales.shape()
        {
            return Err(format!("layer {}: packed arrays do not fit {params}", self.layer));
        }
        Ok(packed)
    }
}

/// Checks loaded caches against a model: one a layer, of the kind, shape and type that the model itself makes, and
/// all at the same position.
///
/// # Errors
/// [`PromptCacheError::Layers`] and [`PromptCacheError::Layer`].
pub fn check(caches: &[LayerCache], model: &dyn Model) -> Result<(), PromptCacheError> {
    let kinds = model.layer_kinds();
    if caches.len() != kinds.len() {
        return Err(PromptCacheError::Layers { found: caches.len(), expected: kinds.len() });
    }
    // The graph of one step has the shapes and types of the model's own caches; nothing is computed.
    let mut own = make_prompt_cache(kinds, None);
    model.forward(&Array::from_slice(&[0u32], &[1, 1])?, Some(&mut own))?;
    let position = caches.first().map_or(0, LayerCache::offset);
    for (layer, (cache, (kind, own))) in caches.iter().zip(kinds.iter().zip(&own)).enumerate() {
        let fits = match cache.offset() {
            0 => Err("holds no tokens".to_owned()),
            offset if offset != position => {
                Err(format!("stands at position {offset}, the first layer at {position}"))
            }
            _ => check_kind(cache, *kind).and_then(|()| check_arrays(cache, own)),
        };
        fits.map_err(|problem| PromptCacheError::Layer { layer, problem })?;
    }
    Ok(())
}

fn check_kind(cache: &LayerCache, kind: LayerKind) -> Result<(), String> {
    match (kind, cache) {
        (LayerKind::Sliding { window }, LayerCache::Rotating(ring))
            if (ring.max_size(), ring.keep()) == (window, 0) =>
        {
            Ok(())
        }
        (LayerKind::Sliding { window }, _) => {
            Err(format!("slides over {window} positions, and the cache does not"))
        }
        (LayerKind::Full, _) => Ok(()),
    }
}

/// Keys or values as the model itself makes them.
struct Own {
    batch: i32,
    heads: i32,
    dim: i32,
    /// `None` where the model keeps them in memory of ours in half precision, which takes any 16-bit type.
    dtype: Option<Dtype>,
}

impl Own {
    /// Of a cache that the model filled: the keys and the values.
    fn of(cache: &LayerCache) -> Option<[Self; 2]> {
        if let LayerCache::Stored(cache) = cache {
            let [batch, heads, dim] = cache.layout();
            let dtype = cache.is_wide().then_some(Dtype::Float32);
            return Some([(); 2].map(|()| Self { batch, heads, dim, dtype }));
        }
        let of = |array: Array| Self {
            batch: array.dim(0),
            heads: array.dim(1),
            dim: array.dim(3),
            dtype: Some(array.dtype()),
        };
        Some(dense(cache)?.map(of))
    }

    /// Checks one array of `length` positions and `width` numbers each.
    fn check(&self, array: &Array, length: i32, width: i32, dtype: Option<Dtype>) -> Result<(), String> {
        let shape = [self.batch, self.heads, length, width];
        let fits = match dtype {
            Some(dtype) => array.dtype() == dtype,
            None => matches!(array.dtype(), Dtype::Float16 | Dtype::Bfloat16),
        };
        if array.shape() == shape && fits {
            return Ok(());
        }
        let (found, expected) =
            (array.dtype().name(), dtype.map_or("16-bit floating-point numbers", Dtype::name));
        let why = match (array.dtype(), dtype) {
            (Dtype::Float16, Some(Dtype::Bfloat16)) => " (half precision is how our CPU kernels keep it)",
            _ => "",
        };
        Err(format!("holds {:?} of {found} where this model has {shape:?} of {expected}{why}", array.shape()))
    }
}

fn dense(cache: &LayerCache) -> Option<[Array; 2]> {
    match cache {
        LayerCache::Plain(cache) => cache.buffers().map(|(keys, values)| [keys.clone(), values.clone()]),
        LayerCache::Rotating(cache) => cache.buffers().map(|(keys, values)| [keys.clone(), values.clone()]),
        LayerCache::Quantized(_) | LayerCache::Stored(_) | LayerCache::Joined(_) => None,
    }
}

/// Checks every array of a cache against the keys and values of one that the model filled itself.
fn check_arrays(cache: &LayerCache, own: &LayerCache) -> Result<(), String> {
    let empty = || "holds no tokens".to_owned();
    let own = Own::of(own).ok_or("keeps no keys and values in this model")?;
    if let LayerCache::Quantized(cache) = cache {
        let (keys, values) = cache.buffers().ok_or_else(empty)?;
        let (bits, group_size) = (i32::from(cache.scheme().bits), cache.scheme().group_size as i32);
        let length = keys.weight.dim(2);
        for (packed, own) in [keys, values].into_iter().zip(&own) {
            own.check(&packed.weight, length, own.dim * bits / 32, Some(Dtype::Uint32))?;
            own.check(&packed.scales, length, own.dim / group_size, own.dtype)?;
            own.check(&packed.biases, length, own.dim / group_size, own.dtype)?;
        }
        return Ok(());
    }
    let arrays = dense(cache).ok_or_else(empty)?;
    let length = arrays[0].dim(2);
    for (array, own) in arrays.iter().zip(&own) {
        own.check(array, length, own.dim, own.dtype)?;
    }
    match cache {
        LayerCache::Rotating(ring) => check_ring(ring, length),
        _ => Ok(()),
    }
}

/// A ring of `length` positions: before it wraps, the next position is written where it stands.
fn check_ring(ring: &RotatingKvCache, length: i32) -> Result<(), String> {
    let (offset, idx) = (ring.offset(), ring.idx());
    let filled = length >= offset.min(ring.max_size()) && idx <= length;
    let in_place = if offset <= length { idx == offset } else { idx >= ring.keep() };
    if filled && in_place {
        return Ok(());
    }
    Err(format!(
        "keeps {length} of {} positions and writes at {idx} after {offset}, which contradict each other",
        ring.max_size()
    ))
}
