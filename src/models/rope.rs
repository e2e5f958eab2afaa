//! Rotary position embeddings in all their variants (mlx-lm's `models/rope_utils.py`).

use std::cell::RefCell;
use std::rc::Rc;

use serde_json::{Map, Value};

use super::ConfigError;
use crate::mlx::cpu_ops::{self, Kernels, Rotation};
use crate::mlx::{Array, DeviceKind, Dtype, Error, Result, default_device, fast};

/// One layer's rotary embedding. Clones share the angles of a step.
#[derive(Clone, Debug)]
pub struct Rope {
    dims: i32,
    traditional: bool,
    kind: Kind,
    /// Our own rotation, where it is used.
    ours: Option<Ours>,
    /// On a CPU, `mx.fast.rope` is composed of some 25 operations, most of which compute the same cosines and
    /// sines again for each layer's queries and keys; here they are computed once a step. `None` where the device
    /// has a kernel of its own.
    angles: Option<Rc<RefCell<Option<Angles>>>>,
}

/// What our kernels rotate with.
#[derive(Clone, Debug)]
struct Ours {
    kernels: Kernels,
    /// `None` where it depends on the length.
    rotation: Option<Rotation>,
}

/// Cosines and sines of some positions.
#[derive(Debug)]
struct Angles {
    key: AngleKey,
    /// `[L, 1, half]`.
    cos: Array,
    /// `[L, 2, half]`: the sines negated for the first half of the features, as they are for the second.
    sin: Array,
    /// Both spread over the shapes `[B, heads, L, 2, half]` that asked for them: the queries' and the keys'.
    spread: Vec<(Array, Array)>,
}

impl Angles {
    /// Cosines and sines in the shape of `pairs`.
    fn spread_over(&mut self, pairs: &Array) -> Result<&(Array, Array)> {
        let found = self.spread.iter().position(|(cos, _)| cos.shape() == pairs.shape());
        let index = match found {
            Some(index) => index,
            None => {
                let shape = pairs.shape();
                self.spread.push((self.cos.broadcast_to(shape)?, self.sin.broadcast_to(shape)?));
                self.spread.len() - 1
            }
        };
        Ok(&self.spread[index])
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AngleKey {
    offset: i32,
    length: i32,
    dtype: Dtype,
    /// Bits of the base; zero with a frequency table, which is the same for all clones.
    base: u32,
    scale: u32,
}

#[derive(Clone, Debug)]
enum Kind {
    /// Fixed base; positions multiplied by `scale` (`nn.RoPE`).
    Base { base: f32, scale: f32 },
    /// Own frequencies, the rotated part of the input multiplied by `input_scale` first.
    Frequencies { freqs: Array, input_scale: Option<f32> },
    /// The base grows with the length once that passes the trained one (`DynamicNTKScalingRoPE`).
    Dynamic { base: f64, factor: f64, max_positions: f64 },
}

/// What `initialize_rope` takes.
pub struct RopeArgs<'a> {
    /// Features rotated.
    pub dims: i32,
    /// `rope_theta`.
    pub base: f64,
    /// Rotate neighbouring features instead of the two halves.
    pub traditional: bool,
    /// `rope_scaling` or `rope_parameters` of the config.
    pub scaling: Option<&'a Map<String, Value>>,
    /// `max_position_embeddings`.
    pub max_positions: Option<i32>,
}

/// The variant's name in a scaling config.
pub fn rope_type(scaling: Option<&Map<String, Value>>) -> &str {
    let named =
        |key| scaling.and_then(|s| s.get(key)).and_then(Value::as_str).filter(|name| !name.is_empty());
    named("type").or_else(|| named("rope_type")).unwrap_or("default")
}

/// Far more than any model has. Angles are made for each before a tensor's shape could contradict.
const MOST_DIMS: i32 = 1 << 14;

impl Rope {
    /// Builds the variant that `args.scaling` names.
    ///
    /// # Errors
    /// An unknown variant, one whose parameters are missing (the message names them), or an absurd or odd width.
    pub fn new(args: &RopeArgs) -> std::result::Result<Self, ConfigError> {
        if !(1..=MOST_DIMS).contains(&args.dims) {
            let text = format!("is {}, and heads have 1 to {MOST_DIMS} features", args.dims);
            return Err(ConfigError::new("head_dim", text));
        }
        if args.dims % 2 != 0 {
            let text =
                format!("is {}, and must be even: rotary embeddings turn features in pairs", args.dims);
            return Err(ConfigError::new("head_dim", text));
        }
        let empty = Map::new();
        let scaling = Scaling(args.scaling.unwrap_or(&empty));
        let kind = match rope_type(args.scaling) {
            "default" => Kind::Base { base: args.base as f32, scale: 1.0 },
            "linear" => {
                Kind::Base { base: args.base as f32, scale: (1.0 / scaling.required("factor")?) as f32 }
            }
            "mrope" => {
                let sections = scaling.0.get("mrope_section").and_then(Value::as_array).map_or(0, Vec::len);
                if sections != 3 {
                    let text = format!("`mrope_section` must have 3 entries, it has {sections}");
                    return Err(ConfigError::new("rope_scaling", text));
                }
                Kind::Base { base: args.base as f32, scale: 1.0 }
            }
            "dynamic" => Kind::Dynamic {
                base: args.base,
                factor: scaling.required("factor")?,
                max_positions: f64::from(args.max_positions.ok_or_else(|| {
                    ConfigError::new("max_position_embeddings", "is needed by rope type `dynamic`")
                })?),
            },
            "llama3" => Kind::Frequencies { freqs: llama3(args, &scaling)?, input_scale: None },
            "yarn" | "deepseek_yarn" | "telechat3-yarn" => yarn(args, &scaling)?,
            "longrope" => longrope(args, &scaling)?,
            "proportional" => Kind::Frequencies { freqs: proportional(args, &scaling)?, input_scale: None },
            other => {
                let text = format!(
                    "rope type `{other}` is not supported (known: default, linear, dynamic, llama3, yarn, \
                     longrope, proportional, mrope)"
                );
                return Err(ConfigError::new("rope_scaling", text));
            }
        };
        // SuScaledRoPE has no traditional form.
        let traditional = args.traditional && rope_type(args.scaling) != "longrope";
        let angles = (default_device() == DeviceKind::Cpu && !traditional).then(Rc::default);
        let mut rope = Self { dims: args.dims, traditional, kind, ours: None, angles };
        if let Some(kernels) = cpu_ops::kernels() {
            let fixed = !matches!(rope.kind, Kind::Dynamic { .. });
            let rotation = if fixed { Some(rope.rotation(0)?) } else { None };
            rope.ours = Some(Ours { kernels, rotation });
        }
        Ok(rope)
    }

    /// Whether the angles change with the length of the sequence.
    pub fn depends_on_length(&self) -> bool {
        matches!(self.kind, Kind::Dynamic { .. })
    }

    /// The rotation of a sequence of `length` positions, as our kernels take it.
    ///
    /// # Errors
    /// An odd number of features, or frequencies that cannot be computed.
    pub fn rotation(&self, length: i32) -> Result<Rotation> {
        match &self.kind {
            Kind::Base { base, scale } => Rotation::from_base(self.dims, *base, *scale, self.traditional),
            Kind::Frequencies { freqs, input_scale } => {
                Rotation::from_freqs(freqs, input_scale.unwrap_or(1.0), self.traditional)
            }
            Kind::Dynamic { base, factor, max_positions } => {
                let base = self.dynamic_base(length, *base, *factor, *max_positions);
                Rotation::from_base(self.dims, base, 1.0, self.traditional)
            }
        }
    }

    /// As [`forward`](Self::forward), of heads that lie beside each other: `[B, L, heads * head_dim]` to
    /// `[B, heads, L, head_dim]`.
    pub fn forward_tokens(&self, x: &Array, heads: i32, offset: i32) -> Result<Array> {
        if let Some(ours) = &self.ours {
            let rotation = self.our_rotation(ours, x.dim(1).saturating_add(offset))?;
            return ours.kernels.rope_tokens(x, heads, &rotation, offset);
        }
        let x = x.reshape(&[x.dim(0), x.dim(1), heads, -1])?.transpose(&[0, 2, 1, 3])?;
        self.forward(&x, offset)
    }

    fn our_rotation(&self, ours: &Ours, length: i32) -> Result<Rotation> {
        ours.rotation.as_ref().map_or_else(|| self.rotation(length), |rotation| Ok(rotation.clone()))
    }

    /// Rotates `x`, `[B, heads, L, head_dim]`, whose first position is `offset`.
    pub fn forward(&self, x: &Array, offset: i32) -> Result<Array> {
        if let Some(ours) = &self.ours {
            let rotation = self.our_rotation(ours, x.dim(-2).saturating_add(offset))?;
            return ours.kernels.rope(x, &rotation, offset);
        }
        match &self.kind {
            Kind::Base { base, scale } => self.rotate(x, Some(*base), *scale, offset, None),
            Kind::Frequencies { freqs, input_scale } => match input_scale {
                None => self.rotate(x, None, 1.0, offset, Some(freqs)),
                Some(factor) => self.rotate(&self.scale_rotated(x, *factor)?, None, 1.0, offset, Some(freqs)),
            },
            Kind::Dynamic { base, factor, max_positions } => {
                let length = x.dim(-2).saturating_add(offset);
                let base = self.dynamic_base(length, *base, *factor, *max_positions);
                self.rotate(x, Some(base), 1.0, offset, None)
            }
        }
    }

    /// As [`forward`](Self::forward) of one position of each row, `[B, heads, 1, head_dim]`, at `offsets`, `int32 [B]`, by
    /// MLX's own rotation; not for angles that depend on the length.
    pub fn forward_at(&self, x: &Array, offsets: &Array) -> Result<Array> {
        let at = |x: &Array, base, scale, freqs| {
            fast::rope_at(x, self.dims, self.traditional, base, scale, offsets, freqs)
        };
        match &self.kind {
            Kind::Base { base, scale } => at(x, Some(*base), *scale, None),
            Kind::Frequencies { freqs, input_scale: None } => at(x, None, 1.0, Some(freqs)),
            Kind::Frequencies { freqs, input_scale: Some(factor) } => {
                at(&self.scale_rotated(x, *factor)?, None, 1.0, Some(freqs))
            }
            Kind::Dynamic { .. } => Err(Error::new("each row has rotary angles of its own length")),
        }
    }

    /// The base for a sequence of `length` positions (`DynamicNTKScalingRoPE`).
    fn dynamic_base(&self, length: i32, base: f64, factor: f64, max_positions: f64) -> f32 {
        let (length, dims) = (f64::from(length).max(max_positions), f64::from(self.dims));
        let growth = (factor * length / max_positions) - (factor - 1.0);
        (base * growth.powf(dims / (dims - 2.0))) as f32
    }

    fn rotate(
        &self,
        x: &Array,
        base: Option<f32>,
        scale: f32,
        offset: i32,
        freqs: Option<&Array>,
    ) -> Result<Array> {
        match &self.angles {
            Some(angles) => self.rotate_shared(x, base, scale, offset, freqs, angles),
            None => fast::rope(x, self.dims, self.traditional, base, scale, offset, freqs),
        }
    }

    /// MLX's own composition (`mlx/fast.cpp`) in fewer operations that give the same bits: of the two halves,
    /// `x1 cos - x2 sin` and `x2 cos + x1 sin` are `pair * cos + swapped * (-sin, sin)`, both halves at once.
    fn rotate_shared(
        &self,
        x: &Array,
        base: Option<f32>,
        scale: f32,
        offset: i32,
        freqs: Option<&Array>,
        shared: &RefCell<Option<Angles>>,
    ) -> Result<Array> {
        let [batch, heads, length, features] = *x.shape() else {
            return Err(Error::new(format!("rope needs four axes, got {x:?}")));
        };
        let key = AngleKey {
            offset,
            length,
            dtype: x.dtype(),
            base: base.map_or(0, f32::to_bits),
            scale: scale.to_bits(),
        };
        let mut shared = shared.borrow_mut();
        let angles = match &mut *shared {
            Some(angles) if angles.key == key => angles,
            other => other.insert(self.angles(key, base, scale, freqs)?),
        };
        let rotated = if self.dims < features { &x.slice(-1, 0, self.dims)? } else { x };
        let pair = rotated.reshape(&[batch, heads, length, 2, self.dims / 2])?;
        let (cos, sin) = angles.spread_over(&pair)?;
        let turned = pair.multiply(cos)?.add(&pair.reverse(3)?.multiply(sin)?)?;
        let turned = turned.reshape(&[batch, heads, length, self.dims])?;
        if self.dims < features {
            return Array::concatenate([&turned, &x.slice(-1, self.dims, features)?], -1);
        }
        Ok(turned)
    }

    fn angles(&self, key: AngleKey, base: Option<f32>, scale: f32, freqs: Option<&Array>) -> Result<Angles> {
        let float = |value| Array::scalar(value, Dtype::Float32);
        let half = self.dims / 2;
        let places = Array::arange(0.0, f64::from(key.length), 1.0, Dtype::Float32)?;
        let positions = places.add(&Array::from_slice(&[key.offset], &[])?)?.multiply(&float(scale)?)?;
        let inverse = match freqs {
            Some(freqs) => freqs.reciprocal()?,
            None => {
                let steps = Array::arange(0.0, f64::from(-half), -1.0, Dtype::Float32)?;
                steps.multiply(&float(base.unwrap_or(1.0).ln() / half as f32)?)?.exp()?
            }
        };
        let theta = positions.expand_dims(-1)?.multiply(&inverse)?;
        let (cos, sin) = (theta.cos()?.astype(key.dtype)?, theta.sin()?.astype(key.dtype)?);
        let (cos, sin) = (cos.expand_dims(1)?, sin.expand_dims(1)?);
        let sin = Array::concatenate([&sin.negative()?, &sin], 1)?;
        Ok(Angles { key, cos, sin, spread: Vec::new() })
    }

    /// `x.at[..., :dims].multiply(factor)`.
    fn scale_rotated(&self, x: &Array, factor: f32) -> Result<Array> {
        if x.dim(-1) == self.dims {
            return x.multiply_scalar(factor);
        }
        x.slice_update(&x.slice(-1, 0, self.dims)?.multiply_scalar(factor)?, -1, 0)
    }
}

/// Scaling parameters by name.
struct Scaling<'a>(&'a Map<String, Value>);

impl Scaling<'_> {
    fn get(&self, key: &str, default: f64) -> f64 {
        self.0.get(key).and_then(Value::as_f64).unwrap_or(default)
    }

    fn required(&self, key: &str) -> std::result::Result<f64, ConfigError> {
        let value = self.0.get(key).and_then(Value::as_f64);
        value.ok_or_else(|| ConfigError::new("rope_scaling", format!("`{key}` is missing or not a number")))
    }

    /// A factor a frequency, or one for all.
    fn factors(&self, key: &str, count: usize) -> std::result::Result<Vec<f32>, ConfigError> {
        let wrong = |text: String| ConfigError::new("rope_scaling", format!("`{key}` {text}"));
        match self.0.get(key) {
            Some(Value::Number(one)) => Ok(vec![one.as_f64().unwrap_or(1.0) as f32; count]),
            Some(Value::Array(list)) if list.len() == count => list
                .iter()
                .map(|value| value.as_f64().map(|value| value as f32))
                .collect::<Option<_>>()
                .ok_or_else(|| wrong("holds something that is not a number".into())),
            Some(Value::Array(list)) => Err(wrong(format!("has {} entries, {count} are needed", list.len()))),
            _ => Err(wrong("is missing".into())),
        }
    }
}

fn scalar(value: f64) -> Result<Array> {
    Array::scalar(value as f32, Dtype::Float32)
}

/// `base ** (arange(0, rotated, 2) / dims)`, float32.
fn powers(base: f64, rotated: i32, dims: i32) -> Result<Array> {
    let exponents =
        Array::arange(0.0, f64::from(rotated), 2.0, Dtype::Float32)?.divide(&scalar(f64::from(dims))?)?;
    scalar(base)?.power(&exponents)
}

fn llama3(args: &RopeArgs, scaling: &Scaling) -> std::result::Result<Array, ConfigError> {
    let factor = scaling.required("factor")?;
    let low = scaling.get("low_freq_factor", 1.0);
    let high = scaling.get("high_freq_factor", 4.0);
    let original = scaling.get("original_max_position_embeddings", 8192.0);
    let build = || -> Result<Array> {
        let (low_wavelen, high_wavelen) = (scalar(original / low)?, scalar(original / high)?);
        let freqs = powers(args.base, args.dims, args.dims)?;
        let wavelens = scalar(2.0 * std::f64::consts::PI)?.multiply(&freqs)?;
        let freqs = wavelens.greater(&low_wavelen)?.select(&freqs.multiply(&scalar(factor)?)?, &freqs)?;
        let medium = wavelens.greater(&high_wavelen)?.bitwise_and(&wavelens.less(&low_wavelen)?)?;
        let smooth =
            scalar(original)?.divide(&wavelens)?.subtract(&scalar(low)?)?.divide(&scalar(high - low)?)?;
        let denominator = scalar(1.0)?.subtract(&smooth)?.divide(&scalar(factor)?)?.add(&smooth)?;
        medium.select(&freqs.divide(&denominator)?, &freqs)
    };
    build().map_err(ConfigError::from)
}

fn yarn(args: &RopeArgs, scaling: &Scaling) -> std::result::Result<Kind, ConfigError> {
    let dims = f64::from(args.dims);
    let factor = scaling.required("factor")?;
    let original = scaling.get("original_max_position_embeddings", 4096.0);
    let correction = |rotations: f64| {
        dims * (original / (rotations * 2.0 * std::f64::consts::PI)).ln() / (2.0 * args.base.ln())
    };
    let low = correction(scaling.get("beta_fast", 32.0)).floor().max(0.0);
    let mut high = correction(scaling.get("beta_slow", 1.0)).ceil().min(dims - 1.0);
    let mscale = |weight: f64| if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 };
    let mscale = mscale(scaling.get("mscale", 1.0)) / mscale(scaling.get("mscale_all_dim", 0.0));
    if low == high {
        high += 0.001; // the reference's guard against division by zero
    }
    let build = || -> Result<Array> {
        let extra = powers(args.base, args.dims, args.dims)?;
        let inter = scalar(factor)?.multiply(&extra)?;
        let steps = Array::arange(0.0, f64::from(args.dims / 2), 1.0, Dtype::Float32)?;
        let ramp = steps.subtract(&scalar(low)?)?.divide(&scalar(high - low)?)?.clip(0.0, 1.0)?;
        let mask = scalar(1.0)?.subtract(&ramp)?;
        let kept = inter.multiply(&mask)?.add(&extra.multiply(&scalar(1.0)?.subtract(&mask)?)?)?;
        inter.multiply(&extra)?.divide(&kept)
    };
    let input_scale = (mscale != 1.0).then_some(mscale as f32);
    Ok(Kind::Frequencies { freqs: build().map_err(ConfigError::from)?, input_scale })
}

fn longrope(args: &RopeArgs, scaling: &Scaling) -> std::result::Result<Kind, ConfigError> {
    let original = scaling.required("original_max_position_embeddings")?;
    let max_positions = args.max_positions.map_or(131_072.0, f64::from);
    let factors = scaling.factors("long_factor", (args.dims as usize).div_ceil(2))?;
    let factor = max_positions / original;
    let input_scale = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original.ln()).sqrt() };
    let build = || {
        Array::from_slice(&factors, &[factors.len() as i32])?
            .multiply(&powers(args.base, args.dims, args.dims)?)
    };
    Ok(Kind::Frequencies {
        freqs: build().map_err(ConfigError::from)?,
        input_scale: Some(input_scale as f32),
    })
}

fn proportional(args: &RopeArgs, scaling: &Scaling) -> std::result::Result<Array, ConfigError> {
    let rotated = (f64::from(args.dims) * scaling.get("partial_rotary_factor", 1.0)) as i32;
    if !(0..=args.dims).contains(&rotated) {
        return Err(ConfigError::new("rope_scaling", "`partial_rotary_factor` must lie in [0, 1]"));
    }
    let factor = scaling.get("factor", 1.0);
    let build = || -> Result<Array> {
        let turning = scalar(factor)?.multiply(&powers(args.base, rotated, args.dims)?)?;
        let still = Array::full(&[(args.dims - rotated) / 2], f32::INFINITY, Dtype::Float32)?;
        Array::concatenate([&turning, &still], 0)
    };
    build().map_err(ConfigError::from)
}

/// The attention scale with yarn's `mscale_all_dim` folded in (`apply_yarn_mscale`).
pub fn apply_yarn_mscale(scale: f32, scaling: Option<&Map<String, Value>>) -> f32 {
    let Some(map) = scaling else { return scale };
    let scaling = Scaling(map);
    let (all_dim, factor) = (scaling.get("mscale_all_dim", 0.0), scaling.get("factor", 1.0));
    if rope_type(Some(map)) == "default" || all_dim == 0.0 || factor <= 1.0 {
        return scale;
    }
    let s = 0.1 * all_dim * factor.ln() + 1.0;
    (f64::from(scale) * s * s) as f32
}
