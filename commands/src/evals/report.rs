//! The page of numbers: the newest of each, with machine and commit beside it.

use std::collections::BTreeMap;
use std::fmt::Write;

use mlx_bun::record::{MachineIdentity, shown_time};

use super::measurement::{Measurement, distinctions, shown};

/// How the page begins; a file that does not is not replaced.
pub const NOTICE: &str = "<!-- Written by `mlx-bun evals report`; measure again instead of editing. -->\n";

/// The page, of rows with the newest first.
///
/// # Errors
/// None; writing to a string cannot fail.
pub fn page(rows: &[Measurement]) -> Result<String, std::fmt::Error> {
    let mut newest: BTreeMap<(&str, String), &Measurement> = BTreeMap::new();
    for row in rows.iter().filter(|row| !row.is_debugged()) {
        newest.entry((&row.entry.machine_key, row.key())).or_insert(row);
    }
    let mut machines: BTreeMap<&str, Vec<&Measurement>> = BTreeMap::new();
    for ((machine, _), row) in newest {
        machines.entry(machine).or_default().push(row);
    }
    let mut page = format!("{NOTICE}\n# Benchmarks\n\n");
    page.push_str(
        "The newest measurement of each cell, from the database that `benchmark`, `bench-matrix`, `ab`, `eval` and \
         `perplexity` write. Rates are medians of the trials. A `+` behind a commit says that its sources had \
         changes; a `*` behind a date that the machine was busy, so that only ratios of neighbours mean anything. *flags* \
         has what tells rows of the same cell apart. Rows that a debugging lever slowed down are left out.\n",
    );
    for (key, mut rows) in machines {
        write!(page, "\n## {}\n\n", if key.is_empty() { "Unknown machine" } else { key })?;
        if let Some(row) = rows.first() {
            writeln!(page, "{}", described(row))?;
        }
        page.push_str(
            "\n| verb | model | cell | flags | figures | stack | commit | MLX | machine | date |\n",
        );
        page.push_str("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n");
        rows.sort_by_cached_key(|row| (row.entry.verb.clone(), row.model_name(), natural(&row.entry.label)));
        let flags = distinctions(&rows);
        for (row, flags) in rows.into_iter().zip(flags) {
            let entry = &row.entry;
            let figures: Vec<_> =
                row.main_figures().map(|(name, figure)| format!("{name} {}", shown(figure))).collect();
            let cells = [
                entry.verb.clone(),
                row.model_name(),
                entry.label.clone(),
                flags,
                figures.join("; "),
                entry.stack.clone(),
                row.commit(),
                entry.mlx_version.clone().unwrap_or_else(|| "-".to_owned()),
                entry.machine_key.clone(),
                format!("{}{}", &day(entry.ts), if entry.forced { "*" } else { "" }),
            ];
            writeln!(page, "| {} |", cells.map(|cell| cell.replace('|', "\\|")).join(" | "))?;
        }
    }
    Ok(page)
}

fn day(ts: i64) -> String {
    shown_time(ts).chars().take(10).collect()
}

/// A label's sorting key in which numbers count as such.
fn natural(label: &str) -> String {
    let mut key = String::new();
    let mut digits = String::new();
    for c in label.chars().chain(['\0']) {
        if c.is_ascii_digit() {
            digits.push(c);
            continue;
        }
        if !digits.is_empty() {
            key.push_str(&format!("{:0>12}", std::mem::take(&mut digits)));
        }
        key.push(c);
    }
    key
}

fn described(row: &Measurement) -> String {
    let Ok(machine) = serde_json::from_value::<MachineIdentity>(with_defaults(row)) else {
        return "Nothing more is known of this machine.".to_owned();
    };
    let mut parts = vec![machine.device().to_owned()];
    if machine.gpu.is_some() && machine.device() != machine.cpu {
        parts.push(machine.cpu.clone());
    }
    if let Some(cores) = machine.logical_cores {
        parts.push(format!("{cores} threads"));
    }
    if let Some(bytes) = machine.ram_bytes {
        parts.push(format!("{:.0} GiB of memory", bytes as f64 / (1u64 << 30) as f64));
    }
    parts.extend(machine.os);
    format!("{}.", parts.join(", "))
}

/// A machine as an older program wrote it lacks fields.
fn with_defaults(row: &Measurement) -> serde_json::Value {
    let mut whole = serde_json::to_value(MachineIdentity::default()).unwrap_or_default();
    if let (Some(whole), Some(known)) = (whole.as_object_mut(), row.entry.machine.as_object()) {
        whole.extend(known.clone());
    }
    whole
}

#[cfg(test)]
mod tests {
    use mlx_bun::record::Filter;
    use serde_json::json;

    use super::super::measurement::{select, tests::database};
    use super::*;

    #[test]
    fn every_number_has_its_machine_and_commit() {
        let folder = tempfile::tempdir().unwrap();
        let rows = select(&database(folder.path()), &Filter::default()).unwrap();
        let page = page(&rows).unwrap();
        assert!(page.starts_with(NOTICE));
        let numbers: Vec<_> = page.lines().filter(|line| line.contains("generation_tps")).collect();
        // Of two on m1 only the newer.
        assert_eq!(numbers.len(), 2, "{page}");
        assert!(numbers[0].contains("generation_tps 12.00 tok/s; peak_bytes 2.00 GB"), "{page}");
        assert!(numbers.iter().all(|line| line.contains("bbbb2222") && line.contains("| m")), "{page}");
        assert!(page.contains("A | B, 2 threads, 8 GiB of memory."), "{page}");
    }

    #[test]
    fn settings_are_told_apart_and_debugging_is_no_measurement() {
        let folder = tempfile::tempdir().unwrap();
        let rows = select(&database(folder.path()), &Filter::default()).unwrap();
        let with = |flags: serde_json::Value| {
            let mut row = rows[0].clone();
            row.entry.flags = flags;
            row
        };
        let (exact, auto) = (json!({"cpu_precision": "exact"}), json!({"cpu_precision": "auto"}));
        let slowed = json!({"cpu_precision": "auto", "MLX_BUN_DEBUG_STEP_DELAY_MS": "20"});
        let page = page(&[with(slowed), with(exact), with(auto)]).unwrap();
        assert!(!page.contains("DEBUG"), "{page}");
        for flags in ["| cpu_precision=exact |", "| cpu_precision=auto |"] {
            assert_eq!(page.matches(flags).count(), 1, "{page}");
        }
    }

    #[test]
    fn cells_are_in_the_order_of_their_numbers() {
        assert!(natural("pp512 b1") > natural("pp64 b8"));
        assert!(natural("pp64 b1") < natural("pp64 b10"));
    }
}
