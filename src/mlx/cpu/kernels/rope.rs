//! Rotary position embeddings, in all variants of `mlx.fast.rope`.

use super::super::{Isa, Pool};
use super::SERIAL_ELEMENTS;
use super::error::{KernelError, expect};
use super::floats::{Floats, FloatsMut};
use super::pieces::Pieces;
use super::simd::{self, Element, Kernel, LANES, Simd, from_f32, math, to_f32};
use super::views::Heads;

const OP: &str = "rope";

/// A rotation by position, made once for a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Angle a position, of each pair.
    frequencies: Vec<f32>,
    /// Whether pairs are neighbours (`x[2i]`, `x[2i + 1]`) rather than halves (`x[i]`, `x[i + dims / 2]`).
    traditional: bool,
    /// Factor of the positions.
    scale: f32,
    /// Factor of what is rotated.
    magnitude: f32,
}

impl Rope {
    /// Rotates the first `dims` elements of a head: pair `i` by `base^(-2i / dims)` a position.
    ///
    /// # Errors
    /// When `dims` is odd.
    pub fn from_base(dims: usize, base: f32, scale: f32, traditional: bool) -> Result<Self, KernelError> {
        if !dims.is_multiple_of(2) {
            return Err(KernelError::Unsupported { op: OP, what: "dims", found: dims, rule: "even" });
        }
        // In float64, so that long contexts lose no phase to rounding of the exponent.
        let frequency = |i: usize| f64::from(base).powf(-2.0 * i as f64 / dims as f64) as f32;
        let frequencies = (0..dims / 2).map(frequency).collect();
        Ok(Self { frequencies, traditional, scale, magnitude: 1.0 })
    }

    /// Rotates pair `i` by `1 / periods[i]` a position: the `freqs` argument of `mlx.fast.rope`. Infinity leaves a
    /// pair as it is.
    pub fn from_periods(periods: &[f32], scale: f32, traditional: bool) -> Self {
        let frequencies = periods.iter().map(|period| 1.0 / period).collect();
        Self { frequencies, traditional, scale, magnitude: 1.0 }
    }

    /// The same rotation, which also multiplies what it rotates.
    pub fn with_magnitude(self, magnitude: f32) -> Self {
        Self { magnitude, ..self }
    }

    /// The rotation back, by the negative angles and with the same magnitude: the transpose of this one as a matrix.
    pub fn transposed(&self) -> Self {
        Self { frequencies: self.frequencies.iter().map(|frequency| -frequency).collect(), ..self.clone() }
    }

    /// The elements of a head that are rotated.
    pub fn dims(&self) -> usize {
        2 * self.frequencies.len()
    }
}

/// The position of each batch entry's first row.
#[derive(Clone, Copy, Debug)]
pub enum Offsets<'a> {
    /// The same for all.
    Same(i32),
    /// One each.
    Each(&'a [i32]),
}

/// Rotates `x` (`[batch, heads, length, dim]`) into `out`, row-major and of the type of `x`; elements past
/// [`Rope::dims`] are copied.
///
/// # Errors
/// When types or shapes do not fit together, or the work fails.
pub fn rope(
    isa: Isa,
    pool: &Pool,
    rope: &Rope,
    x: &Heads<'_>,
    offsets: Offsets<'_>,
    out: FloatsMut<'_>,
) -> Result<(), KernelError> {
    let [batch, heads, length, dim] = x.shape;
    if rope.dims() > dim {
        let rule = "no more than the head's dimension";
        return Err(KernelError::Unsupported { op: OP, what: "dims", found: rope.dims(), rule });
    }
    if let Offsets::Each(offsets) = offsets {
        expect(OP, "the number of offsets", batch, offsets.len())?;
    }
    expect(OP, "the number of results", batch * heads * length * dim, out.len())?;
    match (x.data, out) {
        (Floats::F32(from), FloatsMut::F32(out)) => spread(isa, pool, rope, x, from, offsets, out),
        (Floats::F16(from), FloatsMut::F16(out)) => spread(isa, pool, rope, x, from, offsets, out),
        (Floats::Bf16(from), FloatsMut::Bf16(out)) => spread(isa, pool, rope, x, from, offsets, out),
        _ => Err(KernelError::MixedTypes { op: OP, what: "input and output" }),
    }
}

/// Cuts the positions into tasks; a task computes the angles of a position once for all heads.
fn spread<E: Element>(
    isa: Isa,
    pool: &Pool,
    rope: &Rope,
    x: &Heads<'_>,
    from: &[E],
    offsets: Offsets<'_>,
    out: &mut [E],
) -> Result<(), KernelError> {
    let [batch, heads, length, dim] = x.shape;
    let each = (SERIAL_ELEMENTS / 2 / (heads * dim).max(1)).clamp(1, length.max(1));
    let tasks = length.div_ceil(each);
    let out = Pieces::new(out);
    Ok(pool.run(batch * tasks, &|task| {
        let (batch, first) = (task / tasks, task % tasks * each);
        let offset = match offsets {
            Offsets::Same(offset) => offset,
            Offsets::Each(offsets) => offsets[batch],
        };
        let last = length.min(first + each);
        simd::run(isa, Rotate { rope, x, from, batch, positions: first..last, offset, out: &out });
    })?)
}

/// Some positions of all heads of one batch entry.
struct Rotate<'a, E> {
    rope: &'a Rope,
    x: &'a Heads<'a>,
    from: &'a [E],
    batch: usize,
    positions: std::ops::Range<usize>,
    offset: i32,
    out: &'a Pieces<'a, E>,
}

impl<E: Element> Kernel for Rotate<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let [_, heads, length, dim] = self.x.shape;
        let mut angles = Angles::new(self.rope.frequencies.len());
        for position in self.positions {
            angles.set(s, self.rope, self.offset.wrapping_add(position as i32));
            for head in 0..heads {
                let from = &self.from[self.x.start(self.batch, head, position)..][..dim];
                let start = ((self.batch * heads + head) * length + position) * dim;
                // SAFETY: two tasks differ in their batch entry or in their positions.
                let to = unsafe { self.out.piece(start..start + dim) };
                rotate(s, self.rope, &mut angles, from, to);
            }
        }
    }
}

/// Cosines and sines of one position, padded to whole vectors, and room for one head. For one rotation only: the
/// angles of the last position are kept.
pub(super) struct Angles {
    position: Option<i32>,
    cos: Vec<[f32; LANES]>,
    sin: Vec<[f32; LANES]>,
    row: Vec<f32>,
}

impl Angles {
    pub(super) fn new(pairs: usize) -> Self {
        let vectors = pairs.div_ceil(LANES);
        let zero = [0.0; LANES];
        let row = vec![0.0; 4 * vectors * LANES];
        Self { position: None, cos: vec![zero; vectors], sin: vec![zero; vectors], row }
    }

    #[inline(always)]
    pub(super) fn set<S: Simd>(&mut self, s: S, rope: &Rope, position: i32) {
        if self.position.replace(position) == Some(position) {
            return;
        }
        let (position, magnitude) = (s.splat(position as f32 * rope.scale), s.splat(rope.magnitude));
        let frequencies = rope.frequencies.chunks(LANES);
        for (from, (cos, sin)) in frequencies.zip(self.cos.iter_mut().zip(&mut self.sin)) {
            let (sine, cosine) = math::sin_cos(s, s.mul(position, simd::load_part(s, from)));
            s.store(cos, s.mul(cosine, magnitude));
            s.store(sin, s.mul(sine, magnitude));
        }
    }
}

/// One head at one position.
#[inline(always)]
pub(super) fn rotate<S: Simd, E: Element>(s: S, rope: &Rope, angles: &mut Angles, from: &[E], to: &mut [E]) {
    let pairs = rope.frequencies.len();
    let (rotated, copied) = from.split_at(2 * pairs);
    let (to_rotated, to_copied) = to.split_at_mut(2 * pairs);
    to_copied.copy_from_slice(copied);
    let angle = |i: usize| (s.load(&angles.cos[i]), s.load(&angles.sin[i]));
    if pairs.is_multiple_of(LANES) {
        let rotated = rotated.as_chunks::<LANES>().0;
        let to = to_rotated.as_chunks_mut::<LANES>().0;
        let half = pairs / LANES;
        for i in 0..half {
            let (cos, sin) = angle(i);
            if rope.traditional {
                let (a, b) = (E::load(s, &rotated[2 * i]), E::load(s, &rotated[2 * i + 1]));
                let (a, b) = s.deinterleave(a, b);
                let (a, b) = turn(s, a, b, cos, sin);
                let (a, b) = s.interleave(a, b);
                E::store(s, &mut to[2 * i], a);
                E::store(s, &mut to[2 * i + 1], b);
            } else {
                let (a, b) = (E::load(s, &rotated[i]), E::load(s, &rotated[half + i]));
                let (a, b) = turn(s, a, b, cos, sin);
                E::store(s, &mut to[i], a);
                E::store(s, &mut to[half + i], b);
            }
        }
        return;
    }
    // Widened, with each half padded to whole vectors.
    let padded = angles.cos.len() * LANES;
    let Angles { cos, sin, row, .. } = angles;
    let (first, second) = row.split_at_mut(2 * padded);
    if rope.traditional {
        to_f32(s, rotated, first);
    } else {
        to_f32(s, &rotated[..pairs], &mut first[..padded]);
        to_f32(s, &rotated[pairs..], &mut first[padded..]);
    }
    let (from, to) = (first.as_chunks::<LANES>().0, second.as_chunks_mut::<LANES>().0);
    let half = padded / LANES;
    for i in 0..half {
        let (cos, sin) = (s.load(&cos[i]), s.load(&sin[i]));
        let (a, b) = if rope.traditional { (2 * i, 2 * i + 1) } else { (i, half + i) };
        let (mut x, mut y) = (s.load(&from[a]), s.load(&from[b]));
        if rope.traditional {
            (x, y) = s.deinterleave(x, y);
        }
        (x, y) = turn(s, x, y, cos, sin);
        if rope.traditional {
            (x, y) = s.interleave(x, y);
        }
        s.store(&mut to[a], x);
        s.store(&mut to[b], y);
    }
    if rope.traditional {
        from_f32(s, second, to_rotated);
    } else {
        let (low, high) = to_rotated.split_at_mut(pairs);
        from_f32(s, &second[..padded], low);
        from_f32(s, &second[padded..], high);
    }
}

/// `(a cos - b sin, b cos + a sin)`.
#[inline(always)]
fn turn<S: Simd>(s: S, a: S::V, b: S::V, cos: S::V, sin: S::V) -> (S::V, S::V) {
    (s.neg_mul_add(b, sin, s.mul(a, cos)), s.mul_add(a, sin, s.mul(b, cos)))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Owned, Type, assert_near, bits, isas, noise, pools};
    use super::*;

    fn ramp(count: usize) -> Vec<f32> {
        (0..count).map(|i| i as f32 / 8.0 - 0.5).collect()
    }

    fn rotated(rope: &Rope, x: &[f32], shape: [usize; 4], offsets: Offsets<'_>) -> Vec<f32> {
        let mut out = vec![0.0; x.len()];
        let x = Heads::dense(Floats::F32(x), shape).unwrap();
        let pool = Pool::new(1).unwrap();
        super::rope(Isa::detect(), &pool, rope, &x, offsets, FloatsMut::F32(&mut out)).unwrap();
        out
    }

    #[test]
    fn the_transpose_undoes_a_rotation_and_the_magnitude_counts_twice() {
        let x = ramp(2 * 3 * 80);
        for traditional in [false, true] {
            let rope = Rope::from_base(64, 100.0, 0.5, traditional).unwrap();
            let back = |rope: &Rope| {
                let turned = rotated(rope, &x, [1, 2, 3, 80], Offsets::Same(5));
                rotated(&rope.transposed(), &turned, [1, 2, 3, 80], Offsets::Same(5))
            };
            let expected: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
            assert_near(&back(&rope), &expected, Type::F32, 1e-4);
            let scaled = |i: usize, x: &f32| if i % 80 < 64 { 9.0 * f64::from(*x) } else { f64::from(*x) };
            let expected: Vec<f64> = x.iter().enumerate().map(|(i, x)| scaled(i, x)).collect();
            assert_near(&back(&rope.with_magnitude(3.0)), &expected, Type::F32, 1e-3);
        }
    }

    /// Outputs of `mlx.fast.rope` 0.32.2.
    #[test]
    fn rotations_equal_mlx() {
        let x = ramp(12);
        let rest = [0.5, 0.625, 0.75, 0.875];
        let check = |rope: &Rope, offset, mlx: [f64; 8]| {
            let found = rotated(rope, &x, [1, 1, 1, 12], Offsets::Same(offset));
            assert_near(&found[..8], &mlx, Type::F32, 3e-7);
            assert_eq!(found[8..], rest);
        };
        check(
            &Rope::from_base(8, 10_000.0, 1.0, false).unwrap(),
            3,
            [
                0.494_996_25,
                -0.395_191_22,
                -0.257_386_39,
                -0.126_124_44,
                -0.070_56,
                0.008_596_979,
                0.242_388_64,
                0.374_623_33,
            ],
        );
        check(
            &Rope::from_base(8, 100.0, 0.5, true).unwrap(),
            7,
            [
                0.336_684_64,
                0.526_562_87,
                -9.825_08e-5,
                -0.279_508_47,
                -0.042_862_23,
                0.117_421_59,
                0.207_050_1,
                0.400_318_92,
            ],
        );
        check(
            &Rope::from_periods(&[1.0, 2.0, f32::INFINITY, 8.0], 1.0, false),
            5,
            [
                -0.141_831_09,
                0.225_619_82,
                -0.25,
                -0.320_781_86,
                0.479_462_15,
                -0.324_570_03,
                0.25,
                0.230_974_02,
            ],
        );
        let found = rotated(
            &Rope::from_base(4, 10.0, 1.0, false).unwrap(),
            &ramp(16),
            [2, 1, 2, 4],
            Offsets::Each(&[2, 9]),
        );
        let mlx = [
            0.435_397_74,
            -0.228_576,
            -0.350_611_98,
            -0.322_494_95,
            -0.035_28,
            -0.231_899_16,
            -0.247_498_12,
            0.320_113_72,
            -0.764_653_98,
            -0.852_754_41,
            -0.477_288_48,
            -0.655_026_67,
            -0.159_045_16,
            -1.096_319_44,
            -1.592_860_46,
            -1.397_974_97,
        ];
        assert_near(&found, &mlx, Type::F32, 5e-7);
    }

    #[test]
    fn all_shapes_agree_with_the_reference_and_with_a_row_alone() {
        let pools = pools();
        let variants = [(64, 64), (80, 80), (96, 24), (128, 64), (7, 2), (20, 0), (64, 32)];
        for (i, (dim, dims)) in variants.into_iter().enumerate() {
            for traditional in [false, true] {
                let rope = Rope::from_base(dims, 10_000.0, 0.25, traditional).unwrap();
                let (kind, shape) = (Type::ALL[i % 3], [2, 3, 40, dim]);
                // As a projection leaves them: [batch, length, heads, dim], with a gap behind each token.
                let strides = [40 * (3 * dim + 5), dim, 3 * dim + 5, 1];
                let x = Owned::new(kind, &noise(i as u64 + 1, 2 * strides[0]));
                let heads = Heads::new(x.view(), shape, strides).unwrap();
                let offsets = [5, 30_000];
                let compute = |isa, pool: &Pool, x: &Heads<'_>, offsets: &[i32]| {
                    let mut out = Owned::zeros(kind, x.shape.iter().product());
                    super::rope(isa, pool, &rope, x, Offsets::Each(offsets), out.view_mut()).unwrap();
                    out.to_f32()
                };
                let found = compute(Isa::detect(), &pools[1], &heads, &offsets);
                let x = x.to_f32();
                let mut expected = Vec::new();
                for b in 0..2 {
                    for h in 0..3 {
                        for t in 0..40 {
                            let row = &x[heads.start(b, h, t)..][..dim];
                            let position = f64::from((offsets[b] + t as i32) as f32 * 0.25);
                            let mut turned: Vec<f64> = row.iter().map(|x| f64::from(*x)).collect();
                            for p in 0..dims / 2 {
                                let (a, c) = if traditional { (2 * p, 2 * p + 1) } else { (p, p + dims / 2) };
                                let angle = position * f64::from(rope.frequencies[p]);
                                let (x, y) = (f64::from(row[a]), f64::from(row[c]));
                                turned[a] = x * angle.cos() - y * angle.sin();
                                turned[c] = y * angle.cos() + x * angle.sin();
                            }
                            expected.extend(turned);
                        }
                    }
                }
                // The angle itself is rounded to float32: up to 7500 radians here.
                assert_near(&found, &expected, kind, 5e-4);
                for isa in isas() {
                    for pool in &pools {
                        assert_eq!(bits(&compute(isa, pool, &heads, &offsets)), bits(&found));
                    }
                    let alone = Heads { shape: [1, 3, 1, dim], ..heads };
                    let found: Vec<f32> =
                        (0..3).flat_map(|h| found[h * 40 * dim..][..dim].to_vec()).collect();
                    assert_eq!(bits(&compute(isa, &pools[0], &alone, &offsets[..1])), bits(&found));
                }
            }
        }
    }

    #[test]
    fn dims_beyond_the_head_and_odd_dims_are_refused() {
        assert!(Rope::from_base(7, 1e4, 1.0, false).is_err());
        let rope = Rope::from_base(32, 1e4, 1.0, false).unwrap();
        let x = [0.0; 16];
        let x = Heads::dense(Floats::F32(&x), [1, 1, 1, 16]).unwrap();
        let pool = Pool::new(1).unwrap();
        let mut out = [0.0; 16];
        let error = super::rope(Isa::PLAIN, &pool, &rope, &x, Offsets::Same(0), FloatsMut::F32(&mut out))
            .unwrap_err();
        assert_eq!(error.to_string(), "rope: dims is 32; it must be no more than the head's dimension");
    }
}
