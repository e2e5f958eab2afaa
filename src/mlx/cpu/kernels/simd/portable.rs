//! The plain implementation: arrays of 16 floats, the yardstick of the others.

use half::{bf16, f16};

use super::{Kernel, LANES, Simd};

/// Runs anywhere.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Portable;

type V = [f32; LANES];

#[inline(always)]
fn map(a: V, f: impl Fn(f32) -> f32) -> V {
    a.map(f)
}

#[inline(always)]
fn zip(a: V, b: V, f: impl Fn(f32, f32) -> f32) -> V {
    std::array::from_fn(|i| f(a[i], b[i]))
}

#[inline(never)]
fn entered<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Portable)
}

/// `2^n` for `n` in the range of normal numbers.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits(((n + 127) as u32) << 23)
}

impl Simd for Portable {
    type V = V;
    const TILE_ROWS: usize = 2;
    const TILE_KEYS: usize = 4;
    const TILE_VECTORS: usize = 2;

    #[inline(always)]
    fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        entered(kernel)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        [x; LANES]
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> V {
        *from
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; LANES], v: V) {
        *to = v;
    }

    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> V {
        from.map(f32::from)
    }

    #[inline(always)]
    fn store_f16(self, to: &mut [f16; LANES], v: V) {
        *to = v.map(f16::from_f32);
    }

    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> V {
        from.map(f32::from)
    }

    #[inline(always)]
    fn store_bf16(self, to: &mut [bf16; LANES], v: V) {
        *to = v.map(bf16::from_f32);
    }

    #[inline(always)]
    fn load_u8(self, from: &[u32; LANES / 4]) -> V {
        std::array::from_fn(|i| f32::from((from[i / 4] >> (8 * (i % 4))) as u8))
    }

    #[inline(always)]
    fn load_u4(self, from: &[u32; LANES / 8]) -> V {
        std::array::from_fn(|i| f32::from((from[i / 8] >> (4 * (i % 8))) as u8 & 15))
    }

    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        zip(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        zip(a, b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        zip(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        zip(a, b, |a, b| a / b)
    }

    #[inline(always)]
    fn mul_add(self, a: V, b: V, c: V) -> V {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }

    #[inline(always)]
    fn neg_mul_add(self, a: V, b: V, c: V) -> V {
        std::array::from_fn(|i| (-a[i]).mul_add(b[i], c[i]))
    }

    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        zip(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        zip(a, b, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn abs(self, v: V) -> V {
        map(v, f32::abs)
    }

    #[inline(always)]
    fn copysign(self, v: V, sign: V) -> V {
        zip(v, sign, f32::copysign)
    }

    #[inline(always)]
    fn round(self, v: V) -> V {
        map(v, f32::round_ties_even)
    }

    #[inline(always)]
    fn floor(self, v: V) -> V {
        map(v, f32::floor)
    }

    #[inline(always)]
    fn scale2(self, v: V, n: V) -> V {
        zip(v, n, |v, n| {
            let n = n as i32;
            let half = n >> 1;
            v * power_of_two(half) * power_of_two(n - half)
        })
    }

    #[inline(always)]
    fn select_lt(self, a: V, b: V, yes: V, no: V) -> V {
        std::array::from_fn(|i| if a[i] < b[i] { yes[i] } else { no[i] })
    }

    #[inline(always)]
    fn keep_lanes(self, v: V, low: usize, high: usize, fill: V) -> V {
        std::array::from_fn(|i| if (low..high).contains(&i) { v[i] } else { fill[i] })
    }

    #[inline(always)]
    fn deinterleave(self, a: V, b: V) -> (V, V) {
        let at = |i: usize| if i < LANES { a[i] } else { b[i - LANES] };
        (std::array::from_fn(|i| at(2 * i)), std::array::from_fn(|i| at(2 * i + 1)))
    }

    #[inline(always)]
    fn interleave(self, even: V, odd: V) -> (V, V) {
        let at = |i: usize| if i.is_multiple_of(2) { even[i / 2] } else { odd[i / 2] };
        (std::array::from_fn(at), std::array::from_fn(|i| at(LANES + i)))
    }

    #[inline(always)]
    fn fold(self, v: [V; 4]) -> V {
        std::array::from_fn(|i| {
            let (v, i) = (v[i / 4], i % 4);
            (v[i] + v[i + 8]) + (v[i + 4] + v[i + 12])
        })
    }

    #[inline(always)]
    fn merge_folded(self, folds: [V; 4]) -> V {
        std::array::from_fn(|i| {
            let v = &folds[i % 4][i / 4 * 4..][..4];
            (v[0] + v[2]) + (v[1] + v[3])
        })
    }

    #[inline(always)]
    fn sum(self, v: V) -> f32 {
        let folds = [self.fold([v; 4]); 4];
        self.merge_folded(folds)[0]
    }

    #[inline(always)]
    fn largest(self, v: V) -> f32 {
        v.into_iter().fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b })
    }
}
