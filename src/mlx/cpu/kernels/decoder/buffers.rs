//! The memory of a step, kept for the next one.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::super::super::{Isa, Pool};
use super::super::attention::Partials;
use super::super::error::KernelError;
use super::super::matmul::{Arranged, Arrangement, Matrix, Operand, Precision, RowList};
use super::super::rope::{Angles, Rope};
use super::step::Phase;
use super::{Decoder, OP};

/// The most rows that every thread arranges for itself. Arranging one takes about as long as waiting for a thread
/// that does.
pub(super) const FEW_ROWS: usize = 4;

/// Rows as the products want them, by arrangement and width.
pub(super) struct Operands(Vec<(Arrangement, usize, Operand)>);

/// Where [`Operands`] lie.
pub(super) type ArrangedList = Vec<(Arrangement, usize, Arranged)>;

impl Operands {
    fn new(wanted: &[(Arrangement, usize)], rows: usize) -> Self {
        let operand =
            |&(arrangement, columns)| (arrangement, columns, Operand::new(arrangement, rows, columns));
        Self(wanted.iter().map(operand).collect())
    }

    pub(super) fn views(&mut self) -> ArrangedList {
        self.0.iter_mut().map(|(arrangement, columns, o)| (*arrangement, *columns, o.view())).collect()
    }
}

/// What one thread needs for itself.
pub(super) struct Place {
    /// A hidden state.
    pub row: Vec<f32>,
    /// Results of a part of a product, before they are used.
    pub first: Vec<f32>,
    pub second: Vec<f32>,
    pub angles: Vec<Angles>,
    /// As the step's, of a few rows, where each thread makes its own.
    pub operands: Operands,
    pub queries: Vec<f32>,
    /// The phase whose rows [`operands`](Self::operands) holds.
    pub ready: Option<Phase>,
}

/// What the sizes of a workspace depend on.
#[derive(PartialEq)]
struct Needs {
    /// Arrangements and widths of the rows that products multiply.
    wanted: Vec<(Arrangement, usize)>,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    intermediate: usize,
    post_norms: bool,
    /// Rotated features of each rotation.
    rotated: Vec<usize>,
}

impl Needs {
    fn of(decoder: &Decoder<'_>, isa: Isa, precision: Precision) -> Self {
        let mut wanted: Vec<(Arrangement, usize)> = Vec::new();
        let mut need = |matrix: &Matrix<'_>| {
            let kind = (Arrangement::new(isa, matrix, precision), matrix.columns());
            if !wanted.contains(&kind) {
                wanted.push(kind);
            }
        };
        let (mut intermediate, mut post_norms) = (0, false);
        for layer in &decoder.layers {
            let (attention, mlp) = (&layer.attention, &layer.mlp);
            for projection in [&attention.q, &attention.k, &attention.v, &attention.o] {
                need(&projection.matrix);
            }
            for projection in [&mlp.gate, &mlp.up, &mlp.down] {
                need(&projection.matrix);
            }
            intermediate = intermediate.max(mlp.gate.matrix.rows());
            post_norms |= attention.post_norm.is_some() || mlp.post_norm.is_some();
        }
        need(&decoder.head.matrix);
        Self {
            wanted,
            hidden: decoder.hidden(),
            heads: decoder.heads,
            kv_heads: decoder.kv_heads,
            head_dim: decoder.head_dim,
            intermediate,
            post_norms,
            rotated: decoder.ropes.iter().map(Rope::dims).collect(),
        }
    }
}

/// Memory for steps of up to so many rows of one decoder, at one precision.
pub struct Workspace {
    needs: Needs,
    pub(super) precision: Precision,
    pub(super) rows: usize,
    pub(super) all: RowList,
    pub(super) operands: Operands,
    /// `[rows, hidden]`.
    pub(super) hidden: Vec<f32>,
    /// `[rows, heads * head_dim]`.
    pub(super) queries: Vec<f32>,
    /// `[rows, kv_heads * head_dim]`.
    pub(super) keys: Vec<f32>,
    /// As the keys.
    pub(super) values: Vec<f32>,
    /// As the queries.
    pub(super) attended: Vec<f32>,
    /// What is added to the hidden state, where it is normed before.
    pub(super) delta: Vec<f32>,
    /// `[rows, intermediate]`.
    pub(super) gated: Vec<f32>,
    pub(super) partials: Partials,
    pub(super) places: Vec<Mutex<Place>>,
}

impl std::fmt::Debug for Workspace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Workspace").field("rows", &self.rows).field("precision", &self.precision).finish()
    }
}

/// A thread's own place; nobody else holds it.
pub(super) fn lock(place: &Mutex<Place>) -> MutexGuard<'_, Place> {
    place.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Workspace {
    /// Memory for `rows` rows.
    ///
    /// # Errors
    /// When there are too many rows.
    pub fn new(
        decoder: &Decoder<'_>,
        isa: Isa,
        pool: &Pool,
        precision: Precision,
        rows: usize,
    ) -> Result<Self, KernelError> {
        let too_many = |_| KernelError::Unsupported { op: OP, what: "the rows", found: rows, rule: "fewer" };
        let needs = Needs::of(decoder, isa, precision);
        let Needs { intermediate, post_norms, .. } = needs;
        let (hidden, dim) = (decoder.hidden(), decoder.head_dim);
        let zeros = |width: usize| vec![0.0; rows * width];
        let place = || {
            let angles = decoder.ropes.iter().map(|rope| Angles::new(rope.dims() / 2));
            let few = rows.min(FEW_ROWS);
            Mutex::new(Place {
                row: vec![0.0; hidden.max(3 * dim)],
                first: Vec::new(),
                second: Vec::new(),
                angles: angles.collect(),
                operands: Operands::new(&needs.wanted, few),
                queries: vec![0.0; few * decoder.heads * dim],
                ready: None,
            })
        };
        Ok(Self {
            precision,
            rows,
            all: RowList::new(rows).map_err(too_many)?,
            operands: Operands::new(&needs.wanted, rows),
            hidden: zeros(hidden),
            queries: zeros(decoder.heads * dim),
            keys: zeros(decoder.kv_heads * dim),
            values: zeros(decoder.kv_heads * dim),
            attended: zeros(decoder.heads * dim),
            delta: zeros(if post_norms { hidden } else { 0 }),
            gated: zeros(intermediate),
            partials: Partials::default(),
            places: (0..pool.threads()).map(|_| place()).collect(),
            needs,
        })
    }

    /// Whether steps of `rows` rows of `decoder` can use it, at `precision`, with these instructions and threads.
    pub fn suits(
        &self,
        decoder: &Decoder<'_>,
        isa: Isa,
        pool: &Pool,
        precision: Precision,
        rows: usize,
    ) -> bool {
        self.precision == precision
            && rows <= self.rows
            && self.places.len() == pool.threads()
            && self.needs == Needs::of(decoder, isa, precision)
    }

    /// Refuses steps that it was not made for.
    pub(super) fn check(
        &self,
        decoder: &Decoder<'_>,
        isa: Isa,
        pool: &Pool,
        rows: usize,
    ) -> Result<(), KernelError> {
        let refuse = |what, found, rule| Err(KernelError::Unsupported { op: OP, what, found, rule });
        if rows > self.rows {
            return refuse("the number of rows", rows, "no more than the workspace has");
        }
        if !self.suits(decoder, isa, pool, self.precision, rows) {
            return refuse(
                "the workspace",
                self.rows,
                "one made for this decoder, these instructions and threads",
            );
        }
        Ok(())
    }
}
