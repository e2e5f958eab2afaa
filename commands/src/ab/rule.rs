//! When a difference is called one.
//!
//! Three things must agree: the bootstrap interval of the median ratio leaves out 1, the sign test finds the pairs
//! one-sided, and the ratio is far enough from 1 to matter. The sign test alone bounds false verdicts on identical
//! programs, whatever the distribution of the noise, as long as pairs are independent; the other two make it rarer.

use serde::Serialize;

use super::statistics::{bootstrap_median, median, sign_test};

/// Fewer pairs cannot pass the sign test: 2 of 2^8 is the first that is below 1 %.
pub const FEWEST_PAIRS: usize = 8;
/// Confidence of the interval, and what the sign test must fall below.
pub const CONFIDENCE: f64 = 0.99;
/// Draws of the bootstrap.
pub const RESAMPLES: usize = 2000;

/// How ratios are judged.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// The smallest change worth a verdict, as a fraction.
    pub least_effect: f64,
    /// Whether more of the figure is better.
    pub higher_is_better: bool,
    /// Seed of the bootstrap.
    pub seed: u64,
    /// Its draws.
    pub resamples: usize,
}

/// What became of B beside A.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// B is better.
    Win,
    /// B is worse.
    Lose,
    /// Nothing that can be told from noise, or too little to matter.
    NoDifference,
}

impl Verdict {
    /// As people read it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Win => "win",
            Self::Lose => "lose",
            Self::NoDifference => "no difference",
        }
    }
}

/// What the pairs say.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Judgement {
    /// Median of the figure of B divided by that of A.
    pub ratio: f64,
    /// Interval of that median.
    pub interval: [f64; 2],
    /// Of the sign test.
    pub p: f64,
    /// B beside A.
    pub verdict: Verdict,
}

impl Judgement {
    /// How wide the interval is, as a fraction of the ratio.
    pub fn width(&self) -> f64 {
        self.interval[1] / self.interval[0] - 1.0
    }
}

impl Rule {
    /// Judges pairs (A, B) of positive figures.
    pub fn judge(&self, pairs: &[(f64, f64)]) -> Judgement {
        let logs: Vec<f64> = pairs.iter().map(|(a, b)| (b / a).ln()).collect();
        let (low, high) = bootstrap_median(&logs, CONFIDENCE, self.resamples, self.seed);
        let (ratio, interval) = (median(&logs).exp(), [low.exp(), high.exp()]);
        let p = sign_test(&logs);
        let excludes = interval[0] > 1.0 || interval[1] < 1.0;
        let matters = ratio.max(1.0 / ratio) >= 1.0 + self.least_effect;
        let verdict =
            match (excludes && matters && p < 1.0 - CONFIDENCE, (ratio > 1.0) == self.higher_is_better) {
                (true, true) => Verdict::Win,
                (true, false) => Verdict::Lose,
                (false, _) => Verdict::NoDifference,
            };
        Judgement { ratio, interval, p, verdict }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: Rule = Rule { least_effect: 0.01, higher_is_better: false, seed: 1, resamples: RESAMPLES };

    #[test]
    fn a_clear_difference_has_a_direction() {
        let slower: Vec<_> = (0..10).map(|i| (1.0 + 0.001 * f64::from(i), 1.1)).collect();
        assert_eq!(RULE.judge(&slower).verdict, Verdict::Lose);
        assert_eq!(Rule { higher_is_better: true, ..RULE }.judge(&slower).verdict, Verdict::Win);
        let faster: Vec<_> = slower.iter().map(|(a, b)| (*b, *a)).collect();
        let judged = RULE.judge(&faster);
        assert_eq!(judged.verdict, Verdict::Win);
        assert!(judged.interval[0] <= judged.ratio && judged.ratio <= judged.interval[1]);
    }

    #[test]
    fn a_difference_that_does_not_matter_is_none() {
        let pairs: Vec<_> = (0..20).map(|_| (1.0, 1.005)).collect();
        assert_eq!(RULE.judge(&pairs).verdict, Verdict::NoDifference);
        assert_eq!(Rule { least_effect: 0.0, ..RULE }.judge(&pairs).verdict, Verdict::Lose);
    }

    #[test]
    fn few_pairs_prove_nothing() {
        let pairs = [(1.0, 2.0); FEWEST_PAIRS - 1];
        assert_eq!(RULE.judge(&pairs).verdict, Verdict::NoDifference);
        assert_eq!(RULE.judge(&[(1.0, 2.0); FEWEST_PAIRS]).verdict, Verdict::Lose);
    }

    #[test]
    fn one_outlier_decides_nothing() {
        let mut pairs = vec![(1.0, 1.0); 11];
        pairs.push((1.0, 50.0));
        let judged = RULE.judge(&pairs);
        assert_eq!((judged.ratio, judged.verdict), (1.0, Verdict::NoDifference));
    }
}
