//! Files with a JSON value a line, and texts that are none.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::error::shown_path;
use super::json;

/// Why rows cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum JsonLinesError {
    /// The file system.
    #[error("cannot read {}: {cause}", shown_path(path))]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        cause: std::io::Error,
    },
    /// A line that is no row.
    #[error("{}, line {line}: {problem}", shown_path(path))]
    Line {
        /// The file.
        path: PathBuf,
        /// Its line, from 1.
        line: usize,
        /// What is wrong.
        problem: String,
    },
}

/// What a file holds.
#[derive(Clone, Debug, PartialEq)]
pub enum TextOrRows<T> {
    /// The whole file, whose name does not end in `.jsonl`.
    Text(String),
    /// What became of its rows.
    Rows(Vec<T>),
}

/// Reads a file; of a `.jsonl` file each line that is not blank goes through `row`, which may leave it out or say what
/// is wrong with it.
///
/// # Errors
/// Names the file and the line.
pub fn read_text_or_rows<T>(
    path: &Path,
    row: impl FnMut(Value) -> Result<Option<T>, String>,
) -> Result<TextOrRows<T>, JsonLinesError> {
    let text = read_text(path)?;
    if !path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("jsonl")) {
        return Ok(TextOrRows::Text(text));
    }
    let rows = rows(&text, row).map_err(|(line, problem)| JsonLinesError::Line {
        path: path.to_owned(),
        line,
        problem,
    })?;
    Ok(TextOrRows::Rows(rows))
}

/// Reads a text. A byte-order mark at its start is no part of it.
///
/// # Errors
/// Names the file, and the line that is not UTF-8.
pub(crate) fn read_text(path: &Path) -> Result<String, JsonLinesError> {
    let bytes = std::fs::read(path).map_err(|cause| JsonLinesError::Read { path: path.to_owned(), cause })?;
    let mut text = String::from_utf8(bytes).map_err(|error| {
        let valid = error.as_bytes().get(..error.utf8_error().valid_up_to()).unwrap_or_default();
        let line = 1 + valid.iter().filter(|byte| **byte == b'\n').count();
        JsonLinesError::Line { path: path.to_owned(), line, problem: "the text is not UTF-8".to_owned() }
    })?;
    if text.starts_with('\u{feff}') {
        text.drain(..'\u{feff}'.len_utf8());
    }
    Ok(text)
}

/// The rows of a text, or the number of the first bad line and what is wrong with it.
pub(crate) fn rows<T>(
    text: &str,
    mut row: impl FnMut(Value) -> Result<Option<T>, String>,
) -> Result<Vec<T>, (usize, String)> {
    numbered_rows(text, |_, value| row(value))
}

/// [`rows`] for those who want to know the line, counted from 1.
pub(crate) fn numbered_rows<T>(
    text: &str,
    mut row: impl FnMut(usize, Value) -> Result<Option<T>, String>,
) -> Result<Vec<T>, (usize, String)> {
    let mut rows = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        // The parser sees one line, so only the column says something.
        let parsed =
            serde_json::from_str(line).map_err(|error| json::problem(&error).replacen("line 1, ", "", 1));
        let read = parsed.and_then(|value| row(index + 1, value));
        rows.extend(read.map_err(|problem| (index + 1, problem))?);
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_rows_and_problems_are_placed() {
        let number = |value: Value| value.as_u64().map(Some).ok_or_else(|| "it is no number".to_owned());
        assert_eq!(rows("1\n\n2\n", number).unwrap(), [1, 2]);
        assert_eq!(rows("1\n\"a\"", number).unwrap_err(), (2, "it is no number".to_owned()));
        assert_eq!(
            rows("\n{\"a\" 1}", number).unwrap_err(),
            (2, "not valid JSON: expected `:` at column 6".to_owned())
        );
        assert!(rows("1 2", |_| Ok(None::<u8>)).is_err());
        assert!(rows("1\n2", |_| Ok(None::<u8>)).unwrap().is_empty());
    }

    #[test]
    fn the_name_says_what_a_file_is() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, "[1]\n").unwrap();
            path
        };
        let read = |path: &Path| read_text_or_rows(path, |row| Ok(Some(row))).unwrap();
        assert_eq!(read(&write("a.txt")), TextOrRows::Text("[1]\n".to_owned()));
        assert!(matches!(read(&write("a.JSONL")), TextOrRows::Rows(rows) if rows.len() == 1));
        let missing = read_text_or_rows(&folder.path().join("no.jsonl"), |row| Ok(Some(row))).unwrap_err();
        assert!(missing.to_string().contains("no.jsonl: "), "{missing}");
    }

    #[test]
    fn a_byte_order_mark_is_skipped_and_a_line_that_is_not_utf_8_is_numbered() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.jsonl");
        std::fs::write(&path, "\u{feff}[1]\n").unwrap();
        let rows = read_text_or_rows(&path, |row| Ok(Some(row))).unwrap();
        assert!(matches!(rows, TextOrRows::Rows(rows) if rows.len() == 1));
        std::fs::write(&path, b"[1]\n[2]\n[\"\xff\"]\n").unwrap();
        let error = read_text_or_rows(&path, |row| Ok(Some(row))).unwrap_err().to_string();
        assert!(error.ends_with("a.jsonl, line 3: the text is not UTF-8"), "{error}");
    }
}
