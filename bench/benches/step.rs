//! Time of what happens at every token beside the model: sampling, the kernel of log-probabilities, the scheduler's
//! decisions; and of a whole step of a tiny model, whose arithmetic hardly counts. The products and attention have
//! programs of their own: `cargo bench --bench cpu_matmul` and `--bench cpu_attention`.
//!
//! `cargo bench -p mlx-bun-bench --bench step`

#![allow(
    clippy::unwrap_used,
    missing_docs,
    reason = "a program for the terminal; criterion's macros have no docs"
)]

use std::hint::black_box;
use std::path::{Path, PathBuf};

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use mlx_bun::cache::make_prompt_cache;
use mlx_bun::checkpoint::source::ModelSource;
use mlx_bun::generate::sequence::{self, Sequence};
use mlx_bun::generate::step::StepOptions;
use mlx_bun::load::load;
use mlx_bun::mlx::cpu_ops::{self, Settings};
use mlx_bun::mlx::random::RandomState;
use mlx_bun::mlx::{Array, eval};
use mlx_bun::sampling::{MinP, Sampler, SamplingParams};
use mlx_bun::scheduler::RequestId;
use mlx_bun::scheduler::policy::{Bounds, Demand, Policy, Work};

const VOCABULARY: i32 = 32_000;

/// Logits that are neither flat nor all the same, `[1, V]`.
fn logits() -> Array {
    let values: Vec<f32> = (0..VOCABULARY).map(|id| ((id * 7919 % 1009) as f32) / 50.0 - 10.0).collect();
    Array::from_slice(&values, &[1, VOCABULARY]).unwrap()
}

fn samplers(criterion: &mut Criterion) {
    let logits = logits();
    let logprobs = logits.subtract(&logits.logsumexp_all(true).unwrap()).unwrap();
    eval([&logprobs]).unwrap();
    let plain = SamplingParams { temperature: 0.7, ..SamplingParams::default() };
    let chain = [
        ("greedy", SamplingParams::default()),
        ("temperature", plain.clone()),
        ("top-k", SamplingParams { top_k: 40, ..plain.clone() }),
        ("top-p", SamplingParams { top_p: 0.9, ..plain.clone() }),
        ("min-p", SamplingParams { min_p: Some(MinP { p: 0.05, min_tokens_to_keep: 1 }), ..plain.clone() }),
    ];
    let mut group = criterion.benchmark_group("sampler");
    for (name, params) in chain {
        let sampler = Sampler::new(&params, VOCABULARY).unwrap();
        let mut random = RandomState::from_seed(0).unwrap();
        group.bench_function(name, |bencher| {
            bencher.iter(|| sampler.sample(black_box(&logprobs), &mut random).unwrap().item_u32().unwrap());
        });
    }
    group.finish();
}

fn kernels(criterion: &mut Criterion) {
    cpu_ops::enable(Settings::default()).unwrap();
    let Some(kernels) = cpu_ops::kernels() else { return };
    let logits = logits();
    criterion.bench_function("kernel/log-probabilities", |bencher| {
        bencher.iter(|| eval([&kernels.log_probabilities(black_box(&logits)).unwrap()]).unwrap());
    });
}

fn steps(criterion: &mut Criterion) {
    cpu_ops::enable(Settings::default()).unwrap();
    let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/checkpoints/llama-bf16");
    let loaded = load(&ModelSource::Snapshot(path)).unwrap();
    let model = &*loaded.model;
    let options = StepOptions { max_tokens: None, ..StepOptions::default() };
    let mut group = criterion.benchmark_group("decode-step");
    for batch in [1, 4] {
        let started = || -> Vec<Sequence> {
            (0..batch)
                .map(|_| {
                    let caches = make_prompt_cache(model.layer_kinds(), None);
                    let mut sequence = Sequence::new(model, caches, &[1], &options).unwrap();
                    sequence.start(model).unwrap();
                    sequence
                })
                .collect()
        };
        group.bench_function(format!("batch-{batch}"), |bencher| {
            bencher.iter_batched_ref(
                started,
                |rows| {
                    let mut rows: Vec<&mut Sequence> = rows.iter_mut().collect();
                    for _ in 0..16 {
                        for row in sequence::step(model, &mut rows) {
                            row.unwrap();
                        }
                    }
                },
                BatchSize::PerIteration,
            );
        });
    }
    group.finish();
}

/// Decides over `requests` from the first to the last, each with a prompt of two chunks and ten tokens.
fn schedule(requests: u64) -> usize {
    let bounds = Bounds { max_batch: 8, kv_budget: Some(1 << 30), chunk_alone: 256, chunk_beside: 64 };
    let mut policy = Policy::new(bounds);
    for id in 0..requests {
        policy.submit(RequestId(id), Demand { group: vec![id % 2], kv_bytes: 1 << 20 });
    }
    let mut unread = vec![500usize; requests as usize];
    let mut left = vec![10usize; requests as usize];
    let mut decisions = 0;
    loop {
        decisions += 1;
        match policy.decide() {
            Work::Admit(_) => {}
            Work::Prefill(id, most) => {
                let unread = &mut unread[id.0 as usize];
                let fed = most.min(*unread);
                *unread -= fed;
                policy.fed(fed.max(1));
                if *unread == 0 {
                    policy.prefilled(id);
                }
            }
            Work::Decode(ids) => {
                for id in ids {
                    let left = &mut left[id.0 as usize];
                    *left -= 1;
                    if *left == 0 {
                        policy.remove(id);
                    }
                }
            }
            Work::Idle => return decisions,
        }
    }
}

fn scheduler(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("scheduler-policy");
    for requests in [8, 64] {
        group.bench_function(format!("{requests}-requests"), |bencher| {
            bencher.iter(|| schedule(black_box(requests)));
        });
    }
    group.finish();
}

criterion_group!(benches, samplers, kernels, steps, scheduler);
criterion_main!(benches);
