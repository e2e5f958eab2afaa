//! Rows of a Parquet file as JSON objects.

use std::fs::File;
use std::path::Path;

use parquet::basic::Compression;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use serde_json::{Map, Value};

use super::DataError;

/// Columns that rows are made of.
const USED: [&str; 7] = ["text", "messages", "tools", "prompt", "completion", "chosen", "rejected"];

/// Gives each row, with its number from 1, to `row`.
///
/// # Errors
/// A file that cannot be read, or what `row` says of the first bad row.
pub(super) fn read<T>(
    path: &Path,
    mut row: impl FnMut(usize, Value) -> Result<T, String>,
) -> Result<Vec<T>, DataError> {
    let whole = |problem: String| DataError::Parquet { path: path.to_owned(), problem };
    let said = |error: ParquetError| whole(error.to_string().replace('\n', " "));
    let file = File::open(path).map_err(|error| whole(error.to_string()))?;
    let reader = SerializedFileReader::new(file).map_err(said)?;
    let groups = reader.metadata().row_groups().iter();
    let unread = groups.flat_map(|group| group.columns()).find(|column| {
        let codec = column.compression();
        !matches!(codec, Compression::UNCOMPRESSED | Compression::SNAPPY | Compression::ZSTD(_))
    });
    if let Some(column) = unread {
        let (name, codec) = (column.column_path().string(), format!("{:?}", column.compression()));
        let codec = codec.split('(').next().unwrap_or_default().to_lowercase();
        return Err(whole(format!(
            "the column `{name}` is compressed with {codec}, and only snappy, zstd and no compression are read"
        )));
    }
    let mut rows = Vec::new();
    for (index, record) in reader.get_row_iter(None).map_err(said)?.enumerate() {
        let fields = record.map_err(said)?.into_columns();
        let bytes = fields.iter().find(|(name, field)| USED.contains(&name.as_str()) && has_bytes(field));
        let read = match bytes {
            Some((name, _)) => Err(format!("`{name}` holds bytes, not text; write the column as strings")),
            None => row(index + 1, object(&fields)),
        };
        rows.push(read.map_err(|problem| DataError::ParquetRow {
            path: path.to_owned(),
            row: index + 1,
            problem,
        })?);
    }
    Ok(rows)
}

/// A table has all columns in every row; one that is null is as good as missing.
fn object(fields: &[(String, Field)]) -> Value {
    let given = fields.iter().filter(|(_, field)| !matches!(field, Field::Null));
    Value::Object(given.map(|(name, field)| (name.clone(), value(field))).collect::<Map<_, _>>())
}

/// Whether bytes that are not marked as text lie in it.
fn has_bytes(field: &Field) -> bool {
    match field {
        Field::Bytes(_) => true,
        Field::Group(row) => row.get_column_iter().any(|(_, field)| has_bytes(field)),
        Field::ListInternal(list) => list.elements().iter().any(has_bytes),
        Field::MapInternal(map) => map.entries().iter().any(|(key, item)| has_bytes(key) || has_bytes(item)),
        _ => false,
    }
}

fn value(field: &Field) -> Value {
    match field {
        // Nothing that rows are made of: an image beside them.
        Field::Null | Field::Bytes(_) => Value::Null,
        Field::Bool(value) => Value::from(*value),
        Field::Byte(value) => Value::from(*value),
        Field::Short(value) => Value::from(*value),
        Field::Int(value) => Value::from(*value),
        Field::Long(value) => Value::from(*value),
        Field::UByte(value) => Value::from(*value),
        Field::UShort(value) => Value::from(*value),
        Field::UInt(value) => Value::from(*value),
        Field::ULong(value) => Value::from(*value),
        Field::Float(value) => Value::from(*value),
        Field::Double(value) => Value::from(*value),
        Field::Str(value) => Value::from(value.as_str()),
        Field::Group(row) => {
            let fields: Vec<_> =
                row.get_column_iter().map(|(name, field)| (name.clone(), field.clone())).collect();
            object(&fields)
        }
        Field::ListInternal(list) => Value::Array(list.elements().iter().map(value).collect()),
        Field::MapInternal(map) => {
            let entry = |(key, item): &(Field, Field)| match value(key) {
                Value::String(key) => (key, value(item)),
                key => (key.to_string(), value(item)),
            };
            Value::Object(map.entries().iter().map(entry).collect())
        }
        other => Value::from(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parquet::column::writer::ColumnWriter;
    use parquet::data_type::ByteArray;
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;

    use super::*;

    /// Two rows of one column.
    fn write(path: &Path, column: &str, compression: Compression) {
        let schema = parse_message_type(&format!("message m {{ required binary {column}; }}")).unwrap();
        let properties = WriterProperties::builder().set_compression(compression).build();
        let file = File::create(path).unwrap();
        let mut writer = SerializedFileWriter::new(file, Arc::new(schema), Arc::new(properties)).unwrap();
        let mut group = writer.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let ColumnWriter::ByteArrayColumnWriter(texts) = column.untyped() else { panic!("strings") };
        texts.write_batch(&[ByteArray::from("one"), ByteArray::from("two")], None, None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
        writer.close().unwrap();
    }

    #[test]
    fn bytes_are_not_taken_for_text_and_other_columns_may_have_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train.parquet");
        write(&path, "text", Compression::UNCOMPRESSED);
        let error = read(&path, |_, _| Ok(())).unwrap_err().to_string();
        assert!(
            error
                .ends_with("train.parquet, row 1: `text` holds bytes, not text; write the column as strings")
        );
        write(&path, "image", Compression::UNCOMPRESSED);
        let rows = read(&path, |_, value| Ok(value.to_string())).unwrap();
        assert_eq!(rows, ["{\"image\":null}"; 2]);
    }

    #[test]
    fn zstd_is_read_and_what_is_not_is_named_with_what_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train.parquet");
        for compression in [Compression::SNAPPY, Compression::ZSTD(Default::default())] {
            write(&path, "text (UTF8)", compression);
            assert_eq!(read(&path, |_, value| Ok(value)).unwrap()[1]["text"], "two");
        }
        // Only what can be read can be written here, so the number of the codec is changed in the footer.
        write(&path, "text (UTF8)", Compression::SNAPPY);
        let mut bytes = std::fs::read(&path).unwrap();
        let snappy = b"\x18\x04text\x15\x02";
        let place = bytes.windows(snappy.len()).position(|window| window == snappy).unwrap();
        bytes[place + snappy.len() - 1] = 4;
        std::fs::write(&path, bytes).unwrap();
        let error = read(&path, |_, _| Ok(())).unwrap_err().to_string();
        assert!(
            error.ends_with(
                "`text` is compressed with gzip, and only snappy, zstd and no compression are read"
            ),
            "{error}"
        );
    }

    #[test]
    fn rows_are_objects_and_bad_ones_are_numbered() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train.parquet");
        write(&path, "text (UTF8)", Compression::UNCOMPRESSED);
        let texts = read(&path, |_, value| Ok(value["text"].as_str().unwrap().to_owned())).unwrap();
        assert_eq!(texts, ["one", "two"]);
        let error = read(&path, |line, _| if line == 2 { Err("bad".to_owned()) } else { Ok(()) });
        assert!(error.unwrap_err().to_string().ends_with("train.parquet, row 2: bad"));
        std::fs::write(&path, "no parquet").unwrap();
        assert!(matches!(read(&path, |_, _| Ok(())), Err(DataError::Parquet { .. })));
    }
}
