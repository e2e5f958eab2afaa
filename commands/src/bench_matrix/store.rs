//! Cells in the database of measurements: written as they are measured, and found again.

use std::collections::BTreeSet;
use std::time::{SystemTime, UNIX_EPOCH};

use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::levers::LEVERS;
use mlx_bun::mlx::cpu::pool::default_threads;
use mlx_bun::record::{Database, Entry, Figures, Filter, Recorded, Table};
use serde_json::{Map, Value, json};

use super::baseline::{Baseline, Before};
use super::document::CellResult;
use crate::args::known;
use crate::args::numerics::{LeverArgs, Numerics, NumericsArgs};
use crate::env;
use crate::error::Complaint;
use crate::printer::Printer;
use crate::recorder::{Recorder, levers};

/// Older cells are measured again.
const FRESH: i64 = 36 * 3600 * 1000;

/// The database, seen by one run of a matrix.
pub struct Store {
    recorder: Recorder,
    /// For reading; `None` where it cannot be used.
    database: Option<Database>,
    /// Of every row: what is compared before numbers are.
    settings: Map<String, Value>,
    /// Flags of the user for every cell.
    flags: Vec<String>,
    stack: String,
    model: String,
}

/// What flags of a server or another verb say about arithmetic.
pub fn numerics_of(flags: &[String]) -> Numerics {
    let levers = LeverArgs { l1: false, compiled_activations: None, cpu_kernels: None, cpu_precision: None };
    let none = NumericsArgs { levers, threads: None };
    known::read::<NumericsArgs>(flags).unwrap_or(none).resolve(&mut Vec::new())
}

/// Levers that variables set, by variable.
pub fn levers_of_environment() -> Map<String, Value> {
    let set = |name: &str| env::get(name).map(|value| (name.to_owned(), Value::from(value)));
    LEVERS.iter().filter_map(|lever| set(lever.env?)).collect()
}

/// What the running program is, beside its commit: a build with changes is the same only while it is the same file.
fn executable() -> Option<String> {
    let metadata = std::fs::metadata(std::env::current_exe().ok()?).ok()?;
    let modified = metadata.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
    Some(format!("{}-{}", metadata.len(), modified.as_nanos()))
}

impl Store {
    /// Looks at the machine and opens the database.
    pub fn begin(
        verb: &str,
        (stack, model): (&str, &str),
        settings: &Map<String, Value>,
        flags: &[String],
        printer: &Printer,
    ) -> Self {
        let recorder = Recorder::begin(verb, &numerics_of(flags), Map::new(), printer);
        let database = Database::open(&Database::place(&Environment::of_process())).ok();
        Self {
            recorder,
            database,
            settings: settings.clone(),
            flags: flags.to_vec(),
            stack: stack.to_owned(),
            model: model.to_owned(),
        }
    }

    /// What is wrong with the machine.
    pub fn problems(&self) -> Vec<String> {
        self.recorder.problems()
    }

    /// What all rows have in common.
    pub fn entry(&self) -> Entry {
        self.recorder.entry("", Figures::default(), Value::Null)
    }

    /// Writes a cell.
    pub fn save<T: Table>(&mut self, cell: &CellResult, row: &T) {
        let mut flags = self.flags.clone();
        flags.extend(cell.flags.iter().cloned());
        let numerics = numerics_of(&flags);
        let mut of_row = levers(&numerics);
        of_row.insert("settings".to_owned(), Value::Object(self.settings.clone()));
        of_row.insert("cell".to_owned(), json!(stable(&cell.flags)));
        of_row.insert("executable".to_owned(), json!(executable()));
        let mut entry = self.recorder.entry(&cell.label, cell.figures.clone(), cell.samples.clone());
        entry.flags = Value::Object(of_row);
        entry.stack.clone_from(&self.stack);
        entry.notes.clone_from(&cell.note);
        (entry.ts, entry.forced) = (cell.measured_at, cell.forced);
        entry.threads = numerics.cpu_kernels.then(|| numerics.threads.unwrap_or_else(default_threads) as u64);
        self.recorder.record(&entry, row);
    }

    /// The newest row of a cell that may stand for a new one.
    pub fn fresh<T: Table>(&self, label: &str, flags: &[String]) -> Option<Recorded<T>> {
        let ours = self.entry();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
        let since = i64::try_from(now.as_millis()).ok()?.saturating_sub(FRESH);
        let filter = Filter { since: Some(since), ..self.filter(&ours, Some(label)) };
        let rows = self.database.as_ref()?.select::<T>(&filter).ok()?;
        let executable = json!(executable());
        rows.into_iter().find(|row| {
            let theirs = &row.entry;
            let clean = ours.commit_sha.as_ref().is_some_and(|commit| !commit.ends_with("-dirty"));
            // A debug build keeps the commit that it was begun at.
            let same_commit = clean && theirs.commit_sha == ours.commit_sha && ours.build == "release";
            let same_file = !executable.is_null() && theirs.flags["executable"] == executable;
            (same_commit || same_file)
                && theirs.machine_key == ours.machine_key
                && theirs.build == ours.build
                && theirs.flags["settings"] == Value::Object(self.settings.clone())
                && theirs.flags["cell"] == json!(stable(flags))
        })
    }

    /// What a commit measured on this machine with the same settings, the newest of each cell. A lever that only slows
    /// things down, for a test of this comparison, is no setting.
    ///
    /// # Errors
    /// The text stands for several commits.
    pub fn of_commit<T: Table>(&self, commit: &str) -> Result<Baseline, Complaint> {
        let ours = self.entry();
        let filter = Filter { commit: Some(commit.to_owned()), ..self.filter(&ours, None) };
        let rows = self.database.as_ref().and_then(|database| database.select::<T>(&filter).ok());
        let settings = Value::Object(without_delay(&self.settings));
        let mut rows = rows.unwrap_or_default();
        rows.retain(|row| {
            row.entry.machine_key == ours.machine_key
                && row.entry.build == ours.build
                && row.entry.flags["settings"] == settings
        });
        let hash = |row: &Recorded<T>| {
            row.entry.commit_sha.as_ref().map(|commit| commit.trim_end_matches("-dirty").to_owned())
        };
        let commits: BTreeSet<String> = rows.iter().filter_map(hash).collect();
        if commits.len() > 1 {
            let names: Vec<&str> = commits.iter().map(String::as_str).collect();
            return Err(Complaint::failure(format!("`--baseline {commit}` stands for several commits"))
                .hint(format!("write more of one: {}", names.join(", "))));
        }
        let mut found = Baseline::default();
        for row in rows {
            let Entry { label, figures, forced, ts: measured_at, .. } = row.entry;
            if !found.cells.iter().any(|before| before.label == label) {
                found.cells.push(Before { label, figures, forced, measured_at });
            }
        }
        Ok(found)
    }

    fn filter(&self, ours: &Entry, label: Option<&str>) -> Filter {
        Filter {
            verb: Some(ours.verb.clone()),
            model_path: Some(self.model.clone()),
            machine: Some(ours.machine_key.clone()),
            cell: label.map(str::to_owned),
            stack: Some(self.stack.clone()),
            ..Filter::default()
        }
    }
}

/// Settings without the lever that lets decode steps sleep.
fn without_delay(settings: &Map<String, Value>) -> Map<String, Value> {
    let mut settings = settings.clone();
    if let Some(Value::Object(levers)) = settings.get_mut("environment") {
        levers.remove(env::MLX_BUN_DEBUG_STEP_DELAY_MS);
    }
    settings
}

/// Flags without the names of temporary folders.
fn stable(flags: &[String]) -> Vec<String> {
    let temporary = std::env::temp_dir().display().to_string();
    flags
        .iter()
        .map(|flag| if flag.starts_with(&temporary) { "TEMP".to_owned() } else { flag.clone() })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_is_found_among_other_flags() {
        let numerics =
            |text: &str| numerics_of(&text.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
        assert!(!numerics("--batch 4").l1);
        assert!(numerics("--batch 1 --l1").l1);
        assert_eq!(numerics("--batch 4 --kv-quant 4 --threads 2").threads, Some(2));
        let precise = numerics("--cpu-precision exact --batch 2");
        assert_eq!(precise.cpu_precision, mlx_bun::mlx::cpu_ops::CpuPrecision::Exact);
    }

    #[test]
    fn temporary_folders_do_not_tell_cells_apart() {
        let folder = std::env::temp_dir().join("x").display().to_string();
        assert_eq!(stable(&["--adapter-path".to_owned(), folder]), ["--adapter-path", "TEMP"]);
    }
}
