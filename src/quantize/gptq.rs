//! GPTQ (mlx-lm `quant/gptq.py`; Frantar et al., <https://arxiv.org/abs/2210.17323>): columns are rounded one after the
//! other, and each one's error is made up for by those that are left.

use serde_json::Value;

use super::method::{MethodError, OnStep, Reworked, check_divided, packed};
use super::source::{SourceModel, quantization_block};
use crate::checkpoint::tensor::TensorData;
use crate::checkpoint::{ElementType, QuantParams, Tensor, WeightTensors};
use crate::mlx::cpu::Pool;
use crate::mlx::{self, Array, Compiled, Dtype, eval};
use crate::models::layers::{Head, Linear};

/// Sequences that are run at a time.
const BATCH: i32 = 8;

/// How to quantize.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GptqOptions {
    /// Linear modules; 2, 4 or 8 bits.
    pub params: QuantParams,
    /// All others, the embedding that is.
    pub fallback: QuantParams,
}

/// Quantizes the model with calibration ids `[samples, length]`. Differs from mlx-lm's in the order of its work only:
/// a layer's inputs are kept instead of every module's Hessian.
///
/// # Errors
/// When the model cannot be run or its rows not be divided.
pub fn gptq(
    source: &SourceModel,
    data: &Array,
    options: GptqOptions,
    on_step: OnStep,
) -> Result<Reworked, MethodError> {
    let bits = options.params.bits;
    if ![2, 4, 8].contains(&bits) {
        return Err(MethodError::Bits(bits));
    }
    let (_model, mut pieces) = source.plain_pieces()?;
    let pool = Pool::new(mlx::cpu::pool::default_threads())?;
    let mut reworked = Reworked { quantization: quantization_block(options.params), ..Reworked::default() };
    let error = column_error(bits)?;
    let mut hidden = Vec::new();
    for start in (0..data.dim(0)).step_by(BATCH as usize) {
        let h = pieces.embed(&data.slice(0, start, (start + BATCH).min(data.dim(0)))?)?;
        h.eval()?;
        hidden.push(h);
    }
    let total = pieces.blocks.len() + 1;
    for index in 0..pieces.blocks.len() {
        if on_step(index, total).is_break() {
            return Err(MethodError::Interrupted);
        }
        let mut hessians: [Option<Array>; 4] = [const { None }; 4];
        for h in &mut hidden {
            let Some(block) = pieces.blocks.get(index) else { break };
            let (out, inputs) = block.forward_observed(h, &pieces.mask(index, h)?)?;
            let taken = [inputs.attention, inputs.output, inputs.mlp, inputs.down];
            for (hessian, x) in hessians.iter_mut().zip(taken) {
                *hessian = Some(with_squares(hessian.take(), &x)?);
            }
            eval(hessians.iter().flatten().chain([&out]))?;
            *h = out;
        }
        let hessians = hessians.map(|hessian| hessian.map(|hessian| inverse(&hessian)).transpose());
        let [attention, output, mlp, down] = hessians;
        let (attention, output, mlp, down) = (attention?, output?, mlp?, down?);
        let Some(block) = pieces.blocks.get_mut(index) else { break };
        let of_modules = [&attention, &attention, &attention, &output, &mlp, &mlp, &down];
        for ((name, linear), hessian) in block.linears().into_iter().zip(of_modules) {
            let path = format!("model.layers.{index}.{name}");
            let Some(hessian) = hessian else { continue };
            let new = quantize_module(&path, linear, hessian, options.params, &error)?;
            reworked.weights.insert(path, new);
        }
    }
    if on_step(total - 1, total).is_break() {
        return Err(MethodError::Interrupted);
    }
    if let Head::Linear(lm_head) = &pieces.head {
        let mut hessian = None;
        for h in &hidden {
            let squares = with_squares(hessian.take(), &pieces.norm.forward(h)?)?;
            squares.eval()?;
            hessian = Some(squares);
        }
        if let Some(hessian) = hessian {
            let new = quantize_module("lm_head", lm_head, &inverse(&hessian)?, options.params, &error)?;
            reworked.weights.insert("lm_head".to_owned(), new);
        }
    }
    let embedding = pieces.embed_tokens.weight().unpacked()?;
    let path = "model.embed_tokens";
    check_divided(path, &embedding, options.fallback)?;
    reworked.weights.insert(path.to_owned(), packed(&embedding, options.fallback, &pool)?);
    reworked.quantization.insert(path.to_owned(), Value::Object(quantization_block(options.fallback)));
    let _ = on_step(total, total);
    Ok(reworked)
}

/// The sum so far and the inputs' `x.T @ x`.
fn with_squares(sum: Option<Array>, x: &Array) -> mlx::Result<Array> {
    let x = x.reshape(&[-1, x.dim(-1)])?;
    let squares = x.t()?.matmul(&x)?;
    match sum {
        Some(sum) => sum.add(&squares),
        // A float32 zero in mlx-lm.
        None => Array::scalar(0.0, Dtype::Float32)?.add(&squares),
    }
}

/// Upper Cholesky factor of the inverse of the damped Hessian.
fn inverse(hessian: &Array) -> mlx::Result<Array> {
    let diagonal = hessian.diag()?;
    let damp = Array::scalar(1e-2, Dtype::Float32)?.multiply(&diagonal.mean_all()?)?;
    let damped = hessian.add(&damp.broadcast_to(diagonal.shape())?.diag()?)?;
    let inverse = damped.cholesky(false)?.cholesky_inverse()?.cholesky(true)?;
    inverse.eval()?;
    Ok(inverse)
}

/// What rounding a column makes of it, divided by the factor's diagonal: of `[w, d, scales, biases]`.
fn column_error(bits: u8) -> mlx::Result<Compiled> {
    let largest = ((1u32 << bits) - 1) as f32;
    Compiled::new(
        move |inputs| {
            let (w, d, scales, biases) = (&inputs[0], &inputs[1], &inputs[2], &inputs[3]);
            let code = w.subtract(biases)?.divide(scales)?.round()?.clip(0.0, largest)?;
            let back = scales.multiply(&code)?.add(biases)?;
            Ok(vec![w.subtract(&back)?.divide(d)?])
        },
        false,
    )
}

fn quantize_module(
    path: &str,
    linear: &Linear,
    inverse: &Array,
    params: QuantParams,
    error: &Compiled,
) -> Result<WeightTensors, MethodError> {
    let original = linear.weight().unpacked()?;
    check_divided(path, &original, params)?;
    let mut weight = original.astype(Dtype::Float32)?;
    let (columns, group) = (weight.dim(-1), params.group_size as i32);
    let (mut all_scales, mut all_biases) = (Vec::new(), Vec::new());
    for start in (0..columns).step_by(params.group_size as usize) {
        let end = start + group;
        let mut part = weight.slice(-1, start, end)?;
        let (_, scales, biases) = mlx::quantize(&part, params)?;
        let Some(biases) = biases else { return Err(MethodError::Bits(params.bits)) };
        let factor = inverse.slice(0, start, end)?;
        let mut errors = Vec::new();
        for column in 0..group {
            let row = factor.slice(0, column, column + 1)?;
            let d = row.slice(1, start + column, start + column + 1)?.reshape(&[])?;
            let w = part.slice(-1, column, column + 1)?;
            let e = error.call_one([&w, &d, &scales, &biases])?;
            let rest = part.slice(-1, column, group)?;
            let made_up = e.matmul(&row.slice(1, start + column, end)?)?;
            part = part.slice_update(&rest.subtract(&made_up)?, -1, column)?;
            eval([&e, &part])?;
            errors.push(e);
        }
        weight = weight.slice_update(&part, -1, start)?;
        if end < columns {
            let errors = Array::concatenate(&errors, -1)?;
            let rest = weight.slice(-1, end, columns)?;
            let rest = rest.subtract(&errors.matmul(&factor.slice(1, end, columns)?)?)?;
            weight = weight.slice_update(&rest, -1, end)?;
        }
        weight.eval()?;
        all_scales.push(scales);
        all_biases.push(biases);
    }
    let (scales, biases) = (Array::concatenate(&all_scales, -1)?, Array::concatenate(&all_biases, -1)?);
    let words = pack_with(&weight, &scales, &biases, params)?;
    Ok(WeightTensors::Quantized {
        weight: words,
        scales: scales.astype(original.dtype())?.to_tensor()?,
        biases: Some(biases.astype(original.dtype())?.to_tensor()?),
        params,
    })
}

/// Codes of the nearest multiples, with the scales given.
fn pack_with(weight: &Array, scales: &Array, biases: &Array, params: QuantParams) -> mlx::Result<Tensor> {
    let (rows, columns, group) = (weight.dim(0), weight.dim(1), params.group_size as i32);
    let largest = ((1u32 << params.bits) - 1) as f32;
    let groups = weight.reshape(&[rows, columns / group, group])?;
    let codes = groups.subtract(&biases.expand_dims(-1)?)?.divide(&scales.expand_dims(-1)?)?;
    let codes: Vec<f32> = codes.round()?.clip(0.0, largest)?.to_vec()?;
    let per_byte = usize::from(8 / params.bits);
    let byte = |codes: &[f32]| {
        codes
            .iter()
            .enumerate()
            .fold(0, |byte, (at, code)| byte | (*code as u8) << (at * usize::from(params.bits)))
    };
    let bytes: Vec<u8> = codes.chunks(per_byte).map(byte).collect();
    let shape = vec![rows as usize, columns as usize * usize::from(params.bits) / 32];
    Ok(Tensor { dtype: ElementType::U32, shape, data: TensorData::Owned(std::sync::Arc::new(bytes)) })
}
