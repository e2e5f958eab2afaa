//! `--baseline`: the same cells measured before, and which of them became slower than may be.

use std::path::Path;

use mlx_bun::record::Figures;

use super::document::{CellResult, Document, Gate, Status};
use super::figures::{Better, better, shown};
use crate::error::Complaint;

/// Cells measured before, by name.
pub type Baseline = Vec<(String, Figures)>;

/// Reads a document that `--out` wrote.
///
/// # Errors
/// It cannot be read, is something else, or of another verb or model.
pub fn read(file: &Path, verb: &str) -> Result<Baseline, Complaint> {
    let shown = file.display();
    let bytes =
        std::fs::read(file).map_err(|error| Complaint::failure(format!("cannot read `{shown}`: {error}")))?;
    let document: Document = serde_json::from_slice(&bytes).map_err(|error| {
        Complaint::failure(format!("`{shown}` is no JSON of bench-matrix: {error}"))
            .hint("write it with `bench-matrix ... --out FILE.json`")
    })?;
    if document.verb != verb {
        return Err(Complaint::failure(format!("`{shown}` is of `{}`, not of `{verb}`", document.verb)));
    }
    let measured = |cell: &CellResult| matches!(cell.status, Status::Measured | Status::Reused);
    Ok(document.cells.into_iter().filter(measured).map(|cell| (cell.label, cell.figures)).collect())
}

/// A percentage, with or without its sign: `5%` and `5` are 0.05.
///
/// # Errors
/// It is none.
pub fn parse_percent(text: &str) -> Result<f64, String> {
    let number = text.trim().trim_end_matches('%').trim().parse::<f64>();
    number
        .ok()
        .filter(|percent| percent.is_finite() && (0.0..=1000.0).contains(percent))
        .map(|percent| percent / 100.0)
        .ok_or_else(|| "must be a percentage from 0 to 1000, such as 5%".to_owned())
}

/// One gate for each cell that both have: whether `figure` is worse by more than `most`. Where the best of the rounds
/// is known too, it has to be worse as well, so that one slow round is no regression.
pub fn compare(baseline: &Baseline, cells: &[CellResult], figures: &[&str], most: f64) -> Vec<Gate> {
    let mut gates = Vec::new();
    for cell in cells {
        let Some((_, before)) = baseline.iter().find(|(label, _)| *label == cell.label) else { continue };
        for name in figures {
            let Some(change) = worse_by(name, before, &cell.figures) else { continue };
            let best = worse_by(&format!("{name}_best"), before, &cell.figures);
            let passed = change <= most || best.is_some_and(|best| best <= most);
            let value =
                |figures: &Figures| figures.get(name).map_or(String::new(), |value| shown(name, value));
            gates.push(Gate {
                name: "regression".to_owned(),
                cell: Some(cell.label.clone()),
                passed,
                detail: format!(
                    "{name} is {}, {:.1} % {} than the baseline's {} (allowed: {:.1} %)",
                    value(&cell.figures),
                    change.abs() * 100.0,
                    if change > 0.0 { "worse" } else { "better" },
                    value(before),
                    most * 100.0
                ),
            });
        }
    }
    gates
}

/// By how much a figure is worse, as a fraction; negative when it is better.
fn worse_by(name: &str, before: &Figures, now: &Figures) -> Option<f64> {
    let (before, now) = (before.get(name)?, now.get(name)?);
    if before <= 0.0 || now <= 0.0 {
        return None;
    }
    Some(match better(name)? {
        Better::Higher => before / now - 1.0,
        Better::Lower => now / before - 1.0,
    })
}

#[cfg(test)]
mod tests {
    use super::super::document::tests::{cell, document};
    use super::*;

    fn verdicts(before: &[(&str, f64)], now: &[(&str, f64)], figures: &[&str]) -> Vec<bool> {
        let baseline = vec![("serial".to_owned(), cell("serial", before).figures)];
        let cells = [cell("serial", now), cell("new", now)];
        compare(&baseline, &cells, figures, 0.05).iter().map(|gate| gate.passed).collect()
    }

    #[test]
    fn slower_than_may_be_is_a_regression() {
        let of = |before, now| {
            verdicts(&[("aggregate_tps", before)], &[("aggregate_tps", now)], &["aggregate_tps"])
        };
        assert_eq!(of(100.0, 96.0), [true]);
        assert_eq!(of(100.0, 90.0), [false]);
        assert_eq!(of(100.0, 300.0), [true]);
        assert_eq!(of(0.0, 90.0), [true; 0]);
        assert_eq!(verdicts(&[("seconds", 1.0)], &[("seconds", 1.2)], &["seconds"]), [false]);
        assert_eq!(verdicts(&[("requests", 1.0)], &[("requests", 0.2)], &["requests"]), [true; 0]);
    }

    #[test]
    fn one_slow_round_is_no_regression() {
        let before = [("aggregate_tps", 100.0), ("aggregate_tps_best", 102.0)];
        assert_eq!(
            verdicts(&before, &[("aggregate_tps", 80.0), ("aggregate_tps_best", 101.0)], &["aggregate_tps"]),
            [true]
        );
        assert_eq!(
            verdicts(&before, &[("aggregate_tps", 80.0), ("aggregate_tps_best", 82.0)], &["aggregate_tps"]),
            [false]
        );
    }

    #[test]
    fn only_a_document_of_the_same_verb_is_a_baseline() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("base.json");
        let written = document(vec![cell("serial", &[("aggregate_tps", 1.0)])]);
        std::fs::write(&file, serde_json::to_string(&written).unwrap()).unwrap();
        assert_eq!(read(&file, "bench-matrix features").unwrap().len(), 1);
        let error = read(&file, "bench-matrix load").unwrap_err().to_string();
        assert!(error.ends_with("is of `bench-matrix features`, not of `bench-matrix load`"), "{error}");
        std::fs::write(&file, "{}").unwrap();
        assert!(read(&file, "bench-matrix load").is_err());
    }

    #[test]
    fn percentages_are_read() {
        assert_eq!((parse_percent("5%"), parse_percent(" 12.5 ")), (Ok(0.05), Ok(0.125)));
        for bad in ["", "x", "-1", "nan", "5%%x", "1e9"] {
            assert!(parse_percent(bad).is_err(), "{bad}");
        }
    }
}
