//! One run of a matrix: cell after cell, those measured before taken over, what goes wrong noted, all of it written
//! down at the end.

use std::path::Path;

use mlx_bun::checkpoint::atomic_file::write_bytes_atomically;
use mlx_bun::record::{Figures, MachineState, Recorded, Table};
use serde_json::{Map, Value};
use std::io::Write as _;

use super::args::ReportArgs;
use super::baseline::{self, Baseline, is_commit};
use super::document::{CellResult, Document, Gate, Status};
use super::figures::{Column, shown};
use super::store::Store;
use crate::error::Complaint;
use crate::exit::ExitStatus;
use crate::interrupt::Interrupt;
use crate::output::SCHEMA_VERSION;
use crate::output_file;
use crate::printer::Printer;

/// What a matrix allows without `--max-regression`.
const MAX_REGRESSION: f64 = 0.05;

/// What measuring a cell came to.
pub enum Measured {
    /// Numbers.
    Figures {
        /// The numbers.
        figures: Figures,
        /// What they were made of.
        samples: Value,
        /// What is to be known about them.
        note: Option<String>,
    },
    /// The server or the model cannot do it.
    Unavailable(String),
    /// The user wants no more.
    Interrupted,
}

/// What is said about a run at its end.
pub struct Ending<'a> {
    /// Columns of the table.
    pub columns: &'a [Column],
    /// Figures that must not become worse.
    pub guarded: &'a [&'a str],
}

/// What is measured: names for the records.
pub struct Subject<'a> {
    /// `bench-matrix features` and so on.
    pub verb: &'static str,
    /// `mlx-bun`, or another server's name.
    pub stack: &'a str,
    /// The model's folder, file or name.
    pub model: &'a str,
    /// The address of a server that is there already.
    pub url: Option<&'a str>,
    /// Flags of the user for the server.
    pub flags: &'a [String],
}

/// A run.
pub struct Session {
    /// For messages.
    pub printer: Printer,
    /// Whether to stop.
    pub interrupt: Interrupt,
    /// What was found so far.
    pub document: Document,
    store: Store,
    report: ReportArgs,
    baseline: Option<Baseline>,
}

impl Session {
    /// Begins: checks what can be checked before the work, and that the machine is quiet.
    ///
    /// # Errors
    /// A busy machine without `--force`, a baseline that cannot be read, a file that cannot be written.
    pub fn begin<T: Table>(
        subject: &Subject,
        report: &ReportArgs,
        settings: Map<String, Value>,
        printer: &Printer,
    ) -> anyhow::Result<Self> {
        if let Some(file) = &report.out {
            output_file::check(file, "report of this verb", is_report)?;
        }
        let store =
            Store::begin(subject.verb, (subject.stack, subject.model), &settings, subject.flags, printer);
        let entry = store.entry();
        let document = Document {
            schema_version: SCHEMA_VERSION,
            verb: subject.verb.to_owned(),
            started_at: entry.machine_state["at"].as_str().unwrap_or_default().to_owned(),
            model: subject.model.to_owned(),
            stack: subject.stack.to_owned(),
            url: subject.url.map(str::to_owned),
            commit: entry.commit_sha,
            build: entry.build,
            mlx_version: entry.mlx_version,
            backend: entry.backend,
            machine_key: entry.machine_key,
            machine: entry.machine,
            machine_state: entry.machine_state,
            settings,
            cells: Vec::new(),
            gates: Vec::new(),
            knee: None,
            remarks: Vec::new(),
            interrupted: false,
            passed: false,
        };
        let baseline =
            report.baseline.as_deref().map(|name| find::<T>(name, &document, &store)).transpose()?;
        for remark in baseline.iter().flat_map(|baseline| &baseline.remarks) {
            printer.warning(remark);
        }
        let problems = store.problems();
        if !problems.is_empty() && !report.force {
            return Err(Complaint::failure("the machine is busy, and its numbers would say little")
                .further(problems)
                .hint("wait until it is quiet, or give --force: the rows are marked then")
                .into());
        }
        problems.iter().for_each(|problem| printer.warning(problem));
        let interrupt = Interrupt::install(printer)?;
        interrupt.begin();
        let (printer, report) = (printer.clone(), report.clone());
        Ok(Self { printer, interrupt, document, store, report, baseline })
    }

    /// Whether the user wants this cell.
    pub fn wants(&self, label: &str) -> bool {
        self.report.cells.is_empty() || self.report.cells.iter().any(|name| name == label)
    }

    /// Measures a cell, unless it was measured before or is not wanted. Returns whether to go on.
    pub fn cell<T: Table>(
        &mut self,
        label: &str,
        flags: Vec<String>,
        row: impl FnOnce(&Self, &Figures) -> T,
        measure: impl FnOnce(&Self) -> anyhow::Result<Measured>,
    ) -> bool {
        if !self.wants(label) {
            return true;
        }
        if self.interrupt.is_set() {
            self.document.interrupted = true;
            return false;
        }
        if !self.report.redo
            && let Some(found) = self.store.fresh::<T>(label, &flags)
        {
            let compared = self.baseline.as_ref();
            if !compared.is_some_and(|baseline| baseline.has(label, found.entry.ts)) {
                self.printer.note(&format!("{label}: measured before"));
                self.document.cells.push(reused(found, flags));
                return true;
            }
            self.printer.note(&format!("{label}: measured again, for what is known of it is the baseline"));
        }
        let measured = measure(self);
        if self.interrupt.is_set() {
            self.document.interrupted = true;
            return false;
        }
        let mut cell = CellResult {
            label: label.to_owned(),
            status: Status::Measured,
            forced: !self.document.machine_state["ok"].as_bool().unwrap_or(false),
            measured_at: now(),
            flags,
            figures: Figures::default(),
            samples: Value::Null,
            beside: None,
            note: None,
        };
        match measured {
            Ok(Measured::Figures { figures, samples, note }) => {
                (cell.figures, cell.samples, cell.note) = (figures, samples, note);
                if let Some(swap) = too_much_swap() {
                    cell.forced = true;
                    let before = cell.note.map(|note| format!("{note}; ")).unwrap_or_default();
                    cell.note = Some(format!("{before}swap in use rose to {swap:.0} MiB"));
                }
                let row = row(self, &cell.figures);
                self.store.save(&cell, &row);
            }
            Ok(Measured::Unavailable(why)) => (cell.status, cell.note) = (Status::Unavailable, Some(why)),
            Ok(Measured::Interrupted) => {
                self.document.interrupted = true;
                return false;
            }
            Err(error) => {
                let why = format!("{error:#}").replace('\n', " ");
                (cell.status, cell.note) = (Status::Failed, Some(why));
            }
        }
        self.say(&cell);
        self.document.cells.push(cell);
        true
    }

    fn say(&self, cell: &CellResult) {
        let main = ["aggregate_tps", "ttft_p50_ms", "seconds"];
        let figures: Vec<String> = main
            .iter()
            .filter_map(|name| Some(format!("{name} {}", shown(name, cell.figures.get(name)?))))
            .collect();
        let text =
            if figures.is_empty() { cell.note.clone().unwrap_or_default() } else { figures.join(", ") };
        self.printer.note(&format!("{}: {text}", cell.label));
    }

    /// Ends: compares with the baseline, writes the document, and says how the program ends.
    ///
    /// # Errors
    /// No cell of the baseline is here, or nothing can be written.
    pub fn finish(mut self, ending: &Ending) -> anyhow::Result<ExitStatus> {
        if let Some(baseline) = self.baseline.take() {
            let most = self.report.max_regression.unwrap_or(MAX_REGRESSION);
            let whole = self.report.cells.is_empty() && !self.document.interrupted;
            let found = baseline.compare(&self.document.cells, ending.guarded, most, whole);
            let measured = self.document.cells.iter().any(CellResult::has_numbers);
            if found.gates.is_empty() && measured && !self.document.interrupted {
                let name = self.report.baseline.as_deref().unwrap_or_default();
                return Err(nothing_of(name).into());
            }
            self.document.gates.extend(found.gates);
            self.document.remarks.extend(found.remarks);
        }
        self.document.conclude();
        let json = serde_json::to_string(&self.document)?;
        let markdown = self.document.markdown(ending.columns);
        if let Some(file) = &self.report.out {
            let is_json = file.extension().is_some_and(|extension| extension == "json");
            let text = if is_json { format!("{json}\n") } else { markdown.clone() };
            write_bytes_atomically(file, text.as_bytes())?;
        }
        let mut stdout = self.printer.stdout();
        match self.report.json {
            true => writeln!(stdout, "{json}")?,
            false => stdout.write_all(markdown.as_bytes())?,
        }
        stdout.flush()?;
        if self.document.interrupted {
            return Ok(ExitStatus::Interrupted);
        }
        self.document.failures().iter().for_each(|failure| self.printer.error(failure));
        Ok(if self.document.passed { ExitStatus::Success } else { ExitStatus::Failure })
    }

    /// Adds a condition.
    pub fn gate(&mut self, gate: Gate) {
        self.document.gates.push(gate);
    }

    /// Checks the names of `--cells`.
    ///
    /// # Errors
    /// One is unknown.
    pub fn check_names(report: &ReportArgs, known: &[String]) -> Result<(), Complaint> {
        match report.cells.iter().find(|name| !known.contains(name)) {
            Some(name) => Err(Complaint::usage(format!("`--cells {name}`: there is no such cell"))
                .hint(format!("the cells are {}", known.join(", ")))),
            None => Ok(()),
        }
    }
}

/// What `--baseline` names, if its numbers say something about those that are to come.
fn find<T: Table>(name: &str, ours: &Document, store: &Store) -> Result<Baseline, Complaint> {
    let file = Path::new(name);
    if file.exists() {
        return baseline::read(file, ours);
    }
    if !is_commit(name) {
        return Err(Complaint::failure(format!("`--baseline {name}` is neither a file nor a commit"))
            .hint("it is a file that --out wrote, or what a commit begins with"));
    }
    let found = store.of_commit::<T>(name)?;
    if found.cells.is_empty() { Err(nothing_of(name)) } else { Ok(found) }
}

fn nothing_of(name: &str) -> Complaint {
    Complaint::failure(format!("the baseline `{name}` has none of the cells measured here")).hint(
        "it is a file that --out wrote, or a commit that was measured on this machine with the same settings",
    )
}

/// Swap in use beyond what may be while something is measured, in MiB.
fn too_much_swap() -> Option<f64> {
    let state = MachineState::probe();
    state.swap_mb.filter(|swap| *swap > state.most_swap_meanwhile())
}

fn reused<T: Table>(found: Recorded<T>, flags: Vec<String>) -> CellResult {
    let entry = found.entry;
    CellResult {
        label: entry.label,
        status: Status::Reused,
        forced: entry.forced,
        measured_at: entry.ts,
        flags,
        figures: entry.figures,
        samples: entry.samples,
        beside: None,
        note: entry.notes,
    }
}

fn now() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// Whether a file begins as ours do, or is empty.
fn is_report(file: &Path) -> bool {
    let beginnings = [&b"# bench-matrix"[..], b"{\"schema_version\""];
    let start = output_file::beginning(file, 32);
    start.is_ok_and(|start| start.is_empty() || beginnings.iter().any(|ours| start.starts_with(ours)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_reports_are_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("out.json");
        // Weights are no text.
        for (bytes, expected) in [
            (&b"# bench-matrix load\n"[..], true),
            (b"{\"schema_version\":1}", true),
            (b"", true),
            (b"\xff\xfe\x00weights", false),
            (b"{\"other\":1}", false),
        ] {
            std::fs::write(&file, bytes).unwrap();
            assert_eq!(is_report(&file), expected, "{bytes:?}");
        }
        assert!(!is_report(Path::new("/dev/zero")));
    }
}
