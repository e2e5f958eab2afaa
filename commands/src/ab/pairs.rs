//! Runs in pairs, A B B A, until their ratio is known well enough or the limit is reached.
//!
//! Every second pair runs the other way round, so that a machine that gets slower or faster with time favours nobody.

use std::time::{Duration, Instant};

use super::rule::{FEWEST_PAIRS, Rule};

/// One of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// What B is compared with.
    A,
    /// What is asked about.
    B,
}

/// When to stop.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Pairs before the interval is looked at.
    pub least: usize,
    /// Pairs at most.
    pub most: usize,
    /// No pair begins later than this.
    pub time: Duration,
    /// How narrow the interval of the ratio has to be, as a fraction.
    pub width: f64,
}

/// Why it stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stopped {
    /// The interval is narrow enough.
    Width,
    /// The most pairs.
    Pairs,
    /// The longest time.
    Time,
    /// The user wanted no more.
    Interrupt,
}

/// Runs pairs: `run` measures one side, `None` when the user wants no more; `on_pair` hears of the pairs so far.
///
/// # Errors
/// What `run` says.
pub fn run_pairs<S>(
    limits: &Limits,
    rule: &Rule,
    figure: impl Fn(&S) -> f64,
    mut run: impl FnMut(Side) -> anyhow::Result<Option<S>>,
    mut on_pair: impl FnMut(&[(f64, f64)]),
) -> anyhow::Result<(Vec<(S, S)>, Stopped)> {
    let started = Instant::now();
    let (mut pairs, mut figures) = (Vec::new(), Vec::new());
    loop {
        if pairs.len() >= limits.most {
            return Ok((pairs, Stopped::Pairs));
        }
        if !pairs.is_empty() && started.elapsed() >= limits.time {
            return Ok((pairs, Stopped::Time));
        }
        let order = if pairs.len().is_multiple_of(2) { [Side::A, Side::B] } else { [Side::B, Side::A] };
        let (Some(first), Some(second)) = (run(order[0])?, run(order[1])?) else {
            return Ok((pairs, Stopped::Interrupt));
        };
        let (a, b) = if order[0] == Side::A { (first, second) } else { (second, first) };
        figures.push((figure(&a), figure(&b)));
        pairs.push((a, b));
        on_pair(&figures);
        // An even number, so that both orders count the same.
        let enough = pairs.len() >= limits.least.max(FEWEST_PAIRS) && pairs.len().is_multiple_of(2);
        if enough && rule.judge(&figures).width() <= limits.width {
            return Ok((pairs, Stopped::Width));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::rule::Verdict;
    use super::*;
    use crate::rng::Rng;

    const RULE: Rule = Rule { least_effect: 0.01, higher_is_better: false, seed: 5, resamples: 200 };
    const LIMITS: Limits = Limits { least: 8, most: 24, time: Duration::from_secs(3600), width: 0.02 };

    #[test]
    fn the_order_is_a_b_b_a() {
        let mut order = String::new();
        let limits = Limits { most: 4, ..LIMITS };
        let run = |side: Side| {
            order.push(if side == Side::A { 'A' } else { 'B' });
            Ok(Some(1.0))
        };
        let (pairs, stopped) = run_pairs(&limits, &RULE, |value| *value, run, |_| {}).unwrap();
        assert_eq!((order.as_str(), pairs.len(), stopped), ("ABBAABBA", 4, Stopped::Pairs));
    }

    #[test]
    fn it_stops_when_the_ratio_is_known_or_the_user_has_seen_enough() {
        let run = |side: Side| Ok(Some(if side == Side::A { 1.0 } else { 1.2 }));
        let (pairs, stopped) = run_pairs(&LIMITS, &RULE, |value| *value, run, |_| {}).unwrap();
        assert_eq!((pairs.len(), stopped), (8, Stopped::Width));
        assert!(pairs.iter().all(|pair| *pair == (1.0, 1.2)));
        let mut left = 5;
        let run = |_| {
            left -= 1;
            Ok((left > 0).then_some(1.0))
        };
        let (pairs, stopped) = run_pairs(&LIMITS, &RULE, |value| *value, run, |_| {}).unwrap();
        assert_eq!((pairs.len(), stopped), (2, Stopped::Interrupt));
        let limits = Limits { time: Duration::ZERO, ..LIMITS };
        let (pairs, stopped) = run_pairs(&limits, &RULE, |v| *v, |_| Ok(Some(1.0)), |_| {}).unwrap();
        assert_eq!((pairs.len(), stopped), (1, Stopped::Time));
    }

    /// A machine whose runs of the same program differ.
    struct Machine {
        rng: Rng,
        /// What lasts from run to run.
        mood: f64,
        runs: usize,
    }

    #[derive(Clone, Copy, Debug)]
    enum Noise {
        /// Independent, bell-shaped in the logarithm.
        White,
        /// Now and then a run takes half as long again.
        Spikes,
        /// Slow phases that last several runs.
        Phases,
        /// Ever slower.
        Drift,
    }

    impl Machine {
        fn bell(&mut self) -> f64 {
            (-2.0 * (1.0 - self.rng.unit()).ln()).sqrt() * (std::f64::consts::TAU * self.rng.unit()).cos()
        }

        fn run(&mut self, noise: Noise) -> f64 {
            self.runs += 1;
            let small = 0.02 * self.bell();
            let more = match noise {
                Noise::White => 0.05 * self.bell(),
                Noise::Spikes if self.rng.unit() < 0.15 => 0.4,
                Noise::Spikes => 0.0,
                Noise::Phases => {
                    self.mood = 0.9 * self.mood + 0.05 * self.bell();
                    self.mood
                }
                Noise::Drift => 0.01 * self.runs as f64,
            };
            (small + more).exp()
        }
    }

    fn verdicts(noise: Noise, rounds: u64, slower: f64) -> [usize; 3] {
        let mut counts = [0; 3];
        for seed in 0..rounds {
            let mut machine =
                Machine { rng: Rng::new(seed.wrapping_mul(0x5851_f42d_4c95_7f2d)), mood: 0.0, runs: 0 };
            let run = |side: Side| {
                let took = machine.run(noise);
                Ok(Some(if side == Side::B { took * slower } else { took }))
            };
            let (pairs, _) = run_pairs(&LIMITS, &RULE, |value| *value, run, |_| {}).unwrap();
            counts[match RULE.judge(&pairs).verdict {
                Verdict::Win => 0,
                Verdict::Lose => 1,
                Verdict::NoDifference => 2,
            }] += 1;
        }
        counts
    }

    /// At 1 % a comparison, 20 of them give two false verdicts or more once in 60 times twenty.
    #[test]
    fn identical_programs_get_a_false_verdict_in_less_than_one_run_of_a_hundred() {
        for noise in [Noise::White, Noise::Spikes, Noise::Phases, Noise::Drift] {
            let [win, lose, _] = verdicts(noise, 600, 1.0);
            assert!(win + lose <= 6, "{noise:?}: {win} wins and {lose} losses in 600 runs of A against A");
        }
    }

    #[test]
    fn a_tenth_more_is_seen_through_the_noise() {
        for noise in [Noise::White, Noise::Spikes, Noise::Phases] {
            let [win, lose, none] = verdicts(noise, 100, 1.15);
            assert!(win == 0 && lose >= 80, "{noise:?}: {win} {lose} {none}");
        }
    }
}
