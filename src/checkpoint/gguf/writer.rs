//! Writes GGUF files (version 3) tensor by tensor: whole or not at all.

use std::io::{self, Write};
use std::path::Path;

use super::ggml_type::GgmlType;
use super::value::ValueType;
use crate::checkpoint::atomic_file::{AtomicFileError, write_atomically};

const VERSION: u32 = 3;
/// Tensors begin at multiples of this, the format's default.
const ALIGNMENT: u64 = 32;

/// Metadata of a file to be, encoded as it comes.
#[derive(Clone, Debug, Default)]
pub struct MetadataBuilder {
    bytes: Vec<u8>,
    count: u64,
}

impl MetadataBuilder {
    fn key(&mut self, key: &str, kind: ValueType) {
        put_text(&mut self.bytes, key);
        self.bytes.extend((kind as u32).to_le_bytes());
        self.count += 1;
    }

    fn array(&mut self, key: &str, element: ValueType, count: usize) {
        self.key(key, ValueType::Array);
        self.bytes.extend((element as u32).to_le_bytes());
        self.bytes.extend((count as u64).to_le_bytes());
    }

    /// A 32-bit unsigned integer.
    pub fn integer(&mut self, key: &str, value: u32) {
        self.key(key, ValueType::U32);
        self.bytes.extend(value.to_le_bytes());
    }

    /// A number in single precision.
    pub fn number(&mut self, key: &str, value: f32) {
        self.key(key, ValueType::F32);
        self.bytes.extend(value.to_le_bytes());
    }

    /// A flag.
    pub fn flag(&mut self, key: &str, value: bool) {
        self.key(key, ValueType::Bool);
        self.bytes.push(u8::from(value));
    }

    /// A string.
    pub fn text(&mut self, key: &str, value: &str) {
        self.key(key, ValueType::String);
        put_text(&mut self.bytes, value);
    }

    /// An array of strings.
    pub fn texts<T: AsRef<str>>(&mut self, key: &str, values: &[T]) {
        self.array(key, ValueType::String, values.len());
        values.iter().for_each(|value| put_text(&mut self.bytes, value.as_ref()));
    }

    /// An array of 32-bit signed integers.
    pub fn integers(&mut self, key: &str, values: &[i32]) {
        self.array(key, ValueType::I32, values.len());
        values.iter().for_each(|value| self.bytes.extend(value.to_le_bytes()));
    }

    /// An array of numbers in single precision.
    pub fn numbers(&mut self, key: &str, values: &[f32]) {
        self.array(key, ValueType::F32, values.len());
        values.iter().for_each(|value| self.bytes.extend(value.to_le_bytes()));
    }
}

fn put_text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

/// A tensor that will be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorPlan {
    /// Its name in the file.
    pub name: String,
    /// Its dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Its element type, whose blocks divide the innermost dimension.
    pub kind: GgmlType,
}

impl TensorPlan {
    /// Bytes it takes; `u64::MAX` when they cannot be counted, which no disk holds.
    pub fn bytes(&self) -> u64 {
        let elements = self.shape.iter().map(|&size| size as u64).fold(1, u64::saturating_mul);
        (elements / self.kind.block_elements() as u64).saturating_mul(self.kind.block_bytes() as u64)
    }
}

/// Writes a file at `path`: header and metadata, then the tensors in their order, each as `fill` makes it. Nothing is
/// left at `path` of a file that was not finished.
///
/// # Errors
/// When `fill` fails or makes another number of bytes than planned, or the disk is full.
pub fn write_gguf(
    path: &Path,
    metadata: &MetadataBuilder,
    tensors: &[TensorPlan],
    mut fill: impl FnMut(usize) -> io::Result<Vec<u8>>,
) -> Result<(), AtomicFileError> {
    write_atomically(path, |file| {
        let header = header(metadata, tensors);
        file.write_all(&header)?;
        pad(file, header.len() as u64)?;
        for (index, tensor) in tensors.iter().enumerate() {
            let bytes = fill(index)?;
            if bytes.len() as u64 != tensor.bytes() {
                let (name, planned) = (&tensor.name, tensor.bytes());
                let problem = format!("tensor {name} has {} bytes, {planned} were planned", bytes.len());
                return Err(io::Error::other(problem));
            }
            file.write_all(&bytes)?;
            pad(file, bytes.len() as u64)?;
        }
        Ok(())
    })
}

fn pad(file: &mut impl Write, written: u64) -> io::Result<()> {
    let missing = written.next_multiple_of(ALIGNMENT) - written;
    file.write_all(&[0; ALIGNMENT as usize][..missing as usize])
}

fn header(metadata: &MetadataBuilder, tensors: &[TensorPlan]) -> Vec<u8> {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend((tensors.len() as u64).to_le_bytes());
    bytes.extend(metadata.count.to_le_bytes());
    bytes.extend(&metadata.bytes);
    let mut offset = 0u64;
    for tensor in tensors {
        put_text(&mut bytes, &tensor.name);
        bytes.extend((tensor.shape.len() as u32).to_le_bytes());
        tensor.shape.iter().rev().for_each(|&size| bytes.extend((size as u64).to_le_bytes()));
        bytes.extend(tensor.kind.id().to_le_bytes());
        bytes.extend(offset.to_le_bytes());
        offset = offset.saturating_add(tensor.bytes().saturating_add(ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::super::header::Header;
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let mut metadata = MetadataBuilder::default();
        metadata.text("general.architecture", "llama");
        metadata.integer("a", 7);
        metadata.number("b", 0.5);
        metadata.flag("c", true);
        metadata.texts("d", &["x", "", "ß"]);
        metadata.integers("e", &[-1, 2]);
        metadata.numbers("f", &[1.5]);
        let plan = |name: &str, shape: &[usize], kind| TensorPlan {
            name: name.to_owned(),
            shape: shape.to_vec(),
            kind,
        };
        let tensors = [plan("one", &[3], GgmlType::F32), plan("two", &[2, 32], GgmlType::Q8_0)];
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.gguf");
        let bytes = |index: usize| vec![index as u8 + 1; [12, 68][index]];
        write_gguf(&path, &metadata, &tensors, |index| Ok(bytes(index))).unwrap();

        let file = std::fs::read(&path).unwrap();
        let header = Header::parse(&file).unwrap();
        assert_eq!(header.version, 3);
        assert_eq!(header.metadata.integer("a").unwrap(), Some(7));
        assert_eq!(header.metadata.number("b").unwrap(), Some(0.5));
        assert_eq!(header.metadata.flag("c").unwrap(), Some(true));
        let texts: Vec<_> = header.metadata.array("d").unwrap().unwrap().strings().unwrap().collect();
        assert_eq!(texts, ["x".as_bytes(), b"", "ß".as_bytes()]);
        assert_eq!(header.metadata.array("e").unwrap().unwrap().integers().unwrap(), [-1, 2]);
        assert_eq!(header.metadata.array("f").unwrap().unwrap().floats().unwrap(), [1.5]);
        for (index, tensor) in tensors.iter().enumerate() {
            let info = &header.tensors[tensor.name.as_str()];
            assert_eq!((&info.shape, info.kind), (&tensor.shape, tensor.kind));
            assert_eq!(file[info.range.clone()], bytes(index));
        }
        let wrong = write_gguf(&folder.path().join("b.gguf"), &metadata, &tensors, |_| Ok(Vec::new()));
        assert!(wrong.unwrap_err().to_string().ends_with("tensor one has 0 bytes, 12 were planned"));
        assert!(!folder.path().join("b.gguf").exists());
    }
}
