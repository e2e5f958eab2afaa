//! `features` and `modes`: cells of flags, clients and schemas through the server.

use std::time::Duration;

use mlx_bun::record::{Figures, Run};
use serde_json::{Map, Value, json};

use super::args::{ReportArgs, RequestArgs, Requests, TargetArgs};
use super::cells::{Cell, FEATURES, MODES};
use super::document::{Gate, Status};
use super::figures::Column;
use super::host::{Host, is_refusal};
use super::round::{Round, Summary, closed_loop};
use super::session::{Ending, Measured, Session, Subject};
use super::store::levers_of_environment;
use super::workload::{SHORT_WORDS, Workload, schema};
use crate::exit::ExitStatus;
use crate::generate::MORE;
use crate::printer::Printer;

const FEATURES_EXAMPLES: &str = "\
Examples:
  mlx-bun bench-matrix features --quick
  mlx-bun bench-matrix features --model ./my-model --batch 8 --out before.json
  mlx-bun bench-matrix features --model ./my-model --batch 8 --baseline before.json --max-regression 5%
  mlx-bun bench-matrix features --url http://127.0.0.1:8081 --stack llama-server";

const MODES_EXAMPLES: &str = "\
Examples:
  mlx-bun bench-matrix modes
  mlx-bun bench-matrix modes --cells serial/short,batch4/short --redo -- --threads 1";

/// Measure what the server's features cost, alone and together
///
/// Each cell goes through a server of its own over HTTP: serial, batched, with a schema, with a packed cache, with an
/// adapter. Every reply that was to follow the schema is checked; one that does not makes the command fail.
#[derive(Clone, Debug, clap::Args)]
#[command(args_override_self = true, after_help = MORE, after_long_help = FEATURES_EXAMPLES)]
pub struct FeaturesArgs {
    #[command(flatten)]
    target: TargetArgs,

    /// Requests computed together in the batched cells, and clients there
    #[arg(short, long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=256), help_heading = "Requests")]
    batch: u32,

    #[command(flatten)]
    requests: RequestArgs,
    #[command(flatten)]
    report: ReportArgs,
}

/// Measure the ways to run a model: speed of prompt and reply, memory
///
/// Each cell has a fresh server, so that its memory is its own, and two workloads: a short prompt and a long one.
#[derive(Clone, Debug, clap::Args)]
#[command(args_override_self = true, after_help = MORE, after_long_help = MODES_EXAMPLES)]
pub struct ModesArgs {
    #[command(flatten)]
    target: TargetArgs,

    /// Words of the long prompt [default: 800; 150 with --quick]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000), help_heading = "Requests")]
    long_words: Option<u32>,

    #[command(flatten)]
    requests: RequestArgs,
    #[command(flatten)]
    report: ReportArgs,
}

const COLUMNS: &[Column] = &[
    ("clients", "clients"),
    ("batch", "batch"),
    ("tok/s", "aggregate_tps"),
    ("best", "aggregate_tps_best"),
    ("a request", "decode_tps"),
    ("tokens", "reply_tokens"),
    ("TTFT p50 ms", "ttft_p50_ms"),
    ("p95", "ttft_p95_ms"),
    ("between p50 ms", "itl_p50_ms"),
    ("p95", "itl_p95_ms"),
    ("accepted", "acceptance_pct"),
    ("schema", "conformance_pct"),
    ("memory", "peak_bytes"),
];
const MODES_COLUMNS: &[Column] = &[
    ("clients", "clients"),
    ("batch", "batch"),
    ("TTFT p50 ms", "ttft_p50_ms"),
    ("prompt tok/s", "prefill_tps"),
    ("reply tok/s", "decode_tps"),
    ("all tok/s", "aggregate_tps"),
    ("prompt", "prompt_tokens"),
    ("accepted", "acceptance_pct"),
    ("schema", "conformance_pct"),
    ("memory", "peak_bytes"),
];

/// A workload and its name behind that of the cell.
type Named = (Option<&'static str>, usize);

/// What the two have in common.
struct Matrix<'a> {
    verb: &'static str,
    cells: &'static [Cell],
    workloads: Vec<Named>,
    batch: usize,
    requests: Requests,
    /// Whether cells of the same flags share a server.
    shared: bool,
    report: &'a ReportArgs,
    columns: &'static [Column],
    guarded: &'static [&'static str],
}

impl FeaturesArgs {
    /// Runs the verb.
    ///
    /// # Errors
    /// What cannot be measured at all; what goes wrong in a cell is in the report.
    pub fn run(&self, printer: &Printer) -> anyhow::Result<ExitStatus> {
        let matrix = Matrix {
            verb: "bench-matrix features",
            cells: FEATURES,
            workloads: vec![(None, SHORT_WORDS)],
            batch: self.batch as usize,
            requests: self.requests.resolve(self.report.quick),
            shared: true,
            report: &self.report,
            columns: COLUMNS,
            guarded: &["aggregate_tps"],
        };
        matrix.run(Host::new(self.target.resolve(printer)?), printer)
    }
}

impl ModesArgs {
    /// Runs the verb.
    ///
    /// # Errors
    /// What cannot be measured at all; what goes wrong in a cell is in the report.
    pub fn run(&self, printer: &Printer) -> anyhow::Result<ExitStatus> {
        let long = self.long_words.map_or(if self.report.quick { 150 } else { 800 }, |words| words as usize);
        let mut requests = self.requests.resolve(self.report.quick);
        if self.report.quick && self.requests.repeats.is_none() {
            requests.repeats = 1;
        }
        let matrix = Matrix {
            verb: "bench-matrix modes",
            cells: MODES,
            workloads: vec![(Some("short"), SHORT_WORDS), (Some("long"), long)],
            batch: 4,
            requests,
            shared: false,
            report: &self.report,
            columns: MODES_COLUMNS,
            guarded: &["prefill_tps", "decode_tps"],
        };
        matrix.run(Host::new(self.target.resolve(printer)?), printer)
    }
}

impl Matrix<'_> {
    fn run(&self, mut host: Host, printer: &Printer) -> anyhow::Result<ExitStatus> {
        let capabilities = host.capabilities();
        let cells: Vec<(usize, &Cell)> =
            self.cells.iter().enumerate().filter(|(_, cell)| capabilities.allow(cell)).collect();
        let labels: Vec<String> = cells.iter().flat_map(|(_, cell)| self.labels(cell)).collect();
        Session::check_names(self.report, &labels)?;
        let model = host.model();
        let (stack, url, flags) =
            (host.stack().to_owned(), host.url().map(str::to_owned), host.user_flags().to_vec());
        let subject =
            Subject { verb: self.verb, stack: &stack, model: &model, url: url.as_deref(), flags: &flags };
        let mut session = Session::begin::<Run>(&subject, self.report, self.settings(&flags), printer)?;
        'cells: for (number, cell) in &cells {
            for (name, words) in &self.workloads {
                let label = self.label(cell, *name);
                if !session.wants(&label) {
                    continue;
                }
                let adapter = cell.flags.contains(&"A");
                let flags = cell.flags(&host.fill(self.batch, adapter));
                let workload =
                    Workload { words: *words, max_tokens: self.requests.max_tokens, grammar: cell.grammar };
                // Our servers keep no prompts, so the same requests for all cells: equal work, and equal replies where
                // the feature does not change them. Others may keep some; the same in every run, whichever cells it has.
                let first = if url.is_some() { number * 10_000 } else { 0 };
                let measure = |session: &Session| match &flags {
                    Ok(flags) => self.measure(session, &mut host, cell, flags, &workload, first),
                    Err(why) => Ok(Measured::Unavailable(why.clone())),
                };
                if !session.cell(&label, flags.clone().unwrap_or_default(), row, measure) {
                    break 'cells;
                }
            }
        }
        drop(host);
        gate_conformance(&mut session);
        for (_, cell) in cells {
            let Some(other) = cell.beside(self.batch) else { continue };
            for (name, _) in &self.workloads {
                session.document.set_beside(&self.label(cell, *name), &labelled(&other, *name));
            }
        }
        session.finish(&Ending { columns: self.columns, guarded: self.guarded })
    }

    fn label(&self, cell: &Cell, workload: Option<&str>) -> String {
        labelled(&cell.label(self.batch), workload)
    }

    fn labels(&self, cell: &Cell) -> Vec<String> {
        self.workloads.iter().map(|(name, _)| self.label(cell, *name)).collect()
    }

    fn settings(&self, flags: &[String]) -> Map<String, Value> {
        let words: Vec<usize> = self.workloads.iter().map(|(_, words)| *words).collect();
        let settings = json!({
            "requests": self.requests, "batch": self.batch, "words": words, "serve_flags": flags,
            "environment": levers_of_environment(),
        });
        settings.as_object().cloned().unwrap_or_default()
    }

    fn measure(
        &self,
        session: &Session,
        host: &mut Host,
        cell: &Cell,
        flags: &[String],
        workload: &Workload,
        first: usize,
    ) -> anyhow::Result<Measured> {
        match self.rounds(session, host, cell, flags, workload, first) {
            Err(error) if is_refusal(&error, cell.optional) => {
                Ok(Measured::Unavailable(format!("{error:#}")))
            }
            Ok(None) => Ok(Measured::Interrupted),
            Ok(Some(rounds)) => {
                let summary = Summary::of(&rounds);
                let mut figures = summary.figures();
                if let Some(bytes) = host.peak_bytes() {
                    figures.add("peak_bytes", bytes as f64, "bytes");
                }
                figures.add("clients", cell.clients(self.batch) as f64, "clients");
                if host.url().is_none() {
                    figures.add("batch", cell.batch(self.batch) as f64, "requests");
                }
                let mut notes = summary.notes();
                if workload.grammar {
                    let (percent, problem) = summary.conformance(&schema()).map_err(anyhow::Error::msg)?;
                    figures.add("conformance_pct", percent, "%");
                    notes
                        .extend(problem.map(|problem| format!("a reply does not fit the schema: {problem}")));
                }
                let note = (!notes.is_empty()).then(|| notes.join("; "));
                Ok(Measured::Figures { figures, samples: summary.samples(), note })
            }
            Err(error) => Err(error),
        }
    }

    /// `None` when the user wants no more.
    fn rounds(
        &self,
        session: &Session,
        host: &mut Host,
        cell: &Cell,
        flags: &[String],
        workload: &Workload,
        first: usize,
    ) -> anyhow::Result<Option<Vec<Round>>> {
        let interrupt = session.interrupt.clone();
        let stop = move || interrupt.is_set();
        let endpoint = host.endpoint(flags, self.shared, &stop)?;
        let clients = cell.clients(self.batch);
        // One request of each client first: what is done once is done then.
        let warm: Vec<_> = (0..clients)
            .map(|client| {
                let mut request = workload.request(first + 9_000 + client);
                request.max_tokens = request.max_tokens.min(if workload.grammar { usize::MAX } else { 4 });
                request
            })
            .collect();
        let mut rounds = vec![closed_loop(&endpoint, &warm, clients, &stop)];
        for repeat in 0..=self.requests.repeats {
            if rounds.iter().any(Round::was_stopped) || stop() {
                return Ok(None);
            }
            if let Some(error) = rounds.iter().find_map(Round::error) {
                return Err(error.clone().into());
            }
            if repeat == self.requests.repeats {
                break;
            }
            let count = clients * self.requests.per_client;
            let requests: Vec<_> =
                (0..count).map(|index| workload.request(first + repeat * count + index)).collect();
            rounds.push(closed_loop(&endpoint, &requests, clients, &stop));
            // The scheduler's rows of one round are gone before the next begins.
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(Some(rounds.split_off(1)))
    }
}

/// A cell's name with its workload's.
fn labelled(cell: &str, workload: Option<&str>) -> String {
    workload.map_or_else(|| cell.to_owned(), |workload| format!("{cell}/{workload}"))
}

fn row(session: &Session, figures: &Figures) -> Run {
    let whole = |name: &str| figures.get(name).map(|value| value.max(0.0) as u64);
    Run {
        model_path: session.document.model.clone(),
        prompt_tokens: whole("prompt_tokens"),
        generated_tokens: whole("completion_tokens"),
        prefill_tps: figures.get("prefill_tps"),
        decode_tps: figures.get("decode_tps"),
        peak_bytes: whole("peak_bytes"),
        ..Run::default()
    }
}

/// Every structured reply has to fit: a condition for each cell that has some.
fn gate_conformance(session: &mut Session) {
    let gates: Vec<Gate> = session
        .document
        .cells
        .iter()
        .filter(|cell| matches!(cell.status, Status::Measured | Status::Reused))
        .filter_map(|cell| {
            let percent = cell.figures.get("conformance_pct")?;
            let why = cell.note.as_deref().filter(|_| percent < 100.0).map(|note| format!(" ({note})"));
            Some(Gate {
                name: "conformance".to_owned(),
                cell: Some(cell.label.clone()),
                passed: percent >= 100.0,
                detail: format!("{percent:.0} % of the replies fit the schema{}", why.unwrap_or_default()),
            })
        })
        .collect();
    gates.into_iter().for_each(|gate| session.gate(gate));
}
