//! A whole decoder-only transformer as one parallel region: embedding, layers, final norm and head.
//!
//! The arithmetic is that of the plain kernels, step by step: the result has the bits of their composition in f32.
//! What is saved is the way between them: no graph node, no array and no fork and join a matrix.
//!
//! A row is one token of some sequence. Rows share nothing but the weights: each has its own position and its
//! sequence's own [`KvStore`]s, and its bits depend neither on the other rows, nor on how a prompt is cut into
//! chunks, nor on the number of threads.

mod buffers;
mod cut;
mod heads;
mod kv;
mod row_kernels;
mod step;
mod tasks;
#[cfg(test)]
mod tests;

pub use buffers::Workspace;
pub use kv::{KvShape, KvStore, KvType};
pub use step::{Sequence, Step, Wanted};

use super::activation::Activation;
use super::error::{KernelError, expect};
use super::floats::Floats;
use super::matmul::Matrix;
use super::rope::Rope;
use super::simd::LANES;

const OP: &str = "decoder";

/// The most rows that are computed at once.
pub const MOST_ROWS: usize = 512;

/// Fewer rows at once would read weights too often.
const LEAST_ROWS: usize = 128;

/// Products that two cores compute in about a second.
const A_SECOND: usize = 200_000_000_000;

/// `x · Wᵀ + bias`.
#[derive(Clone, Copy, Debug)]
pub struct Projection<'a> {
    /// W, a single matrix.
    pub matrix: Matrix<'a>,
    /// `[rows of W]`.
    pub bias: Option<Floats<'a>>,
}

/// A root-mean-square norm.
#[derive(Clone, Debug)]
pub struct Norm {
    /// One factor a feature.
    pub weight: Vec<f32>,
    /// Added to the mean square.
    pub eps: f32,
}

/// `h + post_norm(o(attend(q(norm(h)), k(norm(h)), v(norm(h)))))`.
#[derive(Clone, Debug)]
pub struct AttentionBlock<'a> {
    /// Before the projections.
    pub norm: Norm,
    /// Queries, `[heads * head_dim, hidden]`.
    pub q: Projection<'a>,
    /// Keys, `[kv_heads * head_dim, hidden]`.
    pub k: Projection<'a>,
    /// Values, as the keys.
    pub v: Projection<'a>,
    /// Output, `[hidden, heads * head_dim]`.
    pub o: Projection<'a>,
    /// On each head's queries and keys, before the rotation.
    pub qk_norm: Option<(Norm, Norm)>,
    /// Which of [`Decoder::ropes`] turns queries and keys.
    pub rope: usize,
    /// Positions that a query sees, counted back from its own; `None` for all.
    pub window: Option<usize>,
    /// Factor of the scores.
    pub scale: f32,
    /// On the result, before it is added.
    pub post_norm: Option<Norm>,
}

/// `h + post_norm(down(activation(gate(norm(h))) * up(norm(h))))`.
#[derive(Clone, Debug)]
pub struct MlpBlock<'a> {
    /// Before the projections.
    pub norm: Norm,
    /// `[intermediate, hidden]`.
    pub gate: Projection<'a>,
    /// `[intermediate, hidden]`.
    pub up: Projection<'a>,
    /// `[hidden, intermediate]`.
    pub down: Projection<'a>,
    /// On the gate.
    pub activation: Activation,
    /// On the result, before it is added.
    pub post_norm: Option<Norm>,
}

/// One layer.
#[derive(Clone, Debug)]
pub struct Layer<'a> {
    /// First half.
    pub attention: AttentionBlock<'a>,
    /// Second half.
    pub mlp: MlpBlock<'a>,
}

/// A model.
#[derive(Clone, Debug)]
pub struct Decoder<'a> {
    /// `[vocabulary, hidden]`.
    pub embedding: Matrix<'a>,
    /// A factor on the embedding.
    pub embedding_scale: Option<f32>,
    /// Query heads.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// The rotations that layers choose from.
    pub ropes: Vec<Rope>,
    /// In order.
    pub layers: Vec<Layer<'a>>,
    /// After the last layer.
    pub norm: Norm,
    /// `[vocabulary, hidden]`.
    pub head: Projection<'a>,
}

impl Decoder<'_> {
    /// Features of the hidden state.
    pub fn hidden(&self) -> usize {
        self.embedding.columns()
    }

    /// Rows of the head: the length of a row of logits.
    pub fn vocabulary(&self) -> usize {
        self.head.matrix.rows()
    }

    /// The rows of a prompt that are computed at once where somebody waits to stop it: about a second's, within limits.
    pub fn rows_at_once(&self) -> usize {
        let products = |projections: &[&Projection<'_>]| -> usize {
            projections.iter().map(|p| p.matrix.rows() * p.matrix.columns()).sum()
        };
        let layers = self.layers.iter().map(|Layer { attention, mlp }| {
            products(&[&attention.q, &attention.k, &attention.v, &attention.o, &mlp.gate, &mlp.up, &mlp.down])
        });
        a_seconds_rows(layers.sum())
    }

    /// Checks that all parts fit together; a decoder that was refused must not be run.
    ///
    /// # Errors
    /// The first part that does not fit.
    pub fn check(&self) -> Result<(), KernelError> {
        let hidden = self.hidden();
        let refuse = |what, found, rule| Err(KernelError::Unsupported { op: OP, what, found, rule });
        if self.kv_heads == 0 || self.heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            return refuse("the number of query heads", self.heads, "a multiple of the key heads");
        }
        if self.head_dim == 0 || self.layers.is_empty() || self.hidden() == 0 || self.vocabulary() == 0 {
            return refuse("a dimension", 0, "at least 1");
        }
        expect(OP, "the number of embedding tables", 1, self.embedding.experts())?;
        let (queries, keys) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        for rope in &self.ropes {
            if rope.dims() > self.head_dim {
                return refuse("the rotated dimension", rope.dims(), "no more than the head's");
            }
        }
        for Layer { attention, mlp } in &self.layers {
            attention.norm.check(hidden)?;
            attention.q.check(queries, hidden)?;
            attention.k.check(keys, hidden)?;
            attention.v.check(keys, hidden)?;
            attention.o.check(hidden, queries)?;
            if let Some((q, k)) = &attention.qk_norm {
                q.check(self.head_dim)?;
                k.check(self.head_dim)?;
            }
            if attention.rope >= self.ropes.len() {
                return refuse("the rotation", attention.rope, "one of the decoder's");
            }
            if attention.window == Some(0) {
                return refuse("the window", 0, "at least 1");
            }
            let intermediate = mlp.gate.matrix.rows();
            mlp.norm.check(hidden)?;
            mlp.gate.check(intermediate, hidden)?;
            mlp.up.check(intermediate, hidden)?;
            mlp.down.check(hidden, intermediate)?;
            for norm in [&attention.post_norm, &mlp.post_norm].into_iter().flatten() {
                norm.check(hidden)?;
            }
        }
        self.norm.check(hidden)?;
        self.head.check(self.vocabulary(), hidden)
    }
}

/// Rows of so many products each that two cores compute in about a second, within limits.
fn a_seconds_rows(products: usize) -> usize {
    (A_SECOND / products.max(1) / LANES * LANES).clamp(LEAST_ROWS, MOST_ROWS)
}

impl Norm {
    fn check(&self, features: usize) -> Result<(), KernelError> {
        expect(OP, "the length of a norm", features, self.weight.len())
    }
}

impl Projection<'_> {
    fn check(&self, rows: usize, columns: usize) -> Result<(), KernelError> {
        expect(OP, "the number of stacked matrices", 1, self.matrix.experts())?;
        expect(OP, "the rows of a projection", rows, self.matrix.rows())?;
        expect(OP, "the columns of a projection", columns, self.matrix.columns())?;
        match &self.bias {
            Some(bias) => expect(OP, "the length of a bias", rows, bias.len()),
            None => Ok(()),
        }
    }
}
