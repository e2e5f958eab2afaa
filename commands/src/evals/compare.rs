//! Two commits, or two machines, side by side.

use std::collections::BTreeMap;

use mlx_bun::record::{Database, Figure, Filter, RecordError};
use serde::Serialize;

use super::measurement::{Measurement, select};
use crate::error::Complaint;

/// The newest value of the same thing on both sides.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Pair {
    /// The verb.
    pub verb: String,
    /// The model's name.
    pub model: String,
    /// The cell.
    pub label: String,
    /// What was counted.
    pub figure: String,
    /// In what unit.
    pub unit: String,
    /// The machine of the first; that of both, unless machines are compared.
    pub machine: String,
    /// The first side's value.
    pub a: f64,
    /// The second's.
    pub b: f64,
    /// `b / a`; none where `a` is 0.
    pub ratio: Option<f64>,
    /// Whether both machines were quiet.
    pub quiet: bool,
}

/// What a side's name means.
enum Side {
    Commit,
    Machine,
}

/// Joins what two names, of commits or of machines, have in common: verb, model, cell and levers; for commits also the
/// machine.
///
/// # Errors
/// Inside: nothing is known of one of them. Outside: the database cannot be read.
pub fn compare(
    database: &Database,
    filter: &Filter,
    [a, b]: [&str; 2],
) -> Result<Result<Vec<Pair>, Complaint>, RecordError> {
    let (rows_a, side_a) = match side(database, filter, a)? {
        Ok(found) => found,
        Err(complaint) => return Ok(Err(complaint)),
    };
    let (rows_b, side_b) = match side(database, filter, b)? {
        Ok(found) => found,
        Err(complaint) => return Ok(Err(complaint)),
    };
    let commits = matches!((side_a, side_b), (Side::Commit, Side::Commit));
    let key = |row: &Measurement| {
        let machine = if commits { row.entry.machine_key.clone() } else { String::new() };
        (row.key(), machine)
    };
    let newest = |rows: Vec<Measurement>| {
        let mut newest = BTreeMap::new();
        // The newest come first.
        for row in rows {
            newest.entry(key(&row)).or_insert(row);
        }
        newest
    };
    let (rows_a, rows_b) = (newest(rows_a), newest(rows_b));
    let mut pairs = Vec::new();
    for (key, a) in &rows_a {
        let Some(b) = rows_b.get(key) else { continue };
        for (name, figure) in a.main_figures() {
            if let Some(value) = b.figures.get(name) {
                pairs.push(pair(a, b, name, figure, value));
            }
        }
    }
    Ok(Ok(pairs))
}

fn pair(a: &Measurement, b: &Measurement, name: &str, figure: &Figure, value: f64) -> Pair {
    let ratio = value / figure.value;
    Pair {
        verb: a.entry.verb.clone(),
        model: a.model_name(),
        label: a.entry.label.clone(),
        figure: name.to_owned(),
        unit: figure.unit.clone(),
        machine: a.entry.machine_key.clone(),
        a: figure.value,
        b: value,
        ratio: Some(ratio).filter(|ratio| ratio.is_finite()),
        quiet: !a.entry.forced && !b.entry.forced,
    }
}

/// The rows of a commit, else of a machine.
fn side(
    database: &Database,
    filter: &Filter,
    name: &str,
) -> Result<Result<(Vec<Measurement>, Side), Complaint>, RecordError> {
    let filter = Filter { limit: None, ..filter.clone() };
    let commit = Filter { commit: Some(name.to_owned()), ..filter.clone() };
    let machine = Filter { machine: Some(name.to_owned()), ..filter };
    for (filter, side) in [(commit, Side::Commit), (machine, Side::Machine)] {
        let rows = select(database, &filter)?;
        if !rows.is_empty() && !name.is_empty() {
            return Ok(Ok((rows, side)));
        }
    }
    Ok(Err(Complaint::failure(format!("no commit or machine called `{name}` was measured"))
        .hint("`mlx-bun evals` lists what was")))
}

#[cfg(test)]
mod tests {
    use super::super::measurement::tests::database;
    use super::*;

    #[test]
    fn commits_are_compared_on_one_machine_and_machines_across_commits() {
        let folder = tempfile::tempdir().unwrap();
        let database = database(folder.path());
        let pairs = |sides| compare(&database, &Filter::default(), sides).unwrap();
        let commits = pairs(["aaaa", "bbbb"]).unwrap();
        let rate = commits.iter().find(|pair| pair.figure == "generation_tps").unwrap();
        assert_eq!((rate.a, rate.b, rate.ratio), (10.0, 12.0, Some(1.2)));
        assert_eq!((rate.machine.as_str(), rate.model.as_str()), ("m1", "org/name"));
        let machines = pairs(["m1", "m2"]).unwrap();
        let rate = machines.iter().find(|pair| pair.figure == "generation_tps").unwrap();
        assert_eq!((rate.a, rate.b), (12.0, 30.0));
        assert!(pairs(["aaaa", "cccc"]).unwrap_err().to_string().contains("`cccc`"));
        assert!(pairs(["", "m1"]).is_err());
    }
}
