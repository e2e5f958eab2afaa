//! The fast paths against the reference, against each other, and cut in every way.

use half::f16;
use proptest::prelude::*;

use super::super::testing::{Owned, Type, bits, isas, noise, pools};
use super::*;
use crate::Level;

/// Buffers of one attention, with room after each head and gaps between positions.
#[derive(Clone, Debug)]
struct Case {
    batch: usize,
    kv_heads: usize,
    group: usize,
    length: usize,
    keys: usize,
    dim: usize,
    value_dim: usize,
    /// Positions that the cache has room for beyond `keys`.
    room: usize,
    /// Elements between two positions beyond the row.
    gap: usize,
    kind: Type,
    query_kind: Type,
    causal: bool,
    window: Option<usize>,
    mask: u8,
    sinks: bool,
    /// Bits and group of a quantized cache.
    quantized: Option<(usize, usize)>,
    seed: u64,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            batch: 1,
            kv_heads: 2,
            group: 3,
            length: 1,
            keys: 100,
            dim: 64,
            value_dim: 64,
            room: 5,
            gap: 0,
            kind: Type::F32,
            query_kind: Type::F32,
            causal: true,
            window: None,
            mask: 0,
            sinks: false,
            quantized: None,
            seed: 1,
        }
    }
}

struct Buffers {
    queries: Owned,
    keys: Owned,
    values: Owned,
    codes: [Vec<u32>; 2],
    scales: [Owned; 2],
    biases: [Owned; 2],
    allowed: Vec<u8>,
    bias: Owned,
    sinks: Owned,
}

impl Case {
    fn heads(&self) -> usize {
        self.kv_heads * self.group
    }

    fn buffers(&self) -> Buffers {
        let positions = self.batch * self.kv_heads * (self.keys + self.room);
        let part = |i: u64, count| noise(self.seed * 16 + i, count);
        let words = |i: u64, dim: usize| -> Vec<u32> {
            let bits = self.quantized.map_or(4, |q| q.0);
            part(i, positions * dim / 32 * bits)
                .iter()
                .map(|x| x.to_bits().wrapping_mul(0x9e37_79b1))
                .collect()
        };
        let group = self.quantized.map_or(32, |q| q.1);
        let span = self.quantized.map_or(1.0, |q| (1 << q.0) as f32);
        let scales = |i: u64, dim: usize| {
            let values: Vec<f32> = part(i, positions * dim / group).iter().map(|x| x / span).collect();
            Owned::new(self.kind, &values)
        };
        let area = self.batch * self.length * self.keys;
        let count = self.batch * self.length * self.heads() * self.dim;
        let large = |i, count| part(i, count).iter().map(|x| 3.0 * x).collect::<Vec<_>>();
        Buffers {
            queries: Owned::new(self.query_kind, &large(0, count)),
            keys: Owned::new(self.kind, &large(1, positions * (self.dim + self.gap))),
            values: Owned::new(self.kind, &part(2, positions * (self.value_dim + self.gap))),
            codes: [words(3, self.dim), words(4, self.value_dim)],
            scales: [scales(5, self.dim), scales(6, self.value_dim)],
            biases: [scales(7, self.dim), scales(8, self.value_dim)],
            allowed: part(9, area).iter().map(|x| u8::from(*x > -0.4)).collect(),
            bias: Owned::new(
                self.query_kind,
                &part(10, area)
                    .iter()
                    .map(|x| if *x > 0.9 { f32::NEG_INFINITY } else { 2.0 * x })
                    .collect::<Vec<_>>(),
            ),
            sinks: Owned::new(self.query_kind, &large(11, self.heads())),
        }
    }

    /// The queries `range` of the case, over the keys that they would see if they came alone.
    fn attention<'a>(&self, buffers: &'a Buffers, range: Range<usize>) -> Attention<'a> {
        let (length, heads, room) = (range.len(), self.heads(), self.keys + self.room);
        let keys = if self.causal || self.window.is_some() {
            self.keys - (self.length - range.end)
        } else {
            self.keys
        };
        // Queries lie as [batch, length, heads, dim], the way a projection leaves them.
        let start = range.start * heads * self.dim;
        let queries = match buffers.queries.view() {
            Floats::F32(all) => Floats::F32(&all[start..]),
            Floats::F16(all) => Floats::F16(&all[start..]),
            Floats::Bf16(all) => Floats::Bf16(&all[start..]),
        };
        let query_strides = [self.length * heads * self.dim, self.dim, heads * self.dim, 1];
        let queries = Heads::new(queries, [self.batch, heads, length, self.dim], query_strides).unwrap();
        let stored = |which: usize, data: &'a Owned, dim: usize| {
            let shape = [self.batch, self.kv_heads, keys, dim];
            if let Some((bits, group)) = self.quantized {
                let strides = |row| [self.kv_heads * room * row, room * row, row];
                let (scales, biases) = (buffers.scales[which].view(), buffers.biases[which].view());
                let (words, groups) = (strides(dim / 32 * bits), strides(dim / group));
                let codes = &buffers.codes[which];
                Stored::Quantized(
                    QuantizedHeads::new(codes, scales, biases, shape, words, groups, bits, group).unwrap(),
                )
            } else {
                let row = dim + self.gap;
                let strides = [self.kv_heads * room * row, room * row, row, 1];
                Stored::Dense(Heads::new(data.view(), shape, strides).unwrap())
            }
        };
        let mask_start = range.start * self.keys;
        let strides = [self.length * self.keys, 0, self.keys, 1];
        let mask = match self.mask {
            1 => Some(Mask::Bool { allowed: &buffers.allowed[mask_start..], strides }),
            2 => {
                let bias = match buffers.bias.view() {
                    Floats::F32(all) => Floats::F32(&all[mask_start..]),
                    Floats::F16(all) => Floats::F16(&all[mask_start..]),
                    Floats::Bf16(all) => Floats::Bf16(&all[mask_start..]),
                };
                Some(Mask::Additive { bias, strides })
            }
            _ => None,
        };
        Attention {
            queries,
            keys: stored(0, &buffers.keys, self.dim),
            values: stored(1, &buffers.values, self.value_dim),
            scale: 1.0 / (self.dim as f32).sqrt(),
            causal: self.causal,
            window: self.window,
            mask,
            sinks: self.sinks.then(|| buffers.sinks.view()),
        }
    }

    fn compute(&self, isa: Isa, pool: &Pool, buffers: &Buffers, range: Range<usize>) -> Vec<f32> {
        let mut out = vec![f32::NAN; self.batch * self.heads() * range.len() * self.value_dim];
        let a = self.attention(buffers, range);
        attention(isa, pool, &a, Layout::HeadsFirst, FloatsMut::F32(&mut out)).unwrap();
        out
    }

    /// Every instruction set and pool against the reference and against each other.
    fn check(&self, pools: &[Pool]) {
        let buffers = self.buffers();
        let expected = reference::attention(&self.attention(&buffers, 0..self.length));
        let plain = self.compute(Isa::PLAIN, &pools[0], &buffers, 0..self.length);
        for (i, (found, expected)) in plain.iter().zip(&expected).enumerate() {
            let error = (f64::from(*found) - expected).abs();
            assert!(error < 2e-6, "{i}: {found} is not {expected} in {self:?}");
        }
        for isa in isas() {
            // The cut is the same on all instruction sets.
            let pools = if isa == Isa::detect() { pools } else { &pools[1..2] };
            for pool in pools {
                let found = self.compute(isa, pool, &buffers, 0..self.length);
                assert_eq!(bits(&found), bits(&plain), "{} {} {self:?}", isa.level(), pool.threads());
            }
        }
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let kinds = || prop_oneof![Just(Type::F32), Just(Type::F16), Just(Type::Bf16)];
    let dims = || prop_oneof![Just(16), Just(40), Just(64), Just(80), Just(96), Just(128), 1..40usize];
    let shape = (1..3usize, 1..3usize, 1..6usize, 1..24usize, 0..200usize, dims(), dims());
    let quantized = prop_oneof![
        2 => Just(None),
        1 => (prop_oneof![Just(4), Just(8), Just(3)], prop_oneof![Just(32), Just(64)]).prop_map(Some)
    ];
    let rest = (
        (0..70usize, 0..9usize),
        kinds(),
        kinds(),
        any::<bool>(),
        prop::option::of(1..200usize),
        (0..3u8, any::<bool>()),
        quantized,
        any::<u64>(),
    );
    (shape, rest).prop_map(|(shape, rest)| {
        let (batch, kv_heads, group, length, more, mut dim, mut value_dim) = shape;
        let ((room, gap), kind, query_kind, causal, window, (mask, sinks), quantized, seed) = rest;
        if quantized.is_some() {
            (dim, value_dim) = (dim.next_multiple_of(64), value_dim.next_multiple_of(64));
        }
        let keys = length + more;
        Case {
            batch,
            kv_heads,
            group,
            length,
            keys,
            dim,
            value_dim,
            room,
            gap,
            kind,
            query_kind,
            causal,
            window,
            mask,
            sinks,
            quantized,
            seed: seed >> 8,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn all_paths_agree_with_the_reference(case in cases()) {
        case.check(&pools());
    }

    #[test]
    fn a_query_alone_equals_the_query_among_others(case in cases(), cut in any::<prop::sample::Index>()) {
        // Without a causal mask a chunk would see other keys.
        let case = Case { causal: true, batch: 1, ..case };
        let (buffers, pools) = (case.buffers(), pools());
        let isa = Isa::detect();
        let whole = case.compute(isa, &pools[1], &buffers, 0..case.length);
        let cut = cut.index(case.length + 1);
        let alone = cut.min(case.length - 1);
        for range in [0..cut, cut..case.length, alone..alone + 1] {
            if range.is_empty() {
                continue;
            }
            let part = case.compute(isa, &pools[range.len() % 3], &buffers, range.clone());
            for (head, part) in part.chunks(range.len() * case.value_dim).enumerate() {
                let start = (head * case.length + range.start) * case.value_dim;
                prop_assert_eq!(bits(part), bits(&whole[start..][..part.len()]), "{:?}", range);
            }
        }
    }
}

#[test]
fn one_token_over_a_long_cache_is_split_and_merged_to_the_same_bits() {
    for kind in [Type::F32, Type::F16, Type::Bf16] {
        for keys in [1, 63, 64, 65, 700, 3000] {
            let case = Case { kv_heads: 3, keys, kind, query_kind: kind, ..Case::default() };
            case.check(&pools());
        }
    }
}

#[test]
fn every_head_size_up_to_512() {
    let pools = pools();
    for dim in [16, 24, 80, 96, 112, 192, 256, 320, 512] {
        for (length, group) in [(1, 1), (5, 8)] {
            let (value_dim, kind) = (if dim == 192 { 128 } else { dim }, Type::Bf16);
            Case { dim, value_dim, length, group, kind, keys: 70, ..Case::default() }.check(&pools);
        }
    }
}

#[test]
fn every_width_of_a_quantized_cache() {
    let pools = pools();
    for bits in affine::WIDTHS {
        for group in affine::GROUPS {
            let (quantized, kind) = (Some((bits, group)), Type::ALL[bits % 3]);
            let case = Case { quantized, length: 1 + bits % 2, kind, ..Case::default() };
            Case { dim: 128, value_dim: 128, keys: 70, ..case }.check(&pools);
        }
    }
}

#[test]
fn a_batch_row_does_not_depend_on_the_batch() {
    let isa = Isa::detect();
    let pools = pools();
    let case = Case { batch: 4, kind: Type::F16, keys: 500, causal: false, ..Case::default() };
    let buffers = case.buffers();
    let whole = case.compute(isa, &pools[1], &buffers, 0..1);
    let full = case.attention(&buffers, 0..1);
    for b in 0..4 {
        let Stored::Dense(keys) = full.keys else { unreachable!() };
        let Stored::Dense(values) = full.values else { unreachable!() };
        let one = |heads: Heads<'_>| {
            let Floats::F16(data) = heads.data else { unreachable!() };
            let start = b * heads.strides[0];
            Heads {
                data: Floats::F16(Box::leak(data[start..].to_vec().into())),
                shape: [1, heads.shape[1], heads.shape[2], heads.shape[3]],
                ..heads
            }
        };
        let Floats::F32(queries) = full.queries.data else { unreachable!() };
        let queries = Heads {
            data: Floats::F32(&queries[b * full.queries.strides[0]..]),
            shape: [1, 6, 1, 64],
            ..full.queries
        };
        let alone =
            Attention { queries, keys: Stored::Dense(one(keys)), values: Stored::Dense(one(values)), ..full };
        let mut out = vec![0.0; 6 * 64];
        attention(isa, &pools[2], &alone, Layout::TokensFirst, FloatsMut::F32(&mut out)).unwrap();
        assert_eq!(bits(&out), bits(&whole[b * 6 * 64..][..6 * 64]));
    }
}

#[test]
fn layouts_hold_the_same_rows() {
    let case = Case { batch: 2, length: 7, ..Case::default() };
    let (buffers, pool) = (case.buffers(), Pool::new(2).unwrap());
    let heads_first = case.compute(Isa::detect(), &pool, &buffers, 0..7);
    let mut tokens_first = vec![f16::ZERO; heads_first.len()];
    let a = case.attention(&buffers, 0..7);
    attention(Isa::detect(), &pool, &a, Layout::TokensFirst, FloatsMut::F16(&mut tokens_first)).unwrap();
    for b in 0..2 {
        for h in 0..6 {
            for l in 0..7 {
                let from = &heads_first[((b * 6 + h) * 7 + l) * 64..][..64];
                let to = &tokens_first[((b * 7 + l) * 6 + h) * 64..][..64];
                assert!(from.iter().zip(to).all(|(from, to)| f16::from_f32(*from) == *to));
            }
        }
    }
}

#[test]
fn a_query_that_sees_nothing_gets_zeros_even_with_a_sink() {
    let pool = Pool::new(1).unwrap();
    for sinks in [false, true] {
        for keys in [0, 70] {
            let case = Case { keys, causal: false, sinks, mask: 1, ..Case::default() };
            let mut buffers = case.buffers();
            buffers.allowed.fill(0);
            assert!(case.compute(Isa::detect(), &pool, &buffers, 0..1).iter().all(|x| x.to_bits() == 0));
        }
    }
}

#[test]
fn values_that_are_not_finite_stay_with_the_queries_that_see_them() {
    let case = Case { length: 20, keys: 90, room: 0, ..Case::default() };
    let mut buffers = case.buffers();
    let Owned::F32(values) = &mut buffers.values else { unreachable!() };
    // The last key of the first head: hidden from all queries but the last.
    values[89 * 64..90 * 64].fill(f32::INFINITY);
    for isa in isas() {
        let out = case.compute(isa, &Pool::new(2).unwrap(), &buffers, 0..20);
        assert!(out[..19 * 64].iter().all(|x| x.is_finite()));
        assert!(out[19 * 64..20 * 64].iter().all(|x| !x.is_finite()));
    }
}

#[test]
fn nan_scores_are_not_hidden() {
    let case = Case { keys: 70, causal: false, ..Case::default() };
    let mut buffers = case.buffers();
    let Owned::F32(keys) = &mut buffers.keys else { unreachable!() };
    keys[66 * 64] = f32::NAN;
    for isa in isas() {
        let out = case.compute(isa, &Pool::new(1).unwrap(), &buffers, 0..1);
        assert!(out[..3 * 64].iter().all(|x| x.is_nan()) && out[3 * 64..].iter().all(|x| x.is_finite()));
    }
}

#[test]
fn large_scores_do_not_overflow() {
    let case = Case { length: 3, ..Case::default() };
    let mut buffers = case.buffers();
    let Owned::F32(keys) = &mut buffers.keys else { unreachable!() };
    keys.iter_mut().for_each(|x| *x *= 1e4);
    let a = case.attention(&buffers, 0..3);
    let expected = reference::attention(&a);
    let found = case.compute(Isa::detect(), &Pool::new(1).unwrap(), &buffers, 0..3);
    // Scores near 1e5 carry an error of about 1e-2 in float32.
    assert!(found.iter().zip(expected).all(|(x, y)| (f64::from(*x) - y).abs() < 0.05));
}

#[test]
fn arguments_that_do_not_fit_are_refused_with_names() {
    let case = Case { length: 3, keys: 5, ..Case::default() };
    let (buffers, pool) = (case.buffers(), Pool::new(1).unwrap());
    let good = case.attention(&buffers, 0..3);
    let refused = |a: Attention<'_>| {
        let mut out = vec![0.0; 6 * 3 * 64];
        attention(Isa::PLAIN, &pool, &a, Layout::default(), FloatsMut::F32(&mut out)).unwrap_err().to_string()
    };
    let mut few = good;
    few.queries.shape[1] = 5;
    assert_eq!(
        refused(few),
        "attention: the number of query heads is 5; it must be a multiple of the key heads"
    );
    assert_eq!(
        refused(Attention { window: Some(0), ..good }),
        "attention: the window is 0; it must be at least 1"
    );
    let mask = Some(Mask::Bool { allowed: &[1; 14], strides: [0, 0, 5, 1] });
    assert_eq!(
        refused(Attention { mask, ..good }),
        "attention: the mask has 14 elements but its shape and strides reach 15; pass the whole buffer"
    );
    let sinks = Some(Floats::F32(&[0.0; 2]));
    assert_eq!(refused(Attention { sinks, ..good }), "attention: the number of sinks is 2 but must be 6");
    let mut out = vec![0.0; 7];
    let error = attention(Isa::PLAIN, &pool, &good, Layout::default(), FloatsMut::F32(&mut out));
    assert_eq!(error.unwrap_err().to_string(), "attention: the number of results is 7 but must be 1152");
    let strided = Heads::new(Floats::F32(&[0.0; 64]), [1, 1, 2, 16], [32, 32, 16, 2]);
    assert!(matches!(strided, Err(KernelError::Unsupported { .. })));
    let huge = Heads::new(Floats::F32(&[0.0; 64]), [1, 2, 2, 16], [1, usize::MAX, 16, 1]);
    assert!(matches!(huge, Err(KernelError::Short { needed: usize::MAX, .. })));
    assert!(Isa::forced(Level::Plain).is_ok());
}

/// Outputs of `mlx.fast.scaled_dot_product_attention` 0.32.2, causal with sinks, and with a window as array.
#[test]
fn sinks_causal_order_and_windows_equal_mlx() {
    let q: Vec<f32> = (0..24).map(|i| -1.0 + 2.0 * i as f32 / 23.0).collect();
    let k: Vec<f32> = (0..20).map(|i| (i as f32).cos()).collect();
    let v: Vec<f32> = (0..20).map(|i| (i as f32).sin()).collect();
    let stored = |x| Stored::Dense(Heads::dense(Floats::F32(x), [1, 1, 5, 4]).unwrap());
    let causal = Attention {
        queries: Heads::dense(Floats::F32(&q), [1, 2, 3, 4]).unwrap(),
        keys: stored(&k),
        values: stored(&v),
        scale: 0.7,
        causal: true,
        window: None,
        mask: None,
        sinks: Some(Floats::F32(&[0.3, -0.2])),
    };
    let check = |a: &Attention<'_>, first: [f32; 4], last: [f32; 4]| {
        let mut out = [0.0; 24];
        let pool = Pool::new(1).unwrap();
        attention(Isa::detect(), &pool, a, Layout::HeadsFirst, FloatsMut::F32(&mut out)).unwrap();
        let near = |x: &[f32], y: [f32; 4]| x.iter().zip(y).all(|(x, y)| (x - y).abs() < 2e-6);
        assert!(near(&out[..4], first) && near(&out[20..], last), "{out:?}");
    };
    check(
        &causal,
        [0.479_429_78, 0.250_968_28, -0.208_232_31, -0.475_985_05],
        [-0.382_896_93, -0.312_054_87, 0.045_689_03, 0.361_426_6],
    );
    check(
        &Attention { window: Some(2), sinks: None, ..causal },
        [0.749_244_63, 0.223_587_14, -0.507_635_36, -0.772_140_26],
        [-0.415_807_72, -0.250_783_38, 0.144_810_02, 0.407_265_78],
    );
}
