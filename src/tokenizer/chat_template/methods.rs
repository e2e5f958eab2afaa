//! Method calls: Python's methods of dicts, lists and everything minijinja knows no methods for.
//!
//! Methods that would change their object are refused, as transformers' immutable sandbox refuses them.

use std::sync::Arc;

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, State, Value};

use super::arguments::{bind, integer, optional_integer, required};
use super::containers::{PyDict, PyRange, PySeq, PyView, SeqKind, ViewKind};
use super::values::{error, is_namespace, type_name};
use super::{comparisons, operators, python_str};

/// The call that the rewriter makes of `value[start:stop:step]`.
pub(super) const SLICE: &str = "__slice";

/// The call that the rewriter makes of `value.__name__`.
pub(super) const PRIVATE: &str = "__private";

/// What an attribute of a dict is.
pub(super) enum DictAttribute {
    /// A method that reads.
    Method(&'static str),
    /// A method that changes the dict, which the sandbox hides.
    Mutating,
    /// No method: a key.
    Key,
}

/// Looks an attribute up among a dict's methods.
pub(super) fn dict_attribute(name: &str) -> DictAttribute {
    DictAttribute::Method(match name {
        "copy" => "copy",
        "get" => "get",
        "items" => "items",
        "keys" => "keys",
        "values" => "values",
        "clear" | "pop" | "popitem" | "setdefault" | "update" => return DictAttribute::Mutating,
        _ => return DictAttribute::Key,
    })
}

fn unsafe_attribute(value: &Value, name: &str) -> Error {
    error(format!("access to attribute '{name}' of '{}' object is unsafe", type_name(value)))
}

/// The methods that the rewriter calls, on any value.
fn call_internal(state: &State, value: &Value, method: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    match method {
        SLICE => Some(operators::slice(state, value, args)),
        PRIVATE => {
            let name = args.first().and_then(Value::as_str).unwrap_or_default();
            let item = value.downcast_object_ref::<PyDict>().and_then(|dict| dict.get_str(name));
            Some(item.ok_or_else(|| unsafe_attribute(value, name)))
        }
        _ => None,
    }
}

/// Calls a method of a dict.
pub(super) fn call_dict(
    state: &mut State,
    dict: &Arc<PyDict>,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match method {
        "get" => {
            let [key, default] = bind("get", args, ["key", "default"])?;
            let key = required("get", "key", key)?;
            super::values::check_hashable(&key)?;
            Ok(dict.get(&key).unwrap_or_else(|| default.unwrap_or_else(|| Value::from(()))))
        }
        "items" | "keys" | "values" => {
            let [] = bind(method, args, [])?;
            super::values::charge_items(state, dict.entries().len() * 4)?;
            PyView::of(
                match method {
                    "items" => ViewKind::Items,
                    "keys" => ViewKind::Keys,
                    _ => ViewKind::Values,
                },
                dict,
            )
        }
        "copy" => {
            let [] = bind(method, args, [])?;
            Ok(Value::from_dyn_object(dict.clone()))
        }
        _ => {
            let value = Value::from_dyn_object(dict.clone());
            if let Some(result) = call_internal(state, &value, method, args) {
                return result;
            }
            if matches!(dict_attribute(method), DictAttribute::Mutating) {
                return Err(unsafe_attribute(&value, method));
            }
            // A callable stored under the name, which minijinja then looks for.
            Err(Error::from(ErrorKind::UnknownMethod))
        }
    }
}

/// Calls a method of a list or tuple.
pub(super) fn call_seq(
    state: &mut State,
    seq: &Arc<PySeq>,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let value = Value::from_dyn_object(seq.clone());
    match method {
        "count" => {
            let [item] = bind("count", args, ["value"])?;
            let item = required("count", "value", item)?;
            super::values::charge_items(state, seq.items.len())?;
            let mut count = 0;
            for candidate in &seq.items {
                count += i64::from(comparisons::equal(state, candidate, &item)?);
            }
            Ok(Value::from(count))
        }
        "index" => {
            let [item, start, stop] = bind("index", args, ["value", "start", "stop"])?;
            let item = required("index", "value", item)?;
            let len = seq.items.len();
            let start = clamp_index(optional_integer(start)?.unwrap_or(0), len);
            let stop = optional_integer(stop)?.map_or(len, |stop| clamp_index(stop, len));
            super::values::charge_items(state, len)?;
            for (index, candidate) in seq.items.iter().enumerate().take(stop).skip(start) {
                if comparisons::equal(state, candidate, &item)? {
                    return Ok(Value::from(index));
                }
            }
            Err(error("the value is not in the list"))
        }
        "copy" if seq.kind == SeqKind::List => {
            let [] = bind("copy", args, [])?;
            Ok(value)
        }
        "append" | "clear" | "extend" | "insert" | "pop" | "remove" | "reverse" | "sort"
            if seq.kind == SeqKind::List =>
        {
            Err(unsafe_attribute(&value, method))
        }
        _ => call_internal(state, &value, method, args).unwrap_or_else(|| Err(no_attribute(&value, method))),
    }
}

/// A Python index clamped to `0..=len`, negative ones counted from the end.
pub(super) fn clamp_index(index: i64, len: usize) -> usize {
    match usize::try_from(index) {
        Ok(index) => index.min(len),
        Err(_) => len.saturating_sub(usize::try_from(index.unsigned_abs()).unwrap_or(usize::MAX)),
    }
}

fn no_attribute(value: &Value, name: &str) -> Error {
    if value.is_undefined() {
        return Error::new(ErrorKind::UndefinedError, format!("cannot call '{name}' of an undefined value"));
    }
    error(format!("'{}' object has no attribute '{name}'", type_name(value)))
}

/// Calls a method of a value that has none of its own in minijinja: the environment's unknown-method callback.
pub(super) fn call_unknown(
    state: &mut State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if let Some(result) = call_internal(state, value, method, args) {
        return result;
    }
    match value.kind() {
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            python_str::call(state, text, method, args).unwrap_or_else(|| Err(no_attribute(value, method)))
        }
        ValueKind::Number if method == "is_integer" && !value.is_integer() => {
            let [] = bind(method, args, [])?;
            let number = f64::try_from(value.clone()).unwrap_or(f64::NAN);
            Ok(Value::from(number.is_finite() && number.fract() == 0.0))
        }
        _ if value.downcast_object_ref::<PyRange>().is_some() && method == "index" => {
            let [item] = bind(method, args, ["value"])?;
            let item = integer(&required(method, "value", item)?)?;
            let position = value.try_iter()?.position(|candidate| candidate.as_i64() == Some(item));
            position.map(Value::from).ok_or_else(|| error("the value is not in the range"))
        }
        // The keys of a namespace and what hangs on other objects may be callable.
        ValueKind::Map if is_namespace(value) => Err(Error::from(ErrorKind::UnknownMethod)),
        _ => Err(no_attribute(value, method)),
    }
}
