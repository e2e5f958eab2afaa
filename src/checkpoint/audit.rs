//! The strict audit: a family takes each tensor once, and what is missing, left over or of another shape is
//! an error that names it.

use std::collections::BTreeMap;

use super::error::{CheckpointError, count, shown_name};
use super::quantization::{QuantParams, Quantization, QuantizationError};
use super::tensor::{ElementType, Tensor};

/// Left-over tensors that a message names before it only counts.
const NAMED_LEFTOVERS: usize = 5;

/// Tensors that are not those a family needs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuditError {
    /// A tensor that the family needs is not there.
    #[error("tensor `{}`{} is missing from {weights}", shown_name(tensor), of_shape(shape.as_deref()))]
    Missing {
        /// The tensor.
        tensor: String,
        /// The shape that is needed, when the family knows it.
        shape: Option<Vec<usize>>,
        /// What the tensors were read from.
        weights: String,
    },
    /// A tensor has another shape than the config implies.
    #[error("tensor `{}` of {weights} has shape {found:?}, expected {expected:?}", shown_name(tensor))]
    Shape {
        /// The tensor.
        tensor: String,
        /// Its shape.
        found: Vec<usize>,
        /// The shape that is needed.
        expected: Vec<usize>,
        /// What the tensors were read from.
        weights: String,
    },
    /// A tensor has an element type that cannot serve.
    #[error("tensor `{}` of {weights} has dtype {found}, expected {expected}", shown_name(tensor))]
    Dtype {
        /// The tensor.
        tensor: String,
        /// Its type.
        found: ElementType,
        /// The types that can serve.
        expected: String,
        /// What the tensors were read from.
        weights: String,
    },
    /// Tensors that the family has no use for.
    #[error("{} of {weights} {} not used by family {family}: {}", count(names.len(), "tensor"), verb(names.len()), listed(names))]
    LeftOver {
        /// Their names, sorted.
        names: Vec<String>,
        /// The family.
        family: String,
        /// What the tensors were read from.
        weights: String,
    },
    /// Renaming gave two tensors one name.
    #[error("two tensors of {weights} are both `{}` after renaming", shown_name(tensor))]
    Collision {
        /// The name.
        tensor: String,
        /// What the tensors were read from.
        weights: String,
    },
}

fn of_shape(shape: Option<&[usize]>) -> String {
    shape.map_or_else(String::new, |shape| format!(" (shape {shape:?})"))
}

fn verb(count: usize) -> &'static str {
    if count == 1 { "is" } else { "are" }
}

fn listed(names: &[String]) -> String {
    let named: Vec<_> = names.iter().take(NAMED_LEFTOVERS).map(|name| shown_name(name)).collect();
    match names.len().saturating_sub(NAMED_LEFTOVERS) {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}

/// The tensors of one linear or embedding weight.
#[derive(Clone, Debug)]
pub enum WeightTensors {
    /// A plain weight.
    Dense(Tensor),
    /// A packed weight with its scales, and biases in affine mode.
    Quantized {
        /// Rows of 32-bit words.
        weight: Tensor,
        /// One a group.
        scales: Tensor,
        /// One a group; only in affine mode.
        biases: Option<Tensor>,
        /// How to read them.
        params: QuantParams,
    },
}

/// A tensor, or the tensors of a weight, that a family took.
#[derive(Clone, Debug)]
pub enum Taken {
    /// The weight of a linear or embedding module: what can be quantized.
    Weight {
        /// The module's path; its tensors are `path.weight` and so on.
        path: String,
        /// Its tensors.
        tensors: WeightTensors,
    },
    /// Any other tensor.
    Plain {
        /// Its name.
        name: String,
        /// The tensor.
        tensor: Tensor,
    },
}

/// The tensors of a checkpoint while a family takes them.
///
/// Renaming and dropping (mlx-lm's `sanitize`) come first, then each tensor is taken once, then
/// [`TensorSource::finish`] reports what nobody took.
#[derive(Clone, Debug)]
pub struct TensorSource {
    tensors: BTreeMap<String, Tensor>,
    weights: String,
    origin: String,
    quantization: Quantization,
    taken: Vec<Taken>,
}

impl TensorSource {
    /// `weights` is what messages call the place the tensors come from, `origin` the config.
    pub fn new(
        tensors: BTreeMap<String, Tensor>,
        quantization: Quantization,
        weights: impl Into<String>,
        origin: impl Into<String>,
    ) -> Self {
        Self { tensors, quantization, weights: weights.into(), origin: origin.into(), taken: Vec::new() }
    }

    /// Whether a tensor is there and not taken yet.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// A tensor without taking it.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    /// Names of the tensors that are not taken yet, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Takes a tensor that must have this shape.
    ///
    /// # Errors
    /// When it is missing or has another shape.
    pub fn take(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, AuditError> {
        self.take_optional(name, shape)?.ok_or_else(|| self.missing(name, Some(shape)))
    }

    /// Takes a tensor that may be absent but must have this shape if it is there.
    ///
    /// # Errors
    /// When it has another shape.
    pub fn take_optional(&mut self, name: &str, shape: &[usize]) -> Result<Option<Tensor>, AuditError> {
        let tensor = self.take_part(name, shape)?;
        if let Some(tensor) = &tensor {
            self.taken.push(Taken::Plain { name: name.to_owned(), tensor: tensor.clone() });
        }
        Ok(tensor)
    }

    fn take_part(&mut self, name: &str, shape: &[usize]) -> Result<Option<Tensor>, AuditError> {
        let Some(tensor) = self.tensors.remove(name) else { return Ok(None) };
        if tensor.shape != shape {
            return Err(AuditError::Shape {
                tensor: name.to_owned(),
                found: tensor.shape,
                expected: shape.to_vec(),
                weights: self.weights.clone(),
            });
        }
        Ok(Some(tensor))
    }

    /// Takes a tensor of any shape.
    ///
    /// # Errors
    /// When it is missing.
    pub fn take_any(&mut self, name: &str) -> Result<Tensor, AuditError> {
        let tensor = self.tensors.remove(name).ok_or_else(|| self.missing(name, None))?;
        self.taken.push(Taken::Plain { name: name.to_owned(), tensor: tensor.clone() });
        Ok(tensor)
    }

    /// Takes `path.weight` of a linear or embedding module, with `path.scales` and `path.biases` when it is
    /// quantized. `shape` is the weight's shape when it is not: its last dimension is what gets packed.
    ///
    /// # Errors
    /// When a tensor is missing, or does not fit the shape or any quantization.
    pub fn take_weight(&mut self, path: &str, shape: &[usize]) -> Result<WeightTensors, CheckpointError> {
        let tensors = self.take_weight_parts(path, shape)?;
        self.taken.push(Taken::Weight { path: path.to_owned(), tensors: tensors.clone() });
        Ok(tensors)
    }

    fn take_weight_parts(&mut self, path: &str, shape: &[usize]) -> Result<WeightTensors, CheckpointError> {
        let required = |source: &mut Self, name: &str, shape: &[usize]| {
            source.take_part(name, shape)?.ok_or_else(|| source.missing(name, Some(shape)))
        };
        let (weight_name, scales_name) = (format!("{path}.weight"), format!("{path}.scales"));
        let Some(weight) = self.tensors.get(&weight_name) else {
            return Err(self.missing(&weight_name, Some(shape)).into());
        };
        let Some((&columns, rows)) = shape.split_last() else {
            return Ok(WeightTensors::Dense(required(self, &weight_name, shape)?));
        };
        let scales = self.tensors.get(&scales_name);
        let unreadable = |cause: QuantizationError| CheckpointError::Quantization {
            origin: match cause {
                QuantizationError::Undeclared { .. } => self.origin.clone(),
                _ => self.weights.clone(),
            },
            cause,
        };
        let Some(params) = self.quantization.for_module(path, weight, scales, columns).map_err(unreadable)?
        else {
            return Ok(WeightTensors::Dense(required(self, &weight_name, shape)?));
        };
        // `for_module` has checked both divisions.
        let row_of = |columns: Option<usize>| {
            let mut shape = rows.to_vec();
            shape.extend(columns);
            shape
        };
        let group_shape = row_of(params.groups(columns));
        let weight = required(self, &weight_name, &row_of(params.packed_columns(columns)))?;
        let scales = required(self, &scales_name, &group_shape)?;
        let biases = if params.mode.has_biases() {
            let name = format!("{path}.biases");
            let biases = required(self, &name, &group_shape)?;
            if biases.dtype != scales.dtype {
                return Err(AuditError::Dtype {
                    tensor: name,
                    found: biases.dtype,
                    expected: format!("{} as its scales", scales.dtype),
                    weights: self.weights.clone(),
                }
                .into());
            }
            Some(biases)
        } else {
            None
        };
        Ok(WeightTensors::Quantized { weight, scales, biases, params })
    }

    /// Takes a tensor out without any check; `None` when it is not there.
    pub fn remove(&mut self, name: &str) -> Option<Tensor> {
        self.tensors.remove(name)
    }

    /// Puts a tensor in, replacing any of that name.
    pub fn insert(&mut self, name: impl Into<String>, tensor: Tensor) {
        self.tensors.insert(name.into(), tensor);
    }

    /// Drops the tensors whose name does not pass.
    pub fn retain(&mut self, mut keep: impl FnMut(&str) -> bool) {
        self.tensors.retain(|name, _| keep(name));
    }

    /// Renames tensors; `None` keeps a name.
    ///
    /// # Errors
    /// When two tensors end up with one name.
    pub fn rename(&mut self, mut renamed: impl FnMut(&str) -> Option<String>) -> Result<(), AuditError> {
        for (name, tensor) in std::mem::take(&mut self.tensors) {
            let name = renamed(&name).unwrap_or(name);
            if self.tensors.contains_key(&name) {
                return Err(AuditError::Collision { tensor: name, weights: self.weights.clone() });
            }
            self.tensors.insert(name, tensor);
        }
        Ok(())
    }

    /// What was taken, in the order in which it was taken.
    pub fn taken(&mut self) -> Vec<Taken> {
        std::mem::take(&mut self.taken)
    }

    /// Ends the audit.
    ///
    /// # Errors
    /// When tensors are left that `family` did not take.
    pub fn finish(self, family: &str) -> Result<(), AuditError> {
        if self.tensors.is_empty() {
            return Ok(());
        }
        let names = self.tensors.into_keys().collect();
        Err(AuditError::LeftOver { names, family: family.to_owned(), weights: self.weights })
    }

    fn missing(&self, name: &str, shape: Option<&[usize]>) -> AuditError {
        AuditError::Missing {
            tensor: name.to_owned(),
            shape: shape.map(<[usize]>::to_vec),
            weights: self.weights.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::quantization::QuantMode;
    use super::super::tensor::TensorData;
    use super::*;

    fn source(tensors: &[(&str, ElementType, &[usize])], quantized: bool) -> TensorSource {
        let tensors = tensors.iter().map(|(name, dtype, shape)| {
            let data = TensorData::Owned(Arc::new(vec![0; dtype.bytes_of(shape).unwrap()]));
            ((*name).to_owned(), Tensor { dtype: *dtype, shape: shape.to_vec(), data })
        });
        let default = quantized.then(|| QuantMode::Affine.defaults());
        let quantization = Quantization { default, ..Quantization::default() };
        TensorSource::new(tensors.collect(), quantization, "model.safetensors", "config.json")
    }

    #[test]
    fn taken_tensors_leave_nothing() {
        let mut source = source(&[("a", ElementType::F32, &[2]), ("b", ElementType::F32, &[3, 1])], false);
        assert_eq!(source.take("a", &[2]).unwrap().shape, [2]);
        assert!(source.take_optional("c", &[2]).unwrap().is_none());
        assert_eq!(source.take_any("b").unwrap().shape, [3, 1]);
        let taken = source.taken();
        assert!(
            matches!(&taken[..], [Taken::Plain { name: a, .. }, Taken::Plain { name: b, .. }] if a == "a" && b == "b")
        );
        assert_eq!(source.finish("llama"), Ok(()));
    }

    #[test]
    fn a_tensor_can_be_taken_once() {
        let mut source = source(&[("a", ElementType::F32, &[2])], false);
        source.take("a", &[2]).unwrap();
        assert!(matches!(source.take("a", &[2]), Err(AuditError::Missing { .. })));
    }

    #[test]
    fn missing_and_misshapen_tensors_are_named_with_shapes() {
        let mut source = source(&[("a", ElementType::F32, &[2, 3])], false);
        let error = source.take("a", &[3, 3]).unwrap_err().to_string();
        assert_eq!(error, "tensor `a` of model.safetensors has shape [2, 3], expected [3, 3]");
        let error = source.take("norm.weight", &[64]).unwrap_err().to_string();
        assert_eq!(error, "tensor `norm.weight` (shape [64]) is missing from model.safetensors");
    }

    #[test]
    fn leftovers_are_listed_up_to_five() {
        let names = ["a", "b", "c", "d", "e", "f", "g"].map(|name| (name, ElementType::U8, [1usize]));
        let all: Vec<(&str, ElementType, &[usize])> =
            names.iter().map(|(name, dtype, shape)| (*name, *dtype, shape.as_slice())).collect();
        let message = |count: usize| source(&all[..count], false).finish("llama").unwrap_err().to_string();
        assert_eq!(
            message(7),
            "7 tensors of model.safetensors are not used by family llama: a, b, c, d, e and 2 more"
        );
        assert_eq!(message(2), "2 tensors of model.safetensors are not used by family llama: a, b");
        assert_eq!(message(1), "1 tensor of model.safetensors is not used by family llama: a");
    }

    #[test]
    fn renaming_reports_collisions() {
        let mut source = source(&[("x.a", ElementType::U8, &[1]), ("y.a", ElementType::U8, &[1])], false);
        source.rename(|name| name.strip_prefix("x.").map(str::to_owned)).unwrap();
        assert_eq!(source.names().collect::<Vec<_>>(), ["a", "y.a"]);
        let error = source.rename(|name| name.strip_prefix("y.").map(str::to_owned)).unwrap_err();
        assert!(error.to_string().contains("`a` after renaming"));
    }

    #[test]
    fn quantized_weights_come_with_scales_and_biases() {
        let tensors: &[(&str, ElementType, &[usize])] = &[
            ("q.weight", ElementType::U32, &[8, 24]),
            ("q.scales", ElementType::BF16, &[8, 4]),
            ("q.biases", ElementType::BF16, &[8, 4]),
            ("k.weight", ElementType::BF16, &[8, 128]),
        ];
        let mut source = source(tensors, true);
        let WeightTensors::Quantized { biases, params, .. } = source.take_weight("q", &[8, 128]).unwrap()
        else {
            panic!("q is quantized");
        };
        assert_eq!((params.bits, params.group_size, biases.unwrap().shape), (6, 32, vec![8, 4]));
        assert!(matches!(source.take_weight("k", &[8, 128]), Ok(WeightTensors::Dense(_))));
        let taken = source.taken();
        assert!(
            matches!(&taken[..], [Taken::Weight { path: q, .. }, Taken::Weight { path: k, .. }] if q == "q" && k == "k")
        );
        assert_eq!(source.finish("llama"), Ok(()));
    }

    #[test]
    fn broken_quantized_weights_are_named() {
        let message = |biases: Option<(ElementType, [usize; 2])>, rows: usize, quantized: bool| {
            let mut tensors: Vec<(&str, ElementType, &[usize])> =
                vec![("q.weight", ElementType::U32, &[8, 24]), ("q.scales", ElementType::BF16, &[8, 4])];
            if let Some((dtype, shape)) = &biases {
                tensors.push(("q.biases", *dtype, shape));
            }
            source(&tensors, quantized).take_weight("q", &[rows, 128]).unwrap_err().to_string()
        };
        let good = Some((ElementType::BF16, [8, 4]));
        assert_eq!(
            message(None, 8, true),
            "tensor `q.biases` (shape [8, 4]) is missing from model.safetensors"
        );
        assert!(message(Some((ElementType::F32, [8, 4])), 8, true).contains("dtype F32, expected BF16"));
        assert!(message(Some((ElementType::BF16, [8, 2])), 8, true).contains("has shape [8, 2]"));
        assert!(
            message(good, 9, true)
                .contains("`q.weight` of model.safetensors has shape [8, 24], expected [9, 24]")
        );
        assert!(message(good, 8, false).starts_with("config.json: `q` has scales"));
    }
}
