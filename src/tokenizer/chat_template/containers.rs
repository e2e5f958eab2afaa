//! Python's container types as template values: list, tuple, dict, the dict views, `range` and generators.
//!
//! minijinja has containers of its own, but they differ from Python's where templates can tell: a dict's methods
//! shadow its keys, a generator is true even when it is empty and can be read once, views have a length but no
//! index. They also nest without bound, and dropping or comparing a value nested ten thousand deep overflows the
//! stack; every container here knows its depth and refuses to go past [`super::values::MAX_DEPTH`].

use std::cmp::Ordering;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use minijinja::value::{DynObject, Enumerator, Object, ObjectRepr};
use minijinja::{Error, State, Value};

use super::values::{container_depth, error, is_same, type_name};
use super::{methods, python_repr};

/// How many nodes minijinja's own comparisons look at (for `loop.changed` and keys that are tuples); beyond, values
/// count as different. It compares without paying fuel, and a list may hold another many times over.
pub(super) const COMPARED_NODES: usize = 200;

/// A dict with at most this many entries is searched in order; a larger one keeps an index.
const LINEAR_SEARCH: usize = 8;

/// Whether two values are equal, as far as `left` nodes can tell.
fn same_within(a: &Value, b: &Value, left: &mut usize) -> bool {
    let Some(rest) = left.checked_sub(1) else {
        return false;
    };
    *left = rest;
    if let (Some(a), Some(b)) = (a.downcast_object_ref::<PySeq>(), b.downcast_object_ref::<PySeq>()) {
        return a.same_within(b, left);
    }
    if let (Some(a), Some(b)) = (a.downcast_object_ref::<PyDict>(), b.downcast_object_ref::<PyDict>()) {
        return a.same_within(b, left);
    }
    match (a.as_object(), b.as_object()) {
        (Some(_), Some(_)) => is_same(a, b),
        (None, None) => a == b,
        _ => false,
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SeqKind {
    List,
    Tuple,
}

impl SeqKind {
    pub(super) fn type_name(self) -> &'static str {
        match self {
            SeqKind::List => "list",
            SeqKind::Tuple => "tuple",
        }
    }
}

/// A Python list or tuple.
#[derive(Debug)]
pub(super) struct PySeq {
    pub(super) kind: SeqKind,
    pub(super) items: Vec<Value>,
    pub(super) depth: usize,
}

impl PySeq {
    pub(super) fn list(items: Vec<Value>) -> Result<Value, Error> {
        PySeq::build(SeqKind::List, items)
    }

    pub(super) fn tuple(items: Vec<Value>) -> Result<Value, Error> {
        PySeq::build(SeqKind::Tuple, items)
    }

    fn same_within(&self, other: &PySeq, left: &mut usize) -> bool {
        self.kind == other.kind
            && self.items.len() == other.items.len()
            && self.items.iter().zip(&other.items).all(|(a, b)| same_within(a, b, left))
    }

    pub(super) fn build(kind: SeqKind, items: Vec<Value>) -> Result<Value, Error> {
        let depth = container_depth(&items)?;
        Ok(Value::from_object(PySeq { kind, items, depth }))
    }
}

impl Object for PySeq {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.items.get(key.as_usize()?).cloned()
    }

    fn get_value_by_str(self: &Arc<Self>, _attribute: &str) -> Option<Value> {
        None
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.items.len())
    }

    fn call_method(
        self: &Arc<Self>,
        state: &mut State<'_, '_>,
        method: &str,
        args: &[Value],
    ) -> Result<Value, Error> {
        methods::call_seq(state, self, method, args)
    }

    fn custom_cmp(self: &Arc<Self>, other: &DynObject) -> Option<Ordering> {
        let (mut left, other) = (COMPARED_NODES, other.downcast_ref::<Self>()?);
        Some(if self.same_within(other, &mut left) { Ordering::Equal } else { Ordering::Less })
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        python_repr::render(f, &Value::from_dyn_object(self.clone()))
    }
}

/// A Python dict: insertion order, methods before keys when read as an attribute.
#[derive(Debug, Default)]
pub(super) struct PyDict {
    entries: Vec<(Value, Value)>,
    index: HashMap<Box<str>, usize>,
    pub(super) depth: usize,
}

impl PyDict {
    /// Builds a dict; of equal keys the last value wins, in the first one's place.
    pub(super) fn from_pairs(pairs: impl IntoIterator<Item = (Value, Value)>) -> Result<Value, Error> {
        let mut dict = PyDict::default();
        for (key, value) in pairs {
            match dict.position(&key) {
                Some(position) => {
                    if let Some(entry) = dict.entries.get_mut(position) {
                        entry.1 = value;
                    }
                }
                None => dict.push(key, value),
            }
        }
        dict.depth = container_depth(dict.entries.iter().flat_map(|(key, value)| [key, value]))?;
        Ok(Value::from_object(dict))
    }

    fn push(&mut self, key: Value, value: Value) {
        if self.entries.len() == LINEAR_SEARCH {
            for (position, (key, _)) in self.entries.iter().enumerate() {
                if let Some(key) = key.as_str() {
                    self.index.insert(key.into(), position);
                }
            }
        }
        if self.entries.len() >= LINEAR_SEARCH
            && let Some(key) = key.as_str()
        {
            self.index.insert(key.into(), self.entries.len());
        }
        self.entries.push((key, value));
    }

    fn position(&self, key: &Value) -> Option<usize> {
        match key.as_str() {
            Some(key) => self.position_of(key),
            None => self
                .entries
                .iter()
                .position(|(candidate, _)| candidate.as_str().is_none() && key == candidate),
        }
    }

    fn position_of(&self, key: &str) -> Option<usize> {
        if self.entries.len() > LINEAR_SEARCH {
            return self.index.get(key).copied();
        }
        self.entries.iter().position(|(candidate, _)| candidate.as_str() == Some(key))
    }

    fn same_within(&self, other: &PyDict, left: &mut usize) -> bool {
        self.entries.len() == other.entries.len()
            && self
                .entries
                .iter()
                .all(|(key, value)| other.get(key).is_some_and(|other| same_within(value, &other, left)))
    }

    /// The value under a key, as `dict[key]` reads it.
    pub(super) fn get(&self, key: &Value) -> Option<Value> {
        self.entry(self.position(key)?)
    }

    /// The value under a string key.
    pub(super) fn get_str(&self, key: &str) -> Option<Value> {
        self.entry(self.position_of(key)?)
    }

    fn entry(&self, position: usize) -> Option<Value> {
        self.entries.get(position).map(|(_, value)| value.clone())
    }

    pub(super) fn entries(&self) -> &[(Value, Value)] {
        &self.entries
    }
}

impl Object for PyDict {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Map
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get(key)
    }

    fn get_value_by_str(self: &Arc<Self>, attribute: &str) -> Option<Value> {
        match methods::dict_attribute(attribute) {
            methods::DictAttribute::Method(name) => Some(Value::from_object(BoundMethod {
                receiver: Value::from_dyn_object(self.clone()),
                name,
                depth: self.depth,
            })),
            methods::DictAttribute::Mutating => None,
            methods::DictAttribute::Key => self.get_str(attribute),
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.entries.iter().map(|(key, _)| key.clone()).collect())
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.entries.len())
    }

    fn call_method(
        self: &Arc<Self>,
        state: &mut State<'_, '_>,
        method: &str,
        args: &[Value],
    ) -> Result<Value, Error> {
        methods::call_dict(state, self, method, args)
    }

    fn custom_cmp(self: &Arc<Self>, other: &DynObject) -> Option<Ordering> {
        let (mut left, other) = (COMPARED_NODES, other.downcast_ref::<Self>()?);
        Some(if self.same_within(other, &mut left) { Ordering::Equal } else { Ordering::Less })
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        python_repr::render(f, &Value::from_dyn_object(self.clone()))
    }
}

/// A method read from a dict without calling it (`message.items`), which Python hands out as a value.
#[derive(Debug)]
pub(super) struct BoundMethod {
    receiver: Value,
    name: &'static str,
    pub(super) depth: usize,
}

impl Object for BoundMethod {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, state: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        self.receiver.call_method(state, self.name, args)
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "<built-in method {} of {} object>", self.name, type_name(&self.receiver))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ViewKind {
    Keys,
    Values,
    Items,
}

impl ViewKind {
    pub(super) fn type_name(self) -> &'static str {
        match self {
            ViewKind::Keys => "dict_keys",
            ViewKind::Values => "dict_values",
            ViewKind::Items => "dict_items",
        }
    }
}

/// What `dict.keys()`, `dict.values()` and `dict.items()` return: sized and iterable, not indexable.
#[derive(Debug)]
pub(super) struct PyView {
    pub(super) kind: ViewKind,
    pub(super) items: Vec<Value>,
    pub(super) depth: usize,
}

impl PyView {
    pub(super) fn of(kind: ViewKind, dict: &PyDict) -> Result<Value, Error> {
        let items = match kind {
            ViewKind::Keys => dict.entries.iter().map(|(key, _)| key.clone()).collect(),
            ViewKind::Values => dict.entries.iter().map(|(_, value)| value.clone()).collect(),
            ViewKind::Items => dict
                .entries
                .iter()
                .map(|(key, value)| PySeq::tuple(vec![key.clone(), value.clone()]))
                .collect::<Result<Vec<_>, _>>()?,
        };
        let depth = container_depth(&items)?;
        Ok(Value::from_object(PyView { kind, items, depth }))
    }
}

impl Object for PyView {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    /// Not indexable: any subscript is undefined.
    fn get_value(self: &Arc<Self>, _key: &Value) -> Option<Value> {
        Some(Value::UNDEFINED)
    }

    fn get_value_by_str(self: &Arc<Self>, _attribute: &str) -> Option<Value> {
        None
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let view = self.clone();
        Enumerator::Iter(Box::new(
            (0..self.items.len()).map(move |index| view.items.get(index).cloned().unwrap_or_default()),
        ))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.items.len())
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        python_repr::render(f, &Value::from_dyn_object(self.clone()))
    }
}

/// A generator, as `map`, `select` and their kin return: read once, no length, always true.
#[derive(Debug)]
pub(super) struct PyGenerator {
    items: Mutex<std::vec::IntoIter<Value>>,
    pub(super) depth: usize,
}

impl PyGenerator {
    pub(super) fn over(items: Vec<Value>) -> Result<Value, Error> {
        let depth = container_depth(&items)?;
        Ok(Value::from_object(PyGenerator { items: Mutex::new(items.into_iter()), depth }))
    }

    pub(super) fn next(&self) -> Option<Value> {
        self.items.lock().unwrap_or_else(PoisonError::into_inner).next()
    }
}

impl Object for PyGenerator {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn get_value(self: &Arc<Self>, _key: &Value) -> Option<Value> {
        Some(Value::UNDEFINED)
    }

    fn get_value_by_str(self: &Arc<Self>, _attribute: &str) -> Option<Value> {
        None
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let generator = self.clone();
        Enumerator::Iter(Box::new(std::iter::from_fn(move || generator.next())))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        None
    }

    fn is_true(self: &Arc<Self>) -> bool {
        true
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<generator object>")
    }
}

/// One group of the `groupby` filter: a pair whose halves also have names.
#[derive(Debug)]
pub(super) struct PyGroup {
    pub(super) grouper: Value,
    pub(super) list: Value,
    pub(super) depth: usize,
}

impl PyGroup {
    pub(super) fn pair(grouper: Value, list: Value) -> Result<Value, Error> {
        let depth = container_depth([&grouper, &list])?;
        Ok(Value::from_object(PyGroup { grouper, list, depth }))
    }
}

impl Object for PyGroup {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        match key.as_usize()? {
            0 => Some(self.grouper.clone()),
            1 => Some(self.list.clone()),
            _ => None,
        }
    }

    fn get_value_by_str(self: &Arc<Self>, attribute: &str) -> Option<Value> {
        match attribute {
            "grouper" => Some(self.grouper.clone()),
            "list" => Some(self.list.clone()),
            _ => None,
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(2)
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        python_repr::render(f, &Value::from_dyn_object(self.clone()))
    }
}

/// A Python range; its items exist only while they are read.
#[derive(Debug)]
pub(super) struct PyRange {
    pub(super) start: i64,
    pub(super) stop: i64,
    pub(super) step: i64,
    len: usize,
}

impl PyRange {
    /// The longest range, as in Jinja's sandbox.
    const MAX_LEN: u128 = 100_000;

    /// Whether two ranges yield the same numbers, which is when Python calls them equal.
    pub(super) fn same_items(&self, other: &PyRange) -> bool {
        self.len == other.len
            && (self.len == 0 || self.start == other.start)
            && (self.len <= 1 || self.step == other.step)
    }

    pub(super) fn between(start: i64, stop: i64, step: i64) -> Result<Value, Error> {
        let (low, high) = match step {
            0 => return Err(error("range() arg 3 must not be zero")),
            1.. => (start, stop),
            _ => (stop, start),
        };
        let span = u128::try_from(i128::from(high) - i128::from(low)).unwrap_or(0);
        let len = span.div_ceil(u128::from(step.unsigned_abs()));
        if len > PyRange::MAX_LEN {
            return Err(error(format!(
                "range too big: the sandbox blocks ranges larger than {}",
                PyRange::MAX_LEN
            )));
        }
        Ok(Value::from_object(PyRange { start, stop, step, len: len as usize }))
    }
}

impl Object for PyRange {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let index = key.as_usize().filter(|index| *index < self.len)?;
        Some(Value::from(self.start + self.step * index as i64))
    }

    fn get_value_by_str(self: &Arc<Self>, attribute: &str) -> Option<Value> {
        match attribute {
            "start" => Some(Value::from(self.start)),
            "stop" => Some(Value::from(self.stop)),
            "step" => Some(Value::from(self.step)),
            _ => None,
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.len)
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        python_repr::render(f, &Value::from_dyn_object(self.clone()))
    }
}
