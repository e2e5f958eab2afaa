//! Writes safetensors files: prompt caches, converted models, adapters.

use std::collections::{BTreeMap, HashSet};
use std::io::Write;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::atomic_file::{AtomicFileError, write_atomically};
use super::error::shown_name;
use super::safetensors::{MAX_HEADER_BYTES, METADATA_KEY};
use super::tensor::ElementType;

/// The header is padded so that the data begins on such a boundary.
const ALIGNMENT: usize = 8;

/// Why a safetensors file was not written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The file cannot be written.
    #[error(transparent)]
    File(#[from] AtomicFileError),
    /// Two tensors of one name.
    #[error("tensor `{}` is given twice", shown_name(tensor))]
    Duplicate {
        /// The name.
        tensor: String,
    },
    /// The name that a header keeps for its metadata.
    #[error("a tensor cannot be called `{METADATA_KEY}`")]
    Reserved,
    /// Bytes that do not fit dtype and shape.
    #[error("tensor `{}` of dtype {dtype} and shape {shape:?} has {bytes} bytes", shown_name(tensor))]
    WrongSize {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: ElementType,
        /// Its shape.
        shape: Vec<usize>,
        /// Its bytes.
        bytes: usize,
    },
    /// More header than a reader takes.
    #[error("a header of {length} bytes is over the limit of {MAX_HEADER_BYTES}; write fewer tensors a file")]
    HeaderTooLong {
        /// Its length.
        length: usize,
    },
}

/// Writes tensors, given as name, dtype, shape and little-endian bytes, with `metadata` into the header.
///
/// Tensors of wider elements come first, otherwise in the order given, so that each begins on a multiple of
/// its element size. The file appears whole or not at all.
///
/// # Errors
/// When a tensor does not fit its shape, names repeat, or the file cannot be written.
pub fn write_safetensors<'a, B: AsRef<[u8]>>(
    path: &Path,
    tensors: impl IntoIterator<Item = (&'a str, ElementType, &'a [usize], B)>,
    metadata: &BTreeMap<String, String>,
) -> Result<(), WriteError> {
    let mut tensors: Vec<_> = tensors.into_iter().collect();
    tensors.sort_by_key(|(_, dtype, ..)| std::cmp::Reverse(dtype.size()));

    let mut header = Map::new();
    if !metadata.is_empty() {
        header.insert(METADATA_KEY.to_owned(), json!(metadata));
    }
    let mut seen = HashSet::new();
    let mut begin = 0usize;
    for (name, dtype, shape, bytes) in &tensors {
        let size = bytes.as_ref().len();
        // Bytes that are in memory together with what came before cannot overflow.
        let end = begin + size;
        if *name == METADATA_KEY {
            return Err(WriteError::Reserved);
        }
        if !seen.insert(*name) {
            return Err(WriteError::Duplicate { tensor: (*name).to_owned() });
        }
        if dtype.bytes_of(shape) != Some(size) {
            return Err(WriteError::WrongSize {
                tensor: (*name).to_owned(),
                dtype: *dtype,
                shape: shape.to_vec(),
                bytes: size,
            });
        }
        let entry = json!({"dtype": dtype.safetensors_name(), "shape": shape, "data_offsets": [begin, end]});
        header.insert((*name).to_owned(), entry);
        begin = end;
    }

    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(ALIGNMENT), b' ');
    let length = header.len() as u64;
    if length > MAX_HEADER_BYTES {
        return Err(WriteError::HeaderTooLong { length: header.len() });
    }
    write_atomically(path, |file| {
        file.write_all(&length.to_le_bytes())?;
        file.write_all(&header)?;
        tensors.iter().try_for_each(|(.., bytes)| file.write_all(bytes.as_ref()))
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::safetensors::SafetensorsFile;
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.safetensors");
        let metadata = BTreeMap::from([("format".to_owned(), "mlx \"ü\"\n".to_owned())]);
        let tensors = [
            ("byte", ElementType::U8, [3].as_slice(), vec![1, 2, 3]),
            ("scalar \"ä\"", ElementType::F32, &[], vec![4, 5, 6, 7]),
            ("empty", ElementType::BF16, &[0, 2], vec![]),
        ];
        write_safetensors(&path, tensors.clone(), &metadata).unwrap();

        let file = SafetensorsFile::open(&path).unwrap();
        assert_eq!(file.metadata(), &metadata);
        let read: BTreeMap<_, _> = file.tensors().collect();
        for (name, dtype, shape, bytes) in tensors {
            assert_eq!((read[name].dtype, read[name].shape.as_slice()), (dtype, shape));
            assert_eq!(read[name].bytes(), bytes);
            let data_start = read[name].bytes().as_ptr() as usize;
            assert_eq!(data_start % dtype.size(), 0, "{name} is aligned");
        }
    }

    #[test]
    fn wrong_tensors_are_refused_before_anything_is_written() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.safetensors");
        let write = |tensors: &[(&str, usize)]| {
            let tensors =
                tensors.iter().map(|(name, size)| (*name, ElementType::F16, [2].as_slice(), vec![0; *size]));
            write_safetensors(&path, tensors, &BTreeMap::new()).unwrap_err()
        };
        assert!(matches!(write(&[("a", 4), ("a", 4)]), WriteError::Duplicate { .. }));
        assert!(matches!(write(&[("a", 5)]), WriteError::WrongSize { bytes: 5, .. }));
        assert!(matches!(write(&[(METADATA_KEY, 4)]), WriteError::Reserved));
        assert!(!path.exists());
    }
}
