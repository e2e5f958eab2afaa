//! Preference objectives against references written from their papers (scripts/oracle/preference.py).

#![allow(clippy::unwrap_used)]

#[path = "support/train.rs"]
mod support;

use std::collections::BTreeMap;

use mlx_bun::mlx::random::RandomState;
use mlx_bun::mlx::{Array, Dtype};
use mlx_bun::train::batches::{Batch, BatchOptions, Batches};
use mlx_bun::train::dataset::{Example, Sequence};
use mlx_bun::train::losses::{Objective, SftScope};
use mlx_bun::train::network::{Gradient, MemoryOptions};
use serde_json::Value;
use support::{Run, choose_kernels, fixtures};

fn ids(length: usize, seed: usize) -> Vec<u32> {
    (0..length).map(|place| ((place * 37 + place * place * 11 + seed * 53) % 317 + 3) as u32).collect()
}

fn pairs() -> Vec<Example> {
    let pair = |row: usize| {
        let prompt = ids(5 + row, row);
        let side = |answer: Vec<u32>| Sequence {
            tokens: prompt.iter().copied().chain(answer).collect(),
            prompt: prompt.len(),
        };
        let sequences = vec![side(ids(4 + row, row + 40)), side(ids(7 - row, row + 80))];
        Example { sequences, fields: 3 }
    };
    (0..3).map(pair).collect()
}

fn factor(path: &str, shape: &[i32]) -> Array {
    let seed: u32 = path.chars().map(|letter| letter as u32).sum();
    let size: i32 = shape.iter().product();
    let values: Vec<f32> =
        (0..size as u32).map(|index| (((index * 7 + seed * 13) % 101) as f32 - 50.0) / 1000.0).collect();
    Array::from_slice(&values, shape).unwrap()
}

fn objectives() -> [(&'static str, Objective); 5] {
    let orpo = |scope| Objective::Orpo { lambda: 0.25, scope };
    [
        ("dpo", Objective::Dpo { beta: 0.1 }),
        ("orpo", orpo(SftScope::Full)),
        ("orpo-response", orpo(SftScope::Response)),
        ("simpo", Objective::Simpo { beta: 2.0, gamma: 1.0 }),
        ("kto", Objective::Kto { beta: 0.1, desirable: 1.5, undesirable: 1.0 }),
    ]
}

fn batch(examples: &[Example], options: BatchOptions) -> Batch {
    Batches::new(examples, &options).unwrap().build(0, examples, &options).unwrap()
}

/// Gradients of a batch by name.
fn gradients(
    checkpoint: &str,
    objective: &Objective,
    batch: &Batch,
    memory: MemoryOptions,
) -> (Gradient, Vec<String>) {
    let mut run = Run { checkpoint: checkpoint.to_owned(), memory, ..Run::default() };
    (run.adapter.rank, run.adapter.scale) = (4, 2.0);
    let loaded = run.load();
    let (network, values) = run.network(&loaded, &mut RandomState::from_seed(0).unwrap());
    let names: Vec<String> = network.parameters().names().map(str::to_owned).collect();
    let values: Vec<Array> =
        names.iter().zip(&values).map(|(name, value)| factor(name, value.shape())).collect();
    (network.gradient(&values, batch, objective, &[]).unwrap(), names)
}

fn scalar(array: &Array) -> f64 {
    f64::from(array.to_f32_vec().unwrap()[0])
}

#[test]
fn losses_and_gradients_are_those_of_the_papers() {
    let expected: BTreeMap<String, Value> =
        serde_json::from_slice(&std::fs::read(fixtures().join("train/preference.json")).unwrap()).unwrap();
    let options = BatchOptions { size: 3, ..Run::default().options.batch };
    let batch = batch(&pairs(), options);
    for ours in [false, true] {
        choose_kernels(ours);
        for (checkpoint, cases) in &expected {
            for (name, objective) in objectives() {
                let case = &cases[name];
                let (found, names) = gradients(checkpoint, &objective, &batch, MemoryOptions::default());
                let near = |a: f64, b: f64, size: f64| (a - b).abs() <= 1e-5 * size.abs().max(1e-3);
                let loss = case["loss"].as_f64().unwrap();
                assert!(near(scalar(&found.values[0]), loss, loss), "{name}: {:?} {loss}", found.values);
                let margin = case["margin"].as_f64().unwrap();
                assert!(near(scalar(&found.values[2]), margin, margin.abs().max(0.1)), "{name}: margin");
                for (path, gradient) in names.iter().zip(&found.gradients) {
                    let sums = &case["gradients"][path.as_str()];
                    let (sum, size) = (sums[0].as_f64().unwrap(), sums[1].as_f64().unwrap());
                    let values = gradient.to_f32_vec().unwrap();
                    let total: f64 = values.iter().map(|value| f64::from(*value)).sum();
                    let magnitudes: f64 = values.iter().map(|value| f64::from(value.abs())).sum();
                    assert!(near(total, sum, size), "{checkpoint}, {name}, {path}: {total} {sum}");
                    assert!(
                        near(magnitudes, size, size),
                        "{checkpoint}, {name}, {path}: {magnitudes} {size}"
                    );
                }
            }
        }
    }
}

/// Every way to save memory gives the loss and the gradients of the plain one, in single precision to the rounding of
/// sums in another order.
#[test]
fn what_saves_memory_changes_nothing() {
    let lone = BatchOptions { size: 1, ..Run::default().options.batch };
    let ways = [
        MemoryOptions { segment: Some(1), head_chunk: None },
        MemoryOptions { segment: Some(2), head_chunk: None },
        MemoryOptions { segment: None, head_chunk: Some(5) },
        MemoryOptions { segment: Some(1), head_chunk: Some(3) },
    ];
    for ours in [false, true] {
        choose_kernels(ours);
        for checkpoint in ["llama-f32", "gemma3_text-f32", "qwen3-4bit"] {
            for (name, objective) in objectives() {
                let plain = batch(&pairs()[..1], lone);
                let (expected, names) = gradients(checkpoint, &objective, &plain, MemoryOptions::default());
                let shared = batch(&pairs()[..1], BatchOptions { prefix_sharing: true, ..lone });
                assert_eq!(shared.shared_prefix, Some(5));
                let packed_weights = checkpoint.ends_with("bit");
                let cases = ways.iter().map(|way| (*way, &plain));
                let shared_ways = [MemoryOptions::default(), ways[1], ways[3]].map(|way| (way, &shared));
                for (memory, batch) in cases.chain(shared_ways) {
                    let (found, _) = gradients(checkpoint, &objective, batch, memory);
                    let place =
                        format!("{checkpoint}, ours {ours}, {name}, {memory:?}, {:?}", batch.shared_prefix);
                    same(&found, &expected, &names, &place, if packed_weights { 0.05 } else { 2e-5 });
                }
            }
        }
    }
}

fn same(found: &Gradient, expected: &Gradient, names: &[String], place: &str, slack: f32) {
    for (a, b) in found.values.iter().zip(&expected.values) {
        let (a, b) = (scalar(a) as f32, scalar(b) as f32);
        assert!((a - b).abs() <= slack * b.abs().max(0.1), "{place}: {a} {b}");
    }
    for ((a, b), name) in found.gradients.iter().zip(&expected.gradients).zip(names) {
        assert_eq!((a.shape(), a.dtype()), (b.shape(), Dtype::Float32));
        let (a, b) = (a.to_f32_vec().unwrap(), b.to_f32_vec().unwrap());
        let largest = b.iter().fold(0f32, |most, value| most.max(value.abs()));
        let apart = a.iter().zip(&b).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(apart <= slack * largest && largest > 0.0, "{place}, {name}: {apart} of {largest}");
    }
}

/// Samples: a batch with masked prompts in every way, and several samples in one row.
#[test]
fn samples_learn_the_same_in_every_way_and_packed() {
    let sample = |index: usize, prompt| {
        let tokens = ids(9 + index * 5, index + 7);
        Example { sequences: vec![Sequence { tokens, prompt }], fields: 2 }
    };
    // Lengths that fill the rows, so that mlx-lm's extra padding token is not part of the comparison.
    let examples = vec![sample(0, 3), sample(1, 0), sample(3, 6)];
    for ours in [false, true] {
        choose_kernels(ours);
        for checkpoint in ["llama-f32", "gemma3_text-f32", "qwen2-f32"] {
            let options = BatchOptions { size: 3, max_length: 24, ..Run::default().options.batch };
            let plain = batch(&examples, options);
            let (expected, names) = gradients(checkpoint, &Objective::Sft, &plain, MemoryOptions::default());
            for memory in [
                MemoryOptions { segment: Some(1), head_chunk: Some(4) },
                MemoryOptions { segment: None, head_chunk: Some(100) },
            ] {
                let (found, _) = gradients(checkpoint, &Objective::Sft, &plain, memory);
                same(&found, &expected, &names, &format!("{checkpoint}, ours {ours}, {memory:?}"), 2e-5);
            }
            // Packed: the mean over the same tokens, computed apart.
            let packed = batch(&examples, BatchOptions { size: 1, max_length: 60, packing: true, ..options });
            let (found, _) = gradients(checkpoint, &Objective::Sft, &packed, MemoryOptions::default());
            let mut tokens = 0.0;
            let mut sum = 0.0;
            for example in &examples {
                let length = example.sequences[0].tokens.len();
                let alone = BatchOptions { size: 1, max_length: length, ..options };
                let alone = batch(std::slice::from_ref(example), alone);
                let (one, _) = gradients(checkpoint, &Objective::Sft, &alone, MemoryOptions::default());
                tokens += alone.tokens as f64;
                sum += scalar(&one.values[0]) * alone.tokens as f64;
            }
            assert_eq!(packed.tokens as f64, tokens);
            let (packed, apart) = (scalar(&found.values[0]), sum / tokens);
            assert!((packed - apart).abs() < 1e-5 * apart, "{checkpoint}, ours {ours}: {packed} {apart}");
        }
    }
}
