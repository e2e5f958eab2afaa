//! Loads a model, lets two requests share its steps, and prints their replies as they come.
//!
//! ```sh
//! cargo run --release --example schedule -- MODEL "first prompt" "second prompt"
//! ```
//!
//! MODEL is a snapshot directory, a GGUF file, or a name in the Hugging Face cache.

#![allow(clippy::print_stdout)] // an example's own output

use std::error::Error;
use std::sync::mpsc::{Sender, channel};

use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::generate::step::StepOptions;
use mlx_bun::generate::stream::StreamOptions;
use mlx_bun::load;
use mlx_bun::mlx::cpu_ops::{self, Settings};
use mlx_bun::registry::select::select_model;
use mlx_bun::scheduler::{Engine, EngineOptions, GenerationEvent, GenerationRequest, GenerationSink};

/// Passes one request's events on, with its number.
struct Numbered {
    number: usize,
    events: Sender<(usize, GenerationEvent)>,
}

impl GenerationSink for Numbered {
    fn send(&mut self, event: GenerationEvent) {
        // Nobody listens any more only when the program ends.
        let _ = self.events.send((self.number, event));
    }

    fn is_gone(&self) -> bool {
        false
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let model = arguments.next().ok_or("usage: schedule MODEL [PROMPT ...]")?;
    let mut prompts: Vec<String> = arguments.collect();
    if prompts.is_empty() {
        prompts = ["The sea is", "A recipe for bread:"].map(str::to_owned).into();
    }

    let source = select_model(Some(&model), &Environment::of_process())?.source;
    // The model is loaded and lives on the engine's own thread.
    let (engine, parts) = Engine::start(EngineOptions::default(), move || {
        // Without them MLX's own CPU kernels compute; on a GPU this does nothing.
        if let Err(error) = cpu_ops::enable(Settings::default()) {
            println!("(slow: {error})");
        }
        load::load(&source)
    })?;

    let (events, inbox) = channel();
    for (number, prompt) in prompts.iter().enumerate() {
        let step = StepOptions { max_tokens: Some(40), ..StepOptions::default() };
        let request = GenerationRequest {
            prompt: parts.tokenizer.encode_prompt(prompt)?,
            options: StreamOptions { step, ..StreamOptions::default() },
            adapters: Vec::new(),
            prompt_cache: true,
        };
        engine.submit(request, Box::new(Numbered { number, events: events.clone() }))?;
    }
    drop(events);

    let mut replies = prompts.clone();
    for (number, event) in inbox {
        match event {
            GenerationEvent::Prefill { .. } => {}
            GenerationEvent::Chunk(chunk) => replies[number].push_str(&chunk.text),
            GenerationEvent::Finished(summary) => println!(
                "{}\n  [{} lane, {} tokens, {:.1} tokens/s]\n",
                replies[number],
                summary.lane.name(),
                summary.stats.generation_tokens,
                summary.stats.generation_tps(),
            ),
            GenerationEvent::Failed(error) => println!("{}\n  [failed: {error}]\n", prompts[number]),
        }
    }
    engine.stop(std::time::Duration::from_secs(5));
    Ok(())
}
