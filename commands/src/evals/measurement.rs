//! Rows of all tables in one shape: what they share, which model it was, and their numbers by name.

use std::collections::{BTreeMap, BTreeSet};

use mlx_bun::record::{Cell, Figures};
use mlx_bun::record::{
    CellKind, Database, Entry, Figure, Filter, LoadRun, QualityRun, RecordError, Recorded, Run, Table,
};
use serde_json::Value;

use crate::recorder::{is_slowed, model_name};

/// A row of any table.
#[derive(Clone, Debug)]
pub struct Measurement {
    /// The table.
    pub table: &'static str,
    /// What all tables have.
    pub entry: Entry,
    /// The model's folder, file or name.
    pub model: String,
    /// Its numbers: those of `figures`, and those of the table's own columns under other names.
    pub figures: Figures,
    /// The whole row, for `--raw`.
    pub raw: Value,
}

/// Rows that a filter takes, the newest first.
///
/// # Errors
/// The database cannot be read.
pub fn select(database: &Database, filter: &Filter) -> Result<Vec<Measurement>, RecordError> {
    let mut found = Vec::new();
    found.extend(database.select::<Run>(filter)?.iter().map(Measurement::of));
    found.extend(database.select::<LoadRun>(filter)?.iter().map(Measurement::of));
    found.extend(database.select::<QualityRun>(filter)?.iter().map(Measurement::of));
    found.sort_by_key(|row: &Measurement| std::cmp::Reverse((row.entry.ts, row.entry.id)));
    found.truncate(filter.limit.unwrap_or(usize::MAX));
    Ok(found)
}

impl Measurement {
    fn of<T: Table + serde::Serialize>(recorded: &Recorded<T>) -> Self {
        let mut figures = recorded.entry.figures.clone();
        for (column, cell) in T::COLUMNS.iter().zip(recorded.row.cells()) {
            let value = match (column.kind, cell) {
                (CellKind::Integer, Cell::Integer(value)) => value as f64,
                (CellKind::Real, Cell::Real(value)) => value,
                _ => continue,
            };
            // The verbs write these once more, under the same name or with a spread beside them.
            let twice = match column.name {
                "prefill_tps" => figures.get("prompt_tps").is_some(),
                "decode_tps" => figures.get("generation_tps").is_some(),
                "kl_mean" => figures.get("kl").is_some(),
                name => figures.get(name).is_some(),
            };
            if !twice {
                figures.add(column.name, value, unit(column.name));
            }
        }
        Self {
            table: T::NAME,
            entry: recorded.entry.clone(),
            model: recorded.row.model().to_owned(),
            figures,
            raw: serde_json::to_value(recorded).unwrap_or_default(),
        }
    }

    /// The model's name without its place.
    pub fn model_name(&self) -> String {
        model_name(&self.model)
    }

    /// The commit, as short as people write it.
    pub fn commit(&self) -> String {
        let Some(commit) = &self.entry.commit_sha else { return "-".to_owned() };
        let (hash, dirty) = match commit.strip_suffix("-dirty") {
            Some(hash) => (hash, "+"),
            None => (commit.as_str(), ""),
        };
        format!("{}{dirty}", hash.chars().take(10).collect::<String>())
    }

    /// Rows with the same one measured the same thing: verb, model, cell, and levers that were active.
    pub fn key(&self) -> String {
        let flags: Vec<String> =
            self.flags().into_iter().map(|(name, value)| format!("{name}={value}")).collect();
        [self.cell_key(), flags.join(" ")].join("\u{1f}")
    }

    /// Rows with the same one look alike, but for their flags.
    fn cell_key(&self) -> String {
        let entry = &self.entry;
        [entry.stack.as_str(), &entry.verb, &self.model_name(), &entry.label].join("\u{1f}")
    }

    /// The flags and levers, each by its path, but for the file of the program, which the commit stands for.
    fn flags(&self) -> BTreeMap<String, String> {
        let mut found = BTreeMap::new();
        flatten("", &self.entry.flags, &mut found);
        found.remove(EXECUTABLE);
        found
    }

    /// Whether something slowed it down on purpose, so that its numbers say nothing about the program.
    pub fn is_debugged(&self) -> bool {
        is_slowed(&self.entry.flags)
    }

    /// The numbers that people look at: no spread of others, no settings.
    pub fn main_figures(&self) -> impl Iterator<Item = (&str, &Figure)> {
        self.figures.iter().filter(|(name, _)| {
            let beside = ["_sd", "_mean", "_standard_error"]
                .iter()
                .any(|end| name.strip_suffix(end).is_some_and(|name| self.figures.get(name).is_some()));
            !beside && !SETTINGS.contains(name)
        })
    }
}

/// What tells each row's flags from those of others here that look like it: `cpu_precision=exact`; nothing where there
/// are no such others.
pub fn distinctions(rows: &[&Measurement]) -> Vec<String> {
    let all: Vec<_> = rows.iter().map(|row| (row.cell_key(), row.flags())).collect();
    // Of rows that look alike: the flags of the first, and the names of those that some other has otherwise.
    let mut groups: BTreeMap<&str, (&BTreeMap<String, String>, BTreeSet<&String>)> = BTreeMap::new();
    for (key, flags) in &all {
        let (first, differing) = groups.entry(key).or_insert_with(|| (flags, BTreeSet::new()));
        let names = first.keys().chain(flags.keys());
        differing.extend(names.filter(|name| first.get(*name) != flags.get(*name)));
    }
    let text = |(key, flags): &(String, BTreeMap<String, String>)| {
        let names = groups.get(key.as_str()).into_iter().flat_map(|(_, differing)| differing);
        let value = |name: &&String| flags.get(*name).map_or("-", String::as_str);
        names.map(|name| format!("{name}={}", value(name))).collect::<Vec<_>>().join(" ")
    };
    all.iter().map(text).collect()
}

/// The leaves of a value, by their paths; what is null is not there.
fn flatten(path: &str, value: &Value, into: &mut BTreeMap<String, String>) {
    let below = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
    match value {
        Value::Null => {}
        Value::Object(fields) => fields.iter().for_each(|(name, value)| flatten(&below(name), value, into)),
        Value::String(text) => drop(into.insert(path.to_owned(), text.clone())),
        other => drop(into.insert(path.to_owned(), other.to_string())),
    }
}

/// A flag that says which file the program was.
const EXECUTABLE: &str = "executable";

/// Columns that say what was asked for.
const SETTINGS: [&str; 9] = [
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "batch",
    "concurrency",
    "target_rpm",
    "max_tokens",
    "n_samples",
    "requests_ok",
];

/// What a column of numbers counts, by its name.
fn unit(name: &str) -> &'static str {
    let ends = [
        ("_tps", "tok/s"),
        ("_ms", "ms"),
        ("_bytes", "bytes"),
        ("_s", "s"),
        ("pct", "%"),
        ("_gb", "GiB"),
        ("_rpm", "/min"),
    ];
    ends.iter().find(|(end, _)| name.ends_with(end)).map_or("", |(_, unit)| unit)
}

/// A number for people, with its unit: bytes as GB, the rest with as few digits as matter.
pub fn shown(figure: &Figure) -> String {
    let (value, unit) = match figure.unit.as_str() {
        "bytes" if figure.value.abs() >= 1e9 => (figure.value / 1e9, "GB"),
        "bytes" => (figure.value / 1e6, "MB"),
        unit => (figure.value, unit),
    };
    let size = value.abs();
    let digits = if size >= 100.0 {
        1
    } else if size >= 1.0 {
        2
    } else {
        4
    };
    let text = match size {
        0.0 => "0".to_owned(),
        _ if size < 1e-3 => format!("{value:.2e}"),
        _ => format!("{value:.digits$}"),
    };
    if unit.is_empty() { text } else { format!("{text} {unit}") }
}

#[cfg(test)]
pub mod tests {
    use std::path::Path;

    use mlx_bun::record::Database;
    use serde_json::json;

    use super::*;

    /// A database with a row of each kind of `benchmark` that the tests ask about.
    pub fn database(folder: &Path) -> Database {
        let database = Database::open(&folder.join("evals.sqlite")).unwrap();
        for (ts, commit, machine, rate) in
            [(1000, "aaaa1111", "m1", 10.0), (2000, "bbbb2222", "m1", 12.0), (3000, "bbbb2222", "m2", 30.0)]
        {
            let mut figures = Figures::default();
            figures.add("generation_tps", rate, "tok/s");
            figures.add("generation_tps_sd", 0.5, "tok/s");
            let entry = Entry {
                ts,
                verb: "benchmark".to_owned(),
                label: "tg128 b1".to_owned(),
                stack: "mlx-bun".to_owned(),
                build: "release".to_owned(),
                commit_sha: Some(commit.to_owned()),
                machine_key: machine.to_owned(),
                machine: serde_json::json!({"cpu": "A | B", "logical_cores": 2, "ram_bytes": 8u64 << 30}),
                figures,
                ..Entry::default()
            };
            let row = Run {
                model_path: "/c/models--org--name/snapshots/abc".to_owned(),
                decode_tps: Some(rate),
                peak_bytes: Some(2_000_000_000),
                ..Run::default()
            };
            database.insert(&entry, &row).unwrap();
        }
        let row =
            QualityRun { model_path: "/m/tiny.gguf".to_owned(), pct: Some(50.0), ..QualityRun::default() };
        let entry = Entry { ts: 500, verb: "eval".to_owned(), ..Entry::default() };
        database.insert(&entry, &row).unwrap();
        database
    }

    #[test]
    fn rows_of_all_tables_are_one_list() {
        let folder = tempfile::tempdir().unwrap();
        let database = database(folder.path());
        let rows = select(&database, &Filter::default()).unwrap();
        let times: Vec<_> = rows.iter().map(|row| row.entry.ts).collect();
        assert_eq!(times, [3000, 2000, 1000, 500]);
        assert_eq!((rows[0].model_name().as_str(), rows[3].model_name().as_str()), ("org/name", "tiny.gguf"));
        let names: Vec<_> = rows[0].main_figures().map(|(name, _)| name).collect();
        assert_eq!(names, ["generation_tps", "peak_bytes"]);
        assert_eq!(rows[3].figures.get("pct"), Some(50.0));
        assert_eq!(select(&database, &Filter { limit: Some(2), ..Filter::default() }).unwrap().len(), 2);
    }

    fn with_flags(flags: Value) -> Measurement {
        let entry = Entry { verb: "benchmark".to_owned(), label: "x".to_owned(), flags, ..Entry::default() };
        let (figures, raw) = (Figures::default(), Value::Null);
        Measurement { table: "runs", entry, model: "m".to_owned(), figures, raw }
    }

    #[test]
    fn rows_that_look_alike_are_told_apart_by_their_flags() {
        let rows = [
            with_flags(json!({"l1": false, "settings": {"batch": 4}, "executable": "1"})),
            with_flags(json!({"l1": true, "settings": {"batch": 4}, "executable": "2"})),
            with_flags(json!({"l1": false, "settings": {"batch": 4, "words": 30}, "executable": "3"})),
        ];
        assert_eq!(
            distinctions(&rows.iter().collect::<Vec<_>>()),
            ["l1=false settings.words=-", "l1=true settings.words=-", "l1=false settings.words=30"]
        );
        assert_eq!(distinctions(&[&rows[0]]), [""]);
        // Another build of the same is the same cell; other flags are another one.
        let built_again = with_flags(json!({"l1": false, "settings": {"batch": 4}, "executable": "9"}));
        assert_eq!(rows[0].key(), built_again.key());
        assert_ne!(rows[0].key(), rows[1].key());
    }

    #[test]
    fn what_was_slowed_down_on_purpose_is_seen_wherever_it_says_so() {
        for flags in [
            json!({"MLX_BUN_DEBUG_STEP_DELAY_MS": "20"}),
            json!({"settings": {"environment": {"MLX_BUN_DEBUG_STEP_DELAY_MS": "20"}}}),
            json!({"b": {"environment": [["MLX_BUN_DEBUG_STEP_DELAY_MS", "20"]]}}),
        ] {
            assert!(with_flags(flags.clone()).is_debugged(), "{flags}");
        }
        let usual = json!({"l1": true, "environment": {"MLX_BUN_CPU_ISA": "avx2"}});
        assert!(!with_flags(usual).is_debugged());
    }

    #[test]
    fn numbers_are_shown_with_their_units() {
        for (value, unit, text) in [
            (2e9, "bytes", "2.00 GB"),
            (5e6, "bytes", "5.00 MB"),
            (123.456, "tok/s", "123.5 tok/s"),
            (0.25, "", "0.2500"),
            (0.0, "nats", "0 nats"),
            (1e-5, "nats", "1.00e-5 nats"),
        ] {
            assert_eq!(shown(&Figure { value, unit: unit.to_owned() }), text);
        }
    }
}
