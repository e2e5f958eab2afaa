//! Tokens a second of an engine with one request, and of several together: JSON lines, the batch sizes in turn.
//!
//! usage: batch MODEL TOKENS ROUNDS [stock]
//!
//! MODEL is a snapshot directory or a GGUF file; `stock` uses MLX's own CPU kernels.

use std::io::Write;
use std::sync::mpsc::{Sender, channel};
use std::time::Instant;

use anyhow::{Context, Result};
use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::checkpoint::source::resolve_model;
use mlx_bun::generate::step::StepOptions;
use mlx_bun::generate::stream::StreamOptions;
use mlx_bun::load::load;
use mlx_bun::mlx::cpu_ops::{self, Settings};
use mlx_bun::scheduler::{Engine, EngineOptions, GenerationEvent, GenerationRequest, GenerationSink};
use serde_json::json;

/// As the command has it.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const BATCHES: [usize; 4] = [1, 2, 4, 8];

/// Tells when a request begins to answer and when it is done.
struct Clock {
    first: Option<Instant>,
    done: Sender<(Instant, Instant)>,
}

impl GenerationSink for Clock {
    fn send(&mut self, event: GenerationEvent) {
        match event {
            GenerationEvent::Chunk(_) => {
                self.first.get_or_insert_with(Instant::now);
            }
            GenerationEvent::Finished(_) => {
                if let Some(first) = self.first {
                    // The program ends with its receiver.
                    let _ = self.done.send((first, Instant::now()));
                }
            }
            GenerationEvent::Prefill { .. } | GenerationEvent::Failed(_) => {}
        }
    }

    fn is_gone(&self) -> bool {
        false
    }
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, tokens, rounds, rest @ ..] = arguments.as_slice() else {
        anyhow::bail!("usage: batch MODEL TOKENS ROUNDS [stock]");
    };
    let (tokens, rounds): (usize, usize) = (tokens.parse()?, rounds.parse()?);
    let stock = rest.first().is_some_and(|word| word == "stock");
    let source = resolve_model(Some(model), &Environment::of_process())?.source;
    let options = EngineOptions { prompt_cache_bytes: 0, ..EngineOptions::default() };
    let (engine, _) = Engine::start(options, move || {
        if !stock {
            // What is missing shows in the figures.
            let _ = cpu_ops::enable(Settings::default());
        }
        load(&source)
    })?;
    measure(&engine, 1, 16)?;
    for round in 0..rounds {
        for batch in BATCHES {
            let (rate, steps) = measure(&engine, batch, tokens)?;
            let line = json!({"round": round, "batch": batch, "tokens_per_second": rate, "steps": steps});
            writeln!(std::io::stdout(), "{line}")?;
        }
    }
    Ok(())
}

/// Tokens a second from the moment in which all answer, and steps taken.
fn measure(engine: &Engine, batch: usize, tokens: usize) -> Result<(f64, u64)> {
    let before = engine.stats().steps;
    let (done, finished) = channel();
    for row in 0..batch as u32 {
        let step = StepOptions { max_tokens: Some(tokens), ..StepOptions::default() };
        let options =
            StreamOptions { step, eos_token_ids: Some(Default::default()), ..StreamOptions::default() };
        let prompt = (0..8).map(|i| 100 + (i * 37 + row * 11) % 200).collect();
        let request = GenerationRequest { prompt, options, ..GenerationRequest::default() };
        engine.submit(request, Box::new(Clock { first: None, done: done.clone() }))?;
    }
    drop(done);
    let times: Vec<(Instant, Instant)> = finished.iter().collect();
    let start = times.iter().map(|(first, _)| *first).min().context("nothing was generated")?;
    let end = times.iter().map(|(_, end)| *end).max().context("nothing was generated")?;
    let rate = (batch * tokens) as f64 / (end - start).as_secs_f64();
    Ok((rate, engine.stats().steps - before))
}
