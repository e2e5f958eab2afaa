//! One trial of a cell: prompts of random tokens are read, then all sequences take the decode step together that
//! `serve` takes, until each has its tokens; nothing ends them earlier (mlx-lm `benchmark.py`).

use std::ops::ControlFlow;
use std::time::Instant;

use mlx_bun::cache::make_prompt_cache;
use mlx_bun::generate::sequence::{self, Sequence};
use mlx_bun::generate::step::{KvQuantization, StepError, StepOptions};
use mlx_bun::mlx::{self, DeviceKind, memory};
use mlx_bun::models::Model;

use super::cell::Cell;
use crate::interrupt::Interrupt;
use crate::resident_memory;

/// Values that share a scale in a packed cache.
pub const KV_GROUP: u32 = 64;

/// Times of a trial, with mlx-lm's clock: the first token ends the prompt and begins the generation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trial {
    /// From the start to the first token of the last sequence, or to the end of the prompts.
    pub prompt_seconds: f64,
    /// From there to the last token.
    pub generation_seconds: f64,
    /// Most bytes at once: of the whole process where it computes on the CPU, since our kernels keep caches of their own;
    /// of MLX on a GPU.
    pub peak_bytes: u64,
    /// Most bytes that MLX held.
    pub mlx_peak_bytes: u64,
}

/// Random numbers without a crate: xorshift64* (Vigna 2014).
pub struct Random(u64);

impl Random {
    /// A sequence of its own for each seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// Tokens of a vocabulary.
    pub fn tokens(&mut self, count: usize, vocabulary: usize) -> Vec<u32> {
        let size = vocabulary.clamp(1, u32::MAX as usize) as u64;
        (0..count).map(|_| ((self.next() >> 16) % size) as u32).collect()
    }
}

/// Runs a trial; `None` when the user asked to stop.
///
/// # Errors
/// The cell does not fit the model, or MLX fails.
pub fn run(
    model: &dyn Model,
    cell: &Cell,
    prefill_step_size: usize,
    random: &mut Random,
    interrupt: &Interrupt,
) -> Result<Option<Trial>, StepError> {
    let options = StepOptions {
        max_tokens: Some(cell.generation.max(1)),
        prefill_step_size,
        seed: Some(0),
        kv_quantization: cell.kv_bits.map(|bits| KvQuantization { bits, group_size: KV_GROUP, start: 0 }),
        ..StepOptions::default()
    };
    let vocabulary = usize::try_from(model.vocab_size()).unwrap_or(0);
    let mut rows = Vec::with_capacity(cell.batch);
    for _ in 0..cell.batch {
        let prompt = random.tokens(cell.fed(), vocabulary);
        let caches = make_prompt_cache(model.layer_kinds(), None);
        rows.push(Sequence::new(model, caches, &prompt, &options)?);
    }
    let trial = timed(model, &mut rows, cell, prefill_step_size, interrupt);
    // A step is always in flight; nothing of it may run into the next trial.
    mlx::synchronize()?;
    drop(rows);
    memory::clear_cache()?;
    trial
}

fn timed(
    model: &dyn Model,
    rows: &mut [Sequence],
    cell: &Cell,
    chunk: usize,
    interrupt: &Interrupt,
) -> Result<Option<Trial>, StepError> {
    memory::reset_peak()?;
    resident_memory::forget_own_peak();
    let poll = &mut || match interrupt.is_set() {
        true => ControlFlow::Break(()),
        false => ControlFlow::Continue(()),
    };
    for row in rows.iter_mut() {
        if feed(model, row, cell.depth, chunk, poll)?.is_break() {
            return Ok(None);
        }
    }
    let clock = Instant::now();
    for row in rows.iter_mut() {
        let rest = row.unfed();
        if feed(model, row, rest, chunk, poll)?.is_break() {
            return Ok(None);
        }
        row.start(model)?;
    }
    let mut rows: Vec<&mut Sequence> = rows.iter_mut().collect();
    step(model, &mut rows)?;
    let prompt_seconds = clock.elapsed().as_secs_f64();
    let clock = Instant::now();
    for _ in 1..cell.generation {
        if poll().is_break() {
            return Ok(None);
        }
        step(model, &mut rows)?;
    }
    let generation_seconds = clock.elapsed().as_secs_f64();
    let mlx_peak_bytes = memory::peak()? as u64;
    let on_cpu = mlx::default_device() == DeviceKind::Cpu;
    let resident = on_cpu.then(resident_memory::own_peak_bytes).flatten();
    let peak_bytes = resident.unwrap_or(0).max(mlx_peak_bytes);
    Ok(Some(Trial { prompt_seconds, generation_seconds, peak_bytes, mlx_peak_bytes }))
}

/// Feeds so many tokens of a prompt in chunks.
fn feed(
    model: &dyn Model,
    row: &mut Sequence,
    tokens: usize,
    chunk: usize,
    poll: &mut dyn FnMut() -> ControlFlow<()>,
) -> Result<ControlFlow<()>, StepError> {
    let until = row.unfed().saturating_sub(tokens);
    while row.unfed() > until {
        if poll().is_break() || row.feed(model, chunk.min(row.unfed() - until), poll)?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
        memory::clear_cache()?;
    }
    Ok(ControlFlow::Continue(()))
}

/// One token of each sequence.
fn step(model: &dyn Model, rows: &mut [&mut Sequence]) -> Result<(), StepError> {
    sequence::step(model, rows).into_iter().try_for_each(|row| row.map(|_| ()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_lie_in_the_vocabulary_and_differ() {
        let mut random = Random::new(0);
        let tokens = random.tokens(1000, 300);
        assert!(tokens.iter().all(|token| *token < 300));
        assert_ne!(tokens, random.tokens(1000, 300));
        let mut distinct = tokens.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert!(distinct.len() > 250, "{}", distinct.len());
        assert_eq!(tokens, Random::new(0).tokens(1000, 300));
        assert_eq!(Random::new(7).tokens(2, 0), [0, 0]);
    }
}
