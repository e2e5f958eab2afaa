//! Wall time and host time of a decode step with mlx-lm's arithmetic, as JSON lines; bench/decode_step.py runs it in
//! turn with mlx-lm.
//!
//! usage: decode_step CHECKPOINT STEPS ROUNDS

use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use mlx_bun::cache::{LayerCache, make_prompt_cache};
use mlx_bun::checkpoint::Checkpoint;
use mlx_bun::generate::step::{StepOptions, TokenGenerator};
use mlx_bun::mlx::{self, Array};
use mlx_bun::models::{self, Model};
use serde_json::json;

/// As the command has it.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const PROMPT: [u32; 8] = [11, 48, 85, 122, 159, 196, 233, 270];

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [checkpoint, steps, rounds] = arguments.as_slice() else {
        anyhow::bail!("usage: decode_step CHECKPOINT STEPS ROUNDS");
    };
    let (steps, rounds): (usize, usize) = (steps.parse()?, rounds.parse()?);
    let mut checkpoint = Checkpoint::open(Path::new(checkpoint))?;
    let tensors = checkpoint.take_tensors();
    let model = models::load(&checkpoint.config, tensors, None)?;
    decode(&*model, steps)?; // warm-up: kernels are compiled, weights read
    for _ in 0..rounds {
        let (step, host) = (decode(&*model, steps)?, graph(&*model, steps)?);
        let line = json!({"step_ms": milliseconds(step), "host_ms": milliseconds(host)});
        writeln!(std::io::stdout(), "{line}")?;
    }
    Ok(())
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Time of a step in the pipelined loop.
fn decode(model: &dyn Model, steps: usize) -> Result<Duration> {
    let mut caches = make_prompt_cache(model.layer_kinds(), None);
    let options = StepOptions { max_tokens: Some(steps + 1), ..StepOptions::default() };
    let mut generator = TokenGenerator::new(model, &mut caches, &PROMPT, &options)?;
    generator.next()?.context("no first token")?;
    let clock = Instant::now();
    while generator.next()?.is_some() {}
    Ok(clock.elapsed() / u32::try_from(steps)?)
}

/// Time to build a step's graph, nothing computed meanwhile.
fn graph(model: &dyn Model, steps: usize) -> Result<Duration> {
    let mut caches = make_prompt_cache(model.layer_kinds(), None);
    let token = Array::from_slice(&[5u32], &[1, 1])?;
    let mut host = Duration::ZERO;
    for _ in 0..steps {
        let clock = Instant::now();
        let logits = model.forward(&token, Some(&mut caches))?;
        host += clock.elapsed();
        mlx::eval(caches.iter().flat_map(LayerCache::arrays).chain([&logits]))?;
    }
    Ok(host / u32::try_from(steps)?)
}
