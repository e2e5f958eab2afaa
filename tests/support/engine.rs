//! Engines over tiny checkpoints, and requests whose events are collected.

#![allow(dead_code)] // each test program uses a part

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use mlx_bun::cache::make_prompt_cache;
use mlx_bun::checkpoint::source::ModelSource;
use mlx_bun::generate::step::StepOptions;
use mlx_bun::generate::stream::{Chunk, FinishReason, StreamOptions, TextGenerator, TokenLogprobs};
use mlx_bun::load::{LoadModelError, LoadedModel, load};
use mlx_bun::mlx::cpu_ops::{self, CpuPrecision, Settings};
use mlx_bun::scheduler::{
    Engine, EngineOptions, GenerationError, GenerationEvent, GenerationRequest, GenerationSink, Summary,
};

/// How long anything may take before a test gives up on it.
pub const PATIENCE: Duration = Duration::from_secs(120);

pub fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures/checkpoints").join(name)
}

/// Whose arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernels {
    Ours,
    Stock,
}

impl Kernels {
    /// For what the calling thread loads from now on.
    pub fn choose(self) {
        match self {
            Self::Ours => {
                let precision = CpuPrecision::Exact;
                cpu_ops::enable(Settings { threads: Some(2), isa: None, precision }).unwrap();
            }
            Self::Stock => cpu_ops::disable(),
        }
    }
}

pub fn loaded(name: &str, kernels: Kernels) -> Result<LoadedModel, LoadModelError> {
    kernels.choose();
    load(&ModelSource::Snapshot(fixture(name)))
}

pub fn engine(name: &str, kernels: Kernels, options: EngineOptions) -> Engine {
    let name = name.to_owned();
    Engine::start(options, move || loaded(&name, kernels)).unwrap().0
}

/// Without a prompt cache.
pub fn plain(max_batch: usize) -> EngineOptions {
    EngineOptions { max_batch, prompt_cache_bytes: 0, ..EngineOptions::default() }
}

pub fn prompt(length: u32, variant: u32) -> Vec<u32> {
    (0..length).map(|i| (i * 37 + 11 + variant * 101) % 320).collect()
}

/// A greedy request that ends by its length.
pub fn greedy(prompt: Vec<u32>, max_tokens: usize) -> GenerationRequest {
    let step = StepOptions { max_tokens: Some(max_tokens), ..StepOptions::default() };
    let options = StreamOptions { step, eos_token_ids: Some(Default::default()), ..StreamOptions::default() };
    GenerationRequest { prompt, options, adapters: Vec::new(), prompt_cache: true }
}

struct Recorder {
    events: Sender<GenerationEvent>,
    gone: Arc<AtomicBool>,
}

impl GenerationSink for Recorder {
    fn send(&mut self, event: GenerationEvent) {
        if self.events.send(event).is_err() {
            self.gone.store(true, Ordering::Relaxed);
        }
    }

    fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }
}

/// A request under way.
pub struct Ticket {
    pub events: Receiver<GenerationEvent>,
    gone: Arc<AtomicBool>,
}

impl Ticket {
    pub fn leave(&self) {
        self.gone.store(true, Ordering::Relaxed);
    }

    pub fn next(&self) -> GenerationEvent {
        self.events.recv_timeout(PATIENCE).unwrap()
    }

    /// Waits for the first piece of the reply.
    pub fn first_chunk(&self) -> Chunk {
        loop {
            match self.next() {
                GenerationEvent::Chunk(chunk) => return chunk,
                GenerationEvent::Prefill { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// Everything up to the end; leaves after `most` tokens.
    pub fn wait_leaving_after(self, most: usize) -> Outcome {
        let mut outcome = Outcome::default();
        loop {
            match self.next() {
                GenerationEvent::Prefill { done, total, cached } => {
                    outcome.prefills.push((done, total, cached))
                }
                GenerationEvent::Chunk(chunk) => {
                    outcome.push(chunk);
                    if outcome.tokens.len() >= most {
                        self.leave();
                    }
                }
                GenerationEvent::Finished(summary) => {
                    outcome.summary = Some(summary);
                    return outcome;
                }
                GenerationEvent::Failed(error) => {
                    outcome.error = Some(error);
                    return outcome;
                }
            }
        }
    }

    pub fn wait(self) -> Outcome {
        self.wait_leaving_after(usize::MAX)
    }
}

pub fn submit(engine: &Engine, request: GenerationRequest) -> Ticket {
    let (events, receiver) = channel();
    let gone = Arc::new(AtomicBool::new(false));
    let recorder = Recorder { events, gone: Arc::clone(&gone) };
    engine.submit(request, Box::new(recorder)).unwrap();
    Ticket { events: receiver, gone }
}

/// What a request came to.
#[derive(Debug, Default)]
pub struct Outcome {
    pub text: String,
    pub tokens: Vec<u32>,
    pub logprobs: Vec<TokenLogprobs>,
    pub prefills: Vec<(usize, usize, usize)>,
    pub summary: Option<Summary>,
    pub error: Option<GenerationError>,
}

impl Outcome {
    fn push(&mut self, chunk: Chunk) {
        self.text.push_str(&chunk.text);
        self.tokens.extend(chunk.token);
        self.logprobs.extend(chunk.logprobs);
    }

    pub fn reason(&self) -> FinishReason {
        self.summary.as_ref().unwrap_or_else(|| panic!("{:?}", self.error)).finish_reason
    }

    pub fn cached(&self) -> usize {
        self.summary.as_ref().unwrap().cached_tokens
    }

    /// What clients see of it.
    pub fn reply(&self) -> (&str, &[u32], &[TokenLogprobs], FinishReason) {
        (&self.text, &self.tokens, &self.logprobs, self.reason())
    }
}

/// The same request by the serial generator, on a model of the calling thread.
pub fn alone(loaded: &LoadedModel, request: &GenerationRequest) -> Outcome {
    let mut caches = make_prompt_cache(loaded.model.layer_kinds(), None);
    let mut generator =
        TextGenerator::new(&*loaded.model, &loaded.tokenizer, &mut caches, &request.prompt, &request.options)
            .unwrap();
    let mut outcome = Outcome::default();
    while let Some(chunk) = generator.next().unwrap() {
        outcome.push(chunk);
    }
    outcome.summary = Some(Summary {
        finish_reason: generator.finish_reason().unwrap(),
        stop: generator.matched_stop().map(str::to_owned),
        stats: generator.stats(),
        cached_tokens: 0,
        queue_time: Duration::ZERO,
        lane: Default::default(),
    });
    outcome
}

/// Waits until something holds.
pub fn eventually(what: &str, holds: impl Fn() -> bool) {
    let start = std::time::Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "{what} never happened");
        std::thread::sleep(Duration::from_millis(1));
    }
}
