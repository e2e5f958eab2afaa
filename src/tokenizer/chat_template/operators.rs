//! Python's operators, for those where minijinja's differ.
//!
//! minijinja orders values of different types instead of refusing, looks for anything in a string by its printed
//! form, iterates `None` and slices it. The rewriter turns those operators into calls of the functions registered
//! here, whose names start with two underscores.

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::ValueKind;
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::arguments::integer;
use super::comparisons;
use super::containers::{PyDict, PyGenerator, PySeq, SeqKind};
use super::environment::add_function;
use super::python_repr::{to_str, write_str};
use super::values::{self, charge, charge_items, error, is_indexable, type_name};

/// The longest string or list that `*` may build.
const MAX_REPEAT: usize = 16 << 20;

/// Registers the functions that the rewriter calls.
pub(super) fn register(env: &mut Environment<'static>) {
    add_function(env, "__list", |state, args| PySeq::list(literal_items(state, args)?));
    add_function(env, "__tuple", |state, args| PySeq::tuple(literal_items(state, args)?));
    add_function(env, "__dict", |state, args| {
        // Keys and values take turns in a list; a map would hash the keys, however large.
        let items = literal_items(state, args)?;
        let pairs = items.chunks_exact(2).filter_map(|pair| match pair {
            [key, value] => Some((key.clone(), value.clone())),
            _ => None,
        });
        let pairs: Vec<_> = pairs.collect();
        pairs.iter().try_for_each(|(key, _)| values::check_hashable(key))?;
        PyDict::from_pairs(pairs)
    });
    add_function(env, "__storable", |_, args| {
        let value = args.first().cloned().unwrap_or_default();
        values::check_storable(&value)?;
        Ok(value)
    });
    add_function(env, "__iter", |state, args| iterable(state, args.first().unwrap_or(&Value::UNDEFINED)));
    add_function(env, "__concat", concat);
    add_function(env, "__add", |state, args| fold(state, args, add));
    add_function(env, "__mul", |state, args| fold(state, args, multiply));
    add_function(env, "__mod", |state, args| fold(state, args, modulo));
    add_function(env, "__pos", |_, args| {
        let value = args.first().cloned().unwrap_or_default();
        match Number::of(&value) {
            Some(Number::Int(number)) => Ok(int(number)),
            Some(Number::Float(number)) => Ok(Value::from(number)),
            None => Err(error(format!("bad operand type for unary +: '{}'", type_name(&value)))),
        }
    });
    for (name, operator) in [
        ("__eq", "=="),
        ("__ne", "!="),
        ("__lt", "<"),
        ("__le", "<="),
        ("__gt", ">"),
        ("__ge", ">="),
        ("__in", "in"),
        ("__not_in", "not in"),
    ] {
        add_function(env, name, move |state, args| match args {
            [left, right] => comparisons::compare(state, left, operator, right).map(Value::from),
            _ => Err(Error::from(ErrorKind::MissingArgument)),
        });
    }
    add_function(env, "__compare", comparisons::compare_chain);
}

fn literal_items(state: &State, args: &[Value]) -> Result<Vec<Value>, Error> {
    let items: Vec<_> = match args.first() {
        Some(items) => items.try_iter()?.collect(),
        None => Vec::new(),
    };
    charge_items(state, items.len())?;
    Ok(items)
}

fn fold(
    state: &State,
    args: &[Value],
    operation: fn(&State, &Value, &Value) -> Result<Value, Error>,
) -> Result<Value, Error> {
    let mut args = args.iter();
    let mut result = args.next().cloned().unwrap_or_default();
    for right in args {
        result = operation(state, &result, right)?;
    }
    Ok(result)
}

/// What a `for` loop iterates: a generator is read out so that `loop.length` is known, as Jinja does.
fn iterable(state: &State, value: &Value) -> Result<Value, Error> {
    if value.is_undefined() || value.downcast_object_ref::<PyGenerator>().is_some() {
        return PySeq::list(values::iterate(state, value)?);
    }
    if value.kind() == ValueKind::String {
        // Without a list of its characters minijinja does not know the last one.
        return PySeq::list(values::iterate(state, value)?);
    }
    if !values::is_iterable(value) {
        return Err(values::not_iterable(value));
    }
    Ok(value.clone())
}

fn concat(state: &State, args: &[Value]) -> Result<Value, Error> {
    let mut text = String::new();
    for value in args {
        let before = text.len();
        write_str(&mut text, value).map_err(|_| too_large("~"))?;
        charge(state, text.len() - before)?;
    }
    Ok(Value::from(text))
}

/// A number for arithmetic; a bool counts as 0 or 1.
#[derive(Debug, Clone, Copy)]
pub(super) enum Number {
    Int(i128),
    Float(f64),
}

impl Number {
    pub(super) fn of(value: &Value) -> Option<Number> {
        match value.kind() {
            ValueKind::Bool => Some(Number::Int(i128::from(value.is_true()))),
            ValueKind::Number if value.is_integer() => i128::try_from(value.clone()).ok().map(Number::Int),
            ValueKind::Number => f64::try_from(value.clone()).ok().map(Number::Float),
            _ => None,
        }
    }

    pub(super) fn as_f64(self) -> f64 {
        match self {
            Number::Int(number) => number as f64,
            Number::Float(number) => number,
        }
    }
}

/// An integer in minijinja's smallest representation.
pub(super) fn int(number: i128) -> Value {
    match i64::try_from(number) {
        Ok(number) => Value::from(number),
        Err(_) => Value::from(number),
    }
}

pub(super) fn unsupported(operator: &str, left: &Value, right: &Value) -> Error {
    if left.is_undefined() || right.is_undefined() {
        return Error::new(ErrorKind::UndefinedError, format!("an operand of {operator} is undefined"));
    }
    error(format!(
        "unsupported operand type(s) for {operator}: '{}' and '{}'",
        type_name(left),
        type_name(right)
    ))
}

fn too_large(operator: &str) -> Error {
    error(format!("the result of {operator} is too large"))
}

/// `left + right`.
pub(super) fn add(state: &State, left: &Value, right: &Value) -> Result<Value, Error> {
    if left.kind() == ValueKind::String && right.kind() == ValueKind::String {
        let (a, b) = (left.as_str().unwrap_or_default(), right.as_str().unwrap_or_default());
        charge(state, a.len() + b.len())?;
        return Ok(Value::from([a, b].concat()));
    }
    if let (Some(a), Some(b)) = (left.downcast_object_ref::<PySeq>(), right.downcast_object_ref::<PySeq>())
        && a.kind == b.kind
    {
        charge_items(state, a.items.len() + b.items.len())?;
        return PySeq::build(a.kind, [a.items.as_slice(), &b.items].concat());
    }
    match (Number::of(left), Number::of(right)) {
        (Some(Number::Int(a)), Some(Number::Int(b))) => {
            a.checked_add(b).map(int).ok_or_else(|| too_large("+"))
        }
        (Some(a), Some(b)) => Ok(Value::from(a.as_f64() + b.as_f64())),
        _ => Err(unsupported("+", left, right)),
    }
}

fn multiply(state: &State, left: &Value, right: &Value) -> Result<Value, Error> {
    match (Number::of(left), Number::of(right)) {
        (Some(Number::Int(a)), Some(Number::Int(b))) => {
            a.checked_mul(b).map(int).ok_or_else(|| too_large("*"))
        }
        (Some(a), Some(b)) => Ok(Value::from(a.as_f64() * b.as_f64())),
        (Some(Number::Int(count)), None) => {
            repeat(state, right, count)?.ok_or_else(|| unsupported("*", left, right))
        }
        (None, Some(Number::Int(count))) => {
            repeat(state, left, count)?.ok_or_else(|| unsupported("*", left, right))
        }
        _ => Err(unsupported("*", left, right)),
    }
}

fn repeat(state: &State, value: &Value, count: i128) -> Result<Option<Value>, Error> {
    let count = usize::try_from(count.max(0)).unwrap_or(usize::MAX);
    let checked = |len: usize| {
        len.checked_mul(count).filter(|total| *total <= MAX_REPEAT).ok_or_else(|| too_large("*"))
    };
    if value.kind() == ValueKind::String {
        let text = value.as_str().unwrap_or_default();
        charge(state, checked(text.len())?)?;
        return Ok(Some(Value::from(text.repeat(count))));
    }
    if let Some(seq) = value.downcast_object_ref::<PySeq>() {
        charge_items(state, checked(seq.items.len())?)?;
        let items = seq.items.iter().cloned().cycle();
        let items = items.take(seq.items.len() * count).collect();
        return PySeq::build(seq.kind, items).map(Some);
    }
    Ok(None)
}

fn modulo(state: &State, left: &Value, right: &Value) -> Result<Value, Error> {
    if left.kind() == ValueKind::String {
        let args = match right.downcast_object_ref::<PySeq>() {
            Some(tuple) if tuple.kind == SeqKind::Tuple => tuple.items.clone(),
            _ => vec![right.clone()],
        };
        return printf(state, left.as_str().unwrap_or_default(), &args);
    }
    match (Number::of(left), Number::of(right)) {
        (Some(Number::Int(_)), Some(Number::Int(0))) => Err(error("integer modulo by zero")),
        (Some(Number::Int(a)), Some(Number::Int(b))) => {
            let remainder = a.checked_rem(b).unwrap_or(0);
            let wrong_sign = remainder != 0 && (remainder < 0) != (b < 0);
            Ok(int(if wrong_sign { remainder + b } else { remainder }))
        }
        (Some(a), Some(b)) => {
            let (a, b) = (a.as_f64(), b.as_f64());
            if b == 0.0 {
                return Err(error("float modulo"));
            }
            let remainder = a % b;
            let wrong_sign = remainder != 0.0 && (remainder < 0.0) != (b < 0.0);
            Ok(Value::from(if wrong_sign { remainder + b } else { remainder }))
        }
        _ => Err(unsupported("%", left, right)),
    }
}

/// `format % args`.
pub(super) fn printf(state: &State, text: &str, args: &[Value]) -> Result<Value, Error> {
    formatted(state, FormatStyle::Printf, text, args)
}

/// Formats after paying for the widths and precisions that the format asks for.
pub(super) fn formatted(
    state: &State,
    style: FormatStyle,
    text: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let mut requested = text.len();
    for digits in text.split(|character: char| !character.is_ascii_digit()) {
        if !digits.is_empty() {
            let width: usize = digits.parse().unwrap_or(usize::MAX);
            if width > 10_000 {
                return Err(error(format!("the width {digits} in a format is too large")));
            }
            requested = requested.saturating_add(width);
        }
    }
    if text.contains('*') {
        return Err(error("a width taken from the arguments is not supported"));
    }
    charge(state, requested)?;
    if matches!(style, FormatStyle::Printf) {
        check_all_converted(text, args)?;
    }
    format(style, text, args).map(Value::from)
}

/// Python refuses arguments that a `%` format does not use, but for a single list or dict.
fn check_all_converted(text: &str, args: &[Value]) -> Result<(), Error> {
    let single_container = match args {
        [only] => {
            let is_list = only.downcast_object_ref::<PySeq>().is_some_and(|seq| seq.kind == SeqKind::List);
            is_list || only.downcast_object_ref::<PyDict>().is_some()
        }
        _ => false,
    };
    let conversions = text.replace("%%", "").matches('%').count();
    if args.len() > conversions && !single_container {
        return Err(error("not all arguments converted during string formatting"));
    }
    Ok(())
}

/// `value[start:stop:step]`.
pub(super) fn slice(state: &State, value: &Value, bounds: &[Value]) -> Result<Value, Error> {
    if value.is_undefined() {
        return Err(Error::new(ErrorKind::UndefinedError, "cannot slice an undefined value"));
    }
    let is_text = value.kind() == ValueKind::String;
    let object = value.as_object().filter(|object| is_indexable(object));
    if object.is_none() && !is_text {
        return Err(error(format!("'{}' object cannot be sliced", type_name(value))));
    }
    let mut integers = [None, None, None];
    for (slot, bound) in integers.iter_mut().zip(bounds) {
        if !bound.is_none() {
            let bound = integer(bound).map_err(|_| error("slice indices must be integers or None"))?;
            *slot = Some(bound);
        }
    }
    let [start, stop, step] = integers;
    let step = step.unwrap_or(1);
    if step == 0 {
        return Err(error("slice step cannot be zero"));
    }
    let Some(object) = object else {
        let text = value.as_str().unwrap_or_default();
        charge(state, text.len())?;
        let characters: Vec<char> = text.chars().collect();
        let indices = slice_indices(start, stop, step, characters.len());
        let sliced: String = indices.filter_map(|index| characters.get(index)).collect();
        return Ok(Value::from(sliced));
    };
    let kind = match value.downcast_object_ref::<PySeq>() {
        Some(seq) => seq.kind,
        None => SeqKind::List,
    };
    let len = object.enumerator_len().unwrap_or(0);
    let mut items = Vec::new();
    for index in slice_indices(start, stop, step, len) {
        items.push(object.get_value(&Value::from(index)).unwrap_or_default());
    }
    charge_items(state, items.len())?;
    PySeq::build(kind, items)
}

/// The indices a slice visits, by the rules of `slice.indices`.
fn slice_indices(
    start: Option<i64>,
    stop: Option<i64>,
    step: i64,
    len: usize,
) -> impl Iterator<Item = usize> {
    let len = i64::try_from(len).unwrap_or(i64::MAX);
    let (low, high) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let clamp = |bound: i64| {
        let bound = if bound < 0 { bound.saturating_add(len) } else { bound };
        bound.clamp(low, high)
    };
    let start = start.map_or(if step > 0 { low } else { high }, clamp);
    let stop = stop.map_or(if step > 0 { high } else { low }, clamp);
    let mut next = Some(start);
    std::iter::from_fn(move || {
        let index = next.filter(|index| if step > 0 { *index < stop } else { *index > stop })?;
        next = index.checked_add(step);
        usize::try_from(index).ok()
    })
}

/// `container[key]` as Jinja's environment reads it: undefined when there is nothing, an error on undefined.
pub(super) fn get_item(container: &Value, key: &Value) -> Result<Value, Error> {
    container.get_item(key)
}

/// `str(value)`, paid for.
pub(super) fn text_of(state: &State, value: &Value) -> Result<String, Error> {
    let text = to_str(value)?;
    charge(state, text.len())?;
    Ok(text)
}
