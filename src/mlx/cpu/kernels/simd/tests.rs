//! Every instruction set against [`Portable`], bit for bit.

use half::{bf16, f16};

use super::super::testing::erf_exact;
use super::*;

/// Runs every operation once and returns what came out as bits.
struct Everything<'a> {
    a: &'a [f32; LANES],
    b: &'a [f32; LANES],
    c: &'a [f32; LANES],
}

impl Kernel for Everything<'_> {
    type Output = Vec<(&'static str, Vec<u32>)>;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        let (a, b, c) = (s.load(self.a), s.load(self.b), s.load(self.c));
        let mut found = Vec::new();
        let mut put = |name, v| {
            let mut to = [0.0; LANES];
            s.store(&mut to, v);
            found.push((name, to.map(bits).to_vec()));
        };
        put("splat", s.splat(self.a[3]));
        put("add", s.add(a, b));
        put("sub", s.sub(a, b));
        put("mul", s.mul(a, b));
        put("div", s.div(a, b));
        put("mul_add", s.mul_add(a, b, c));
        put("neg_mul_add", s.neg_mul_add(a, b, c));
        put("max", s.max(a, b));
        put("min", s.min(a, b));
        put("abs", s.abs(a));
        put("copysign", s.copysign(a, b));
        put("round", s.round(a));
        put("floor", s.floor(a));
        let n = s.max(s.min(s.round(b), s.splat(250.0)), s.splat(-250.0));
        put("scale2", s.scale2(s.copysign(s.splat(1.37), a), n));
        put("select_lt", s.select_lt(a, b, c, a));
        for (low, high) in [(0, 16), (0, 0), (3, 7), (5, 40), (16, 20), (9, 4)] {
            put("keep_lanes", s.keep_lanes(a, low, high, b));
        }
        let (even, odd) = s.deinterleave(a, b);
        put("deinterleave", even);
        put("deinterleave", odd);
        let (first, second) = s.interleave(a, b);
        put("interleave", first);
        put("interleave", second);
        put("interleave undoes", s.interleave(even, odd).0);
        let vectors: [S::V; LANES] =
            std::array::from_fn(|i| s.mul_add(s.splat(i as f32), b, [a, b, c][i % 3]));
        let folds =
            std::array::from_fn(|q| s.fold([vectors[q], vectors[q + 4], vectors[q + 8], vectors[q + 12]]));
        let sums = s.merge_folded(folds);
        put("merge_folded", sums);
        put("sum", s.load(&vectors.map(|v| s.sum(v))));
        put("largest", s.splat(s.largest(s.abs(a))));
        put("exp", math::exp(s, a));
        put("tanh", math::tanh(s, a));
        put("erf", math::erf(s, a));
        put("sin", math::sin_cos(s, a).0);
        put("cos", math::sin_cos(s, a).1);
        let mut half = [f16::ZERO; LANES];
        s.store_f16(&mut half, a);
        put("load_f16", s.load_f16(&half));
        let mut brain = [bf16::ZERO; LANES];
        s.store_bf16(&mut brain, a);
        put("load_bf16", s.load_bf16(&brain));
        let words = self.a.map(f32::to_bits);
        put("load_u8", s.load_u8(words.first_chunk().unwrap()));
        put("load_u4", s.load_u4(words.first_chunk().unwrap()));
        let part = load_part(s, &self.a[..5]);
        put("load_part", part);
        let mut stored = [1.0; 7];
        store_part(s, &mut stored, part);
        found.push(("store_part", stored.map(bits).to_vec()));
        found
    }
}

/// Bits, with one for all NaNs.
fn bits(x: f32) -> u32 {
    if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }
}

fn inputs(seed: u32) -> [f32; LANES] {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    std::array::from_fn(|_| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        match state % 29 {
            0 => f32::INFINITY,
            1 => f32::NEG_INFINITY,
            2 => f32::NAN,
            3 => -0.0,
            4 => f32::from_bits(state >> 10),
            5 => 65519.0 + (state >> 29) as f32,
            _ => (state as i32 as f32) * 2f32.powi((state % 41) as i32 - 60),
        }
    })
}

#[test]
fn all_instruction_sets_give_the_same_bits() {
    for seed in 0..400 {
        let (a, b, c) = (inputs(3 * seed), inputs(3 * seed + 1), inputs(3 * seed + 2));
        // Sums across lanes of NaN and infinity are NaN everywhere, so they are compared as well.
        let expected = Everything { a: &a, b: &b, c: &c }.run(Portable);
        for isa in Isa::available() {
            let found = run(isa, Everything { a: &a, b: &b, c: &c });
            for (expected, found) in expected.iter().zip(&found) {
                if expected.0 == "largest" && a.iter().any(|x| x.is_nan()) {
                    continue;
                }
                assert_eq!(expected, found, "{} {a:?} {b:?}", isa.level());
            }
        }
    }
}

#[test]
fn lanes_are_summed_as_the_fold_says() {
    let ones: [f32; LANES] = std::array::from_fn(|i| (i * i) as f32 + 0.1);
    assert!((Portable.sum(ones) - ones.iter().sum::<f32>()).abs() < 1e-3);
    assert_eq!(Portable.load_u4(&[0x7654_3210, 0xfedc_ba98]), std::array::from_fn(|i| i as f32));
    let codes = [0x0302_0100, 0x0706_0504, 0x0b0a_0908, 0x0f0e_0d0c];
    assert_eq!(Portable.load_u8(&codes), std::array::from_fn(|i| i as f32));
}

/// The largest error of `ours` in units of the last place, over floats from `low` to `high`.
fn worst_ulp(
    low: f32,
    high: f32,
    ours: impl Fn([f32; LANES]) -> [f32; LANES],
    exact: impl Fn(f64) -> f64,
) -> f64 {
    let mut worst = 0f64;
    let (sign, from, to) = if high <= 0.0 {
        (-1.0, high.abs().to_bits(), low.abs().to_bits())
    } else {
        (1.0, low.to_bits(), high.to_bits())
    };
    let step = ((to - from) / 100_000).max(1);
    for start in (from..=to).step_by(LANES * step as usize) {
        let x = std::array::from_fn(|i| sign * f32::from_bits((start + i as u32 * step).min(to)));
        for (x, ours) in x.into_iter().zip(ours(x)) {
            let exact = exact(f64::from(x));
            let rounded = exact as f32;
            if rounded.is_infinite() {
                assert!(
                    ours == rounded || (ours == f32::MAX && exact < 3.41e38),
                    "{x}: {ours} is not {exact}"
                );
                continue;
            }
            let size = rounded.abs().max(f32::MIN_POSITIVE);
            let ulp = f64::from(size.next_up()) - f64::from(size);
            worst = worst.max((f64::from(ours) - exact).abs() / ulp);
        }
    }
    worst
}

#[test]
fn exp_is_within_an_ulp_over_its_whole_range() {
    let many = |x| math::exp(Portable, x);
    let exp = |x| many([x; LANES])[5];
    for (low, high) in [(0.0, 88.8), (88.7, 200.0), (-110.0, 0.0), (-1e30, -100.0)] {
        let worst = worst_ulp(low, high, many, f64::exp);
        assert!(worst < 1.0, "{worst} ulp in {low}..{high}");
    }
    assert_eq!(exp(0.0), 1.0);
    assert_eq!(exp(f32::INFINITY), f32::INFINITY);
    assert_eq!(exp(f32::NEG_INFINITY), 0.0);
    assert!(exp(f32::NAN).is_nan());
}

#[test]
fn tanh_is_within_two_ulp_over_its_whole_range() {
    let many = |x| math::tanh(Portable, x);
    let tanh = |x| many([x; LANES])[5];
    for (low, high) in [(0.0, 0.7), (0.6, 12.0), (12.0, f32::MAX), (-9.0, -1e-30)] {
        let worst = worst_ulp(low, high, many, f64::tanh);
        assert!(worst < 2.0, "{worst} ulp in {low}..{high}");
    }
    assert_eq!(tanh(f32::INFINITY), 1.0);
    assert_eq!(tanh(f32::NEG_INFINITY), -1.0);
    assert_eq!(tanh(-0.0).to_bits(), (-0f32).to_bits());
    assert!(tanh(f32::NAN).is_nan());
}

#[test]
fn erf_is_within_two_ulp_over_its_whole_range() {
    assert!((erf_exact(1.0) - 0.842_700_792_949_714_9).abs() < 1e-15);
    let many = |x| math::erf(Portable, x);
    let erf = |x| many([x; LANES])[5];
    for (low, high) in [(0.0, 1.1), (0.9, 6.0), (6.0, f32::MAX), (-5.0, -1e-30)] {
        let worst = worst_ulp(low, high, many, erf_exact);
        assert!(worst < 2.0, "{worst} ulp in {low}..{high}");
    }
    assert_eq!(erf(f32::INFINITY), 1.0);
    assert_eq!(erf(f32::NEG_INFINITY), -1.0);
    assert!(erf(f32::NAN).is_nan());
}

#[test]
fn sine_and_cosine_hold_up_to_long_contexts() {
    let (mut worst, mut x) = (0f64, 0f32);
    while x < 200_000.0 {
        for x in [x, -x] {
            let (sin, cos) = math::sin_cos(Portable, [x; LANES]);
            worst = worst.max((f64::from(sin[0]) - f64::from(x).sin()).abs());
            worst = worst.max((f64::from(cos[0]) - f64::from(x).cos()).abs());
        }
        x = x * 1.0003 + 0.01;
    }
    assert!(worst < 1.5e-7, "{worst}");
}
