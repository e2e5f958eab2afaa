//! Times the CPU's matrix products: GMAC/s, GB/s of weights, and the share of the machine's read bandwidth.
//!
//! `cargo bench --bench cpu_matmul -- [--threads N] [--isa NAME] [--rounds N] [--only WORD]`. Figures are medians over
//! rounds, and a round runs every case once, so that a disturbance hits all cases alike.
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a program for the terminal"
)]

use std::hint::black_box;
use std::time::Instant;

use half::bf16;
use mlx_bun::checkpoint::{QuantMode, QuantParams};
use mlx_bun::mlx::cpu::kernels::Floats;
use mlx_bun::mlx::cpu::kernels::matmul::{Matmul, Matrix, Precision, Scales, has_integers};
use mlx_bun::mlx::cpu::{Isa, Pool, pool};

const SHAPES: [(usize, usize); 6] =
    [(576, 576), (1536, 576), (576, 1536), (49152, 576), (2048, 2048), (8192, 2048)];
const ROWS: [usize; 4] = [1, 8, 40, 400];

/// Weights of a format, many copies in a row so that a small matrix is not measured from the nearest cache.
struct Weights {
    name: &'static str,
    quantization: Option<QuantParams>,
    words: Vec<u32>,
    scales: Vec<bf16>,
    dense: Vec<bf16>,
}

impl Weights {
    fn new(name: &'static str, bits: u8, group_size: u32, count: usize) -> Self {
        let quantization = (bits < 16).then_some(QuantParams { bits, group_size, mode: QuantMode::Affine });
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1664525).wrapping_add(1013904223);
            state
        };
        let (mut words, mut scales, mut dense) = (vec![], vec![], vec![]);
        if quantization.is_some() {
            words = (0..count * bits as usize / 32).map(|_| next()).collect();
            scales = vec![bf16::from_f32(0.01); count / group_size as usize];
        } else {
            dense = (0..count).map(|_| bf16::from_f32((next() >> 16) as f32 / 65536.0 - 0.5)).collect();
        }
        Self { name, quantization, words, scales, dense }
    }

    fn matrix(&self, copy: usize, n: usize, k: usize) -> Matrix<'_> {
        let size = n * k;
        match self.quantization {
            None => Matrix::dense(Floats::Bf16(&self.dense[copy * size..][..size]), 1, n, k),
            Some(quantization) => {
                let words = size * quantization.bits as usize / 32;
                let groups = size / quantization.group_size as usize;
                let scales = Floats::Bf16(&self.scales[copy * groups..][..groups]);
                let scales = Scales::Affine { scales, biases: scales };
                Matrix::packed(&self.words[copy * words..][..words], scales, quantization, 1, n, k)
            }
        }
        .unwrap()
    }
}

struct Case<'a> {
    weights: &'a Weights,
    n: usize,
    k: usize,
    m: usize,
    precision: Precision,
    seconds: Vec<f64>,
}

/// Bytes a second that all threads together read from memory.
fn bandwidth(pool: &Pool, data: &[u64]) -> f64 {
    let start = Instant::now();
    pool.run_ranges(data.len(), 1 << 17, &|range| {
        let mut sums = [0u64; 32];
        for chunk in data[range].chunks_exact(32) {
            for (sum, value) in sums.iter_mut().zip(chunk) {
                *sum = sum.wrapping_add(*value);
            }
        }
        black_box(sums);
    })
    .unwrap();
    size_of_val(data) as f64 / start.elapsed().as_secs_f64()
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let mut threads = pool::default_threads();
    let mut isa = Isa::detect();
    let mut rounds = 7;
    let mut only = String::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().expect("an option takes a value");
        match argument.as_str() {
            "--threads" => threads = value().parse().unwrap(),
            "--isa" => isa = Isa::from_setting(Some(&value())).unwrap(),
            "--rounds" => rounds = value().parse().unwrap(),
            "--only" => only = value(),
            _ => {}
        }
    }
    let pool = Pool::new(threads).unwrap();
    let data = vec![1u64; 32 << 20];
    let mut speeds = Vec::new();

    // 64 MiB of 4-bit weights or more: past the caches that belong to a core.
    let count = 128 << 20;
    let formats = [
        Weights::new("affine 4/64", 4, 64, count),
        Weights::new("affine 4/32", 4, 32, count),
        Weights::new("affine 8/64", 8, 64, count),
        Weights::new("affine 6/64", 6, 64, count),
        Weights::new("bf16", 16, 1, count),
    ];
    let mut cases = Vec::new();
    for weights in &formats {
        let precisions: &[Precision] = if weights.quantization.is_some() && has_integers(isa) {
            &[Precision::Exact, Precision::Int16, Precision::Int8]
        } else {
            &[Precision::Exact]
        };
        for &precision in precisions {
            if precision != Precision::Exact && weights.name == "affine 6/64" {
                continue;
            }
            for (n, k) in SHAPES {
                for m in ROWS {
                    let label = format!("{} {precision:?} {n}x{k} M{m}", weights.name);
                    if label.contains(&only) {
                        cases.push(Case { weights, n, k, m, precision, seconds: vec![] });
                    }
                }
            }
        }
    }
    for _ in 0..rounds {
        speeds.push(bandwidth(&pool, &data));
        for case in &mut cases {
            let Case { weights, n, k, m, precision, .. } = *case;
            let copies = (count / (n * k)).max(1);
            let x = vec![bf16::from_f32(0.5); m * k];
            let mut y = vec![bf16::ZERO; m * n];
            // About 2 ms, each product on another copy of the weights.
            let products = ((4e7 / (n * k * m) as f64) as usize).clamp(1, copies);
            let mut product = |copy: usize| {
                let matmul = Matmul { precision, ..Matmul::transposed(weights.matrix(copy, n, k)) };
                matmul.run(isa, &pool, x.as_slice().into(), y.as_mut_slice().into()).unwrap();
            };
            product(copies - 1);
            let start = Instant::now();
            (0..products).for_each(&mut product);
            case.seconds.push(start.elapsed().as_secs_f64() / products as f64);
        }
    }
    let speed = median(&mut speeds);
    println!("{} on {threads} threads, read bandwidth {:.1} GB/s", isa.level(), speed / 1e9);
    println!("format       mode   N x K          M        us   GMAC/s    GB/s  of bandwidth");
    for case in &mut cases {
        let Case { weights, n, k, m, precision, .. } = *case;
        let seconds = median(&mut case.seconds);
        let bytes = weights.matrix(0, n, k).bytes() as f64 / seconds;
        println!(
            "{:<12} {:<6} {:<12} {m:>4} {:>9.1} {:>8.1} {:>7.1} {:>6.0} %",
            weights.name,
            format!("{precision:?}").to_lowercase(),
            format!("{n}x{k}"),
            seconds * 1e6,
            (n * k * m) as f64 / seconds / 1e9,
            bytes / 1e9,
            bytes / speed * 100.0,
        );
    }
}
