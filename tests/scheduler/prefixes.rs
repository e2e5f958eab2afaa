//! The prompt cache: what is found in it changes nothing but the time.

use mlx_bun::generate::step::KvQuantization;
use mlx_bun::generate::stream::FinishReason;
use mlx_bun::scheduler::{Engine, EngineOptions, GenerationRequest};

use crate::support::{Kernels, Outcome, alone, engine, greedy, loaded, prompt, submit};

fn caching(name: &str) -> Engine {
    engine(name, Kernels::Ours, EngineOptions::default())
}

fn with_logprobs(prompt: Vec<u32>, max_tokens: usize) -> GenerationRequest {
    let mut request = greedy(prompt, max_tokens);
    request.options.logprobs = Some(1);
    request
}

fn run(engine: &Engine, request: &GenerationRequest) -> Outcome {
    submit(engine, request.clone()).wait()
}

/// cases P1: the same prompt twice.
#[test]
fn the_same_prompt_again_computes_one_token_and_says_the_same() {
    let engine = caching("llama-f32");
    let request = with_logprobs(prompt(30, 0), 10);
    let (cold, warm) = (run(&engine, &request), run(&engine, &request));
    assert_eq!(cold.reply(), warm.reply());
    assert_eq!((cold.cached(), warm.cached()), (0, 29));
    assert_eq!(warm.prefills, [(29, 30, 29), (30, 30, 29)]);
    assert_eq!(warm.summary.unwrap().stats.prompt_tokens, 1);
    let stats = engine.stats().prompt_cache;
    assert_eq!((stats.hits, stats.misses, stats.entries), (1, 1, 1));
    assert!(stats.bytes > 0 && stats.bytes <= stats.max_bytes);
    // A request that wants none gets none.
    let outcome = run(&engine, &GenerationRequest { prompt_cache: false, ..request.clone() });
    assert_eq!((outcome.cached(), outcome.reply()), (0, cold.reply()));
}

/// cases P2: two conversations with a common beginning, of every length around it, in turn.
#[test]
fn conversations_with_a_common_beginning_do_not_mix() {
    for name in ["llama-f32", "gemma3_text-f32", "qwen3-4bit"] {
        let engine = caching(name);
        let reference = loaded(name, Kernels::Ours).unwrap();
        let system = prompt(24, 0);
        for length in [23, 24, 25] {
            for (user, tail) in [[5u32, 6, 7], [8, 9, 10], [5, 6, 11]].into_iter().enumerate() {
                let mut ids = system.clone();
                ids.resize(length, 300 + user as u32);
                ids.extend(tail);
                let request = with_logprobs(ids, 6);
                let outcome = run(&engine, &request);
                assert_eq!(outcome.reply(), alone(&reference, &request).reply(), "{name} {length} {user}");
            }
        }
        assert!(engine.stats().prompt_cache.hits > 0, "{name}");
    }
}

/// cases P17: the second turn of a conversation finds the first, also where windows have wrapped.
#[test]
fn the_second_turn_finds_the_first() {
    for name in ["llama-f32", "gemma3_text-f32"] {
        let engine = caching(name);
        let reference = loaded(name, Kernels::Ours).unwrap();
        let mut history = prompt(40, 3);
        for turn in 0..3 {
            let request = with_logprobs(history.clone(), 8);
            let outcome = run(&engine, &request);
            assert_eq!(outcome.reply(), alone(&reference, &request).reply(), "{name}, turn {turn}");
            if turn > 0 {
                assert!(outcome.cached() >= 40, "{name}, turn {turn}: {}", outcome.cached());
            }
            history.extend(&outcome.tokens);
            history.extend([31, 32, 33 + turn]);
        }
    }
}

/// cases P3: a stream that is cancelled leaves caches that others can use.
#[test]
fn what_a_cancelled_stream_leaves_is_right() {
    let engine = caching("llama-f32");
    let reference = loaded("llama-f32", Kernels::Ours).unwrap();
    let long = with_logprobs(prompt(20, 0), 300);
    let cancelled = submit(&engine, long.clone()).wait_leaving_after(7);
    assert_eq!(cancelled.reason(), FinishReason::Cancelled);
    // The tail is edited in the middle of what was generated.
    let mut edited = long.prompt.clone();
    edited.extend(&cancelled.tokens[..4]);
    edited.push(cancelled.tokens[4] ^ 1);
    let request = with_logprobs(edited, 10);
    let outcome = run(&engine, &request);
    assert_eq!(outcome.reply(), alone(&reference, &request).reply());
    assert_eq!(outcome.cached(), 24);
}

/// Penalties look at the cached tokens, too.
#[test]
fn penalties_see_what_was_cached() {
    let engine = caching("llama-f32");
    let reference = loaded("llama-f32", Kernels::Ours).unwrap();
    let mut request = with_logprobs(prompt(30, 0), 10);
    request.options.step.penalties.repetition =
        Some(mlx_bun::sampling::Penalty { value: 1.5, context_size: 0 });
    run(&engine, &request);
    let warm = run(&engine, &request);
    assert_eq!(warm.cached(), 29);
    assert_eq!(warm.reply(), alone(&reference, &request).reply());
}

/// Two requests that use one entry at the same time each get their own copy.
#[test]
fn an_entry_can_be_used_by_many_at_once() {
    let engine = caching("llama-f32");
    let reference = loaded("llama-f32", Kernels::Ours).unwrap();
    run(&engine, &greedy(prompt(30, 0), 2));
    let requests: Vec<_> = (0..4u32)
        .map(|i| {
            let mut ids = prompt(30, 0);
            ids.extend([200 + i, 7]);
            with_logprobs(ids, 12)
        })
        .collect();
    let tickets: Vec<_> = requests.iter().map(|request| submit(&engine, request.clone())).collect();
    for (request, ticket) in requests.iter().zip(tickets) {
        let outcome = ticket.wait();
        assert_eq!(outcome.cached(), 30);
        assert_eq!(outcome.reply(), alone(&reference, request).reply());
    }
}

/// Chunks of a prompt show in no bit, so that a busy engine may read it in small ones.
#[test]
fn the_size_of_chunks_does_not_show() {
    for name in ["llama-f32", "llama-bf16", "gemma3_text-f32", "qwen2-8bit"] {
        let request = with_logprobs(prompt(100, 0), 6);
        let expected = alone(&loaded(name, Kernels::Ours).unwrap(), &request);
        for prefill_step_size in [1, 7, 64] {
            let options = EngineOptions { prefill_step_size, ..EngineOptions::default() };
            let outcome = run(&engine(name, Kernels::Ours, options), &request);
            assert_eq!(outcome.reply(), expected.reply(), "{name} {prefill_step_size}");
        }
    }
}

/// A packed cache is found again, but never cut to where it was not packed yet.
#[test]
fn packed_entries_are_not_cut_below_where_packing_began() {
    let kv_quantization = Some(KvQuantization { bits: 8, group_size: 32, start: 20 });
    let options = EngineOptions { kv_quantization, ..EngineOptions::default() };
    let engine = engine("llama-f32", Kernels::Ours, options);
    run(&engine, &greedy(prompt(30, 0), 4));
    let cached = |length: u32| {
        let mut ids = prompt(length, 0);
        ids.push(319);
        run(&engine, &GenerationRequest { prompt_cache: true, ..greedy(ids, 2) }).cached()
    };
    assert_eq!(cached(25), 25);
    assert_eq!(cached(12), 0);
}
