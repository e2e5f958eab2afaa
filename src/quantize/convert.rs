//! Converts a model on disk: casts, quantizes or dequantizes it module by module (mlx-lm `convert.py`).
//!
//! Tensors are read, changed and written one module at a time, so memory holds the largest module and not the model.

use std::ops::ControlFlow;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::kv_config::KvLayer;
use super::numbers::FloatType;
use super::recipe::{Chooser, Predicate, RecipeError};
use super::source::{KV_CONFIG_NAME, SourceModel, quantization_block};
use super::step::{Dense, Kept, Step};
use crate::checkpoint::error::shown_name;
use crate::checkpoint::snapshot_writer::{SnapshotError, SnapshotWriter, TensorSpec};
use crate::checkpoint::{ElementType, QuantParams, Taken, Tensor, WeightTensors};
use crate::lora::{Adapter, AdapterError};
use crate::mlx;
use crate::mlx::cpu::{Pool, PoolError};
use crate::models::loader::LoadError;

/// What to make of the weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Leave them as they are.
    Keep,
    /// Undo their quantization.
    Dequantize,
    /// Quantize them.
    Quantize {
        /// What most modules get.
        params: QuantParams,
        /// What others get.
        predicate: Predicate,
        /// Whether modules that are packed already are unpacked first. mlx-lm leaves them as they are.
        again: bool,
    },
}

/// A conversion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConvertOptions {
    /// The type of whatever is not packed; `None` for what [`SourceModel::default_dtype`] says.
    pub dtype: Option<FloatType>,
    /// What to make of the weights.
    pub action: Action,
    /// Bits of each layer's key-value cache to go with it; the source's own file is copied otherwise.
    pub kv_config: Option<Vec<KvLayer>>,
}

/// A model that was written.
#[derive(Clone, Debug, PartialEq)]
pub struct Converted {
    /// Bytes of all tensors.
    pub bytes: u64,
    /// Numbers that the tensors stand for.
    pub parameters: u64,
    /// Modules that were quantized.
    pub quantized: usize,
    /// Modules that were packed before and were left so.
    pub left_packed: usize,
    /// Modules whose rows the group size does not divide, with the length of a row; they were left as they are.
    pub undivided: Vec<(String, usize)>,
    /// Modules that an adapter was fused into.
    pub fused: usize,
    /// What packing them again left of the adapter.
    pub kept: Kept,
}

impl Converted {
    /// Bits a weight takes, scales, norms and all (mlx-lm `compute_bits_per_weight`).
    pub fn bits_per_weight(&self) -> f64 {
        self.bytes as f64 * 8.0 / (self.parameters as f64).max(1.0)
    }
}

/// Why a model was not converted. Nothing is left of it.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// The recipe.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// The files.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// A broken weight.
    #[error("tensor `{}` holds NaN or infinity; the checkpoint is damaged", shown_name(tensor))]
    NotFinite {
        /// The tensor.
        tensor: String,
    },
    /// Weights in a type that is not floating-point.
    #[error("tensor `{}` has dtype {dtype}, which cannot be quantized", shown_name(tensor))]
    NotFloating {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: ElementType,
    },
    /// MLX failed.
    #[error("`{}`: {cause}", shown_name(module))]
    Mlx {
        /// The module.
        module: String,
        /// What MLX said.
        cause: mlx::Error,
    },
    /// MLX failed at something that is no module's.
    #[error(transparent)]
    Array(#[from] mlx::Error),
    /// The adapter.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    /// Whole weights that do not make a model of the source's.
    #[error(transparent)]
    Model(#[from] LoadError),
    /// The threads.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The caller wanted it to stop.
    #[error("interrupted")]
    Interrupted,
}

/// How far a conversion is: bytes of the source that are done, of how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes done.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
}

/// Told about progress; says whether to go on.
pub type OnProgress<'a> = &'a mut dyn FnMut(Progress) -> ControlFlow<()>;

impl SourceModel {
    /// The type that mlx-lm casts to when none is asked for: the config's `torch_dtype`, else the `dtype` of its
    /// `text_config`.
    pub fn default_dtype(&self) -> Option<FloatType> {
        let named = self.config.get("torch_dtype").filter(|value| !value.is_null());
        let named = named.or_else(|| self.config.get("text_config")?.get("dtype"));
        named.and_then(Value::as_str).and_then(FloatType::from_name)
    }
}

/// How large a conversion would be: bytes of its tensors, and the numbers they stand for. Reads no weights.
///
/// # Errors
/// As [`convert`], as far as that shows without weights.
pub fn planned_size(source: &SourceModel, options: &ConvertOptions) -> Result<(u64, u64), ConvertError> {
    let plan = Plan::new(source, None, source.default_dtype(), options)?;
    let bytes = plan.specs().iter().map(|spec| spec.bytes() as u64).fold(0, u64::saturating_add);
    Ok((bytes, plan.report.parameters))
}

/// Writes a converted model to `target`, which must not exist. `repo_id` is where the source came from.
///
/// # Errors
/// When the source is damaged, the target cannot be written, or the caller wants to stop.
pub fn convert(
    source: &SourceModel,
    target: &Path,
    options: &ConvertOptions,
    repo_id: Option<&str>,
    on_progress: OnProgress,
) -> Result<Converted, ConvertError> {
    write_model(source, (None, source.default_dtype()), target, options, repo_id, on_progress)
}

/// Writes a model that a method has reworked: every tensor as it is, in the type that it has.
///
/// # Errors
/// As [`convert`].
pub fn write_as_is(
    source: &SourceModel,
    target: &Path,
    repo_id: Option<&str>,
    on_progress: OnProgress,
) -> Result<Converted, ConvertError> {
    let options = ConvertOptions { dtype: None, action: Action::Keep, kv_config: None };
    write_model(source, (None, None), target, &options, repo_id, on_progress)
}

/// Writes the model with an adapter fused into its weights (mlx-lm `fuse.py`): modules that the adapter does not
/// touch keep their bits, packed ones are packed again as they were, or left unpacked for [`Action::Dequantize`]. Whole
/// weights stand in place of the model's.
///
/// # Errors
/// As [`convert`], and when the adapter does not fit.
pub fn fuse(
    source: &SourceModel,
    adapter: Adapter,
    target: &Path,
    dequantize: bool,
    repo_id: Option<&str>,
    on_progress: OnProgress,
) -> Result<Converted, ConvertError> {
    let action = if dequantize { Action::Dequantize } else { Action::Keep };
    let options = ConvertOptions { dtype: None, action, kv_config: None };
    // Fusing leaves types alone.
    if let Some(whole) = adapter.whole() {
        let source = source.with_weights(whole)?;
        let converted = write_model(&source, (None, None), target, &options, repo_id, on_progress)?;
        return Ok(Converted { fused: whole.len(), ..converted });
    }
    write_model(source, (Some(adapter), None), target, &options, repo_id, on_progress)
}

fn write_model(
    source: &SourceModel,
    (adapter, configured): (Option<Adapter>, Option<FloatType>),
    target: &Path,
    options: &ConvertOptions,
    repo_id: Option<&str>,
    on_progress: OnProgress,
) -> Result<Converted, ConvertError> {
    let writer = SnapshotWriter::create(target)?;
    let plan = Plan::new(source, adapter, configured, options)?;
    let converted = plan.write(&writer, on_progress)?;
    writer.write_json("config.json", &saved_config(plan.config))?;
    source.copy_files(&writer, repo_id)?;
    if let Some(layers) = &options.kv_config {
        writer.write_json(KV_CONFIG_NAME, layers)?;
    }
    writer.commit()?;
    Ok(converted)
}

/// The config as mlx-lm's `save_config` writes it.
pub fn saved_config(mut config: Map<String, Value>) -> Map<String, Value> {
    config.remove("_name_or_path");
    config.remove("vision_config");
    if let Some(quantization) = config.get("quantization").cloned() {
        config.insert("quantization_config".to_owned(), quantization);
    }
    config.sort_keys();
    config
}

/// A conversion, tensor by tensor.
pub(crate) struct Plan<'a> {
    steps: Vec<Step<'a>>,
    config: Map<String, Value>,
    report: Converted,
}

struct Planner<'a> {
    /// The type that the caller asked for.
    asked: Option<FloatType>,
    adapter: Option<Adapter>,
    dtype: Option<FloatType>,
    action: &'a Action,
    chooser: Chooser<'a>,
    gguf: bool,
    plan: Plan<'a>,
    /// Module entries for the config.
    listed: Vec<(String, QuantParams)>,
    fine_grained: bool,
}

impl<'a> Plan<'a> {
    /// Decides about every tensor.
    fn new(
        source: &'a SourceModel,
        adapter: Option<Adapter>,
        configured: Option<FloatType>,
        options: &'a ConvertOptions,
    ) -> Result<Self, ConvertError> {
        let mut config = source.config.clone();
        let gguf = source.is_gguf();
        let chooser = match &options.action {
            Action::Quantize { params, predicate, again } => {
                if *again {
                    config.remove("quantization");
                    config.remove("quantization_config");
                }
                predicate.bind(&source.module_paths(), source.layer_count(), params.group_size)?
            }
            Action::Dequantize => {
                config.remove("quantization");
                config.remove("quantization_config");
                Chooser::Uniform
            }
            Action::Keep => Chooser::Uniform,
        };
        let fine_grained = config.contains_key("quantization");
        // GGUF files mix types; what is computed anew gets one.
        let fallback = (gguf && options.action != Action::Keep).then_some(FloatType::Bfloat16);
        let report = Converted {
            bytes: 0,
            parameters: 0,
            quantized: 0,
            left_packed: 0,
            undivided: Vec::new(),
            fused: 0,
            kept: Kept::default(),
        };
        let mut planner = Planner {
            asked: options.dtype,
            dtype: options.dtype.or(configured).or(fallback),
            adapter,
            action: &options.action,
            chooser,
            gguf,
            plan: Self { steps: Vec::new(), config, report },
            listed: Vec::new(),
            fine_grained,
        };
        for taken in &source.tensors {
            planner.add(taken)?;
        }
        planner.finish()
    }

    fn specs(&self) -> Vec<TensorSpec> {
        self.steps.iter().flat_map(Step::outputs).collect()
    }

    /// Writes the weights.
    fn write(&self, writer: &SnapshotWriter, on_progress: OnProgress) -> Result<Converted, ConvertError> {
        let mut kept = Kept::default();
        let pool = Pool::new(mlx::cpu::pool::default_threads())?;
        let mut weights = writer.weights(self.specs(), self.report.parameters);
        let total = self.steps.iter().map(Step::source_bytes).sum();
        let mut done = 0;
        for step in &self.steps {
            for (spec, bytes) in step.outputs().iter().zip(step.run(&pool, &mut kept)?) {
                weights.write(&spec.name, &bytes)?;
            }
            step.release();
            done += step.source_bytes();
            if on_progress(Progress { done, total }).is_break() {
                return Err(ConvertError::Interrupted);
            }
        }
        Ok(Converted { bytes: weights.finish()?, kept, ..self.report.clone() })
    }
}

impl<'a> Planner<'a> {
    fn add(&mut self, taken: &'a Taken) -> Result<(), ConvertError> {
        match taken {
            Taken::Plain { name, tensor } => {
                self.plan.report.parameters += count(&tensor.shape);
                self.copy(name.clone(), tensor);
                Ok(())
            }
            Taken::Weight { path, tensors } => self.add_weight(path, tensors),
        }
    }

    fn copy(&mut self, name: String, tensor: &'a Tensor) {
        let float = FloatType::of(tensor.dtype);
        let dtype = float.and(self.dtype).map_or(tensor.dtype, FloatType::element);
        self.plan.steps.push(Step::Copy { name, tensor, dtype });
    }

    fn add_weight(&mut self, path: &'a str, tensors: &'a WeightTensors) -> Result<(), ConvertError> {
        let (dense, stored, shape) = match tensors {
            WeightTensors::Dense(weight) => {
                let kind = FloatType::of(weight.dtype).ok_or_else(|| ConvertError::NotFloating {
                    tensor: format!("{path}.weight"),
                    dtype: weight.dtype,
                })?;
                (Dense::Stored(weight), kind, weight.shape.clone())
            }
            WeightTensors::Quantized { weight, scales, biases, params } => {
                let unpack = match self.action {
                    Action::Keep => self.adapter.as_ref().is_some_and(|adapter| adapter.contains(path)),
                    Action::Dequantize => true,
                    Action::Quantize { again, .. } => *again,
                };
                if !unpack {
                    return self.keep_packed(path, tensors);
                }
                // mlx-lm casts scales and dequantizes in their type, the float modes in bfloat16.
                let stored = FloatType::of(scales.dtype).unwrap_or(FloatType::Bfloat16);
                let via = match (self.gguf && self.adapter.is_none(), scales.dtype) {
                    (true, _) => FloatType::Float32,
                    (false, ElementType::U8) => FloatType::Bfloat16,
                    (false, _) => self.dtype.unwrap_or(stored),
                };
                let mut shape = weight.shape.clone();
                if let Some(columns) = shape.last_mut() {
                    *columns = columns.saturating_mul(32) / usize::from(params.bits);
                }
                let biases = biases.as_ref();
                (Dense::Packed { weight, scales, biases, params: *params, via }, stored, shape)
            }
        };
        self.plan.report.parameters += count(&shape);
        let dtype = match tensors {
            // mlx-lm leaves what it unpacks from the float modes in bfloat16; only a type asked for changes that.
            WeightTensors::Quantized { params, .. } if !params.mode.has_biases() && !self.gguf => {
                self.asked.unwrap_or(stored)
            }
            _ => self.dtype.unwrap_or(stored),
        };
        let (dense, adapted) = self.adapted(path, dense, &shape)?;
        let params = match tensors {
            WeightTensors::Quantized { params, .. } if adapted && *self.action == Action::Keep => {
                Some(*params)
            }
            _ => self.params(path, &shape),
        };
        let step = match params {
            Some(params) => Step::Pack { path, weight: dense, dtype, params },
            None => Step::Dense { path, weight: dense, dtype },
        };
        self.plan.steps.push(step);
        Ok(())
    }

    /// The numbers with the module's part of the adapter on them, and whether there is one.
    fn adapted(
        &mut self,
        path: &str,
        dense: Dense<'a>,
        shape: &[usize],
    ) -> Result<(Dense<'a>, bool), ConvertError> {
        let (Some(adapter), &[output, input]) = (&mut self.adapter, shape) else { return Ok((dense, false)) };
        let size = |size: usize| i32::try_from(size).unwrap_or(i32::MAX);
        // Where the family has its embedding; all others map a row's length to the number of rows.
        let embedding = path.rsplit('.').next() == Some("embed_tokens");
        let low_rank = match embedding {
            true => adapter.take_embedding(path, size(output), size(input))?,
            false => adapter.take(path, size(input), size(output))?,
        };
        Ok(match low_rank {
            None => (dense, false),
            Some(low_rank) => {
                self.plan.report.fused += 1;
                (Dense::Adapted { base: Box::new(dense), adapter: Box::new(low_rank) }, true)
            }
        })
    }

    /// How a module is to be packed; `None` when it is not.
    fn params(&mut self, path: &str, shape: &[usize]) -> Option<QuantParams> {
        let Action::Quantize { params: default, .. } = self.action else { return None };
        let columns = shape.last().copied().unwrap_or(0);
        let own = self.chooser.choose(path);
        let params = own.unwrap_or(*default);
        // As mlx-lm, the default's group size decides; a module's own has to fit as well.
        if default.groups(columns).is_none() || params.groups(columns).is_none() {
            self.plan.report.undivided.push((path.to_owned(), columns));
            return None;
        }
        if own.is_some() || self.fine_grained {
            self.listed.push((path.to_owned(), params));
        }
        self.plan.report.quantized += 1;
        Some(params)
    }

    fn keep_packed(&mut self, path: &str, tensors: &'a WeightTensors) -> Result<(), ConvertError> {
        if let WeightTensors::Quantized { weight, scales, biases, params } = tensors {
            self.plan.report.parameters += count(&weight.shape).saturating_mul(32) / u64::from(params.bits);
            self.plan.report.left_packed += 1;
            self.copy(format!("{path}.weight"), weight);
            self.copy(format!("{path}.scales"), scales);
            if let Some(biases) = biases {
                self.copy(format!("{path}.biases"), biases);
            }
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Plan<'a>, ConvertError> {
        if let Some(adapter) = self.adapter {
            adapter.finish()?;
        }
        if let Action::Quantize { params, .. } = self.action {
            let mut block = match self.plan.config.remove("quantization") {
                Some(Value::Object(block)) => block,
                _ => quantization_block(*params),
            };
            for (path, params) in self.listed {
                block.insert(path, Value::Object(quantization_block(params)));
            }
            self.plan.config.insert("quantization".to_owned(), json!(block));
        }
        Ok(self.plan)
    }
}

fn count(shape: &[usize]) -> u64 {
    shape.iter().fold(1, |product: u64, &size| product.saturating_mul(size as u64))
}
