//! `--baseline`: the same cells measured before, and which of them became slower than may be.

use std::path::Path;

use mlx_bun::record::Figures;
use serde_json::Value;

use super::document::{CellResult, Document, Gate, Status};
use super::figures::{Better, better, shown};
use crate::error::Complaint;
use crate::input_file;
use crate::output::SCHEMA_VERSION;
use crate::recorder::model_name;

/// A document of a thousand cells with their samples is smaller.
const MOST_BYTES: u64 = 64 << 20;
/// Settings that say what is compared, not how: they may differ, and that is said.
const COMPARED: [&str; 2] = ["environment", "serve_flags"];

/// A cell measured before.
#[derive(Clone, Debug, PartialEq)]
pub struct Before {
    /// Its name.
    pub label: String,
    /// The numbers.
    pub figures: Figures,
    /// Measured on a machine that was not quiet.
    pub forced: bool,
    /// Milliseconds since 1970.
    pub measured_at: i64,
}

/// What was measured before.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Baseline {
    /// The cells.
    pub cells: Vec<Before>,
    /// What differs, and may.
    pub remarks: Vec<String>,
}

/// What a comparison found.
#[derive(Debug, Default, PartialEq)]
pub struct Comparison {
    /// One for each figure of each cell that both have.
    pub gates: Vec<Gate>,
    /// What was not compared, and why.
    pub remarks: Vec<String>,
}

/// Reads a document that `--out` wrote. `ours` says what is measured now, where, and how.
///
/// # Errors
/// It cannot be read, is something else, or its numbers say nothing about those of now.
pub fn read(file: &Path, ours: &Document) -> Result<Baseline, Complaint> {
    let shown = file.display();
    let no_document = |problem: String| {
        Complaint::failure(format!("`{shown}` is no JSON of bench-matrix: {problem}"))
            .hint("write it with `bench-matrix ... --out FILE.json`")
    };
    let bytes = input_file::read(file, MOST_BYTES)?;
    let value: Value = serde_json::from_slice(&bytes).map_err(|error| no_document(error.to_string()))?;
    let version = &value["schema_version"];
    if version.as_u64().is_some_and(|version| version != u64::from(SCHEMA_VERSION)) {
        return Err(no_document(format!(
            "it is of version {version}, and this program reads {SCHEMA_VERSION}"
        )));
    }
    let theirs: Document = serde_json::from_value(value).map_err(|error| no_document(error.to_string()))?;
    if theirs.verb != ours.verb {
        return Err(Complaint::failure(format!("`{shown}` is of `{}`, not of `{}`", theirs.verb, ours.verb)));
    }
    let (differences, remarks) = differences(&theirs, ours);
    if !differences.is_empty() {
        return Err(Complaint::failure(format!("`{shown}` says nothing about what is measured here"))
            .further(differences)
            .hint("measure the baseline again on this machine, with the same model and settings"));
    }
    let measured = theirs.cells.into_iter().filter(CellResult::has_numbers);
    let before = |cell: CellResult| Before {
        label: cell.label,
        figures: cell.figures,
        forced: cell.forced,
        measured_at: cell.measured_at,
    };
    Ok(Baseline { cells: measured.map(before).collect(), remarks })
}

/// What forbids a comparison, and what is only to be known about it.
fn differences(theirs: &Document, ours: &Document) -> (Vec<String>, Vec<String>) {
    let (mut forbidding, mut remarks) = (Vec::new(), Vec::new());
    let said = |what: &str, theirs: &str, ours: &str| {
        (theirs != ours).then(|| format!("the baseline's {what} is {theirs}, here it is {ours}"))
    };
    let or = |text: &Option<String>| text.clone().unwrap_or_else(|| "unknown".to_owned());
    let (model, our_model) = (model_name(&theirs.model), model_name(&ours.model));
    forbidding.extend(said("model", &model, &our_model));
    forbidding.extend(said("stack", &theirs.stack, &ours.stack));
    forbidding.extend(said("machine", &theirs.machine_key, &ours.machine_key));
    forbidding.extend(said("build", &theirs.build, &ours.build));
    forbidding.extend(said("backend", &or(&theirs.backend), &or(&ours.backend)));
    if model == our_model {
        remarks.extend(said("model", &theirs.model, &ours.model));
    }
    remarks.extend(said("MLX", &or(&theirs.mlx_version), &or(&ours.mlx_version)));
    let mut names: Vec<&String> = theirs.settings.keys().chain(ours.settings.keys()).collect();
    names.sort();
    names.dedup();
    for name in names {
        let text =
            |document: &Document| document.settings.get(name).map_or("none".to_owned(), Value::to_string);
        let difference = said(&format!("`{name}`"), &text(theirs), &text(ours));
        match COMPARED.contains(&name.as_str()) {
            true => remarks.extend(difference),
            false => forbidding.extend(difference),
        }
    }
    (forbidding, remarks)
}

/// What `--baseline` says: a file, or the beginning of a commit.
///
/// # Errors
/// Nothing is said.
pub fn parse_baseline(text: &str) -> Result<String, String> {
    match text.trim().is_empty() {
        true => Err("must be a file that --out wrote, or a commit".to_owned()),
        false => Ok(text.to_owned()),
    }
}

/// Whether a text may be the beginning of a commit's name.
pub fn is_commit(text: &str) -> bool {
    let hash = text.strip_suffix("-dirty").unwrap_or(text);
    (4..=64).contains(&hash.len()) && hash.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// A percentage with its sign: `5%` is 0.05. Without it nobody could tell whether `0.05` means that too.
///
/// # Errors
/// It is none.
pub fn parse_percent(text: &str) -> Result<f64, String> {
    let number = text.trim().strip_suffix('%').and_then(|number| number.trim().parse::<f64>().ok());
    number
        .filter(|percent| percent.is_finite() && (0.0..=1000.0).contains(percent))
        .map(|percent| percent / 100.0)
        .ok_or_else(|| "must be a percentage from 0% to 1000%, with its sign, such as 5%".to_owned())
}

impl Baseline {
    /// Whether a cell measured at this time is the very one that is compared with.
    pub fn has(&self, label: &str, measured_at: i64) -> bool {
        self.cells.iter().any(|before| before.label == label && before.measured_at == measured_at)
    }

    /// Holds cells against it: whether one of `figures` is worse by more than `most`. Where the best of the rounds is
    /// known too, it has to be worse as well, so that one slow round is no regression. `whole` says that all cells are
    /// here that there are.
    pub fn compare(&self, cells: &[CellResult], figures: &[&str], most: f64, whole: bool) -> Comparison {
        let mut found = Comparison { gates: Vec::new(), remarks: self.remarks.clone() };
        for cell in cells.iter().filter(|cell| cell.status != Status::Failed) {
            let Some(before) = self.cells.iter().find(|before| before.label == cell.label) else {
                found.remarks.push(format!("`{}` is not in the baseline, and was not compared", cell.label));
                continue;
            };
            let gate = |(passed, detail): (bool, String)| Gate {
                name: "regression".to_owned(),
                cell: Some(cell.label.clone()),
                passed,
                detail,
            };
            if cell.status == Status::Unavailable {
                found
                    .gates
                    .push(gate((false, "is unavailable, and the baseline has measured it".to_owned())));
                continue;
            }
            for name in figures {
                match before.figures.get(name).filter(|value| *value > 0.0) {
                    Some(was) => found.gates.push(gate(verdict(before, cell, name, was, most))),
                    None => found.remarks.push(format!(
                        "`{}` has no {name} in the baseline, and was not compared",
                        cell.label
                    )),
                }
            }
        }
        let gone = self.cells.iter().filter(|before| !cells.iter().any(|cell| cell.label == before.label));
        let gone = gone.map(|before| format!("`{}` of the baseline was not measured here", before.label));
        found.remarks.extend(gone.filter(|_| whole));
        found
    }
}

/// Whether a figure is still as good as it `was`, and the line that says so.
fn verdict(before: &Before, cell: &CellResult, name: &str, was: f64, most: f64) -> (bool, String) {
    let now = cell.figures.get(name).filter(|now| now.is_finite() && *now > 0.0);
    let loss = now.map_or(1.0, |now| loss(name, was, now));
    let best = || {
        let name = format!("{name}_best");
        let (was, now) = (before.figures.get(&name)?, cell.figures.get(&name)?);
        (was > 0.0 && now > 0.0).then(|| self::loss(&name, was, now))
    };
    let passed = now.is_some() && (loss <= most || best().is_some_and(|best| best <= most));
    let busy = match (before.forced, cell.forced) {
        (false, false) => "",
        (true, false) => "; the machine was busy at the baseline",
        (false, true) => "; the machine was busy now",
        (true, true) => "; the machine was busy both times",
    };
    let detail = format!(
        "{name} is {}, {:.1} % {} than the baseline's {} (allowed: {:.1} %){busy}",
        now.map_or("nothing".to_owned(), |now| shown(name, now)),
        loss.abs() * 100.0,
        if loss < 0.0 { "better" } else { "worse" },
        shown(name, was),
        most * 100.0
    );
    (passed, detail)
}

/// The share of the baseline's rate that is lost, or by which share of it a time is longer; negative for a gain.
fn loss(name: &str, was: f64, now: f64) -> f64 {
    match better(name) {
        Some(Better::Lower) => now / was - 1.0,
        _ => 1.0 - now / was,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::document::tests::{cell, document};
    use super::*;

    fn before(label: &str, figures: &[(&str, f64)]) -> Before {
        Before {
            label: label.to_owned(),
            figures: cell(label, figures).figures,
            forced: false,
            measured_at: 1,
        }
    }

    fn of(cells: Vec<Before>) -> Baseline {
        Baseline { cells, remarks: Vec::new() }
    }

    fn verdicts(was: &[(&str, f64)], now: &[(&str, f64)], figures: &[&str]) -> Vec<bool> {
        let cells = [cell("serial", now), cell("new", now)];
        let found = of(vec![before("serial", was)]).compare(&cells, figures, 0.05, true);
        found.gates.iter().map(|gate| gate.passed).collect()
    }

    fn rates(was: f64, now: f64) -> Vec<bool> {
        verdicts(&[("aggregate_tps", was)], &[("aggregate_tps", now)], &["aggregate_tps"])
    }

    #[test]
    fn slower_than_may_be_is_a_regression() {
        assert_eq!(rates(100.0, 96.0), [true]);
        assert_eq!(rates(100.0, 94.0), [false]);
        assert_eq!(rates(100.0, 300.0), [true]);
        assert_eq!(verdicts(&[("seconds", 1.0)], &[("seconds", 1.2)], &["seconds"]), [false]);
        assert_eq!(verdicts(&[("seconds", 1.0)], &[("seconds", 1.04)], &["seconds"]), [true]);
    }

    #[test]
    fn a_server_that_answers_nothing_is_the_worst_regression() {
        assert_eq!(rates(100.0, 0.0), [false]);
        assert_eq!(verdicts(&[("aggregate_tps", 100.0)], &[], &["aggregate_tps"]), [false]);
        let best = [("aggregate_tps", 0.0), ("aggregate_tps_best", 102.0)];
        let was = [("aggregate_tps", 100.0), ("aggregate_tps_best", 102.0)];
        assert_eq!(verdicts(&was, &best, &["aggregate_tps"]), [false]);
        let mut unavailable = cell("serial", &[]);
        unavailable.status = Status::Unavailable;
        let baseline = of(vec![before("serial", &was)]);
        assert!(!baseline.compare(&[unavailable], &["aggregate_tps"], 10.0, true).gates[0].passed);
    }

    #[test]
    fn the_line_tells_the_share_that_is_lost_and_who_was_busy() {
        let was = Before { forced: true, ..before("serial", &[("aggregate_tps", 993.0)]) };
        let cells = [cell("serial", &[("aggregate_tps", 48.1)])];
        let gates = of(vec![was]).compare(&cells, &["aggregate_tps"], 0.05, true).gates;
        assert_eq!(
            gates[0].detail,
            "aggregate_tps is 48.1, 95.2 % worse than the baseline's 993 (allowed: 5.0 %); the machine was busy at the \
             baseline"
        );
    }

    #[test]
    fn what_is_not_compared_is_named() {
        let baseline = of(vec![before("serial", &[("aggregate_tps", 0.0)]), before("kv8", &[])]);
        let cells = [cell("serial", &[("aggregate_tps", 1.0)]), cell("batch4", &[("aggregate_tps", 1.0)])];
        let found = baseline.compare(&cells, &["aggregate_tps"], 0.05, true);
        assert_eq!(found.gates, []);
        assert_eq!(
            found.remarks,
            [
                "`serial` has no aggregate_tps in the baseline, and was not compared",
                "`batch4` is not in the baseline, and was not compared",
                "`kv8` of the baseline was not measured here"
            ]
        );
        assert_eq!(baseline.compare(&cells, &["aggregate_tps"], 0.05, false).remarks.len(), 2);
        assert!(baseline.has("kv8", 1) && !baseline.has("kv8", 2) && !baseline.has("batch4", 1));
    }

    #[test]
    fn one_slow_round_is_no_regression() {
        let was = [("aggregate_tps", 100.0), ("aggregate_tps_best", 102.0)];
        let now = |best| [("aggregate_tps", 80.0), ("aggregate_tps_best", best)];
        assert_eq!(verdicts(&was, &now(101.0), &["aggregate_tps"]), [true]);
        assert_eq!(verdicts(&was, &now(82.0), &["aggregate_tps"]), [false]);
    }

    #[test]
    fn only_what_was_measured_alike_is_a_baseline() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("base.json");
        let mut ours = document(vec![cell("serial", &[("aggregate_tps", 1.0)])]);
        ours.settings.insert("batch".to_owned(), json!(4));
        ours.settings.insert("environment".to_owned(), json!({}));
        let read_with = |change: &dyn Fn(&mut Document)| {
            let mut theirs = ours.clone();
            change(&mut theirs);
            std::fs::write(&file, serde_json::to_string(&theirs).unwrap()).unwrap();
            read(&file, &ours)
        };
        assert_eq!(read_with(&|_| {}).unwrap().cells.len(), 1);
        let verb = read_with(&|theirs| theirs.verb = "bench-matrix load".to_owned()).unwrap_err();
        assert!(verb.to_string().ends_with("is of `bench-matrix load`, not of `bench-matrix features`"));
        let other = |change: &dyn Fn(&mut Document)| read_with(change).unwrap_err().further.join("; ");
        assert_eq!(other(&|d| d.model = "x".to_owned()), "the baseline's model is x, here it is m");
        assert_eq!(
            other(&|d| d.machine_key = "fast".to_owned()),
            "the baseline's machine is fast, here it is box"
        );
        assert_eq!(
            other(&|d| d.build = "debug".to_owned()),
            "the baseline's build is debug, here it is release"
        );
        assert_eq!(other(&|d| d.backend = None), "the baseline's backend is unknown, here it is cpu");
        assert!(other(&|d| d.stack = "llama-server".to_owned()).contains("stack"));
        let batch = |d: &mut Document| drop(d.settings.insert("batch".to_owned(), json!(8)));
        assert_eq!(other(&batch), "the baseline's `batch` is 8, here it is 4");
        assert!(other(&|d| d.settings.clear()).starts_with("the baseline's `batch` is none, here it is 4"));
        let lever = |d: &mut Document| drop(d.settings.insert("environment".to_owned(), json!({"A": "1"})));
        let remarks = read_with(&lever).unwrap().remarks;
        assert_eq!(remarks, ["the baseline's `environment` is {\"A\":\"1\"}, here it is {}"]);
        let version = read_with(&|d| d.schema_version = 9).unwrap_err().to_string();
        assert!(version.ends_with("it is of version 9, and this program reads 1"), "{version}");
        std::fs::write(&file, "{}").unwrap();
        assert!(read(&file, &ours).is_err());
        assert!(read(Path::new("/dev/zero"), &ours).unwrap_err().to_string().contains("no regular file"));
    }

    #[test]
    fn percentages_have_their_sign_and_baselines_a_name() {
        assert_eq!((parse_percent("5%"), parse_percent(" 12.5 % ")), (Ok(0.05), Ok(0.125)));
        for bad in ["", "x", "5", "0.05", "-1%", "nan%", "5%%", "5%%x", "1e9%", "%"] {
            assert!(parse_percent(bad).is_err(), "{bad}");
        }
        assert!(
            parse_baseline("").is_err() && parse_baseline(" ").is_err() && parse_baseline("a.json").is_ok()
        );
        assert!(is_commit("0123abcd") && is_commit("0123ABCD-dirty"));
        assert!(!is_commit("") && !is_commit("abc") && !is_commit("before.json"));
    }
}
