//! `load`: how long clients wait, against how many they are and how often they ask.

use std::time::Duration;

use mlx_bun::record::{Figures, LoadRun, percentile};
use serde_json::{Map, Value, json};

use super::args::{ReportArgs, TargetArgs};
use super::client::{ChatRequest, ClientError};
use super::document::{CellResult, Gate, Knee};
use super::figures::Column;
use super::host::Host;
use super::round::{Round, Summary, arrivals, closed_loop, open_loop};
use super::session::{Ending, Measured, Session, Subject};
use super::store::levers_of_environment;
use super::workload::{SHORT_WORDS, Workload};
use crate::error::Complaint;
use crate::exit::ExitStatus;
use crate::generate::MORE;
use crate::printer::Printer;

const EXAMPLES: &str = "\
Examples:
  mlx-bun bench-matrix load --quick
  mlx-bun bench-matrix load --clients 1,4,16 --rpm 30,60,120 --duration 60
  mlx-bun bench-matrix load --url http://127.0.0.1:8081 --stack mlx_lm.server --model-id default_model";

/// Clients of the closed loop.
const CLIENTS: [u32; 7] = [1, 2, 4, 8, 12, 16, 20];
const QUICK_CLIENTS: [u32; 3] = [1, 4, 8];
/// Rates of the open loop, in percent of what the closed loop came to at most.
const SHARES: [u32; 5] = [25, 50, 75, 100, 125];
const QUICK_SHARES: [u32; 2] = [50, 100];

/// The share of requests that may fail: one of a hundred.
const MOST_FAILED: f64 = 0.01;

/// Measure a server under many clients, and find how much it can take
///
/// In the closed loop each of N clients waits for its reply before it asks again. In the open loop requests arrive at
/// random (a Poisson process), whether those before were answered or not. The knee is the highest rate of the open loop
/// at which first tokens still come in acceptable time.
#[derive(Clone, Debug, clap::Args)]
#[command(args_override_self = true, after_help = MORE, after_long_help = EXAMPLES)]
pub struct LoadArgs {
    #[command(flatten)]
    target: TargetArgs,

    /// Clients of the closed loop [default: 1,2,4,8,12,16,20; 1,4,8 with --quick]
    #[arg(long, value_name = "N,N", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1000), help_heading = "Requests")]
    clients: Vec<u32>,

    /// Requests of each client in the closed loop [default: 4; 2 with --quick]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000), help_heading = "Requests")]
    per_client: Option<u32>,

    /// Requests a minute in the open loop [default: 25, 50, 75, 100 and 125 % of the most that the closed loop had]
    #[arg(long, value_name = "X,X", value_delimiter = ',', value_parser = rate, help_heading = "Requests")]
    rpm: Vec<f64>,

    /// How long requests arrive in the open loop [default: 30; 6 with --quick]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=86_400), help_heading = "Requests")]
    duration: Option<u32>,

    /// The longest acceptable wait for a first token, at its 95th percentile
    #[arg(long, value_name = "MS", default_value_t = 2000.0, value_parser = rate, help_heading = "Requests")]
    ttft_limit: f64,

    /// Seed of the arrivals
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Requests")]
    seed: u64,

    /// Tokens of a reply at most [default: 64; 16 with --quick]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000), help_heading = "Requests")]
    max_tokens: Option<u32>,

    #[command(flatten)]
    report: ReportArgs,
}

fn rate(text: &str) -> Result<f64, String> {
    let number =
        text.parse::<f64>().ok().filter(|number| number.is_finite() && (0.001..=1e7).contains(number));
    number.ok_or_else(|| "must be a number in [0.001, 10000000]".to_owned())
}

const COLUMNS: &[Column] = &[
    ("rpm wanted", "target_rpm"),
    ("rpm", "achieved_rpm"),
    ("answered", "requests"),
    ("failed", "errors"),
    ("TTFT p50 ms", "ttft_p50_ms"),
    ("p95", "ttft_p95_ms"),
    ("whole p50 ms", "e2e_p50_ms"),
    ("p95", "e2e_p95_ms"),
    ("p99", "e2e_p99_ms"),
    ("tok/s", "aggregate_tps"),
    ("a request", "decode_tps"),
    ("memory", "peak_bytes"),
];

/// A row of the table.
#[derive(Clone, Copy, Debug)]
enum Level {
    /// So many clients.
    Closed(usize),
    /// So many percent of the most.
    Share(u32),
    /// So many requests a minute.
    Rate(f64),
}

impl Level {
    fn label(self) -> String {
        match self {
            Self::Closed(clients) => format!("closed-{clients}"),
            Self::Share(percent) => format!("open-{percent}%"),
            Self::Rate(rpm) => format!("open-{rpm}rpm"),
        }
    }
}

/// Requests of a level.
struct Plan {
    per_client: usize,
    duration: Duration,
    seed: u64,
    workload: Workload,
}

impl LoadArgs {
    /// Runs the verb.
    ///
    /// # Errors
    /// What cannot be measured at all; what goes wrong in a row is in the report.
    pub fn run(&self, printer: &Printer) -> anyhow::Result<ExitStatus> {
        let levels = self.levels();
        let labels: Vec<String> = levels.iter().map(|level| level.label()).collect();
        Session::check_names(&self.report, &labels)?;
        let mut host = Host::new(self.target.resolve(printer)?);
        let plan = self.plan();
        let model = host.model();
        let (stack, url, flags) =
            (host.stack().to_owned(), host.url().map(str::to_owned), host.user_flags().to_vec());
        let subject = Subject {
            verb: "bench-matrix load",
            stack: &stack,
            model: &model,
            url: url.as_deref(),
            flags: &flags,
        };
        let mut session =
            Session::begin::<LoadRun>(&subject, &self.report, self.settings(&plan, &flags), printer)?;
        for (number, level) in levels.into_iter().enumerate() {
            let most = most_rpm(&session.document.cells);
            let address = url.clone().unwrap_or_else(|| "own".to_owned());
            let row = |session: &Session, figures: &Figures| row(session, figures, level, &address, &plan);
            let measure =
                |session: &Session| measure(session, &mut host, level, most, &plan, number * 100_000);
            if !session.cell(&level.label(), Vec::new(), row, measure) {
                break;
            }
        }
        drop(host);
        session.document.knee = Some(knee(&session.document.cells, self.ttft_limit));
        let gates: Vec<Gate> = session.document.cells.iter().filter_map(answered).collect();
        gates.into_iter().for_each(|gate| session.gate(gate));
        session.finish(&Ending { columns: COLUMNS, guarded: &["aggregate_tps"] })
    }

    fn levels(&self) -> Vec<Level> {
        let quick = self.report.quick;
        let clients: Vec<u32> = match (self.clients.is_empty(), quick) {
            (false, _) => self.clients.clone(),
            (true, true) => QUICK_CLIENTS.to_vec(),
            (true, false) => CLIENTS.to_vec(),
        };
        let closed = clients.into_iter().map(|clients| Level::Closed(clients as usize));
        let shares = if quick { QUICK_SHARES.to_vec() } else { SHARES.to_vec() };
        let open: Vec<Level> = match self.rpm.is_empty() {
            true => shares.into_iter().map(Level::Share).collect(),
            false => self.rpm.iter().copied().map(Level::Rate).collect(),
        };
        closed.chain(open).collect()
    }

    fn plan(&self) -> Plan {
        let of = |given: Option<u32>, short: u32, long: u32| {
            given.unwrap_or(if self.report.quick { short } else { long })
        };
        Plan {
            per_client: of(self.per_client, 2, 4) as usize,
            duration: Duration::from_secs(u64::from(of(self.duration, 6, 30))),
            seed: self.seed,
            workload: Workload {
                words: SHORT_WORDS,
                max_tokens: of(self.max_tokens, 16, 64) as usize,
                grammar: false,
            },
        }
    }

    fn settings(&self, plan: &Plan, flags: &[String]) -> Map<String, Value> {
        let settings = json!({
            "per_client": plan.per_client, "duration_s": plan.duration.as_secs(), "seed": plan.seed,
            "max_tokens": plan.workload.max_tokens, "serve_flags": flags, "environment": levers_of_environment(),
        });
        settings.as_object().cloned().unwrap_or_default()
    }
}

/// The most requests a minute that the closed loop came to.
fn most_rpm(cells: &[CellResult]) -> Option<f64> {
    let closed = cells.iter().filter(|cell| cell.label.starts_with("closed-"));
    closed.filter_map(|cell| cell.figures.get("achieved_rpm")).reduce(f64::max)
}

fn measure(
    session: &Session,
    host: &mut Host,
    level: Level,
    most: Option<f64>,
    plan: &Plan,
    first: usize,
) -> anyhow::Result<Measured> {
    let rpm = match level {
        Level::Closed(_) => None,
        Level::Rate(rpm) => Some(rpm),
        Level::Share(percent) => {
            let most = most.ok_or_else(|| {
                Complaint::failure("no row of the closed loop says how much the server can take")
                    .hint("measure one, or name rates with --rpm")
            })?;
            Some(most * f64::from(percent) / 100.0)
        }
    };
    let interrupt = session.interrupt.clone();
    let stop = move || interrupt.is_set();
    let endpoint = host.endpoint(&[], true, &stop)?;
    let request = |index: usize| plan.workload.request(first + index);
    let warm = ChatRequest { max_tokens: 4, ..request(99_999) };
    let warmed = closed_loop(&endpoint, &[warm], 1, &stop);
    // One that is too many already says that the server is there.
    let wrong = warmed.error().filter(|error| **error != ClientError::Stopped && warmed.refused() == 0);
    if let Some(error) = wrong {
        return Err(error.clone().into());
    }
    let round = match (level, rpm) {
        (Level::Closed(clients), _) => {
            let requests: Vec<_> = (0..clients * plan.per_client).map(request).collect();
            closed_loop(&endpoint, &requests, clients, &stop)
        }
        (_, rpm) => {
            let times = arrivals(rpm.unwrap_or_default(), plan.duration, plan.seed);
            let requests: Vec<_> = (0..times.len()).map(request).collect();
            open_loop(&endpoint, &requests, &times, &stop)
        }
    };
    if round.was_stopped() || stop() {
        return Ok(Measured::Interrupted);
    }
    figures(&round, level, rpm, host.peak_bytes())
}

fn figures(round: &Round, level: Level, rpm: Option<f64>, peak: Option<u64>) -> anyhow::Result<Measured> {
    let rounds = std::slice::from_ref(round);
    let summary = Summary::of(rounds);
    let mut figures = summary.figures();
    let answered = figures.get("requests").unwrap_or_default();
    if answered == 0.0 {
        let error = round.error().map_or("no request was answered".to_owned(), ToString::to_string);
        return Err(Complaint::failure(error).into());
    }
    figures.add("errors", round.results.len() as f64 - answered, "requests");
    figures.add("refused", round.refused() as f64, "requests");
    figures.add("achieved_rpm", answered * 60.0 / round.wall.max(1e-9), "requests/min");
    figures.add("duration_s", round.wall, "s");
    if let Some(rpm) = rpm {
        figures.add("target_rpm", rpm, "requests/min");
    }
    if let Level::Closed(clients) = level {
        figures.add("clients", clients as f64, "clients");
    }
    if let Some(bytes) = peak {
        figures.add("peak_bytes", bytes as f64, "bytes");
    }
    let mut notes = summary.notes();
    notes.extend(round.error().map(|error| format!("the first that failed: {error}")));
    let note = (!notes.is_empty()).then(|| notes.join("; "));
    Ok(Measured::Figures { figures, samples: summary.samples(), note })
}

/// Whether enough of a row's requests were answered. In the open loop a server may send back what is too much for it,
/// which the table shows; clients that wait for each other must all be served.
fn answered(cell: &CellResult) -> Option<Gate> {
    let get = |name: &str| cell.figures.get(name);
    let (answered, failed) = (get("requests")?, get("errors")?);
    if !cell.has_numbers() || failed == 0.0 {
        return None;
    }
    let refused = get("refused").filter(|_| get("target_rpm").is_some()).unwrap_or(0.0);
    let (all, wrong) = (answered + failed, failed - refused);
    let share = wrong / all.max(1.0);
    let sent_back =
        if refused > 0.0 { format!(", {refused:.0} were sent back as too many") } else { String::new() };
    let why = cell.note.as_ref().map(|note| format!(" ({note})")).unwrap_or_default();
    Some(Gate {
        name: "answered".to_owned(),
        cell: Some(cell.label.clone()),
        passed: share <= MOST_FAILED,
        detail: format!(
            "{wrong:.0} of {all:.0} requests failed (allowed: {:.0} %){sent_back}{why}",
            MOST_FAILED * 100.0
        ),
    })
}

fn row(session: &Session, figures: &Figures, level: Level, address: &str, plan: &Plan) -> LoadRun {
    let get = |name: &str| figures.get(name);
    let whole = |name: &str| get(name).map(|value| value.max(0.0) as u64);
    LoadRun {
        model_id: session.document.model.clone(),
        base_url: address.to_owned(),
        mode: if matches!(level, Level::Closed(_)) { "closed-loop" } else { "open-loop" }.to_owned(),
        concurrency: whole("clients"),
        target_rpm: get("target_rpm"),
        max_tokens: Some(plan.workload.max_tokens as u64),
        requests_ok: whole("requests"),
        requests_err: whole("errors"),
        duration_s: get("duration_s"),
        ttft_p50_ms: get("ttft_p50_ms"),
        ttft_p95_ms: get("ttft_p95_ms"),
        e2e_p50_ms: get("e2e_p50_ms"),
        e2e_p95_ms: get("e2e_p95_ms"),
        e2e_p99_ms: get("e2e_p99_ms"),
        agg_tps: get("aggregate_tps"),
        per_req_tps: get("decode_tps"),
        achieved_rpm: get("achieved_rpm"),
        peak_bytes: whole("peak_bytes"),
    }
}

/// The highest rate of the open loop at which every request was answered, first tokens came in time at the 95th
/// percentile, and those that came last did not wait longer than that allows: where a queue grows, the wait of the last
/// requests tells it before the percentile does.
fn knee(cells: &[CellResult], limit_ms: f64) -> Option<Knee> {
    let acceptable = |cell: &&CellResult| {
        let figure = |name: &str| cell.figures.get(name);
        let late: Vec<f64> = last_third(&cell.samples["ttft_s"]);
        figure("errors") == Some(0.0)
            && figure("ttft_p95_ms").is_some_and(|ttft| ttft <= limit_ms)
            && percentile(&late, 0.5).is_none_or(|median| median * 1e3 <= limit_ms)
    };
    let open = cells.iter().filter(|cell| cell.has_numbers());
    let best =
        open.filter(|cell| cell.figures.get("target_rpm").is_some()).filter(acceptable).max_by(|a, b| {
            let rpm = |cell: &CellResult| cell.figures.get("target_rpm").unwrap_or_default();
            rpm(a).total_cmp(&rpm(b))
        })?;
    Some(Knee {
        rpm: best.figures.get("target_rpm")?,
        label: best.label.clone(),
        ttft_p95_ms: best.figures.get("ttft_p95_ms")?,
        limit_ms,
    })
}

fn last_third(samples: &Value) -> Vec<f64> {
    let all: Vec<f64> = samples.as_array().into_iter().flatten().filter_map(Value::as_f64).collect();
    all[all.len() - all.len().div_ceil(3)..].to_vec()
}

#[cfg(test)]
mod tests {
    use super::super::document::tests::cell;
    use super::*;

    fn open(rpm: f64, p95: f64, errors: f64) -> CellResult {
        let figures = [("target_rpm", rpm), ("ttft_p95_ms", p95), ("errors", errors)];
        CellResult {
            samples: json!({"ttft_s": [0.1, 0.1, 0.1]}),
            ..cell(&format!("open-{rpm}rpm"), &figures)
        }
    }

    #[test]
    fn the_knee_is_the_highest_rate_in_acceptable_time() {
        let cells = [
            cell("closed-20", &[("ttft_p95_ms", 1.0), ("achieved_rpm", 900.0)]),
            open(60.0, 300.0, 0.0),
            open(120.0, 900.0, 0.0),
            open(240.0, 2500.0, 0.0),
            open(480.0, 100.0, 3.0),
        ];
        let found = knee(&cells, 2000.0).unwrap();
        assert_eq!((found.rpm, found.label.as_str()), (120.0, "open-120rpm"));
        assert_eq!(knee(&cells, 500.0).unwrap().rpm, 60.0);
        assert_eq!(knee(&cells, 100.0), None);
        assert_eq!(most_rpm(&cells), Some(900.0));
    }

    #[test]
    fn a_queue_that_grows_is_no_knee() {
        let mut growing = open(120.0, 1900.0, 0.0);
        growing.samples = json!({"ttft_s": [0.1, 0.1, 0.1, 0.1, 2.5, 2.5]});
        assert_eq!(knee(&[open(60.0, 300.0, 0.0), growing], 2000.0).unwrap().rpm, 60.0);
        assert_eq!(last_third(&json!([1.0, 2.0, 3.0, 4.0])), [3.0, 4.0]);
        assert_eq!(last_third(&Value::Null), [0.0; 0]);
    }

    #[test]
    fn rows_whose_requests_fail_do_not_pass() {
        let row = |figures: &[(&str, f64)]| answered(&cell("row", figures)).map(|gate| gate.passed);
        assert_eq!(row(&[("requests", 9.0), ("errors", 0.0)]), None);
        assert_eq!(row(&[("requests", 9.0), ("errors", 1.0)]), Some(false));
        assert_eq!(row(&[("requests", 199.0), ("errors", 1.0)]), Some(true));
        // Too much is what the open loop is there to find; clients that wait are not too many.
        let refused = [("requests", 6.0), ("errors", 4.0), ("refused", 4.0)];
        assert_eq!(row(&refused), Some(false));
        assert_eq!(row(&[&refused[..], &[("target_rpm", 600.0)]].concat()), Some(true));
        let gate = answered(&cell("row", &[&refused[..], &[("target_rpm", 600.0)]].concat())).unwrap();
        assert_eq!(gate.detail, "0 of 10 requests failed (allowed: 1 %), 4 were sent back as too many");
    }

    #[test]
    fn requests_that_failed_are_counted_and_none_at_all_is_a_failure() {
        let refused = ClientError::Status { status: 429, message: "busy".to_owned() };
        let answered = super::super::reply::Reply {
            ttft: 0.1,
            e2e: 0.2,
            tokens: 3,
            tokens_from_usage: true,
            ..Default::default()
        };
        let round = Round { wall: 2.0, results: vec![Ok(answered), Err(refused.clone())] };
        let Ok(Measured::Figures { figures: found, note, .. }) =
            figures(&round, Level::Rate(60.0), Some(60.0), None)
        else {
            panic!("no figures");
        };
        assert_eq!((found.get("errors"), found.get("achieved_rpm")), (Some(1.0), Some(30.0)));
        assert_eq!(note.unwrap(), "the first that failed: status 429: busy");
        let round = Round { wall: 2.0, results: vec![Err(refused)] };
        let error = figures(&round, Level::Closed(1), None, None).err().unwrap();
        assert_eq!(error.to_string(), "status 429: busy");
    }
}
