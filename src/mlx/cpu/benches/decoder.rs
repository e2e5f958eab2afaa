//! Times the fused decoder on random weights in turn with reading as many bytes, and prints a JSON line.
//!
//! `cargo bench -p mlx-bun-cpu --bench decoder -- [--model starter|1b] [--weights 4|8|bf16] [--group 32|64]
//! [--precision exact|int16|int8] [--isa NAME] [--threads N] [--context N] [--rows N] [--prompt N] [--rounds N]`
//!
//! A step feeds one token to each of `rows` sequences of `context` others, or with `--prompt` a prompt of so many
//! tokens. Ten steps and ten passes over as many bytes as a step of decode reads take turns (`rounds` steps, rounded up to
//! tens); the first of each ten, which finds the other's memory in the caches, does not count. `of_bandwidth` is the ratio of the medians.
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a program for the terminal"
)]

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use half::{bf16, f16};
use mlx_bun_cpu::coding::{QuantMode, QuantParams};
use mlx_bun_cpu::kernels::Floats;
use mlx_bun_cpu::kernels::activation::Activation;
use mlx_bun_cpu::kernels::decoder::{
    AttentionBlock, Decoder, KvShape, KvStore, KvType, Layer, MOST_ROWS, MlpBlock, Norm, Projection,
    Sequence, Step, Wanted, Workspace,
};
use mlx_bun_cpu::kernels::matmul::{Matrix, Precision, Scales};
use mlx_bun_cpu::kernels::rope::Rope;
use mlx_bun_cpu::pages::prefer_large;
use mlx_bun_cpu::{Isa, Pool, pool};

struct Shape {
    name: &'static str,
    hidden: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    intermediate: usize,
    vocabulary: usize,
}

/// SmolLM2-135M, and a Llama of a billion weights.
const SHAPES: [Shape; 2] = [
    Shape {
        name: "starter",
        hidden: 576,
        layers: 30,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        intermediate: 1536,
        vocabulary: 49152,
    },
    Shape {
        name: "1b",
        hidden: 2048,
        layers: 16,
        heads: 32,
        kv_heads: 8,
        head_dim: 64,
        intermediate: 8192,
        vocabulary: 32000,
    },
];

/// Random numbers that are the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 32
    }

    /// From -1 to 1.
    fn float(&mut self) -> f32 {
        self.next() as f32 / (1u64 << 31) as f32 - 1.0
    }
}

#[derive(Clone, Copy)]
enum Weights {
    /// `half`: with scales in float16, as GGUF has them, instead of bfloat16, as conversions of models in it.
    Packed {
        bits: u8,
        group: u32,
        half: bool,
    },
    Bf16,
}

/// Memory on large pages, as a model's is, which lives until the program ends.
fn large<T>(values: Vec<T>) -> &'static [T] {
    let values = values.leak();
    let start = values.as_ptr().addr();
    prefer_large(std::slice::from_ref(&(start..start + size_of_val(values))));
    values
}

/// A matrix with its own memory, which lives until the program ends.
fn matrix(random: &mut Random, weights: Weights, rows: usize, columns: usize) -> Matrix<'static> {
    let size = 1.0 / (columns as f32).sqrt();
    match weights {
        Weights::Bf16 => {
            let values: Vec<bf16> =
                (0..rows * columns).map(|_| bf16::from_f32(random.float() * size)).collect();
            Matrix::dense(Floats::Bf16(large(values)), 1, rows, columns).unwrap()
        }
        Weights::Packed { bits, group, half } => {
            let words: Vec<u32> =
                (0..rows * columns * usize::from(bits) / 32).map(|_| random.next() as u32).collect();
            let (groups, middle) = (rows * columns / group as usize, f32::from(1u16 << (bits - 1)));
            let scales: Vec<f32> =
                (0..groups).map(|_| size / middle * (1.0 + 0.1 * random.float())).collect();
            let scales = if half {
                let scales: Vec<f16> = scales.into_iter().map(f16::from_f32).collect();
                let biases: Vec<f16> =
                    scales.iter().map(|scale| f16::from_f32(-middle * scale.to_f32())).collect();
                Scales::Affine { scales: Floats::F16(scales.leak()), biases: Floats::F16(biases.leak()) }
            } else {
                let scales: Vec<bf16> = scales.into_iter().map(bf16::from_f32).collect();
                let biases: Vec<bf16> =
                    scales.iter().map(|scale| bf16::from_f32(-middle * scale.to_f32())).collect();
                Scales::Affine { scales: Floats::Bf16(scales.leak()), biases: Floats::Bf16(biases.leak()) }
            };
            let params = QuantParams { bits, group_size: group, mode: QuantMode::Affine };
            Matrix::packed(large(words), scales, params, 1, rows, columns).unwrap()
        }
    }
}

fn decoder(shape: &Shape, weights: Weights, head: Weights) -> Decoder<'static> {
    let mut random = Random(7);
    let norm = |random: &mut Random| Norm {
        weight: (0..shape.hidden).map(|_| 1.0 + 0.1 * random.float()).collect(),
        eps: 1e-5,
    };
    let (hidden, queries, keys) =
        (shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let layers = (0..shape.layers).map(|_| {
        let mut projection = |rows, columns| {
            let matrix = matrix(&mut random, weights, rows, columns);
            Projection { matrix, bias: None }
        };
        let (q, k) = (projection(queries, hidden), projection(keys, hidden));
        let (v, o) = (projection(keys, hidden), projection(hidden, queries));
        let (gate, up) = (projection(shape.intermediate, hidden), projection(shape.intermediate, hidden));
        let down = projection(hidden, shape.intermediate);
        Layer {
            attention: AttentionBlock {
                norm: norm(&mut random),
                q,
                k,
                v,
                o,
                qk_norm: None,
                rope: 0,
                window: None,
                scale: (shape.head_dim as f32).powf(-0.5),
                post_norm: None,
            },
            mlp: MlpBlock {
                norm: norm(&mut random),
                gate,
                up,
                down,
                activation: Activation::Silu,
                post_norm: None,
            },
        }
    });
    let layers = layers.collect();
    let embedding = matrix(&mut random, head, shape.vocabulary, hidden);
    Decoder {
        embedding,
        embedding_scale: None,
        heads: shape.heads,
        kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        ropes: vec![Rope::from_base(shape.head_dim, 10_000.0, 1.0, false).unwrap()],
        layers,
        norm: norm(&mut random),
        head: Projection { matrix: embedding, bias: None },
    }
}

/// What a decode step reads of weights.
fn weight_bytes(decoder: &Decoder<'_>) -> usize {
    let layer = |layer: &Layer<'_>| {
        let (a, m) = (&layer.attention, &layer.mlp);
        [&a.q, &a.k, &a.v, &a.o, &m.gate, &m.up, &m.down].map(|p| p.matrix.bytes()).iter().sum::<usize>()
    };
    decoder.layers.iter().map(layer).sum::<usize>() + decoder.head.matrix.bytes()
}

/// A sum over memory, as fast as a thread can read it.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sum(data: &[u64]) -> u64 {
    use std::arch::x86_64::*;
    let mut sums = [_mm256_setzero_si256(); 8];
    for line in data.as_chunks::<32>().0 {
        let from = line.as_ptr().cast::<__m256i>();
        for (index, sum) in sums.iter_mut().enumerate() {
            // SAFETY: the chunk has eight vectors; a prefetch of any address is allowed.
            unsafe {
                if index % 2 == 0 {
                    _mm_prefetch::<_MM_HINT_T0>(from.cast::<i8>().wrapping_add(4096 + index * 32));
                }
                *sum = _mm256_add_epi64(*sum, _mm256_loadu_si256(from.add(index)));
            }
        }
    }
    let total = sums.into_iter().reduce(|a, b| _mm256_add_epi64(a, b)).unwrap();
    _mm256_extract_epi64::<0>(total) as u64
}

#[cfg(not(target_arch = "x86_64"))]
fn sum(data: &[u64]) -> u64 {
    data.iter().fold(0, |sum, word| sum.wrapping_add(*word))
}

/// Seconds that all threads together take to read memory.
fn read(pool: &Pool, data: &[u64]) -> f64 {
    let clock = Instant::now();
    #[allow(unused_unsafe, reason = "only where the function wants AVX2")]
    pool.run_ranges(data.len(), 1 << 15, &|range| {
        // SAFETY: a processor of 2013 or later.
        black_box(unsafe { sum(&data[range]) });
    })
    .unwrap();
    clock.elapsed().as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let option = |name: &str| {
        let index = arguments.iter().position(|argument| argument == name)?;
        arguments.get(index + 1).cloned()
    };
    let number = |name: &str, default: usize| option(name).map_or(default, |value| value.parse().unwrap());
    let wanted = option("--model").unwrap_or_else(|| "starter".into());
    let shape = SHAPES.iter().find(|shape| shape.name == wanted).expect("starter or 1b");
    let coding = option("--weights").unwrap_or_else(|| "4".into());
    let group = number("--group", 32) as u32;
    let packed = |bits| Weights::Packed { bits, group, half: shape.name == "starter" };
    let weights = if coding == "bf16" { Weights::Bf16 } else { packed(coding.parse().unwrap()) };
    // The starter's file has a head of 8 bits.
    let head = if shape.name == "starter" && coding != "bf16" { packed(8) } else { weights };
    let precision = match option("--precision").as_deref() {
        None | Some("exact") => Precision::Exact,
        Some("int16") => Precision::Int16,
        Some("int8") => Precision::Int8,
        Some(other) => panic!("no precision {other}"),
    };
    let isa = Isa::from_setting(option("--isa").as_deref()).unwrap();
    let threads = number("--threads", pool::default_threads());
    let (context, rows, prompt) = (number("--context", 400), number("--rows", 1), number("--prompt", 0));
    let rounds = number("--rounds", 60).next_multiple_of(10);

    let pool = Pool::new(threads).unwrap();
    let decoder = decoder(shape, weights, head);
    decoder.check().unwrap();
    let bytes = weight_bytes(&decoder);
    let count = rows.max(prompt.min(MOST_ROWS));
    let mut workspace = Workspace::new(&decoder, isa, &pool, precision, count).unwrap();
    let kv = KvShape { heads: shape.kv_heads, dim: shape.head_dim, window: None, kind: KvType::F16 };
    let stores = || -> Vec<Arc<KvStore>> {
        (0..shape.layers)
            .map(|_| Arc::new(KvStore::new(kv, context.max(prompt) + rounds + 64).unwrap()))
            .collect()
    };
    let sequences: Vec<Vec<Arc<KvStore>>> = (0..rows).map(|_| stores()).collect();
    let memory = large(vec![1u64; bytes / 8]);
    let mut times = (Vec::new(), Vec::new());
    for round in 0..rounds {
        let clock = Instant::now();
        if prompt > 0 {
            let tokens: Vec<u32> = (0..prompt).map(|i| (i * 37 % 4000) as u32).collect();
            for (index, tokens) in tokens.chunks(MOST_ROWS).enumerate() {
                let (position, length) = (index * MOST_ROWS, tokens.len());
                let list = [Sequence { position, length, stores: &sequences[0] }];
                let step = Step { decoder: &decoder, tokens, sequences: &list, wanted: Wanted::Nothing };
                step.run(isa, &pool, &mut workspace, &mut []).unwrap();
            }
        } else {
            let tokens: Vec<u32> = (0..rows).map(|row| (row * 37 + round) as u32).collect();
            let list: Vec<Sequence<'_>> = sequences
                .iter()
                .map(|stores| Sequence { position: context + round, length: 1, stores })
                .collect();
            let mut out = vec![0.0; rows * shape.vocabulary];
            let step = Step { decoder: &decoder, tokens: &tokens, sequences: &list, wanted: Wanted::Logits };
            step.run(isa, &pool, &mut workspace, &mut out).unwrap();
        }
        if round % 10 > 0 {
            times.0.push(clock.elapsed().as_secs_f64());
        }
        if round % 10 == 9 {
            read(&pool, memory);
            times.1.extend((1..10).map(|_| read(&pool, memory)));
        }
    }
    let least = |values: &[f64]| values.iter().copied().fold(f64::INFINITY, f64::min);
    let tokens = if prompt > 0 { prompt } else { rows } as f64;
    let (best, best_pass) = (least(&times.0), least(&times.1));
    let (step, pass) = (median(times.0), median(times.1));
    println!(
        "{{\"model\": \"{wanted}\", \"weights\": \"{coding}\", \"isa\": \"{}\", \"threads\": {threads}, \"megabytes\": {:.1}, \
         \"ms\": {:.3}, \"best_ms\": {:.3}, \"tokens_per_second\": {:.1}, \"gb_per_second\": {:.1}, \
         \"read_gb_per_second\": {:.1}, \"best_read_gb_per_second\": {:.1}, \"of_bandwidth\": {:.2}}}",
        isa.level(),
        bytes as f64 / 1e6,
        step * 1e3,
        best * 1e3,
        tokens / step,
        bytes as f64 / step / 1e9,
        bytes as f64 / pass / 1e9,
        bytes as f64 / best_pass / 1e9,
        pass / step,
    );
}
