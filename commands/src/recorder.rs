//! What measuring verbs write into the database of measurements, and what of a row is the same for all of them.

use std::path::Path;

use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::checkpoint::source::ModelSource;
use mlx_bun::mlx;
use mlx_bun::mlx::cpu_ops;
use mlx_bun::record::{Database, Entry, Figures, MachineIdentity, MachineState, Table};
use serde_json::{Map, Value, json};

use crate::args::numerics::Numerics;
use crate::env;
use crate::printer::Printer;
use crate::version;

/// Commit of this build, with `-dirty` behind it when its sources had changes; `None` outside a checkout.
pub fn commit() -> Option<&'static str> {
    Some(env!("MLX_BUN_COMMIT")).filter(|commit| !commit.is_empty())
}

/// Writes a verb's rows. Where the database cannot be used, a warning says so and measuring goes on without it.
pub struct Recorder {
    database: Option<Database>,
    entry: Entry,
    printer: Printer,
}

impl Recorder {
    /// Looks at the machine and opens this environment's database. `flags` are the verb's own settings; the levers of
    /// `numerics` are added to them.
    pub fn begin(verb: &str, numerics: &Numerics, mut flags: Map<String, Value>, printer: &Printer) -> Self {
        let database = Database::open(&Database::place(&Environment::of_process()));
        let database =
            database.map_err(|error| printer.warning(&format!("nothing is recorded: {error}"))).ok();
        let (identity, state) = (MachineIdentity::this(), MachineState::probe());
        flags.extend(levers(numerics));
        let entry = Entry {
            verb: verb.to_owned(),
            stack: "mlx-bun".to_owned(),
            commit_sha: commit().map(str::to_owned),
            build: if cfg!(debug_assertions) { "debug" } else { "release" }.to_owned(),
            mlx_version: Some(mlx::version()),
            backend: Some(version::backend().to_owned()),
            device: Some(identity.device().to_owned()),
            machine_key: identity.key.clone(),
            machine: serde_json::to_value(&identity).unwrap_or_default(),
            forced: !state.ok,
            machine_state: serde_json::to_value(&state).unwrap_or_default(),
            flags: Value::Object(flags),
            threads: cpu_ops::kernels().map(|kernels| kernels.pool().threads() as u64),
            ..Entry::default()
        };
        Self { database, entry, printer: printer.clone() }
    }

    /// What is wrong with the machine, a sentence each; rows are marked `forced` when there is anything.
    pub fn problems(&self) -> Vec<String> {
        let state: MachineState =
            serde_json::from_value(self.entry.machine_state.clone()).unwrap_or_default();
        state.problems
    }

    /// Writes nothing from now on.
    pub fn forget(&mut self) {
        self.database = None;
    }

    /// A row's shared columns.
    pub fn entry(&self, label: &str, figures: Figures, samples: Value) -> Entry {
        Entry { label: label.to_owned(), figures, samples, ..self.entry.clone() }
    }

    /// Writes a row; a failure is a warning, and the last attempt.
    pub fn record(&mut self, entry: &Entry, row: &impl Table) {
        let Some(database) = &self.database else { return };
        match database.insert(entry, row) {
            Ok(id) => self.printer.detail(&format!("recorded as {} of {}", id, database.path().display())),
            Err(error) => {
                self.printer.warning(&format!("nothing is recorded: {error}"));
                self.database = None;
            }
        }
    }
}

/// How rows name a model: its folder or file from the root, links resolved, as the registry has it.
pub fn recorded_path(source: &ModelSource) -> String {
    let path = source.path();
    path.canonicalize().unwrap_or_else(|_| path.to_owned()).to_string_lossy().into_owned()
}

/// Whether the flags of a row say that a debugging lever slowed it down, wherever they say so: its numbers say nothing
/// about the program.
pub fn is_slowed(flags: &Value) -> bool {
    flags.to_string().contains("MLX_BUN_DEBUG_")
}

/// A model's name without its place: the file's, the folder's, or the repository's for a snapshot of the hub.
pub fn model_name(model: &str) -> String {
    let path = Path::new(model);
    let repo =
        path.components().filter_map(|part| part.as_os_str().to_str()?.strip_prefix("models--")).next_back();
    match repo {
        Some(repo) => repo.replacen("--", "/", 1),
        None => path.file_name().map_or_else(|| model.to_owned(), |name| name.to_string_lossy().into_owned()),
    }
}

/// The levers that change how something is computed, by name.
pub fn levers(numerics: &Numerics) -> Map<String, Value> {
    let precision = numerics.cpu_kernels.then(|| numerics.cpu_precision.name());
    let levers = json!({
        "l1": numerics.l1,
        "compiled_activations": numerics.compiled_activations,
        "cpu_kernels": numerics.cpu_kernels,
        "cpu_precision": precision,
        "cpu_isa": env::get(env::MLX_BUN_CPU_ISA),
    });
    let mut levers = match levers {
        Value::Object(levers) => levers,
        _ => Map::new(),
    };
    // Only where it is set: rows without it are those that count.
    let delay = env::get(env::MLX_BUN_DEBUG_STEP_DELAY_MS);
    levers.extend(delay.map(|delay| (env::MLX_BUN_DEBUG_STEP_DELAY_MS.to_owned(), Value::from(delay))));
    levers
}
