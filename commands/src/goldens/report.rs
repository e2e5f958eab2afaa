//! What a check prints: the matrix of families and modes, the differences, or both as JSON.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde_json::{Value, json};

use super::replay::Difference;

/// How a cell ended.
#[derive(Debug)]
pub enum Status {
    /// All bits agree.
    Exact,
    /// Some do not.
    Different(Difference),
    /// The engine, or reading the recording, failed.
    Failed(String),
    /// The checkpoint is not on this machine.
    Absent(String),
}

/// One cell's row.
#[derive(Debug)]
pub struct Entry {
    /// `family-variant`.
    pub checkpoint: String,
    /// Column of the matrix.
    pub mode: String,
    /// The cell's name.
    pub cell: String,
    /// How it ended.
    pub status: Status,
}

/// All cells of a check.
#[derive(Debug)]
pub struct Report {
    /// Machine class and MLX version, as the path has them.
    pub place: String,
    /// In the order of the files.
    pub entries: Vec<Entry>,
}

impl Report {
    fn count(&self, wanted: impl Fn(&Status) -> bool) -> usize {
        self.entries.iter().filter(|entry| wanted(&entry.status)).count()
    }

    fn compared(&self) -> usize {
        self.count(|status| !matches!(status, Status::Absent(_)))
    }

    fn exact(&self) -> usize {
        self.count(|status| matches!(status, Status::Exact))
    }

    /// Whether something was compared and all of it agrees.
    pub fn passes(&self) -> bool {
        self.compared() > 0 && self.exact() == self.compared()
    }

    /// The matrix, then one line a difference, then the sum.
    pub fn print(&self, out: &mut dyn Write) -> io::Result<()> {
        self.print_matrix(out)?;
        for entry in &self.entries {
            let (what, text) = match &entry.status {
                Status::Exact | Status::Absent(_) => continue,
                Status::Different(difference) => ("differs", describe(difference)),
                Status::Failed(message) => ("failed", message.clone()),
            };
            writeln!(out, "{} {} {what}: {text}", entry.checkpoint, entry.cell)?;
        }
        let mut absent: Vec<_> = self.absent().collect();
        absent.dedup();
        for (checkpoint, why) in absent {
            writeln!(out, "{checkpoint} not checked: {why}")?;
        }
        writeln!(out, "{} of {} cells bit-exact ({})", self.exact(), self.compared(), self.place)
    }

    fn absent(&self) -> impl Iterator<Item = (&str, &str)> {
        self.entries.iter().filter_map(|entry| match &entry.status {
            Status::Absent(why) => Some((entry.checkpoint.as_str(), why.as_str())),
            _ => None,
        })
    }

    /// Exact and compared cells by checkpoint and mode: `4/4`, or `3/4 !` where one is not exact.
    fn print_matrix(&self, out: &mut dyn Write) -> io::Result<()> {
        let (mut modes, mut checkpoints) = (Vec::new(), Vec::new());
        let mut counts: BTreeMap<(&str, &str), (usize, usize)> = BTreeMap::new();
        for entry in &self.entries {
            let (checkpoint, mode) = (entry.checkpoint.as_str(), entry.mode.as_str());
            if !modes.contains(&mode) {
                modes.push(mode);
            }
            if !checkpoints.contains(&checkpoint) {
                checkpoints.push(checkpoint);
            }
            if !matches!(entry.status, Status::Absent(_)) {
                let (exact, all) = counts.entry((checkpoint, mode)).or_default();
                *exact += usize::from(matches!(entry.status, Status::Exact));
                *all += 1;
            }
        }
        let first = checkpoints.iter().map(|name| name.len()).max().unwrap_or(0).max("checkpoint".len());
        let width = |mode: &str| mode.len().max("10/11 !".len());
        let mut line = format!("{:first$}", "checkpoint");
        for mode in &modes {
            line += &format!("  {mode:>0$}", width(mode));
        }
        writeln!(out, "{line}")?;
        for checkpoint in checkpoints {
            let mut line = format!("{checkpoint:first$}");
            for mode in &modes {
                let text = match counts.get(&(checkpoint, *mode)) {
                    None => "-".to_owned(),
                    Some((exact, all)) if exact == all => format!("{exact}/{all}"),
                    Some((exact, all)) => format!("{exact}/{all} !"),
                };
                line += &format!("  {text:>0$}", width(mode));
            }
            writeln!(out, "{line}")?;
        }
        Ok(())
    }

    /// The same as one JSON object.
    pub fn to_json(&self) -> Value {
        let cells: Vec<_> = self.entries.iter().map(entry_json).collect();
        json!({"place": self.place, "exact": self.exact(), "compared": self.compared(), "cells": cells})
    }
}

fn entry_json(entry: &Entry) -> Value {
    let mut object = json!({"checkpoint": entry.checkpoint, "mode": entry.mode, "cell": entry.cell});
    let more = match &entry.status {
        Status::Exact => json!({"status": "exact"}),
        Status::Failed(message) => json!({"status": "failed", "detail": message}),
        Status::Absent(why) => json!({"status": "absent", "detail": why}),
        Status::Different(difference) => json!({
            "status": "different",
            "tensor": difference.tensor,
            "step": difference.step,
            "max_difference": difference.max_difference.map(|(_, value)| value),
            "max_difference_step": difference.max_difference.and_then(|(step, _)| step),
            "top2_gap": difference.top2_gap,
            "detail": difference.detail,
        }),
    };
    if let (Some(object), Value::Object(more)) = (object.as_object_mut(), more) {
        object.extend(more);
    }
    object
}

/// `logprobs from step 3 on; largest difference 1.2e-7 (step 15); top-2 gap 0.031; the tokens agree`.
fn describe(difference: &Difference) -> String {
    let mut text = difference.tensor.clone();
    if let Some(step) = difference.step {
        text += &format!(" from step {step} on");
    }
    match difference.max_difference {
        Some((Some(step), value)) => text += &format!("; largest difference {value:.3e} (step {step})"),
        Some((None, value)) => text += &format!("; largest difference {value:.3e}"),
        None => {}
    }
    if let Some(gap) = difference.top2_gap {
        text += &format!("; top-2 gap {gap:.3e}");
    }
    if difference.detail.is_empty() { text } else { format!("{text}; {}", difference.detail) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(checkpoint: &str, mode: &str, status: Status) -> Entry {
        Entry { checkpoint: checkpoint.into(), mode: mode.into(), cell: "c".into(), status }
    }

    fn difference() -> Difference {
        Difference {
            tensor: "logprobs".into(),
            step: Some(3),
            max_difference: Some((Some(15), 1.5e-7)),
            top2_gap: Some(0.25),
            detail: "the tokens agree".into(),
        }
    }

    fn report(entries: Vec<Entry>) -> Report {
        Report { place: "linux-x86_64-cpu, MLX 0.32.2".into(), entries }
    }

    fn text(report: &Report) -> String {
        let mut out = Vec::new();
        report.print(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn matrix_and_differences() {
        let report = report(vec![
            entry("llama-f32", "greedy", Status::Exact),
            entry("llama-f32", "kv-quant", Status::Different(difference())),
            entry("llama-f32", "kv-quant", Status::Exact),
            entry("starter-f32", "greedy", Status::Absent("no snapshot".into())),
            entry("starter-f32", "greedy", Status::Absent("no snapshot".into())),
        ]);
        assert!(!report.passes());
        insta::assert_snapshot!(text(&report), @r"
        checkpoint    greedy  kv-quant
        llama-f32        1/1     1/2 !
        starter-f32        -         -
        llama-f32 c differs: logprobs from step 3 on; largest difference 1.500e-7 (step 15); top-2 gap 2.500e-1; the tokens agree
        starter-f32 not checked: no snapshot
        2 of 3 cells bit-exact (linux-x86_64-cpu, MLX 0.32.2)
        ");
    }

    #[test]
    fn nothing_compared_is_no_pass() {
        assert!(!report(vec![]).passes());
        assert!(!report(vec![entry("starter-f32", "greedy", Status::Absent(String::new()))]).passes());
        assert!(report(vec![entry("llama-f32", "greedy", Status::Exact)]).passes());
    }

    #[test]
    fn json_names_the_place_of_a_difference() {
        let json = report(vec![entry("llama-f32", "greedy", Status::Different(difference()))]).to_json();
        assert_eq!(json["cells"][0]["status"], "different");
        assert_eq!(json["cells"][0]["step"], 3);
        assert_eq!(json["exact"], 0);
    }
}
