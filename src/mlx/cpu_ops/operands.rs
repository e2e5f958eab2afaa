//! From an array's memory to the slices that kernels take.
//!
//! Views into larger buffers are passed on with their strides where the kernel takes strides; anything else is copied
//! here, inside the node, since a `contiguous` before it would be a node of its own.

use std::borrow::Cow;
use std::slice;

use half::{bf16, f16};

use crate::mlx::cpu::kernels::{Floats, FloatsMut, Rows};
use crate::mlx::dtype::Dtype;
use crate::mlx::kernel::View;

pub(super) type Run<T> = Result<T, String>;

/// Says which kernel refused what.
pub(super) fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// An input or output of a node by its place.
pub(super) fn nth<'v, 'a>(views: &'v [View<'a>], index: usize) -> Run<&'v View<'a>> {
    views.get(index).ok_or_else(|| format!("operand {index} is missing, there are {}", views.len()))
}

/// Elements from a view's first to the last that shape and strides name.
fn reach(view: &View) -> Run<usize> {
    if view.is_empty() {
        return Ok(0);
    }
    let mut last = 0usize;
    for (&dim, &stride) in view.shape.iter().zip(view.strides) {
        if dim > 1 {
            let stride = usize::try_from(stride).map_err(|_| "a stride is negative".to_owned())?;
            let step = (dim as usize - 1).checked_mul(stride);
            last = step.and_then(|step| last.checked_add(step)).ok_or("a view is too large")?;
        }
    }
    Ok(last + 1)
}

/// Checks that a view's elements can be read as `T`.
fn check<T>(view: &View, dtype: Dtype) -> Run<()> {
    if view.dtype != dtype || size_of::<T>() != dtype.size() {
        return Err(format!("expected {}, got {}", dtype.name(), view.dtype.name()));
    }
    if !view.as_ptr().addr().is_multiple_of(align_of::<T>()) {
        return Err("an operand is not aligned".to_owned());
    }
    Ok(())
}

/// A view's elements and what lies between them. Strides must not be negative.
pub(super) fn spanned<'a, T: Copy>(view: &View<'a>, dtype: Dtype) -> Run<&'a [T]> {
    check::<T>(view, dtype)?;
    match reach(view)? {
        0 => Ok(&[]),
        // SAFETY: the first and the last element lie in the array's one buffer, which MLX has filled, keeps alive
        // through the call and lets nobody write meanwhile; every bit pattern is a value of `T`.
        count => Ok(unsafe { slice::from_raw_parts(view.as_ptr().cast(), count) }),
    }
}

/// The elements of a dense view.
pub(super) fn dense<'a, T: Copy>(view: &View<'a>, dtype: Dtype) -> Run<&'a [T]> {
    if !view.is_dense() {
        return Err(format!("an operand of shape {:?} is not contiguous", view.shape));
    }
    spanned(view, dtype)
}

/// The elements of any view in row-major order; copied if they do not lie so.
pub(super) fn ordered<'a, T: Copy>(view: &View<'a>, dtype: Dtype) -> Run<Cow<'a, [T]>> {
    if view.is_dense() {
        return dense(view, dtype).map(Cow::Borrowed);
    }
    check::<T>(view, dtype)?;
    let mut out = Vec::with_capacity(view.len());
    let mut index = vec![0i32; view.shape.len()];
    for _ in 0..view.len() {
        let at: i64 = index.iter().zip(view.strides).map(|(&i, &stride)| i64::from(i) * stride).sum();
        // SAFETY: shape and strides name elements of the array's buffer; as in `spanned`.
        out.push(unsafe { *view.as_ptr().cast::<T>().offset(at as isize) });
        for (i, &dim) in index.iter_mut().zip(view.shape).rev() {
            *i += 1;
            if *i < dim {
                break;
            }
            *i = 0;
        }
    }
    Ok(Cow::Owned(out))
}

fn not_floats(view: &View) -> String {
    format!("expected floating-point values, got {}", view.dtype.name())
}

/// [`spanned`] floating-point values.
pub(super) fn spanned_floats<'a>(view: &View<'a>) -> Run<Floats<'a>> {
    match view.dtype {
        Dtype::Float32 => spanned::<f32>(view, Dtype::Float32).map(Floats::F32),
        Dtype::Float16 => spanned::<f16>(view, Dtype::Float16).map(Floats::F16),
        Dtype::Bfloat16 => spanned::<bf16>(view, Dtype::Bfloat16).map(Floats::Bf16),
        _ => Err(not_floats(view)),
    }
}

/// The floating-point values of a dense view, as weights are.
pub(super) fn floats_of<'a>(view: &View<'a>) -> Run<Floats<'a>> {
    if !view.is_dense() {
        return Err(format!("a weight of shape {:?} is not contiguous", view.shape));
    }
    spanned_floats(view)
}

/// Floating-point values in row-major order, copied where they had to be.
pub(super) enum Ordered<'a> {
    F32(Cow<'a, [f32]>),
    F16(Cow<'a, [f16]>),
    Bf16(Cow<'a, [bf16]>),
}

impl<'a> Ordered<'a> {
    pub(super) fn new(view: &View<'a>) -> Run<Self> {
        match view.dtype {
            Dtype::Float32 => ordered(view, Dtype::Float32).map(Self::F32),
            Dtype::Float16 => ordered(view, Dtype::Float16).map(Self::F16),
            Dtype::Bfloat16 => ordered(view, Dtype::Bfloat16).map(Self::Bf16),
            _ => Err(not_floats(view)),
        }
    }

    pub(super) fn floats(&self) -> Floats<'_> {
        match self {
            Self::F32(values) => Floats::F32(values),
            Self::F16(values) => Floats::F16(values),
            Self::Bf16(values) => Floats::Bf16(values),
        }
    }
}

/// Rows of some width over any view, copied where its dimensions before the last have no common stride.
pub(super) struct RowOperand<'a> {
    values: Source<'a>,
    count: usize,
    width: usize,
    stride: usize,
}

enum Source<'a> {
    Spanned(Floats<'a>),
    Ordered(Ordered<'a>),
}

impl<'a> RowOperand<'a> {
    /// `width` must divide the last dimension; each row of that holds several rows then.
    pub(super) fn new(view: &View<'a>, width: usize) -> Run<Self> {
        let last = view.shape.last().map_or(1, |&dim| dim as usize);
        if width == 0 || !last.is_multiple_of(width) {
            return Err(format!("rows of {width} do not fill a last dimension of {last}"));
        }
        let count = view.len() / width;
        if let Some(stride) = row_stride(view).filter(|&stride| last == width || stride == last) {
            let stride = if last == width { stride } else { width };
            return Ok(Self { values: Source::Spanned(spanned_floats(view)?), count, width, stride });
        }
        Ok(Self { values: Source::Ordered(Ordered::new(view)?), count, width, stride: width })
    }

    pub(super) fn rows(&self) -> Run<Rows<'_>> {
        let values = match &self.values {
            Source::Spanned(values) => *values,
            Source::Ordered(values) => values.floats(),
        };
        Rows::new(values, self.count, self.width, self.stride).map_err(text)
    }
}

/// Elements from one row (along the last dimension, which must be adjacent) to the next, if that is the same for
/// all.
fn row_stride(view: &View) -> Option<usize> {
    let (&width, leading) = view.shape.split_last()?;
    let (&unit, strides) = view.strides.split_last()?;
    if width > 1 && unit != 1 {
        return None;
    }
    let (mut stride, mut next) = (i64::from(width), None);
    for (&dim, &step) in leading.iter().zip(strides).rev().filter(|(dim, _)| **dim != 1) {
        match next {
            None => stride = step,
            Some(expected) if step != expected => return None,
            Some(_) => {}
        }
        next = Some(i64::from(dim) * step);
    }
    usize::try_from(stride).ok()
}

/// Strides of a view over the dimensions it is broadcast to, outermost first; 0 repeats.
pub(super) fn broadcast_strides<const N: usize>(view: &View, to: [usize; N]) -> Run<[usize; N]> {
    let wrong = || format!("shape {:?} does not broadcast to {to:?}", view.shape);
    let skipped = N.checked_sub(view.shape.len()).ok_or_else(wrong)?;
    let mut strides = [0; N];
    for (axis, (&dim, &stride)) in view.shape.iter().zip(view.strides).enumerate() {
        let axis = axis + skipped;
        if dim as usize == to[axis] && dim != 1 {
            strides[axis] = usize::try_from(stride).map_err(|_| wrong())?;
        } else if dim != 1 {
            return Err(wrong());
        }
    }
    Ok(strides)
}

/// Strides of a view of exactly `N` dimensions.
pub(super) fn strides<const N: usize>(view: &View) -> Run<[usize; N]> {
    let strides: Vec<usize> = view
        .shape
        .iter()
        .zip(view.strides)
        // The stride of a dimension of one element says nothing, and may be anything.
        .map(|(&dim, &stride)| if dim == 1 { Ok(0) } else { usize::try_from(stride) })
        .collect::<Result<_, _>>()
        .map_err(|_| "a stride is negative".to_owned())?;
    strides.try_into().map_err(|_| format!("expected {N} dimensions, got shape {:?}", view.shape))
}

/// The dimensions of a view of exactly `N`.
pub(super) fn shape<const N: usize>(view: &View) -> Run<[usize; N]> {
    let shape: Vec<usize> = view.shape.iter().map(|&dim| dim as usize).collect();
    shape.try_into().map_err(|_| format!("expected {N} dimensions, got shape {:?}", view.shape))
}

/// The room for an output.
pub(super) fn floats_mut<'a>(view: &View<'a>) -> Run<FloatsMut<'a>> {
    if !view.is_dense() {
        return Err(format!("an output of shape {:?} is not contiguous", view.shape));
    }
    /// # Safety
    /// The view is dense and an output.
    unsafe fn room<'a, T>(view: &View<'a>) -> &'a mut [T] {
        match view.len() {
            0 => &mut [],
            // SAFETY: outputs are allocated dense for this call alone, which has their only views; every bit
            // pattern is a value of these types.
            count => unsafe { slice::from_raw_parts_mut(view.as_ptr().cast(), count) },
        }
    }
    // SAFETY: dense by the check above; the callers pass outputs.
    unsafe {
        Ok(match view.dtype {
            Dtype::Float32 => FloatsMut::F32(room(view)),
            Dtype::Float16 => FloatsMut::F16(room(view)),
            Dtype::Bfloat16 => FloatsMut::Bf16(room(view)),
            _ => return Err(format!("cannot write {}", view.dtype.name())),
        })
    }
}

/// The type in which MLX computes with operands of these: the common one, or float32.
pub(super) fn promoted(types: impl IntoIterator<Item = Dtype>) -> Dtype {
    types.into_iter().reduce(|a, b| if a == b { a } else { Dtype::Float32 }).unwrap_or(Dtype::Float32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view<'a>(data: &'a [f32], shape: &'a [i32], strides: &'a [i64]) -> View<'a> {
        View::over(data, shape, strides)
    }

    #[test]
    fn rows_of_a_view_keep_their_stride_and_others_are_copied() {
        let data: Vec<f32> = (0..48).map(|i| i as f32).collect();
        // [2, 3, 4] within rows of 8.
        let part = view(&data[2..], &[2, 3, 4], &[24, 8, 1]);
        let rows = RowOperand::new(&part, 4).unwrap();
        assert!(matches!(rows.values, Source::Spanned(_)));
        assert_eq!((rows.count, rows.stride), (6, 8));
        // Halves of the last dimension, which are not one stride apart.
        let halves = RowOperand::new(&part, 2).unwrap();
        assert!(matches!(halves.values, Source::Ordered(_)));
        assert_eq!((halves.count, halves.stride), (12, 2));
        // A transpose.
        let turned = view(&data, &[4, 6], &[1, 4]);
        let rows = RowOperand::new(&turned, 6).unwrap();
        let Source::Ordered(values) = &rows.values else { panic!("a transpose has no rows") };
        assert_eq!(values.floats().to_f32()[..6], [0.0, 4.0, 8.0, 12.0, 16.0, 20.0]);
        // Dimensions in another order.
        assert!(row_stride(&view(&data, &[3, 2, 4], &[4, 24, 1])).is_none());
        assert_eq!(row_stride(&view(&data, &[1, 2, 4], &[0, 24, 1])), Some(24));
        assert!(RowOperand::new(&part, 3).is_err());
    }

    #[test]
    fn broadcasting_repeats_dimensions_of_one() {
        let data = [0.0; 12];
        let mask = view(&data, &[3, 4], &[4, 1]);
        assert_eq!(broadcast_strides(&mask, [2, 5, 3, 4]), Ok([0, 0, 4, 1]));
        let row = view(&data, &[2, 1, 1, 4], &[4, 4, 4, 1]);
        assert_eq!(broadcast_strides(&row, [2, 5, 3, 4]), Ok([4, 0, 0, 1]));
        assert!(broadcast_strides(&mask, [2, 5, 3, 5]).is_err());
        assert!(broadcast_strides(&row, [2, 4, 4]).is_err());
    }

    #[test]
    fn negative_strides_are_copied_or_refused() {
        let data = [1.0, 2.0, 3.0];
        let reversed = view(&data[2..], &[3], &[-1]);
        assert!(spanned_floats(&reversed).is_err());
        assert_eq!(Ordered::new(&reversed).unwrap().floats().to_f32(), [3.0, 2.0, 1.0]);
    }
}
