//! Memory that requests may come to need, known before they begin.

use mlx_bun::generate::step::KvQuantization;
use mlx_bun::generate::stream::FinishReason;
use mlx_bun::scheduler::{
    Engine, EngineOptions, GenerationEvent, GenerationRequest, GenerationSink, StartError, SubmitError,
};

use crate::support::{Kernels, engine, greedy, loaded, plain, prompt, submit};

struct Deaf;

impl GenerationSink for Deaf {
    fn send(&mut self, _: GenerationEvent) {}

    fn is_gone(&self) -> bool {
        false
    }
}

fn refused(engine: &Engine, request: GenerationRequest) -> SubmitError {
    engine.submit(request, Box::new(Deaf)).unwrap_err()
}

/// Two layers of 2 heads of 32 float32 keys and values: 1024 bytes a token.
const TOKEN: usize = 1024;

#[test]
fn the_cost_of_a_token_is_that_of_its_cache() {
    assert_eq!(engine("llama-f32", Kernels::Ours, plain(1)).stats().kv_bytes_per_token, TOKEN);
    assert_eq!(engine("llama-f32", Kernels::Stock, plain(1)).stats().kv_bytes_per_token, TOKEN);
    assert_eq!(engine("llama-bf16", Kernels::Ours, plain(1)).stats().kv_bytes_per_token, TOKEN / 2);
    let kv_quantization = Some(KvQuantization { bits: 8, group_size: 32, start: 0 });
    let packed = engine("llama-f32", Kernels::Ours, EngineOptions { kv_quantization, ..plain(1) });
    // A byte a number, and two float32 for each 32 of them.
    assert_eq!(packed.stats().kv_bytes_per_token, TOKEN / 4 + TOKEN / 32 * 2);
}

#[test]
fn requests_wait_for_room_and_impossible_ones_are_refused() {
    let options = EngineOptions { kv_budget: Some(100 * TOKEN), ..plain(8) };
    let engine = engine("llama-f32", Kernels::Ours, options);
    let error = refused(&engine, greedy(prompt(60, 0), 41));
    assert!(matches!(error, SubmitError::OverKvBudget { prompt: 60, max_tokens: 41, .. }), "{error}");
    // Without a limit it may grow to the model's context.
    let mut endless = greedy(prompt(4, 0), 1);
    endless.options.step.max_tokens = None;
    assert!(matches!(refused(&engine, endless), SubmitError::OverKvBudget { .. }));
    let tickets: Vec<_> = (0..5).map(|i| submit(&engine, greedy(prompt(10, i), 35))).collect();
    let mut most = 0;
    for ticket in tickets {
        most = most.max(engine.stats().active_rows);
        assert_eq!(ticket.wait().reason(), FinishReason::Length);
    }
    assert!(most <= 2, "{most} rows of 45 tokens each beside each other");
}

/// cases M1: a memory budget cuts what a request may generate, and refuses what cannot begin.
#[test]
fn a_memory_budget_cuts_and_refuses() {
    let weights = {
        let loaded = loaded("llama-f32", Kernels::Ours).unwrap();
        loaded.weight_bytes as usize
    };
    let budget = weights + 50 * TOKEN;
    let options = EngineOptions { memory_budget: Some(budget), ..plain(2) };
    let engine = engine("llama-f32", Kernels::Ours, options);
    let outcome = submit(&engine, greedy(prompt(20, 0), 400)).wait();
    assert_eq!((outcome.tokens.len(), outcome.reason()), (30, FinishReason::Length));
    let error = refused(&engine, greedy(prompt(50, 0), 1));
    assert!(
        matches!(error, SubmitError::OverMemoryBudget { needed: 51, prompt: 50, allowed: 50 }),
        "{error}"
    );
    let options = EngineOptions { memory_budget: Some(weights), ..plain(2) };
    let error = Engine::start(options, || loaded("llama-f32", Kernels::Ours)).unwrap_err();
    assert!(matches!(error, StartError::MemoryBudget { .. }), "{error}");
}

/// An engine that would refuse every request does not start.
#[test]
fn options_that_no_request_can_be_computed_with_are_refused_at_the_start() {
    let start = |options| Engine::start(options, || loaded("llama-f32", Kernels::Ours)).unwrap_err();
    let error = start(EngineOptions { kv_budget: Some(2 * TOKEN - 1), ..plain(2) });
    assert!(matches!(error, StartError::KvBudget { name: "KV budget", .. }), "{error}");
    let weights = loaded("llama-f32", Kernels::Ours).unwrap().weight_bytes as usize;
    let error = start(EngineOptions { memory_budget: Some(weights + 1), ..plain(2) });
    assert!(matches!(error, StartError::KvBudget { name: "memory budget", .. }), "{error}");
    let packed = KvQuantization { bits: 8, group_size: 64, start: 0 };
    let error = start(EngineOptions { kv_quantization: Some(packed), ..plain(2) });
    assert!(error.to_string().contains("needs a head dimension that it divides"), "{error}");
}

#[test]
fn a_request_without_a_limit_ends_with_the_context() {
    let engine = engine("llama-f32", Kernels::Ours, plain(2));
    let mut endless = greedy(prompt(500, 0), 1);
    endless.options.step.max_tokens = None;
    let outcome = submit(&engine, endless).wait();
    assert_eq!((outcome.tokens.len(), outcome.reason()), (12, FinishReason::Length));
}
