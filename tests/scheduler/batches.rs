//! Requests that come, go and are cancelled at random, against each of them alone.

use std::time::Duration;

use mlx_bun::generate::step::StepOptions;
use mlx_bun::generate::stream::{FinishReason, StreamOptions};
use mlx_bun::sampling::{Penalty, PenaltyParams, SamplingParams, Xtc};
use mlx_bun::scheduler::{EngineOptions, GenerationRequest, Lane};
use mlx_bun::structured::grammar::{Constraint, GrammarCompiler, Limits, Reasoning};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::support::{Kernels, alone, engine, greedy, loaded, plain, prompt, submit};

/// A request, when it comes after the one before (in tenths of a millisecond), and after how many tokens it leaves.
#[derive(Clone, Debug)]
struct Visit {
    request: GenerationRequest,
    pause: u64,
    leaves_after: Option<usize>,
}

fn sampling() -> impl Strategy<Value = SamplingParams> {
    let free = SamplingParams { temperature: 0.9, ..SamplingParams::default() };
    let xtc = Xtc { probability: 0.5, threshold: 0.05, special_tokens: vec![2] };
    prop_oneof![
        3 => Just(SamplingParams::default()),
        1 => Just(free.clone()),
        1 => Just(SamplingParams { top_p: 0.8, top_k: 40, ..free.clone() }),
        // cases S6: its threshold is a row's own.
        1 => Just(SamplingParams { xtc: Some(xtc), ..free }),
    ]
}

fn penalties() -> impl Strategy<Value = PenaltyParams> {
    let repetition = Some(Penalty { value: 1.3, context_size: 20 });
    let frequency = Some(Penalty { value: 0.4, context_size: 0 });
    prop_oneof![
        2 => Just(PenaltyParams::default()),
        1 => Just(PenaltyParams { repetition, frequency, ..PenaltyParams::default() }),
        1 => Just(PenaltyParams { logit_bias: vec![(17, 4.0), (3, -50.0)], ..PenaltyParams::default() }),
    ]
}

fn request() -> impl Strategy<Value = GenerationRequest> {
    let shape = (1u32..40, 0u32..3, 1usize..20, any::<u64>());
    let extras = (prop::bool::weighted(0.3), prop::option::of(0usize..4), any::<bool>());
    (shape, sampling(), penalties(), extras).prop_map(
        |((length, variant, max_tokens, seed), sampling, penalties, (stops, logprobs, prompt_cache))| {
            let step = StepOptions {
                max_tokens: Some(max_tokens),
                sampling,
                penalties,
                seed: Some(seed),
                ..StepOptions::default()
            };
            GenerationRequest {
                prompt: prompt(length, variant),
                options: StreamOptions {
                    step,
                    stop: if stops { vec!["e".to_owned(), "th".to_owned()] } else { vec![] },
                    eos_token_ids: Some([2, 9].into()),
                    logprobs,
                },
                adapters: Vec::new(),
                prompt_cache,
            }
        },
    )
}

fn visits() -> impl Strategy<Value = Vec<Visit>> {
    let visit = (request(), 0u64..40, prop::option::weighted(0.3, 1usize..8))
        .prop_map(|(request, pause, leaves_after)| Visit { request, pause, leaves_after });
    prop::collection::vec(visit, 2..12)
}

/// cases B1, B9, S5, S6, S9, S10, P2: a schedule of anything gives every request what it gets alone.
fn schedules_change_nothing(name: &str, options: EngineOptions) {
    let engine = engine(name, Kernels::Ours, options);
    let reference = loaded(name, Kernels::Ours).unwrap();
    let mut runner = TestRunner::new(Config { cases: 8, failure_persistence: None, ..Config::default() });
    let check = |visits: Vec<Visit>| {
        let tickets: Vec<_> = visits
            .iter()
            .map(|visit| {
                std::thread::sleep(Duration::from_micros(100 * visit.pause));
                submit(&engine, visit.request.clone())
            })
            .collect();
        // Those who leave do so while the others go on.
        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let waits: Vec<_> = tickets
                .into_iter()
                .zip(&visits)
                .map(|(ticket, visit)| {
                    let most = visit.leaves_after.unwrap_or(usize::MAX);
                    scope.spawn(move || ticket.wait_leaving_after(most))
                })
                .collect();
            waits.into_iter().map(|wait| wait.join().unwrap()).collect()
        });
        for (visit, outcome) in visits.iter().zip(outcomes) {
            let own = alone(&reference, &visit.request);
            if outcome.reason() == FinishReason::Cancelled {
                prop_assert!(visit.leaves_after.is_some());
                prop_assert!(own.tokens.starts_with(&outcome.tokens), "{:?}", visit);
                prop_assert!(own.logprobs.starts_with(&outcome.logprobs), "{:?}", visit);
            } else {
                prop_assert_eq!(outcome.reply(), own.reply(), "{:?}", visit);
                prop_assert_eq!(&outcome.summary.unwrap().stop, &own.summary.unwrap().stop);
            }
        }
        Ok(())
    };
    runner.run(&visits(), check).unwrap();
    let stats = engine.stats();
    assert_eq!((stats.queued, stats.active_rows, stats.failed), (0, 0, 0));
    assert!(stats.alive && stats.steps > 0);
}

#[test]
fn schedules_of_llama_change_nothing() {
    schedules_change_nothing("llama-f32", EngineOptions { max_batch: 3, ..EngineOptions::default() });
}

/// cases B4, B6: windows that wrap.
#[test]
fn schedules_of_gemma_change_nothing() {
    schedules_change_nothing("gemma3_text-f32", EngineOptions { max_batch: 4, ..EngineOptions::default() });
}

#[test]
fn schedules_of_a_packed_qwen_change_nothing() {
    let options = EngineOptions { max_batch: 8, prefill_step_size: 7, ..EngineOptions::default() };
    schedules_change_nothing("qwen3-4bit", options);
}

/// cases S10: on MLX's own kernels the tokens of greedy requests are the same alone and in a batch.
#[test]
fn greedy_tokens_in_a_batch_on_mlx_equal_those_alone() {
    for name in ["llama-f32", "gemma3_text-f32"] {
        let engine = engine(name, Kernels::Stock, plain(4));
        let reference = loaded(name, Kernels::Stock).unwrap();
        let requests: Vec<_> = (0..4).map(|i| greedy(prompt(5 + 9 * i, i), 24)).collect();
        let tickets: Vec<_> = requests.iter().map(|request| submit(&engine, request.clone())).collect();
        for (request, ticket) in requests.iter().zip(tickets) {
            let outcome = ticket.wait();
            assert_eq!(outcome.tokens, alone(&reference, request).tokens, "{name}");
        }
    }
}

/// A lone request is the serial run, byte for byte, on either arithmetic.
#[test]
fn a_lone_request_is_the_serial_run() {
    for (name, kernels) in
        [("llama-bf16", Kernels::Stock), ("qwen2-8bit", Kernels::Stock), ("llama-bf16", Kernels::Ours)]
    {
        let engine = engine(name, kernels, plain(8));
        let reference = loaded(name, kernels).unwrap();
        let mut request = greedy(prompt(30, 1), 40);
        request.options.logprobs = Some(3);
        request.options.step.seed = Some(7);
        request.options.step.sampling.temperature = 0.8;
        let outcome = submit(&engine, request.clone()).wait();
        assert_eq!(outcome.reply(), alone(&reference, &request).reply(), "{name} {kernels:?}");
        assert_eq!(outcome.summary.unwrap().lane, Lane::Serial);
    }
}

/// cases B9: a seed is a row's own and lets nobody wait.
#[test]
fn a_seed_does_not_drain_the_batch() {
    let engine = engine("llama-f32", Kernels::Ours, plain(8));
    let long: Vec<_> = (0..3).map(|i| submit(&engine, greedy(prompt(4, i), 400))).collect();
    long.iter().for_each(|ticket| drop(ticket.first_chunk()));
    let mut seeded = greedy(prompt(6, 9), 5);
    seeded.options.step.seed = Some(3);
    seeded.options.step.sampling.temperature = 1.0;
    let outcome = submit(&engine, seeded).wait();
    let summary = outcome.summary.unwrap();
    assert_eq!((summary.finish_reason, summary.lane), (FinishReason::Length, Lane::Batched));
    assert!(engine.stats().active_rows >= 3, "it was computed beside the others");
    long.into_iter().for_each(|ticket| ticket.leave());
}

/// Grammars of rows beside rows without one.
#[test]
fn a_grammar_binds_its_own_row_only() {
    let engine = engine("llama-f32", Kernels::Ours, plain(4));
    let reference = loaded("llama-f32", Kernels::Ours).unwrap();
    let grammars = GrammarCompiler::new(&reference.tokenizer, Limits::default()).unwrap();
    let compile = |choice: &[&str]| {
        let choice = choice.iter().map(|&text| text.to_owned()).collect();
        Some(grammars.compile(&Constraint::Choice(choice), Reasoning::None).unwrap())
    };
    let mut requests = [greedy(prompt(12, 0), 16), greedy(prompt(3, 1), 16), greedy(prompt(3, 2), 9)];
    requests[1].options.step.grammar = compile(&["one", "two three"]);
    requests[2].options.step.grammar = compile(&["yes", "no"]);
    let tickets: Vec<_> = requests.iter().map(|request| submit(&engine, request.clone())).collect();
    let outcomes: Vec<_> = tickets.into_iter().map(|ticket| ticket.wait()).collect();
    for (request, outcome) in requests.iter().zip(&outcomes) {
        assert_eq!(outcome.reply(), alone(&reference, request).reply());
    }
    assert!(["one", "two three"].contains(&outcomes[1].text.as_str()), "{}", outcomes[1].text);
    assert!(["yes", "no"].contains(&outcomes[2].text.as_str()), "{}", outcomes[2].text);
}
