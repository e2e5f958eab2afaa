//! Where rows lie: a folder with train, valid and test files, or one file. Local files only.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::rows::{Format, Reader, Row};
use super::{DataError, parquet};
use crate::checkpoint::json_lines::{JsonLinesError, numbered_rows, read_text};

/// The rows of a data set.
#[derive(Clone, Debug, Default)]
pub struct Splits {
    /// To learn from.
    pub train: Vec<Row>,
    /// To see whether it helps.
    pub valid: Vec<Row>,
    /// To measure with at the end.
    pub test: Vec<Row>,
    /// What the rows to learn from are.
    pub format: Option<Format>,
}

/// Reads a folder with `train`, `valid` and `test` files, of which any may be missing, or one file to learn from.
/// Files end in `.jsonl` or `.parquet`.
///
/// # Errors
/// Names the file, and the line of a bad row.
pub fn read(path: &Path) -> Result<Splits, DataError> {
    if path.is_file() {
        let (train, format) = read_file(path)?;
        return Ok(Splits { train, format, ..Splits::default() });
    }
    if !path.is_dir() {
        return Err(DataError::NotData { path: path.to_owned() });
    }
    let split = |name: &str| match file_of(path, name) {
        Some(file) => read_file(&file),
        None => Ok((Vec::new(), None)),
    };
    let (train, format) = split("train")?;
    Ok(Splits { train, format, valid: split("valid")?.0, test: split("test")?.0 })
}

impl Splits {
    /// The rows to learn from are there.
    ///
    /// # Errors
    /// When there are none.
    pub fn check_train(&self, path: &Path) -> Result<(), DataError> {
        check(&self.train, path, "train")
    }

    /// The rows to measure with are there.
    ///
    /// # Errors
    /// When there are none.
    pub fn check_test(&self, path: &Path) -> Result<(), DataError> {
        check(&self.test, path, "test")
    }
}

fn check(rows: &[Row], path: &Path, name: &'static str) -> Result<(), DataError> {
    if rows.is_empty() { Err(DataError::NoSplit { path: path.to_owned(), name }) } else { Ok(()) }
}

fn file_of(folder: &Path, name: &str) -> Option<PathBuf> {
    ["jsonl", "parquet"]
        .map(|ending| folder.join(format!("{name}.{ending}")))
        .into_iter()
        .find(|f| f.is_file())
}

fn read_file(path: &Path) -> Result<(Vec<Row>, Option<Format>), DataError> {
    let file: Arc<Path> = Arc::from(path);
    let mut reader = Reader::default();
    let ends = |ending: &str| path.extension().is_some_and(|found| found.eq_ignore_ascii_case(ending));
    let rows = if ends("parquet") {
        parquet::read(path, |line, value| {
            let (content, fields) = reader.read(&value)?;
            Ok(Row { content, fields, file: file.clone(), line })
        })?
    } else if ends("jsonl") {
        let text = read_text(path)?;
        numbered_rows(&text, |line, value| {
            let (content, fields) = reader.read(&value)?;
            Ok(Some(Row { content, fields, file: file.clone(), line }))
        })
        .map_err(|(line, problem)| JsonLinesError::Line { path: path.to_owned(), line, problem })?
    } else {
        return Err(DataError::NotData { path: path.to_owned() });
    };
    match rows.is_empty() {
        true => Err(DataError::Empty { path: path.to_owned() }),
        false => Ok((rows, reader.format())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_may_have_only_some_of_its_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        assert!(read(&path.join("no")).unwrap_err().to_string().contains("neither a folder"));
        let splits = read(path).unwrap();
        assert!(
            splits
                .check_train(path)
                .unwrap_err()
                .to_string()
                .ends_with("has no train.jsonl and no train.parquet")
        );
        std::fs::write(path.join("train.jsonl"), "\n{\"text\": \"a\"}\n{\"text\": \"b\"}\n").unwrap();
        let splits = read(path).unwrap();
        assert_eq!((splits.train.len(), splits.valid.len(), splits.train[1].line), (2, 0, 3));
        assert_eq!(splits.format, Some(Format::Text));
        std::fs::write(path.join("valid.jsonl"), "{\"text\": \"a\"}\n{\"txt\": 1}\n").unwrap();
        let error = read(path).unwrap_err().to_string();
        assert!(error.contains("valid.jsonl, line 2: the row has no `text`"), "{error}");
    }
}
