//! Jinja's filters on sequences and mappings, with Jinja's parameter names.
//!
//! Those that are generators in Jinja return a generator here: it has no length, reads once and is always true.

use minijinja::value::ValueKind;
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::arguments::{bind, flag, integer, optional_integer, required, split, strict_flag};
use super::comparisons::{equal, less_than};
use super::containers::{PyDict, PyGenerator, PyGroup, PySeq};
use super::environment::{add_filter, add_higher_filter};
use super::operators::{self, get_item, text_of};
use super::python_sort::merge_sort;
use super::values::{self, charge, charge_items, error, iterate, type_name};

/// Registers the sequence filters.
pub(super) fn register(env: &mut Environment<'static>) {
    add_filter(env, "length", length);
    add_filter(env, "count", length);
    add_filter(env, "list", |state, args| {
        let [value] = bind("list", args, ["value"])?;
        PySeq::list(iterate(state, &required("list", "value", value)?)?)
    });
    add_filter(env, "first", |state, args| {
        let [value] = bind("first", args, ["seq"])?;
        let value = required("first", "seq", value)?;
        if let Some(generator) = value.downcast_object_ref::<PyGenerator>() {
            return Ok(generator.next().unwrap_or_default());
        }
        Ok(iterate(state, &value)?.into_iter().next().unwrap_or_default())
    });
    add_filter(env, "last", |state, args| {
        let [value] = bind("last", args, ["seq"])?;
        let value = required("last", "seq", value)?;
        refuse_generator("last", &value)?;
        Ok(iterate(state, &value)?.pop().unwrap_or_default())
    });
    add_filter(env, "reverse", |state, args| {
        let [value] = bind("reverse", args, ["value"])?;
        let value = required("reverse", "value", value)?;
        if value.kind() == ValueKind::String {
            return Ok(Value::from(text_of(state, &value)?.chars().rev().collect::<String>()));
        }
        let mut items = iterate(state, &value)?;
        items.reverse();
        PyGenerator::over(items)
    });
    add_filter(env, "join", join);
    add_filter(env, "items", |state, args| {
        let [value] = bind("items", args, ["value"])?;
        let value = required("items", "value", value)?;
        if value.is_undefined() {
            return PyGenerator::over(Vec::new());
        }
        let Some(dict) = value.downcast_object_ref::<PyDict>() else {
            return Err(error("can only get item pairs from a mapping"));
        };
        PyGenerator::over(pairs(state, dict)?)
    });
    add_filter(env, "dictsort", dictsort);
    add_filter(env, "sort", sort);
    add_filter(env, "unique", unique);
    add_filter(env, "groupby", groupby);
    add_higher_filter(env, "map", map);
    for (name, by_attribute, wanted) in [
        ("select", false, true),
        ("reject", false, false),
        ("selectattr", true, true),
        ("rejectattr", true, false),
    ] {
        add_higher_filter(env, name, move |state, args| select(state, name, args, by_attribute, wanted));
    }
    for (name, smallest) in [("min", true), ("max", false)] {
        add_filter(env, name, move |state, args| extreme(state, name, args, smallest));
    }
    add_filter(env, "sum", |state, args| {
        let [value, attribute, start] = bind("sum", args, ["iterable", "attribute", "start"])?;
        let mut total = start.unwrap_or_else(|| Value::from(0));
        for item in iterate(state, &required("sum", "iterable", value)?)? {
            let item = match &attribute {
                Some(path) if !path.is_none() => attribute_of(&item, path)?,
                _ => item,
            };
            total = operators::add(state, &total, &item)?;
        }
        Ok(total)
    });
    add_filter(env, "batch", batch);
    add_filter(env, "slice", slice);
}

fn refuse_generator(filter: &str, value: &Value) -> Result<(), Error> {
    if value.downcast_object_ref::<PyGenerator>().is_some() {
        return Err(error(format!("object of type 'generator' has no {filter} (use `|list` first)")));
    }
    Ok(())
}

fn length(_: &State, args: &[Value]) -> Result<Value, Error> {
    let [value] = bind("length", args, ["obj"])?;
    let value = required("length", "obj", value)?;
    refuse_generator("length", &value)?;
    if value.is_undefined() {
        return Ok(Value::from(0));
    }
    match value.len() {
        Some(len) if values::is_iterable(&value) => Ok(Value::from(len)),
        _ => Err(error(format!("object of type '{}' has no length", type_name(&value)))),
    }
}

fn pairs(state: &State, dict: &PyDict) -> Result<Vec<Value>, Error> {
    charge_items(state, dict.entries().len() * 4)?;
    dict.entries().iter().map(|(key, value)| PySeq::tuple(vec![key.clone(), value.clone()])).collect()
}

fn attribute_of(item: &Value, path: &Value) -> Result<Value, Error> {
    attribute_or(item, path, None)
}

/// Follows an attribute path as Jinja's `make_attrgetter`: names and indices separated by dots. The default stands in
/// for every step that is undefined.
fn attribute_or(item: &Value, path: &Value, default: Option<&Value>) -> Result<Value, Error> {
    let Some(path) = path.as_str() else {
        let value = get_item(item, path)?;
        return Ok(match default {
            Some(default) if value.is_undefined() => default.clone(),
            _ => value,
        });
    };
    let mut value = item.clone();
    for part in path.split('.') {
        let key = match part.parse::<u32>() {
            Ok(index) => Value::from(index),
            Err(_) => Value::from(part),
        };
        value = match get_item(&value, &key)? {
            // A subscript that fails falls back to the attribute, as Jinja's getitem does.
            item if item.is_undefined() && !part.starts_with('_') => value.get_attr(part)?,
            item => item,
        };
        if let Some(default) = default
            && value.is_undefined()
        {
            value = default.clone();
        }
    }
    Ok(value)
}

fn folded(value: &Value, case_sensitive: bool) -> Value {
    match value.as_str() {
        Some(text) if !case_sensitive => Value::from(text.to_lowercase()),
        _ => value.clone(),
    }
}

fn join(state: &State, args: &[Value]) -> Result<Value, Error> {
    let [value, separator, attribute] = bind("join", args, ["value", "d", "attribute"])?;
    let value = required("join", "value", value)?;
    let separator = separator.map_or_else(|| Ok(String::new()), |d| text_of(state, &d))?;
    let mut joined = String::new();
    for (index, item) in iterate(state, &value)?.iter().enumerate() {
        let item = match &attribute {
            Some(path) if !path.is_none() => attribute_of(item, path)?,
            _ => item.clone(),
        };
        if index > 0 {
            charge(state, separator.len())?;
            joined.push_str(&separator);
        }
        joined.push_str(&text_of(state, &item)?);
    }
    Ok(Value::from(joined))
}

fn dictsort(state: &State, args: &[Value]) -> Result<Value, Error> {
    let [value, case_sensitive, by, reverse] =
        bind("dictsort", args, ["value", "case_sensitive", "by", "reverse"])?;
    let value = required("dictsort", "value", value)?;
    let Some(dict) = value.downcast_object_ref::<PyDict>() else {
        return Err(error("dictsort works on mappings only"));
    };
    let position = match by.as_ref().map(|by| by.as_str()) {
        None | Some(Some("key")) => 0,
        Some(Some("value")) => 1,
        _ => return Err(error("dictsort can sort by 'key' or by 'value' only")),
    };
    let case_sensitive = flag(case_sensitive, false);
    let keyed = pairs(state, dict)?
        .into_iter()
        .map(|pair| {
            let key = get_item(&pair, &Value::from(position))?;
            Ok((folded(&key, case_sensitive), pair))
        })
        .collect::<Result<Vec<_>, Error>>()?;
    PySeq::list(sort_keyed(state, keyed, flag(reverse, false))?)
}

fn sort_keyed(state: &State, mut keyed: Vec<(Value, Value)>, reverse: bool) -> Result<Vec<Value>, Error> {
    let comparisons = keyed.len() * (usize::BITS - keyed.len().leading_zeros()) as usize;
    charge_items(state, comparisons * 4)?;
    // Python sorts in reverse stably: equal items keep their order.
    if reverse {
        keyed.reverse();
    }
    let mut sorted = merge_sort(keyed, &mut |a, b| less_than(state, &a.0, &b.0))?;
    if reverse {
        sorted.reverse();
    }
    Ok(sorted.into_iter().map(|(_, item)| item).collect())
}

fn sort(state: &State, args: &[Value]) -> Result<Value, Error> {
    let [value, reverse, case_sensitive, attribute] =
        bind("sort", args, ["value", "reverse", "case_sensitive", "attribute"])?;
    let case_sensitive = flag(case_sensitive, false);
    let keyed = iterate(state, &required("sort", "value", value)?)?
        .into_iter()
        .map(|item| {
            let key = match &attribute {
                Some(path) if !path.is_none() => multi_key(&item, path, case_sensitive)?,
                _ => folded(&item, case_sensitive),
            };
            Ok((key, item))
        })
        .collect::<Result<Vec<_>, Error>>()?;
    PySeq::list(sort_keyed(state, keyed, strict_flag(reverse)?)?)
}

/// The sort key of an item for an attribute list such as `"name,age"`.
fn multi_key(item: &Value, paths: &Value, case_sensitive: bool) -> Result<Value, Error> {
    let Some(text) = paths.as_str() else {
        return attribute_of(item, paths);
    };
    let keys = text
        .split(',')
        .map(|path| Ok(folded(&attribute_of(item, &Value::from(path))?, case_sensitive)))
        .collect::<Result<Vec<_>, Error>>()?;
    PySeq::list(keys)
}

fn unique(state: &State, args: &[Value]) -> Result<Value, Error> {
    let [value, case_sensitive, attribute] = bind("unique", args, ["value", "case_sensitive", "attribute"])?;
    let case_sensitive = flag(case_sensitive, false);
    let mut seen: Vec<Value> = Vec::new();
    let mut kept = Vec::new();
    for item in iterate(state, &required("unique", "value", value)?)? {
        let key = match &attribute {
            Some(path) if !path.is_none() => attribute_of(&item, path)?,
            _ => item.clone(),
        };
        let key = folded(&key, case_sensitive);
        charge_items(state, seen.len())?;
        let mut known = false;
        for other in &seen {
            known = known || equal(state, other, &key)?;
        }
        if !known {
            seen.push(key);
            kept.push(item);
        }
    }
    PyGenerator::over(kept)
}

fn groupby(state: &State, args: &[Value]) -> Result<Value, Error> {
    let [value, attribute, default, case_sensitive] =
        bind("groupby", args, ["value", "attribute", "default", "case_sensitive"])?;
    let attribute = required("groupby", "attribute", attribute)?;
    let case_sensitive = flag(case_sensitive, false);
    let mut keyed = Vec::new();
    for item in iterate(state, &required("groupby", "value", value)?)? {
        let key = attribute_or(&item, &attribute, default.as_ref())?;
        keyed.push((folded(&key, case_sensitive), PySeq::list(vec![key, item])?));
    }
    let mut groups: Vec<(Value, Value, Vec<Value>)> = Vec::new();
    for entry in sort_keyed(state, keyed, false)? {
        let key = get_item(&entry, &Value::from(0))?;
        let item = get_item(&entry, &Value::from(1))?;
        let sort_key = folded(&key, case_sensitive);
        match groups.last_mut() {
            Some((last, _, items)) if equal(state, last, &sort_key)? => items.push(item),
            _ => groups.push((sort_key, key, vec![item])),
        }
    }
    PySeq::list(
        groups
            .into_iter()
            .map(|(_, key, items)| PyGroup::pair(key, PySeq::list(items)?))
            .collect::<Result<_, _>>()?,
    )
}

/// The items of a value; none of a false one, whatever its type, as `map` and `select` have it in Jinja.
fn truthy_items(state: &State, value: Option<&Value>) -> Result<Vec<Value>, Error> {
    match value {
        Some(value) if value.is_true() => iterate(state, value),
        _ => Ok(Vec::new()),
    }
}

fn map(state: &mut State, args: &[Value]) -> Result<Value, Error> {
    let (positional, keywords) = split(args);
    let items = truthy_items(state, positional.first())?;
    let keyword = |wanted: &str| {
        let found = keywords.iter().find(|(name, _)| name == wanted);
        found.map(|(_, value)| value.clone())
    };
    let mut mapped = Vec::with_capacity(items.len());
    match (positional.get(1), keyword("attribute")) {
        (None, Some(attribute)) => {
            if let Some((name, _)) =
                keywords.iter().find(|(name, _)| name != "attribute" && name != "default")
            {
                return Err(error(format!("unexpected keyword argument '{name}'")));
            }
            let default = keyword("default").filter(|default| !default.is_none());
            for item in items {
                mapped.push(attribute_or(&item, &attribute, default.as_ref())?);
            }
        }
        (Some(filter), _) => {
            let Some(filter) = filter.as_str() else {
                return Err(error("map requires the name of a filter"));
            };
            for item in items {
                let mut arguments = vec![item];
                arguments.extend(args.iter().skip(2).cloned());
                state.consume_fuel(2)?;
                mapped.push(state.apply_filter(filter, &arguments)?);
            }
        }
        (None, None) => return Err(error("map requires a filter argument")),
    }
    PyGenerator::over(mapped)
}

fn select(
    state: &mut State,
    name: &str,
    args: &[Value],
    by_attribute: bool,
    wanted: bool,
) -> Result<Value, Error> {
    let items = truthy_items(state, args.first())?;
    let attribute = if by_attribute { args.get(1) } else { None };
    if by_attribute && attribute.is_none() {
        return Err(Error::new(ErrorKind::MissingArgument, format!("{name} is missing the attribute")));
    }
    let rest = args.get(if by_attribute { 2 } else { 1 }..).unwrap_or_default();
    let mut kept = Vec::new();
    for item in items {
        let value = match attribute {
            Some(path) => attribute_of(&item, path)?,
            None => item.clone(),
        };
        state.consume_fuel(2)?;
        let passed = match rest.split_first() {
            Some((test, test_args)) => {
                let Some(test) = test.as_str() else {
                    return Err(error(format!("{name} requires the name of a test")));
                };
                let mut arguments = vec![value];
                arguments.extend_from_slice(test_args);
                state.perform_test(test, &arguments)?
            }
            None => value.is_true(),
        };
        if passed == wanted {
            kept.push(item);
        }
    }
    PyGenerator::over(kept)
}

fn extreme(state: &State, name: &str, args: &[Value], smallest: bool) -> Result<Value, Error> {
    let [value, case_sensitive, attribute] = bind(name, args, ["value", "case_sensitive", "attribute"])?;
    let case_sensitive = flag(case_sensitive, false);
    let mut best: Option<(Value, Value)> = None;
    for item in iterate(state, &required(name, "value", value)?)? {
        let key = match &attribute {
            Some(path) if !path.is_none() => attribute_of(&item, path)?,
            _ => item.clone(),
        };
        let key = folded(&key, case_sensitive);
        let better = match &best {
            None => true,
            Some((best, _)) if smallest => less_than(state, &key, best)?,
            Some((best, _)) => less_than(state, best, &key)?,
        };
        if better {
            best = Some((key, item));
        }
    }
    Ok(best.map(|(_, item)| item).unwrap_or_default())
}

fn batch(state: &State, args: &[Value]) -> Result<Value, Error> {
    let [value, size, fill] = bind("batch", args, ["value", "linecount", "fill_with"])?;
    let size = integer(&required("batch", "linecount", size)?)?;
    let size = usize::try_from(size).unwrap_or(0).max(1);
    let items = iterate(state, &required("batch", "value", value)?)?;
    let mut batches = Vec::new();
    for chunk in items.chunks(size) {
        let mut batch = chunk.to_vec();
        if let Some(fill) = fill.as_ref().filter(|fill| !fill.is_none()) {
            charge_items(state, size.saturating_sub(batch.len()))?;
            batch.resize(size, fill.clone());
        }
        batches.push(PySeq::list(batch)?);
    }
    PyGenerator::over(batches)
}

fn slice(state: &State, args: &[Value]) -> Result<Value, Error> {
    let [value, count, fill] = bind("slice", args, ["value", "slices", "fill_with"])?;
    let count = optional_integer(count)?.unwrap_or(0);
    let Some(count) = usize::try_from(count).ok().filter(|count| *count > 0) else {
        return Err(error("slice needs a positive number of slices"));
    };
    charge_items(state, count)?;
    let items = iterate(state, &required("slice", "value", value)?)?;
    let (each, extra) = (items.len() / count, items.len() % count);
    let mut slices = Vec::new();
    let mut rest = items.into_iter();
    for index in 0..count {
        let size = each + usize::from(index < extra);
        let mut slice: Vec<_> = rest.by_ref().take(size).collect();
        if let Some(fill) = fill.as_ref().filter(|fill| !fill.is_none())
            && index >= extra
        {
            slice.push(fill.clone());
        }
        slices.push(PySeq::list(slice)?);
    }
    PyGenerator::over(slices)
}
