//! One step: its checks and the order of its phases.

use std::sync::Arc;

use super::super::super::{Isa, Pool};
use super::super::error::{KernelError, expect};
use super::buffers::Workspace;
use super::kv::{KvShape, KvStore};
use super::tasks::Run;
use super::{Decoder, MOST_ROWS, OP};

/// Some rows of a step that follow each other in one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Sequence<'a> {
    /// Where the first of them stands.
    pub position: usize,
    /// How many.
    pub length: usize,
    /// One a layer, which hold everything before.
    pub stores: &'a [Arc<KvStore>],
}

/// What a step gives besides the keys and values that it stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// `[rows, vocabulary]`.
    Logits,
    /// Hidden states before the final norm, `[rows, hidden]`.
    Hidden,
    /// No result: the last layer ends with its keys and values.
    Nothing,
}

/// Tokens to feed to a decoder.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// The model.
    pub decoder: &'a Decoder<'a>,
    /// One a row, those of a sequence together.
    pub tokens: &'a [u32],
    /// In the order of the rows, no two with the same stores.
    pub sequences: &'a [Sequence<'a>],
    /// The result.
    pub wanted: Wanted,
}

/// The parts of a layer, in order, and what surrounds the layers. With few rows, those that prepare rows for the next
/// are left out: there each thread prepares them for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Embed,
    AttentionInput(usize),
    Qkv(usize),
    Heads(usize),
    Attend(usize),
    AttentionOutput(usize),
    Output(usize),
    MlpInput(usize),
    GateUp(usize),
    MlpMiddle(usize),
    Down(usize),
    Finish,
    HeadInput,
    Head,
}

impl Step<'_> {
    fn check(&self, isa: Isa, pool: &Pool, workspace: &Workspace, out: usize) -> Result<(), KernelError> {
        let decoder = self.decoder;
        decoder.check()?;
        let rows = self.tokens.len();
        let total = self.sequences.iter().try_fold(0usize, |sum, s| sum.checked_add(s.length));
        expect(OP, "the rows of all sequences", rows, total.unwrap_or(usize::MAX))?;
        let refuse = |what, found, rule| Err(KernelError::Unsupported { op: OP, what, found, rule });
        if rows > MOST_ROWS {
            return refuse("the number of rows", rows, "no more than are computed at once");
        }
        workspace.check(decoder, isa, pool, rows)?;
        let table = decoder.embedding.rows();
        if let Some(&index) = self.tokens.iter().find(|&&token| token as usize >= table) {
            return Err(KernelError::IndexOutOfRange { op: OP, index, rows: table });
        }
        for sequence in self.sequences {
            if sequence.length == 0 {
                return refuse("the length of a sequence", 0, "at least 1");
            }
            expect(OP, "the number of caches", decoder.layers.len(), sequence.stores.len())?;
            let Some(end) = sequence.position.checked_add(sequence.length).filter(|&end| end < 1 << 31)
            else {
                return refuse("the position", sequence.position, "less than 2^31");
            };
            for (store, layer) in sequence.stores.iter().zip(&decoder.layers) {
                let KvShape { heads, dim, window, .. } = store.shape();
                expect(OP, "the heads of a cache", decoder.kv_heads, heads)?;
                expect(OP, "the dimension of a cache", decoder.head_dim, dim)?;
                if window != layer.attention.window || !store.fits(end) {
                    return refuse("the length of a cache", end, "no more than it has room for");
                }
            }
        }
        let width = match self.wanted {
            Wanted::Logits => decoder.vocabulary(),
            Wanted::Hidden => decoder.hidden(),
            Wanted::Nothing => 0,
        };
        expect(OP, "the number of results", rows * width, out)
    }

    /// Computes `[rows, vocabulary]` or `[rows, hidden]` and appends keys and values to the stores.
    ///
    /// # Errors
    /// When something does not fit together or a store is in use by another step, before anything is written; when the
    /// work fails.
    pub fn run(
        &self,
        isa: Isa,
        pool: &Pool,
        workspace: &mut Workspace,
        out: &mut [f32],
    ) -> Result<(), KernelError> {
        self.check(isa, pool, workspace, out.len())?;
        if self.tokens.is_empty() {
            return Ok(());
        }
        let stores = self.sequences.iter().flat_map(|sequence| sequence.stores);
        let claims: Option<Vec<_>> = stores.map(|store| store.claim()).collect();
        let _claims = claims.ok_or(KernelError::Shared { op: OP })?;
        let run = Run::new(self, isa, pool, workspace, out)?;
        let mut phases = vec![Phase::Embed];
        let layers = self.decoder.layers.len();
        for layer in 0..layers {
            let storing: &[Phase] = if run.is_few() {
                &[Phase::Qkv(layer)]
            } else {
                &[Phase::AttentionInput(layer), Phase::Qkv(layer), Phase::Heads(layer)]
            };
            phases.extend(storing);
            if self.wanted == Wanted::Nothing && layer + 1 == layers {
                break;
            }
            let rest: &[Phase] = if run.is_few() {
                &[Phase::Attend(layer), Phase::Output(layer), Phase::GateUp(layer), Phase::Down(layer)]
            } else {
                &[
                    Phase::Attend(layer),
                    Phase::AttentionOutput(layer),
                    Phase::Output(layer),
                    Phase::MlpInput(layer),
                    Phase::GateUp(layer),
                    Phase::MlpMiddle(layer),
                    Phase::Down(layer),
                ]
            };
            phases.extend(rest);
        }
        match (self.wanted, run.is_few()) {
            (Wanted::Logits, true) => phases.push(Phase::Head),
            (Wanted::Logits, false) => phases.extend([Phase::Finish, Phase::HeadInput, Phase::Head]),
            (Wanted::Hidden, _) => phases.push(Phase::Finish),
            (Wanted::Nothing, _) => {}
        }
        run.phases(pool, &phases)
    }
}

impl Decoder<'_> {
    /// Logits `[rows, vocabulary]` of hidden states `[rows, hidden]`: final norm and head.
    ///
    /// # Errors
    /// When lengths do not fit together or the work fails.
    pub fn logits(
        &self,
        isa: Isa,
        pool: &Pool,
        workspace: &mut Workspace,
        hidden: &[f32],
        out: &mut [f32],
    ) -> Result<(), KernelError> {
        self.check()?;
        let rows = hidden.len() / self.hidden();
        expect(OP, "the number of features", rows * self.hidden(), hidden.len())?;
        expect(OP, "the number of results", rows * self.vocabulary(), out.len())?;
        workspace.check(self, isa, pool, rows)?;
        if rows == 0 {
            return Ok(());
        }
        workspace.hidden[..hidden.len()].copy_from_slice(hidden);
        let tokens = vec![0; rows];
        let step = Step { decoder: self, tokens: &tokens, sequences: &[], wanted: Wanted::Logits };
        let run = Run::new(&step, isa, pool, workspace, out)?;
        let phases = [Phase::HeadInput, Phase::Head];
        run.phases(pool, if run.is_few() { &phases[1..] } else { &phases })
    }
}
