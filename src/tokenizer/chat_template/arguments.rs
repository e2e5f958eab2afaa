//! Arguments of filters, functions and methods, bound to parameter names as Python binds them.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::values::{error, type_name};

/// Splits a call's values into positional and keyword arguments.
pub(super) fn split(args: &[Value]) -> (&[Value], Vec<(String, Value)>) {
    match args.split_last() {
        Some((last, positional)) if last.is_kwargs() => {
            let keywords = Kwargs::try_from(last.clone())
                .map(|kwargs| {
                    kwargs
                        .args()
                        .map(|name| {
                            let value = kwargs.peek::<Value>(name).unwrap_or_default();
                            (name.to_owned(), value)
                        })
                        .collect()
                })
                .unwrap_or_default();
            (positional, keywords)
        }
        _ => (args, Vec::new()),
    }
}

/// Binds arguments to `parameters` by position, then by name; a parameter that got none is `None`.
pub(super) fn bind<const N: usize>(
    function: &str,
    args: &[Value],
    parameters: [&str; N],
) -> Result<[Option<Value>; N], Error> {
    let (positional, keywords) = split(args);
    if positional.len() > N {
        return Err(Error::new(
            ErrorKind::TooManyArguments,
            format!("{function}() takes at most {N} arguments ({} given)", positional.len()),
        ));
    }
    let mut bound: [Option<Value>; N] = std::array::from_fn(|index| positional.get(index).cloned());
    for (name, value) in keywords {
        match parameters.iter().position(|parameter| *parameter == name) {
            Some(index) if bound[index].is_none() => bound[index] = Some(value),
            Some(_) => {
                return Err(error(format!("{function}() got multiple values for argument '{name}'")));
            }
            None => {
                return Err(error(format!("{function}() got an unexpected keyword argument '{name}'")));
            }
        }
    }
    Ok(bound)
}

/// The value of a parameter without default.
pub(super) fn required(function: &str, name: &str, value: Option<Value>) -> Result<Value, Error> {
    value.ok_or_else(|| {
        Error::new(ErrorKind::MissingArgument, format!("{function}() is missing the argument '{name}'"))
    })
}

/// An argument that Python would use as an index or a count.
pub(super) fn integer(value: &Value) -> Result<i64, Error> {
    if matches!(value.kind(), ValueKind::Bool) || value.is_integer() {
        if let Some(number) = value.as_i64() {
            return Ok(number);
        }
        return Err(error(format!("the integer {value} is out of range")));
    }
    Err(error(format!("'{}' object cannot be interpreted as an integer", type_name(value))))
}

/// An optional integer argument; None counts as not given.
pub(super) fn optional_integer(value: Option<Value>) -> Result<Option<i64>, Error> {
    match value {
        Some(value) if !value.is_none() => integer(&value).map(Some),
        _ => Ok(None),
    }
}

/// An argument that has to be a string.
pub(super) fn string<'a>(function: &str, value: &'a Value) -> Result<&'a str, Error> {
    match value.kind() {
        ValueKind::String => Ok(value.as_str().unwrap_or_default()),
        _ => Err(error(format!("{function}() argument must be str, not {}", type_name(value)))),
    }
}

/// Whether an optional flag is set, by Python's truth.
pub(super) fn flag(value: Option<Value>, default: bool) -> bool {
    value.map_or(default, |value| value.is_true())
}

/// Whether a flag of a function written in C is set: an undefined one is an error there.
pub(super) fn strict_flag(value: Option<Value>) -> Result<bool, Error> {
    match value {
        Some(value) if value.is_undefined() => {
            Err(error("'Undefined' object cannot be interpreted as an integer"))
        }
        value => Ok(flag(value, false)),
    }
}
