//! Converts a model on disk: casts, quantizes or dequantizes it module by module (mlx-lm `convert.py`).
//!
//! Tensors are read, changed and written one module at a time, so memory holds the largest module and not the model.

use std::borrow::Cow;
use std::ops::ControlFlow;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::numbers::FloatType;
use super::pack::quantize;
use super::recipe::{Chooser, Predicate, RecipeError};
use super::source::{SourceModel, quantization_block};
use super::unpack::dequantize;
use crate::checkpoint::error::shown_name;
use crate::checkpoint::snapshot_writer::{SnapshotError, SnapshotWriter, TensorSpec};
use crate::checkpoint::{ElementType, QuantParams, Taken, Tensor, WeightTensors};
use crate::mlx;
use crate::mlx::cpu::{Pool, PoolError};

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
    let writer = SnapshotWriter::create(target)?;
    let plan = Plan::new(source, options)?;
    let converted = plan.write(&writer, on_progress)?;
    writer.write_json("config.json", &saved_config(plan.config))?;
    source.copy_files(&writer, repo_id)?;
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

/// What becomes of one of the source's tensors or weights.
#[derive(Debug)]
enum Step<'a> {
    /// Stored as it is, floats cast.
    Copy { name: String, tensor: &'a Tensor, dtype: ElementType },
    /// A weight that is stored plainly.
    Dense { path: &'a str, weight: Dense<'a>, dtype: FloatType },
    /// A weight that is packed.
    Pack { path: &'a str, weight: Dense<'a>, dtype: FloatType, params: QuantParams },
}

/// Where the numbers of a weight come from.
#[derive(Debug)]
enum Dense<'a> {
    Stored(&'a Tensor),
    Packed { weight: &'a Tensor, scales: &'a Tensor, biases: Option<&'a Tensor>, params: QuantParams, via: FloatType },
}

/// A conversion, tensor by tensor.
pub(crate) struct Plan<'a> {
    steps: Vec<Step<'a>>,
    config: Map<String, Value>,
    report: Converted,
}

struct Planner<'a> {
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
    fn new(source: &'a SourceModel, options: &'a ConvertOptions) -> Result<Self, ConvertError> {
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
        let report = Converted { bytes: 0, parameters: 0, quantized: 0, left_packed: 0, undivided: Vec::new() };
        let mut planner = Planner {
            dtype: options.dtype.or_else(|| source.default_dtype()).or(fallback),
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
        Ok(planner.finish())
    }

    fn specs(&self) -> Vec<TensorSpec> {
        self.steps.iter().flat_map(Step::outputs).collect()
    }

    /// Writes the weights.
    fn write(&self, writer: &SnapshotWriter, on_progress: OnProgress) -> Result<Converted, ConvertError> {
        let pool = Pool::new(mlx::cpu::pool::default_threads())?;
        let mut weights = writer.weights(self.specs(), self.report.parameters);
        let total = self.steps.iter().map(Step::source_bytes).sum();
        let mut done = 0;
        for step in &self.steps {
            for (spec, bytes) in step.outputs().iter().zip(step.run(&pool)?) {
                weights.write(&spec.name, &bytes)?;
            }
            step.release();
            done += step.source_bytes();
            if on_progress(Progress { done, total }).is_break() {
                return Err(ConvertError::Interrupted);
            }
        }
        Ok(Converted { bytes: weights.finish()?, ..self.report.clone() })
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
                    Action::Keep => false,
                    Action::Dequantize => true,
                    Action::Quantize { again, .. } => *again,
                };
                if !unpack {
                    return self.keep_packed(path, tensors);
                }
                // mlx-lm casts scales and dequantizes in their type, the float modes in bfloat16.
                let stored = FloatType::of(scales.dtype).unwrap_or(FloatType::Bfloat16);
                let via = match (self.gguf, scales.dtype) {
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
        let dtype = self.dtype.unwrap_or(stored);
        let step = match self.params(path, &shape) {
            Some(params) => Step::Pack { path, weight: dense, dtype, params },
            None => Step::Dense { path, weight: dense, dtype },
        };
        self.plan.steps.push(step);
        Ok(())
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

    fn finish(mut self) -> Plan<'a> {
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
        self.plan
    }
}

fn count(shape: &[usize]) -> u64 {
    shape.iter().fold(1, |product: u64, &size| product.saturating_mul(size as u64))
}

impl Step<'_> {
    /// The tensors it writes, in order.
    fn outputs(&self) -> Vec<TensorSpec> {
        let spec = |name: String, dtype, shape| TensorSpec { name, dtype, shape };
        match self {
            Self::Copy { name, tensor, dtype } => vec![spec(name.clone(), *dtype, tensor.shape.clone())],
            Self::Dense { path, weight, dtype } => {
                vec![spec(format!("{path}.weight"), dtype.element(), weight.shape())]
            }
            Self::Pack { path, weight, dtype, params } => {
                let shape = |columns: Option<usize>| {
                    let mut shape = weight.shape();
                    if let (Some(last), Some(columns)) = (shape.last_mut(), columns) {
                        *last = columns;
                    }
                    shape
                };
                let columns = weight.shape().last().copied().unwrap_or(0);
                let groups = shape(params.groups(columns));
                let scale = if params.mode.has_biases() { dtype.element() } else { ElementType::U8 };
                let weight =
                    spec(format!("{path}.weight"), ElementType::U32, shape(params.packed_columns(columns)));
                let scales = spec(format!("{path}.scales"), scale, groups.clone());
                let biases = spec(format!("{path}.biases"), scale, groups);
                if params.mode.has_biases() { vec![weight, scales, biases] } else { vec![weight, scales] }
            }
        }
    }

    /// The bytes of [`Step::outputs`].
    fn run(&self, pool: &Pool) -> Result<Vec<Cow<'_, [u8]>>, ConvertError> {
        match self {
            Self::Copy { name, tensor, dtype } => Ok(vec![cast(name, tensor, *dtype)?]),
            Self::Dense { path, weight, dtype } => Ok(vec![weight.numbers(path, *dtype)?]),
            Self::Pack { path, weight, dtype, params } => {
                let numbers = weight.numbers(path, *dtype)?;
                let packed = quantize(&numbers, *dtype, *params, pool)?;
                Ok([packed.weight, packed.scales, packed.biases].map(Cow::Owned).into())
            }
        }
    }

    fn sources(&self) -> Vec<&Tensor> {
        match self {
            Self::Copy { tensor, .. } => vec![tensor],
            Self::Dense { weight, .. } | Self::Pack { weight, .. } => match weight {
                Dense::Stored(tensor) => vec![tensor],
                Dense::Packed { weight, scales, biases, .. } => {
                    [*weight, *scales].into_iter().chain(*biases).collect()
                }
            },
        }
    }

    fn source_bytes(&self) -> u64 {
        self.sources().iter().map(|tensor| tensor.bytes().len() as u64).sum()
    }

    fn release(&self) {
        self.sources().iter().for_each(|tensor| tensor.data.release());
    }
}

impl Dense<'_> {
    /// The shape when it is not packed.
    fn shape(&self) -> Vec<usize> {
        match self {
            Self::Stored(tensor) => tensor.shape.clone(),
            Self::Packed { weight, params, .. } => {
                let mut shape = weight.shape.clone();
                if let Some(columns) = shape.last_mut() {
                    *columns = columns.saturating_mul(32) / usize::from(params.bits);
                }
                shape
            }
        }
    }

    /// The numbers as little-endian bytes of type `dtype`.
    fn numbers(&self, path: &str, dtype: FloatType) -> Result<Cow<'_, [u8]>, ConvertError> {
        match self {
            Self::Stored(tensor) => cast(&format!("{path}.weight"), tensor, dtype.element()),
            Self::Packed { weight, scales, biases, params, via } => {
                check_finite(&format!("{path}.scales"), scales)?;
                if let Some(biases) = biases {
                    check_finite(&format!("{path}.biases"), biases)?;
                }
                let (numbers, kind) = dequantize(weight, scales, *biases, *params, *via)
                    .map_err(|cause| ConvertError::Mlx { module: path.to_owned(), cause })?;
                Ok(Cow::Owned(if kind == dtype { numbers } else { kind.cast(&numbers, dtype) }))
            }
        }
    }
}

fn check_finite(name: &str, tensor: &Tensor) -> Result<(), ConvertError> {
    match FloatType::of(tensor.dtype) {
        Some(kind) if !kind.all_finite(tensor.bytes()) => {
            Err(ConvertError::NotFinite { tensor: name.to_owned() })
        }
        _ => Ok(()),
    }
}

fn cast<'a>(name: &str, tensor: &'a Tensor, dtype: ElementType) -> Result<Cow<'a, [u8]>, ConvertError> {
    check_finite(name, tensor)?;
    match (FloatType::of(tensor.dtype), FloatType::of(dtype)) {
        (Some(from), Some(to)) if from != to => {
            let bytes = from.cast(tensor.bytes(), to);
            if !to.all_finite(&bytes) {
                return Err(ConvertError::NotFinite { tensor: name.to_owned() });
            }
            Ok(Cow::Owned(bytes))
        }
        _ => Ok(Cow::Borrowed(tensor.bytes())),
    }
}
