//! Rotary position embeddings.

use std::sync::Arc;

use super::operands::{Ordered, Run, floats_mut, nth, shape, spanned_floats, strides, text};
use super::{Kernels, refuse};
use crate::mlx::cpu::kernels::Heads;
use crate::mlx::cpu::kernels::rope::{Offsets, Rope, rope};
use crate::mlx::kernel::{Kernel, View, custom};
use crate::mlx::{Array, Error, Result};

/// A rotation by position, made once for a model. Clones share its frequencies.
#[derive(Clone, Debug)]
pub struct Rotation {
    rope: Arc<Rope>,
}

impl Rotation {
    /// Turns pair `i` of the first `dims` features by `scale * base^(-2i / dims)` a position.
    ///
    /// # Errors
    /// When `dims` is odd or negative.
    pub fn from_base(dims: i32, base: f32, scale: f32, traditional: bool) -> Result<Self> {
        let dims = usize::try_from(dims).map_err(|_| Error::new("[rope] the dimension is negative"))?;
        let rope = Rope::from_base(dims, base, scale, traditional);
        Ok(Self { rope: Arc::new(rope.map_err(|error| Error::new(error.to_string()))?) })
    }

    /// Turns pair `i` by `1 / freqs[i]` a position (the `freqs` of `mx.fast.rope`) and multiplies the rotated features
    /// by `magnitude`. Reads `freqs`.
    ///
    /// # Errors
    /// When `freqs` cannot be computed.
    pub fn from_freqs(freqs: &Array, magnitude: f32, traditional: bool) -> Result<Self> {
        let rope = Rope::from_periods(&freqs.to_f32_vec()?, 1.0, traditional);
        Ok(Self { rope: Arc::new(rope.with_magnitude(magnitude)) })
    }

    /// What the kernels take.
    pub fn rope(&self) -> &Rope {
        &self.rope
    }

    /// The gradient's rotation.
    fn transposed(&self) -> Self {
        Self { rope: Arc::new(self.rope.transposed()) }
    }
}

impl Kernels {
    /// Rotates the first features of each head; `x` is `[B, heads, L, dim]` and begins at position `offset`.
    ///
    /// # Errors
    /// Shapes that do not fit together.
    pub fn rope(&self, x: &Array, rotation: &Rotation, offset: i32) -> Result<Array> {
        let &[batch, heads, length, dim] = x.shape() else {
            return refuse("rope", format!("{x:?} is not [B, heads, L, dim]"));
        };
        self.turn(x, rotation, offset, None, [batch, heads, length, dim])
    }

    /// As [`rope`](Self::rope), of heads that lie beside each other as a projection leaves them: `[B, L, heads * dim]`
    /// to `[B, heads, L, dim]`.
    ///
    /// # Errors
    /// Shapes that do not fit together.
    pub fn rope_tokens(&self, x: &Array, heads: i32, rotation: &Rotation, offset: i32) -> Result<Array> {
        let &[batch, length, width] = x.shape() else {
            return refuse("rope", format!("{x:?} is not [B, L, heads * dim]"));
        };
        if heads < 1 || width % heads != 0 {
            return refuse("rope", format!("{x:?} does not consist of {heads} heads"));
        }
        self.turn(x, rotation, offset, Some(heads as usize), [batch, heads, length, width / heads])
    }

    fn turn(
        &self,
        x: &Array,
        rotation: &Rotation,
        offset: i32,
        heads: Option<usize>,
        shape: [i32; 4],
    ) -> Result<Array> {
        if rotation.rope.dims() > shape[3] as usize {
            return refuse("rope", format!("{x:?} has fewer features a head than {}", rotation.rope.dims()));
        }
        let node = Turn { kernels: self.clone(), rotation: rotation.clone(), offset, heads };
        custom(c"rope", Arc::new(node), &[x], &shape, x.dtype())
    }
}

/// Input: x.
struct Turn {
    kernels: Kernels,
    rotation: Rotation,
    offset: i32,
    /// How many heads lie beside each other; `None` if they have an axis of their own.
    heads: Option<usize>,
}

impl Kernel for Turn {
    fn run(&self, inputs: &[View], outputs: &[View]) -> Run<()> {
        let view = nth(inputs, 0)?;
        let (shape, strides) = match self.heads {
            None => (shape::<4>(view)?, strides::<4>(view)?),
            Some(heads) => {
                let ([b, l, width], [batch, token, unit]) = (shape::<3>(view)?, strides::<3>(view)?);
                let dim = width / heads.max(1);
                ([b, heads, l, dim], [batch, unit * dim, token, unit])
            }
        };
        let out = floats_mut(nth(outputs, 0)?)?;
        let copied;
        let x = if shape[3] == 1 || strides[3] == 1 {
            Heads::new(spanned_floats(view)?, shape, strides)
        } else {
            copied = Ordered::new(view)?;
            let [_, heads, length, dim] = shape;
            let strides = match self.heads {
                None => [heads * length * dim, length * dim, dim, 1],
                Some(_) => [length * heads * dim, dim, heads * dim, 1],
            };
            Heads::new(copied.floats(), shape, strides)
        };
        let (isa, pool, offset) = (self.kernels.isa(), self.kernels.pool(), Offsets::Same(self.offset));
        rope(isa, pool, &self.rotation.rope, &x.map_err(text)?, offset, out).map_err(text)
    }

    /// The rotation back.
    fn vjp(&self, inputs: &[Array], cotangents: &[Array], _wrt: &[usize]) -> Option<Result<Vec<Array>>> {
        let (x, dy) = (inputs.first()?, cotangents.first()?);
        let back = self.kernels.rope(dy, &self.rotation.transposed(), self.offset);
        let back = back.and_then(|dx| match self.heads {
            None => Ok(dx),
            Some(_) => dx.transpose(&[0, 2, 1, 3])?.reshape(x.shape()),
        });
        Some(back.map(|dx| vec![dx]))
    }
}
