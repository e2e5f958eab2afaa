//! exp, tanh, erf, sin and cos of 16 lanes.
//!
//! Polynomials are least-maximum fits of this project. The errors stated are measured in the tests against float64
//! over the whole range.

use super::Simd;

/// `c[0] + x c[1] + x^2 c[2] + …`, by Horner's rule.
#[inline(always)]
fn polynomial<S: Simd, const N: usize>(s: S, x: S::V, c: [f32; N]) -> S::V {
    let mut sum = s.splat(c[N - 1]);
    for &c in c[..N - 1].iter().rev() {
        sum = s.mul_add(sum, x, s.splat(c));
    }
    sum
}

/// ln 2 in two parts, the first with 16 zero bits at its end.
const LN_2: (f32, f32) = (0.693_145_75, 1.428_606_8e-6);

/// `e^x`, within 1 ulp; subnormal results are kept, NaN stays NaN.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    // e^-104 rounds to zero and e^89 to infinity.
    let x = s.min(s.splat(89.0), s.max(s.splat(-104.0), x));
    let n = s.round(s.mul(x, s.splat(std::f32::consts::LOG2_E)));
    let r = s.neg_mul_add(n, s.splat(LN_2.0), x);
    let r = s.neg_mul_add(n, s.splat(LN_2.1), r);
    let q = polynomial(s, r, [0.5, 0.166_665_18, 0.041_666_206, 0.008_368_89, 0.001_395_048_9]);
    let p = s.add(s.splat(1.0), s.mul_add(s.mul(r, r), q, r));
    s.scale2(p, n)
}

/// As [`exp`], but results that would be subnormal are zero: weights of a softmax, where these count for nothing
/// and arithmetic on them is slow.
#[inline(always)]
pub(crate) fn exp_weight<S: Simd>(s: S, x: S::V) -> S::V {
    let least = s.splat(-87.3);
    s.select_lt(x, least, s.splat(0.0), exp(s, s.max(least, x)))
}

/// Hyperbolic tangent, within 2 ulp.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(s: S, x: S::V) -> S::V {
    let z = s.mul(x, x);
    let q = [-0.333_333_28, 0.133_331_58, -0.053_940_564, 0.021_666_344, -0.008_091_965, 0.002_064_662];
    let small = s.mul_add(s.mul(z, x), polynomial(s, z, q), x);
    let (one, two, magnitude) = (s.splat(1.0), s.splat(2.0), s.abs(x));
    let grown = exp(s, s.add(magnitude, magnitude));
    let large = s.sub(one, s.div(two, s.add(grown, one)));
    s.copysign(s.select_lt(magnitude, s.splat(0.65), small, large), x)
}

/// The error function, within 2 ulp.
#[inline(always)]
pub(crate) fn erf<S: Simd>(s: S, x: S::V) -> S::V {
    let magnitude = s.abs(x);
    let z = s.mul(x, x);
    let p =
        [0.128_379_17, -0.376_126_26, 0.112_836, -0.026_854_444, 0.005_189_534, -0.000_802_083, 7.889_084e-5];
    let small = s.mul_add(polynomial(s, z, p), x, x);
    // -ln erfc(x), which at 4 has passed the point where erf rounds to 1.
    let q = [
        0.000_353_708_92,
        1.127_04,
        0.638_225_6,
        0.103_037_44,
        -0.021_805_352,
        0.002_939_615_6,
        -0.000_185_574_9,
    ];
    let bounded = s.min(s.splat(4.0), magnitude);
    let complement = exp(s, s.sub(s.splat(0.0), polynomial(s, bounded, q)));
    let large = s.sub(s.splat(1.0), complement);
    s.copysign(s.select_lt(magnitude, s.splat(1.0), small, large), x)
}

/// π/2 in three parts.
const HALF_PI: (f32, f32, f32) = (1.570_796_4, -4.371_139e-8, -1.715_124_5e-15);

/// Sine and cosine, within 1.5e-7 for |x| up to 200,000 (positions of a rope); beyond that precision fades.
#[inline(always)]
pub(crate) fn sin_cos<S: Simd>(s: S, x: S::V) -> (S::V, S::V) {
    let n = s.round(s.mul(x, s.splat(std::f32::consts::FRAC_2_PI)));
    let r = s.neg_mul_add(n, s.splat(HALF_PI.0), x);
    let r = s.neg_mul_add(n, s.splat(HALF_PI.1), r);
    let r = s.neg_mul_add(n, s.splat(HALF_PI.2), r);
    let z = s.mul(r, r);
    let sin = polynomial(s, z, [-0.166_666_55, 0.008_332_176, -0.000_195_169_76]);
    let sin = s.mul_add(s.mul(z, r), sin, r);
    let cos = polynomial(s, z, [0.041_666_646, -0.001_388_736_4, 2.443_809e-5]);
    let one = s.splat(1.0);
    let cos = s.add(one, s.mul(z, s.mul_add(z, cos, s.splat(-0.5))));
    // Quarter turns: 0, 1, 2, 3.
    let turns = s.neg_mul_add(s.floor(s.mul(n, s.splat(0.25))), s.splat(4.0), n);
    let odd = s.neg_mul_add(s.floor(s.mul(turns, s.splat(0.5))), s.splat(2.0), turns);
    let half = s.splat(0.5);
    let (sin, cos) = (s.select_lt(half, odd, cos, sin), s.select_lt(half, odd, sin, cos));
    let sin_sign = s.select_lt(turns, s.splat(1.5), one, s.splat(-1.0));
    let from_middle = s.abs(s.sub(turns, s.splat(1.5)));
    let cos_sign = s.select_lt(from_middle, one, s.splat(-1.0), one);
    (s.mul(sin, sin_sign), s.mul(cos, cos_sign))
}
