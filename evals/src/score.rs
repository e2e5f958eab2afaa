//! Scores: a share with its Wilson interval, and the mean over tasks.

/// The two-sided 95 % quantile of the normal distribution.
const Z: f64 = 1.959_963_984_540_054;

/// How many of the samples are right.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Score {
    /// Right ones.
    pub correct: usize,
    /// All.
    pub total: usize,
}

impl Score {
    /// Of single verdicts.
    pub fn of(verdicts: impl IntoIterator<Item = bool>) -> Self {
        verdicts.into_iter().fold(Self::default(), |score, correct| Self {
            correct: score.correct + usize::from(correct),
            total: score.total + 1,
        })
    }

    /// Percent that is right; 0 without samples.
    pub fn percent(self) -> f64 {
        if self.total == 0 { 0.0 } else { 100.0 * self.correct as f64 / self.total as f64 }
    }

    /// The 95 % interval of [`percent`](Self::percent), by Wilson's method, which holds near 0 and 100 and for few
    /// samples (Wilson 1927); 0 to 100 without samples.
    pub fn wilson(self) -> (f64, f64) {
        if self.total == 0 {
            return (0.0, 100.0);
        }
        let n = self.total as f64;
        let p = self.correct as f64 / n;
        let denominator = 1.0 + Z * Z / n;
        let centre = p + Z * Z / (2.0 * n);
        let half = Z * (p * (1.0 - p) / n + Z * Z / (4.0 * n * n)).sqrt();
        let percent = |value: f64| (100.0 * value / denominator).clamp(0.0, 100.0);
        (percent(centre - half), percent(centre + half))
    }
}

/// The capability score: the unweighted mean of the percents there are.
pub fn capability(percents: impl IntoIterator<Item = f64>) -> Option<f64> {
    let (sum, count) = percents.into_iter().fold((0.0, 0usize), |(sum, count), p| (sum + p, count + 1));
    (count > 0).then(|| sum / count as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn close(interval: (f64, f64), expected: (f64, f64)) -> bool {
        (interval.0 - expected.0).abs() < 0.01 && (interval.1 - expected.1).abs() < 0.01
    }

    #[test]
    fn intervals_are_those_of_the_textbook() {
        // statsmodels.stats.proportion.proportion_confint(..., method="wilson")
        assert!(close(Score { correct: 5, total: 10 }.wilson(), (23.66, 76.34)));
        assert!(close(Score { correct: 0, total: 20 }.wilson(), (0.0, 16.11)));
        assert!(close(Score { correct: 50, total: 50 }.wilson(), (92.87, 100.0)));
        assert_eq!(Score::default().wilson(), (0.0, 100.0));
    }

    #[test]
    fn the_capability_score_weighs_tasks_alike() {
        assert_eq!(capability([10.0, 20.0, 60.0]), Some(30.0));
        assert_eq!(capability([]), None);
    }

    proptest! {
        #[test]
        fn the_interval_holds_the_share(total in 1usize..5000, part in 0.0f64..=1.0) {
            let score = Score { correct: (total as f64 * part) as usize, total };
            let (low, high) = score.wilson();
            prop_assert!(low <= score.percent() + 1e-9 && score.percent() <= high + 1e-9);
            prop_assert!((0.0..=100.0).contains(&low) && (0.0..=100.0).contains(&high));
        }
    }
}
