//! Measured cells on their way out: rows of Markdown, CSV or JSON as they come, or one JSON array at the end.

use std::io::{self, Write};

use mlx_bun::record::{Entry, Statistics};
use serde_json::{Value, json};

use super::cell::Measured;
use crate::output::SCHEMA_VERSION;

/// `--output`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// A Markdown table
    #[default]
    Md,
    /// Comma-separated values
    Csv,
    /// One JSON array at the end
    Json,
    /// A JSON object a line
    Jsonl,
}

/// Prints cells.
pub struct Report<W> {
    out: W,
    format: Format,
    roofline: bool,
    begun: bool,
    objects: Vec<Value>,
}

impl<W: Write> Report<W> {
    /// A report in a format, with or without the columns of `--roofline`.
    pub fn new(out: W, format: Format, roofline: bool) -> Self {
        Self { out, format, roofline, begun: false, objects: Vec::new() }
    }

    /// Takes a cell; `entry` says where it was measured.
    ///
    /// # Errors
    /// Standard output's.
    pub fn add(&mut self, model: &str, measured: &Measured, entry: &Entry) -> io::Result<()> {
        match self.format {
            Format::Md => self.markdown(measured, entry)?,
            Format::Csv => self.csv(model, measured, entry)?,
            Format::Jsonl => writeln!(self.out, "{}", object(model, measured, entry))?,
            Format::Json => self.objects.push(object(model, measured, entry)),
        }
        self.begun = true;
        self.out.flush()
    }

    /// Prints what is left, after the last cell or after Ctrl-C.
    ///
    /// # Errors
    /// Standard output's.
    pub fn finish(&mut self) -> io::Result<()> {
        if self.format == Format::Json {
            writeln!(self.out, "{}", Value::Array(std::mem::take(&mut self.objects)))?;
        }
        self.out.flush()
    }

    fn markdown(&mut self, measured: &Measured, entry: &Entry) -> io::Result<()> {
        let mut headings = vec![
            "test",
            "batch",
            "threads",
            "kv",
            "prompt tok/s",
            "median [min, max]",
            "generation tok/s",
            "median [min, max]",
            "TTFT ms",
            "peak GB",
        ];
        if self.roofline {
            headings.extend(["MB/token", "of bandwidth"]);
        }
        if !self.begun {
            let rule = headings.iter().enumerate().map(|(index, _)| if index == 0 { "---" } else { "---:" });
            let rule: Vec<_> = rule.collect();
            writeln!(self.out, "| {} |\n| {} |", headings.join(" | "), rule.join(" | "))?;
        }
        let [prompt, generation] =
            [measured.prompt_rates(), measured.generation_rates()].map(|samples| Statistics::of(&samples));
        let mean = |found: Option<Statistics>| {
            found.map_or_else(|| "-".to_owned(), |found| format!("{:.2} ± {:.2}", found.mean, found.sd))
        };
        let middle = |found: Option<Statistics>| {
            let shown =
                |found: Statistics| format!("{:.2} [{:.2}, {:.2}]", found.median, found.min, found.max);
            found.map_or_else(|| "-".to_owned(), shown)
        };
        let much = measured.excess().filter(|excess| *excess > NOTICEABLE);
        let mark = much.map_or(String::new(), |excess| format!(" (+{:.0} %)", excess * 100.0));
        let cell = &measured.cell;
        let mut cells = vec![
            cell.test(),
            cell.batch.to_string(),
            entry.threads.map_or_else(|| "-".to_owned(), |threads| threads.to_string()),
            cell.kv(),
            mean(prompt),
            middle(prompt),
            mean(generation) + &mark,
            middle(generation),
            mean(Statistics::of(&measured.first_tokens())),
            format!("{:.3}", measured.peak_bytes() as f64 / 1e9),
        ];
        if self.roofline {
            let share = measured.bandwidth_share().map(|share| format!("{:.0} %", share * 100.0));
            cells.push(format!("{:.1}", measured.bytes_per_token / 1e6));
            cells.push(share.unwrap_or_else(|| "-".to_owned()));
        }
        writeln!(self.out, "| {} |", cells.join(" | "))
    }

    fn csv(&mut self, model: &str, measured: &Measured, entry: &Entry) -> io::Result<()> {
        let Value::Object(object) = object(model, measured, entry) else { return Ok(()) };
        let (mut names, mut cells) = (Vec::new(), Vec::new());
        for (name, value) in object.iter().filter(|(name, _)| *name != "samples") {
            match value {
                // Where nothing was measured the columns are there all the same.
                _ if STATISTICS.contains(&name.as_str()) => {
                    for part in ["mean", "sd", "median", "min", "max"] {
                        names.push(format!("{name}_{part}"));
                        cells.push(value.get(part).map(Value::to_string).unwrap_or_default());
                    }
                }
                value => {
                    names.push(name.clone());
                    cells.push(match value {
                        Value::Null => String::new(),
                        Value::String(text) => quoted(text),
                        other => quoted(&other.to_string()),
                    });
                }
            }
        }
        if !self.begun {
            writeln!(self.out, "{}", names.join(","))?;
        }
        writeln!(self.out, "{}", cells.join(","))
    }
}

/// Where mlx-lm's count makes generation look so much faster, the table says by how much.
pub const NOTICEABLE: f64 = 0.05;

const STATISTICS: [&str; 3] = ["prompt_tps", "generation_tps", "ttft_ms"];

/// A field of CSV (RFC 4180).
pub fn quoted(text: &str) -> String {
    match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    }
}

fn object(model: &str, measured: &Measured, entry: &Entry) -> Value {
    let cell = &measured.cell;
    let statistics = |samples: &[f64]| serde_json::to_value(Statistics::of(samples)).unwrap_or_default();
    json!({
        "schema_version": SCHEMA_VERSION,
        "model": model,
        "label": entry.label,
        "prompt_tokens": cell.prompt,
        "generation_tokens": cell.generation,
        "depth": cell.depth,
        "batch_size": cell.batch,
        "kv_quant": cell.kv(),
        "trials": measured.trials.len(),
        "prompt_tps": statistics(&measured.prompt_rates()),
        "generation_tps": statistics(&measured.generation_rates()),
        "ttft_ms": statistics(&measured.first_tokens()),
        "generation_tps_excess": measured.excess(),
        "peak_bytes": measured.peak_bytes(),
        "mlx_peak_bytes": measured.mlx_peak_bytes(),
        "bytes_per_token": measured.bytes_per_token,
        "bandwidth_gbs": measured.roofline.map(|roofline| roofline.bandwidth),
        "bandwidth_share": measured.bandwidth_share(),
        "threads": entry.threads,
        "machine": entry.machine_key,
        "backend": entry.backend,
        "device": entry.device,
        "mlx_version": entry.mlx_version,
        "commit": entry.commit_sha,
        "build": entry.build,
        "machine_quiet": !entry.forced,
        "flags": entry.flags,
        "samples": measured.raw(),
    })
}

#[cfg(test)]
mod tests {
    use super::super::cell::tests::measured;
    use super::*;

    fn printed(format: Format) -> String {
        let mut out = Vec::new();
        let mut report = Report::new(&mut out, format, true);
        let mut prompt_only = measured();
        prompt_only.cell.generation = 0;
        for measured in [measured(), prompt_only] {
            report.add("a,\"b\"", &measured, &Entry::default()).unwrap();
        }
        report.finish().unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn every_format_has_a_row_a_cell() {
        let md = printed(Format::Md);
        assert_eq!(md.lines().count(), 4, "{md}");
        assert!(
            md.contains("| pp100+tg11@d50 | 2 | - | 8 | 116.67 ± 76.38 | 100.00 [50.00, 200.00] |"),
            "{md}"
        );
        assert!(md.contains("| 500.0 | 50 % |"), "{md}");
        // 11 tokens in the time of 10.
        assert!(md.contains("| 25.67 ± 16.80 (+10 %) | 22.00 "), "{md}");
        let csv = printed(Format::Csv);
        assert_eq!(csv.lines().count(), 3, "{csv}");
        assert!(csv.contains("\"a,\"\"b\"\"\""), "{csv}");
        let columns = |line: &str| line.replace("\"a,\"\"b\"\"\"", "x").split(',').count();
        let counts: Vec<_> = csv.lines().map(columns).collect();
        assert!(counts.windows(2).all(|pair| pair[0] == pair[1]), "{csv}");
        let lines = printed(Format::Jsonl);
        let objects: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(objects[0]["generation_tps"]["median"], 22.0);
        assert_eq!(objects[1]["generation_tps"], Value::Null);
        let array: Value = serde_json::from_str(&printed(Format::Json)).unwrap();
        assert_eq!(array, Value::Array(objects));
    }
}
