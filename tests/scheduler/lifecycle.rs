//! Requests that leave, fail and panic; engines that stop and die.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use mlx_bun::cache::{LayerCache, LayerKind};
use mlx_bun::generate::stream::FinishReason;
use mlx_bun::load::{LoadModelError, LoadedModel};
use mlx_bun::lora::Adapters;
use mlx_bun::mlx::{Array, Result};
use mlx_bun::models::Model;
use mlx_bun::scheduler::{
    EmbedError, Engine, EngineOptions, GenerationError, GenerationEvent, GenerationSink, StartError,
    SubmitError,
};

use crate::support::{
    Kernels, PATIENCE, alone, engine, eventually, fixture, greedy, loaded, plain, prompt, submit,
};

/// Does something else when it sees certain tokens.
struct Mischief {
    inner: Box<dyn Model>,
    /// Panics on this token.
    fatal: u32,
    /// Takes its time over this one, every time.
    slow: u32,
}

impl Mischief {
    fn act(&self, tokens: &Array) {
        let tokens: Vec<u32> = tokens.to_vec().unwrap();
        assert!(!tokens.contains(&self.fatal), "mischief");
        if tokens.contains(&self.slow) {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Model for Mischief {
    fn forward(&self, inputs: &Array, cache: Option<&mut [LayerCache]>) -> Result<Array> {
        self.act(inputs);
        self.inner.forward(inputs, cache)
    }

    fn hidden(&self, inputs: &Array, cache: Option<&mut [LayerCache]>) -> Result<Array> {
        self.act(inputs);
        self.inner.hidden(inputs, cache)
    }

    fn adapters(&self) -> &Adapters {
        self.inner.adapters()
    }

    fn layer_kinds(&self) -> &[LayerKind] {
        self.inner.layer_kinds()
    }

    fn makes_own_cache(&self) -> bool {
        self.inner.makes_own_cache()
    }

    fn max_positions(&self) -> Option<i32> {
        self.inner.max_positions()
    }

    fn vocab_size(&self) -> i32 {
        self.inner.vocab_size()
    }

    fn head_dim(&self) -> i32 {
        self.inner.head_dim()
    }
}

const FATAL: u32 = 313;
const SLOW: u32 = 314;

fn mischievous(options: EngineOptions) -> Engine {
    let load = || -> std::result::Result<LoadedModel, LoadModelError> {
        let loaded = loaded("llama-f32", Kernels::Ours)?;
        let model = Mischief { inner: loaded.model, fatal: FATAL, slow: SLOW };
        Ok(LoadedModel { model: Box::new(model), ..loaded })
    };
    Engine::start(options, load).unwrap().0
}

#[test]
fn an_engine_whose_model_does_not_load_says_why() {
    let missing =
        || mlx_bun::load::load(&mlx_bun::checkpoint::source::ModelSource::Snapshot(fixture("none")));
    let error = Engine::start(EngineOptions::default(), missing).unwrap_err();
    assert!(matches!(error, StartError::Load(_)), "{error}");
    let panics = || -> std::result::Result<LoadedModel, LoadModelError> { panic!("no") };
    assert!(matches!(Engine::start(EngineOptions::default(), panics), Err(StartError::Panicked)));
}

#[test]
fn the_parts_of_a_model_serve_other_threads() {
    let load = || loaded("llama-f32", Kernels::Ours);
    let (engine, parts) = Engine::start(EngineOptions::default(), load).unwrap();
    assert_eq!((parts.context_length, parts.vocab_size), (Some(512), 320));
    let size = std::fs::metadata(fixture("llama-f32").join("model.safetensors")).unwrap().len();
    assert!(parts.weight_bytes > 0 && parts.weight_bytes < size);
    let handle = engine.clone();
    let ids = std::thread::spawn(move || parts.tokenizer.encode("hello", false).unwrap()).join().unwrap();
    let text = std::thread::spawn(move || submit(&handle, greedy(ids, 3)).wait().text).join().unwrap();
    assert!(!text.is_empty());
}

#[test]
fn what_is_wrong_with_a_request_is_said_at_once() {
    let engine = engine("llama-f32", Kernels::Ours, plain(2));
    let refused = |request| {
        let (events, _) = channel();
        engine.submit(request, Box::new(Quiet(events))).unwrap_err().to_string()
    };
    assert!(refused(greedy(vec![], 1)).contains("empty"));
    assert!(refused(greedy(vec![320], 1)).contains("320"));
    assert!(refused(greedy(prompt(513, 0), 1)).contains("512"));
    assert!(refused(greedy(vec![1], 0)).contains("max_tokens"));
    let mut request = greedy(vec![1], 1);
    request.options.stop = vec![String::new()];
    assert!(refused(request).contains("stop string"));
    let mut request = greedy(vec![1], 1);
    request.options.step.sampling.top_p = 7.0;
    assert!(refused(request).contains("top_p"));
    let mut request = greedy(vec![1], 1);
    request.adapters = vec!["nobody".to_owned()];
    assert!(refused(request).contains("no adapter `nobody`"));
    assert_eq!(engine.stats().submitted, 0);
}

struct Quiet(std::sync::mpsc::Sender<()>);

impl GenerationSink for Quiet {
    fn send(&mut self, _: GenerationEvent) {
        let _ = self.0.send(());
    }

    fn is_gone(&self) -> bool {
        false
    }
}

/// cases M4: whoever leaves the queue is never computed.
#[test]
fn leaving_the_queue_costs_nothing() {
    let engine = engine("llama-f32", Kernels::Ours, plain(1));
    let first = submit(&engine, greedy(prompt(4, 0), 450));
    drop(first.first_chunk());
    let second = submit(&engine, greedy(prompt(200, 1), 50));
    let third = submit(&engine, greedy(prompt(4, 2), 2));
    second.leave();
    let outcome = second.wait();
    assert_eq!((outcome.reason(), outcome.prefills.len()), (FinishReason::Cancelled, 0));
    eventually("the engine counts it", || engine.stats().cancelled == 1);
    first.leave();
    assert_eq!(third.wait().tokens.len(), 2);
    assert_eq!(engine.stats().queued, 0);
}

/// cases M3, M5: leaving in the middle of a prompt frees the place, and a stream beside it goes on.
#[test]
fn leaving_a_prompt_frees_the_place() {
    let options = EngineOptions { prefill_step_size: 8, ..plain(2) };
    let engine = mischievous(options);
    let other = submit(&engine, greedy(prompt(4, 0), 450));
    drop(other.first_chunk());
    let mut slow = vec![SLOW; 300];
    slow.push(1);
    let reader = submit(&engine, greedy(slow, 50));
    while !matches!(reader.next(), GenerationEvent::Prefill { done, .. } if done > 0) {}
    let left = Instant::now();
    reader.leave();
    let outcome = reader.wait();
    assert_eq!((outcome.reason(), outcome.tokens.len()), (FinishReason::Cancelled, 0));
    // The whole prompt would take two seconds.
    assert!(left.elapsed() < Duration::from_secs(1), "{:?}", left.elapsed());
    drop(other.first_chunk());
    other.leave();
    assert_eq!(other.wait().reason(), FinishReason::Cancelled);
}

/// cases M3: fifty clients that leave after two pieces.
#[test]
fn leaving_a_stream_frees_the_place_within_a_step() {
    let engine = engine("llama-f32", Kernels::Ours, plain(4));
    let stays = submit(&engine, greedy(prompt(9, 0), 480));
    for i in 0..50 {
        let outcome = submit(&engine, greedy(prompt(5, i), 400)).wait_leaving_after(2);
        assert_eq!(outcome.reason(), FinishReason::Cancelled);
        // A piece may be under way while it is being left.
        assert!(outcome.tokens.len() < 100, "{}", outcome.tokens.len());
    }
    let outcome = stays.wait();
    let reference = loaded("llama-f32", Kernels::Ours).unwrap();
    assert_eq!(outcome.tokens, alone(&reference, &greedy(prompt(9, 0), 480)).tokens);
    assert_eq!(engine.stats().active_rows, 0);
}

/// Panics at its third event.
struct Explosive(usize);

impl GenerationSink for Explosive {
    fn send(&mut self, _: GenerationEvent) {
        self.0 += 1;
        assert!(self.0 < 3, "a sink that fails");
    }

    fn is_gone(&self) -> bool {
        false
    }
}

#[test]
fn a_sink_that_panics_loses_its_own_request_only() {
    let engine = engine("llama-f32", Kernels::Ours, plain(4));
    let other = submit(&engine, greedy(prompt(9, 0), 60));
    engine.submit(greedy(prompt(3, 1), 400), Box::new(Explosive(0))).unwrap();
    let outcome = other.wait();
    let reference = loaded("llama-f32", Kernels::Ours).unwrap();
    assert_eq!(outcome.tokens, alone(&reference, &greedy(prompt(9, 0), 60)).tokens);
    eventually("the place is free", || engine.stats().active_rows == 0);
    assert!(engine.is_alive());
}

/// A grammar that allows nothing more fails its own row.
#[test]
fn a_row_that_fails_leaves_the_others() {
    use mlx_bun::structured::grammar::{Constraint, GrammarCompiler, Limits, Reasoning};
    let reference = loaded("llama-f32", Kernels::Ours).unwrap();
    // Ids that this model does not have: a compiler for another tokenizer's words.
    let grammars = GrammarCompiler::new(&reference.tokenizer, Limits::default()).unwrap();
    let text = Constraint::Choice(vec!["a".repeat(40)]);
    let grammar = grammars.compile(&text, Reasoning::None).unwrap();
    let engine = engine("llama-f32", Kernels::Ours, plain(4));
    let other = submit(&engine, greedy(prompt(9, 0), 60));
    let mut broken = greedy(prompt(3, 1), 400);
    broken.options.step.grammar = Some(grammar);
    // Everything that the grammar allows is impossible, which makes every log-probability NaN.
    broken.options.step.penalties.logit_bias = (0..320).map(|id| (id, f32::NEG_INFINITY)).collect();
    let outcome = submit(&engine, broken).wait();
    assert!(matches!(outcome.error, Some(GenerationError::Stream(_))), "{outcome:?}");
    assert_eq!(other.wait().tokens, alone(&reference, &greedy(prompt(9, 0), 60)).tokens);
    assert_eq!(engine.stats().failed, 1);
}

#[test]
fn a_full_queue_refuses() {
    let engine = engine("llama-f32", Kernels::Ours, EngineOptions { queue: 2, ..plain(1) });
    let running = submit(&engine, greedy(prompt(4, 0), 450));
    drop(running.first_chunk());
    let waiting: Vec<_> = (1..3).map(|i| submit(&engine, greedy(prompt(4, i), 1))).collect();
    let (events, _) = channel();
    let error = engine.submit(greedy(prompt(4, 5), 1), Box::new(Quiet(events))).unwrap_err();
    assert!(matches!(error, SubmitError::Busy { limit: 2 }), "{error}");
    let error = engine.embed(vec![vec![1]], |_| {}).unwrap_err();
    assert!(matches!(error, EmbedError::Refused(SubmitError::Busy { .. })), "{error}");
    running.leave();
    waiting.into_iter().for_each(|ticket| assert_eq!(ticket.wait().tokens.len(), 1));
}

/// Whoever is here when the thread dies is told, and whoever comes later, too.
#[test]
fn a_panic_on_the_thread_fails_every_request_and_the_engine() {
    let engine = mischievous(plain(2));
    let running = submit(&engine, greedy(prompt(4, 0), 450));
    drop(running.first_chunk());
    let fatal = submit(&engine, greedy(vec![1, FATAL, 2], 1));
    let waiting = submit(&engine, greedy(prompt(4, 1), 1));
    for ticket in [running, fatal, waiting] {
        let outcome = ticket.wait();
        assert!(matches!(outcome.error, Some(GenerationError::Dead)), "{outcome:?}");
    }
    eventually("it is known", || !engine.is_alive());
    let (events, _) = channel();
    let error = engine.submit(greedy(vec![1], 1), Box::new(Quiet(events))).unwrap_err();
    assert!(matches!(error, SubmitError::Dead), "{error}");
    engine.stop(Duration::from_secs(1));
}

#[test]
fn stopping_lets_requests_finish() {
    let engine = engine("llama-f32", Kernels::Ours, plain(1));
    let tickets: Vec<_> = (0..3).map(|i| submit(&engine, greedy(prompt(4, i), 20))).collect();
    engine.stop(PATIENCE);
    for ticket in tickets {
        assert_eq!(ticket.wait().reason(), FinishReason::Length);
    }
    assert!(!engine.is_alive());
    let (events, _) = channel();
    let error = engine.submit(greedy(vec![1], 1), Box::new(Quiet(events))).unwrap_err();
    assert!(matches!(error, SubmitError::Stopped), "{error}");
}

/// cases M5: stopping ends within its deadline whatever runs.
#[test]
fn stopping_cancels_at_the_deadline() {
    let engine = mischievous(EngineOptions { prefill_step_size: 4, ..plain(1) });
    let mut slow = vec![SLOW; 400];
    slow.push(1);
    let running = submit(&engine, greedy(slow, 50));
    let waiting = submit(&engine, greedy(prompt(4, 1), 1));
    let start = Instant::now();
    engine.stop(Duration::from_millis(100));
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    assert_eq!(running.wait().reason(), FinishReason::Cancelled);
    assert!(matches!(waiting.wait().error, Some(GenerationError::Stopped)));
}

#[test]
fn the_thread_ends_with_the_last_handle() {
    let ended = Arc::new(AtomicUsize::new(0));
    let (answer, answered) = channel();
    let engine = engine("llama-f32", Kernels::Ours, plain(2));
    let ticket = submit(&engine, greedy(prompt(4, 0), 30));
    let count = Arc::clone(&ended);
    let reply = move |embedded: std::result::Result<Vec<Vec<f32>>, EmbedError>| {
        count.fetch_add(1, Ordering::Relaxed);
        let _ = answer.send(embedded.unwrap());
    };
    engine.embed(vec![prompt(5, 1)], reply).unwrap();
    drop(engine);
    assert_eq!(ticket.wait().tokens.len(), 30);
    assert_eq!(answered.recv_timeout(PATIENCE).unwrap().len(), 1);
    assert_eq!(ended.load(Ordering::Relaxed), 1);
}

/// The last token's hidden state, as the model itself gives it, also beside requests.
#[test]
fn embeddings_are_the_last_hidden_state() {
    for name in ["qwen3-f32", "gemma3_text-f32"] {
        let engine = engine(name, Kernels::Ours, plain(2));
        let busy = submit(&engine, greedy(prompt(9, 0), 100));
        let inputs = vec![prompt(7, 0), prompt(1, 1), prompt(50, 2)];
        let (answer, answered) = channel();
        engine.embed(inputs.clone(), move |embedded| answer.send(embedded).unwrap()).unwrap();
        let embedded = answered.recv_timeout(PATIENCE).unwrap().unwrap();
        let model = loaded(name, Kernels::Ours).unwrap().model;
        for (input, vector) in inputs.iter().zip(&embedded) {
            let length = input.len() as i32;
            let ids = Array::from_slice(input, &[1, length]).unwrap();
            let hidden = model.hidden(&ids, None).unwrap();
            let last = hidden.slice(1, length - 1, length).unwrap().to_f32_vec().unwrap();
            assert_eq!(*vector, last);
            assert!(last.iter().any(|value| *value != 0.0));
        }
        assert_eq!(engine.stats().embedded, 3);
        busy.leave();
        let error = engine.embed(vec![vec![1], vec![]], |_| {}).unwrap_err();
        assert!(error.to_string().starts_with("input 1: the prompt is empty"), "{error}");
    }
}
