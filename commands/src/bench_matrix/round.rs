//! Requests sent together, and what they amount to.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use mlx_bun::record::{Figures, percentile};
use serde_json::{Value, json};

use super::client::{ChatRequest, ClientError, Endpoint};
use super::reply::Reply;
use super::schema_check::check;
use crate::rng::Rng;

/// What came of requests that were sent together.
#[derive(Clone, Debug, Default)]
pub struct Round {
    /// Seconds from the first request to the end of the last.
    pub wall: f64,
    /// In no order.
    pub results: Vec<Result<Reply, ClientError>>,
}

/// Sends requests by so many clients, each of which waits for its reply before it sends the next.
pub fn closed_loop(
    endpoint: &Endpoint,
    requests: &[ChatRequest],
    clients: usize,
    stop: &(dyn Fn() -> bool + Sync),
) -> Round {
    let (next, results) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let started = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..clients.clamp(1, requests.len().max(1)) {
            scope.spawn(|| {
                while let Some(request) = requests.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let result = endpoint.chat(request, stop);
                    let stopped = result == Err(ClientError::Stopped);
                    results.lock().unwrap_or_else(PoisonError::into_inner).push(result);
                    if stopped {
                        return;
                    }
                }
            });
        }
    });
    Round {
        wall: started.elapsed().as_secs_f64(),
        results: results.into_inner().unwrap_or_else(PoisonError::into_inner),
    }
}

/// When requests arrive that do not wait for each other: so many a minute on average, for so long (a Poisson process).
/// Seconds from the beginning; at least one.
pub fn arrivals(per_minute: f64, duration: Duration, seed: u64) -> Vec<f64> {
    let mut rng = Rng::new(seed);
    let mean = 60.0 / per_minute.max(1e-9);
    let (mut at, mut times) = (0.0, vec![0.0]);
    loop {
        at -= mean * (1.0 - rng.unit()).ln();
        if at >= duration.as_secs_f64() {
            return times;
        }
        times.push(at);
    }
}

/// Sends each request at its time, whatever became of those before.
pub fn open_loop(
    endpoint: &Endpoint,
    requests: &[ChatRequest],
    times: &[f64],
    stop: &(dyn Fn() -> bool + Sync),
) -> Round {
    let results = Mutex::new(Vec::new());
    let started = Instant::now();
    std::thread::scope(|scope| {
        for (request, time) in requests.iter().zip(times) {
            let mut due = Duration::from_secs_f64(*time).saturating_sub(started.elapsed());
            while !due.is_zero() && !stop() {
                let nap = due.min(Duration::from_millis(50));
                std::thread::sleep(nap);
                due = Duration::from_secs_f64(*time).saturating_sub(started.elapsed());
            }
            if stop() {
                break;
            }
            scope.spawn(|| {
                let result = endpoint.chat(request, stop);
                results.lock().unwrap_or_else(PoisonError::into_inner).push(result);
            });
        }
    });
    Round {
        wall: started.elapsed().as_secs_f64(),
        results: results.into_inner().unwrap_or_else(PoisonError::into_inner),
    }
}

impl Round {
    /// Whether the user stopped it.
    pub fn was_stopped(&self) -> bool {
        self.results.contains(&Err(ClientError::Stopped))
    }

    /// The first thing that went wrong; a reply of nothing is none unless all are.
    pub fn error(&self) -> Option<&ClientError> {
        let mut errors = self.results.iter().filter_map(|result| result.as_ref().err());
        let all_empty = self.empty() > 0 && self.empty() == self.results.len();
        errors.find(|error| all_empty || **error != ClientError::Empty)
    }

    /// Replies of nothing, which are not among those that were answered.
    pub fn empty(&self) -> usize {
        self.results.iter().filter(|result| **result == Err(ClientError::Empty)).count()
    }

    /// Requests that were sent back because the server has too much to do.
    pub fn refused(&self) -> usize {
        let busy = |result: &&Result<Reply, ClientError>| {
            matches!(result, Err(ClientError::Status { status: 429 | 503, .. }))
        };
        self.results.iter().filter(busy).count()
    }

    fn replies(&self) -> impl Iterator<Item = &Reply> {
        self.results.iter().filter_map(|result| result.as_ref().ok())
    }

    /// Tokens of all replies in the time that they took together.
    pub fn aggregate_tps(&self) -> f64 {
        self.replies().map(|reply| reply.tokens).sum::<u64>() as f64 / self.wall.max(1e-9)
    }
}

/// What several rounds of one cell amount to.
pub struct Summary<'a> {
    rounds: &'a [Round],
}

impl<'a> Summary<'a> {
    /// Of rounds.
    pub fn of(rounds: &'a [Round]) -> Self {
        Self { rounds }
    }

    fn replies(&self) -> impl Iterator<Item = &'a Reply> {
        self.rounds.iter().flat_map(Round::replies)
    }

    fn each(&self, of: impl Fn(&Reply) -> Option<f64>) -> Vec<f64> {
        self.replies().filter_map(of).collect()
    }

    fn gaps(&self) -> Vec<f64> {
        self.replies().flat_map(|reply| reply.gaps.iter().copied()).collect()
    }

    /// The figures: of all replies together, but for the aggregate rate, which each round has.
    pub fn figures(&self) -> Figures {
        let mut figures = Figures::default();
        let mut add = |name: &str, value: Option<f64>, scale: f64, unit: &str| {
            if let Some(value) = value {
                figures.add(name, value * scale, unit);
            }
        };
        let rates: Vec<f64> = self.rounds.iter().map(Round::aggregate_tps).collect();
        add("aggregate_tps", percentile(&rates, 0.5), 1.0, "tok/s");
        add("aggregate_tps_best", percentile(&rates, 1.0), 1.0, "tok/s");
        let first = self.each(|reply| Some(reply.ttft));
        add("ttft_p50_ms", percentile(&first, 0.5), 1e3, "ms");
        add("ttft_p95_ms", percentile(&first, 0.95), 1e3, "ms");
        let gaps = self.gaps();
        add("itl_p50_ms", percentile(&gaps, 0.5), 1e3, "ms");
        add("itl_p95_ms", percentile(&gaps, 0.95), 1e3, "ms");
        let whole = self.each(|reply| Some(reply.e2e));
        add("e2e_p50_ms", percentile(&whole, 0.5), 1e3, "ms");
        add("e2e_p95_ms", percentile(&whole, 0.95), 1e3, "ms");
        add("e2e_p99_ms", percentile(&whole, 0.99), 1e3, "ms");
        let prefill =
            self.each(|reply| Some(reply.prompt_tokens? as f64 / reply.ttft).filter(|_| reply.ttft > 0.0));
        add("prefill_tps", percentile(&prefill, 0.5), 1.0, "tok/s");
        let decode = self.each(|reply| {
            let time = reply.e2e - reply.ttft;
            (reply.tokens > 1 && time > 0.0).then(|| (reply.tokens - 1) as f64 / time)
        });
        add("decode_tps", percentile(&decode, 0.5), 1.0, "tok/s");
        add("decode_tps_best", percentile(&decode, 1.0), 1.0, "tok/s");
        add("prefill_tps_best", percentile(&prefill, 1.0), 1.0, "tok/s");
        let prompts = self.each(|reply| reply.prompt_tokens.map(|tokens| tokens as f64));
        add("prompt_tokens", percentile(&prompts, 0.5), 1.0, "tokens");
        add("completion_tokens", Some(self.each(|r| Some(r.tokens as f64)).iter().sum()), 1.0, "tokens");
        let lengths = self.each(|reply| Some(reply.tokens as f64));
        add("reply_tokens", percentile(&lengths, 0.5), 1.0, "tokens");
        add("requests", Some(self.replies().count() as f64), 1.0, "requests");
        let drafts: Vec<(u64, u64)> = self.replies().filter_map(|reply| reply.speculation).collect();
        let (accepted, drafted) = drafts.iter().fold((0, 0), |sum, draft| (sum.0 + draft.0, sum.1 + draft.1));
        add("acceptance_pct", (drafted > 0).then(|| 100.0 * accepted as f64 / drafted as f64), 1.0, "%");
        figures
    }

    /// What the figures were made of.
    pub fn samples(&self) -> Value {
        json!({
            "round_wall_s": self.rounds.iter().map(|round| round.wall).collect::<Vec<_>>(),
            "round_aggregate_tps": self.rounds.iter().map(Round::aggregate_tps).collect::<Vec<_>>(),
            "ttft_s": self.each(|reply| Some(reply.ttft)),
            "e2e_s": self.each(|reply| Some(reply.e2e)),
            "tokens": self.each(|reply| Some(reply.tokens as f64)),
        })
    }

    /// What is to be known about the counts.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.replies().any(|reply| !reply.tokens_from_usage && reply.claimed_tokens.is_none()) {
            notes.push("the server tells no token counts: pieces of text were counted".to_owned());
        }
        if let Some(claimed) = self.replies().find_map(|reply| reply.claimed_tokens) {
            notes.push(format!(
                "the server claims {claimed} tokens of a reply, which cannot be: pieces of text were counted"
            ));
        }
        let empty: usize = self.rounds.iter().map(Round::empty).sum();
        if empty > 0 {
            let all: usize = self.rounds.iter().map(|round| round.results.len()).sum();
            notes.push(format!("{empty} of {all} replies were empty, and do not count"));
        }
        notes
    }

    /// Replies that are what the schema describes, in percent, and what is wrong with the first that is not.
    ///
    /// # Errors
    /// The schema cannot be checked.
    pub fn conformance(&self, schema: &Value) -> Result<(f64, Option<String>), String> {
        let (mut fitting, mut all, mut problem) = (0u32, 0u32, None);
        for reply in self.replies() {
            all += 1;
            match nonconforming(reply, schema)? {
                None => fitting += 1,
                Some(found) => {
                    problem.get_or_insert(found);
                }
            }
        }
        Ok((100.0 * f64::from(fitting) / f64::from(all.max(1)), problem))
    }
}

fn nonconforming(reply: &Reply, schema: &Value) -> Result<Option<String>, String> {
    let value: Value = match serde_json::from_str(&reply.text) {
        Ok(value) => value,
        Err(error) => {
            let finish = reply.finish.as_deref().unwrap_or("no reason");
            return Ok(Some(format!("no JSON ({error}; ended by {finish})")));
        }
    };
    Ok(check(schema, &value)?.into_iter().next())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(ttft: f64, e2e: f64, tokens: u64, text: &str) -> Result<Reply, ClientError> {
        Ok(Reply {
            ttft,
            gaps: vec![0.01; tokens.saturating_sub(1) as usize],
            e2e,
            tokens,
            tokens_from_usage: true,
            claimed_tokens: None,
            prompt_tokens: Some(100),
            finish: Some("stop".to_owned()),
            text: text.to_owned(),
            speculation: None,
        })
    }

    #[test]
    fn figures_of_rounds() {
        let rounds = [
            Round { wall: 2.0, results: vec![reply(0.1, 1.1, 11, ""), reply(0.3, 1.3, 9, "")] },
            Round { wall: 1.0, results: vec![reply(0.2, 0.7, 6, ""), reply(0.2, 0.7, 4, "")] },
        ];
        let figures = Summary::of(&rounds).figures();
        let get = |name| figures.get(name).unwrap();
        assert_eq!((get("aggregate_tps"), get("aggregate_tps_best")), (10.0, 10.0));
        assert!((get("ttft_p50_ms") - 200.0).abs() < 1e-9);
        // Linear interpolation: between 200 and 300 at 0.95 * 3 = 2.85.
        assert!((get("ttft_p95_ms") - 285.0).abs() < 1e-9);
        assert!((get("itl_p50_ms") - 10.0).abs() < 1e-9);
        assert!((get("prefill_tps") - 500.0).abs() < 1e-9);
        assert_eq!((get("requests"), get("completion_tokens")), (4.0, 30.0));
        // 10 / 1, 8 / 1, 5 / 0.5 and 3 / 0.5.
        assert!((get("decode_tps") - 9.0).abs() < 1e-9);
        assert_eq!(figures.get("acceptance_pct"), None);
        assert!(Summary::of(&[]).figures().get("ttft_p50_ms").is_none());
    }

    #[test]
    fn replies_of_nothing_are_no_answers() {
        let of = |results| Round { wall: 1.0, results };
        let some = of(vec![reply(0.1, 1.0, 4, "x"), Err(ClientError::Empty)]);
        assert_eq!((some.error(), some.empty()), (None, 1));
        let summary = [some];
        let summary = Summary::of(&summary);
        assert_eq!(summary.figures().get("requests"), Some(1.0));
        assert_eq!(summary.notes(), ["1 of 2 replies were empty, and do not count"]);
        let none = of(vec![Err(ClientError::Empty), Err(ClientError::Empty)]);
        assert_eq!(none.error(), Some(&ClientError::Empty));
        let busy = ClientError::Status { status: 429, message: String::new() };
        let refused = of(vec![Err(busy.clone()), Err(ClientError::Empty)]);
        assert_eq!((refused.error(), refused.refused()), (Some(&busy), 1));
    }

    #[test]
    fn claims_that_cannot_be_are_noted() {
        let mut round = Round { wall: 1.0, results: vec![reply(0.1, 1.0, 4, "x"), reply(0.1, 1.0, 4, "x")] };
        let first = round.results[0].as_mut().unwrap();
        (first.tokens_from_usage, first.claimed_tokens) = (false, Some(99));
        let notes = Summary::of(&[round]).notes();
        assert_eq!(notes.len(), 1);
        assert!(notes[0].starts_with("the server claims 99 tokens of a reply, which cannot be"), "{notes:?}");
    }

    #[test]
    fn acceptance_is_that_of_all_drafts() {
        let mut round = Round { wall: 1.0, results: vec![reply(0.1, 1.0, 4, ""), reply(0.1, 1.0, 4, "")] };
        round.results[0].as_mut().unwrap().speculation = Some((1, 2));
        round.results[1].as_mut().unwrap().speculation = Some((5, 8));
        assert_eq!(Summary::of(&[round]).figures().get("acceptance_pct"), Some(60.0));
    }

    #[test]
    fn conformance_tells_the_first_problem() {
        let schema = json!({"type": "object", "required": ["a"]});
        let round = |texts: &[&str]| Round {
            wall: 1.0,
            results: texts.iter().map(|t| reply(0.1, 0.2, 3, t)).collect(),
        };
        let good = [round(&["{\"a\": 1}", " {\"a\": 2}\n"])];
        assert_eq!(Summary::of(&good).conformance(&schema), Ok((100.0, None)));
        let bad = [round(&["{\"a\": 1}", "{\"b\"", "{}", "x"])];
        let (percent, problem) = Summary::of(&bad).conformance(&schema).unwrap();
        assert_eq!(percent, 25.0);
        assert!(problem.unwrap().starts_with("no JSON (EOF while parsing"));
    }

    #[test]
    fn arrivals_come_at_their_rate_and_again_for_the_same_seed() {
        let times = arrivals(600.0, Duration::from_secs(100), 7);
        assert_eq!(times, arrivals(600.0, Duration::from_secs(100), 7));
        assert_ne!(times, arrivals(600.0, Duration::from_secs(100), 8));
        assert!((900..1100).contains(&times.len()), "{}", times.len());
        assert!(times.windows(2).all(|pair| pair[0] <= pair[1]) && times[times.len() - 1] < 100.0);
        let gaps: Vec<f64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        // Exponential: the standard deviation is the mean.
        let statistics = mlx_bun::record::Statistics::of(&gaps).unwrap();
        assert!((statistics.mean / statistics.sd - 1.0).abs() < 0.15, "{statistics:?}");
        assert_eq!(arrivals(1.0, Duration::from_millis(1), 1), [0.0]);
    }
}
