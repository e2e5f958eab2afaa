//! The header of a GGUF file: metadata and tensor descriptions, read with checked arithmetic.
//!
//! The file is not trusted. Every length is compared with what is left of the file before anything is
//! allocated or skipped, and what is kept points into the file, so a lying header costs no memory.
//! Format: ggml's docs/gguf.md.

use std::collections::BTreeMap;
use std::ops::Range;

use super::error::Fault;
use super::ggml_type::GgmlType;
use super::value::{Array, Metadata, Value, ValueType};

const MAX_ENTRIES: u64 = 1 << 16;
const MAX_KEY_BYTES: u64 = (1 << 16) - 1;
const MAX_TENSOR_NAME_BYTES: u64 = 256;
const MAX_HEADER_BYTES: usize = 256 << 20;
const MAX_DIMENSIONS: u64 = 4;
const MAX_ALIGNMENT: u64 = 1 << 16;
const DEFAULT_ALIGNMENT: u64 = 32;

/// A tensor as the file describes it.
#[derive(Clone, Debug)]
pub struct TensorInfo {
    /// Dimensions, outermost first (the file has them the other way round).
    pub shape: Vec<usize>,
    /// Element type.
    pub kind: GgmlType,
    /// Where its bytes lie in the file; checked against the file's length.
    pub range: Range<usize>,
}

impl TensorInfo {
    /// Length of the innermost dimension.
    pub fn columns(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Product of all dimensions but the innermost.
    pub fn rows(&self) -> usize {
        let outer = self.shape.len().saturating_sub(1);
        self.shape[..outer].iter().product()
    }
}

/// A parsed header.
#[derive(Debug)]
pub struct Header<'a> {
    /// Format version, 2 or 3.
    pub version: u32,
    /// The metadata.
    pub metadata: Metadata<'a>,
    /// The tensors by name.
    pub tensors: BTreeMap<&'a str, TensorInfo>,
}

impl<'a> Header<'a> {
    /// Reads the header of a whole file's bytes.
    ///
    /// # Errors
    /// Whatever makes the file unusable: see [`Fault`].
    pub fn parse(file: &'a [u8]) -> Result<Self, Fault> {
        let mut cursor = Cursor { file, at: 0 };
        let magic = file.get(..4).unwrap_or_default();
        if magic != b"GGUF" {
            return Err(Fault::NotGguf);
        }
        cursor.at = 4;
        let version = cursor.u32("the version")?;
        match version {
            2 | 3 => {}
            _ if matches!(version.swap_bytes(), 1..=3) => return Err(Fault::BigEndian),
            _ => return Err(Fault::Version(version)),
        }
        let tensor_count = cursor.count("the number of tensors", MAX_ENTRIES)?;
        let key_count = cursor.count("the number of metadata keys", MAX_ENTRIES)?;

        let mut metadata = Metadata::default();
        for _ in 0..key_count {
            let key = cursor.name("a metadata key", MAX_KEY_BYTES)?;
            let value = cursor.value(key)?;
            if metadata.entries.insert(key, value).is_some() {
                return Err(Fault::DuplicateKey(key.to_owned()));
            }
        }
        let alignment = alignment(&metadata)?;

        let mut tensors = BTreeMap::new();
        for _ in 0..tensor_count {
            let (name, info) = cursor.tensor(alignment)?;
            if tensors.insert(name, info).is_some() {
                return Err(Fault::DuplicateTensor(name.to_owned()));
            }
        }
        place(&mut tensors, file.len(), cursor.at.next_multiple_of(alignment))?;
        Ok(Self { version, metadata, tensors })
    }
}

fn alignment(metadata: &Metadata<'_>) -> Result<usize, Fault> {
    const KEY: &str = "general.alignment";
    let alignment = metadata.integer(KEY)?.unwrap_or(DEFAULT_ALIGNMENT);
    if !alignment.is_power_of_two() || alignment > MAX_ALIGNMENT {
        return Err(Fault::key(
            KEY,
            format!("is {alignment}, not a power of two of at most {MAX_ALIGNMENT}"),
        ));
    }
    Ok(alignment as usize)
}

/// Turns offsets into the data section into ranges of the file, and refuses any that leave it or overlap.
fn place(tensors: &mut BTreeMap<&str, TensorInfo>, length: usize, data: usize) -> Result<(), Fault> {
    for (name, info) in tensors.iter_mut() {
        let start = info.range.start.checked_add(data);
        let end = info.range.end.checked_add(data);
        match (start, end) {
            (Some(start), Some(end)) if end <= length => info.range = start..end,
            _ => {
                return Err(Fault::tensor(name, format!("lies beyond the end of the file ({length} bytes)")));
            }
        }
    }
    let mut ranges: Vec<_> = tensors.iter().map(|(name, info)| (&info.range, name)).collect();
    ranges.sort_by_key(|(range, _)| (range.start, range.end));
    for pair in ranges.windows(2) {
        let [(before, first), (after, second)] = pair else { continue };
        if after.start < before.end {
            return Err(Fault::Overlap { first: (**first).to_owned(), second: (**second).to_owned() });
        }
    }
    Ok(())
}

struct Cursor<'a> {
    file: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, length: usize, what: &'static str) -> Result<&'a [u8], Fault> {
        let end = self.at.checked_add(length);
        let bytes = end.and_then(|end| self.file.get(self.at..end));
        let bytes = bytes.ok_or(Fault::Truncated { what, length: self.file.len() })?;
        self.at += length;
        if self.at > MAX_HEADER_BYTES {
            let (value, limit) = (self.at as u64, MAX_HEADER_BYTES as u64);
            return Err(Fault::TooLarge { what: "the size of the metadata", value, limit });
        }
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], Fault> {
        let bytes = self.take(N, what)?;
        bytes.try_into().map_err(|_| Fault::Truncated { what, length: self.file.len() })
    }

    fn u32(&mut self, what: &'static str) -> Result<u32, Fault> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &'static str) -> Result<u64, Fault> {
        self.array(what).map(u64::from_le_bytes)
    }

    fn count(&mut self, what: &'static str, limit: u64) -> Result<u64, Fault> {
        let value = self.u64(what)?;
        if value > limit { Err(Fault::TooLarge { what, value, limit }) } else { Ok(value) }
    }

    fn string(&mut self, what: &'static str) -> Result<&'a [u8], Fault> {
        let length = self.u64(what)?;
        let length =
            usize::try_from(length).map_err(|_| Fault::Truncated { what, length: self.file.len() })?;
        self.take(length, what)
    }

    fn name(&mut self, what: &'static str, limit: u64) -> Result<&'a str, Fault> {
        let at = self.at;
        let bytes = self.string(what)?;
        if bytes.len() as u64 > limit {
            return Err(Fault::TooLarge { what: "the length of a name", value: bytes.len() as u64, limit });
        }
        std::str::from_utf8(bytes).map_err(|_| Fault::NotUtf8 { what, at })
    }

    fn value_type(&mut self, key: &str) -> Result<ValueType, Fault> {
        let id = self.u32("a metadata value")?;
        ValueType::from_id(id).ok_or_else(|| Fault::key(key, format!("has a value of unknown type {id}")))
    }

    fn value(&mut self, key: &str) -> Result<Value<'a>, Fault> {
        const WHAT: &str = "a metadata value";
        Ok(match self.value_type(key)? {
            ValueType::U8 => Value::Unsigned(u8::from_le_bytes(self.array(WHAT)?).into()),
            ValueType::U16 => Value::Unsigned(u16::from_le_bytes(self.array(WHAT)?).into()),
            ValueType::U32 => Value::Unsigned(u32::from_le_bytes(self.array(WHAT)?).into()),
            ValueType::U64 => Value::Unsigned(u64::from_le_bytes(self.array(WHAT)?)),
            ValueType::I8 => Value::Signed(i8::from_le_bytes(self.array(WHAT)?).into()),
            ValueType::I16 => Value::Signed(i16::from_le_bytes(self.array(WHAT)?).into()),
            ValueType::I32 => Value::Signed(i32::from_le_bytes(self.array(WHAT)?).into()),
            ValueType::I64 => Value::Signed(i64::from_le_bytes(self.array(WHAT)?)),
            ValueType::F32 => Value::F32(f32::from_le_bytes(self.array(WHAT)?)),
            ValueType::F64 => Value::F64(f64::from_le_bytes(self.array(WHAT)?)),
            ValueType::Bool => match self.array(WHAT)? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [other] => return Err(Fault::key(key, format!("is a flag with the value {other}"))),
            },
            ValueType::String => Value::String(self.string(WHAT)?),
            ValueType::Array => Value::Array(self.elements(key)?),
        })
    }

    fn elements(&mut self, key: &str) -> Result<Array<'a>, Fault> {
        const WHAT: &str = "a metadata array";
        let element = self.value_type(key)?;
        let count = self.u64(WHAT)?;
        let truncated = Fault::Truncated { what: WHAT, length: self.file.len() };
        let Ok(count) = usize::try_from(count) else { return Err(truncated) };
        let Some(least) = count.checked_mul(element.minimum_size()) else { return Err(truncated) };
        let start = self.at;
        match element {
            ValueType::Array => return Err(Fault::key(key, "is an array of arrays, which is not supported")),
            ValueType::String => {
                if least > self.file.len() - start {
                    return Err(truncated);
                }
                for _ in 0..count {
                    self.string(WHAT)?;
                }
            }
            _ => {
                self.take(least, WHAT)?;
            }
        }
        Ok(Array { element, count, bytes: &self.file[start..self.at] })
    }

    /// One tensor description; its range is still relative to the data section.
    fn tensor(&mut self, alignment: usize) -> Result<(&'a str, TensorInfo), Fault> {
        const WHAT: &str = "a tensor description";
        let name = self.name("a tensor name", MAX_TENSOR_NAME_BYTES)?;
        let dimensions = u64::from(self.u32(WHAT)?);
        if dimensions == 0 || dimensions > MAX_DIMENSIONS {
            let problem = format!("has {dimensions} dimensions, not 1 to {MAX_DIMENSIONS}");
            return Err(Fault::tensor(name, problem));
        }
        let mut shape = Vec::with_capacity(dimensions as usize);
        let mut elements = Some(1_usize);
        for _ in 0..dimensions {
            let length = usize::try_from(self.u64(WHAT)?).ok().filter(|&length| length > 0);
            elements = elements.zip(length).and_then(|(elements, length)| elements.checked_mul(length));
            shape.push(length.unwrap_or(0));
        }
        let kind = GgmlType::from_id(self.u32(WHAT)?).map_err(|kind| {
            let supported = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and Q2_K to Q6_K";
            Fault::tensor(name, format!("has type {kind}, which is not supported; supported are {supported}"))
        })?;
        let offset = self.u64(WHAT)?;

        let row = shape[0];
        if !row.is_multiple_of(kind.block_elements()) {
            let block = kind.block_elements();
            let problem = format!("has rows of {row} elements, not a multiple of {block} as {kind:?} needs");
            return Err(Fault::tensor(name, problem));
        }
        shape.reverse();
        let size = elements
            .map(|elements| elements / kind.block_elements())
            .and_then(|blocks| blocks.checked_mul(kind.block_bytes()))
            .filter(|_| elements.is_some_and(|elements| elements.checked_mul(4).is_some()))
            .ok_or_else(|| Fault::tensor(name, format!("has the impossible shape {shape:?}")))?;
        let start = usize::try_from(offset).ok();
        let end = start.and_then(|start| start.checked_add(size));
        let (Some(start), Some(end)) = (start, end) else {
            return Err(Fault::tensor(name, format!("has the impossible offset {offset}")));
        };
        if !start.is_multiple_of(alignment) {
            let problem = format!("has offset {offset}, not a multiple of the alignment {alignment}");
            return Err(Fault::tensor(name, problem));
        }
        Ok((name, TensorInfo { shape, kind, range: start..end }))
    }
}
