//! One tensor or weight on its way from a source to a converted model.

use std::borrow::Cow;
use std::sync::Arc;

use super::convert::ConvertError;
use super::numbers::FloatType;
use super::pack::quantize;
use super::unpack::{dequantize, fake_quantize};
use crate::checkpoint::snapshot_writer::TensorSpec;
use crate::checkpoint::tensor::TensorData;
use crate::checkpoint::{ElementType, QuantParams, Tensor, WeightTensors};
use crate::lora::LowRank;
use crate::mlx::Array;
use crate::mlx::cpu::Pool;

/// What becomes of one of the source's tensors or weights.
#[derive(Debug)]
pub(super) enum Step<'a> {
    /// Stored as it is, floats cast.
    Copy { name: String, tensor: &'a Tensor, dtype: ElementType },
    /// A weight that is stored plainly.
    Dense { path: &'a str, weight: Dense<'a>, dtype: FloatType },
    /// A weight that is packed.
    Pack { path: &'a str, weight: Dense<'a>, dtype: FloatType, params: QuantParams },
}

/// Where the numbers of a weight come from.
#[derive(Debug)]
pub(super) enum Dense<'a> {
    Stored(&'a Tensor),
    Packed {
        weight: &'a Tensor,
        scales: &'a Tensor,
        biases: Option<&'a Tensor>,
        params: QuantParams,
        via: FloatType,
    },
    /// Another's with an adapter on top.
    Adapted {
        base: Box<Dense<'a>>,
        adapter: Box<LowRank>,
    },
}

/// How much of an adapter is left after its weights were packed again.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Kept {
    /// Squared length of all changes.
    asked: f64,
    /// Product of the changes with what became of them.
    along: f64,
    /// Squared length of the difference between the two.
    missed: f64,
}

impl Kept {
    /// The share of the changes that is left, measured along them; 1 when nothing was packed again.
    pub fn fraction(&self) -> f64 {
        if self.asked == 0.0 { 1.0 } else { self.along / self.asked }
    }

    /// Length of the error that packing made of the changes, as a multiple of their own length.
    pub fn error(&self) -> f64 {
        if self.asked == 0.0 { 0.0 } else { (self.missed / self.asked).sqrt() }
    }

    /// Compares a weight before fusing, after it, and after it was packed again.
    fn add(&mut self, dtype: FloatType, before: &[u8], fused: &[u8], packed: &[u8]) {
        let numbers = dtype.decode(before).into_iter().zip(dtype.decode(fused)).zip(dtype.decode(packed));
        for ((before, fused), packed) in numbers {
            let (wanted, got) = (f64::from(fused - before), f64::from(packed - before));
            self.asked += wanted * wanted;
            self.along += wanted * got;
            self.missed += (got - wanted).powi(2);
        }
    }
}

fn owned(bytes: Vec<u8>, dtype: FloatType, shape: Vec<usize>) -> Tensor {
    Tensor { dtype: dtype.element(), shape, data: TensorData::Owned(Arc::new(bytes)) }
}

impl Step<'_> {
    /// The tensors it writes, in order.
    pub(super) fn outputs(&self) -> Vec<TensorSpec> {
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
    pub(super) fn run(&self, pool: &Pool, kept: &mut Kept) -> Result<Vec<Cow<'_, [u8]>>, ConvertError> {
        match self {
            Self::Copy { name, tensor, dtype } => Ok(vec![cast(name, tensor, *dtype)?]),
            Self::Dense { path, weight, dtype } => Ok(vec![weight.numbers(path, *dtype)?]),
            Self::Pack { path, weight, dtype, params } => {
                let numbers = weight.numbers(path, *dtype)?;
                let packed = quantize(&numbers, *dtype, *params, pool)?;
                if let Dense::Adapted { base, .. } = weight {
                    let left = fake_quantize(&numbers, *dtype, &weight.shape(), *params, pool)?;
                    kept.add(*dtype, &base.numbers(path, *dtype)?, &numbers, &left);
                }
                Ok([packed.weight, packed.scales, packed.biases].map(Cow::Owned).into())
            }
        }
    }

    fn sources(&self) -> Vec<&Tensor> {
        match self {
            Self::Copy { tensor, .. } => vec![tensor],
            Self::Dense { weight, .. } | Self::Pack { weight, .. } => weight.sources(),
        }
    }

    pub(super) fn source_bytes(&self) -> u64 {
        self.sources().iter().map(|tensor| tensor.bytes().len() as u64).sum()
    }

    pub(super) fn release(&self) {
        self.sources().iter().for_each(|tensor| tensor.data.release());
    }
}

impl<'a> Dense<'a> {
    /// A weight as it is stored; what is packed is unpacked with scales cast to `via`.
    pub(super) fn of(tensors: &'a WeightTensors, via: FloatType) -> Self {
        match tensors {
            WeightTensors::Dense(weight) => Self::Stored(weight),
            WeightTensors::Quantized { weight, scales, biases, params } => {
                Self::Packed { weight, scales, biases: biases.as_ref(), params: *params, via }
            }
        }
    }
}

impl Dense<'_> {
    /// The numbers in single precision.
    pub(super) fn floats(&self, path: &str) -> Result<Vec<f32>, ConvertError> {
        Ok(FloatType::Float32.decode(&self.numbers(path, FloatType::Float32)?))
    }

    fn sources(&self) -> Vec<&Tensor> {
        match self {
            Self::Stored(tensor) => vec![tensor],
            Self::Packed { weight, scales, biases, .. } => {
                [*weight, *scales].into_iter().chain(*biases).collect()
            }
            Self::Adapted { base, .. } => base.sources(),
        }
    }

    /// The shape when it is not packed.
    pub(super) fn shape(&self) -> Vec<usize> {
        match self {
            Self::Adapted { base, .. } => base.shape(),
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

    /// The type that its numbers are stored in, or unpacked in.
    pub(super) fn kind(&self) -> FloatType {
        match self {
            Self::Stored(tensor) => FloatType::of(tensor.dtype).unwrap_or(FloatType::Float32),
            Self::Packed { via, .. } => *via,
            Self::Adapted { base, .. } => base.kind(),
        }
    }

    /// The numbers as little-endian bytes of type `dtype`.
    pub(super) fn numbers(&self, path: &str, dtype: FloatType) -> Result<Cow<'_, [u8]>, ConvertError> {
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
            Self::Adapted { base, adapter } => {
                let fuse = |numbers: Vec<u8>| {
                    let weight = Array::from_tensor(&owned(numbers, dtype, base.shape()))?;
                    adapter.fuse(&weight)?.to_bytes()
                };
                let numbers = fuse(base.numbers(path, dtype)?.into_owned());
                let numbers =
                    numbers.map_err(|cause| ConvertError::Mlx { module: path.to_owned(), cause })?;
                if !dtype.all_finite(&numbers) {
                    return Err(ConvertError::NotFinite {
                        tensor: format!("{path}.weight with its adapter"),
                    });
                }
                Ok(Cow::Owned(numbers))
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
