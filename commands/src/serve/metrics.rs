//! Counters for `/metrics`, in Prometheus' text format.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};

use super::reply::Usage;

/// Upper ends of the buckets of times, in seconds.
const BUCKETS: [f64; 14] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];

/// How often times fell into each bucket.
#[derive(Clone, Debug, Default)]
struct Histogram {
    counts: [u64; BUCKETS.len()],
    total: u64,
    sum: f64,
}

impl Histogram {
    fn add(&mut self, seconds: f64) {
        self.total += 1;
        self.sum += seconds;
        for (count, bound) in self.counts.iter_mut().zip(BUCKETS) {
            *count += u64::from(seconds <= bound);
        }
    }

    fn write(&self, page: &mut String, name: &str, help: &str) {
        let _ = writeln!(page, "# HELP {name} {help}\n# TYPE {name} histogram");
        for (count, bound) in self.counts.iter().zip(BUCKETS) {
            let _ = writeln!(page, "{name}_bucket{{le=\"{bound}\"}} {count}");
        }
        let Self { total, sum, .. } = self;
        let _ =
            writeln!(page, "{name}_bucket{{le=\"+Inf\"}} {total}\n{name}_sum {sum}\n{name}_count {total}");
    }
}

#[derive(Debug, Default)]
struct Counts {
    requests: BTreeMap<(String, u16), u64>,
    prompt: u64,
    cached: u64,
    completion: u64,
    duration: Histogram,
    first_token: Histogram,
}

/// What the server has done since its start.
#[derive(Debug, Default)]
pub struct Metrics(Mutex<Counts>);

/// A figure of the moment.
pub struct Gauge {
    /// Its name.
    pub name: &'static str,
    /// What it is.
    pub help: &'static str,
    /// `gauge` or `counter`.
    pub kind: &'static str,
    /// Its value.
    pub value: f64,
}

impl Metrics {
    /// Counts a request that is over.
    pub fn request(
        &self,
        route: &str,
        status: u16,
        seconds: f64,
        first_token: Option<f64>,
        usage: Option<Usage>,
    ) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.requests.entry((route.to_owned(), status)).or_default() += 1;
        counts.duration.add(seconds);
        if let Some(first_token) = first_token {
            counts.first_token.add(first_token);
        }
        if let Some(usage) = usage {
            counts.prompt += usage.prompt as u64;
            counts.cached += usage.cached as u64;
            counts.completion += usage.completion as u64;
        }
    }

    /// The page.
    pub fn page(&self, gauges: &[Gauge]) -> String {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut page = String::from(
            "# HELP mlx_bun_requests_total Requests by route and status; 499: the client went first\n\
             # TYPE mlx_bun_requests_total counter\n",
        );
        for ((route, status), count) in &counts.requests {
            let _ = writeln!(page, "mlx_bun_requests_total{{route=\"{route}\",status=\"{status}\"}} {count}");
        }
        for (name, help, value) in [
            ("mlx_bun_prompt_tokens_total", "Tokens of prompts", counts.prompt),
            ("mlx_bun_cached_tokens_total", "Tokens of prompts taken from the prompt cache", counts.cached),
            ("mlx_bun_completion_tokens_total", "Tokens generated", counts.completion),
        ] {
            let _ = writeln!(page, "# HELP {name} {help}\n# TYPE {name} counter\n{name} {value}");
        }
        counts.duration.write(
            &mut page,
            "mlx_bun_request_duration_seconds",
            "From a request to the end of its reply",
        );
        counts.first_token.write(
            &mut page,
            "mlx_bun_time_to_first_token_seconds",
            "From a request to its first text",
        );
        for Gauge { name, help, kind, value } in gauges {
            let _ = writeln!(page, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}");
        }
        page
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_add_up() {
        let metrics = Metrics::default();
        metrics.request(
            "/v1/x",
            200,
            0.3,
            Some(0.02),
            Some(Usage { prompt: 2, cached: 1, completion: 3, reasoning: 0 }),
        );
        metrics.request("/v1/x", 200, 99.0, None, None);
        let gauge = Gauge { name: "g", help: "a gauge", kind: "gauge", value: 1.5 };
        let page = metrics.page(&[gauge]);
        for line in [
            "mlx_bun_requests_total{route=\"/v1/x\",status=\"200\"} 2",
            "mlx_bun_prompt_tokens_total 2",
            "mlx_bun_completion_tokens_total 3",
            "mlx_bun_request_duration_seconds_bucket{le=\"0.25\"} 0",
            "mlx_bun_request_duration_seconds_bucket{le=\"0.5\"} 1",
            "mlx_bun_request_duration_seconds_bucket{le=\"+Inf\"} 2",
            "mlx_bun_time_to_first_token_seconds_count 1",
            "g 1.5",
        ] {
            assert!(page.lines().any(|found| found == line), "{line}\n{page}");
        }
    }
}
