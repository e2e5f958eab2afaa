//! Python's comparisons: equality by type, an order only within a type, and membership.
//!
//! They pay fuel for what they look at: a list may hold another many times over, so a small value can take for ever.

use minijinja::value::ValueKind;
use minijinja::{Error, State, Value};

use super::containers::{PyDict, PyRange, PySeq, PyView};
use super::operators::{Number, unsupported};
use super::values::{self, charge, charge_items, error, type_name};

/// `a < b <= c`: operands and operators take turns.
pub(super) fn compare_chain(state: &State, args: &[Value]) -> Result<Value, Error> {
    let mut rest = args;
    while let [left, operator, right, ..] = rest {
        if !compare(state, left, operator.as_str().unwrap_or_default(), right)? {
            return Ok(Value::from(false));
        }
        rest = &rest[2..];
    }
    Ok(Value::from(true))
}

/// Applies one of Jinja's comparison operators.
pub(super) fn compare(state: &State, left: &Value, operator: &str, right: &Value) -> Result<bool, Error> {
    match operator {
        "==" => equal(state, left, right),
        "!=" => equal(state, left, right).map(|equal| !equal),
        "<" => ordered(state, operator, left, right),
        "<=" => ordered(state, operator, left, right),
        ">" => ordered(state, operator, left, right),
        ">=" => ordered(state, operator, left, right),
        "in" => contains(state, right, left),
        _ => contains(state, right, left).map(|found| !found),
    }
}

/// `left == right`.
pub(super) fn equal(state: &State, left: &Value, right: &Value) -> Result<bool, Error> {
    if left.as_object().is_some() && values::is_same(left, right) {
        return Ok(true);
    }
    if let (Some(a), Some(b)) = (left.downcast_object_ref::<PySeq>(), right.downcast_object_ref::<PySeq>()) {
        if a.kind != b.kind || a.items.len() != b.items.len() {
            return Ok(false);
        }
        state.consume_fuel(1 + a.items.len() as u64 / 8)?;
        for (a, b) in a.items.iter().zip(&b.items) {
            if !equal(state, a, b)? {
                return Ok(false);
            }
        }
        return Ok(true);
    }
    if let (Some(a), Some(b)) = (left.downcast_object_ref::<PyDict>(), right.downcast_object_ref::<PyDict>())
    {
        if a.entries().len() != b.entries().len() {
            return Ok(false);
        }
        state.consume_fuel(1 + a.entries().len() as u64 / 8)?;
        for (key, value) in a.entries() {
            match b.get(key) {
                Some(other) if equal(state, value, &other)? => {}
                _ => return Ok(false),
            }
        }
        return Ok(true);
    }
    match (left.as_object(), right.as_object()) {
        (Some(_), Some(_)) => {
            Ok(match (left.downcast_object_ref::<PyRange>(), right.downcast_object_ref::<PyRange>()) {
                (Some(a), Some(b)) => a.same_items(b),
                _ => values::is_same(left, right),
            })
        }
        (None, None) => {
            charge_text(state, left, right)?;
            Ok(left == right)
        }
        _ => Ok(false),
    }
}

/// Pays for comparing two strings.
fn charge_text(state: &State, left: &Value, right: &Value) -> Result<(), Error> {
    match (left.as_str(), right.as_str()) {
        (Some(left), Some(right)) => charge(state, left.len().min(right.len())),
        _ => Ok(()),
    }
}

/// `left < right`.
pub(super) fn less_than(state: &State, left: &Value, right: &Value) -> Result<bool, Error> {
    ordered(state, "<", left, right)
}

fn ordered(state: &State, operator: &str, left: &Value, right: &Value) -> Result<bool, Error> {
    use std::cmp::Ordering;
    let ordering = match (Number::of(left), Number::of(right)) {
        (Some(Number::Int(a)), Some(Number::Int(b))) => Some(a.cmp(&b)),
        (Some(a), Some(b)) => a.as_f64().partial_cmp(&b.as_f64()),
        _ if left.kind() == ValueKind::String && right.kind() == ValueKind::String => {
            charge_text(state, left, right)?;
            Some(left.as_str().cmp(&right.as_str()))
        }
        _ => {
            if let (Some(a), Some(b)) =
                (left.downcast_object_ref::<PySeq>(), right.downcast_object_ref::<PySeq>())
                && a.kind == b.kind
            {
                state.consume_fuel(1 + a.items.len() as u64 / 8)?;
                for (a, b) in a.items.iter().zip(&b.items) {
                    if !equal(state, a, b)? {
                        return ordered(state, operator, a, b);
                    }
                }
                Some(a.items.len().cmp(&b.items.len()))
            } else if left.is_undefined() || right.is_undefined() {
                return Err(unsupported(operator, left, right));
            } else {
                return Err(error(format!(
                    "'{operator}' not supported between instances of '{}' and '{}'",
                    type_name(left),
                    type_name(right)
                )));
            }
        }
    };
    Ok(match operator {
        "<" => ordering == Some(Ordering::Less),
        "<=" => matches!(ordering, Some(Ordering::Less | Ordering::Equal)),
        ">" => ordering == Some(Ordering::Greater),
        _ => matches!(ordering, Some(Ordering::Greater | Ordering::Equal)),
    })
}

/// `item in container`.
pub(super) fn contains(state: &State, container: &Value, item: &Value) -> Result<bool, Error> {
    match container.kind() {
        ValueKind::Undefined => return Ok(false),
        ValueKind::String => {
            let text = container.as_str().unwrap_or_default();
            charge(state, text.len())?;
            return match item.kind() {
                ValueKind::String => Ok(text.contains(item.as_str().unwrap_or_default())),
                _ => Err(error(format!(
                    "'in <string>' requires string as left operand, not {}",
                    type_name(item)
                ))),
            };
        }
        _ => {}
    }
    if let Some(dict) = container.downcast_object_ref::<PyDict>() {
        values::check_hashable(item)?;
        return Ok(dict.get(item).is_some());
    }
    if !values::is_iterable(container) {
        return Err(not_a_container(container));
    }
    let view_items = container.downcast_object_ref::<PyView>().map(|view| view.items.as_slice());
    let items = container.downcast_object_ref::<PySeq>().map(|seq| seq.items.as_slice()).or(view_items);
    if let Some(items) = items {
        charge_items(state, items.len())?;
        for candidate in items {
            if equal(state, candidate, item)? {
                return Ok(true);
            }
        }
        return Ok(false);
    }
    let candidates = container.try_iter().map_err(|_| not_a_container(container))?;
    for (index, candidate) in candidates.enumerate() {
        if index % 64 == 0 {
            charge_items(state, 64)?;
        }
        if equal(state, &candidate, item)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn not_a_container(value: &Value) -> Error {
    error(format!("argument of type '{}' is not iterable", type_name(value)))
}
