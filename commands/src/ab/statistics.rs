//! What paired samples say: a bootstrap interval of their median, and the sign test.

use mlx_bun::record::percentile;

use crate::rng::Rng;

/// The median; NaN of nothing.
pub fn median(values: &[f64]) -> f64 {
    percentile(values, 0.5).unwrap_or(f64::NAN)
}

/// An interval of the median by the percentile bootstrap (Efron 1979), with so much confidence.
pub fn bootstrap_median(values: &[f64], confidence: f64, resamples: usize, seed: u64) -> (f64, f64) {
    let mut rng = Rng::new(seed);
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    // How often each value was drawn: its median is found without sorting again.
    let mut drawn = vec![0usize; sorted.len()];
    let mut medians: Vec<f64> = (0..resamples)
        .map(|_| {
            drawn.fill(0);
            (0..drawn.len()).for_each(|_| drawn[rng.below(sorted.len())] += 1);
            middle(&sorted, &drawn)
        })
        .collect();
    medians.sort_by(f64::total_cmp);
    let tail = (1.0 - confidence) / 2.0;
    let at = |share: f64| {
        let place = (share * medians.len().saturating_sub(1) as f64).round() as usize;
        medians.get(place).copied().unwrap_or(f64::NAN)
    };
    (at(tail), at(1.0 - tail))
}

/// The median of sorted values that come so often each.
fn middle(sorted: &[f64], times: &[usize]) -> f64 {
    let count: usize = times.iter().sum();
    let (low, high) = (count.saturating_sub(1) / 2, count / 2);
    let (mut seen, mut below) = (0, f64::NAN);
    for (value, times) in sorted.iter().zip(times) {
        if seen <= low && low < seen + times {
            below = *value;
        }
        if seen <= high && high < seen + times {
            return (below + value) / 2.0;
        }
        seen += times;
    }
    f64::NAN
}

/// How likely signs at least as one-sided are when both are equally likely (two-sided sign test). Zeros do not count.
pub fn sign_test(values: &[f64]) -> f64 {
    let above = values.iter().filter(|value| **value > 0.0).count();
    let below = values.iter().filter(|value| **value < 0.0).count();
    let (count, fewer) = (above + below, above.min(below));
    // Terms of the binomial distribution, each from the one before, in logarithms: they get small.
    let mut log_term = -(count as f64) * std::f64::consts::LN_2;
    let mut tail = 0.0;
    for k in 0..=fewer {
        tail += log_term.exp();
        log_term += ((count - k) as f64).ln() - ((k + 1) as f64).ln();
    }
    (2.0 * tail).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sign_test_is_the_binomial_tail() {
        assert_eq!(sign_test(&[]), 1.0);
        assert_eq!(sign_test(&[1.0, -1.0]), 1.0);
        assert!((sign_test(&[1.0; 8]) - 2.0 / 256.0).abs() < 1e-12);
        // 1 of 10: 2 * (1 + 10) / 1024.
        let mut values = vec![-0.5; 10];
        values[3] = 0.1;
        assert!((sign_test(&values) - 22.0 / 1024.0).abs() < 1e-12);
        // Ties do not count.
        values.extend([0.0; 5]);
        assert!((sign_test(&values) - 22.0 / 1024.0).abs() < 1e-12);
        assert!(sign_test(&vec![1.0; 2000]) < 1e-300);
    }

    #[test]
    fn an_interval_is_reproducible_and_covers_the_median() {
        let mut rng = Rng::new(1);
        let values: Vec<f64> = (0..31).map(|_| rng.unit()).collect();
        let (low, high) = bootstrap_median(&values, 0.95, 2000, 7);
        assert_eq!((low, high), bootstrap_median(&values, 0.95, 2000, 7));
        assert!(low <= median(&values) && median(&values) <= high && high - low < 0.5);
        let wide = bootstrap_median(&values, 0.999, 2000, 7);
        assert!(wide.0 <= low && wide.1 >= high);
        assert_eq!(bootstrap_median(&[2.0], 0.99, 10, 1), (2.0, 2.0));
        assert!(bootstrap_median(&[], 0.99, 10, 1).0.is_nan());
    }

    #[test]
    fn the_middle_of_counted_values_is_their_median() {
        let sorted = [1.0, 2.0, 4.0, 8.0];
        assert_eq!(middle(&sorted, &[1, 1, 1, 1]), 3.0);
        assert_eq!(middle(&sorted, &[0, 3, 0, 1]), 2.0);
        assert_eq!(middle(&sorted, &[2, 0, 0, 2]), 4.5);
        assert_eq!(middle(&sorted, &[0, 0, 3, 0]), 4.0);
    }

    /// Of many intervals of 95 %, about 95 % hold what they are of; few values make them a little too short.
    #[test]
    fn intervals_hold_what_they_promise() {
        let mut rng = Rng::new(3);
        let held = (0..400)
            .filter(|round| {
                let values: Vec<f64> = (0..25).map(|_| rng.unit() - 0.5).collect();
                let (low, high) = bootstrap_median(&values, 0.95, 400, *round);
                low <= 0.0 && high >= 0.0
            })
            .count();
        assert!(held >= 364, "{held} of 400");
    }
}
