//! Writes a model as a GGUF file that llama.cpp reads.

use std::collections::HashMap;
use std::io;
use std::path::Path;

use serde_json::Value;

use super::convert::{ConvertError, OnProgress, Progress};
use super::numbers::FloatType;
use super::source::{SourceFiles, SourceModel};
use super::step::Dense;
use super::unpack::some_rows;
use crate::checkpoint::atomic_file::AtomicFileError;
use crate::checkpoint::error::shown_name;
use crate::checkpoint::gguf::RowOrder;
use crate::checkpoint::gguf::encode::{AffineGroup, encode};
use crate::checkpoint::gguf::export::{ExportError, ExportedConfig, ExportedTensor};
use crate::checkpoint::gguf::export_tokenizer::{self, TokenizerExportError, TokenizerFiles};
use crate::checkpoint::gguf::ggml_type::GgmlType;
use crate::checkpoint::gguf::writer::{MetadataBuilder, TensorPlan, write_gguf};
use crate::checkpoint::{CheckpointError, QuantMode, Taken, Tensor, WeightTensors};
use crate::tokenizer::TokenizerError;
use crate::tokenizer::chat_template::{ChatTemplates, TemplateError};

/// Numbers that are encoded at a time.
const NUMBERS_AT_A_TIME: usize = 1 << 22;
/// Version of ggml's block formats.
const QUANTIZATION_VERSION: u32 = 2;

/// The type of a file's matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GgufFileType {
    /// Half precision.
    F16,
    /// 8 bits, a scale for 32.
    Q8_0,
    /// 4 bits, a scale for 32.
    Q4_0,
    /// 4 bits, a scale and a minimum for 32.
    Q4_1,
}

impl GgufFileType {
    /// Every one.
    pub const ALL: [Self; 4] = [Self::F16, Self::Q8_0, Self::Q4_0, Self::Q4_1];

    /// ggml's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "F16",
            Self::Q8_0 => "Q8_0",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
        }
    }

    /// The type of that name, in any case.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name().eq_ignore_ascii_case(name))
    }

    fn element(self) -> GgmlType {
        match self {
            Self::F16 => GgmlType::F16,
            Self::Q8_0 => GgmlType::Q8_0,
            Self::Q4_0 => GgmlType::Q4_0,
            Self::Q4_1 => GgmlType::Q4_1,
        }
    }

    /// `general.file_type` (llama.h, `enum llama_ftype`).
    fn id(self) -> u32 {
        match self {
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q8_0 => 7,
        }
    }
}

/// Why a model was not exported. Nothing is left of it.
#[derive(Debug, thiserror::Error)]
pub enum GgufExportError {
    /// The model.
    #[error(transparent)]
    Model(#[from] ExportError),
    /// The tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerExportError),
    /// The tokenizer's files.
    #[error(transparent)]
    TokenizerFiles(#[from] TokenizerError),
    /// The chat template.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// A file of the source.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A weight.
    #[error(transparent)]
    Weight(#[from] ConvertError),
    /// A number that is too large.
    #[error(
        "tensor `{}` holds numbers that {kind:?} cannot hold; its scales are half precision",
        shown_name(tensor)
    )]
    Overflow {
        /// The tensor.
        tensor: String,
        /// The type.
        kind: GgmlType,
    },
    /// The file.
    #[error(transparent)]
    File(#[from] AtomicFileError),
}

/// A file that was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GgufExported {
    /// Bytes of its tensors.
    pub bytes: u64,
    /// Matrices.
    pub matrices: usize,
    /// Those whose packed weights a GGUF type holds without loss, and which are in that type.
    pub exact: usize,
}

/// A tensor on its way into the file.
struct Export<'a> {
    source: Source<'a>,
    place: ExportedTensor,
    plan: TensorPlan,
    exact: bool,
}

enum Source<'a> {
    Weight { path: &'a str, tensors: &'a WeightTensors },
    Plain(&'a Tensor),
    Computed(Vec<f32>),
}

/// Writes the model to `file`, its matrices as `kind`, one tensor at a time. Packed weights that Q4_0, Q4_1 or Q8_0
/// hold exactly (affine groups of 32 with 4 or 8 bits and scales that are half-precision numbers) are kept in that
/// type, unless `kind` is [`GgufFileType::F16`]; matrices whose rows blocks of 32 do not divide are half precision.
/// `name` is what the file calls the model.
///
/// # Errors
/// When GGUF has no words for the model, it is damaged, or the file cannot be written.
pub fn export_gguf(
    source: &SourceModel,
    file: &Path,
    kind: GgufFileType,
    name: &str,
    on_progress: OnProgress,
) -> Result<GgufExported, GgufExportError> {
    let config = ExportedConfig::read(source.network_config())?;
    let mut exports = Vec::new();
    for taken in &source.tensors {
        exports.push(plan(&config, taken, kind)?);
    }
    if let Some((name, factors)) = config.rope_factors() {
        let plan = TensorPlan { name: name.to_owned(), shape: vec![factors.len()], kind: GgmlType::F32 };
        let place =
            ExportedTensor { name: name.to_owned(), matrix: false, order: RowOrder::Stored, plus_one: false };
        exports.push(Export { source: Source::Computed(factors), place, plan, exact: false });
    }
    let rows = exports.iter().find(|export| export.place.name == "token_embd.weight");
    let rows = rows.and_then(|export| export.plan.shape.first().copied()).unwrap_or(0);

    let mut metadata = MetadataBuilder::default();
    metadata.text("general.architecture", config.architecture());
    metadata.text("general.name", name);
    metadata.integer("general.file_type", kind.id());
    metadata.integer("general.quantization_version", QUANTIZATION_VERSION);
    config.add(&mut metadata, rows)?;
    let (tokenizer_json, files) = tokenizer(source)?;
    let files = TokenizerFiles { tokenizer_json: &tokenizer_json, ..files };
    export_tokenizer::add(&mut metadata, &files, rows)?;

    let plans: Vec<TensorPlan> = exports.iter().map(|export| export.plan.clone()).collect();
    let total = plans.iter().map(TensorPlan::bytes).sum();
    let (mut done, mut failure) = (0, None);
    let written = write_gguf(file, &metadata, &plans, |index| {
        let encoded = exports.get(index).map_or(Ok(Vec::new()), Export::encode);
        done += plans.get(index).map_or(0, TensorPlan::bytes);
        let interrupted = on_progress(Progress { done, total }).is_break();
        match encoded {
            Ok(_) if interrupted => Err(ConvertError::Interrupted.into()),
            encoded => encoded,
        }
        .map_err(|error| {
            failure = Some(error);
            io::Error::other("a tensor was not encoded")
        })
    });
    if let Some(error) = failure {
        return Err(error);
    }
    written?;
    Ok(GgufExported {
        bytes: total,
        matrices: exports.iter().filter(|export| export.place.matrix).count(),
        exact: exports.iter().filter(|export| export.exact).count(),
    })
}

fn plan<'a>(
    config: &ExportedConfig,
    taken: &'a Taken,
    kind: GgufFileType,
) -> Result<Export<'a>, GgufExportError> {
    let (source, shape, name) = match taken {
        Taken::Plain { name, tensor } => (Source::Plain(tensor), tensor.shape.clone(), name.clone()),
        Taken::Weight { path, tensors } => {
            let shape = Dense::of(tensors, FloatType::Float32).shape();
            (Source::Weight { path, tensors }, shape, format!("{path}.weight"))
        }
    };
    let (module, leaf) = name.rsplit_once('.').unwrap_or((&name, ""));
    let place = config.place(module, leaf)?;
    let blocks = shape.last().is_some_and(|columns| columns.is_multiple_of(GgmlType::Q8_0.block_elements()));
    let held = match taken {
        Taken::Weight { tensors, .. } if kind != GgufFileType::F16 => exact_type(tensors),
        _ => None,
    };
    let element = match held {
        _ if !place.matrix => GgmlType::F32,
        Some(held) => held,
        None if blocks => kind.element(),
        None => GgmlType::F16,
    };
    let plan = TensorPlan { name: place.name.clone(), shape, kind: element };
    Ok(Export { source, place, plan, exact: held.is_some() })
}

/// The type that holds a packed weight exactly, if there is one.
fn exact_type(tensors: &WeightTensors) -> Option<GgmlType> {
    let kinds: &[GgmlType] = match tensors {
        WeightTensors::Quantized { params, .. }
            if params.mode == QuantMode::Affine && params.group_size == 32 =>
        {
            match params.bits {
                4 => &[GgmlType::Q4_0, GgmlType::Q4_1],
                8 => &[GgmlType::Q8_0],
                _ => return None,
            }
        }
        _ => return None,
    };
    kinds.iter().copied().find(|kind| exact_blocks(tensors, *kind).is_some())
}

/// The blocks of a packed weight; `None` unless they hold the same numbers.
fn exact_blocks(tensors: &WeightTensors, kind: GgmlType) -> Option<Vec<u8>> {
    let WeightTensors::Quantized { weight, scales, biases: Some(biases), params } = tensors else {
        return None;
    };
    let float = FloatType::of(scales.dtype)?;
    let size = 4 * usize::from(params.bits);
    let mut out = Vec::with_capacity(weight.bytes().len() / size.max(1) * kind.block_bytes());
    let groups = float.decode(scales.bytes()).into_iter().zip(float.decode(biases.bytes()));
    for (packed, (scale, bias)) in weight.bytes().chunks_exact(size).zip(groups) {
        if !(AffineGroup { packed, scale, bias }).encode(kind, &mut out) {
            return None;
        }
    }
    Some(out)
}

impl Export<'_> {
    fn encode(&self) -> Result<Vec<u8>, GgufExportError> {
        let bytes = match &self.source {
            Source::Computed(values) => self.blocks(values)?,
            Source::Plain(tensor) => {
                let mut values = Dense::Stored(tensor).floats(&self.plan.name)?;
                if self.place.plus_one {
                    values.iter_mut().for_each(|value| *value += 1.0);
                }
                self.blocks(&values)?
            }
            Source::Weight { tensors, .. } if self.exact => {
                exact_blocks(tensors, self.plan.kind).ok_or_else(|| self.overflow())?
            }
            Source::Weight { path, tensors } => self.weight(path, tensors)?,
        };
        Ok(match self.place.order {
            RowOrder::Stored => bytes,
            order => turned(&bytes, self.plan.shape.first().copied().unwrap_or(1), order),
        })
    }

    fn weight(&self, path: &str, tensors: &WeightTensors) -> Result<Vec<u8>, GgufExportError> {
        let columns = self.plan.shape.last().copied().unwrap_or(1);
        let rows: usize = self.plan.shape.iter().rev().skip(1).product();
        let step = (NUMBERS_AT_A_TIME / columns.max(1)).max(1);
        let mut bytes = Vec::with_capacity(usize::try_from(self.plan.bytes()).unwrap_or(0));
        for start in (0..rows).step_by(step) {
            let count = step.min(rows - start);
            let part = |tensor: &Tensor| some_rows(tensor, rows, start, count);
            let part = match tensors {
                WeightTensors::Dense(weight) => WeightTensors::Dense(part(weight)),
                WeightTensors::Quantized { weight, scales, biases, params } => WeightTensors::Quantized {
                    weight: part(weight),
                    scales: part(scales),
                    biases: biases.as_ref().map(part),
                    params: *params,
                },
            };
            bytes.extend(self.blocks(&Dense::of(&part, FloatType::Float32).floats(path)?)?);
        }
        match tensors {
            WeightTensors::Dense(weight) => weight.data.release(),
            WeightTensors::Quantized { weight, .. } => weight.data.release(),
        }
        Ok(bytes)
    }

    fn blocks(&self, values: &[f32]) -> Result<Vec<u8>, GgufExportError> {
        encode(self.plan.kind, values).ok_or_else(|| self.overflow())
    }

    fn overflow(&self) -> GgufExportError {
        GgufExportError::Overflow { tensor: self.plan.name.clone(), kind: self.plan.kind }
    }
}

/// The rows in the order that the file has them.
fn turned(bytes: &[u8], rows: usize, order: RowOrder) -> Vec<u8> {
    let row = bytes.len() / rows.max(1);
    let mut stored = vec![0; bytes.len()];
    for (index, bytes) in bytes.chunks_exact(row.max(1)).enumerate() {
        let at = order.stored_row(index) * row;
        if let Some(place) = stored.get_mut(at..at + row) {
            place.copy_from_slice(bytes);
        }
    }
    stored
}

/// The tokenizer.json, and what goes with it (whose own reference to the file is empty).
fn tokenizer(source: &SourceModel) -> Result<(Vec<u8>, TokenizerFiles<'static>), GgufExportError> {
    let tokenizer = source.tokenizer()?;
    let (json, templates) = match &source.files {
        SourceFiles::Gguf { tokenizer_json, tokenizer_config } => {
            let template = tokenizer_config.get("chat_template").unwrap_or(&Value::Null);
            (tokenizer_json.clone(), ChatTemplates::from_config_value(template)?)
        }
        SourceFiles::Snapshot(directory) => {
            let file = directory.join("tokenizer.json");
            let json = std::fs::read(&file).map_err(|cause| CheckpointError::Read { file, cause })?;
            (json, ChatTemplates::from_directory(directory, tokenizer.config())?)
        }
    };
    let special = ["bos_token", "eos_token", "unk_token", "pad_token"]
        .into_iter()
        .filter_map(|role| Some((role, tokenizer.special_tokens().get(role)?.to_owned())))
        .collect::<HashMap<_, _>>();
    let ends = source.config.get("eos_token_id");
    let more_ends = match ends {
        Some(Value::Array(ids)) => ids.iter().collect(),
        ends => ends.into_iter().collect::<Vec<_>>(),
    };
    let more_ends = more_ends.into_iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()).collect();
    let named = templates.names().into_iter().filter_map(|name| {
        let template = templates.source(Some(name), false).ok()?;
        Some(serde_json::json!({"name": name, "template": template}))
    });
    let chat_template = (!templates.is_empty()).then(|| Value::Array(named.collect()));
    Ok((json, TokenizerFiles { tokenizer_json: &[], special, more_ends, chat_template }))
}
