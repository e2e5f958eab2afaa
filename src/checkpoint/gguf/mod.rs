//! GGUF files (llama.cpp) as a model source: tensors under Hugging Face names, a configuration as config.json
//! has it, and a tokenizer.
//!
//! [`header`] reads the untrusted file; `config`, `names`, `rope` and `tokenizer` interpret it; `convert` makes
//! the tensors: plain ones stay mapped, types that MLX's affine layout holds without loss stay quantized
//! (`affine`), the rest becomes single precision (`blocks`, `k_quants`).
//!
//! The other way, [`export`] and [`export_tokenizer`] say a model in GGUF's words, [`encode`] makes the blocks, and
//! [`writer`] the file.

mod affine;
mod blocks;
mod config;
mod convert;
pub mod encode;
mod error;
pub mod export;
pub mod export_tokenizer;
pub mod ggml_type;
pub mod header;
mod k_quants;
mod merges;
mod names;
mod permute;
mod pre_tokenizer;
mod rope;
mod tokenizer;
pub mod value;
mod vocabulary;
pub mod writer;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use serde_json::{Map, Value, json};

use self::config::Configuration;
use self::convert::{Converted, Recipe};
pub use self::error::{Fault, GgufError};
use self::ggml_type::GgmlType;
use self::header::{Header, TensorInfo};
use self::names::{Architecture, Place, Role};
pub use self::permute::RowOrder;
use crate::checkpoint::mapping::{MappedFile, map_file};
use crate::checkpoint::tensor::{Tensor, TensorData};

/// A model read from a GGUF file.
#[derive(Debug)]
pub struct GgufModel {
    /// As config.json: `model_type`, sizes, rope, `eos_token_id`, and `quantization` as mlx-lm writes it (group
    /// size, bits and mode; an object for a module with other bits, `false` for one that is not quantized).
    pub config: Map<String, Value>,
    /// Tensors under the names of mlx-lm's model files. A quantized module has `.weight` (packed, `U32`),
    /// `.scales` and `.biases` (`F16`).
    pub tensors: BTreeMap<String, Tensor>,
    /// The bytes of a tokenizer.json.
    pub tokenizer_json: Vec<u8>,
    /// As tokenizer_config.json, with the chat template.
    pub tokenizer_config: Value,
    /// Tokens that end generation; the one the file calls EOS first.
    pub eos_token_ids: Vec<u32>,
}

/// Loads a model.
///
/// # Errors
/// If the file cannot be read, is damaged, or holds a model that is not supported; the message names the file
/// and the cause in one line.
pub fn load(path: &Path) -> Result<GgufModel, GgufError> {
    map(path).and_then(|file| read(&file)).map_err(|fault| GgufError { path: path.to_owned(), fault })
}

/// What the header alone tells about a model.
#[derive(Debug)]
pub struct GgufSummary {
    /// As [`GgufModel::config`], without `quantization` and token ids.
    pub config: Map<String, Value>,
    /// Elements of all tensors.
    pub parameters: u64,
    /// The chat template.
    pub chat_template: Option<String>,
}

/// Reads the header of a file and nothing else.
///
/// # Errors
/// As [`load`], as far as the header shows it.
pub fn summarize(path: &Path) -> Result<GgufSummary, GgufError> {
    let read = |file: MappedFile| {
        let header = Header::parse(&file)?;
        let elements =
            |info: &TensorInfo| info.shape.iter().map(|&size| size as u64).fold(1, u64::saturating_mul);
        Ok(GgufSummary {
            config: config::read(&header, None)?.json,
            parameters: header.tensors.values().map(elements).fold(0, u64::saturating_add),
            chat_template: header.metadata.text("tokenizer.chat_template")?.map(str::to_owned),
        })
    };
    map(path).and_then(read).map_err(|fault| GgufError { path: path.to_owned(), fault })
}

fn map(path: &Path) -> Result<MappedFile, Fault> {
    // Asked before opening: to open a pipe is to wait for its writer.
    if !std::fs::metadata(path)?.is_file() {
        return Err(std::io::Error::other("it is not a regular file").into());
    }
    let file = File::open(path)?;
    if file.metadata()?.len() == 0 {
        return Err(Fault::NotGguf);
    }
    Ok(map_file(&file)?)
}

fn read(file: &MappedFile) -> Result<GgufModel, Fault> {
    let header = Header::parse(file)?;
    if let Some(parts) = header.metadata.integer("split.count")?.filter(|&parts| parts > 1) {
        return Err(Fault::Split(parts));
    }
    let factors = header.tensors.get(rope::FACTORS).map(|info| rope_factors(file, info)).transpose()?;
    let mut configuration = config::read(&header, factors.as_deref())?;
    let places = places(&header, &configuration)?;
    let recipes = places
        .iter()
        .map(|(place, name, info)| recipe(&configuration, place, name, info))
        .collect::<Result<Vec<_>, _>>()?;
    let tokenizer = tokenizer::read(&header.metadata)?;
    if tokenizer.tokens as u64 > configuration.vocabulary {
        let (tokens, rows) = (tokenizer.tokens, configuration.vocabulary);
        return Err(Fault::Tokenizer(format!("it has {tokens} tokens, the embedding {rows} rows")));
    }

    let converted = convert::convert(file, &recipes);
    // What was unpacked is not needed a second time.
    for Recipe { info, .. } in &recipes {
        TensorData::Mapped { file: file.clone(), range: info.range.clone() }.release();
    }
    let mut tensors = BTreeMap::new();
    let mut matrices = Vec::new();
    for ((Place { module, leaf, role }, ..), converted) in places.into_iter().zip(converted) {
        let matrix = leaf == "weight" && role != Role::Norm;
        let bits = match converted {
            Converted::Dense(tensor) => {
                tensors.insert(format!("{module}.{leaf}"), tensor);
                None
            }
            Converted::Affine { bits, weight, scales, biases } => {
                tensors.insert(format!("{module}.weight"), weight);
                tensors.insert(format!("{module}.scales"), scales);
                tensors.insert(format!("{module}.biases"), biases);
                Some(bits)
            }
        };
        if matrix {
            matrices.push((module, bits));
        }
    }
    let config = &mut configuration.json;
    if let Some(quantization) = quantization(&matrices) {
        config.insert("quantization".to_owned(), quantization);
    }
    if let Some(bos) = tokenizer.bos_token_id {
        config.insert("bos_token_id".to_owned(), json!(bos));
    }
    if !tokenizer.eos_token_ids.is_empty() {
        config.insert("eos_token_id".to_owned(), json!(tokenizer.eos_token_ids));
    }
    Ok(GgufModel {
        config: configuration.json,
        tensors,
        tokenizer_json: tokenizer.json,
        tokenizer_config: tokenizer.config,
        eos_token_ids: tokenizer.eos_token_ids,
    })
}

fn rope_factors(file: &[u8], info: &TensorInfo) -> Result<Vec<f32>, Fault> {
    if info.kind != GgmlType::F32 || info.shape.len() != 1 {
        return Err(Fault::tensor(rope::FACTORS, "is not a row of F32"));
    }
    let bytes = file.get(info.range.clone()).unwrap_or_default();
    Ok(bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}

type Placed<'h> = (Place, &'h str, &'h TensorInfo);

/// The place of every tensor; one without a place is an error.
fn places<'h>(header: &'h Header<'_>, configuration: &Configuration) -> Result<Vec<Placed<'h>>, Fault> {
    const SHOWN: usize = 3;
    let Configuration { architecture, layers, .. } = *configuration;
    let mut placed = Vec::with_capacity(header.tensors.len());
    let mut unknown = Vec::new();
    for (&name, info) in &header.tensors {
        match names::place(architecture, layers, name) {
            Some(place) => placed.push((place, name, info)),
            None if architecture == Architecture::Llama && name == rope::FACTORS => {}
            None => unknown.push(format!("{name:?}")),
        }
    }
    if unknown.is_empty() {
        return Ok(placed);
    }
    let more = unknown.len().saturating_sub(SHOWN);
    unknown.truncate(SHOWN);
    let mut names = format!("tensor {}", unknown.join(", "));
    if more > 0 {
        names.push_str(&format!(" and {more} more"));
    }
    Err(Fault::UnknownTensors { architecture: architecture.name(), names })
}

fn recipe(
    configuration: &Configuration,
    place: &Place,
    name: &str,
    info: &TensorInfo,
) -> Result<Recipe, Fault> {
    let matrix = place.leaf == "weight" && place.role != Role::Norm;
    let rank = if matrix { 2 } else { 1 };
    if info.shape.len() != rank {
        let problem = format!("has shape {:?}, not {rank} dimensions", info.shape);
        return Err(Fault::tensor(name, problem));
    }
    let heads = match place.role {
        Role::Query => configuration.heads,
        Role::Key => configuration.key_value_heads,
        _ => 0,
    };
    let mut order = RowOrder::Stored;
    if configuration.architecture == Architecture::Llama && heads > 0 {
        let expected = heads.checked_mul(configuration.head_dimension);
        if expected != Some(info.shape[0] as u64) {
            let size = configuration.head_dimension;
            let problem = format!("has shape {:?}, not {heads} heads of {size} rows", info.shape);
            return Err(Fault::tensor(name, problem));
        }
        if !matrix && info.kind.block_elements() > 1 {
            return Err(Fault::tensor(name, "is a quantized bias, which is not supported"));
        }
        order = RowOrder::Heads(configuration.head_dimension as usize);
    }
    let minus_one = configuration.architecture == Architecture::Gemma3 && place.role == Role::Norm;
    Ok(Recipe { info: info.clone(), order, affine: matrix, minus_one })
}

/// mlx-lm's `quantization` object: the commonest bits for all, and what differs by module.
fn quantization(matrices: &[(String, Option<usize>)]) -> Option<Value> {
    let count = |wanted: usize| matrices.iter().filter(|(_, bits)| *bits == Some(wanted)).count();
    let common = if count(8) > count(4) { 8 } else { 4 };
    if count(common) == 0 {
        return None;
    }
    let parameters = |bits: usize| {
        let mut parameters = Map::new();
        parameters.insert("group_size".to_owned(), json!(affine::GROUP));
        parameters.insert("bits".to_owned(), json!(bits));
        parameters.insert("mode".to_owned(), json!("affine"));
        parameters
    };
    let mut quantization = parameters(common);
    for (module, bits) in matrices {
        match bits {
            Some(bits) if *bits == common => {}
            Some(bits) => {
                quantization.insert(module.clone(), Value::Object(parameters(*bits)));
            }
            None => {
                quantization.insert(module.clone(), json!(false));
            }
        }
    }
    Some(Value::Object(quantization))
}
