//! A whole decoder as one node of the graph: what a token costs besides arithmetic is then one node, not hundreds.
//!
//! The node reads tokens and appends keys and values to [`KvStore`]s, a side effect that the graph does not see. So
//! each node also takes the result of the one before it as an input, which orders them; a node is never equal to
//! another, so none is ever merged away; and it must stay out of compiled functions.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use super::filling::only_fills_caches;
use super::operands::{Run, floats_mut, floats_of, nth, ordered, text};
use super::{Activation, Kernels, MatrixKind, Rotation, refuse};
use crate::mlx::cpu::kernels::decoder::{
    AttentionBlock, Decoder, Layer, MOST_ROWS, MlpBlock, Norm, Projection, Sequence, Step, Wanted, Workspace,
};
pub use crate::mlx::cpu::kernels::decoder::{KvShape, KvStore, KvType};
use crate::mlx::cpu::kernels::matmul::{Matrix, Precision};
use crate::mlx::cpu::kernels::{Floats, FloatsMut};
use crate::mlx::cpu::pages::prefer_large;
use crate::mlx::dtype::Dtype;
use crate::mlx::kernel::{Kernel, View, custom};
use crate::mlx::{Array, Error, Result, eval};

/// A linear layer's arrays.
#[derive(Clone, Copy, Debug)]
pub struct ProjectionPlan<'a> {
    /// Shape and coding.
    pub kind: MatrixKind,
    /// One array, or packed words, scales and, in affine mode, biases.
    pub arrays: [Option<&'a Array>; 3],
    /// Added to each output.
    pub bias: Option<&'a Array>,
}

/// A root-mean-square norm.
#[derive(Clone, Copy, Debug)]
pub struct NormPlan<'a> {
    /// One factor a feature.
    pub weight: &'a Array,
    /// Added to the mean square.
    pub eps: f32,
}

/// A layer: attention and a gated feed-forward part, each normed before and, in some families, after.
#[derive(Clone, Debug)]
pub struct LayerPlan<'a> {
    /// Before attention.
    pub input_norm: NormPlan<'a>,
    /// Queries.
    pub q: ProjectionPlan<'a>,
    /// Keys.
    pub k: ProjectionPlan<'a>,
    /// Values.
    pub v: ProjectionPlan<'a>,
    /// Output.
    pub o: ProjectionPlan<'a>,
    /// On each head's queries and keys.
    pub qk_norm: Option<[NormPlan<'a>; 2]>,
    /// The rotation.
    pub rotation: Rotation,
    /// Positions that a query sees; `None` for all.
    pub window: Option<usize>,
    /// Factor of the scores.
    pub scale: f32,
    /// On the result of attention.
    pub post_attention_norm: Option<NormPlan<'a>>,
    /// Before the feed-forward part.
    pub mlp_norm: NormPlan<'a>,
    /// Gate.
    pub gate: ProjectionPlan<'a>,
    /// What the gate multiplies.
    pub up: ProjectionPlan<'a>,
    /// Back to the hidden size.
    pub down: ProjectionPlan<'a>,
    /// On the gate.
    pub activation: Activation,
    /// On the result of the feed-forward part.
    pub post_mlp_norm: Option<NormPlan<'a>>,
}

/// A model.
#[derive(Clone, Debug)]
pub struct DecoderPlan<'a> {
    /// Token embedding.
    pub embedding: ProjectionPlan<'a>,
    /// A factor on it.
    pub embedding_scale: Option<f32>,
    /// Query heads.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// In order.
    pub layers: Vec<LayerPlan<'a>>,
    /// After the last layer.
    pub norm: NormPlan<'a>,
    /// Logits.
    pub head: ProjectionPlan<'a>,
}

impl LayerPlan<'_> {
    fn arrays(&self) -> impl Iterator<Item = &Array> {
        let projections = [&self.q, &self.k, &self.v, &self.o, &self.gate, &self.up, &self.down];
        let norms = [Some(&self.input_norm), self.post_attention_norm.as_ref(), Some(&self.mlp_norm)];
        let norms = norms.into_iter().chain([self.post_mlp_norm.as_ref()]).flatten();
        let norms = norms.chain(self.qk_norm.iter().flatten()).map(|norm| norm.weight);
        projections.into_iter().flat_map(ProjectionPlan::arrays).chain(norms)
    }
}

impl DecoderPlan<'_> {
    fn arrays(&self) -> impl Iterator<Item = &Array> {
        let ends = [&self.embedding, &self.head].into_iter().flat_map(ProjectionPlan::arrays);
        self.layers.iter().flat_map(LayerPlan::arrays).chain(ends).chain([self.norm.weight])
    }
}

impl ProjectionPlan<'_> {
    fn arrays(&self) -> impl Iterator<Item = &Array> {
        self.arrays.into_iter().chain([self.bias]).flatten()
    }
}

/// One sequence's part of a step.
#[derive(Clone, Debug)]
pub struct DecoderRow {
    /// Where its first new token stands.
    pub position: usize,
    /// One a layer.
    pub stores: Vec<Arc<KvStore>>,
}

/// A model that is computed as one node.
#[derive(Debug)]
pub struct FusedDecoder {
    kernels: Kernels,
    model: Arc<Fused>,
}

/// The decoder and what it points into.
struct Fused {
    decoder: Decoder<'static>,
    /// For steps of few rows.
    small: Mutex<Option<Workspace>>,
    /// What `decoder` borrows.
    _arrays: Vec<Array>,
}

// SAFETY: the arrays are evaluated and only kept alive here; their reference counts are atomic, and their memory is
// read through `decoder` alone.
unsafe impl Send for Fused {}
// SAFETY: as above.
unsafe impl Sync for Fused {}

impl std::fmt::Debug for Fused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fused").field("layers", &self.decoder.layers.len()).finish()
    }
}

/// Up to so many rows share a workspace that is kept.
const FEW_ROWS: usize = 8;

impl FusedDecoder {
    /// Prepares a model: evaluates its weights, which stay where they are.
    ///
    /// # Errors
    /// Parts that do not fit together or that no kernel computes with.
    pub fn new(kernels: &Kernels, plan: &DecoderPlan) -> Result<Self> {
        // At once: waiting for each of some hundred arrays would take longer than a short prompt.
        eval(plan.arrays())?;
        let mut keeper = Keeper::default();
        let mut ropes: Vec<Rotation> = Vec::new();
        let mut layers = Vec::with_capacity(plan.layers.len());
        for layer in &plan.layers {
            let same = |known: &Rotation| known.rope() == layer.rotation.rope();
            let rope = ropes.iter().position(same).unwrap_or_else(|| {
                ropes.push(layer.rotation.clone());
                ropes.len() - 1
            });
            let qk_norm = match &layer.qk_norm {
                Some([q, k]) => Some((norm(q)?, norm(k)?)),
                None => None,
            };
            layers.push(Layer {
                attention: AttentionBlock {
                    norm: norm(&layer.input_norm)?,
                    q: keeper.projection(&layer.q)?,
                    k: keeper.projection(&layer.k)?,
                    v: keeper.projection(&layer.v)?,
                    o: keeper.projection(&layer.o)?,
                    qk_norm,
                    rope,
                    window: layer.window,
                    scale: layer.scale,
                    post_norm: layer.post_attention_norm.as_ref().map(norm).transpose()?,
                },
                mlp: MlpBlock {
                    norm: norm(&layer.mlp_norm)?,
                    gate: keeper.projection(&layer.gate)?,
                    up: keeper.projection(&layer.up)?,
                    down: keeper.projection(&layer.down)?,
                    activation: layer.activation,
                    post_norm: layer.post_mlp_norm.as_ref().map(norm).transpose()?,
                },
            });
        }
        let decoder = Decoder {
            embedding: keeper.projection(&plan.embedding)?.matrix,
            embedding_scale: plan.embedding_scale,
            heads: plan.heads,
            kv_heads: plan.kv_heads,
            head_dim: plan.head_dim,
            ropes: ropes.iter().map(|rotation| rotation.rope().clone()).collect(),
            layers,
            norm: norm(&plan.norm)?,
            head: keeper.projection(&plan.head)?,
        };
        decoder.check().map_err(|error| Error::new(error.to_string()))?;
        prefer_large(&keeper.memory);
        let model = Fused { decoder, small: Mutex::new(None), _arrays: keeper.arrays };
        Ok(Self { kernels: kernels.clone(), model: Arc::new(model) })
    }

    /// The shape of each layer's store.
    pub fn stores(&self, kind: KvType) -> impl Iterator<Item = KvShape> + '_ {
        let decoder = &self.model.decoder;
        decoder.layers.iter().map(move |layer| KvShape {
            heads: decoder.kv_heads,
            dim: decoder.head_dim,
            window: layer.attention.window,
            kind,
        })
    }

    /// The tokens of a prompt that are computed at once where somebody waits to stop it.
    pub fn rows_at_once(&self) -> usize {
        self.model.decoder.rows_at_once()
    }

    /// Feeds tokens `[B, L]`, row `b` to the sequence `rows[b]`, and appends to its stores. Returns logits
    /// `[B, L, vocabulary]`, float32, and what the next step of these sequences must be given as `after`, and what
    /// must be evaluated for the stores to be filled.
    ///
    /// # Errors
    /// Shapes that do not fit together. What is found during evaluation (an unknown token, a failing thread) surfaces
    /// there.
    pub fn step(&self, tokens: &Array, rows: Vec<DecoderRow>, after: &[&Array]) -> Result<(Array, Array)> {
        let &[batch, length] = tokens.shape() else {
            return refuse("decoder", format!("{tokens:?} is not [B, L]"));
        };
        if rows.len() != batch as usize || length < 1 {
            return refuse("decoder", format!("{tokens:?} for {} sequences", rows.len()));
        }
        let mut stores: Vec<_> = rows.iter().flat_map(|row| &row.stores).map(Arc::as_ptr).collect();
        stores.sort_unstable();
        if stores.windows(2).any(|pair| pair[0] == pair[1]) {
            return refuse("decoder", "two sequences have the same cache; give each its own");
        }
        let decoder = &self.model.decoder;
        let wanted = match length {
            _ if only_fills_caches() => Wanted::Nothing,
            1 => Wanted::Logits,
            _ => Wanted::Hidden,
        };
        let (hidden, vocabulary) = (decoder.hidden() as i32, decoder.vocabulary() as i32);
        let precision = self.kernels.precision().of_kernels();
        let inputs: Vec<&Array> = [tokens].into_iter().chain(after.iter().copied()).collect();
        let node = StepNode {
            kernels: self.kernels.clone(),
            model: self.model.clone(),
            precision,
            rows,
            length: length as usize,
            wanted,
        };
        let all = [batch, length, vocabulary];
        let shape: &[i32] = match wanted {
            Wanted::Logits => &all,
            Wanted::Hidden => &[batch, length, hidden],
            Wanted::Nothing => &[1],
        };
        let out = custom(c"decoder", Arc::new(node), &inputs, shape, Dtype::Float32)?;
        if wanted == Wanted::Logits {
            return Ok((out.clone(), out));
        }
        // Most of a prompt's logits are never asked for, so they are a node of their own.
        let node = HeadNode { kernels: self.kernels.clone(), model: self.model.clone(), precision, wanted };
        let logits = custom(c"decoder_head", Arc::new(node), &[&out], &all, Dtype::Float32)?;
        Ok((logits, out))
    }
}

/// Collects the arrays that a decoder borrows.
#[derive(Default)]
struct Keeper {
    arrays: Vec<Array>,
    /// Where they lie.
    memory: Vec<Range<usize>>,
}

impl Keeper {
    /// An array's memory, for as long as the keeper's arrays live.
    fn keep(&mut self, array: &Array) -> Result<View<'static>> {
        let dense = array.dense()?;
        // SAFETY: evaluated; the handle moves to `arrays`, but what it stands for stays where it is and is neither
        // freed nor, being held, donated, while `arrays` lives, which is as long as the decoder.
        let view = unsafe { std::mem::transmute::<View<'_>, View<'static>>(View::of(&dense)) };
        self.arrays.push(dense);
        let start = view.as_ptr().addr();
        self.memory.push(start..start + view.len() * view.dtype.size());
        Ok(view)
    }

    fn projection(&mut self, plan: &ProjectionPlan) -> Result<Projection<'static>> {
        let arrays: Vec<&Array> = plan.arrays.into_iter().flatten().collect();
        plan.kind.check("decoder", &arrays)?;
        let views = arrays.iter().map(|array| self.keep(array)).collect::<Result<Vec<_>>>()?;
        let matrix: Matrix<'static> = plan.kind.view(&views).map_err(wrong)?;
        let bias: Option<Floats<'static>> = match plan.bias {
            Some(bias) => Some(floats_of(&self.keep(bias)?).map_err(wrong)?),
            None => None,
        };
        Ok(Projection { matrix, bias })
    }
}

fn norm(plan: &NormPlan) -> Result<Norm> {
    let dense = plan.weight.dense()?;
    // SAFETY: evaluated, and alive until the values are copied.
    let weight = floats_of(&unsafe { View::of(&dense) }).map_err(wrong)?.to_f32();
    Ok(Norm { weight, eps: plan.eps })
}

fn wrong(problem: String) -> Error {
    Error::new(format!("[decoder] {problem}"))
}

impl Fused {
    /// Runs `work` with memory for `rows` rows.
    fn with_workspace(
        &self,
        kernels: &Kernels,
        precision: Precision,
        rows: usize,
        work: &mut dyn FnMut(&mut Workspace) -> Run<()>,
    ) -> Run<()> {
        let make = |rows| {
            Workspace::new(&self.decoder, kernels.isa(), kernels.pool(), precision, rows).map_err(text)
        };
        if rows > FEW_ROWS {
            return work(&mut make(rows.min(MOST_ROWS))?);
        }
        let (isa, pool) = (kernels.isa(), kernels.pool());
        let suits = |workspace: &Workspace| workspace.suits(&self.decoder, isa, pool, precision, rows);
        let mut small = self.small.lock().unwrap_or_else(PoisonError::into_inner);
        let workspace = match small.take().filter(|workspace| suits(workspace)) {
            Some(workspace) => workspace,
            None => make(rows)?,
        };
        work(small.insert(workspace))
    }
}

/// Feeds some tokens to each of some sequences.
struct StepNode {
    kernels: Kernels,
    model: Arc<Fused>,
    precision: Precision,
    rows: Vec<DecoderRow>,
    length: usize,
    wanted: Wanted,
}

impl Kernel for StepNode {
    fn run(&self, inputs: &[View], outputs: &[View]) -> Run<()> {
        let tokens = nth(inputs, 0)?;
        let tokens: Vec<u32> = match tokens.dtype {
            Dtype::Int32 => {
                let tokens = ordered::<i32>(tokens, Dtype::Int32)?;
                // A negative number becomes one that is found to be too large.
                tokens.iter().map(|&token| token as u32).collect()
            }
            _ => ordered::<u32>(tokens, Dtype::Uint32)?.into_owned(),
        };
        let FloatsMut::F32(out) = floats_mut(nth(outputs, 0)?)? else {
            return Err("expected float32".into());
        };
        let (decoder, length) = (&self.model.decoder, self.length);
        let (isa, pool) = (self.kernels.isa(), self.kernels.pool());
        let width = match self.wanted {
            Wanted::Nothing => 0,
            _ => out.len() / (self.rows.len() * length).max(1),
        };
        out[self.rows.len() * length * width..].fill(0.0);
        // One token of each sequence at a time, or one sequence after the other.
        let (sequences, most) = if length == 1 { (MOST_ROWS, 1) } else { (1, MOST_ROWS) };
        let largest = self.rows.len().min(sequences) * length.min(most);
        self.model.with_workspace(&self.kernels, self.precision, largest, &mut |workspace| {
            let mut first = 0;
            for rows in self.rows.chunks(sequences) {
                let mut fed = 0;
                while fed < length {
                    let count = most.min(length - fed);
                    let list: Vec<Sequence> = rows
                        .iter()
                        .map(|row| Sequence {
                            position: row.position.saturating_add(fed),
                            length: count,
                            stores: &row.stores,
                        })
                        .collect();
                    let range = first..first + rows.len() * count;
                    let out = &mut out[range.start * width..range.end * width];
                    let (sequences, wanted) = (&list[..], self.wanted);
                    let step = Step { decoder, tokens: &tokens[range.clone()], sequences, wanted };
                    step.run(isa, pool, workspace, out).map_err(text)?;
                    (fed, first) = (fed + count, range.end);
                }
            }
            Ok(())
        })
    }
}

/// Final norm and head of hidden states.
struct HeadNode {
    kernels: Kernels,
    model: Arc<Fused>,
    precision: Precision,
    /// What the step before gives.
    wanted: Wanted,
}

impl Kernel for HeadNode {
    fn run(&self, inputs: &[View], outputs: &[View]) -> Run<()> {
        if self.wanted == Wanted::Nothing {
            return Err("logits of a chunk that was only to fill the caches".into());
        }
        let hidden = ordered::<f32>(nth(inputs, 0)?, Dtype::Float32)?;
        let FloatsMut::F32(out) = floats_mut(nth(outputs, 0)?)? else {
            return Err("expected float32".into());
        };
        let decoder = &self.model.decoder;
        let (isa, pool) = (self.kernels.isa(), self.kernels.pool());
        let rows = hidden.len() / decoder.hidden();
        self.model.with_workspace(&self.kernels, self.precision, rows, &mut |workspace| {
            let hidden = hidden.chunks(MOST_ROWS * decoder.hidden());
            for (hidden, out) in hidden.zip(out.chunks_mut(MOST_ROWS * decoder.vocabulary())) {
                decoder.logits(isa, pool, workspace, hidden, out).map_err(text)?;
            }
            Ok(())
        })
    }
}
