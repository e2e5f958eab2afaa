//! What a run of `bench-matrix` found: as JSON (docs/schema/bench-matrix.schema.json) and as a Markdown table.

use std::fmt::Write as _;

use mlx_bun::record::Figures;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::figures::{Column, shown};

/// What became of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Measured now.
    Measured,
    /// Measured before, by this build on this machine.
    Reused,
    /// The server or the model cannot do it.
    Unavailable,
    /// It went wrong.
    Failed,
}

/// A cell of the matrix.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CellResult {
    /// Its name.
    pub label: String,
    /// What became of it.
    pub status: Status,
    /// Measured on a machine that was not quiet.
    pub forced: bool,
    /// Milliseconds since 1970.
    pub measured_at: i64,
    /// What the server, or the program, was started with.
    pub flags: Vec<String>,
    /// The numbers.
    pub figures: Figures,
    /// What they were made of.
    pub samples: Value,
    /// How it does beside the cell that has the same clients and not its feature.
    #[serde(default)]
    pub beside: Option<Beside>,
    /// Why there are no numbers, or what is to be known about them.
    pub note: Option<String>,
}

/// A cell against another one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Beside {
    /// The other one.
    pub cell: String,
    /// This one's `decode_tps`, tokens a second of one reply, by the other's.
    pub ratio: f64,
}

/// A condition that has to hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gate {
    /// Which.
    pub name: String,
    /// The cell, if it is about one.
    pub cell: Option<String>,
    /// Whether it holds.
    pub passed: bool,
    /// How it comes out.
    pub detail: String,
}

/// The most a server can take.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Knee {
    /// Requests a minute.
    pub rpm: f64,
    /// Which row that is.
    pub label: String,
    /// 95th percentile of the time to the first token there.
    pub ttft_p95_ms: f64,
    /// What was acceptable.
    pub limit_ms: f64,
}

/// Everything.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Document {
    /// Of this form.
    pub schema_version: u32,
    /// `bench-matrix features` and so on.
    pub verb: String,
    /// RFC 3339.
    pub started_at: String,
    /// The model's folder, file or name.
    pub model: String,
    /// What was measured.
    pub stack: String,
    /// Where, if it is a server that was there already.
    pub url: Option<String>,
    /// The build.
    pub commit: Option<String>,
    /// `release` or `debug`.
    pub build: String,
    /// Of MLX.
    pub mlx_version: Option<String>,
    /// `cpu`, `cuda` or `metal`.
    pub backend: Option<String>,
    /// Short name of the machine.
    pub machine_key: String,
    /// The machine.
    pub machine: Value,
    /// Whether it was quiet.
    pub machine_state: Value,
    /// Numbers of cells compare where these agree.
    pub settings: Map<String, Value>,
    /// In order.
    pub cells: Vec<CellResult>,
    /// In order.
    pub gates: Vec<Gate>,
    /// Of `load`; inside `None` when no rate was acceptable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub knee: Option<Option<Knee>>,
    /// What is to be known about the comparison with a baseline.
    #[serde(default)]
    pub remarks: Vec<String>,
    /// Ended by Ctrl-C before the last cell.
    pub interrupted: bool,
    /// Whether every cell has its numbers and every gate holds.
    pub passed: bool,
}

impl Document {
    /// Sets [`Document::passed`] by what else is there.
    pub fn conclude(&mut self) {
        self.passed = !self.interrupted
            && self.gates.iter().all(|gate| gate.passed)
            && self.cells.iter().all(|cell| cell.status != Status::Failed);
    }

    /// Sets a cell beside another one, where both were measured.
    pub fn set_beside(&mut self, label: &str, other: &str) {
        let rate = |name: &str| {
            let cell = self.cells.iter().find(|cell| cell.label == name && cell.has_numbers())?;
            cell.figures.get("decode_tps").filter(|rate| *rate > 0.0)
        };
        let Some((ours, theirs)) = rate(label).zip(rate(other)) else { return };
        if let Some(cell) = self.cells.iter_mut().find(|cell| cell.label == label) {
            cell.beside = Some(Beside { cell: other.to_owned(), ratio: ours / theirs });
        }
    }

    /// A table with what went wrong below it.
    pub fn markdown(&self, columns: &[Column]) -> String {
        let mut text = format!("# {}\n\n{}\n\n", self.verb, self.about());
        let used: Vec<&Column> = columns
            .iter()
            .filter(|(_, name)| self.cells.iter().any(|cell| cell.figures.get(name).is_some()))
            .collect();
        let mut rows = vec![vec!["cell".to_owned()]];
        rows[0].extend(used.iter().map(|(heading, _)| (*heading).to_owned()));
        let beside = self.cells.iter().any(|cell| cell.beside.is_some());
        rows[0].extend(beside.then(|| "beside".to_owned()));
        rows[0].push("state".to_owned());
        for cell in &self.cells {
            let mut row = vec![cell.label.clone()];
            let shown = |(_, name): &&Column| {
                cell.figures.get(name).map_or(String::new(), |value| shown(name, value))
            };
            row.extend(used.iter().map(shown));
            let ratio = |beside: &Beside| format!("{:.2} {}", beside.ratio, beside.cell);
            row.extend(beside.then(|| cell.beside.as_ref().map_or(String::new(), ratio)));
            row.push(state(cell));
            rows.push(row);
        }
        text.push_str(&table(&rows));
        match &self.knee {
            None => {}
            Some(None) => {
                text.push_str("\nKnee: none, at no rate did all requests come through in acceptable time\n")
            }
            Some(Some(knee)) => {
                let _ = write!(
                    text,
                    "\nKnee: {:.1} requests a minute ({}), 95 % of first tokens within {:.0} ms (acceptable: {:.0} ms)\n",
                    knee.rpm, knee.label, knee.ttft_p95_ms, knee.limit_ms
                );
            }
        }
        for (heading, lines) in
            [("Failures", self.failures()), ("Gates that hold", self.held()), ("Notes", self.notes())]
        {
            if !lines.is_empty() {
                let _ = write!(text, "\n{heading}:\n\n");
                lines.iter().for_each(|line| text.extend(["- ", line, "\n"]));
            }
        }
        text
    }

    fn about(&self) -> String {
        let mut parts = vec![self.model.clone(), self.stack.clone()];
        parts.extend(self.url.clone());
        match &self.commit {
            Some(commit) => {
                let (short, dirty) = (commit.get(..12).unwrap_or(commit), commit.ends_with("-dirty"));
                parts.push(format!("commit {short}{}", if dirty { " with changes" } else { "" }));
            }
            None => parts.push("unknown commit".to_owned()),
        }
        parts.extend([format!("{} build", self.build), self.machine_key.clone(), self.started_at.clone()]);
        parts.join(" · ")
    }

    /// What went wrong, a line each.
    pub fn failures(&self) -> Vec<String> {
        let cells = self.cells.iter().filter(|cell| cell.status == Status::Failed);
        let cells =
            cells.map(|cell| format!("{}: {}", cell.label, cell.note.as_deref().unwrap_or("no reason")));
        let gates = self.gates.iter().filter(|gate| !gate.passed).map(Gate::line);
        let interrupted = self.interrupted.then(|| "interrupted before the last cell".to_owned());
        cells.chain(gates).chain(interrupted).collect()
    }

    fn held(&self) -> Vec<String> {
        self.gates.iter().filter(|gate| gate.passed).map(Gate::line).collect()
    }

    fn notes(&self) -> Vec<String> {
        let cells = self.cells.iter().filter(|cell| cell.status != Status::Failed);
        let cells = cells.filter_map(|cell| Some(format!("{}: {}", cell.label, cell.note.as_ref()?)));
        cells.chain(self.remarks.iter().cloned()).collect()
    }
}

impl Gate {
    fn line(&self) -> String {
        let cell = self.cell.as_deref().map(|cell| format!("{cell}: ")).unwrap_or_default();
        format!("{cell}{}", self.detail)
    }
}

impl CellResult {
    /// Whether it was measured, now or before.
    pub fn has_numbers(&self) -> bool {
        matches!(self.status, Status::Measured | Status::Reused)
    }

    /// The share of its requests that failed, where that is known.
    pub fn failed_share(&self) -> Option<f64> {
        let (failed, answered) = (self.figures.get("errors")?, self.figures.get("requests")?);
        Some(failed / (failed + answered).max(1.0))
    }
}

fn state(cell: &CellResult) -> String {
    let failed = cell.failed_share().filter(|share| *share > 0.0 && cell.has_numbers());
    let failed = failed.map(|share| format!("{:.0} % failed", (share * 100.0).max(1.0)));
    let measured = match (cell.status, cell.forced) {
        (Status::Measured, false) => "",
        (Status::Measured, true) => "busy machine",
        (Status::Reused, false) => "reused",
        (Status::Reused, true) => "reused, busy machine",
        (Status::Unavailable, _) => "unavailable",
        (Status::Failed, _) => "FAILED",
    };
    let parts = [Some(measured.to_owned()).filter(|text| !text.is_empty()), failed];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// Markdown; every column but the first and the last to the right.
fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let count = |text: &String| text.chars().count();
    let width =
        |column: usize| rows.iter().filter_map(|row| row.get(column)).map(count).max().unwrap_or(0).max(3);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for (index, row) in rows.iter().enumerate() {
        text.push('|');
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let space = " ".repeat(width - count(cell).min(*width));
            let right = column > 0 && column + 1 < columns;
            let (before, after) = if right { (space.as_str(), "") } else { ("", space.as_str()) };
            text.extend([" ", before, cell.replace('|', "\\|").as_str(), after, " |"]);
        }
        text.push('\n');
        if index == 0 {
            text.push('|');
            for (column, width) in widths.iter().enumerate() {
                let right = column > 0 && column + 1 < columns;
                let dashes = "-".repeat(if right { width - 1 } else { *width });
                text.extend([" ", dashes.as_str(), if right { ": |" } else { " |" }]);
            }
            text.push('\n');
        }
    }
    text
}

#[cfg(test)]
pub mod tests {
    use serde_json::json;

    use super::super::schema_check::check;
    use super::*;

    pub fn cell(label: &str, figures: &[(&str, f64)]) -> CellResult {
        let mut all = Figures::default();
        figures.iter().for_each(|(name, value)| all.add(name, *value, "x"));
        CellResult {
            label: label.to_owned(),
            status: Status::Measured,
            forced: false,
            measured_at: 1,
            flags: vec!["--batch".to_owned(), "1".to_owned()],
            figures: all,
            samples: json!({"ttft_s": [0.1]}),
            beside: None,
            note: None,
        }
    }

    pub fn document(cells: Vec<CellResult>) -> Document {
        Document {
            schema_version: 1,
            verb: "bench-matrix features".to_owned(),
            started_at: "2026-01-02T03:04:05Z".to_owned(),
            model: "m".to_owned(),
            stack: "mlx-bun".to_owned(),
            url: None,
            commit: Some("0123456789abcdef-dirty".to_owned()),
            build: "release".to_owned(),
            mlx_version: Some("0.32.2".to_owned()),
            backend: Some("cpu".to_owned()),
            machine_key: "box".to_owned(),
            machine: json!({"key": "box"}),
            machine_state: json!({"ok": true}),
            settings: Map::new(),
            cells,
            gates: Vec::new(),
            knee: None,
            remarks: Vec::new(),
            interrupted: false,
            passed: true,
        }
    }

    #[test]
    fn the_table_shows_figures_and_failures() {
        let mut failed = cell("kv8", &[]);
        failed.status = Status::Failed;
        failed.note = Some("status 500: oops".to_owned());
        let mut noted = cell("batch4", &[("aggregate_tps", 321.4), ("ttft_p50_ms", 9.5)]);
        noted.note = Some("tokens are pieces of text".to_owned());
        noted.forced = true;
        let mut document = document(vec![cell("serial", &[("aggregate_tps", 12.34)]), noted, failed]);
        document.gates.push(Gate {
            name: "conformance".to_owned(),
            cell: Some("batch4".to_owned()),
            passed: false,
            detail: "50 % of replies fit the schema".to_owned(),
        });
        document.conclude();
        assert!(!document.passed);
        let columns =
            [("tok/s", "aggregate_tps"), ("TTFT p50 ms", "ttft_p50_ms"), ("accepted", "acceptance_pct")];
        insta::assert_snapshot!(document.markdown(&columns), @r"
        # bench-matrix features

        m · mlx-bun · commit 0123456789ab with changes · release build · box · 2026-01-02T03:04:05Z

        | cell   | tok/s | TTFT p50 ms | state        |
        | ------ | ----: | ----------: | ------------ |
        | serial |  12.3 |             |              |
        | batch4 |   321 |        9.50 | busy machine |
        | kv8    |       |             | FAILED       |

        Failures:

        - kv8: status 500: oops
        - batch4: 50 % of replies fit the schema

        Notes:

        - batch4: tokens are pieces of text
        ");
    }

    #[test]
    fn a_cell_stands_beside_the_one_without_its_feature() {
        let mut document = document(vec![
            cell("batch4", &[("decode_tps", 40.0)]),
            cell("kv8", &[("decode_tps", 30.0)]),
            cell("kv4", &[("decode_tps", 0.0)]),
        ]);
        ["kv8", "kv4", "absent"].iter().for_each(|label| document.set_beside(label, "batch4"));
        document.set_beside("batch4", "absent");
        assert_eq!(document.cells[1].beside, Some(Beside { cell: "batch4".to_owned(), ratio: 0.75 }));
        assert!(document.cells[0].beside.is_none() && document.cells[2].beside.is_none());
        let table = document.markdown(&[("a request", "decode_tps")]);
        assert!(table.contains("|      30.0 | 0.75 batch4 |"), "{table}");
    }

    #[test]
    fn failed_requests_gates_that_hold_and_a_missing_knee_are_shown() {
        let mut document = document(vec![cell("open-100%", &[("requests", 3.0), ("errors", 1.0)])]);
        document.knee = Some(None);
        document.gates.push(Gate {
            name: "regression".to_owned(),
            cell: Some("open-100%".to_owned()),
            passed: true,
            detail: "aggregate_tps is as before".to_owned(),
        });
        document.remarks.push("`serial` is not in the baseline".to_owned());
        let text = document.markdown(&[]);
        assert!(text.contains("25 % failed") && text.contains("Knee: none"), "{text}");
        assert!(text.contains("Gates that hold:\n\n- open-100%: aggregate_tps is as before\n"), "{text}");
        assert!(text.contains("- `serial` is not in the baseline\n"), "{text}");
    }

    #[test]
    fn json_is_what_the_published_schema_says() {
        let schema: Value =
            serde_json::from_str(include_str!("../../../docs/schema/bench-matrix.schema.json")).unwrap();
        let mut document = document(vec![cell("serial", &[("aggregate_tps", 12.34)])]);
        document.knee =
            Some(Some(Knee { rpm: 1.0, label: "open-50%".to_owned(), ttft_p95_ms: 1.0, limit_ms: 2.0 }));
        document.cells[0].beside = Some(Beside { cell: "batch4".to_owned(), ratio: 0.5 });
        document.remarks.push("kv8 is not in the baseline".to_owned());
        let value = serde_json::to_value(&document).unwrap();
        assert_eq!(check(&schema, &value).unwrap(), [""; 0]);
        let back: Document = serde_json::from_value(value.clone()).unwrap();
        assert_eq!(back, document);
        let without = Document { knee: Some(None), ..document.clone() };
        let without = serde_json::to_value(without).unwrap();
        assert_eq!((check(&schema, &without).unwrap(), &without["knee"]), (Vec::new(), &Value::Null));
        let mut broken = value;
        broken["cells"][0]["status"] = json!("maybe");
        broken["cells"][0]["figures"]["aggregate_tps"]["value"] = json!("12");
        assert_eq!(check(&schema, &broken).unwrap().len(), 2);
    }
}
