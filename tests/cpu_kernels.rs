//! Models on our CPU kernels: as MLX computes them, and the same whatever shares a step.

#![allow(clippy::unwrap_used)] // a test may panic

use std::ops::ControlFlow;
use std::path::PathBuf;

use mlx_bun::cache::{LayerCache, make_prompt_cache};
use mlx_bun::checkpoint::Checkpoint;
use mlx_bun::generate::step::{KvQuantization, StepOptions, TokenGenerator};
use mlx_bun::mlx::autograd::value_and_grad;
use mlx_bun::mlx::cpu_ops::{self, CpuPrecision, Settings};
use mlx_bun::mlx::{Array, Dtype, Error};
use mlx_bun::models::layers::{Linear, RmsNorm, Weight};
use mlx_bun::models::rope::{Rope, RopeArgs};
use mlx_bun::models::{self, Model};

/// A tiny checkpoint as a model, on our kernels with so many threads or on MLX's.
fn model(name: &str, threads: Option<usize>, precision: CpuPrecision) -> Box<dyn Model> {
    load(name, threads, precision, None)
}

/// The same, computing in float32.
fn wide_model(name: &str, threads: Option<usize>) -> Box<dyn Model> {
    load(name, threads, CpuPrecision::Exact, Some(Dtype::Float32))
}

fn load(
    name: &str,
    threads: Option<usize>,
    precision: CpuPrecision,
    compute_dtype: Option<Dtype>,
) -> Box<dyn Model> {
    match threads {
        Some(_) => cpu_ops::enable(Settings { threads, isa: None, precision }).unwrap(),
        None => cpu_ops::disable(),
    }
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures/checkpoints").join(name);
    let mut checkpoint = Checkpoint::open(&path).unwrap();
    let tensors = checkpoint.take_tensors();
    let model = models::load(&checkpoint.config, tensors, compute_dtype).unwrap();
    cpu_ops::disable();
    model
}

fn ids(rows: i32, length: i32) -> Array {
    let ids: Vec<u32> = (0..rows * length).map(|i| ((i * 37 + 11) % 300) as u32).collect();
    Array::from_slice(&ids, &[rows, length]).unwrap()
}

fn caches(model: &dyn Model, max_kv_size: Option<i32>) -> Vec<LayerCache> {
    make_prompt_cache(model.layer_kinds(), max_kv_size)
}

fn largest_difference(a: &Array, b: &Array) -> f32 {
    let (a, b) = (a.to_f32_vec().unwrap(), b.to_f32_vec().unwrap());
    assert_eq!(a.len(), b.len());
    a.iter().zip(&b).map(|(a, b)| (a - b).abs() / (1.0 + b.abs())).fold(0.0, f32::max)
}

#[test]
fn every_family_computes_as_on_mlx() {
    // In float32 whatever they are stored in: MLX accumulates in the activations' type, which says nothing about ours.
    let names = [
        "llama-f32",
        "llama-bias",
        "llama-quantmix_f32",
        "llama-minicpm5",
        "llama-4bit",
        "qwen2-f32",
        "qwen3-f32",
        "qwen3-8bit",
        "gemma3_text-f32",
        "gemma3_text-bf16",
    ];
    let tolerance = 5e-4;
    for name in names {
        let (ours, stock) = (wide_model(name, Some(2)), wide_model(name, None));
        for max_kv_size in [None, Some(8)] {
            let mut cache = (caches(&*ours, max_kv_size), caches(&*stock, max_kv_size));
            // A prompt, single tokens, then several at once.
            for length in [21, 1, 1, 1, 4, 1] {
                let ids = ids(1, length);
                let found = ours.forward(&ids, Some(&mut cache.0)).unwrap();
                let expected = stock.forward(&ids, Some(&mut cache.1)).unwrap();
                // Fused decoders keep float32 to the end.
                assert_eq!(found.shape(), expected.shape(), "{name}");
                let difference = largest_difference(&found, &expected);
                assert!(difference < tolerance, "{name}, {length} tokens: {difference}");
            }
        }
        let (ids, none) = (ids(2, 9), None::<&mut [LayerCache]>);
        let found = ours.forward(&ids, none).unwrap();
        assert!(
            largest_difference(&found, &stock.forward(&ids, None).unwrap()) < tolerance,
            "{name}, no cache"
        );
    }
}

/// Tokens and log-probabilities of a generation.
fn generated(model: &dyn Model, step: usize, kv_bits: Option<u8>) -> Vec<(u32, Vec<u8>)> {
    let kv_quantization = kv_bits.map(|bits| KvQuantization { bits, group_size: 32, start: 0 });
    let options = StepOptions {
        max_tokens: Some(6),
        prefill_step_size: step,
        kv_quantization,
        ..StepOptions::default()
    };
    let prompt: Vec<u32> = ids(1, 45).to_vec::<u32>().unwrap();
    let mut caches = caches(model, None);
    let mut generator = TokenGenerator::new(model, &mut caches, &prompt, &options).unwrap();
    let mut out = Vec::new();
    while let Some(step) = generator.next().unwrap() {
        out.push((step.token, step.logprobs.to_bytes().unwrap()));
    }
    out
}

#[test]
fn threads_and_prefill_chunks_change_no_bit() {
    for name in ["llama-bf16", "llama-4bit", "qwen3-8bit"] {
        for precision in [CpuPrecision::Exact, CpuPrecision::Int16, CpuPrecision::Int8] {
            let one = generated(&*model(name, Some(1), precision), 2048, None);
            for threads in [2, 3, 8] {
                let model = model(name, Some(threads), precision);
                for step in [1, 7, 32] {
                    assert!(generated(&*model, step, None) == one, "{name}, {precision}, chunks of {step}");
                }
            }
        }
        // A packed cache rounds what is stored, so chunks may differ, threads may not.
        let packed = generated(&*model(name, Some(1), CpuPrecision::Exact), 16, Some(8));
        assert!(generated(&*model(name, Some(8), CpuPrecision::Exact), 16, Some(8)) == packed, "{name}");
    }
}

/// Rows of a batch and positions of one step get the bits that they get alone.
#[test]
fn batches_and_proposals_change_no_bit() {
    for precision in [CpuPrecision::Exact, CpuPrecision::Int16, CpuPrecision::Int8] {
        for name in ["llama-bf16", "llama-4bit", "gemma3_text-4bit", "qwen3-8bit"] {
            let model = model(name, Some(2), precision);
            let ids = ids(3, 12);
            let together = model.forward(&ids, Some(&mut caches(&*model, None))).unwrap();
            let mut cache = caches(&*model, None);
            for row in 0..3 {
                let own = ids.slice(0, row, row + 1).unwrap();
                let alone = model.forward(&own, Some(&mut caches(&*model, None))).unwrap();
                let of_batch = together.slice(0, row, row + 1).unwrap();
                assert!(alone.to_bytes().unwrap() == of_batch.to_bytes().unwrap(), "{name}, {precision}");
            }
            // The whole of row 0 at once, and token by token.
            for position in 0..12 {
                let token = ids.slice(0, 0, 1).unwrap().slice(1, position, position + 1).unwrap();
                let alone = model.forward(&token, Some(&mut cache)).unwrap();
                let proposed = together.slice(0, 0, 1).unwrap().slice(1, position, position + 1).unwrap();
                assert!(alone.to_bytes().unwrap() == proposed.to_bytes().unwrap(), "{name}, {precision}");
            }
        }
    }
}

/// Layers made inside the differentiated function, as training makes them of its parameters.
#[test]
fn gradients_through_layers_are_those_of_mlx() {
    let numbers = |seed: usize, shape: &[i32]| {
        let count = shape.iter().product::<i32>() as usize;
        let number = |i: usize| ((i * 7919 + seed * 104_729) % 1009) as f32 / 1009.0 - 0.5;
        Array::from_slice(&(0..count).map(number).collect::<Vec<_>>(), shape).unwrap()
    };
    let arguments =
        [numbers(1, &[1, 5, 64]), numbers(2, &[64]), numbers(3, &[48, 64]), numbers(4, &[64, 48])];
    let loss = |arguments: &[Array]| {
        let [x, norm, up, down] = arguments else { unreachable!("four arguments are given") };
        let rope = RopeArgs { dims: 16, base: 1e4, traditional: false, scaling: None, max_positions: None };
        let rope = Rope::new(&rope).map_err(|error| Error::new(error.to_string()))?;
        let normed = RmsNorm::new(norm.clone(), 1e-5).forward(x)?;
        let heads = Linear::new(Weight::dense(up.clone())?, None).forward(&normed)?;
        let turned = rope.forward_tokens(&heads, 3, 2)?.transpose(&[0, 2, 1, 3])?.reshape(&[1, 5, 48])?;
        let out = Linear::new(Weight::dense(down.clone())?, None).forward(&turned)?;
        let (sum, normed) = RmsNorm::new(norm.clone(), 1e-5).forward_sum(x, &out)?;
        Ok(vec![sum.square()?.add(&normed)?.reshape(&[-1])?.sum(0, false)?])
    };
    let gradients = |ours: bool| {
        cpu_ops::disable();
        if ours {
            cpu_ops::enable(Settings { threads: Some(2), ..Settings::default() }).unwrap();
        }
        let found = value_and_grad(loss, &[0, 1, 2, 3]).unwrap().call(&arguments).unwrap().1;
        cpu_ops::disable();
        found
    };
    for (ours, stock) in gradients(true).iter().zip(&gradients(false)) {
        assert!(largest_difference(ours, stock) < 1e-4);
    }
}

/// A long chunk of a fused decoder was one evaluation, which nobody could stop.
#[test]
fn a_long_chunk_can_be_stopped_between_its_parts() {
    let model = model("llama-4bit", Some(1), CpuPrecision::Auto);
    let prompt: Vec<u32> = (0..1100).map(|i| (i * 37 + 11) % 300).collect();
    let options = StepOptions { prefill_step_size: 2048, ..StepOptions::default() };
    let mut caches = caches(&*model, None);
    let mut calls = 0;
    let mut generator = TokenGenerator::new(&*model, &mut caches, &prompt, &options).unwrap();
    let stopped = generator.prefill(&mut |done, _| {
        assert_eq!(done, 0);
        calls += 1;
        // Before the chunk, between layers that are computed already, and after the first part.
        if calls > model.layer_kinds().len() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert!(stopped.unwrap().is_break());
    drop(generator);
    assert_eq!(caches[0].offset(), 512);
}
