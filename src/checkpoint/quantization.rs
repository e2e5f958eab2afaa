//! How a checkpoint's weights are quantized: the config's defaults and overrides, and what the tensors say.
//!
//! The rules are those of `load_model` and `infer_quant_config` in mlx-lm's `utils.py`: an override in the
//! config decides for the module it names; any other module is quantized if it has scales, with the
//! parameters that its shapes imply. Shapes must then fit exactly, where mlx-lm rounds.

use std::collections::HashMap;
use std::path::Path;

use serde_json::{Map, Value};

use super::config::Config;
use super::config_value::{FieldError, as_object, from_value, kind};
use super::error::{CheckpointError, shown_name};
use super::json;
use super::tensor::{ElementType, Tensor};
use crate::mlx::cpu::coding::WORD_BITS;
pub use crate::mlx::cpu::coding::{NoSuchCoding, QuantMode, QuantParams};

/// Why a quantization cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuantizationError {
    /// A field of the config.
    #[error(transparent)]
    Field(#[from] FieldError),
    /// Bits and group size that do not go with the mode.
    #[error(transparent)]
    Sizes(#[from] NoSuchCoding),
    /// Weights in another tool's format.
    #[error(
        "quantization format {} cannot be read; use an unquantized or MLX-quantized checkpoint of this model",
        shown_name(format)
    )]
    UnsupportedFormat {
        /// The format as the config names it.
        format: String,
    },
    /// The config asks for activations to be quantized as well.
    #[error("`quantize_activations` is not supported; set it to false to run with full activations")]
    Activations,
    /// Scales though the config says that nothing is quantized.
    #[error("`{}` has scales but there is no `quantization` in the config", shown_name(module))]
    Undeclared {
        /// The module's path.
        module: String,
    },
    /// The tensors of a module do not fit any quantization, or not the one that the config gives it.
    #[error("`{}`: {problem}", shown_name(module))]
    Tensors {
        /// The module's path.
        module: String,
        /// What does not fit.
        problem: String,
    },
}

/// What a config says about quantization.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quantization {
    /// What most of the model uses; `None` when the config declares no quantization.
    pub default: Option<QuantParams>,
    /// Modules that the config names, by path; `None` is a module that is not quantized.
    pub overrides: HashMap<String, Option<QuantParams>>,
}

impl Quantization {
    /// Reads `quantization`, else `quantization_config`, of a config. `directory` is where NVIDIA's exports
    /// keep theirs in a file of its own, `hf_quant_config.json`.
    ///
    /// # Errors
    /// When a field does not fit, sizes do not exist, or another tool's format is declared: such weights are
    /// never taken for MLX's.
    pub fn from_config(config: &Config, directory: Option<&Path>) -> Result<Self, CheckpointError> {
        let read = || {
            if config.root().get("quantize_activations").is_some_and(|value| *value != Value::Bool(false)) {
                return Err(QuantizationError::Activations);
            }
            match config.root().get("quantization").filter(|value| !value.is_null()) {
                Some(value) => Self::from_mlx(as_object(value, "quantization")?, "quantization"),
                None => config.quantization_config()?.map_or_else(|| Ok(Self::default()), Self::from_legacy),
            }
        };
        let quantization = read()
            .map_err(|cause| CheckpointError::Quantization { origin: config.origin().to_owned(), cause })?;
        if let (None, Some(directory)) = (quantization.default, directory) {
            refuse_modelopt(directory)?;
        }
        Ok(quantization)
    }

    /// The form that mlx-lm writes: defaults, and module paths as further keys.
    fn from_mlx(fields: &Map<String, Value>, name: &str) -> Result<Self, QuantizationError> {
        let mode = mode_of(fields, name)?.unwrap_or(QuantMode::Affine);
        let size = |field: &str| {
            let path = format!("{name}.{field}");
            let value = fields.get(field).ok_or_else(|| FieldError::new(&path, "missing"))?;
            from_value::<u64>(value).map_err(|error| FieldError::new(&path, error.message))
        };
        let default = QuantParams::new(mode, size("bits")?, size("group_size")?)?;
        let overrides = fields
            .iter()
            .filter_map(|(path, value)| {
                let params = match value {
                    Value::Bool(true) => Ok(Some(default)),
                    Value::Bool(false) | Value::Null => Ok(None),
                    // An empty object is false in Python.
                    Value::Object(fields) if fields.is_empty() => Ok(None),
                    Value::Object(fields) => override_params(fields, path, name).map(Some),
                    _ => return None,
                };
                Some(params.map(|params| (path.clone(), params)))
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { default: Some(default), overrides })
    }

    /// `quantization_config`, in which every tool describes its own format.
    fn from_legacy(fields: &Map<String, Value>) -> Result<Self, QuantizationError> {
        const NAME: &str = "quantization_config";
        let Some(method) = fields.get("quant_method").filter(|method| !method.is_null()) else {
            return Self::from_mlx(fields, NAME);
        };
        let unsupported = |format: String| Err(QuantizationError::UnsupportedFormat { format });
        let with_mode = |mode: QuantMode| Self { default: Some(mode.defaults()), overrides: HashMap::new() };
        match method.as_str() {
            Some("mxfp4") => Ok(with_mode(QuantMode::Mxfp4)),
            Some("mxfp8") => Ok(with_mode(QuantMode::Mxfp8)),
            Some(method) => {
                let detail =
                    ["format", "quant_algo", "fmt"].iter().find_map(|name| fields.get(*name)?.as_str());
                unsupported(detail.map_or_else(|| method.to_owned(), |detail| format!("{method} ({detail})")))
            }
            None => {
                let problem = format!("expected a string, found {}", kind(method));
                Err(FieldError::new("quantization_config.quant_method", problem).into())
            }
        }
    }

    /// How the module at `path` is quantized; `None` when it is not. `weight` and `scales` are its tensors,
    /// `columns` the last dimension that its weight has when not quantized.
    ///
    /// # Errors
    /// When the tensors' shapes or types do not fit.
    pub fn for_module(
        &self,
        path: &str,
        weight: &Tensor,
        scales: Option<&Tensor>,
        columns: usize,
    ) -> Result<Option<QuantParams>, QuantizationError> {
        let problem = |problem: String| QuantizationError::Tensors { module: path.to_owned(), problem };
        let (params, scales) = match (self.overrides.get(path), scales) {
            (Some(None), _) | (None, None) => return Ok(None),
            (Some(Some(params)), Some(scales)) => (*params, scales),
            (Some(Some(params)), None) => {
                return Err(problem(format!("the config says {params} but it has no scales")));
            }
            (None, Some(_)) if self.default.is_none() => {
                return Err(QuantizationError::Undeclared { module: path.to_owned() });
            }
            (None, Some(scales)) => (infer(weight, scales, columns).map_err(problem)?, scales),
        };
        if weight.dtype != ElementType::U32 {
            return Err(problem(format!("its weight has dtype {} but packed weights are U32", weight.dtype)));
        }
        let fits = params.packed_columns(columns) == last(weight) && params.groups(columns) == last(scales);
        if !fits {
            return Err(problem(format!(
                "weight {:?} and scales {:?} do not fit {params} with {columns} columns",
                weight.shape, scales.shape
            )));
        }
        if (scales.dtype == ElementType::U8) == params.mode.has_biases() {
            return Err(problem(format!("scales of dtype {} do not fit {params}", scales.dtype)));
        }
        Ok(Some(params))
    }
}

/// Parameters from shapes (mlx-lm `utils.py`, `infer_quant_config`).
fn infer(weight: &Tensor, scales: &Tensor, columns: usize) -> Result<QuantParams, String> {
    let unclear = || {
        format!(
            "weight {:?} and scales {:?} fit no quantization of {columns} columns",
            weight.shape, scales.shape
        )
    };
    let exact = |of: usize, by: usize| (by > 0 && of.is_multiple_of(by)).then(|| of / by);
    let words = last(weight).and_then(|words| words.checked_mul(WORD_BITS)).ok_or_else(unclear)?;
    let groups = last(scales).ok_or_else(unclear)?;
    let bits = exact(words, columns).ok_or_else(unclear)?;
    let group_size = exact(columns, groups).ok_or_else(unclear)?;
    // Only affine keeps its scales in the weight's type, and only it has more than one pair of sizes.
    let mode = match (scales.dtype, bits, group_size) {
        (ElementType::U8, 4, 16) => QuantMode::Nvfp4,
        (ElementType::U8, 4, 32) => QuantMode::Mxfp4,
        (ElementType::U8, 8, 32) => QuantMode::Mxfp8,
        (ElementType::U8, ..) => return Err(unclear()),
        (ElementType::F16 | ElementType::BF16 | ElementType::F32, ..) => QuantMode::Affine,
        (other, ..) => return Err(format!("scales have dtype {other}")),
    };
    QuantParams::new(mode, bits as u64, group_size as u64).map_err(|error| error.to_string())
}

fn last(tensor: &Tensor) -> Option<usize> {
    tensor.shape.last().copied()
}

fn mode_of(fields: &Map<String, Value>, path: &str) -> Result<Option<QuantMode>, FieldError> {
    let Some(value) = fields.get("mode").filter(|value| !value.is_null()) else { return Ok(None) };
    value.as_str().and_then(QuantMode::from_name).map(Some).ok_or_else(|| {
        let found = value.as_str().map_or_else(|| kind(value).to_owned(), |name| format!("`{name}`"));
        FieldError::new(
            &format!("{path}.mode"),
            format!("expected affine, mxfp4, nvfp4 or mxfp8, found {found}"),
        )
    })
}

/// An override: sizes that it leaves out are its mode's defaults, not those of the rest of the model.
fn override_params(
    fields: &Map<String, Value>,
    module: &str,
    name: &str,
) -> Result<QuantParams, QuantizationError> {
    let path = format!("{name}.{module}");
    let mode = mode_of(fields, &path)?.unwrap_or(QuantMode::Affine);
    let defaults = mode.defaults();
    let size = |field: &str, default: u64| match fields.get(field).filter(|value| !value.is_null()) {
        Some(value) => from_value::<u64>(value)
            .map_err(|error| FieldError::new(&format!("{path}.{field}"), error.message)),
        None => Ok(default),
    };
    let bits = size("bits", u64::from(defaults.bits))?;
    let group_size = size("group_size", u64::from(defaults.group_size))?;
    QuantParams::new(mode, bits, group_size)
        .map_err(|error| QuantizationError::Tensors { module: module.to_owned(), problem: error.to_string() })
}

fn refuse_modelopt(directory: &Path) -> Result<(), CheckpointError> {
    const FILE: &str = "hf_quant_config.json";
    let Some(value) = json::read(&directory.join(FILE))? else { return Ok(()) };
    let settings = value.get("quantization").unwrap_or(&value);
    let format = match settings.get("quant_algo").and_then(Value::as_str) {
        Some(algorithm) => format!("modelopt ({algorithm})"),
        None => "modelopt".to_owned(),
    };
    let cause = QuantizationError::UnsupportedFormat { format };
    Err(CheckpointError::Quantization { origin: FILE.to_owned(), cause })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::super::tensor::TensorData;
    use super::*;

    fn quantization(root: Value) -> Result<Quantization, String> {
        let config = Config::from_value(root, "config.json").unwrap();
        Quantization::from_config(&config, None).map_err(|error| error.to_string())
    }

    fn tensor(dtype: ElementType, shape: &[usize]) -> Tensor {
        let size = dtype.bytes_of(shape).unwrap();
        Tensor { dtype, shape: shape.to_vec(), data: TensorData::Owned(Arc::new(vec![0; size])) }
    }

    fn affine(bits: u8, group_size: u32) -> QuantParams {
        QuantParams { bits, group_size, mode: QuantMode::Affine }
    }

    fn module(
        quantization: &Quantization,
        weight: &[usize],
        scales: Option<(ElementType, &[usize])>,
        columns: usize,
    ) -> Result<Option<QuantParams>, String> {
        let scales = scales.map(|(dtype, shape)| tensor(dtype, shape));
        quantization
            .for_module("model.q", &tensor(ElementType::U32, weight), scales.as_ref(), columns)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn defaults_and_overrides_are_read() {
        let read = quantization(json!({"quantization": {
            "group_size": 64, "bits": 4, "a.q": {"bits": 8, "group_size": 32}, "a.k": false, "a.v": true,
            "a.o": {"mode": "mxfp8"}, "a.g": {"bits": 6}, "a.e": {}, "quant_method": "mlx",
        }}))
        .unwrap();
        assert_eq!(read.default, Some(affine(4, 64)));
        let expected = [
            ("a.q", Some(affine(8, 32))),
            ("a.k", None),
            ("a.v", Some(affine(4, 64))),
            ("a.o", Some(QuantMode::Mxfp8.defaults())),
            ("a.g", Some(affine(6, 64))),
            ("a.e", None),
        ];
        assert_eq!(read.overrides, expected.map(|(path, params)| (path.to_owned(), params)).into());
    }

    #[test]
    fn no_quantization_is_none() {
        for root in [json!({}), json!({"quantization": null}), json!({"quantization_config": null})] {
            assert_eq!(quantization(root).unwrap(), Quantization::default());
        }
    }

    #[test]
    fn quantization_config_in_mlx_form_is_read_wherever_it_is() {
        let fields = json!({"bits": 3, "group_size": 128});
        for root in [
            json!({"quantization_config": fields}),
            json!({"text_config": {"quantization_config": fields}}),
            json!({"quantization": fields, "quantization_config": {"quant_method": "awq"}}),
        ] {
            assert_eq!(quantization(root).unwrap().default, Some(affine(3, 128)));
        }
    }

    #[test]
    fn mode_decides_the_sizes() {
        let read = |mode: &str, bits: u64, group: u64| {
            quantization(json!({"quantization": {"mode": mode, "bits": bits, "group_size": group}}))
        };
        for (mode, bits, group) in [("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32), ("affine", 5, 128)]
        {
            assert_eq!(
                read(mode, bits, group).unwrap().default.unwrap().to_string().split(' ').next(),
                Some(mode)
            );
        }
        let error = read("nvfp4", 4, 64).unwrap_err();
        assert!(
            error.contains("nvfp4 quantization with 4 bits in groups of 64")
                && error.contains("groups of 16")
        );
        assert!(read("affine", 7, 64).unwrap_err().contains("2, 3, 4, 5, 6 or 8 bits"));
        assert!(read("affine", 260, 64).unwrap_err().contains("260 bits"));
        assert!(read("int3", 4, 64).unwrap_err().contains("field `quantization.mode`"));
    }

    #[test]
    fn broken_fields_are_named() {
        let error = quantization(json!({"quantization": {"bits": 4}})).unwrap_err();
        assert_eq!(error, "config.json: field `quantization.group_size`: missing");
        let error = quantization(json!({"quantization": 4})).unwrap_err();
        assert!(error.contains("field `quantization`: expected an object, found a number"));
        let odd = json!({"quantization": {"bits": 4, "group_size": 64, "a.q": {"bits": "8"}}});
        assert!(quantization(odd).unwrap_err().contains("field `quantization.a.q.bits`"));
        let odd = json!({"quantization": {"bits": 4, "group_size": 64, "a.q": {"bits": 7}}});
        assert!(quantization(odd).unwrap_err().contains("`a.q`: affine quantization with 7 bits"));
    }

    #[test]
    fn foreign_formats_are_refused_by_name() {
        for (fields, name) in [
            (json!({"quant_method": "awq", "bits": 4, "group_size": 128}), "awq"),
            (json!({"quant_method": "gptq", "bits": 4}), "gptq"),
            (json!({"quant_method": "bitnet"}), "bitnet"),
            (json!({"quant_method": "fp8", "fmt": "e4m3"}), "fp8 (e4m3)"),
            (json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}), "modelopt (NVFP4)"),
        ] {
            let error = quantization(json!({"quantization_config": fields})).unwrap_err();
            assert!(error.starts_with(&format!("config.json: quantization format {name} cannot")), "{error}");
        }
        assert!(
            quantization(json!({"quantization_config": {"quant_method": 1}})).unwrap_err().contains("field")
        );
    }

    #[test]
    fn quantized_activations_are_refused() {
        assert!(quantization(json!({"quantize_activations": true})).is_err());
        assert!(quantization(json!({"quantize_activations": false})).is_ok());
    }

    #[test]
    fn parameters_come_from_the_shapes() {
        let declared = Quantization { default: Some(affine(4, 64)), overrides: HashMap::new() };
        let columns = 384;
        for bits in [2, 3, 4, 5, 6, 8] {
            for group in [32, 64, 128] {
                let weight = [7, columns * bits / 32];
                let scales = [7, columns / group];
                let found = module(&declared, &weight, Some((ElementType::BF16, &scales)), columns);
                assert_eq!(found, Ok(Some(affine(bits as u8, group as u32))));
            }
        }
        for mode in [QuantMode::Mxfp4, QuantMode::Nvfp4, QuantMode::Mxfp8] {
            let params = mode.defaults();
            let weight = [2, 7, columns * usize::from(params.bits) / 32];
            let scales = [2, 7, columns / params.group_size as usize];
            let found = module(&declared, &weight, Some((ElementType::U8, &scales)), columns);
            assert_eq!(found, Ok(Some(params)));
        }
        assert_eq!(module(&declared, &[7, 4], None, 4), Ok(None));
    }

    #[test]
    fn shapes_that_fit_nothing_are_refused() {
        let declared = Quantization { default: Some(affine(4, 64)), overrides: HashMap::new() };
        for (weight, scales, columns) in
            [([7, 33], [7, 4], 256), ([7, 32], [7, 3], 256), ([7, 32], [7, 0], 256), ([7, 32], [7, 4], 0)]
        {
            let error = module(&declared, &weight, Some((ElementType::F16, &scales)), columns).unwrap_err();
            assert!(error.starts_with("`model.q`: weight [7"), "{error}");
        }
        let error = module(&declared, &[7, 56], Some((ElementType::F16, &[7, 4])), 256).unwrap_err();
        assert!(error.contains("7 bits"), "{error}");
        assert!(module(&declared, &[7, 32], Some((ElementType::I32, &[7, 4])), 256).is_err());
        assert!(module(&declared, &[7, 64], Some((ElementType::U8, &[7, 4])), 256).is_err());
    }

    #[test]
    fn overrides_win_and_are_checked() {
        let with = |params| Quantization {
            default: Some(affine(4, 64)),
            overrides: HashMap::from([("model.q".to_owned(), params)]),
        };
        let scales: Option<(ElementType, &[usize])> = Some((ElementType::F32, &[7, 8]));
        assert_eq!(module(&with(Some(affine(8, 32))), &[7, 64], scales, 256), Ok(Some(affine(8, 32))));
        assert_eq!(module(&with(None), &[7, 64], scales, 256), Ok(None));
        assert!(
            module(&with(Some(affine(4, 32))), &[7, 64], scales, 256).unwrap_err().contains("do not fit")
        );
        assert!(module(&with(Some(affine(8, 32))), &[7, 64], None, 256).unwrap_err().contains("no scales"));
        let mode = QuantMode::Mxfp8.defaults();
        assert!(module(&with(Some(mode)), &[7, 64], scales, 256).unwrap_err().contains("dtype F32"));
    }

    #[test]
    fn scales_without_a_declared_quantization_are_an_error() {
        let error = module(&Quantization::default(), &[7, 32], Some((ElementType::F32, &[7, 4])), 256);
        assert!(error.unwrap_err().contains("no `quantization` in the config"));
    }
}
