//! Rows of a Parquet file as JSON objects.

use std::fs::File;
use std::path::Path;

use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use serde_json::{Map, Value};

use super::DataError;

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
    let mut rows = Vec::new();
    for (index, record) in reader.get_row_iter(None).map_err(said)?.enumerate() {
        let fields = record.map_err(said)?.into_columns();
        let value = object(&fields);
        let read = row(index + 1, value);
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

fn value(field: &Field) -> Value {
    match field {
        Field::Null => Value::Null,
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
        Field::Bytes(bytes) => Value::from(String::from_utf8_lossy(bytes.data()).into_owned()),
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
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;

    use super::*;

    #[test]
    fn rows_are_objects_and_bad_ones_are_numbered() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train.parquet");
        let schema = parse_message_type("message m { required binary text (UTF8); }").unwrap();
        let file = File::create(&path).unwrap();
        let mut writer = SerializedFileWriter::new(file, Arc::new(schema), Arc::default()).unwrap();
        let mut group = writer.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let ColumnWriter::ByteArrayColumnWriter(texts) = column.untyped() else { panic!("strings") };
        texts.write_batch(&[ByteArray::from("one"), ByteArray::from("two")], None, None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
        writer.close().unwrap();
        let texts = read(&path, |_, value| Ok(value["text"].as_str().unwrap().to_owned())).unwrap();
        assert_eq!(texts, ["one", "two"]);
        let error = read(&path, |line, _| if line == 2 { Err("bad".to_owned()) } else { Ok(()) });
        assert!(error.unwrap_err().to_string().ends_with("train.parquet, row 2: bad"));
        std::fs::write(&path, "no parquet").unwrap();
        assert!(matches!(read(&path, |_, _| Ok(())), Err(DataError::Parquet { .. })));
    }
}
