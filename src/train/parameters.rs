//! What is trained: low-rank factors on linear modules (mlx-lm `tuner/utils.py`, `linear_to_lora_layers`), or the
//! weights of the last layers themselves.

use std::collections::BTreeMap;

pub use super::ranks::{AdapterOptions, RankPolicy};
use crate::lora::{AdapterSet, Adapters, Dropout, FittedAdapter, Kind, LowRank, Module};
use crate::mlx::random::{RandomState, uniform_between};
use crate::mlx::{self, Array, Dtype, Result};
use crate::models::layers::Weight;
use crate::models::pieces::Pieces;

/// What is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tuning {
    /// Low-rank factors beside the weights.
    Lora,
    /// Those, and the length of each row of the sum.
    Dora,
    /// The weights themselves.
    Full,
}

impl Tuning {
    /// As mlx-lm writes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lora => "lora",
            Self::Dora => "dora",
            Self::Full => "full",
        }
    }
}

/// What the files of an adapter say of all modules.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdapterShape {
    /// Rank, the largest of all.
    pub rank: i32,
    /// What products are multiplied by.
    pub scale: f64,
}

/// Why a model cannot be trained as asked.
#[derive(Debug, thiserror::Error)]
pub enum ParameterError {
    /// More layers than there are.
    #[error("the model has {layers} layers, and `--num-layers` asks for {wanted}")]
    TooManyLayers {
        /// Asked for.
        wanted: i64,
        /// There are.
        layers: usize,
    },
    /// A key that names nothing.
    #[error(
        "the model has no linear module or embedding `{0}`; keys are paths like `self_attn.q_proj` or `lm_head`"
    )]
    NoModule(String),
    /// Nothing left to train.
    #[error("there is nothing to train: the layers have quantized weights only; use lora or dora")]
    Nothing,
    /// Dropout where it is not defined.
    #[error("dropout on the embedding `{0}` is not supported; set it to 0 or leave the embedding out")]
    EmbeddingDropout(String),
    /// MLX failed.
    #[error(transparent)]
    Mlx(#[from] mlx::Error),
}

/// A module with factors of its own.
#[derive(Clone, Debug)]
struct Target {
    /// Its number in [`Adapters::modules`].
    module: usize,
    path: String,
    kind: Kind,
    rank: i32,
    scale: f32,
}

/// What one trained array is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// Factors and magnitude of a target.
    A(usize),
    B(usize),
    Magnitude(usize),
    /// A weight, a bias or a norm.
    Plain,
}

/// One trained array.
#[derive(Clone, Debug)]
struct Leaf {
    name: String,
    role: Role,
    /// The layer it belongs to; `None` outside of all.
    layer: Option<usize>,
}

/// What is trained, without its values.
#[derive(Clone, Debug)]
pub struct Parameters {
    tuning: Tuning,
    targets: Vec<Target>,
    leaves: Vec<Leaf>,
    adapters: Adapters,
    dropout: f64,
    /// Of a module whose rank is the one that was asked for.
    scale: f64,
}

/// The linear modules of a layer in the order in which they run.
const RUN_ORDER: [&str; 7] = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
];

/// When a module runs: its layer, and its place there.
fn place_of(path: &str) -> (usize, usize) {
    let place = below_layer(path).and_then(|below| RUN_ORDER.iter().position(|name| *name == below));
    (layer_of(path).unwrap_or(usize::MAX), place.unwrap_or(RUN_ORDER.len()))
}

/// The layer of a path.
fn layer_of(path: &str) -> Option<usize> {
    path.strip_prefix("model.layers.")?.split('.').next()?.parse().ok()
}

/// Its rest below the layer.
fn below_layer(path: &str) -> Option<&str> {
    path.strip_prefix("model.layers.")?.split_once('.').map(|(_, rest)| rest)
}

impl Parameters {
    /// Adapters on the last `num_layers` layers (all if it is not positive), and what they begin with: the draws are
    /// those of mlx-lm after `mx.random.seed`.
    ///
    /// # Errors
    /// More layers than there are, or keys that name nothing.
    pub fn adapters(
        tuning: Tuning,
        pieces: &Pieces,
        adapters: &Adapters,
        num_layers: i64,
        options: &AdapterOptions,
        random: &mut RandomState,
    ) -> std::result::Result<(Self, Vec<Array>), ParameterError> {
        let first = first_layer(pieces, num_layers)?;
        let modules = adapters.modules();
        let bits: BTreeMap<String, u8> = pieces
            .weights()
            .into_iter()
            .filter_map(|(path, weight)| Some((path, weight.params()?.bits)))
            .collect();
        let order = in_order(&modules, first, options)?;
        let mut this = Self {
            tuning,
            targets: Vec::new(),
            leaves: Vec::new(),
            adapters: adapters.clone(),
            dropout: options.dropout,
            scale: options.scale_at(f64::from(options.rank)),
        };
        let weights: BTreeMap<String, Weight> = match tuning {
            Tuning::Dora => pieces.weights().into_iter().collect(),
            _ => BTreeMap::new(),
        };
        let mut values = Vec::new();
        for module in order {
            let Module { path, kind } = &modules[module];
            if matches!(kind, Kind::Embedding { .. }) && options.dropout > 0.0 {
                return Err(ParameterError::EmbeddingDropout(path.clone()));
            }
            let rank = options.policy.rank(options.rank, path, bits.get(path).copied());
            let scale = options.scale_at(f64::from(rank));
            let (input, output) = match *kind {
                Kind::Linear { input, output } => (input, output),
                Kind::Embedding { count, dims } => (count, dims),
            };
            let bound = (1.0 / f64::from(input).sqrt()) as f32;
            // mlx-lm first makes a plain layer with a draw of its own, which it then replaces.
            random.next_key()?;
            let a = uniform_between(-bound, bound, &[input, rank], &random.next_key()?)?;
            let target = this.targets.len();
            let layer = layer_of(path);
            let mut push = |name: &str, role, value| {
                this.leaves.push(Leaf { name: format!("{path}.{name}"), role, layer });
                values.push(value);
            };
            push("lora_a", Role::A(target), a);
            push("lora_b", Role::B(target), Array::zeros(&[rank, output], Dtype::Float32)?);
            if let (Tuning::Dora, Some(weight)) = (tuning, weights.get(path)) {
                let rows = weight.unpacked()?;
                let rows = match kind {
                    Kind::Linear { .. } => rows.astype(Dtype::Float32)?,
                    Kind::Embedding { .. } => rows,
                };
                push("m", Role::Magnitude(target), rows.square()?.sum(1, false)?.sqrt()?);
            }
            this.targets.push(Target { module, path: path.clone(), kind: *kind, rank, scale: scale as f32 });
        }
        mlx::eval(&values)?;
        Ok((this, values))
    }

    /// The weights, biases and norms of the last `num_layers` layers (all if it is not positive), quantized ones left
    /// out, and their values.
    ///
    /// # Errors
    /// More layers than there are, or nothing that can be trained in them.
    pub fn full(
        pieces: &Pieces,
        adapters: &Adapters,
        num_layers: i64,
    ) -> std::result::Result<(Self, Vec<Array>), ParameterError> {
        let first = first_layer(pieces, num_layers)?;
        let (mut leaves, mut values) = (Vec::new(), Vec::new());
        visit(&mut pieces.clone(), &mut |name, value| {
            let layer = layer_of(name);
            if layer.is_some_and(|layer| layer >= first) {
                leaves.push(Leaf { name: name.to_owned(), role: Role::Plain, layer });
                values.push(value);
            }
            Ok(None)
        })?;
        if leaves.is_empty() {
            return Err(ParameterError::Nothing);
        }
        mlx::eval(&values)?;
        let adapters = adapters.clone();
        let this =
            Self { tuning: Tuning::Full, targets: Vec::new(), leaves, adapters, dropout: 0.0, scale: 0.0 };
        Ok((this, values))
    }

    /// Nothing: adapters stay as others set them.
    pub fn none() -> Self {
        Self {
            tuning: Tuning::Full,
            targets: Vec::new(),
            leaves: Vec::new(),
            adapters: Adapters::default(),
            dropout: 0.0,
            scale: 0.0,
        }
    }

    /// What is trained.
    pub fn tuning(&self) -> Tuning {
        self.tuning
    }

    /// Names of the arrays, in mlx-lm's files.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.leaves.iter().map(|leaf| leaf.name.as_str())
    }

    /// Rank of each adapted module.
    pub fn ranks(&self) -> impl Iterator<Item = (&str, i32)> {
        self.targets.iter().map(|target| (target.path.as_str(), target.rank))
    }

    /// What the files of the adapter say of all its modules; nothing of whole weights.
    pub fn shape(&self) -> Option<AdapterShape> {
        let rank = self.targets.iter().map(|target| target.rank).max()?;
        Some(AdapterShape { rank, scale: self.scale })
    }

    /// The arrays as files have them, which know one rank and one scale: narrower factors get columns and rows of zeros,
    /// which add nothing, and a scale of their own goes into the second factor.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn exported(&self, values: &[Array]) -> Result<Vec<(String, Array)>> {
        let rank = self.shape().map_or(0, |shape| shape.rank);
        let zeros = |value: &Array, shape: [i32; 2], axis| match shape[axis as usize] {
            0 => Ok(value.clone()),
            _ => Array::concatenate([value, &Array::zeros(&shape, value.dtype())?], axis),
        };
        let whole = |leaf: &Leaf, value: &Array| match leaf.role {
            Role::A(target) => {
                let missing = rank - self.targets.get(target).map_or(rank, |target| target.rank);
                zeros(value, [value.dim(0), missing], 1)
            }
            Role::B(target) => {
                let Some(target) = self.targets.get(target) else { return Ok(value.clone()) };
                let scaled = match self.scale as f32 {
                    scale if scale == target.scale || scale == 0.0 => value.clone(),
                    _ => value.multiply_scalar((f64::from(target.scale) / self.scale) as f32)?,
                };
                zeros(&scaled, [rank - target.rank, value.dim(1)], 0)
            }
            Role::Magnitude(_) | Role::Plain => Ok(value.clone()),
        };
        let named = self.leaves.iter().zip(values);
        named.map(|(leaf, value)| Ok((leaf.name.clone(), whole(leaf, value)?))).collect()
    }

    /// Whether each array is a second factor, which LoRA+ trains faster.
    pub fn second_factors(&self) -> impl Iterator<Item = bool> {
        self.leaves.iter().map(|leaf| matches!(leaf.role, Role::B(_)))
    }

    /// Whether anything outside of the layers is trained: the embedding or the head.
    pub fn outside_layers(&self) -> bool {
        self.leaves.iter().any(|leaf| leaf.layer.is_none())
    }

    /// One more than the last layer that is trained.
    pub fn layer_count(&self) -> usize {
        self.leaves.iter().filter_map(|leaf| leaf.layer).max().map_or(0, |last| last + 1)
    }

    /// Numbers of the arrays of some layers; without a range of those outside of all.
    pub fn of_layers(&self, layers: Option<std::ops::Range<usize>>) -> Vec<usize> {
        let belongs = |leaf: &Leaf| match (&layers, leaf.layer) {
            (Some(layers), Some(layer)) => layers.contains(&layer),
            (None, None) => true,
            _ => false,
        };
        self.leaves.iter().enumerate().filter(|(_, leaf)| belongs(leaf)).map(|(index, _)| index).collect()
    }

    /// Draws the keys of a step's dropout, one a target; none without dropout. They are those that mlx-lm draws: one a
    /// module in the order in which modules run.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn dropout_keys(&self, random: &mut RandomState) -> Result<Vec<Array>> {
        if self.dropout <= 0.0 {
            return Ok(Vec::new());
        }
        let mut keys: Vec<Option<Array>> = vec![None; self.targets.len()];
        let mut order: Vec<usize> = (0..self.targets.len()).collect();
        order.sort_by_key(|&target| place_of(&self.targets[target].path));
        for target in order {
            keys[target] = Some(random.next_key()?);
        }
        mlx::eval(keys.iter().flatten())?;
        Ok(keys.into_iter().flatten().collect())
    }

    /// The pieces with the arrays numbered `indices` in them. Adapters apply to all pieces of the model from now on,
    /// until others are applied or [`detach`](Self::detach) is called.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn apply(
        &self,
        pieces: &Pieces,
        indices: &[usize],
        values: &[Array],
        dropout_keys: &[Array],
    ) -> Result<Pieces> {
        if self.tuning == Tuning::Full {
            let given: BTreeMap<&str, &Array> = indices
                .iter()
                .zip(values)
                .map(|(&index, value)| (self.leaves[index].name.as_str(), value))
                .collect();
            let mut pieces = pieces.clone();
            visit(&mut pieces, &mut |name, _| Ok(given.get(name).copied().cloned()))?;
            return Ok(pieces);
        }
        let mut parts: BTreeMap<usize, [Option<&Array>; 3]> = BTreeMap::new();
        for (&index, value) in indices.iter().zip(values) {
            let (target, part) = match self.leaves[index].role {
                Role::A(target) => (target, 0),
                Role::B(target) => (target, 1),
                Role::Magnitude(target) => (target, 2),
                Role::Plain => continue,
            };
            parts.entry(target).or_default()[part] = Some(value);
        }
        let low_rank = |(target, [a, b, magnitude]): (usize, [Option<&Array>; 3])| {
            let Target { module, kind, scale, .. } = &self.targets[target];
            let dropout =
                dropout_keys.get(target).map(|key| Dropout { probability: self.dropout, key: key.clone() });
            let part = LowRank {
                a: a?.clone(),
                b: b?.clone(),
                scale: *scale,
                magnitude: magnitude.cloned(),
                embedding: matches!(kind, Kind::Embedding { .. }),
                dropout,
            };
            Some((*module, part))
        };
        let fitted = FittedAdapter::from_parts(parts.into_iter().filter_map(low_rank));
        let set = AdapterSet::new(vec![std::rc::Rc::new(fitted)])
            .map_err(|error| mlx::Error::new(error.to_string()))?;
        self.adapters.activate(&set);
        Ok(pieces.clone())
    }

    /// Takes adapters off the model.
    pub fn detach(&self) {
        self.adapters.activate(&AdapterSet::default());
    }
}

fn first_layer(pieces: &Pieces, num_layers: i64) -> std::result::Result<usize, ParameterError> {
    let layers = pieces.blocks.len();
    if num_layers <= 0 {
        return Ok(0);
    }
    usize::try_from(num_layers)
        .ok()
        .and_then(|wanted| layers.checked_sub(wanted))
        .ok_or(ParameterError::TooManyLayers { wanted: num_layers, layers })
}

/// The modules to adapt in mlx-lm's order: layers upwards, within a layer the last first; then those outside.
fn in_order(
    modules: &[Module],
    first: usize,
    options: &AdapterOptions,
) -> std::result::Result<Vec<usize>, ParameterError> {
    let wanted = |path: &str| match &options.keys {
        None => below_layer(path).is_some(),
        Some(keys) => keys.iter().any(|key| key == below_layer(path).unwrap_or(path) || key == path),
    };
    if let Some(keys) = &options.keys {
        let known = |key: &&String| {
            modules
                .iter()
                .any(|module| module.path == **key || below_layer(&module.path) == Some(key.as_str()))
        };
        if let Some(key) = keys.iter().find(|key| !known(key)) {
            return Err(ParameterError::NoModule(key.clone()));
        }
    }
    let mut chosen: Vec<usize> = (0..modules.len()).filter(|&index| wanted(&modules[index].path)).collect();
    chosen.retain(|&index| layer_of(&modules[index].path).is_none_or(|layer| layer >= first));
    chosen.sort_by_key(|&index| {
        (layer_of(&modules[index].path).unwrap_or(usize::MAX), std::cmp::Reverse(index))
    });
    Ok(chosen)
}

/// Offers every plain array of the layers, by mlx-lm's name, and puts back what `change` returns.
fn visit(pieces: &mut Pieces, change: &mut dyn FnMut(&str, Array) -> Result<Option<Array>>) -> Result<()> {
    for (index, block) in pieces.blocks.iter_mut().enumerate() {
        for (name, linear) in block.linears() {
            let path = format!("model.layers.{index}.{name}");
            if linear.weight().params().is_none()
                && let Some(new) = change(&format!("{path}.weight"), linear.weight().unpacked()?)?
            {
                *linear = linear.clone().with_weight(Weight::dense(new)?);
            }
            if linear.weight().params().is_none()
                && let Some(bias) = linear.bias().cloned()
                && let Some(new) = change(&format!("{path}.bias"), bias)?
            {
                *linear = linear.clone().with_bias(Some(new));
            }
        }
    }
    pieces.visit_norms(&mut |path, norm| match change(&format!("{path}.weight"), norm.stored().clone())? {
        Some(new) => norm.with_stored(new),
        None => Ok(norm.clone()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_adapted_in_mlx_lms_order() {
        let linear =
            |path: &str| Module { path: path.to_owned(), kind: Kind::Linear { input: 2, output: 2 } };
        let modules: Vec<_> = [
            "model.embed_tokens",
            "model.layers.0.q",
            "model.layers.0.k",
            "model.layers.1.q",
            "model.layers.1.k",
            "lm_head",
        ]
        .map(linear)
        .into();
        let options = |keys: Option<&[&str]>| AdapterOptions {
            rank: 8,
            policy: RankPolicy::Constant,
            scale: 1.0,
            rank_stabilized: false,
            dropout: 0.0,
            keys: keys.map(|keys| keys.iter().map(|&key| key.to_owned()).collect()),
        };
        assert_eq!(in_order(&modules, 0, &options(None)).unwrap(), [2, 1, 4, 3]);
        assert_eq!(in_order(&modules, 1, &options(None)).unwrap(), [4, 3]);
        assert_eq!(in_order(&modules, 1, &options(Some(&["q", "lm_head"]))).unwrap(), [3, 5]);
        assert!(in_order(&modules, 0, &options(Some(&["v"]))).is_err());
    }
}
