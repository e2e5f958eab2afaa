//! Samples summed up.

use serde::Serialize;

/// What a few samples say.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Statistics {
    /// How many there are.
    pub count: usize,
    /// Their mean.
    pub mean: f64,
    /// Their standard deviation (of a sample: divided by one less than the count); 0 for a single one.
    pub sd: f64,
    /// The middle one.
    pub median: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
}

impl Statistics {
    /// Of samples in any order; those that are not finite do not count. `None` when none is left.
    pub fn of(samples: &[f64]) -> Option<Self> {
        let sorted = sorted(samples);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let count = sorted.len();
        let mean = sorted.iter().sum::<f64>() / count as f64;
        let squares: f64 = sorted.iter().map(|sample| (sample - mean).powi(2)).sum();
        let sd = if count > 1 { (squares / (count - 1) as f64).sqrt() } else { 0.0 };
        Some(Self { count, mean, sd, median: interpolated(&sorted, 0.5)?, min, max })
    }
}

/// The value below which a share (0 to 1) of the samples lies, by linear interpolation between neighbours (numpy's
/// default). Samples that are not finite do not count; `None` when none is left.
pub fn percentile(samples: &[f64], share: f64) -> Option<f64> {
    interpolated(&sorted(samples), share)
}

fn sorted(samples: &[f64]) -> Vec<f64> {
    let mut sorted: Vec<f64> = samples.iter().copied().filter(|sample| sample.is_finite()).collect();
    sorted.sort_by(f64::total_cmp);
    sorted
}

fn interpolated(sorted: &[f64], share: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    let at = if share.is_nan() { 0.0 } else { share.clamp(0.0, 1.0) } * last as f64;
    let (low, high) = (at.floor() as usize, at.ceil() as usize);
    let (low, high) = (*sorted.get(low)?, *sorted.get(high)?);
    Some(low + (high - low) * at.fract())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_summed_up() {
        let statistics = Statistics::of(&[4.0, 1.0, 3.0, 2.0]).unwrap();
        assert_eq!((statistics.count, statistics.mean, statistics.median), (4, 2.5, 2.5));
        assert_eq!((statistics.min, statistics.max), (1.0, 4.0));
        assert!((statistics.sd - (5.0f64 / 3.0).sqrt()).abs() < 1e-12);
        assert_eq!(Statistics::of(&[7.0]).unwrap().sd, 0.0);
        assert_eq!(Statistics::of(&[]), None);
        assert_eq!(Statistics::of(&[f64::NAN, f64::INFINITY]), None);
    }

    #[test]
    fn percentiles_are_interpolated_as_numpy_does() {
        let samples = [15.0, 20.0, 35.0, 40.0, 50.0];
        for (share, expected) in
            [(0.0, 15.0), (0.4, 29.0), (0.5, 35.0), (0.95, 48.0), (1.0, 50.0), (2.0, 50.0)]
        {
            let found = percentile(&samples, share).unwrap();
            assert!((found - expected).abs() < 1e-12, "{share}: {found}");
        }
        assert_eq!(percentile(&[3.0], 0.95), Some(3.0));
        assert_eq!(percentile(&[], 0.5), None);
        assert_eq!(percentile(&[1.0, 2.0], f64::NAN), Some(1.0));
    }
}
