//! Samplers against draws recorded from mlx-lm's `make_sampler` (mlx 0.32.2, any CPU) for one row of logits.

#![allow(clippy::unwrap_used)] // a test may panic

use mlx_bun::mlx::random::RandomState;
use mlx_bun::mlx::{Array, Dtype, Result};
use mlx_bun::sampling::{
    Hlg, HlgBase, LogitsProcessors, MinP, Penalty, PenaltyParams, Sampler, SamplingParams, Xtc,
};

const LOGITS: [f32; 8] = [0.1, 0.5, -1.0, 2.0, 0.3, -0.2, 1.1, 0.9];

fn logprobs() -> Result<Array> {
    let logits = Array::from_slice(&LOGITS, &[1, 8])?;
    logits.subtract(&logits.logsumexp_all(true)?)
}

fn draws(params: &SamplingParams, rng: &mut RandomState) -> Vec<u32> {
    let (sampler, logprobs) = (Sampler::new(params, 8).unwrap(), logprobs().unwrap());
    (0..12).map(|_| sampler.sample(&logprobs, rng).unwrap().item_u32().unwrap()).collect()
}

fn seeded(seed: u64) -> RandomState {
    RandomState::from_seed(seed).unwrap()
}

fn hot() -> SamplingParams {
    SamplingParams { temperature: 2.0, ..SamplingParams::default() }
}

#[test]
fn temperature_alone() {
    let params = SamplingParams { temperature: 0.9, ..SamplingParams::default() };
    assert_eq!(draws(&params, &mut seeded(7)), [1, 7, 3, 3, 3, 1, 3, 3, 1, 3, 6, 5]);
}

/// cases S11: the order of the filters is mlx-lm's.
#[test]
fn all_filters_in_order() {
    let params = SamplingParams {
        temperature: 1.3,
        top_p: 0.9,
        min_p: Some(MinP { p: 0.05, min_tokens_to_keep: 1 }),
        xtc: Some(Xtc { probability: 0.5, threshold: 0.1, special_tokens: vec![] }),
        top_k: 5,
        hlg: None,
    };
    assert_eq!(draws(&params, &mut seeded(7)), [7, 1, 0, 3, 1, 6, 3, 1, 1, 3, 4, 1]);
}

#[test]
fn one_filter_after_another_on_one_random_state() {
    let mut rng = seeded(3);
    let top_p = SamplingParams { top_p: 0.6, ..hot() };
    assert_eq!(draws(&top_p, &mut rng), [6, 7, 3, 3, 6, 3, 6, 6, 7, 6, 3, 6]);
    let min_p = SamplingParams { min_p: Some(MinP { p: 0.4, min_tokens_to_keep: 4 }), ..hot() };
    assert_eq!(draws(&min_p, &mut rng), [3, 3, 6, 6, 1, 6, 3, 6, 7, 3, 1, 7]);
    let xtc = Xtc { probability: 1.0, threshold: 0.05, special_tokens: vec![3] };
    let xtc = SamplingParams { xtc: Some(xtc), ..hot() };
    assert_eq!(draws(&xtc, &mut rng), [5, 3, 3, 5, 5, 3, 3, 2, 3, 0, 0, 3]);
    let top_k = SamplingParams { top_k: 3, ..hot() };
    assert_eq!(draws(&top_k, &mut rng), [7, 3, 3, 6, 3, 3, 3, 6, 7, 7, 6, 3]);
}

#[test]
fn greedy_draws_nothing() {
    let mut rng = seeded(1);
    let before = rng.key().to_vec::<u32>().unwrap();
    assert_eq!(draws(&SamplingParams::default(), &mut rng), [3; 12]);
    assert_eq!(rng.key().to_vec::<u32>().unwrap(), before);
}

/// `1 / temperature` beyond the logits' type made all candidates equal, at minus infinity.
#[test]
fn temperatures_too_low_to_draw_with_are_greedy() {
    for temperature in [1e-300, 1e-46, 1e-40, 1e-38, 1e-37, 1e-36, 1e-30, 1e-6] {
        for hlg in [None, Some(Hlg::default()), Some(Hlg { pivot_offset: 100.0, ..Hlg::default() })] {
            let params = SamplingParams { temperature, hlg, ..SamplingParams::default() };
            assert_eq!(draws(&params, &mut seeded(7)), [3; 12], "{params:?}");
        }
    }
    let half = logprobs().unwrap().astype(Dtype::Float16).unwrap();
    for temperature in [1e-4, 1e-5, 1e-7, 1e-40] {
        let params = SamplingParams { temperature, ..SamplingParams::default() };
        let sampler = Sampler::new(&params, 8).unwrap();
        for seed in 0..8 {
            assert_eq!(
                sampler.sample(&half, &mut seeded(seed)).unwrap().item_u32().unwrap(),
                3,
                "{temperature}"
            );
        }
    }
}

#[test]
fn a_top_k_as_large_as_the_vocabulary_is_off() {
    let all = SamplingParams { top_k: 8, ..hot() };
    assert_eq!(draws(&all, &mut seeded(5)), draws(&hot(), &mut seeded(5)));
}

/// cases K8: every end-of-sequence token of the list survives XTC.
#[test]
fn xtc_spares_all_special_tokens() {
    let xtc = Xtc { probability: 1.0, threshold: 0.01, special_tokens: vec![3, 6] };
    let seen = draws(&SamplingParams { xtc: Some(xtc), ..hot() }, &mut seeded(2));
    assert!(seen.iter().all(|id| [3, 6, 2].contains(id)), "{seen:?}");
    assert!(seen.contains(&3) && seen.contains(&6), "{seen:?}");
}

#[test]
fn xtc_ignores_special_tokens_outside_the_vocabulary() {
    let xtc = Xtc { probability: 1.0, threshold: 0.01, special_tokens: vec![3, 4_000_000_000] };
    draws(&SamplingParams { xtc: Some(xtc), ..hot() }, &mut seeded(2));
}

#[test]
fn a_hard_hlg_curve_is_plain_temperature() {
    let flat = Hlg { shoulder: 0.0, toe: 0.0, ..Hlg::default() };
    let params = SamplingParams { hlg: Some(flat), ..hot() };
    assert_eq!(draws(&params, &mut seeded(9)), draws(&hot(), &mut seeded(9)));
}

#[test]
fn hlg_keeps_forbidden_tokens_forbidden_for_every_base() {
    let mut masked = LOGITS;
    (masked[3], masked[6]) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    let logits = Array::from_slice(&masked, &[1, 8]).unwrap();
    let logprobs = logits.subtract(&logits.logsumexp_all(true).unwrap()).unwrap();
    for base in [HlgBase::Top, HlgBase::Entropy, HlgBase::Median] {
        for toe in [0.0, 6.0] {
            let curve = Hlg { toe, base, ..Hlg::default() };
            let sampler = Sampler::new(&SamplingParams { hlg: Some(curve), ..hot() }, 8).unwrap();
            let mut rng = seeded(4);
            for _ in 0..40 {
                let id = sampler.sample(&logprobs, &mut rng).unwrap().item_u32().unwrap();
                assert!(id != 3 && id != 6, "{base:?} toe {toe}");
            }
        }
    }
}

#[test]
fn a_parameter_out_of_range_names_the_range() {
    let error = SamplingParams { top_p: 1.5, ..hot() }.validate().unwrap_err();
    assert_eq!(error.to_string(), "`top_p` must be in [0, 1], but is 1.5");
    assert!(SamplingParams { temperature: f64::NAN, ..hot() }.validate().is_err());
}

#[test]
fn penalties_look_at_their_window_only() {
    let logits = Array::from_slice(&LOGITS, &[1, 8]).unwrap();
    let history = Array::from_slice(&[0u32, 2, 3, 3, 2], &[5]).unwrap();
    let apply = |params: PenaltyParams| {
        let mut chain = LogitsProcessors::new(&params, 8).unwrap().unwrap();
        chain.observe(&history).unwrap();
        chain.apply(&logits).unwrap().to_vec::<f32>().unwrap()
    };
    let penalty = |value, context_size| Some(Penalty { value, context_size });
    let repetition = apply(PenaltyParams { repetition: penalty(2.0, 3), ..Default::default() });
    assert_eq!(repetition, [0.1, 0.5, -2.0, 1.0, 0.3, -0.2, 1.1, 0.9]);
    let presence = apply(PenaltyParams { presence: penalty(0.5, 0), ..Default::default() });
    assert_eq!(presence, [-0.4, 0.5, -1.5, 1.5, 0.3, -0.2, 1.1, 0.9]);
    let frequency = apply(PenaltyParams { frequency: penalty(0.5, 4), ..Default::default() });
    assert_eq!(frequency, [0.1, 0.5, -2.0, 1.0, 0.3, -0.2, 1.1, 0.9]);
    let bias = apply(PenaltyParams { logit_bias: vec![(7, 1.0), (0, -0.5)], ..Default::default() });
    assert_eq!(bias, [-0.4, 0.5, -1.0, 2.0, 0.3, -0.2, 1.1, 1.9]);
}

#[test]
fn a_bias_outside_the_vocabulary_is_refused() {
    let params = PenaltyParams { logit_bias: vec![(8, 1.0)], ..Default::default() };
    let error = LogitsProcessors::new(&params, 8).err().unwrap();
    assert_eq!(error.to_string(), "logit_bias names token 8, but the vocabulary has 8");
}
