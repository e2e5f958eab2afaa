//! Jinja's tests (`is string`, `is mapping`, ...) with Python's idea of types.

use minijinja::value::{DynObject, ValueKind};
use minijinja::{Environment, Value};

use super::arguments::{bind, integer, required};
use super::comparisons;
use super::containers::PyDict;
use super::environment::add_test;
use super::operators::{Number, text_of};
use super::python_char::is_cased;
use super::values::{self, error, type_name};

/// Registers the tests that minijinja lacks or understands differently.
pub(super) fn register(env: &mut Environment<'static>) {
    type Predicate = fn(&Value) -> bool;
    let unary: [(&'static str, Predicate); 12] = [
        ("defined", |value| !value.is_undefined()),
        ("undefined", Value::is_undefined),
        ("none", Value::is_none),
        ("boolean", |value| value.kind() == ValueKind::Bool),
        ("integer", Value::is_integer),
        ("float", |value| value.is_number() && !value.is_integer()),
        ("number", |value| Number::of(value).is_some()),
        ("string", |value| value.kind() == ValueKind::String),
        ("mapping", is_dict),
        ("sequence", is_sequence),
        ("iterable", values::is_iterable),
        ("callable", is_callable),
    ];
    for (name, test) in unary {
        add_test(env, name, move |_, args| {
            let [value] = bind(name, args, ["value"])?;
            Ok(test(&value.unwrap_or_default()))
        });
    }
    for (name, wanted) in [("lower", char::is_lowercase as fn(char) -> bool), ("upper", char::is_uppercase)] {
        add_test(env, name, move |state, args| {
            let [value] = bind(name, args, ["value"])?;
            let text = text_of(state, &value.unwrap_or_default())?;
            let all = text.chars().all(|c| !is_cased(c) || wanted(c));
            Ok(all && text.chars().any(wanted))
        });
    }
    for (name, remainder) in [("even", 0), ("odd", 1)] {
        add_test(env, name, move |_, args| {
            let [value] = bind(name, args, ["value"])?;
            let value = required(name, "value", value)?;
            match Number::of(&value) {
                Some(Number::Int(number)) => Ok(number.rem_euclid(2) == remainder),
                Some(Number::Float(number)) => Ok(number.rem_euclid(2.0) == remainder as f64),
                None => Err(error(format!("'{}' is neither even nor odd", type_name(&value)))),
            }
        });
    }
    add_test(env, "divisibleby", |_, args| {
        let [value, divisor] = bind("divisibleby", args, ["value", "num"])?;
        let value = integer(&required("divisibleby", "value", value)?)?;
        let divisor = integer(&required("divisibleby", "num", divisor)?)?;
        match value.checked_rem_euclid(divisor) {
            Some(remainder) => Ok(remainder == 0),
            None if divisor == 0 => Err(error("integer modulo by zero")),
            None => Ok(true),
        }
    });
    for (names, operator) in [
        (["eq", "equalto", "=="].as_slice(), "=="),
        (&["ne", "!="], "!="),
        (&["lt", "lessthan", "<"], "<"),
        (&["le", "<="], "<="),
        (&["gt", "greaterthan", ">"], ">"),
        (&["ge", ">="], ">="),
        (&["in"], "in"),
    ] {
        for name in names {
            add_test(env, name, move |state, args| {
                let [value, other] = bind(name, args, ["value", "other"])?;
                let other = required(name, "other", other)?;
                comparisons::compare(state, &value.unwrap_or_default(), operator, &other)
            });
        }
    }
    add_test(env, "sameas", |_, args| {
        let [value, other] = bind("sameas", args, ["value", "other"])?;
        let (value, other) = (value.unwrap_or_default(), other.unwrap_or_default());
        Ok(match (value.as_object(), other.as_object()) {
            (Some(_), Some(_)) => values::is_same(&value, &other),
            (None, None) => type_name(&value) == type_name(&other) && value == other,
            _ => false,
        })
    });
}

/// Has a length and a subscript: strings, lists, tuples, ranges, dicts, and Jinja's undefined.
fn is_sequence(value: &Value) -> bool {
    match value.kind() {
        ValueKind::Undefined | ValueKind::String | ValueKind::Seq => true,
        _ => is_dict(value),
    }
}

fn is_dict(value: &Value) -> bool {
    value.downcast_object_ref::<PyDict>().is_some()
}

fn is_callable(value: &Value) -> bool {
    // Functions, macros and bound methods are what a template can reach of plain objects.
    let is_macro = |object: &DynObject| object.type_name().ends_with("::Macro");
    value.kind() == ValueKind::Plain || value.as_object().is_some_and(is_macro)
}
