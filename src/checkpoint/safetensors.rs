//! safetensors files: the header is read and checked here before anything touches the data.
//!
//! Layout: 8 bytes of little-endian header length, a JSON object, then the data. The rules are those of the
//! reference crate `safetensors` (header of at most 100 MB, tensors cover the data without hole or overlap),
//! and stricter where it is lax: repeated names are refused instead of the last one winning.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use serde::de::{self, MapAccess, SeqAccess, Visitor};

use super::error::{CheckpointError, shown_message, shown_name};
use super::mapping::{MappedFile, map_file};
use super::tensor::{ElementType, Tensor, TensorData};

/// Longest header that is read, as in the reference crate.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Key of the free-form metadata in the header.
pub const METADATA_KEY: &str = "__metadata__";
/// More dimensions than any array library takes.
const MAX_DIMENSIONS: usize = 32;
const LENGTH_BYTES: usize = 8;

/// Why a safetensors header is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// Less than the 8 bytes of the header length.
    #[error("{size} bytes are too short for a safetensors file; it is truncated or something else")]
    TooShort {
        /// Size of the file.
        size: usize,
    },
    /// The header claims to be larger than any header may be.
    #[error(
        "a header of {length} bytes is over the limit of {MAX_HEADER_BYTES}; this is not a safetensors file"
    )]
    TooLong {
        /// The claimed length.
        length: u64,
    },
    /// The header ends after the file.
    #[error("the header takes {length} bytes but the file has only {size}; it is truncated")]
    PastFile {
        /// The claimed length.
        length: u64,
        /// Size of the file.
        size: usize,
    },
    /// The header is not text.
    #[error("the header is not valid UTF-8 (byte {at})")]
    NotUtf8 {
        /// Offset of the first bad byte in the header.
        at: usize,
    },
    /// The header is not the JSON that it must be.
    #[error("the header is not valid: {message}")]
    Json {
        /// The parser's words.
        message: String,
    },
    /// Two tensors of one name.
    #[error("tensor `{}` is listed twice in the header", shown_name(tensor))]
    DuplicateTensor {
        /// The name.
        tensor: String,
    },
    /// Two metadata entries of one name.
    #[error("metadata key `{}` is listed twice in the header", shown_name(key))]
    DuplicateMetadata {
        /// The name.
        key: String,
    },
    /// An element type that MLX does not compute with.
    #[error("dtype {} of tensor `{}` is not supported", shown_name(dtype), shown_name(tensor))]
    UnsupportedDtype {
        /// The tensor.
        tensor: String,
        /// Its type as the header spells it.
        dtype: String,
    },
    /// The shape describes more bytes than can be counted.
    #[error("the size of tensor `{}` with shape {shape:?} overflows", shown_name(tensor))]
    Overflow {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// The data would end before it begins.
    #[error("tensor `{}` begins at byte {begin} but ends at {end}", shown_name(tensor))]
    Reversed {
        /// The tensor.
        tensor: String,
        /// First byte.
        begin: u64,
        /// One past the last byte.
        end: u64,
    },
    /// The byte range does not fit dtype and shape.
    #[error(
        "tensor `{}` of dtype {dtype} and shape {shape:?} needs {needed} bytes but the header gives it {given}",
        shown_name(tensor)
    )]
    WrongSize {
        /// The tensor.
        tensor: String,
        /// Its element type.
        dtype: ElementType,
        /// Its shape.
        shape: Vec<usize>,
        /// Bytes of that shape.
        needed: u64,
        /// Bytes of its range.
        given: u64,
    },
    /// The data ends after the file.
    #[error(
        "tensor `{}` ends at byte {end} of {available} bytes of data; the file is truncated",
        shown_name(tensor)
    )]
    PastData {
        /// The tensor.
        tensor: String,
        /// One past its last byte, counted from the end of the header.
        end: u64,
        /// Bytes after the header.
        available: u64,
    },
    /// Two tensors share bytes.
    #[error("tensors `{}` and `{}` overlap", shown_name(first), shown_name(second))]
    Overlap {
        /// The one that begins first.
        first: String,
        /// The other one.
        second: String,
    },
    /// Bytes between tensors that belong to none.
    #[error("{bytes} bytes before tensor `{}` belong to no tensor", shown_name(tensor))]
    Hole {
        /// The tensor after the hole.
        tensor: String,
        /// Size of the hole.
        bytes: u64,
    },
    /// Bytes at the end that belong to no tensor.
    #[error("{bytes} bytes at the end belong to no tensor")]
    Trailing {
        /// How many.
        bytes: u64,
    },
}

/// What the header says about one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: ElementType,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Where its bytes lie, counted from the start of the file; within the file.
    pub range: Range<usize>,
}

/// A checked header.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// The tensors in the order of their data.
    pub tensors: Vec<TensorInfo>,
    /// `__metadata__`; empty when there is none.
    pub metadata: BTreeMap<String, String>,
}

/// Reads the header of a safetensors file. `file` is the whole file; only its header is touched.
///
/// # Errors
/// Whatever is wrong with the header; a header that passes describes ranges inside `file`.
pub fn parse_header(file: &[u8]) -> Result<Header, HeaderError> {
    let (length, rest) =
        file.split_first_chunk::<LENGTH_BYTES>().ok_or(HeaderError::TooShort { size: file.len() })?;
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES {
        return Err(HeaderError::TooLong { length });
    }
    let (header, data) = usize::try_from(length)
        .ok()
        .and_then(|length| rest.split_at_checked(length))
        .ok_or(HeaderError::PastFile { length, size: file.len() })?;
    let text =
        std::str::from_utf8(header).map_err(|error| HeaderError::NotUtf8 { at: error.valid_up_to() })?;
    let raw: RawHeader = serde_json::from_str(text)
        .map_err(|error| HeaderError::Json { message: shown_message(&error.to_string()) })?;

    let mut metadata = BTreeMap::new();
    for (key, value) in raw.metadata {
        if metadata.contains_key(&key) {
            return Err(HeaderError::DuplicateMetadata { key });
        }
        metadata.insert(key, value);
    }
    Ok(Header { tensors: check_tensors(raw.tensors, file.len() - data.len(), data.len())?, metadata })
}

fn check_tensors(
    raw: Vec<(String, RawTensor)>,
    data_start: usize,
    data_size: usize,
) -> Result<Vec<TensorInfo>, HeaderError> {
    let mut seen = HashSet::with_capacity(raw.len());
    for (name, _) in &raw {
        if !seen.insert(name.as_str()) {
            return Err(HeaderError::DuplicateTensor { tensor: name.clone() });
        }
    }
    let mut tensors = raw
        .into_iter()
        .map(|(name, raw)| check_tensor(name, raw, data_start, data_size))
        .collect::<Result<Vec<_>, _>>()?;
    tensors.sort_by_key(|tensor| (tensor.range.start, tensor.range.end));

    let mut covered = data_start;
    let mut previous: Option<&TensorInfo> = None;
    for tensor in &tensors {
        if tensor.range.start > covered {
            let bytes = (tensor.range.start - covered) as u64;
            return Err(HeaderError::Hole { tensor: tensor.name.clone(), bytes });
        }
        if tensor.range.start < covered {
            let first = previous.map(|previous| previous.name.clone()).unwrap_or_default();
            return Err(HeaderError::Overlap { first, second: tensor.name.clone() });
        }
        covered = tensor.range.end;
        previous = Some(tensor);
    }
    match data_start + data_size - covered {
        0 => Ok(tensors),
        bytes => Err(HeaderError::Trailing { bytes: bytes as u64 }),
    }
}

fn check_tensor(
    name: String,
    raw: RawTensor,
    data_start: usize,
    data_size: usize,
) -> Result<TensorInfo, HeaderError> {
    let Some(dtype) = ElementType::from_safetensors(&raw.dtype) else {
        return Err(HeaderError::UnsupportedDtype { tensor: name, dtype: raw.dtype });
    };
    let shape: Option<Vec<usize>> = raw.shape.0.iter().map(|&size| usize::try_from(size).ok()).collect();
    let Some(needed) = shape.as_deref().and_then(|shape| dtype.bytes_of(shape)) else {
        let shape = raw.shape.0.iter().map(|&size| usize::try_from(size).unwrap_or(usize::MAX)).collect();
        return Err(HeaderError::Overflow { tensor: name, shape });
    };
    let shape = shape.unwrap_or_default();
    let (begin, end) = raw.data_offsets;
    let Some(given) = end.checked_sub(begin) else {
        return Err(HeaderError::Reversed { tensor: name, begin, end });
    };
    if given != needed as u64 {
        return Err(HeaderError::WrongSize { tensor: name, dtype, shape, needed: needed as u64, given });
    }
    if end > data_size as u64 {
        return Err(HeaderError::PastData { tensor: name, end, available: data_size as u64 });
    }
    // Both fit: begin <= end <= data_size.
    let range = data_start + begin as usize..data_start + end as usize;
    Ok(TensorInfo { name, dtype, shape, range })
}

/// The header as written, repeated names included.
#[derive(Default)]
struct RawHeader {
    metadata: Vec<(String, String)>,
    tensors: Vec<(String, RawTensor)>,
}

#[derive(Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Shape,
    data_offsets: (u64, u64),
}

struct Shape(Vec<u64>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Dimensions;
        impl<'de> Visitor<'de> for Dimensions {
            type Value = Shape;
            fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
                write!(formatter, "a list of dimensions")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Shape, A::Error> {
                let mut shape = Vec::new();
                while let Some(size) = sequence.next_element()? {
                    if shape.len() == MAX_DIMENSIONS {
                        return Err(de::Error::custom(format!("more than {MAX_DIMENSIONS} dimensions")));
                    }
                    shape.push(size);
                }
                Ok(Shape(shape))
            }
        }
        deserializer.deserialize_seq(Dimensions)
    }
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;
            fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
                write!(formatter, "an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut header = RawHeader::default();
                let mut metadata_seen = false;
                while let Some(name) = map.next_key::<String>()? {
                    // serde_json appends the position to its messages and takes it off again here.
                    let in_tensor =
                        |error: A::Error| de::Error::custom(format!("`{}`: {}", shown_name(&name), error));
                    if name != METADATA_KEY {
                        let tensor = map.next_value().map_err(in_tensor)?;
                        header.tensors.push((name, tensor));
                    } else if std::mem::replace(&mut metadata_seen, true) {
                        return Err(de::Error::custom(format!("`{METADATA_KEY}` is listed twice")));
                    } else if let Some(StringPairs(pairs)) = map.next_value().map_err(in_tensor)? {
                        header.metadata = pairs;
                    }
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// A JSON object of strings as written, repeated keys included.
pub(super) struct StringPairs(pub(super) Vec<(String, String)>);

impl<'de> Deserialize<'de> for StringPairs {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = StringPairs;
            fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
                write!(formatter, "an object of strings")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<StringPairs, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(StringPairs(pairs))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

/// A mapped safetensors file with a checked header.
///
/// The mapping is shared by all its tensors and nothing of the data is read before it is used. The file must
/// not be cut short while it is mapped.
#[derive(Clone, Debug)]
pub struct SafetensorsFile {
    path: PathBuf,
    header: Header,
    map: MappedFile,
}

impl SafetensorsFile {
    /// Maps the file and checks its header.
    ///
    /// # Errors
    /// When it cannot be mapped or its header does not hold; names the file.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let unreadable = |cause| CheckpointError::Read { file: path.to_owned(), cause };
        // Asked before opening: to open a pipe is to wait for its writer.
        if !std::fs::metadata(path).map_err(unreadable)?.is_file() {
            return Err(CheckpointError::NotAFile { file: path.to_owned() });
        }
        let file = File::open(path).map_err(unreadable)?;
        let map = map_file(&file).map_err(unreadable)?;
        let header =
            parse_header(&map).map_err(|cause| CheckpointError::Header { file: path.to_owned(), cause })?;
        Ok(Self { path: path.to_owned(), header, map })
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `__metadata__` of the header.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }

    /// The tensors in the order of their data.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, Tensor)> {
        self.header.tensors.iter().map(|info| (info.name.as_str(), self.view(info)))
    }

    fn view(&self, info: &TensorInfo) -> Tensor {
        let data = TensorData::Mapped { file: Arc::clone(&self.map), range: info.range.clone() };
        Tensor { dtype: info.dtype, shape: info.shape.clone(), data }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend(std::iter::repeat_n(7, data));
        bytes
    }

    fn parse(header: &str, data: usize) -> Result<Header, HeaderError> {
        parse_header(&file(header, data))
    }

    #[test]
    fn a_valid_header_gives_absolute_ranges() {
        let text = r#"{"__metadata__":{"format":"mlx"},
            "b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},
            "a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},
            "empty":{"dtype":"U32","shape":[0,5],"data_offsets":[4,4]}}"#;
        let header = parse(text, 16).unwrap();
        assert_eq!(header.metadata["format"], "mlx");
        let start = 8 + text.len();
        let names: Vec<_> = header.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        assert_eq!(names, ["a", "empty", "b"]);
        assert_eq!(header.tensors[0].range, start..start + 4);
        assert_eq!(header.tensors[0].shape, Vec::<usize>::new());
        assert_eq!(header.tensors[2].range, start + 4..start + 16);
    }

    #[test]
    fn a_file_without_tensors_is_valid() {
        assert_eq!(parse("{}", 0), Ok(Header::default()));
        assert_eq!(parse(r#"{"__metadata__":null}"#, 0), Ok(Header::default()));
    }

    #[test]
    fn errors_of_one_entry_name_the_tensor() {
        let message = |entry: &str| parse(&format!("{{\"w\":{entry}}}"), 4).unwrap_err().to_string();
        for (entry, expected) in [
            (r#"{"shape":[1],"data_offsets":[0,4]}"#, "missing field `dtype`"),
            (r#"{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}"#, "invalid value: integer `-1`"),
            (r#"{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}"#, "invalid type: floating point"),
            (r#"{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}"#, "duplicate field `dtype`"),
            (r#"{"dtype":"F32","shape":[1],"data_offsets":[0]}"#, "invalid length 1"),
            ("[]", "invalid length 0"),
        ] {
            let message = message(entry);
            assert!(message.contains("`w`: ") && message.contains(expected), "{message}");
            assert_eq!(message.matches(" at line ").count(), 1, "{message}");
        }
    }

    #[test]
    fn thousands_of_dimensions_are_refused() {
        let shape = vec!["1"; 100_000].join(",");
        let error = parse(&format!(r#"{{"w":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,1]}}}}"#), 1);
        assert!(error.unwrap_err().to_string().contains("more than 32 dimensions"));
    }

    #[test]
    fn deep_nesting_is_an_error_not_a_crash() {
        let deep = format!("{{\"w\":{}", "[".repeat(1_000_000));
        assert!(matches!(parse(&deep, 0), Err(HeaderError::Json { .. })));
    }

    #[test]
    fn a_size_of_zero_does_not_hide_an_overflow() {
        let error = parse(
            r#"{"w":{"dtype":"F32","shape":[1152921504606846976,1152921504606846976,0],"data_offsets":[0,0]}}"#,
            0,
        );
        assert!(matches!(error, Err(HeaderError::Overflow { .. })), "{error:?}");
    }
}
