//! Where rows come from: a folder with a `.jsonl` file a task.

use std::path::{Path, PathBuf};

use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::checkpoint::json;
use serde_json::Value;

/// Names the folder with the data.
pub const MLX_BUN_EVAL_DATA: &str = "MLX_BUN_EVAL_DATA";

/// Most bytes of a file of rows.
const LONGEST_FILE: u64 = 1 << 30;

/// Why rows cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The file system.
    #[error("cannot read {}: {cause}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        cause: std::io::Error,
    },
    /// The file system.
    #[error("cannot write {}: {cause}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        cause: std::io::Error,
    },
    /// A line that is no row of the task.
    #[error("{}:{line}: {problem}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Its line, from 1.
        line: usize,
        /// What is wrong.
        problem: String,
    },
    /// A file without rows.
    #[error("{} has no rows", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// No file of the task.
    #[error("there is no data for {task}: {} has none of {}", folder.display(), names.join(", "))]
    Missing {
        /// The task.
        task: &'static str,
        /// Where was looked.
        folder: PathBuf,
        /// The names that were looked for.
        names: Vec<String>,
    },
    /// A file that is larger than any set of questions.
    #[error("{} is larger than {LONGEST_FILE} bytes", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
}

/// The folder with the data.
#[derive(Clone, Debug)]
pub struct EvalData {
    folder: PathBuf,
    environment: Environment,
}

/// A task's file, and whether it is a frozen set, which is run whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowFile {
    /// The file.
    pub path: PathBuf,
    /// Whether it is a fixed choice of rows.
    pub frozen: bool,
}

impl EvalData {
    /// `MLX_BUN_EVAL_DATA`, else `eval-data` in this program's cache.
    pub fn from_environment(environment: &Environment) -> Self {
        let folder = environment
            .path(MLX_BUN_EVAL_DATA)
            .unwrap_or_else(|| environment.mlx_bun_cache().join("eval-data"));
        Self { folder, environment: environment.clone() }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Where rows of a task are written by `fetch-data` and `import`.
    pub fn file_of(&self, task: &str) -> PathBuf {
        self.folder.join(format!("{task}.jsonl"))
    }

    /// The task's rows: a frozen choice of them if there is one and `MLX_BUN_<TASK>_FROZEN` is not 0, else the whole set
    /// under one of `names` (without `.jsonl`).
    ///
    /// # Errors
    /// There is no such file.
    pub fn find(&self, task: &'static str, names: &[&str]) -> Result<RowFile, DataError> {
        let frozen = format!("{task}_optiq_frozen");
        let wanted = self.environment.get(&format!("MLX_BUN_{}_FROZEN", task.to_uppercase())) != Some("0");
        let named = |name: &str| self.folder.join(format!("{name}.jsonl"));
        if wanted && named(&frozen).is_file() {
            return Ok(RowFile { path: named(&frozen), frozen: true });
        }
        match names.iter().map(|name| named(name)).find(|path| path.is_file()) {
            Some(path) => Ok(RowFile { path, frozen: false }),
            None => {
                let names = names.iter().map(|name| format!("{name}.jsonl")).collect();
                Err(DataError::Missing { task, folder: self.folder.clone(), names })
            }
        }
    }

    /// A file that helps a task, if it is there.
    pub fn optional(&self, names: &[&str]) -> Option<PathBuf> {
        names.iter().map(|name| self.folder.join(format!("{name}.jsonl"))).find(|path| path.is_file())
    }
}

/// Reads a file with a JSON value a line; `row` says what is wrong with one, or what it is. Blank lines are skipped; the
/// number given to `row` counts rows from 0.
///
/// # Errors
/// Names the file and the line.
pub fn read_rows<T>(
    path: &Path,
    mut row: impl FnMut(usize, &Value) -> Result<T, String>,
) -> Result<Vec<T>, DataError> {
    let read = |cause| DataError::Read { path: path.to_owned(), cause };
    let metadata = std::fs::metadata(path).map_err(read)?;
    // A device has no end, and a pipe may have no writer.
    if !metadata.is_file() {
        return Err(read(std::io::Error::other("it is no regular file")));
    }
    if metadata.len() > LONGEST_FILE {
        return Err(DataError::TooLarge { path: path.to_owned() });
    }
    let bytes = std::fs::read(path).map_err(read)?;
    let mut rows = Vec::new();
    for (index, line) in bytes.split(|byte| *byte == b'\n').enumerate() {
        let problem = |problem| DataError::Line { path: path.to_owned(), line: index + 1, problem };
        let line = std::str::from_utf8(line).map_err(|_| problem("the line is not UTF-8".to_owned()))?;
        if line.trim().is_empty() {
            continue;
        }
        // The parser sees one line, so only the column says something.
        let value: Value = serde_json::from_str(line)
            .map_err(|error| problem(json::problem(&error).replacen("line 1, ", "", 1)))?;
        rows.push(row(rows.len(), &value).map_err(problem)?);
    }
    if rows.is_empty() {
        return Err(DataError::Empty { path: path.to_owned() });
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> (tempfile::TempDir, EvalData) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().unwrap().to_owned();
        let data = EvalData::from_environment(&Environment::from_pairs([(MLX_BUN_EVAL_DATA, path.as_str())]));
        (folder, data)
    }

    #[test]
    fn a_bad_row_is_placed_by_file_and_line() {
        let (folder, _) = folder();
        let path = folder.path().join("rows.jsonl");
        let read = |text: &[u8]| {
            std::fs::write(&path, text).unwrap();
            let number = |_, row: &Value| row.as_u64().ok_or_else(|| "it is no number".to_owned());
            read_rows(&path, number).map_err(|error| error.to_string())
        };
        assert_eq!(read(b"1\n\n2"), Ok(vec![1, 2]));
        let place = path.display();
        assert_eq!(read(b"1\n\n\"a\"\n"), Err(format!("{place}:3: it is no number")));
        assert!(read(b"1\n{\n").unwrap_err().starts_with(&format!("{place}:2: not valid JSON")));
        assert_eq!(read(b"\xff"), Err(format!("{place}:1: the line is not UTF-8")));
        assert_eq!(read(b"\n"), Err(format!("{place} has no rows")));
        for endless in [Path::new("/dev/zero"), folder.path()] {
            let error = read_rows(endless, |_, _| Ok(())).unwrap_err();
            assert!(format!("{error}").contains("it is no regular file"), "{error}");
        }
    }

    #[test]
    fn frozen_sets_come_first_unless_told_otherwise() {
        let (folder, data) = folder();
        let write = |name: &str| std::fs::write(folder.path().join(name), "{}").unwrap();
        assert!(matches!(data.find("gsm8k", &["gsm8k"]), Err(DataError::Missing { .. })));
        write("gsm8k-test.jsonl");
        let found = data.find("gsm8k", &["gsm8k", "gsm8k-test"]).unwrap();
        assert!(found.path.ends_with("gsm8k-test.jsonl") && !found.frozen);
        write("gsm8k_optiq_frozen.jsonl");
        assert!(data.find("gsm8k", &["gsm8k", "gsm8k-test"]).unwrap().frozen);
        let path = folder.path().to_str().unwrap();
        let pairs = [(MLX_BUN_EVAL_DATA, path), ("MLX_BUN_GSM8K_FROZEN", "0")];
        let data = EvalData::from_environment(&Environment::from_pairs(pairs));
        assert!(!data.find("gsm8k", &["gsm8k", "gsm8k-test"]).unwrap().frozen);
    }
}
