//! Rows as files for other programs, in long form: a line a number, with everything that tells where it is from.

use std::path::Path;
use std::sync::Arc;

use mlx_bun::checkpoint::atomic_file::write_bytes_atomically;
use mlx_bun::record::{Figure, shown_time};
use parquet::data_type::{ByteArray, ByteArrayType, DoubleType, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;

use super::measurement::Measurement;
use crate::benchmark::quoted;

/// Columns of text, in their order.
const TEXTS: [&str; 16] = [
    "table",
    "time",
    "verb",
    "label",
    "model",
    "stack",
    "commit",
    "build",
    "mlx_version",
    "backend",
    "device",
    "machine",
    "flags",
    "notes",
    "figure",
    "unit",
];
/// Columns of whole numbers.
const INTEGERS: [&str; 4] = ["id", "ts", "threads", "forced"];

/// A number and where it is from.
struct Line<'a> {
    row: &'a Measurement,
    name: &'a str,
    figure: &'a Figure,
}

impl Line<'_> {
    fn texts(&self) -> [String; TEXTS.len()] {
        let entry = &self.row.entry;
        let or_empty = |text: &Option<String>| text.clone().unwrap_or_default();
        [
            self.row.table.to_owned(),
            shown_time(entry.ts),
            entry.verb.clone(),
            entry.label.clone(),
            self.row.model.clone(),
            entry.stack.clone(),
            or_empty(&entry.commit_sha),
            entry.build.clone(),
            or_empty(&entry.mlx_version),
            or_empty(&entry.backend),
            or_empty(&entry.device),
            entry.machine_key.clone(),
            if entry.flags.is_null() { String::new() } else { entry.flags.to_string() },
            or_empty(&entry.notes),
            self.name.to_owned(),
            self.figure.unit.clone(),
        ]
    }

    fn integers(&self) -> [i64; INTEGERS.len()] {
        let entry = &self.row.entry;
        // 0 threads: our kernels did not run.
        let threads = entry.threads.and_then(|threads| i64::try_from(threads).ok()).unwrap_or(0);
        [entry.id, entry.ts, threads, i64::from(entry.forced)]
    }
}

fn lines(rows: &[Measurement]) -> Vec<Line<'_>> {
    rows.iter()
        .flat_map(|row| row.figures.iter().map(move |(name, figure)| Line { row, name, figure }))
        .collect()
}

/// Writes comma-separated values.
///
/// # Errors
/// The file cannot be written.
pub fn csv(rows: &[Measurement], file: &Path) -> anyhow::Result<()> {
    Ok(write_bytes_atomically(file, csv_text(rows).as_bytes())?)
}

/// Comma-separated values (RFC 4180).
pub fn csv_text(rows: &[Measurement]) -> String {
    let mut text = format!("{},{},value\n", INTEGERS.join(","), TEXTS.join(","));
    for line in lines(rows) {
        let integers = line.integers().map(|value| value.to_string());
        let texts = line.texts().map(|value| quoted(&value));
        text.push_str(&format!("{},{},{}\n", integers.join(","), texts.join(","), line.figure.value));
    }
    text
}

/// Writes a Parquet file.
///
/// # Errors
/// The file cannot be written.
pub fn parquet(rows: &[Measurement], file: &Path) -> anyhow::Result<()> {
    Ok(write_bytes_atomically(file, &parquet_bytes(&lines(rows))?)?)
}

fn parquet_bytes(lines: &[Line]) -> Result<Vec<u8>, ParquetError> {
    let integers = INTEGERS.map(|name| format!("REQUIRED INT64 {name};"));
    let texts = TEXTS.map(|name| format!("REQUIRED BYTE_ARRAY {name} (STRING);"));
    let schema = format!(
        "message measurements {{ {} {} REQUIRED DOUBLE value; }}",
        integers.join(" "),
        texts.join(" ")
    );
    let schema = Arc::new(parse_message_type(&schema)?);
    let mut bytes = Vec::new();
    let properties = Arc::new(WriterProperties::builder().build());
    let mut writer = SerializedFileWriter::new(&mut bytes, schema, properties)?;
    let mut group = writer.next_row_group()?;
    let all_integers: Vec<_> = lines.iter().map(Line::integers).collect();
    for index in 0..INTEGERS.len() {
        let values: Vec<i64> = all_integers.iter().map(|values| values[index]).collect();
        if let Some(mut column) = group.next_column()? {
            column.typed::<Int64Type>().write_batch(&values, None, None)?;
            column.close()?;
        }
    }
    let all_texts: Vec<_> = lines.iter().map(Line::texts).collect();
    for index in 0..TEXTS.len() {
        let values: Vec<ByteArray> =
            all_texts.iter().map(|values| ByteArray::from(values[index].as_str())).collect();
        if let Some(mut column) = group.next_column()? {
            column.typed::<ByteArrayType>().write_batch(&values, None, None)?;
            column.close()?;
        }
    }
    let values: Vec<f64> = lines.iter().map(|line| line.figure.value).collect();
    if let Some(mut column) = group.next_column()? {
        column.typed::<DoubleType>().write_batch(&values, None, None)?;
        column.close()?;
    }
    group.close()?;
    writer.close()?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use mlx_bun::record::Filter;
    use parquet::file::reader::{FileReader, SerializedFileReader};
    use parquet::record::RowAccessor;

    use super::super::measurement::{select, tests::database};
    use super::*;

    #[test]
    fn files_hold_every_number() {
        let folder = tempfile::tempdir().unwrap();
        let rows = select(&database(folder.path()), &Filter::default()).unwrap();
        let (table, columns) = (folder.path().join("a.csv"), folder.path().join("a.parquet"));
        csv(&rows, &table).unwrap();
        parquet(&rows, &columns).unwrap();
        let text = std::fs::read_to_string(table).unwrap();
        // Three rows with three numbers, and one with one.
        assert_eq!(text.lines().count(), 1 + 3 * 3 + 1, "{text}");
        let reader = SerializedFileReader::new(std::fs::File::open(columns).unwrap()).unwrap();
        let read: Vec<_> = reader.get_row_iter(None).unwrap().map(|row| row.unwrap()).collect();
        assert_eq!(read.len(), 10);
        let last = &read[9];
        assert_eq!(last.get_long(1).unwrap(), 500);
        assert_eq!(last.get_string(INTEGERS.len() + 14).unwrap(), "pct");
        assert_eq!(last.get_double(INTEGERS.len() + TEXTS.len()).unwrap(), 50.0);
    }
}
