//! The tables' columns, a struct each. A column is declared once; the rest follows from its type.

use std::collections::BTreeMap;

use rusqlite::Row;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::cell::{Cell, Column, Field};

/// A struct whose fields are columns.
pub trait Columns: Sized {
    /// In the order of the fields.
    const COLUMNS: &'static [Column];

    /// The values, in that order.
    fn cells(&self) -> Vec<Cell>;

    /// Of a row that has these columns by name.
    ///
    /// # Errors
    /// A column is missing.
    fn read(row: &Row) -> rusqlite::Result<Self>;
}

/// The columns that only one table has.
pub trait Table: Columns {
    /// Its name.
    const NAME: &'static str;
    /// The column that says which model it was.
    const MODEL: &'static str;

    /// Which model it was.
    fn model(&self) -> &str;
}

macro_rules! columns {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, Default, PartialEq, Serialize)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
        }

        impl Columns for $name {
            const COLUMNS: &'static [Column] =
                &[$(Column { name: stringify!($field), kind: <$type as Field>::KIND }),*];

            fn cells(&self) -> Vec<Cell> {
                vec![$(self.$field.to_cell()),*]
            }

            fn read(row: &Row) -> rusqlite::Result<Self> {
                Ok(Self { $($field: Field::from_sql(row.get_ref(stringify!($field))?)),* })
            }
        }
    };
}

/// A number that was found, and what it counts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// The number; finite.
    pub value: f64,
    /// Its unit: `tok/s`, `ms`, `bytes`, `%`.
    pub unit: String,
}

/// Numbers by name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Figures(BTreeMap<String, Figure>);

impl Figures {
    /// Adds a number; one that is not finite is left out, since JSON has none.
    pub fn add(&mut self, name: &str, value: f64, unit: &str) {
        if value.is_finite() {
            self.0.insert(name.to_owned(), Figure { value, unit: unit.to_owned() });
        }
    }

    /// A number.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.0.get(name).map(|figure| figure.value)
    }

    /// All, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Figure)> {
        self.0.iter().map(|(name, figure)| (name.as_str(), figure))
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

columns! {
    /// What measured a row, where and how: the columns that all tables have.
    Entry {
        /// Counts the rows of a table; given by the database.
        id: i64,
        /// Milliseconds since 1970; 0 for the moment of writing.
        ts: i64,
        /// The verb that measured it.
        verb: String,
        /// Which cell of its matrix it is; rows of the same verb, model and label are comparable.
        label: String,
        /// What was measured: `mlx-bun`, or another server's name.
        stack: String,
        /// Commit of the build, with `-dirty` behind it when its sources had changes.
        commit_sha: Option<String>,
        /// `release` or `debug`.
        build: String,
        /// Version of MLX.
        mlx_version: Option<String>,
        /// `cpu`, `metal` or `cuda`.
        backend: Option<String>,
        /// Name of the processor or GPU that computed.
        device: Option<String>,
        /// Short name of the machine ([`MachineIdentity::key`](super::MachineIdentity)).
        machine_key: String,
        /// The machine ([`MachineIdentity`](super::MachineIdentity)).
        machine: Value,
        /// Whether it was quiet ([`MachineState`](super::MachineState)).
        machine_state: Value,
        /// Measured although the machine was not quiet.
        forced: bool,
        /// Levers and flags that were active, by name.
        flags: Value,
        /// Threads of our CPU kernels; none on a GPU.
        threads: Option<u64>,
        /// The numbers.
        figures: Figures,
        /// What they were made of: arrays of numbers by name.
        samples: Value,
        /// Anything else.
        notes: Option<String>,
    }
}

columns! {
    /// A model at work (table `runs`).
    Run {
        /// The model's folder or file.
        model_path: String,
        /// Tokens of the prompt.
        prompt_tokens: Option<u64>,
        /// Of these, already in a cache.
        cached_tokens: Option<u64>,
        /// Tokens that were generated, of all rows of a batch.
        generated_tokens: Option<u64>,
        /// Tokens of prompts a second.
        prefill_tps: Option<f64>,
        /// Generated tokens a second.
        decode_tps: Option<f64>,
        /// Peak memory in bytes.
        peak_bytes: Option<u64>,
        /// What was predicted of it.
        predicted_peak_bytes: Option<u64>,
        /// What was predicted of generated tokens a second.
        predicted_decode_tps: Option<f64>,
    }
}

columns! {
    /// A server under the requests of clients (table `load_runs`).
    LoadRun {
        /// The model's name.
        model_id: String,
        /// Where the server is.
        base_url: String,
        /// `closed-loop` or `open-loop`.
        mode: String,
        /// Clients.
        concurrency: Option<u64>,
        /// Requests a minute that were to be sent.
        target_rpm: Option<f64>,
        /// Tokens that a reply may have.
        max_tokens: Option<u64>,
        /// Requests that were answered.
        requests_ok: Option<u64>,
        /// Requests that failed.
        requests_err: Option<u64>,
        /// Seconds.
        duration_s: Option<f64>,
        /// Median time to the first token, in milliseconds.
        ttft_p50_ms: Option<f64>,
        /// Its 95th percentile.
        ttft_p95_ms: Option<f64>,
        /// Median time of a request, in milliseconds.
        e2e_p50_ms: Option<f64>,
        /// Its 95th percentile.
        e2e_p95_ms: Option<f64>,
        /// Its 99th percentile.
        e2e_p99_ms: Option<f64>,
        /// Tokens a second of all requests.
        agg_tps: Option<f64>,
        /// Tokens a second of one request.
        per_req_tps: Option<f64>,
        /// Requests a minute that were answered.
        achieved_rpm: Option<f64>,
        /// Peak memory in bytes.
        peak_bytes: Option<u64>,
    }
}

columns! {
    /// What a model knows, or how far it strays from another (table `quality_runs`).
    QualityRun {
        /// The model's folder or file.
        model_path: String,
        /// `perplexity`, `mmlu`, `kl` and so on.
        task: String,
        /// Active levers and settings of the task.
        config_json: Value,
        /// Samples.
        n_samples: Option<u64>,
        /// Score in percent.
        pct: Option<f64>,
        /// Mean KL divergence in nats a token.
        kl_mean: Option<f64>,
        /// Its median.
        kl_median: Option<f64>,
        /// Its 95th percentile.
        kl_p95: Option<f64>,
        /// The model it was measured from.
        kl_ref: Option<String>,
        /// Unweighted mean of the tasks' scores.
        capability_score: Option<f64>,
        /// Size of the weights in GiB.
        disk_gb: Option<f64>,
    }
}

macro_rules! table {
    ($row:ident, $name:literal, $model:ident) => {
        impl Table for $row {
            const NAME: &'static str = $name;
            const MODEL: &'static str = stringify!($model);

            fn model(&self) -> &str {
                &self.$model
            }
        }
    };
}

table!(Run, "runs", model_path);
table!(LoadRun, "load_runs", model_id);
table!(QualityRun, "quality_runs", model_path);

/// A row of a table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Recorded<T> {
    /// What all tables have.
    #[serde(flatten)]
    pub entry: Entry,
    /// What this one has.
    #[serde(flatten)]
    pub row: T,
}

impl<T: Table> Recorded<T> {
    /// The table's columns.
    pub fn columns() -> impl Iterator<Item = &'static Column> {
        Entry::COLUMNS.iter().chain(T::COLUMNS)
    }

    pub(super) fn read(row: &Row) -> rusqlite::Result<Self> {
        Ok(Self { entry: Entry::read(row)?, row: T::read(row)? })
    }

    /// The values, in the columns' order.
    pub fn cells(&self) -> Vec<Cell> {
        let mut cells = self.entry.cells();
        cells.extend(self.row.cells());
        cells
    }
}
