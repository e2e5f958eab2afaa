//! Times the CPU kernels around attention: medians of interleaved rounds, in microseconds.
//!
//! `cargo bench --bench cpu_attention [FILTER]`; a filter keeps the rows whose name contains it.
#![allow(clippy::print_stdout, clippy::unwrap_used)]

use std::time::Instant;

use half::f16;
use mlx_bun::mlx::cpu::kernels::activation::{Activation, activate_gated};
use mlx_bun::mlx::cpu::kernels::attention::{Attention, Layout, QuantizedHeads, Stored, attention};
use mlx_bun::mlx::cpu::kernels::norm::{add_rms_norm, rms_norm};
use mlx_bun::mlx::cpu::kernels::rope::{Offsets, Rope, rope};
use mlx_bun::mlx::cpu::kernels::softmax::{argmax, softmax, top_k};
use mlx_bun::mlx::cpu::kernels::{Floats, FloatsMut, Heads, Rows};
use mlx_bun::mlx::cpu::{Isa, Level, Pool};

const ROUNDS: usize = 15;

/// One timed thing.
struct Row<'a> {
    name: String,
    /// Multiplications (or elements) of a call, for the rate.
    work: usize,
    call: Box<dyn FnMut() + 'a>,
    micros: Vec<f64>,
}

/// Calls everything in turn, round after round, and prints medians.
fn report(title: &str, mut rows: Vec<Row<'_>>) {
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    rows.retain(|row| filter.as_ref().is_none_or(|filter| row.name.contains(filter)));
    if rows.is_empty() {
        return;
    }
    for round in 0..=ROUNDS {
        for row in &mut rows {
            (row.call)();
            let (start, mut calls) = (Instant::now(), 0);
            while calls < 3 || start.elapsed().as_micros() < 400 {
                (row.call)();
                calls += 1;
            }
            // The first round warms caches and page tables.
            if round > 0 {
                row.micros.push(start.elapsed().as_secs_f64() * 1e6 / f64::from(calls));
            }
        }
    }
    println!("\n{title}");
    for mut row in rows {
        row.micros.sort_by(f64::total_cmp);
        let median = row.micros[ROUNDS / 2];
        println!("{:44} {median:10.2} us {:8.2} G/s", row.name, row.work as f64 / median / 1e3);
    }
}

fn noise(count: usize) -> Vec<f32> {
    let mut state = 1u32;
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

fn halves(values: &[f32]) -> Vec<f16> {
    values.iter().map(|x| f16::from_f32(*x)).collect()
}

fn main() {
    attention_rows();
    other_rows();
}

fn attention_rows() {
    let best = Isa::detect();
    let mut isas = vec![best];
    isas.extend(Isa::forced(Level::Avx2).ok().filter(|isa| isa.level() != best.level()));
    let pools = [Pool::new(1).unwrap(), Pool::new(2).unwrap()];
    let (heads, kv_heads, dim) = (9, 3, 64);
    let room = 8192;
    let values32 = noise(kv_heads * room * dim);
    let values16 = halves(&values32);
    let codes: Vec<u32> = values32.iter().map(|x| x.to_bits().wrapping_mul(0x9e37_79b1)).collect();
    let queries = noise(heads * 4096 * dim);
    let strides = [0, room * dim, dim, 1];
    let stored = |kind: &str, keys: usize| {
        let shape = [1, kv_heads, keys, dim];
        let quantized = |bits: usize| {
            let scales = Floats::F16(&values16);
            let words = dim / 32 * bits;
            Stored::Quantized(
                QuantizedHeads::new(
                    &codes,
                    scales,
                    scales,
                    shape,
                    [0, room * words, words],
                    [0, room, 1],
                    bits,
                    64,
                )
                .unwrap(),
            )
        };
        match kind {
            "f16" => Stored::Dense(Heads::new(Floats::F16(&values16), shape, strides).unwrap()),
            "f32" => Stored::Dense(Heads::new(Floats::F32(&values32), shape, strides).unwrap()),
            "q8" => quantized(8),
            _ => quantized(4),
        }
    };
    let work = |length: usize, keys: usize, causal: bool| {
        let pairs = if causal { length * keys - length * (length - 1) / 2 } else { length * keys };
        heads * pairs * dim * 2
    };
    let (stored, pools, queries) = (&stored, &pools, &queries);
    let attend = |isa: Isa, threads: usize, kind: &'static str, length: usize, keys: usize| {
        let queries =
            Heads::dense(Floats::F32(&queries[..heads * length * dim]), [1, heads, length, dim]).unwrap();
        let (k, v) = (stored(kind, keys), stored(kind, keys));
        let a = Attention {
            queries,
            keys: k,
            values: v,
            scale: 0.125,
            causal: true,
            window: None,
            mask: None,
            sinks: None,
        };
        let mut out = vec![0f32; heads * length * dim];
        Row {
            name: format!("{} {threads}t {kind} L={length} T={keys}", isa.level()),
            work: work(length, keys, true),
            call: Box::new(move || {
                attention(isa, &pools[threads - 1], &a, Layout::HeadsFirst, FloatsMut::F32(&mut out))
                    .unwrap();
            }),
            micros: Vec::new(),
        }
    };
    let mut rows = Vec::new();
    for &isa in &isas {
        for threads in [1, 2] {
            for keys in [128, 512, 2048, 8192] {
                for kind in ["f16", "f32", "q8", "q4"] {
                    rows.push(attend(isa, threads, kind, 1, keys));
                }
            }
        }
    }
    report("attention, one token, 9 heads over 3 of 64 (G/s: multiply-adds)", rows);
    let mut rows = Vec::new();
    for &isa in &isas {
        for threads in [1, 2] {
            for length in [4, 400, 2048] {
                rows.push(attend(isa, threads, "f16", length, length));
            }
        }
    }
    report("attention, prompts", rows);
}

/// A row that calls `call`.
fn row<'a>(name: String, work: usize, call: impl FnMut() + 'a) -> Row<'a> {
    Row { name, work, call: Box::new(call), micros: Vec::new() }
}

/// What surrounds attention, for one token and for 400, at the sizes of a 135M model.
fn other_rows() {
    let pools = [Pool::new(1).unwrap(), Pool::new(2).unwrap()];
    let isa = Isa::detect();
    let (hidden, inner, heads, dim, vocabulary) = (576, 1536, 9, 64, 49_152);
    let (data, logits) = (noise(400 * 2 * inner), noise(vocabulary));
    let floats = |count: usize| Floats::F32(&data[..count]);
    let turn = Rope::from_base(dim, 100_000.0, 1.0, false).unwrap();
    let mut rows = Vec::new();
    for pool in &pools {
        for count in [1, 400] {
            let name = |what: &str| format!("{}t {what} x{count}", pool.threads());
            let size = count * hidden;
            let (x, weight) = (Rows::dense(floats(size), hidden).unwrap(), Some(floats(hidden)));
            let mut out = vec![0f32; size];
            rows.push(row(name("rms_norm 576"), size, move || {
                rms_norm(isa, pool, &x, weight, 1e-5, FloatsMut::F32(&mut out)).unwrap();
            }));
            let (mut sum, mut out) = (vec![0f32; size], vec![0f32; size]);
            rows.push(row(name("add_rms_norm 576"), size, move || {
                let (sum, out) = (FloatsMut::F32(&mut sum), FloatsMut::F32(&mut out));
                add_rms_norm(isa, pool, &x, &x, weight, 1e-5, sum, out).unwrap();
            }));
            let gate = Rows::new(Floats::F32(&data), count, inner, 2 * inner).unwrap();
            let up = Rows::new(Floats::F32(&data[inner..]), count, inner, 2 * inner).unwrap();
            let mut out = vec![0f32; count * inner];
            rows.push(row(name("swiglu 1536"), count * inner, move || {
                let out = FloatsMut::F32(&mut out);
                activate_gated(isa, pool, Activation::Silu, &gate, &up, out).unwrap();
            }));
            let strides = [0, dim, heads * dim, 1];
            let q = Heads::new(Floats::F32(&data), [1, heads, count, dim], strides).unwrap();
            let (turn, mut out) = (&turn, vec![0f32; size]);
            rows.push(row(name("rope 9x64"), size, move || {
                rope(isa, pool, turn, &q, Offsets::Same(500), FloatsMut::F32(&mut out)).unwrap();
            }));
        }
        let name = |what: &str| format!("{}t {what}", pool.threads());
        let x = Rows::dense(Floats::F32(&logits), vocabulary).unwrap();
        let mut out = vec![0f32; vocabulary];
        rows.push(row(name("softmax 49152"), vocabulary, move || {
            softmax(isa, pool, &x, FloatsMut::F32(&mut out)).unwrap();
        }));
        rows.push(row(name("argmax 49152"), vocabulary, move || {
            argmax(isa, pool, &x, &mut [0]).unwrap();
        }));
    }
    let logits = &logits;
    rows.push(row("top_k 40 of 49152".to_owned(), vocabulary, move || {
        std::hint::black_box(top_k(isa, Floats::F32(logits), 40));
    }));
    report("around attention (G/s: elements)", rows);
}
