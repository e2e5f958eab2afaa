//! The registry's SQLite file. It is a cache: one that is broken or of another version is made anew.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, ErrorCode, OptionalExtension, Row, params};

use super::error::{QueryError, RegistryError};
use super::model::{Filter, Model, Tier, contains, is_drafter};
use super::scan::{Found, ScanReport, Scanner};
use crate::checkpoint::Config;
use crate::checkpoint::environment::Environment;
use crate::checkpoint::hub_cache::HubCache;

const FILE: &str = "registry.sqlite";
/// Counts the shapes that the tables have had.
const VERSION: i64 = 1;
const PATIENCE: Duration = Duration::from_secs(5);

const TABLES: &str = "
CREATE TABLE models (
    path TEXT PRIMARY KEY, stamp TEXT NOT NULL, repo_id TEXT NOT NULL, revision TEXT, canonical INTEGER NOT NULL,
    model_type TEXT NOT NULL, complete INTEGER NOT NULL, param_count INTEGER, size_bytes INTEGER NOT NULL,
    sidecar_bytes INTEGER NOT NULL, experts_bytes INTEGER NOT NULL, quant_bits INTEGER, quant_group_size INTEGER,
    quant_mode TEXT, has_vision_sidecar INTEGER NOT NULL, vision_config_type TEXT, has_audio_config INTEGER NOT NULL,
    has_audio_tower INTEGER NOT NULL, has_kv_config INTEGER NOT NULL, has_tool_template INTEGER NOT NULL,
    num_layers INTEGER, hidden_size INTEGER, vocab_size INTEGER, license TEXT, scanned_at INTEGER NOT NULL
) STRICT;
CREATE TABLE folders (path TEXT PRIMARY KEY) STRICT;";

/// The models on this machine.
#[derive(Debug)]
pub struct Registry {
    connection: Connection,
    path: PathBuf,
    cache: HubCache,
    own: PathBuf,
}

/// A model as an earlier scan left it.
pub(super) struct Stamped {
    pub model: Model,
    pub stamp: String,
}

impl Registry {
    /// Opens the registry of this environment. Where its file cannot be written, it is kept in memory.
    ///
    /// # Errors
    /// SQLite does not work at all.
    pub fn open(environment: &Environment) -> Result<Self, RegistryError> {
        let folder = environment.mlx_bun_cache();
        let path = folder.join(FILE);
        let failed = |cause| RegistryError::Database { path: path.clone(), cause };
        let on_disk = fs::create_dir_all(&folder).ok().and_then(|()| open_or_renew(&path));
        let connection = match on_disk {
            Some(connection) => connection,
            None => {
                let connection = Connection::open_in_memory().map_err(failed)?;
                prepare(&connection).map_err(failed)?;
                connection
            }
        };
        let (cache, own) = (HubCache::from_environment(environment), folder.join("models"));
        Ok(Self { connection, path, cache, own })
    }

    /// Brings the registry up to date: reads new and changed models, forgets those that are gone.
    ///
    /// # Errors
    /// The database or the cache's directory cannot be read.
    pub fn scan(&mut self) -> Result<ScanReport, RegistryError> {
        let known = self.known()?;
        let mut scanner = Scanner { known: &known, found: Vec::new(), skipped: Vec::new() };
        scanner.hub_cache(self.cache.root())?;
        scanner.user_folder(&self.own);
        for folder in self.folders()? {
            scanner.user_folder(&folder);
        }
        let (found, skipped) = (scanner.found, scanner.skipped);
        let read = found.iter().filter(|found| found.fresh).count();
        let failed = |cause| RegistryError::Database { path: self.path.clone(), cause };
        let transaction = self.connection.transaction().map_err(failed)?;
        let mut removed = 0;
        for path in known.keys().filter(|path| !found.iter().any(|found| found.model.path == **path)) {
            let gone = transaction.execute("DELETE FROM models WHERE path = ?1", [text(path)]);
            removed += gone.map_err(failed)?;
        }
        let changed =
            |found: &&Found| known.get(&found.model.path).is_none_or(|row| row.model != found.model);
        for found in found.iter().filter(|found| found.fresh || changed(found)) {
            store(&transaction, &found.model, &found.stamp).map_err(failed)?;
        }
        transaction.commit().map_err(failed)?;
        Ok(ScanReport { models: found.len(), read, removed, skipped })
    }

    fn known(&self) -> Result<HashMap<PathBuf, Stamped>, RegistryError> {
        Ok(self.rows()?.into_iter().map(|row| (row.model.path.clone(), row)).collect())
    }

    fn rows(&self) -> Result<Vec<Stamped>, RegistryError> {
        let failed = |cause| RegistryError::Database { path: self.path.clone(), cause };
        let mut query = self.connection.prepare("SELECT * FROM models").map_err(failed)?;
        let rows = query.query_map([], stamped).map_err(failed)?;
        rows.collect::<rusqlite::Result<_>>().map_err(failed)
    }

    /// Folders of the user's that scans look through.
    ///
    /// # Errors
    /// The database cannot be read.
    pub fn folders(&self) -> Result<Vec<PathBuf>, RegistryError> {
        let failed = |cause| RegistryError::Database { path: self.path.clone(), cause };
        let mut query = self.connection.prepare("SELECT path FROM folders ORDER BY path").map_err(failed)?;
        let rows = query.query_map([], |row| Ok(PathBuf::from(row.get::<_, String>(0)?))).map_err(failed)?;
        rows.collect::<rusqlite::Result<_>>().map_err(failed)
    }

    /// Has scans look through a folder from now on.
    ///
    /// # Errors
    /// It is no folder, or the database cannot be written.
    pub fn add_folder(&self, folder: &Path) -> Result<(), RegistryError> {
        let folder = folder
            .canonicalize()
            .ok()
            .filter(|folder| folder.is_dir())
            .ok_or_else(|| RegistryError::NotAFolder(folder.to_owned()))?;
        let added = self.connection.execute("INSERT OR IGNORE INTO folders VALUES (?1)", [text(&folder)]);
        added.map(|_| ()).map_err(|cause| RegistryError::Database { path: self.path.clone(), cause })
    }

    /// Has scans no longer look through a folder; says whether they did.
    ///
    /// # Errors
    /// The database cannot be written.
    pub fn remove_folder(&self, folder: &Path) -> Result<bool, RegistryError> {
        let folder = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
        let removed = self.connection.execute("DELETE FROM folders WHERE path = ?1", [text(&folder)]);
        removed
            .map(|count| count > 0)
            .map_err(|cause| RegistryError::Database { path: self.path.clone(), cause })
    }

    /// The models of the last scan that a filter takes and that are still there, smallest first.
    ///
    /// # Errors
    /// The database cannot be read.
    pub fn models(&self, filter: &Filter) -> Result<Vec<Model>, RegistryError> {
        let mut models: Vec<Model> = self
            .rows()?
            .into_iter()
            .map(|row| row.model)
            .filter(|model| filter.takes(model) && model.path.exists())
            .collect();
        models.sort_by(|a, b| {
            (a.total_bytes(), &a.repo_id, &a.path).cmp(&(b.total_bytes(), &b.repo_id, &b.path))
        });
        Ok(models)
    }

    /// The one model that a query means: part of a repository's name or of a model type, in any case. A whole name
    /// wins over names that it is a part of.
    ///
    /// # Errors
    /// Inside: nothing or several repositories match. Outside: the database cannot be read.
    pub fn resolve(&self, query: &str) -> Result<Result<Model, QueryError>, RegistryError> {
        let mut models = self.models(&Filter::default())?;
        models.retain(|model| !is_drafter(&model.model_type) && contains(model, query));
        if let Some(at) = models.iter().position(|model| model.repo_id.eq_ignore_ascii_case(query)) {
            return Ok(Ok(models.swap_remove(at)));
        }
        Ok(match models.len() {
            0 => Err(QueryError::NoMatch { query: query.to_owned() }),
            1 => Ok(models.swap_remove(0)),
            _ => {
                let mut repos: Vec<String> = models.into_iter().map(|model| model.repo_id).collect();
                repos.sort();
                Err(QueryError::Ambiguous { query: query.to_owned(), repos })
            }
        })
    }
}

/// The database of a file; a broken one is made anew once. `None` when it cannot be used.
fn open_or_renew(path: &Path) -> Option<Connection> {
    for _ in 0..2 {
        let opened = Connection::open(path).and_then(|connection| {
            connection.busy_timeout(PATIENCE)?;
            prepare(&connection)?;
            Ok(connection)
        });
        match opened {
            Ok(connection) => return Some(connection),
            Err(error) if is_broken(&error) => {
                // A journal of the broken file must not be applied to the new one.
                for suffix in ["", "-journal", "-wal", "-shm"] {
                    let mut file = path.as_os_str().to_owned();
                    file.push(suffix);
                    let _ = fs::remove_file(file);
                }
            }
            Err(_) => return None,
        }
    }
    None
}

fn is_broken(error: &rusqlite::Error) -> bool {
    matches!(error.sqlite_error_code(), Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt))
}

/// Makes the tables, anew if they are of another version.
fn prepare(connection: &Connection) -> rusqlite::Result<()> {
    let version = || connection.query_row("PRAGMA user_version", [], |row| row.get::<_, i64>(0));
    if version()? == VERSION {
        // Also finds a file that is broken behind its first page.
        connection.query_row("SELECT path FROM models LIMIT 1", [], |_| Ok(())).optional()?;
        return Ok(());
    }
    connection.execute_batch("BEGIN IMMEDIATE")?;
    // Another process may have been faster.
    if version()? != VERSION {
        let old = "DROP TABLE IF EXISTS models; DROP TABLE IF EXISTS folders;";
        connection.execute_batch(&format!("{old}{TABLES} PRAGMA user_version = {VERSION};"))?;
    }
    connection.execute_batch("COMMIT")
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn store(connection: &Connection, model: &Model, stamp: &str) -> rusqlite::Result<()> {
    let size = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
    connection
        .prepare(
            "INSERT OR REPLACE INTO models VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, \
             ?15, ?16, ?17, ?18, ?19, ?20, ?21, ?22, ?23, ?24, ?25)",
        )?
        .execute(params![
            text(&model.path),
            stamp,
            model.repo_id,
            model.revision,
            model.canonical,
            model.model_type,
            model.complete,
            model.param_count.map(size),
            size(model.size_bytes),
            size(model.sidecar_bytes),
            size(model.experts_bytes),
            model.quant_bits,
            model.quant_group_size,
            model.quant_mode,
            model.has_vision_sidecar,
            model.vision_config_type,
            model.has_audio_config,
            model.has_audio_tower,
            model.has_kv_config,
            model.has_tool_template,
            model.num_layers.map(size),
            model.hidden_size.map(size),
            model.vocab_size.map(size),
            model.license,
            model.scanned_at,
        ])
        .map(|_| ())
}

fn stamped(row: &Row) -> rusqlite::Result<Stamped> {
    let number = |name: &str| -> rusqlite::Result<Option<u64>> {
        Ok(row.get::<_, Option<i64>>(name)?.and_then(|value| u64::try_from(value).ok()))
    };
    let size = |name: &str| number(name).map(Option::unwrap_or_default);
    let (repo_id, model_type): (String, String) = (row.get("repo_id")?, row.get("model_type")?);
    let model = Model {
        path: PathBuf::from(row.get::<_, String>("path")?),
        revision: row.get("revision")?,
        canonical: row.get("canonical")?,
        // Not stored: a newer program may know more families.
        tier: Tier::of(Config::family_of(&model_type), &repo_id),
        repo_id,
        model_type,
        complete: row.get("complete")?,
        param_count: number("param_count")?,
        size_bytes: size("size_bytes")?,
        sidecar_bytes: size("sidecar_bytes")?,
        experts_bytes: size("experts_bytes")?,
        quant_bits: row.get("quant_bits")?,
        quant_group_size: row.get("quant_group_size")?,
        quant_mode: row.get("quant_mode")?,
        has_vision_sidecar: row.get("has_vision_sidecar")?,
        vision_config_type: row.get("vision_config_type")?,
        has_audio_config: row.get("has_audio_config")?,
        has_audio_tower: row.get("has_audio_tower")?,
        has_kv_config: row.get("has_kv_config")?,
        has_tool_template: row.get("has_tool_template")?,
        num_layers: number("num_layers")?,
        hidden_size: number("hidden_size")?,
        vocab_size: number("vocab_size")?,
        license: row.get("license")?,
        scanned_at: row.get("scanned_at")?,
    };
    Ok(Stamped { model, stamp: row.get("stamp")? })
}
