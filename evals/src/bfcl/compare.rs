//! Whether a call is the one that was asked for.

use serde_json::{Map, Value};

/// A call that a model made.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// The function.
    pub name: String,
    /// Its arguments.
    pub arguments: Map<String, Value>,
}

/// The verdict of BFCL's checker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strict {
    /// The call is right.
    Right,
    /// There is none.
    NoCall,
    /// There are several.
    ManyCalls,
    /// It calls something else.
    WrongName,
    /// An argument is missing, of another type or value, or not asked for.
    WrongArguments,
}

impl Strict {
    /// The word in a sample's line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Right => "right",
            Self::NoCall => "no call",
            Self::ManyCalls => "many calls",
            Self::WrongName => "wrong name",
            Self::WrongArguments => "wrong arguments",
        }
    }
}

/// A type of Python that JSON values come as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Type {
    Str,
    Int,
    Float,
    Bool,
    List,
    Dict,
    None,
}

impl Type {
    fn of(value: &Value) -> Self {
        match value {
            Value::Null => Self::None,
            Value::Bool(_) => Self::Bool,
            Value::Number(number) if number.is_f64() => Self::Float,
            Value::Number(_) => Self::Int,
            Value::String(_) => Self::Str,
            Value::Array(_) => Self::List,
            Value::Object(_) => Self::Dict,
        }
    }

    /// From a description (`PYTHON_TYPE_MAPPING`).
    fn named(name: &str) -> Option<Self> {
        Some(match name {
            "string" | "any" => Self::Str,
            "integer" => Self::Int,
            "float" => Self::Float,
            "boolean" => Self::Bool,
            "array" | "tuple" => Self::List,
            "dict" => Self::Dict,
            _ => return None,
        })
    }
}

/// Python's `==` between values that came from JSON: numbers and truth values compare by value.
fn equal(a: &Value, b: &Value) -> bool {
    let number = |value: &Value| match value {
        Value::Bool(truth) => Some(f64::from(u8::from(*truth))),
        Value::Number(number) => number.as_f64(),
        _ => None,
    };
    match (a, b) {
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| equal(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(name, a)| b.get(name).is_some_and(|b| equal(a, b)))
        }
        (Value::Number(a), Value::Number(b)) if a.is_i64() && b.is_i64() => a == b,
        _ => match (number(a), number(b)) {
            (Some(a), Some(b)) => a == b,
            (None, None) => a == b,
            _ => false,
        },
    }
}

fn contains(values: &[Value], value: &Value) -> bool {
    values.iter().any(|other| equal(other, value))
}

fn is_empty_text(value: &Value) -> bool {
    value.as_str() == Some("")
}

/// A text as it is compared: without blanks and `,./-_*^`, in small letters, with one kind of quotes.
fn standard(text: &str) -> String {
    let kept: String = text.chars().filter(|c| !" ,./-_*^".contains(*c)).collect();
    kept.to_lowercase().replace('\'', "\"")
}

fn standard_value(value: &Value) -> Value {
    match value {
        Value::String(text) => Value::from(standard(text)),
        other => other.clone(),
    }
}

/// BFCL's verdict on the calls of a reply (`simple_function_checker` of its `ast_checker.py`, language Python). `expected`
/// has the accepted values of each argument.
pub fn strict(function: &Value, name: &str, expected: &Map<String, Value>, calls: &[Call]) -> Strict {
    let call = match calls {
        [] => return Strict::NoCall,
        [call] => call,
        _ => return Strict::ManyCalls,
    };
    if call.name != name {
        return Strict::WrongName;
    }
    let parameters = &function["parameters"];
    let required = parameters["required"].as_array().map(Vec::as_slice).unwrap_or_default();
    let given = |name: &Value| name.as_str().is_some_and(|name| call.arguments.contains_key(name));
    if !required.iter().all(given) {
        return Strict::WrongArguments;
    }
    for (argument, value) in &call.arguments {
        let accepted = expected.get(argument).and_then(Value::as_array);
        let described = parameters["properties"].get(argument);
        let right = match (described, accepted) {
            (Some(described), Some(accepted)) => accepts(described, accepted, value),
            _ => false,
        };
        if !right {
            return Strict::WrongArguments;
        }
    }
    let may_be_absent = |(name, accepted): (&String, &Value)| {
        call.arguments.contains_key(name)
            || accepted.as_array().is_some_and(|accepted| accepted.iter().any(is_empty_text))
    };
    if expected.iter().all(may_be_absent) { Strict::Right } else { Strict::WrongArguments }
}

/// Whether an argument's value is one of those accepted.
fn accepts(described: &Value, accepted: &[Value], value: &Value) -> bool {
    let type_name = described["type"].as_str().unwrap_or_default();
    let Some(expected) = Type::named(type_name) else { return false };
    let nested = match expected {
        Type::List => match described["items"]["type"].as_str().and_then(Type::named) {
            Some(nested) => Some(nested),
            None => return false,
        },
        _ => None,
    };
    // Python converts these by itself.
    let widened;
    let value = match (type_name, value) {
        ("float", Value::Number(number)) if !number.is_f64() => {
            widened = number.as_f64().map_or(Value::Null, Value::from);
            &widened
        }
        _ => value,
    };
    let Some(is_variable) = type_fits(accepted, value, expected, nested) else { return false };
    if is_variable {
        return contains(accepted, value);
    }
    match (expected, nested, value) {
        (Type::Dict, _, Value::Object(value)) => dict_fits(accepted, value),
        (Type::List, Some(Type::Dict), Value::Array(items)) => dicts_fit(accepted, items),
        (Type::Str, _, Value::String(text)) => {
            let text = standard(text);
            accepted.iter().filter_map(Value::as_str).any(|other| standard(other) == text)
        }
        (Type::List, _, Value::Array(items)) => {
            let items: Vec<Value> = items.iter().map(standard_value).collect();
            let same = |other: &Value| match other {
                Value::Array(other) => {
                    let other = other.iter().map(standard_value);
                    other.len() == items.len() && other.zip(&items).all(|(a, b)| equal(&a, b))
                }
                // An empty text stands for an argument that is left out.
                other => is_empty_text(other) && items.is_empty(),
            };
            accepted.iter().any(same)
        }
        _ => contains(accepted, value),
    }
}

/// `type_checker`: `None` for a wrong type, else whether the value is a variable's name instead of a value, which is
/// when the accepted values have another type than the description says.
fn type_fits(accepted: &[Value], value: &Value, expected: Type, nested: Option<Type>) -> Option<bool> {
    let accepted_type = accepted.iter().find(|value| !is_empty_text(value)).map(Type::of);
    let is_variable = accepted_type.is_some_and(|accepted| accepted != expected);
    if Type::of(value) == expected {
        let Some(nested) = nested else { return Some(is_variable) };
        let items = value.as_array().map(Vec::as_slice).unwrap_or_default();
        let fits = |other: &Value| match other {
            Value::Array(other) => items.iter().all(|item| type_fits(other, item, nested, None).is_some()),
            _ => true,
        };
        return accepted.iter().any(fits).then_some(is_variable);
    }
    (accepted_type == Some(Type::of(value))).then_some(true)
}

/// `dict_checker`.
fn dict_fits(accepted: &[Value], value: &Map<String, Value>) -> bool {
    accepted.iter().filter_map(Value::as_object).any(|accepted| {
        let entry_fits = |(name, value): (&String, &Value)| {
            let others = accepted.get(name).and_then(Value::as_array);
            others.is_some_and(|others| {
                let value = standard_value(value);
                others.iter().any(|other| equal(&standard_value(other), &value))
            })
        };
        let may_be_absent = |(name, others): (&String, &Value)| {
            value.contains_key(name)
                || others.as_array().is_some_and(|others| others.iter().any(is_empty_text))
        };
        value.iter().all(entry_fits) && accepted.iter().all(may_be_absent)
    })
}

/// `list_dict_checker`.
fn dicts_fit(accepted: &[Value], items: &[Value]) -> bool {
    accepted.iter().any(|accepted| match accepted {
        Value::Array(accepted) => {
            let fits = |(item, accepted): (&Value, &Value)| {
                item.as_object().is_some_and(|item| dict_fits(std::slice::from_ref(accepted), item))
            };
            accepted.len() == items.len() && items.iter().zip(accepted).all(fits)
        }
        accepted => is_empty_text(accepted) && items.is_empty(),
    })
}

/// The lenient verdict: the name is right, and each argument that is needed has an accepted value after numbers, truth
/// values and JSON in texts are read as such; more arguments do not matter.
pub fn lenient(name: &str, expected: &Map<String, Value>, calls: &[Call]) -> bool {
    let Some(call) = calls.first().filter(|call| call.name == name) else { return false };
    expected.iter().all(|(argument, accepted)| {
        let accepted = accepted.as_array().map(Vec::as_slice).unwrap_or_default();
        let optional = accepted.iter().any(|value| value.is_null() || is_empty_text(value));
        match call.arguments.get(argument) {
            None => optional,
            Some(Value::Object(fields)) if dict_fits(accepted, fields) => true,
            Some(value) => {
                let value = canonical(value);
                accepted.iter().any(|other| equal(&canonical(other), &value))
                    // A list may stand for itself, not for its alternatives.
                    || equal(&canonical(&Value::Array(accepted.to_vec())), &value)
            }
        }
    })
}

/// Texts that are numbers, truth values or JSON as what they are; other texts in small letters.
fn canonical(value: &Value) -> Value {
    match value {
        Value::String(text) => {
            let text = text.trim().to_lowercase();
            match serde_json::from_str(&text) {
                Ok(Value::String(text)) => Value::from(text),
                Ok(value) => canonical(&value),
                Err(_) => Value::from(text),
            }
        }
        Value::Array(items) => Value::Array(items.iter().map(canonical).collect()),
        Value::Object(fields) => {
            Value::Object(fields.iter().map(|(name, value)| (name.clone(), canonical(value))).collect())
        }
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn verdict(properties: Value, expected: Value, arguments: Value) -> Strict {
        let required: Vec<String> = Vec::new();
        let function = json!({"name": "f", "parameters": {"properties": properties, "required": required}});
        let call = Call { name: "f".to_owned(), arguments: arguments.as_object().unwrap().clone() };
        strict(&function, "f", expected.as_object().unwrap(), &[call])
    }

    fn right(kind: Value, accepted: Value, value: Value) -> bool {
        verdict(json!({"a": kind}), json!({"a": accepted}), json!({"a": value})) == Strict::Right
    }

    #[test]
    fn types_are_pythons() {
        assert!(right(json!({"type": "integer"}), json!([5]), json!(5)));
        assert!(!right(json!({"type": "integer"}), json!([5]), json!(5.0)));
        assert!(!right(json!({"type": "integer"}), json!([5]), json!("5")));
        assert!(!right(json!({"type": "integer"}), json!([1]), json!(true)));
        assert!(right(json!({"type": "float"}), json!([5.0]), json!(5)));
        assert!(!right(json!({"type": "float"}), json!([5]), json!("five")));
        assert!(right(json!({"type": "boolean"}), json!([true]), json!(true)));
    }

    #[test]
    fn texts_are_compared_without_blanks_and_case() {
        assert!(right(json!({"type": "string"}), json!(["April 1, 2024"]), json!("april 1 2024")));
        assert!(!right(json!({"type": "string"}), json!(["Paris"]), json!("London")));
        assert!(right(json!({"type": "any"}), json!(["x"]), json!("X")));
    }

    #[test]
    fn a_variables_name_is_taken_as_it_is() {
        assert!(right(json!({"type": "integer"}), json!(["count"]), json!("count")));
        assert!(!right(json!({"type": "integer"}), json!(["count"]), json!("Count")));
    }

    #[test]
    fn lists_and_objects_are_compared_inside() {
        let list = json!({"type": "array", "items": {"type": "string"}});
        assert!(right(list.clone(), json!([["New York", "Rome"]]), json!(["new york", "ROME"])));
        assert!(!right(list.clone(), json!([["a", "b"]]), json!(["b", "a"])));
        assert!(!right(list, json!([["a"]]), json!([1])));
        let dict = json!({"type": "dict"});
        assert!(right(dict.clone(), json!([{"k": ["v", ""], "n": [1]}]), json!({"n": 1})));
        assert!(!right(dict.clone(), json!([{"k": ["v"], "n": [1]}]), json!({"n": 1})));
        assert!(!right(dict, json!([{"k": ["v"]}]), json!({"k": "v", "x": 1})));
        let dicts = json!({"type": "array", "items": {"type": "dict"}});
        assert!(right(dicts.clone(), json!([[{"k": [1]}, {"k": [2]}]]), json!([{"k": 1}, {"k": 2}])));
        assert!(!right(dicts, json!([[{"k": [1]}]]), json!([{"k": 1}, {"k": 2}])));
    }

    #[test]
    fn arguments_that_may_be_left_out_say_so() {
        let properties = json!({"a": {"type": "integer"}, "b": {"type": "integer"}});
        let expected = json!({"a": [1], "b": [2, ""]});
        assert_eq!(verdict(properties.clone(), expected.clone(), json!({"a": 1})), Strict::Right);
        assert_eq!(verdict(properties.clone(), expected.clone(), json!({"b": 2})), Strict::WrongArguments);
        assert_eq!(verdict(properties, expected, json!({"a": 1, "c": 1})), Strict::WrongArguments);
    }

    #[test]
    fn the_lenient_verdict_forgives_types_and_more_arguments() {
        let expected = json!({"a": [1], "b": ["x", ""], "c": [[1, 2]]});
        let calls = |arguments: Value| {
            vec![Call { name: "f".to_owned(), arguments: arguments.as_object().unwrap().clone() }]
        };
        let lenient = |arguments| lenient("f", expected.as_object().unwrap(), &calls(arguments));
        assert!(lenient(json!({"a": "1", "c": "[1, 2]", "z": 0})));
        assert!(lenient(json!({"a": 1.0, "b": "X", "c": [1, 2]})));
        assert!(!lenient(json!({"a": 2, "c": [1, 2]})));
        assert!(!lenient(json!({"a": 1})));
    }
}
