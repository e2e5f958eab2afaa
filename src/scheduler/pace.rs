//! How many prompt tokens to read at a time, where that shows in no bit of the result: as many as keep nobody waiting.

use std::time::Duration;

/// The most at a time; our kernels compute no more rows at once.
const MOST: usize = 256;

/// A chunk that others wait for should take about as long, and one of a lone request.
const BESIDE: Target = Target { seconds: 0.2, least: 32 };
const ALONE: Target = Target { seconds: 1.0, least: 64 };

struct Target {
    seconds: f64,
    /// Fewer tokens would read the weights too often.
    least: usize,
}

impl Target {
    fn tokens(&self, seconds_per_token: f64) -> usize {
        ((self.seconds / seconds_per_token.max(1e-9)) as usize).clamp(self.least, MOST)
    }
}

/// Chunks that follow the speed of those before.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    bound: usize,
    seconds_per_token: Option<f64>,
}

impl Pace {
    /// Chunks of at most `bound` tokens.
    pub(super) fn new(bound: usize) -> Self {
        Self { bound: bound.clamp(1, MOST), seconds_per_token: None }
    }

    /// A chunk was read. Short ones say little.
    pub(super) fn note(&mut self, tokens: usize, took: Duration) {
        if tokens >= ALONE.least.min(BESIDE.least).min(self.bound) {
            let seconds = took.as_secs_f64() / tokens as f64;
            self.seconds_per_token =
                Some(self.seconds_per_token.map_or(seconds, |old| (old + seconds) / 2.0));
        }
    }

    /// Tokens for a lone request, and for one beside others.
    pub(super) fn chunks(&self) -> (usize, usize) {
        let tokens = |target: Target| {
            self.seconds_per_token.map_or(target.least, |seconds| target.tokens(seconds)).min(self.bound)
        };
        (tokens(ALONE), tokens(BESIDE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_models_read_little_at_a_time() {
        let mut pace = Pace::new(2048);
        assert_eq!(pace.chunks(), (64, 32));
        pace.note(64, Duration::from_millis(64));
        assert_eq!(pace.chunks(), (256, 200));
        for _ in 0..20 {
            pace.note(64, Duration::from_millis(640));
        }
        assert_eq!(pace.chunks(), (100, 32));
        pace.note(1, Duration::from_secs(100));
        assert_eq!(pace.chunks(), (100, 32));
        let mut short = Pace::new(7);
        short.note(7, Duration::from_millis(7));
        assert_eq!(short.chunks(), (7, 7));
    }
}
