//! Memory and places after many requests; alone in its process, because MLX counts for the whole of it.

#![allow(clippy::unwrap_used)] // a test may panic

#[path = "support/engine.rs"]
mod support;

use std::sync::{Mutex, PoisonError};

use mlx_bun::generate::stream::FinishReason;
use mlx_bun::mlx::memory;
use mlx_bun::scheduler::{Engine, EngineOptions, GenerationRequest};
use support::{Kernels, alone, engine, eventually, greedy, loaded, plain, prompt, submit};

/// One test at a time.
static TURN: Mutex<()> = Mutex::new(());

/// A number that looks random, the same in every run.
fn draw(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state >> 33
}

/// Bytes of the process that lie in memory.
fn resident() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    Some(text.split(' ').nth(1)?.parse::<usize>().ok()? * 4096)
}

fn request(state: &mut u64) -> GenerationRequest {
    let mut request = greedy(prompt(1 + (draw(state) % 120) as u32, (draw(state) % 5) as u32), 1);
    request.options.step.max_tokens = Some(1 + (draw(state) % 40) as usize);
    request.options.step.seed = Some(draw(state));
    request.options.step.sampling.temperature = [0.0, 0.8][(draw(state) % 2) as usize];
    request
}

/// So many requests, sixteen at a time, of which a quarter leaves early.
fn visit(engine: &Engine, count: usize, state: &mut u64) -> Vec<(GenerationRequest, support::Outcome)> {
    let requests: Vec<_> = (0..count).map(|_| (request(state), draw(state).is_multiple_of(4))).collect();
    let mut outcomes = Vec::new();
    for group in requests.chunks(16) {
        let tickets: Vec<_> = group.iter().map(|(request, _)| submit(engine, request.clone())).collect();
        for ((request, leaves), ticket) in group.iter().zip(tickets) {
            let most = if *leaves { 3 } else { usize::MAX };
            outcomes.push((request.clone(), ticket.wait_leaving_after(most)));
        }
    }
    outcomes
}

/// Two hundred requests leave nothing behind, and each said what it says alone.
#[test]
fn two_hundred_requests_leave_nothing_behind() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    for name in ["gemma3_text-f32", "llama-4bit"] {
        let engine = engine(name, Kernels::Ours, plain(8));
        let mut state = 42;
        visit(&engine, 32, &mut state);
        let idle = || {
            let stats = engine.stats();
            (stats.active_rows, stats.queued, stats.kv_bytes) == (0, 0, 0)
        };
        eventually("the engine idles", idle);
        let (active, rss) = (memory::active().unwrap(), resident());
        let outcomes = visit(&engine, 200, &mut state);
        eventually("the engine idles", idle);
        assert_eq!(memory::active().unwrap(), active, "{name}");
        if let (Some(before), Some(after)) = (rss, resident()) {
            assert!(after < before + (24 << 20), "{name}: {before} bytes before, {after} after");
        }
        let stats = engine.stats();
        assert_eq!((stats.submitted, stats.failed), (232, 0));
        assert_eq!(stats.finished + stats.cancelled, 232);
        engine.stop(support::PATIENCE);
        let reference = loaded(name, Kernels::Ours).unwrap();
        for (request, outcome) in outcomes {
            let own = alone(&reference, &request);
            if outcome.reason() == FinishReason::Cancelled {
                assert!(own.tokens.starts_with(&outcome.tokens));
            } else {
                assert_eq!(outcome.tokens, own.tokens, "{request:?}");
            }
        }
    }
}

/// The prompt cache stays below its cap and changes no reply.
#[test]
fn the_prompt_cache_stays_within_its_bytes() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let options = EngineOptions { prompt_cache_bytes: 3 << 20, max_batch: 4, ..EngineOptions::default() };
    let engine = engine("llama-f32", Kernels::Ours, options);
    let reference = loaded("llama-f32", Kernels::Ours).unwrap();
    let mut state = 7;
    for _ in 0..4 {
        for (request, outcome) in visit(&engine, 24, &mut state) {
            if outcome.reason() != FinishReason::Cancelled {
                assert_eq!(outcome.tokens, alone(&reference, &request).tokens);
            }
            let stats = engine.stats().prompt_cache;
            assert!(stats.bytes <= stats.max_bytes, "{stats:?}");
        }
    }
    let stats = engine.stats().prompt_cache;
    assert!(stats.hits > 0 && stats.entries > 0, "{stats:?}");
}
