//! Metadata values and typed access to them. Nothing is copied: strings and arrays point into the file.

use std::collections::BTreeMap;

use super::error::Fault;

/// The value types of the format, by their number in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueType {
    /// 0
    U8,
    /// 1
    I8,
    /// 2
    U16,
    /// 3
    I16,
    /// 4
    U32,
    /// 5
    I32,
    /// 6
    F32,
    /// 7: one byte, 0 or 1
    Bool,
    /// 8: 64-bit length, then bytes
    String,
    /// 9: element type, 64-bit count, then elements
    Array,
    /// 10
    U64,
    /// 11
    I64,
    /// 12
    F64,
}

impl ValueType {
    /// The type a number in the file stands for.
    pub fn from_id(id: u32) -> Option<Self> {
        const TYPES: [ValueType; 13] = [
            ValueType::U8,
            ValueType::I8,
            ValueType::U16,
            ValueType::I16,
            ValueType::U32,
            ValueType::I32,
            ValueType::F32,
            ValueType::Bool,
            ValueType::String,
            ValueType::Array,
            ValueType::U64,
            ValueType::I64,
            ValueType::F64,
        ];
        TYPES.get(usize::try_from(id).ok()?).copied()
    }

    /// The bytes of one element, or the fewest that one takes if its length varies.
    pub fn minimum_size(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::String => 8,
            Self::Array => 12,
        }
    }
}

/// One metadata value.
#[derive(Clone, Copy, Debug)]
pub enum Value<'a> {
    /// Any unsigned integer type.
    Unsigned(u64),
    /// Any signed integer type.
    Signed(i64),
    /// Single precision.
    F32(f32),
    /// Double precision.
    F64(f64),
    /// A flag.
    Bool(bool),
    /// Bytes that should be UTF-8; checked when asked for.
    String(&'a [u8]),
    /// Elements of one type.
    Array(Array<'a>),
}

impl Value<'_> {
    fn describe(&self) -> &'static str {
        match self {
            Self::Unsigned(_) => "an unsigned integer",
            Self::Signed(_) => "a signed integer",
            Self::F32(_) | Self::F64(_) => "a floating-point number",
            Self::Bool(_) => "a flag",
            Self::String(_) => "a string",
            Self::Array(_) => "an array",
        }
    }

    fn integer(&self) -> Option<u64> {
        match *self {
            Self::Unsigned(value) => Some(value),
            Self::Signed(value) => u64::try_from(value).ok(),
            _ => None,
        }
    }
}

/// An array of scalars or strings. The header's parser has checked that `bytes` holds `count` elements.
#[derive(Clone, Copy, Debug)]
pub struct Array<'a> {
    pub(super) element: ValueType,
    pub(super) count: usize,
    pub(super) bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The strings, as raw bytes; `None` if it holds something else.
    pub fn strings(&self) -> Option<Strings<'a>> {
        (self.element == ValueType::String).then_some(Strings { rest: self.bytes })
    }

    /// The elements as integers (flags count as 0 and 1); `None` if it holds something else.
    pub fn integers(&self) -> Option<Vec<i64>> {
        let bytes = self.bytes;
        Some(match self.element {
            ValueType::U8 | ValueType::Bool => bytes.iter().map(|&b| i64::from(b)).collect(),
            ValueType::I8 => bytes.iter().map(|&b| i64::from(b.cast_signed())).collect(),
            ValueType::U16 => each(bytes, |b| i64::from(u16::from_le_bytes(b))),
            ValueType::I16 => each(bytes, |b| i64::from(i16::from_le_bytes(b))),
            ValueType::U32 => each(bytes, |b| i64::from(u32::from_le_bytes(b))),
            ValueType::I32 => each(bytes, |b| i64::from(i32::from_le_bytes(b))),
            ValueType::I64 => each(bytes, i64::from_le_bytes),
            ValueType::U64 => each(bytes, |b| i64::try_from(u64::from_le_bytes(b)).unwrap_or(i64::MAX)),
            _ => return None,
        })
    }

    /// The elements as single-precision numbers (32-bit integers too, as llama.cpp reads scores); `None` if
    /// it holds something else.
    pub fn floats(&self) -> Option<Vec<f32>> {
        match self.element {
            ValueType::F32 => Some(each(self.bytes, f32::from_le_bytes)),
            ValueType::I32 => Some(each(self.bytes, |b| i32::from_le_bytes(b) as f32)),
            _ => None,
        }
    }

    /// The bytes of an array of 8-bit integers; `None` if it holds something else.
    pub fn octets(&self) -> Option<&'a [u8]> {
        matches!(self.element, ValueType::U8 | ValueType::I8).then_some(self.bytes)
    }
}

fn each<const N: usize, T>(bytes: &[u8], decode: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().map(|&chunk| decode(chunk)).collect()
}

/// Iterates over the strings of an array.
pub struct Strings<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Strings<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let (length, rest) = self.rest.split_first_chunk::<8>()?;
        let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
        let (text, rest) = rest.split_at_checked(length)?;
        self.rest = rest;
        Some(text)
    }
}

/// The metadata of a file, by key.
#[derive(Debug, Default)]
pub struct Metadata<'a> {
    pub(super) entries: BTreeMap<&'a str, Value<'a>>,
}

impl<'a> Metadata<'a> {
    /// The value under `key`.
    pub fn get(&self, key: &str) -> Option<&Value<'a>> {
        self.entries.get(key)
    }

    /// The keys, in order.
    pub fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.entries.keys().copied()
    }

    /// A string.
    ///
    /// # Errors
    /// If the value is something else or not UTF-8.
    pub fn text(&self, key: &str) -> Result<Option<&'a str>, Fault> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(bytes)) => match std::str::from_utf8(bytes) {
                Ok(text) => Ok(Some(text)),
                Err(_) => Err(Fault::key(key, "is not UTF-8")),
            },
            Some(other) => Err(mismatch(key, other, "a string")),
        }
    }

    /// A non-negative integer of any width.
    ///
    /// # Errors
    /// If the value is something else.
    pub fn integer(&self, key: &str) -> Result<Option<u64>, Fault> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.integer().map(Some).ok_or_else(|| mismatch(key, value, "a non-negative integer"))
    }

    /// A non-negative integer, or an array of equal ones (a value given per layer).
    ///
    /// # Errors
    /// If the value is something else, or differs between layers.
    pub fn uniform_integer(&self, key: &str) -> Result<Option<u64>, Fault> {
        let Some(Value::Array(array)) = self.get(key) else { return self.integer(key) };
        let values = array.integers().unwrap_or_default();
        match values.first().and_then(|&first| u64::try_from(first).ok()) {
            Some(first) if values.iter().all(|&value| value == values[0]) => Ok(Some(first)),
            _ => Err(Fault::key(key, "differs from layer to layer, which is not supported")),
        }
    }

    /// A finite number. One stored in single precision becomes the shortest decimal that rounds to it, so
    /// that 1e-5 is 1e-5 again, as in the configuration it was written from.
    ///
    /// # Errors
    /// If the value is something else or not finite.
    pub fn number(&self, key: &str) -> Result<Option<f64>, Fault> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = match *value {
            Value::F32(number) => number.to_string().parse().unwrap_or(f64::from(number)),
            Value::F64(number) => number,
            Value::Unsigned(number) => number as f64,
            Value::Signed(number) => number as f64,
            _ => return Err(mismatch(key, value, "a number")),
        };
        if number.is_finite() { Ok(Some(number)) } else { Err(Fault::key(key, "is not a finite number")) }
    }

    /// A flag.
    ///
    /// # Errors
    /// If the value is something else.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, Fault> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => Err(mismatch(key, other, "a flag")),
        }
    }

    /// An array.
    ///
    /// # Errors
    /// If the value is something else.
    pub fn array(&self, key: &str) -> Result<Option<Array<'a>>, Fault> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(array)) => Ok(Some(*array)),
            Some(other) => Err(mismatch(key, other, "an array")),
        }
    }
}

fn mismatch(key: &str, found: &Value<'_>, expected: &str) -> Fault {
    Fault::key(key, format!("is {} where {expected} is expected", found.describe()))
}
