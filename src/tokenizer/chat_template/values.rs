//! What all template values share: their Python type, depth, price, iteration, and their way in from JSON.

use minijinja::value::{DynObject, ObjectRepr, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

use super::containers::{
    BoundMethod, COMPARED_NODES, PyDict, PyGenerator, PyGroup, PyRange, PySeq, PyView, SeqKind,
};

/// How deep containers may nest.
pub(super) const MAX_DEPTH: usize = 100;

/// An error that a Python operation would raise.
pub(super) fn error(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// The name of a value's type in Python, for messages.
pub(super) fn type_name(value: &Value) -> &'static str {
    match value.kind() {
        ValueKind::Undefined => "Undefined",
        ValueKind::None => "NoneType",
        ValueKind::Bool => "bool",
        ValueKind::Number if value.is_integer() => "int",
        ValueKind::Number => "float",
        ValueKind::String => "str",
        ValueKind::Bytes => "bytes",
        ValueKind::Seq => match value.downcast_object_ref::<PySeq>() {
            Some(seq) => seq.kind.type_name(),
            None if value.downcast_object_ref::<PyRange>().is_some() => "range",
            None => "list",
        },
        ValueKind::Map if is_namespace(value) => "Namespace",
        ValueKind::Map if value.downcast_object_ref::<PyDict>().is_some() => "dict",
        ValueKind::Iterable => match value.downcast_object_ref::<PyView>() {
            Some(view) => view.kind.type_name(),
            None => "generator",
        },
        _ => "object",
    }
}

/// Whether the value is what the `namespace` function returns; minijinja keeps that type to itself.
pub(super) fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"))
}

/// Whether two values are one object; minijinja's own objects, whose identity it hides, count as different.
pub(super) fn is_same(left: &Value, right: &Value) -> bool {
    fn address<T: 'static>(value: &Value) -> Option<*const T> {
        value.downcast_object_ref::<T>().map(std::ptr::from_ref)
    }
    fn same<T: 'static>(left: &Value, right: &Value) -> bool {
        address::<T>(left).is_some() && address::<T>(left) == address::<T>(right)
    }
    same::<PySeq>(left, right)
        || same::<PyDict>(left, right)
        || same::<PyView>(left, right)
        || same::<PyGenerator>(left, right)
        || same::<PyGroup>(left, right)
        || same::<PyRange>(left, right)
}

/// The nesting depth of a value: 0 for scalars, at least 1 for containers.
fn depth(value: &Value) -> Result<usize, Error> {
    let Some(object) = value.as_object() else {
        return Ok(0);
    };
    if let Some(seq) = object.downcast_ref::<PySeq>() {
        return Ok(seq.depth);
    }
    if let Some(dict) = object.downcast_ref::<PyDict>() {
        return Ok(dict.depth);
    }
    if let Some(view) = object.downcast_ref::<PyView>() {
        return Ok(view.depth);
    }
    if let Some(generator) = object.downcast_ref::<PyGenerator>() {
        return Ok(generator.depth);
    }
    if let Some(group) = object.downcast_ref::<PyGroup>() {
        return Ok(group.depth);
    }
    if let Some(method) = object.downcast_ref::<BoundMethod>() {
        return Ok(method.depth);
    }
    if is_namespace(value) {
        return Err(error("a namespace cannot be stored inside another value"));
    }
    Ok(1)
}

pub(super) fn container_depth<'a>(items: impl IntoIterator<Item = &'a Value>) -> Result<usize, Error> {
    let mut deepest = 0;
    for item in items {
        deepest = deepest.max(depth(item)?);
    }
    if deepest >= MAX_DEPTH {
        return Err(error(format!("values nest more than {MAX_DEPTH} levels deep")));
    }
    Ok(deepest + 1)
}

/// Checks that a value may become an attribute of a namespace: not too deep, and no namespace itself.
pub(super) fn check_storable(value: &Value) -> Result<(), Error> {
    container_depth([value]).map(|_| ())
}

/// Pays for `bytes` bytes of data out of the render's fuel, at minijinja's rate.
pub(super) fn charge(state: &State, bytes: usize) -> Result<(), Error> {
    state.consume_fuel(bytes as u64 / 64)
}

/// Pays for a container of `len` slots.
pub(super) fn charge_items(state: &State, len: usize) -> Result<(), Error> {
    state.consume_fuel(len as u64 / 4)
}

/// Whether an object is one of the sequence types that index and slice.
pub(super) fn is_indexable(object: &DynObject) -> bool {
    object.repr() == ObjectRepr::Seq
}

/// The items of anything Python can iterate; a number, a bool or None is an error.
pub(super) fn iterate(state: &State, value: &Value) -> Result<Vec<Value>, Error> {
    if let Some(seq) = value.downcast_object_ref::<PySeq>() {
        charge_items(state, seq.items.len())?;
        return Ok(seq.items.clone());
    }
    if !is_iterable(value) {
        return Err(not_iterable(value));
    }
    let mut items = Vec::new();
    for item in value.try_iter().map_err(|_| not_iterable(value))? {
        items.push(item);
        if items.len() % 64 == 0 {
            charge_items(state, 64)?;
        }
    }
    Ok(items)
}

/// Whether Python can iterate the value. Of what minijinja counts as maps only dicts are: namespaces, macros and
/// loops are not.
pub(super) fn is_iterable(value: &Value) -> bool {
    match value.kind() {
        ValueKind::None => false,
        ValueKind::Map => value.downcast_object_ref::<PyDict>().is_some(),
        _ => value.try_iter().is_ok(),
    }
}

/// Refuses what Python cannot look up in a dict, and tuples too large for a key.
pub(super) fn check_hashable(value: &Value) -> Result<(), Error> {
    let mut left = COMPARED_NODES;
    check_hashable_within(value, &mut left)
}

fn check_hashable_within(value: &Value, left: &mut usize) -> Result<(), Error> {
    *left = left.checked_sub(1).ok_or_else(|| error("a tuple is too large for a key"))?;
    let unhashable = match value.downcast_object_ref::<PySeq>() {
        Some(seq) if seq.kind == SeqKind::Tuple => {
            return seq.items.iter().try_for_each(|item| check_hashable_within(item, left));
        }
        Some(_) => true,
        None => value.downcast_object_ref::<PyDict>().is_some(),
    };
    if unhashable {
        return Err(error(format!("unhashable type: '{}'", type_name(value))));
    }
    Ok(())
}

pub(super) fn not_iterable(value: &Value) -> Error {
    error(format!("'{}' object is not iterable", type_name(value)))
}

/// Converts JSON to template values.
pub(super) fn from_json(json: &serde_json::Value) -> Result<Value, Error> {
    from_json_at(json, 0)
}

fn from_json_at(json: &serde_json::Value, level: usize) -> Result<Value, Error> {
    if level > MAX_DEPTH {
        return Err(error(format!("values nest more than {MAX_DEPTH} levels deep")));
    }
    Ok(match json {
        serde_json::Value::Null => Value::from(()),
        serde_json::Value::Bool(value) => Value::from(*value),
        serde_json::Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(value), _) => Value::from(value),
            (None, Some(value)) => Value::from(value),
            (None, None) => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        serde_json::Value::String(value) => Value::from(value.as_str()),
        serde_json::Value::Array(items) => {
            PySeq::list(items.iter().map(|item| from_json_at(item, level + 1)).collect::<Result<_, _>>()?)?
        }
        serde_json::Value::Object(entries) => PyDict::from_pairs(
            entries
                .iter()
                .map(|(key, value)| Ok((Value::from(key.as_str()), from_json_at(value, level + 1)?)))
                .collect::<Result<Vec<_>, Error>>()?,
        )?,
    })
}
