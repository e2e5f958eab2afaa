//! AWQ (mlx-lm `quant/awq.py`; Lin et al., <https://arxiv.org/abs/2306.00978>): input channels are scaled up before
//! rounding where activations are large, the inverse going into what comes before, and weights are clipped where that
//! makes the module's results more exact.

use std::ops::ControlFlow;

use serde_json::Value;

use super::method::{MethodError, OnStep, Reworked, check_divided, packed, rounded};
use super::source::{SourceModel, quantization_block};
use crate::checkpoint::{QuantMode, QuantParams};
use crate::mlx::cpu::Pool;
use crate::mlx::fast::Mask;
use crate::mlx::{self, Array, Dtype, eval};
use crate::models::layers::{Attention, Context, GatedMlp, Head, Linear, RmsNorm, Weight};
use crate::models::pieces::BlockPieces;

/// Sequences that are run at a time.
const BATCH: i32 = 32;
/// Rows of a weight whose clips are searched at a time.
const CLIP_ROWS: i32 = 64;
/// Inputs that a clip is judged by, at most.
const CLIP_INPUTS: i32 = 512;
/// The smallest clip, as a share of the largest weight.
const MAX_SHRINK: f64 = 0.5;

/// How to quantize.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AwqOptions {
    /// Linear modules of the layers.
    pub params: QuantParams,
    /// The embedding and the head.
    pub embed: QuantParams,
    /// Scales and clips that are tried.
    pub grid: u32,
}

/// What is known of a layer when it is done.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AwqLayer {
    /// Mean squared error of the layer's result when it is rounded as it is.
    pub before: f32,
    /// The same with scales and clips; when it is larger, the layer was rounded as it is.
    pub after: f32,
}

/// Quantizes the model with calibration ids `[samples, length]`. Returns also what it did for each layer.
///
/// # Errors
/// When the model cannot be run or its rows not be divided.
pub fn awq(
    source: &SourceModel,
    data: &Array,
    options: AwqOptions,
    on_step: OnStep,
) -> Result<(Reworked, Vec<AwqLayer>), MethodError> {
    let (_model, pieces) = source.plain_pieces()?;
    let pool = Pool::new(mlx::cpu::pool::default_threads())?;
    // What mlx-lm writes whatever the options are; every module has an entry of its own.
    let default = QuantParams { bits: 4, group_size: 64, mode: QuantMode::Affine };
    let mut reworked = Reworked { quantization: quantization_block(default), ..Reworked::default() };
    let gemma = source.is_gemma();

    let embedding = pieces.embed_tokens.weight().unpacked()?;
    check_divided("model.embed_tokens", &embedding, options.embed)?;
    // Like mlx-lm, of the packed embedding and without the factor that Gemma puts on it.
    let (words, scales, biases) = mlx::quantize(&embedding, options.embed)?;
    let columns = embedding.dim(-1);
    let quantized = Weight::quantized(words, scales, biases, options.embed, columns);
    let mut inputs = pieces.embed_tokens.clone().with_weight(quantized).forward(data)?;
    inputs.eval()?;
    let mask = if data.dim(1) == 1 { Mask::None } else { Mask::Causal };
    insert(&mut reworked, "model.embed_tokens", &embedding, options.embed, &pool)?;

    let mut layers = Vec::new();
    for (index, block) in pieces.blocks.iter().enumerate() {
        if let ControlFlow::Break(()) = on_step(index, pieces.blocks.len()) {
            return Err(MethodError::Interrupted);
        }
        let path = format!("model.layers.{index}");
        for (name, linear) in block.clone().linears() {
            check_divided(&format!("{path}.{name}"), &linear.weight().unpacked()?, options.params)?;
        }
        let (outputs, features) = observe(block, &inputs, &mask)?;
        let mut layer = Layer { block: block.clone(), features, mask: &mask, options, gemma };
        let before = error(&outputs, &run(&layer.rounded()?, &inputs, &mask)?)?;
        layer.scale()?;
        layer.clip()?;
        let after = error(&outputs, &run(&layer.rounded()?, &inputs, &mask)?)?;
        layers.push(AwqLayer { before, after });
        let mut kept = if after > before { block.clone() } else { layer.block };
        if after <= before {
            keep_plain(&mut reworked, &path, block, &kept, gemma)?;
        }
        for (name, linear) in kept.linears() {
            let weight = linear.weight().unpacked()?;
            insert(&mut reworked, &format!("{path}.{name}"), &weight, options.params, &pool)?;
        }
        inputs = outputs;
    }
    if let Head::Linear(lm_head) = &pieces.head {
        let weight = lm_head.weight().unpacked()?;
        check_divided("lm_head", &weight, options.embed)?;
        insert(&mut reworked, "lm_head", &weight, options.embed, &pool)?;
    }
    let _ = on_step(pieces.blocks.len(), pieces.blocks.len());
    Ok((reworked, layers))
}

fn insert(
    reworked: &mut Reworked,
    path: &str,
    weight: &Array,
    params: QuantParams,
    pool: &Pool,
) -> Result<(), MethodError> {
    reworked.weights.insert(path.to_owned(), packed(weight, params, pool)?);
    reworked.quantization.insert(path.to_owned(), Value::Object(quantization_block(params)));
    Ok(())
}

/// Puts the norms and biases that scales went into among what changes.
fn keep_plain(
    reworked: &mut Reworked,
    path: &str,
    before: &BlockPieces,
    after: &BlockPieces,
    gemma: bool,
) -> Result<(), MethodError> {
    let mlp_norm = if gemma { "pre_feedforward_layernorm" } else { "post_attention_layernorm" };
    for (name, norm) in [("input_layernorm", &after.input_norm), (mlp_norm, &after.mlp_norm)] {
        let weight = if gemma { norm.weight().add_scalar(-1.0)? } else { norm.weight().clone() };
        reworked.plain.insert(format!("{path}.{name}.weight"), weight.to_tensor()?);
    }
    if before.mlp.up_proj.bias().is_some()
        && let Some(bias) = after.mlp.up_proj.bias()
    {
        reworked.plain.insert(format!("{path}.mlp.up_proj.bias"), bias.to_tensor()?);
    }
    Ok(())
}

/// Inputs of the linear modules, each `[samples, length, features]`.
struct Features {
    attention: Array,
    output: Array,
    mlp: Array,
    down: Array,
}

struct Layer<'a> {
    block: BlockPieces,
    features: Features,
    mask: &'a Mask,
    options: AwqOptions,
    gemma: bool,
}

/// Runs `forward` on some sequences at a time.
fn in_batches(x: &Array, mut forward: impl FnMut(&Array) -> mlx::Result<Array>) -> mlx::Result<Array> {
    let mut parts = Vec::new();
    for start in (0..x.dim(0)).step_by(BATCH as usize) {
        let part = forward(&x.slice(0, start, (start + BATCH).min(x.dim(0)))?)?;
        part.eval()?;
        parts.push(part);
    }
    Array::concatenate(&parts, 0)
}

fn run(block: &BlockPieces, x: &Array, mask: &Mask) -> mlx::Result<Array> {
    in_batches(x, |x| block.forward(x, mask))
}

fn observe(block: &BlockPieces, x: &Array, mask: &Mask) -> mlx::Result<(Array, Features)> {
    let mut seen: [Vec<Array>; 4] = [const { Vec::new() }; 4];
    let outputs = in_batches(x, |x| {
        let (out, inputs) = block.forward_observed(x, mask)?;
        let inputs = [inputs.attention, inputs.output, inputs.mlp, inputs.down];
        eval(&inputs)?;
        seen.iter_mut().zip(inputs).for_each(|(seen, input)| seen.push(input));
        Ok(out)
    })?;
    let [attention, output, mlp, down] = seen.map(|parts| Array::concatenate(&parts, 0));
    Ok((outputs, Features { attention: attention?, output: output?, mlp: mlp?, down: down? }))
}

/// Sum over both of the squared difference, in single precision.
fn squares(x: &Array, y: &Array) -> mlx::Result<Array> {
    x.subtract(y)?.astype(Dtype::Float32)?.square()
}

fn error(x: &Array, y: &Array) -> mlx::Result<f32> {
    mean(&squares(x, y)?, x.size())
}

fn mean(squares: &Array, count: usize) -> mlx::Result<f32> {
    let sum = squares.sum_all()?.divide(&Array::scalar(count as f32, Dtype::Float32)?)?;
    Ok(sum.to_f32_vec()?.first().copied().unwrap_or(f32::NAN))
}

fn dense(linear: &Linear, weight: Array) -> mlx::Result<Linear> {
    Ok(linear.clone().with_weight(Weight::dense(weight)?))
}

impl Layer<'_> {
    fn rounded(&self) -> mlx::Result<BlockPieces> {
        let mut block = self.block.clone();
        for (_, linear) in block.linears() {
            // As `to_quantized` does it: packed, so that products are those of packed weights.
            let weight = linear.weight().unpacked()?;
            let (words, scales, biases) = mlx::quantize(&weight, self.options.params)?;
            let packed = Weight::quantized(words, scales, biases, self.options.params, weight.dim(-1));
            *linear = linear.clone().with_weight(packed);
        }
        Ok(block)
    }

    /// Searches scales for the inputs of attention, of the down projection, and of the feed-forward part, in this
    /// order, and puts them in.
    fn scale(&mut self) -> mlx::Result<()> {
        let (mask, params, grid) = (self.mask, self.options.params, self.options.grid);
        let attention = self.block.attention.clone();
        let modules = [&attention.q_proj, &attention.k_proj, &attention.v_proj];
        let scales = search_scales(&self.features.attention, &modules, params, grid, |weights, x| {
            let mut attention: Attention = attention.clone();
            if let [q, k, v] = weights {
                attention.q_proj = dense(&attention.q_proj, q.clone())?;
                attention.k_proj = dense(&attention.k_proj, k.clone())?;
                attention.v_proj = dense(&attention.v_proj, v.clone())?;
            }
            attention.forward(x, Context::Together { mask, cache: None })
        })?;
        self.block.input_norm = self.divided(&self.block.input_norm, &scales)?;
        for linear in [
            &mut self.block.attention.q_proj,
            &mut self.block.attention.k_proj,
            &mut self.block.attention.v_proj,
        ] {
            *linear = scaled(linear, &scales)?;
        }
        self.features.attention = self.features.attention.divide(&scales)?;

        let down = self.block.mlp.down_proj.clone();
        let scales =
            search_scales(&self.features.down, &[&down], params, grid, |weights, x| match weights {
                [weight] => dense(&down, weight.clone())?.forward(x),
                _ => down.forward(x),
            })?;
        let up = &self.block.mlp.up_proj;
        let weight = up.weight().unpacked()?.divide(&scales.expand_dims(-1)?)?;
        let bias = up.bias().map(|bias| bias.divide(&scales)).transpose()?;
        self.block.mlp.up_proj = dense(up, weight)?.with_bias(bias);
        self.block.mlp.down_proj = scaled(&down, &scales)?;
        self.features.down = self.features.down.divide(&scales)?;

        let mlp = self.block.mlp.clone();
        let modules = [&mlp.gate_proj, &mlp.up_proj];
        let scales = search_scales(&self.features.mlp, &modules, params, grid, |weights, x| {
            let mut mlp: GatedMlp = mlp.clone();
            if let [gate, up] = weights {
                mlp.gate_proj = dense(&mlp.gate_proj, gate.clone())?;
                mlp.up_proj = dense(&mlp.up_proj, up.clone())?;
            }
            mlp.forward(x)
        })?;
        self.block.mlp_norm = self.divided(&self.block.mlp_norm, &scales)?;
        self.block.mlp.gate_proj = scaled(&mlp.gate_proj, &scales)?;
        self.block.mlp.up_proj = scaled(&mlp.up_proj, &scales)?;
        self.features.mlp = self.features.mlp.divide(&scales)?;
        Ok(())
    }

    /// A norm whose results are divided.
    fn divided(&self, norm: &RmsNorm, scales: &Array) -> mlx::Result<RmsNorm> {
        let weight = norm.weight();
        let weight = if self.gemma {
            // Stored without the one that the family adds, in the model's type.
            let one = Array::scalar(1.0, Dtype::Float32)?;
            let stored = weight.add_scalar(-1.0)?.astype(Dtype::Float32)?;
            let stored = one.add(&stored)?.divide(scales)?.subtract(&one)?.astype(weight.dtype())?;
            stored.add_scalar(1.0)?
        } else {
            weight.divide(scales)?
        };
        Ok(RmsNorm::new(weight, norm.eps()))
    }

    /// Clips the weights of all modules but those of queries and keys.
    fn clip(&mut self) -> mlx::Result<()> {
        let (params, grid) = (self.options.params, self.options.grid);
        for (name, linear) in self.block.linears() {
            let features = match name {
                "self_attn.v_proj" => &self.features.attention,
                "self_attn.o_proj" => &self.features.output,
                "mlp.gate_proj" | "mlp.up_proj" => &self.features.mlp,
                "mlp.down_proj" => &self.features.down,
                _ => continue,
            };
            let weight = clipped(&linear.weight().unpacked()?, features, params, grid)?;
            *linear = dense(linear, weight)?;
        }
        Ok(())
    }
}

fn scaled(linear: &Linear, scales: &Array) -> mlx::Result<Linear> {
    dense(linear, linear.weight().unpacked()?.multiply(scales)?)
}

/// The powers of the inputs' mean size that make the result of `forward` most exact when the modules' scaled weights
/// are rounded (`search_best_scale`).
fn search_scales(
    x: &Array,
    modules: &[&Linear],
    params: QuantParams,
    grid: u32,
    forward: impl Fn(&[Array], &Array) -> mlx::Result<Array>,
) -> mlx::Result<Array> {
    let weights = modules.iter().map(|linear| linear.weight().unpacked()).collect::<mlx::Result<Vec<_>>>()?;
    let out = forward(&weights, x)?;
    let size = x.abs()?.mean(&[0, 1])?;
    let (mut best_error, mut best) = (f32::INFINITY, None);
    for step in 0..grid {
        let ratio = Array::scalar((f64::from(step) / f64::from(grid)) as f32, size.dtype())?;
        let least = Array::scalar(1e-4, size.dtype())?;
        let scales = size.power(&ratio)?.maximum(&least)?.reshape(&[-1])?;
        let middle = scales.max(0, false)?.multiply(&scales.min(0, false)?)?.sqrt()?;
        let scales = scales.divide(&middle)?;
        let mut tried = Vec::new();
        for weight in &weights {
            tried.push(rounded(&weight.multiply(&scales)?, params)?.divide(&scales)?);
        }
        let error = error(&out, &in_batches(x, |x| forward(&tried, x))?)?;
        if error < best_error {
            best_error = error;
            best = Some(scales);
        }
    }
    match best {
        Some(best) => {
            best.eval()?;
            Ok(best)
        }
        None => Array::full(size.shape(), 1.0, size.dtype()),
    }
}

/// The weight with each group clipped where that makes its part of the result most exact (`search_best_clip`).
fn clipped(weight: &Array, features: &Array, params: QuantParams, grid: u32) -> mlx::Result<Array> {
    let group = params.group_size as i32;
    let x = features.reshape(&[-1, features.dim(-1)])?;
    let stride = (x.dim(0) + CLIP_INPUTS - 1) / CLIP_INPUTS;
    let kept: Vec<u32> = (0..x.dim(0)).step_by(stride.max(1) as usize).map(|row| row as u32).collect();
    let x = x.take(&Array::from_slice(&kept, &[kept.len() as i32])?, 0)?;
    let x = x.reshape(&[x.dim(0), -1, group])?;
    let mut limits = Vec::new();
    for start in (0..weight.dim(0)).step_by(CLIP_ROWS as usize) {
        let rows = weight.slice(0, start, (start + CLIP_ROWS).min(weight.dim(0)))?;
        let shape = [rows.dim(0), rows.dim(1) / group, group];
        let w = rows.reshape(&shape)?;
        let out = Array::einsum(c"bdg,odg->bod", [&x, &w])?;
        let largest = w.abs()?.max(-1, true)?;
        let mut best_error = Array::full(&shape[..2], f32::INFINITY, Dtype::Float32)?;
        let mut best_limit = Array::zeros(&[shape[0], shape[1], 1], x.dtype())?;
        for step in 0..(MAX_SHRINK * f64::from(grid)) as u32 {
            let share = (1.0 - f64::from(step) / f64::from(grid)) as f32;
            let limit = largest.multiply_scalar(share)?;
            let cut = w.clip_between(&limit.negative()?, &limit)?.reshape(rows.shape())?;
            let cut = rounded(&cut, params)?.reshape(&shape)?;
            let tried = Array::einsum(c"bdg,odg->bod", [&x, &cut])?;
            let error = squares(&out, &tried)?.sum(0, false)?;
            let error = error.divide(&Array::scalar(out.dim(0) as f32, Dtype::Float32)?)?;
            let better = error.less(&best_error)?;
            best_error = better.select(&error, &best_error)?;
            best_limit = better.expand_dims(-1)?.select(&limit, &best_limit)?;
            eval([&best_limit, &best_error])?;
        }
        limits.push(best_limit);
    }
    let limits = Array::concatenate(&limits, 0)?;
    let groups = weight.reshape(&[weight.dim(0), -1, group])?;
    let best = groups.clip_between(&limits.negative()?, &limits)?.reshape(weight.shape())?;
    best.eval()?;
    Ok(best)
}
