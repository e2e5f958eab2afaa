//! The SQLite file. Unlike the registry it is no cache: nothing in it is ever thrown away, tables only grow columns.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rusqlite::types::Value as SqlValue;
use rusqlite::{Connection, ErrorCode, TransactionBehavior, params_from_iter};

use super::cell::Column;
use super::error::RecordError;
use super::rows::{Columns, Entry, LoadRun, QualityRun, Recorded, Run, Table};
use crate::checkpoint::environment::Environment;

/// Its name in the program's folder.
pub const FILE: &str = "evals.sqlite";
/// How long a writer waits for another.
const PATIENCE: Duration = Duration::from_secs(10);

/// Which rows are wanted. A text that is empty, and `None`, take all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// The verb.
    pub verb: Option<String>,
    /// Part of the model's path or name, in any case.
    pub model: Option<String>,
    /// The model's whole path or name.
    pub model_path: Option<String>,
    /// What a commit begins with.
    pub commit: Option<String>,
    /// Part of the machine's key.
    pub machine: Option<String>,
    /// Part of the label.
    pub label: Option<String>,
    /// The whole label.
    pub cell: Option<String>,
    /// What was measured, such as `mlx-bun`.
    pub stack: Option<String>,
    /// Milliseconds since 1970; older rows are left out.
    pub since: Option<i64>,
    /// The newest so many.
    pub limit: Option<usize>,
}

/// The measurements.
#[derive(Debug)]
pub struct Database {
    connection: Connection,
    path: PathBuf,
}

impl Database {
    /// Where an environment's database is: `evals.sqlite` where the program keeps its models
    /// ([`Environment::mlx_bun_cache`]).
    pub fn place(environment: &Environment) -> PathBuf {
        environment.mlx_bun_cache().join(FILE)
    }

    /// Opens the database of a file, which is made if need be; tables of older programs get the columns they lack.
    ///
    /// # Errors
    /// The file is something else, or cannot be written.
    pub fn open(path: &Path) -> Result<Self, RecordError> {
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            fs::create_dir_all(folder)
                .map_err(|cause| RecordError::Folder { path: path.to_owned(), cause })?;
        }
        let opened = Connection::open(path).and_then(|mut connection| {
            connection.busy_timeout(PATIENCE)?;
            // A file system without shared memory keeps the old journal, which is as safe.
            connection.query_row("PRAGMA journal_mode = WAL", [], |_| Ok(()))?;
            connection.pragma_update(None, "synchronous", "NORMAL")?;
            migrate(&mut connection)?;
            Ok(connection)
        });
        match opened {
            Ok(connection) => Ok(Self { connection, path: path.to_owned() }),
            Err(cause) if cause.sqlite_error_code() == Some(ErrorCode::NotADatabase) => {
                Err(RecordError::NotADatabase { path: path.to_owned() })
            }
            Err(cause) => Err(RecordError::Database { path: path.to_owned(), cause }),
        }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Adds a row and returns its id; `entry.id` is not looked at.
    ///
    /// # Errors
    /// The database cannot be written.
    pub fn insert<T: Table>(&self, entry: &Entry, row: &T) -> Result<i64, RecordError> {
        let mut entry = entry.clone();
        if entry.ts == 0 {
            entry.ts = now();
        }
        let (mut names, mut values): (Vec<&str>, Vec<SqlValue>) = (Vec::new(), Vec::new());
        let cells = entry.cells().into_iter().chain(row.cells());
        for (column, cell) in Recorded::<T>::columns().zip(cells).filter(|(column, _)| column.name != "id") {
            names.push(column.name);
            values.push(cell.into());
        }
        let holes = vec!["?"; names.len()].join(", ");
        let sql = format!("INSERT INTO {} ({}) VALUES ({holes})", T::NAME, names.join(", "));
        let inserted = self.connection.execute(&sql, params_from_iter(values));
        inserted.map_err(|cause| self.failed(cause))?;
        Ok(self.connection.last_insert_rowid())
    }

    /// Rows of a table, the newest first.
    ///
    /// # Errors
    /// The database cannot be read.
    pub fn select<T: Table>(&self, filter: &Filter) -> Result<Vec<Recorded<T>>, RecordError> {
        let (condition, values) = filter.sql(T::MODEL);
        let sql = format!("SELECT * FROM {} WHERE {condition} ORDER BY ts DESC, id DESC LIMIT ?", T::NAME);
        let limit = filter.limit.map_or(-1, |limit| i64::try_from(limit).unwrap_or(i64::MAX));
        let values = values.into_iter().chain([SqlValue::Integer(limit)]);
        let read = || -> rusqlite::Result<Vec<_>> {
            let mut query = self.connection.prepare(&sql)?;
            let rows = query.query_map(params_from_iter(values), |row| Recorded::read(row))?;
            rows.collect()
        };
        read().map_err(|cause| self.failed(cause))
    }

    /// Puts the database aside under a name with the time in it, and returns that; the next [`Database::open`] begins
    /// a new one. Nothing is deleted.
    ///
    /// # Errors
    /// Another program has it open, or it cannot be renamed.
    pub fn archive(self) -> Result<PathBuf, RecordError> {
        // One that keeps it open will still have it open in ten seconds.
        self.connection.busy_timeout(Duration::from_millis(500)).map_err(|cause| self.failed(cause))?;
        // The write-ahead log's rows go into the file, and none is left beside the next database.
        let mode: rusqlite::Result<String> =
            self.connection.query_row("PRAGMA journal_mode = DELETE", [], |row| row.get(0));
        match mode {
            Ok(mode) if mode != "wal" => {}
            Ok(_) => return Err(RecordError::InUse { path: self.path }),
            Err(cause) if is_busy(&cause) => return Err(RecordError::InUse { path: self.path }),
            Err(cause) => return Err(self.failed(cause)),
        }
        let to = unused_name(&self.path);
        // Nobody writes while it changes its name.
        self.connection.execute_batch("BEGIN EXCLUSIVE").map_err(|cause| self.failed(cause))?;
        match fs::rename(&self.path, &to) {
            Ok(()) => Ok(to),
            Err(cause) => Err(RecordError::Archive { path: self.path, to, cause }),
        }
    }

    fn failed(&self, cause: rusqlite::Error) -> RecordError {
        RecordError::Database { path: self.path.clone(), cause }
    }
}

impl Filter {
    /// A condition and the values of its holes.
    fn sql(&self, model: &str) -> (String, Vec<SqlValue>) {
        let text = |value: &Option<String>| value.clone().filter(|value| !value.is_empty());
        let conditions = [
            (text(&self.verb), "verb = ?".to_owned()),
            (text(&self.model), format!("instr(lower({model}), lower(?)) > 0")),
            (text(&self.model_path), format!("{model} = ?")),
            (text(&self.commit), "instr(commit_sha, lower(?)) = 1".to_owned()),
            (text(&self.machine), "instr(machine_key, lower(?)) > 0".to_owned()),
            (text(&self.label), "instr(lower(label), lower(?)) > 0".to_owned()),
            (text(&self.cell), "label = ?".to_owned()),
            (text(&self.stack), "stack = ?".to_owned()),
        ];
        let (mut parts, mut values) = (vec!["1".to_owned()], Vec::new());
        for (value, condition) in conditions {
            if let Some(value) = value {
                parts.push(condition);
                values.push(SqlValue::Text(value));
            }
        }
        if let Some(since) = self.since {
            parts.push("ts >= ?".to_owned());
            values.push(SqlValue::Integer(since));
        }
        (parts.join(" AND "), values)
    }
}

fn is_busy(error: &rusqlite::Error) -> bool {
    matches!(error.sqlite_error_code(), Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked))
}

/// Milliseconds since 1970.
fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// `evals-20260131T120000Z.sqlite`, with a number behind it when that is taken.
fn unused_name(path: &Path) -> PathBuf {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let extension =
        path.extension().map(|extension| format!(".{}", extension.to_string_lossy())).unwrap_or_default();
    let time = chrono::Utc::now().format("%Y%m%dT%H%M%SZ");
    let name = |number: u32| match number {
        0 => path.with_file_name(format!("{stem}-{time}{extension}")),
        _ => path.with_file_name(format!("{stem}-{time}-{number}{extension}")),
    };
    (0..u32::MAX).map(name).find(|name| !name.exists()).unwrap_or_else(|| name(u32::MAX))
}

/// Makes the tables, and adds the columns that an older program did not know.
fn migrate(connection: &mut Connection) -> rusqlite::Result<()> {
    let whole = |connection: &Connection| -> rusqlite::Result<bool> {
        Ok(missing::<Run>(connection)?.is_empty()
            && missing::<LoadRun>(connection)?.is_empty()
            && missing::<QualityRun>(connection)?.is_empty())
    };
    if whole(connection)? {
        return Ok(());
    }
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    complete::<Run>(&transaction)?;
    complete::<LoadRun>(&transaction)?;
    complete::<QualityRun>(&transaction)?;
    transaction.commit()
}

/// Columns that a table does not have; all of them when there is no table.
fn missing<T: Table>(connection: &Connection) -> rusqlite::Result<Vec<&'static Column>> {
    let mut query = connection.prepare("SELECT name FROM pragma_table_info(?1)")?;
    let names = query.query_map([T::NAME], |row| row.get::<_, String>(0))?;
    let names: Vec<String> = names.collect::<rusqlite::Result<_>>()?;
    Ok(Recorded::<T>::columns().filter(|column| !names.iter().any(|name| name == column.name)).collect())
}

fn complete<T: Table>(connection: &Connection) -> rusqlite::Result<()> {
    let table = T::NAME;
    connection.execute_batch(&format!(
        "CREATE TABLE IF NOT EXISTS {table} (id INTEGER PRIMARY KEY, ts INTEGER NOT NULL);"
    ))?;
    for column in missing::<T>(connection)? {
        // What is there without it was measured by this program's older self.
        let default = if column.name == "stack" { " DEFAULT 'mlx-bun'" } else { "" };
        let (name, kind) = (column.name, column.kind.sql());
        connection.execute_batch(&format!("ALTER TABLE {table} ADD COLUMN {name} {kind}{default};"))?;
    }
    connection.execute_batch(&format!("CREATE INDEX IF NOT EXISTS {table}_by_time ON {table} (ts);"))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use serde_json::json;

    use super::*;
    use crate::record::Figures;

    fn entry(label: &str) -> Entry {
        let mut figures = Figures::default();
        figures.add("decode", 12.5, "tok/s");
        figures.add("nothing", f64::NAN, "tok/s");
        Entry {
            verb: "benchmark".to_owned(),
            label: label.to_owned(),
            stack: "mlx-bun".to_owned(),
            commit_sha: Some("abcdef012345-dirty".to_owned()),
            machine_key: "intel-xeon-2c".to_owned(),
            machine: json!({"cores": 2}),
            flags: json!({"l1": false}),
            threads: Some(2),
            figures,
            samples: json!({"decode": [12.0, 13.0]}),
            forced: true,
            ..Entry::default()
        }
    }

    fn run(path: &str) -> Run {
        Run {
            model_path: path.to_owned(),
            prompt_tokens: Some(512),
            decode_tps: Some(12.5),
            prefill_tps: Some(f64::INFINITY),
            ..Run::default()
        }
    }

    #[test]
    fn a_row_comes_back_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let database = Database::open(&folder.path().join("new/evals.sqlite")).unwrap();
        let (entry, run) = (entry("pp512"), run("/m/model"));
        let id = database.insert(&entry, &run).unwrap();
        let found = database.select::<Run>(&Filter::default()).unwrap();
        assert_eq!(found.len(), 1);
        let found = &found[0];
        assert_eq!(found.entry.id, id);
        assert!(found.entry.ts > 1_700_000_000_000);
        assert_eq!(found.entry, Entry { id, ts: found.entry.ts, ..entry });
        assert_eq!(found.entry.figures.get("decode"), Some(12.5));
        assert_eq!(found.entry.figures.get("nothing"), None);
        assert_eq!(found.row, Run { prefill_tps: None, ..run });
        assert!(database.select::<LoadRun>(&Filter::default()).unwrap().is_empty());
    }

    #[test]
    fn filters_take_what_they_name() {
        let folder = tempfile::tempdir().unwrap();
        let database = Database::open(&folder.path().join("evals.sqlite")).unwrap();
        for (index, model) in ["/m/Llama-3", "/m/qwen3", "/m/llama-3-4bit"].iter().enumerate() {
            let mut entry = entry(&format!("tg{index}"));
            entry.ts = 1000 + index as i64;
            database.insert(&entry, &run(model)).unwrap();
        }
        let models = |filter: Filter| -> Vec<String> {
            let rows = database.select::<Run>(&filter).unwrap();
            rows.into_iter().map(|row| row.row.model_path).collect()
        };
        let text = |text: &str| Some(text.to_owned());
        let all = Filter::default;
        assert_eq!(models(all()), ["/m/llama-3-4bit", "/m/qwen3", "/m/Llama-3"]);
        assert_eq!(models(Filter { limit: Some(1), ..all() }), ["/m/llama-3-4bit"]);
        assert_eq!(models(Filter { model: text("LLAMA"), ..all() }), ["/m/llama-3-4bit", "/m/Llama-3"]);
        assert_eq!(models(Filter { model_path: text("/m/Llama-3"), ..all() }), ["/m/Llama-3"]);
        assert_eq!(models(Filter { cell: text("tg1"), ..all() }), ["/m/qwen3"]);
        assert_eq!(models(Filter { since: Some(1002), ..all() }), ["/m/llama-3-4bit"]);
        assert_eq!(models(Filter { commit: text("ABCDEF"), machine: text("xeon"), ..all() }).len(), 3);
        assert_eq!(models(Filter { commit: text("bcdef"), ..all() }).len(), 0);
        assert_eq!(models(Filter { model: text("%"), ..all() }).len(), 0);
        assert_eq!(models(Filter { verb: text("perplexity"), ..all() }).len(), 0);
        assert_eq!(models(Filter { model: text("' OR 1 --"), ..all() }).len(), 0);
    }

    #[test]
    fn the_file_of_an_older_program_gets_the_new_columns_and_keeps_its_rows() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("evals.sqlite");
        let old = Connection::open(&path).unwrap();
        old.execute_batch(
            "CREATE TABLE runs (id INTEGER PRIMARY KEY AUTOINCREMENT, ts INTEGER NOT NULL, model_path TEXT NOT NULL,
                commit_sha TEXT, prompt_tokens INTEGER, decode_tps REAL, notes TEXT, own TEXT);
             INSERT INTO runs (ts, model_path, prompt_tokens, decode_tps, own) VALUES (5, '/old', 7.0, 'fast', 'kept');",
        )
        .unwrap();
        drop(old);
        let database = Database::open(&path).unwrap();
        database.insert(&entry("new"), &run("/new")).unwrap();
        let rows = database.select::<Run>(&Filter::default()).unwrap();
        assert_eq!(rows.len(), 2);
        let old = rows.iter().find(|row| row.row.model_path == "/old").unwrap();
        assert_eq!((old.entry.ts, old.row.prompt_tokens, old.row.decode_tps), (5, Some(7), None));
        assert_eq!((old.entry.stack.as_str(), old.entry.verb.as_str()), ("mlx-bun", ""));
        drop(database);
        // Opened again, nothing is left to do; what it does not know is still there.
        let again = Database::open(&path).unwrap();
        let own: String =
            again.connection.query_row("SELECT own FROM runs WHERE ts = 5", [], |row| row.get(0)).unwrap();
        assert_eq!(own, "kept");
    }

    #[test]
    fn writers_wait_for_each_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("evals.sqlite");
        thread::scope(|scope| {
            for writer in 0..4 {
                let path = &path;
                scope.spawn(move || {
                    // Also the tables are made by all of them at once.
                    let database = Database::open(path).unwrap();
                    for index in 0..25 {
                        database.insert(&entry(&format!("{writer}-{index}")), &run("/m")).unwrap();
                    }
                });
            }
        });
        let rows = Database::open(&path).unwrap().select::<Run>(&Filter::default()).unwrap();
        let mut labels: Vec<_> = rows.into_iter().map(|row| row.entry.label).collect();
        labels.sort();
        labels.dedup();
        assert_eq!(labels.len(), 100);
    }

    #[test]
    fn an_archive_keeps_the_rows_and_a_new_file_begins() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("evals.sqlite");
        let mut archives = Vec::new();
        for label in ["one", "two"] {
            let database = Database::open(&path).unwrap();
            assert!(database.select::<Run>(&Filter::default()).unwrap().is_empty());
            database.insert(&entry(label), &run("/m")).unwrap();
            archives.push(database.archive().unwrap());
        }
        assert!(!path.exists());
        assert_ne!(archives[0], archives[1]);
        for (archive, label) in archives.iter().zip(["one", "two"]) {
            let rows = Database::open(archive).unwrap().select::<Run>(&Filter::default()).unwrap();
            assert_eq!(rows[0].entry.label, label);
        }
    }

    #[test]
    fn what_is_no_database_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("evals.sqlite");
        fs::write(&path, "my notes, which are longer than the hundred bytes of a header".repeat(20)).unwrap();
        let error = Database::open(&path).unwrap_err();
        assert!(matches!(error, RecordError::NotADatabase { .. }), "{error}");
        assert!(fs::read_to_string(&path).unwrap().starts_with("my notes"));
    }
}
