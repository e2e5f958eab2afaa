//! The fused decoder against a composition of the plain kernels.

use half::f16;

use super::super::activation::{Activation, activate_gated};
use super::super::attention::{self, Attention, Layout, Stored};
use super::super::embedding::embedding;
use super::super::matmul::{Matmul, Matrix, Precision, Scales, has_integers};
use super::super::norm::rms_norm;
use super::super::rope::{Offsets, Rope, rope};
use super::super::testing::{Owned, Type, bits, isas, noise, pools};
use super::super::{Floats, FloatsMut, Heads, Rows};
use super::*;
use crate::coding::{QuantMode, QuantParams};
use crate::{Isa, Pool};
use std::sync::Arc;

const HEADS: usize = 6;
const KV_HEADS: usize = 2;
const WINDOW: usize = 70;
const VOCABULARY: usize = 77;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Coding {
    Dense(Type),
    Affine(u8, u32),
    Float(QuantMode, u8, u32),
}

const CODINGS: [Coding; 6] = [
    Coding::Affine(4, 32),
    Coding::Affine(8, 32),
    Coding::Affine(6, 32),
    Coding::Float(QuantMode::Mxfp4, 4, 32),
    Coding::Float(QuantMode::Nvfp4, 4, 16),
    Coding::Dense(Type::Bf16),
];

/// Test data may outlive everything.
fn leak<T>(values: Vec<T>) -> &'static [T] {
    values.leak()
}

fn matrix(seed: u64, coding: Coding, rows: usize, columns: usize) -> Matrix<'static> {
    let words = |bits: u8| {
        let count = rows * columns * usize::from(bits) / 32;
        leak(noise(seed, 2 * count).chunks(2).map(|x| x[0].to_bits() << 9 ^ x[1].to_bits()).collect())
    };
    match coding {
        Coding::Dense(kind) => {
            let values: Vec<f32> = noise(seed, rows * columns).iter().map(|x| x * 0.2).collect();
            let values: &'static Owned = Box::leak(Box::new(Owned::new(kind, &values)));
            Matrix::dense(values.view(), 1, rows, columns).unwrap()
        }
        Coding::Affine(bits, group_size) => {
            let groups = rows * columns / group_size as usize;
            let step = 0.5 / f32::from(1u16 << bits);
            let scales: Vec<f16> = noise(seed + 1, groups).iter().map(|x| f16::from_f32(x * step)).collect();
            let biases: Vec<f16> = noise(seed + 2, groups).iter().map(|x| f16::from_f32(x * 0.1)).collect();
            let scales =
                Scales::Affine { scales: Floats::F16(leak(scales)), biases: Floats::F16(leak(biases)) };
            let params = QuantParams { bits, group_size, mode: QuantMode::Affine };
            Matrix::packed(words(bits), scales, params, 1, rows, columns).unwrap()
        }
        Coding::Float(mode, bits, group_size) => {
            let groups = rows * columns / group_size as usize;
            let middle = if mode == QuantMode::Nvfp4 { 0x10 } else { 123 };
            let scales = noise(seed + 1, groups).iter().map(|x| (middle as f32 + 2.0 * x) as u8).collect();
            let params = QuantParams { bits, group_size, mode };
            Matrix::packed(words(bits), Scales::Byte(leak(scales)), params, 1, rows, columns).unwrap()
        }
    }
}

/// What families differ in.
#[derive(Clone, Copy, Debug)]
struct Family {
    coding: Coding,
    hidden: usize,
    head_dim: usize,
    intermediate: usize,
    /// Biases everywhere, norms on heads, every other layer sliding, GELU.
    rich: bool,
    /// Norms on results.
    normed_after: bool,
}

const FAMILIES: [Family; 3] = [
    Family {
        coding: CODINGS[0],
        hidden: 96,
        head_dim: 32,
        intermediate: 160,
        rich: false,
        normed_after: false,
    },
    Family {
        coding: CODINGS[0],
        hidden: 128,
        head_dim: 64,
        intermediate: 832,
        rich: true,
        normed_after: false,
    },
    Family {
        coding: CODINGS[0],
        hidden: 128,
        head_dim: 64,
        intermediate: 832,
        rich: true,
        normed_after: true,
    },
];

fn norm_of(seed: u64, features: usize) -> Norm {
    Norm { weight: noise(seed, features).iter().map(|x| 1.0 + 0.3 * x).collect(), eps: 1e-5 }
}

fn decoder(family: Family) -> Decoder<'static> {
    let Family { coding, hidden, head_dim, intermediate, rich, normed_after } = family;
    let mut seed = 1;
    let mut projection = |rows, columns| {
        seed += 10;
        let bias = rich.then(|| Floats::F32(leak(noise(seed + 5, rows))));
        Projection { matrix: matrix(seed, coding, rows, columns), bias }
    };
    let (queries, keys) = (HEADS * head_dim, KV_HEADS * head_dim);
    let layers = (0..3).map(|index| Layer {
        attention: AttentionBlock {
            norm: norm_of(900 + index, hidden),
            q: projection(queries, hidden),
            k: projection(keys, hidden),
            v: projection(keys, hidden),
            o: projection(hidden, queries),
            qk_norm: rich.then(|| (norm_of(910 + index, head_dim), norm_of(920 + index, head_dim))),
            rope: (index % 2) as usize,
            window: (rich && index % 2 == 0).then_some(WINDOW),
            scale: (head_dim as f32).powf(-0.5),
            post_norm: normed_after.then(|| norm_of(930 + index, hidden)),
        },
        mlp: MlpBlock {
            norm: norm_of(940 + index, hidden),
            gate: projection(intermediate, hidden),
            up: projection(intermediate, hidden),
            down: projection(hidden, intermediate),
            activation: if rich { Activation::GeluTanh } else { Activation::Silu },
            post_norm: normed_after.then(|| norm_of(950 + index, hidden)),
        },
    });
    let layers = layers.collect();
    let embedding = matrix(7, coding, VOCABULARY, hidden);
    let decoder = Decoder {
        embedding,
        embedding_scale: rich.then_some(11.3),
        heads: HEADS,
        kv_heads: KV_HEADS,
        head_dim,
        ropes: vec![
            Rope::from_base(head_dim, 10_000.0, 1.0, false).unwrap(),
            Rope::from_base(head_dim, 1e6, 0.5, false).unwrap(),
        ],
        layers,
        norm: norm_of(960, hidden),
        head: Projection { matrix: embedding, bias: None },
    };
    decoder.check().unwrap();
    decoder
}

fn stores(decoder: &Decoder<'_>, kind: KvType, positions: usize) -> Vec<Arc<KvStore>> {
    let store = |layer: &Layer<'_>| {
        let (heads, dim, window) = (decoder.kv_heads, decoder.head_dim, layer.attention.window);
        Arc::new(KvStore::new(KvShape { heads, dim, window, kind }, positions).unwrap())
    };
    decoder.layers.iter().map(store).collect()
}

/// A decoder, and what runs it.
struct Bench<'a> {
    decoder: &'a Decoder<'a>,
    isa: Isa,
    pool: &'a Pool,
    precision: Precision,
}

impl Bench<'_> {
    /// Feeds tokens to sequences.
    fn step(
        &self,
        tokens: &[u32],
        sequences: &[(usize, usize, &[Arc<KvStore>])],
        wanted: Wanted,
    ) -> Vec<f32> {
        let Self { decoder, isa, pool, precision } = *self;
        let mut workspace = Workspace::new(decoder, isa, pool, precision, tokens.len()).unwrap();
        let width = match wanted {
            Wanted::Logits => decoder.vocabulary(),
            Wanted::Hidden => decoder.hidden(),
            Wanted::Nothing => 0,
        };
        let mut out = vec![f32::NAN; tokens.len() * width];
        let sequences: Vec<Sequence> = sequences
            .iter()
            .map(|&(position, length, stores)| Sequence { position, length, stores })
            .collect();
        let step = Step { decoder, tokens, sequences: &sequences, wanted };
        step.run(isa, pool, &mut workspace, &mut out).unwrap();
        out
    }

    /// Hidden states of a prompt fed in chunks.
    fn prompt(&self, tokens: &[u32], chunks: &[usize], kind: KvType) -> Vec<f32> {
        let stores = stores(self.decoder, kind, tokens.len());
        let (mut out, mut fed) = (Vec::new(), 0);
        for &count in chunks.iter().cycle() {
            let count = count.min(tokens.len() - fed);
            if count == 0 {
                return out;
            }
            out.extend(self.step(&tokens[fed..fed + count], &[(fed, count, &stores)], Wanted::Hidden));
            fed += count;
        }
        out
    }

    fn product(&self, projection: &Projection<'_>, x: &[f32]) -> Vec<f32> {
        let mut y = vec![0.0; x.len() / projection.matrix.columns() * projection.matrix.rows()];
        let mut product = Matmul::transposed(projection.matrix);
        (product.bias, product.precision) = (projection.bias, self.precision);
        product.run(self.isa, self.pool, Floats::F32(x), FloatsMut::F32(&mut y)).unwrap();
        y
    }

    fn norm(&self, norm: &Norm, x: &[f32]) -> Vec<f32> {
        let mut y = vec![0.0; x.len()];
        let rows = Rows::dense(Floats::F32(x), norm.weight.len()).unwrap();
        let weight = Some(Floats::F32(&norm.weight));
        rms_norm(self.isa, self.pool, &rows, weight, norm.eps, FloatsMut::F32(&mut y)).unwrap();
        y
    }

    /// Heads `[tokens, heads * dim]` normed and turned to `[heads, tokens, dim]`.
    fn turned(&self, layer: &AttentionBlock<'_>, norm: Option<&Norm>, x: &[f32], heads: usize) -> Vec<f32> {
        let dim = self.decoder.head_dim;
        let normed = norm.map_or_else(|| x.to_vec(), |norm| self.norm(norm, x));
        let shape = [1, heads, x.len() / heads / dim, dim];
        let view = Heads::new(Floats::F32(&normed), shape, [0, dim, heads * dim, 1]).unwrap();
        let mut out = vec![0.0; x.len()];
        let turn = &self.decoder.ropes[layer.rope];
        rope(self.isa, self.pool, turn, &view, Offsets::Same(0), FloatsMut::F32(&mut out)).unwrap();
        out
    }

    /// Hidden states of a whole prompt, a kernel at a time.
    fn composed(&self, tokens: &[u32]) -> Vec<f32> {
        let decoder = self.decoder;
        let (isa, pool) = (self.isa, self.pool);
        let (count, dim) = (tokens.len(), decoder.head_dim);
        let mut hidden = vec![0.0; count * decoder.hidden()];
        embedding(isa, pool, &decoder.embedding, tokens, FloatsMut::F32(&mut hidden)).unwrap();
        if let Some(scale) = decoder.embedding_scale {
            hidden.iter_mut().for_each(|x| *x *= scale);
        }
        let add = |hidden: &mut [f32], delta: Vec<f32>, norm: &Option<Norm>| {
            let delta = norm.as_ref().map_or_else(|| delta.clone(), |norm| self.norm(norm, &delta));
            hidden.iter_mut().zip(delta).for_each(|(hidden, delta)| *hidden += delta);
        };
        for Layer { attention: layer, mlp } in &decoder.layers {
            let x = self.norm(&layer.norm, &hidden);
            let [q, k, v] = [&layer.q, &layer.k, &layer.v].map(|projection| self.product(projection, &x));
            let norms = layer.qk_norm.as_ref();
            let q = self.turned(layer, norms.map(|n| &n.0), &q, HEADS);
            let k = self.turned(layer, norms.map(|n| &n.1), &k, KV_HEADS);
            let shape = [1, KV_HEADS, count, dim];
            let attention = Attention {
                queries: Heads::dense(Floats::F32(&q), [1, HEADS, count, dim]).unwrap(),
                keys: Stored::Dense(Heads::dense(Floats::F32(&k), shape).unwrap()),
                values: Stored::Dense(
                    Heads::new(Floats::F32(&v), shape, [0, dim, KV_HEADS * dim, 1]).unwrap(),
                ),
                scale: layer.scale,
                causal: true,
                window: layer.window,
                mask: None,
                sinks: None,
            };
            let mut attended = vec![0.0; count * HEADS * dim];
            let out = FloatsMut::F32(&mut attended);
            attention::attention(isa, pool, &attention, Layout::TokensFirst, out).unwrap();
            add(&mut hidden, self.product(&layer.o, &attended), &layer.post_norm);
            let x = self.norm(&mlp.norm, &hidden);
            let (gate, up) = (self.product(&mlp.gate, &x), self.product(&mlp.up, &x));
            let mut gated = vec![0.0; gate.len()];
            let rows = |values| Rows::dense(Floats::F32(values), mlp.gate.matrix.rows()).unwrap();
            let out = FloatsMut::F32(&mut gated);
            activate_gated(isa, pool, mlp.activation, &rows(&gate), &rows(&up), out).unwrap();
            add(&mut hidden, self.product(&mlp.down, &gated), &mlp.post_norm);
        }
        hidden
    }
}

fn tokens(count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| (i * 31 + i * i) % VOCABULARY as u32).collect()
}

#[test]
fn the_whole_has_the_bits_of_its_parts() {
    let pools = pools();
    for family in FAMILIES {
        for coding in CODINGS {
            let decoder = decoder(Family { coding, ..family });
            for isa in isas() {
                let pool = &pools[1];
                for precision in [Precision::Exact, Precision::Int16, Precision::Int8] {
                    if precision != Precision::Exact && !has_integers(isa) {
                        continue;
                    }
                    let bench = Bench { decoder: &decoder, isa, pool, precision };
                    let tokens = tokens(if family.rich { 150 } else { 70 });
                    let found = bench.prompt(&tokens, &[256], KvType::F32);
                    assert!(found.iter().all(|x| x.is_finite()));
                    assert_eq!(bits(&found), bits(&bench.composed(&tokens)), "{family:?} {coding:?} {isa:?}");
                }
                if coding != CODINGS[0] {
                    break;
                }
            }
        }
    }
}

#[test]
fn chunks_threads_and_neighbours_change_no_bit() {
    let pools = pools();
    for family in FAMILIES {
        let decoder = decoder(family);
        let tokens = tokens(203);
        let isa = Isa::detect();
        for precision in [Precision::Exact, Precision::Int16, Precision::Int8] {
            let bench = |pool| Bench { decoder: &decoder, isa, pool, precision };
            let whole = bench(&pools[0]).prompt(&tokens, &[203], KvType::F16);
            for pool in &pools {
                for chunks in [&[1, 64, 5][..], &[3], &[33], &[203]] {
                    let found = bench(pool).prompt(&tokens, chunks, KvType::F16);
                    assert_eq!(bits(&found), bits(&whole), "{chunks:?}");
                }
            }
            // Sequences of different lengths, a token each.
            let bench = bench(&pools[1]);
            let lengths = [200, 1, 67, 130];
            let all: Vec<_> = lengths.iter().map(|_| stores(&decoder, KvType::F16, 203)).collect();
            for (&length, stores) in lengths.iter().zip(&all) {
                bench.step(&tokens[..length], &[(0, length, stores)], Wanted::Hidden);
            }
            let next: Vec<u32> = lengths.iter().map(|&length| tokens[length]).collect();
            let rows: Vec<_> = lengths.iter().zip(&all).map(|(&l, stores)| (l, 1, &stores[..])).collect();
            let together = bench.step(&next, &rows, Wanted::Hidden);
            let width = decoder.hidden();
            for (row, &length) in together.chunks(width).zip(&lengths) {
                assert_eq!(bits(row), bits(&whole[length * width..][..width]), "{length}");
            }
        }
    }
}

#[test]
fn logits_come_with_a_step_or_from_its_hidden_states() {
    let pools = pools();
    for family in FAMILIES {
        let decoder = decoder(family);
        let bench =
            Bench { decoder: &decoder, isa: Isa::detect(), pool: &pools[1], precision: Precision::Exact };
        let tokens = tokens(9);
        let (a, b) = (stores(&decoder, KvType::F16, 9), stores(&decoder, KvType::F16, 9));
        let logits = bench.step(&tokens, &[(0, 9, &a)], Wanted::Logits);
        let hidden = bench.step(&tokens, &[(0, 9, &b)], Wanted::Hidden);
        let mut workspace =
            Workspace::new(&decoder, bench.isa, bench.pool, bench.precision, tokens.len()).unwrap();
        let mut later = vec![0.0; logits.len()];
        decoder.logits(bench.isa, bench.pool, &mut workspace, &hidden, &mut later).unwrap();
        assert_eq!(bits(&logits), bits(&later));
        let expected = bench.product(&decoder.head, &bench.norm(&decoder.norm, &hidden));
        assert_eq!(bits(&logits), bits(&expected));
    }
}

#[test]
fn a_step_that_only_fills_caches_leaves_in_them_what_others_do() {
    let pools = pools();
    for family in FAMILIES {
        let decoder = decoder(family);
        // Few rows and many.
        for (length, precision) in [(3, Precision::Exact), (40, Precision::Exact), (40, Precision::Int8)] {
            let bench = Bench { decoder: &decoder, isa: Isa::detect(), pool: &pools[1], precision };
            let (a, b) = (stores(&decoder, KvType::F16, 41), stores(&decoder, KvType::F16, 41));
            bench.step(&tokens(length), &[(0, length, &a)], Wanted::Hidden);
            assert!(bench.step(&tokens(length), &[(0, length, &b)], Wanted::Nothing).is_empty());
            let next = |stores| bits(&bench.step(&[5], &[(length, 1, stores)], Wanted::Logits));
            assert_eq!(next(&a), next(&b));
        }
    }
}

#[test]
fn half_precision_saturates_instead_of_overflowing() {
    let shape = KvShape { heads: 1, dim: 20, window: None, kind: KvType::F16 };
    let store = KvStore::new(shape, 4).unwrap();
    let mut key: Vec<f32> = (0..20).map(|i| [1e6, -1e6, 1.5, f32::NAN][i % 4]).collect();
    let mut value = vec![0.25; 20];
    // SAFETY: the store is this test's.
    let (keys, values) = unsafe {
        super::super::simd::run(
            Isa::detect(),
            kv::Set { store: &store, head: 0, position: 2, key: &mut key, value: &mut value },
        );
        store.read(2..3)
    };
    let numbers = |bytes: &[u8]| -> Vec<f32> {
        bytes.as_chunks().0.iter().map(|&pair| f16::from_ne_bytes(pair).to_f32()).collect()
    };
    for (i, number) in numbers(&keys).into_iter().enumerate() {
        match i % 4 {
            3 => assert!(number.is_nan()),
            case => assert_eq!(number, [65504.0, -65504.0, 1.5][case]),
        }
    }
    assert_eq!(numbers(&values), [0.25; 20]);
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_written() {
    let pool = Pool::new(1).unwrap();
    let decoder = decoder(FAMILIES[0]);
    let isa = Isa::detect();
    let stores = stores(&decoder, KvType::F16, 64);
    let mut workspace = Workspace::new(&decoder, isa, &pool, Precision::Exact, 4).unwrap();
    let mut run = |tokens: &[u32], position, length, stores: &[Arc<KvStore>], out: usize| {
        let sequences = [Sequence { position, length, stores }];
        let step = Step { decoder: &decoder, tokens, sequences: &sequences, wanted: Wanted::Logits };
        step.run(isa, &pool, &mut workspace, &mut vec![0.0; out]).map_err(|e| e.to_string())
    };
    let unknown = run(&[5, 77], 0, 2, &stores, 2 * VOCABULARY).unwrap_err();
    assert_eq!(unknown, "decoder: index 77 is outside the table's 77 rows");
    assert!(run(&[5], 64, 1, &stores, VOCABULARY).unwrap_err().contains("the length of a cache is 65"));
    assert!(run(&[5], 0, 1, &stores[1..], VOCABULARY).unwrap_err().contains("the number of caches"));
    assert!(run(&[5], 0, 1, &stores, 3).unwrap_err().contains("the number of results"));
    assert!(run(&[5; 5], 0, 5, &stores, 5 * VOCABULARY).unwrap_err().contains("the number of rows"));
    run(&[5], 63, 1, &stores, VOCABULARY).unwrap();
    assert!(run(&[], 0, 0, &stores, 0).unwrap_err().contains("the length of a sequence"));
}

#[test]
fn a_cache_that_two_use_is_refused() {
    let pool = Pool::new(1).unwrap();
    let decoder = decoder(FAMILIES[0]);
    let isa = Isa::detect();
    let stores = stores(&decoder, KvType::F16, 64);
    let mut workspace = Workspace::new(&decoder, isa, &pool, Precision::Exact, 4).unwrap();
    let twice = [Sequence { position: 0, length: 1, stores: &stores }; 2];
    let mut run = |sequences: &[Sequence<'_>]| {
        let tokens = vec![5; sequences.len()];
        let step = Step { decoder: &decoder, tokens: &tokens, sequences, wanted: Wanted::Logits };
        step.run(isa, &pool, &mut workspace, &mut vec![0.0; tokens.len() * VOCABULARY])
    };
    assert_eq!(run(&twice), Err(KernelError::Shared { op: OP }));
    let claim = stores[1].claim().unwrap();
    assert_eq!(run(&twice[..1]), Err(KernelError::Shared { op: OP }));
    drop(claim);
    // What was refused has let go of everything.
    run(&twice[..1]).unwrap();
    run(&twice[..1]).unwrap();
}

#[test]
fn a_workspace_of_another_decoder_is_refused() {
    let (one, two) = (Pool::new(1).unwrap(), Pool::new(2).unwrap());
    let isa = Isa::detect();
    let (ours, other) = (decoder(FAMILIES[0]), decoder(FAMILIES[1]));
    let stores = stores(&ours, KvType::F16, 64);
    let try_it = |workspace: &mut Workspace, pool: &Pool, isa: Isa| {
        let sequences = [Sequence { position: 0, length: 1, stores: &stores }];
        let step = Step { decoder: &ours, tokens: &[5], sequences: &sequences, wanted: Wanted::Logits };
        let stepped = step.run(isa, pool, workspace, &mut [0.0; VOCABULARY]);
        let hidden = vec![0.5; ours.hidden()];
        let headed = ours.logits(isa, pool, workspace, &hidden, &mut [0.0; VOCABULARY]);
        assert_eq!(stepped, headed);
        stepped.map_err(|error| error.to_string())
    };
    let make =
        |decoder: &Decoder<'_>, pool: &Pool| Workspace::new(decoder, isa, pool, Precision::Exact, 1).unwrap();
    try_it(&mut make(&ours, &one), &one, isa).unwrap();
    for (mut workspace, pool) in [(make(&other, &one), &one), (make(&ours, &one), &two)] {
        assert!(try_it(&mut workspace, pool, isa).unwrap_err().contains("made for this decoder"));
        assert!(!workspace.suits(&ours, isa, pool, Precision::Exact, 1));
    }
    if has_integers(isa) {
        let mut rounded = Workspace::new(&ours, isa, &one, Precision::Int8, 1).unwrap();
        assert!(try_it(&mut rounded, &one, Isa::PLAIN).unwrap_err().contains("made for this decoder"));
    }
}

#[test]
fn logits_of_lengths_that_do_not_fit_are_refused() {
    let pool = Pool::new(1).unwrap();
    let (decoder, isa) = (decoder(FAMILIES[0]), Isa::detect());
    let mut workspace = Workspace::new(&decoder, isa, &pool, Precision::Exact, 2).unwrap();
    let mut logits = |hidden: usize, out: usize| {
        decoder.logits(isa, &pool, &mut workspace, &vec![0.0; hidden], &mut vec![0.0; out])
    };
    let (width, vocabulary) = (decoder.hidden(), VOCABULARY);
    assert!(logits(width + 1, vocabulary).is_err());
    assert!(logits(width, vocabulary - 1).is_err());
    assert!(logits(3 * width, 3 * vocabulary).is_err());
    logits(0, 0).unwrap();
    logits(2 * width, 2 * vocabulary).unwrap();
}

#[test]
fn large_models_take_fewer_rows_at_once() {
    let millions = [0, 1, 135, 1_000, 8_000, 70_000].map(|count| a_seconds_rows(count * 1_000_000));
    assert_eq!(millions, [512, 512, 512, 192, 128, 128]);
}
