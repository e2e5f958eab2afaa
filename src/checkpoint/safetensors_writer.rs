//! Writes safetensors files: prompt caches, converted models, adapters.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

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
    /// A tensor that was written but not announced, or announced but not written.
    #[error("tensor `{}` was not both announced and written once", shown_name(tensor))]
    Unannounced {
        /// The tensor.
        tensor: String,
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
    for (name, dtype, shape, bytes) in &tensors {
        let size = bytes.as_ref().len();
        if dtype.bytes_of(shape) != Some(size) {
            return Err(wrong_size(name, *dtype, shape, size));
        }
    }
    let layout =
        Layout::new(tensors.iter().map(|(name, dtype, shape, _)| (*name, *dtype, *shape)), metadata)?;
    write_atomically(path, |file| {
        file.write_all(&layout.head)?;
        tensors.iter().try_for_each(|(.., bytes)| file.write_all(bytes.as_ref()))
    })?;
    Ok(())
}

fn wrong_size(tensor: &str, dtype: ElementType, shape: &[usize], bytes: usize) -> WriteError {
    WriteError::WrongSize { tensor: tensor.to_owned(), dtype, shape: shape.to_vec(), bytes }
}

/// The start of a file, and where its tensors lie.
struct Layout {
    /// Header length and header.
    head: Vec<u8>,
    /// Byte ranges by name, counted from the start of the file.
    ranges: HashMap<String, Range<usize>>,
    /// Size of the file.
    size: usize,
}

impl Layout {
    /// Lays tensors out one after the other, in the order given.
    fn new<'a>(
        tensors: impl IntoIterator<Item = (&'a str, ElementType, &'a [usize])>,
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self, WriteError> {
        let mut header = Map::new();
        if !metadata.is_empty() {
            header.insert(METADATA_KEY.to_owned(), json!(metadata));
        }
        let mut ranges = HashMap::new();
        let mut begin = 0usize;
        for (name, dtype, shape) in tensors {
            let end = dtype.bytes_of(shape).and_then(|size| begin.checked_add(size));
            let end = end.ok_or_else(|| wrong_size(name, dtype, shape, usize::MAX))?;
            if name == METADATA_KEY {
                return Err(WriteError::Reserved);
            }
            if ranges.insert(name.to_owned(), begin..end).is_some() {
                return Err(WriteError::Duplicate { tensor: name.to_owned() });
            }
            let entry =
                json!({"dtype": dtype.safetensors_name(), "shape": shape, "data_offsets": [begin, end]});
            header.insert(name.to_owned(), entry);
            begin = end;
        }
        let mut header = Value::Object(header).to_string().into_bytes();
        header.resize(header.len().next_multiple_of(ALIGNMENT), b' ');
        if header.len() as u64 > MAX_HEADER_BYTES {
            return Err(WriteError::HeaderTooLong { length: header.len() });
        }
        let mut head = (header.len() as u64).to_le_bytes().to_vec();
        head.append(&mut header);
        let start = head.len();
        for range in ranges.values_mut() {
            *range = range.start + start..range.end + start;
        }
        Ok(Self { head, ranges, size: begin + start })
    }
}

/// A safetensors file that is filled tensor by tensor, so that not all of them are in memory at once.
///
/// The tensors are announced first; then each is written when it is there, in any order. The file is no atomic
/// one: it belongs into a directory that is renamed as a whole.
#[derive(Debug)]
pub struct SafetensorsStream {
    path: PathBuf,
    file: File,
    missing: HashMap<String, Range<usize>>,
}

impl SafetensorsStream {
    /// Creates the file and writes its header. Tensors of wider elements come first, so that each begins on a
    /// multiple of its element size.
    ///
    /// # Errors
    /// When names repeat, shapes overflow, or the file exists or cannot be written.
    pub fn create(
        path: &Path,
        tensors: &[(String, ElementType, Vec<usize>)],
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self, WriteError> {
        let mut tensors: Vec<_> = tensors.iter().collect();
        tensors.sort_by_key(|(_, dtype, _)| std::cmp::Reverse(dtype.size()));
        let tensors = tensors.iter().map(|(name, dtype, shape)| (name.as_str(), *dtype, shape.as_slice()));
        let layout = Layout::new(tensors, metadata)?;
        let create = || {
            let mut file = File::create_new(path)?;
            file.set_len(layout.size as u64)?;
            file.write_all(&layout.head)?;
            Ok(file)
        };
        let file = create().map_err(|cause| AtomicFileError { path: path.to_owned(), cause })?;
        Ok(Self { path: path.to_owned(), file, missing: layout.ranges })
    }

    /// Writes the bytes of one of the announced tensors.
    ///
    /// # Errors
    /// When it was not announced, is written twice or has another size, or the file cannot be written.
    pub fn write(&mut self, tensor: &str, bytes: &[u8]) -> Result<(), WriteError> {
        let Some(range) = self.missing.remove(tensor) else {
            return Err(WriteError::Unannounced { tensor: tensor.to_owned() });
        };
        if range.len() != bytes.len() {
            return Err(wrong_size(tensor, ElementType::U8, &[range.len()], bytes.len()));
        }
        let mut write = || {
            self.file.seek(SeekFrom::Start(range.start as u64))?;
            self.file.write_all(bytes)
        };
        write().map_err(|cause| AtomicFileError { path: self.path.clone(), cause }.into())
    }

    /// Ends the file once its bytes are on the disk.
    ///
    /// # Errors
    /// When a tensor was not written, or the disk fails.
    pub fn finish(self) -> Result<(), WriteError> {
        if let Some(tensor) = self.missing.into_keys().min() {
            return Err(WriteError::Unannounced { tensor });
        }
        self.file.sync_all().map_err(|cause| AtomicFileError { path: self.path, cause }.into())
    }
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

    #[test]
    fn a_stream_takes_tensors_in_any_order_and_each_once() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.safetensors");
        let tensors =
            [("a".to_owned(), ElementType::U8, vec![3]), ("b".to_owned(), ElementType::F32, vec![1, 1])];
        let mut stream = SafetensorsStream::create(&path, &tensors, &BTreeMap::new()).unwrap();
        assert!(matches!(stream.write("a", &[1]), Err(WriteError::WrongSize { .. })));
        let mut stream = {
            std::fs::remove_file(&path).unwrap();
            SafetensorsStream::create(&path, &tensors, &BTreeMap::new()).unwrap()
        };
        stream.write("a", &[1, 2, 3]).unwrap();
        assert!(matches!(stream.write("a", &[1, 2, 3]), Err(WriteError::Unannounced { .. })));
        stream.write("b", &[4, 5, 6, 7]).unwrap();
        stream.finish().unwrap();
        let file = SafetensorsFile::open(&path).unwrap();
        let read: BTreeMap<_, _> = file.tensors().collect();
        assert_eq!((read["a"].bytes(), read["b"].bytes()), ([1, 2, 3].as_slice(), [4, 5, 6, 7].as_slice()));
        std::fs::remove_file(&path).unwrap();
        let stream = SafetensorsStream::create(&path, &tensors, &BTreeMap::new()).unwrap();
        assert!(matches!(stream.finish(), Err(WriteError::Unannounced { tensor }) if tensor == "a"));
    }
}
