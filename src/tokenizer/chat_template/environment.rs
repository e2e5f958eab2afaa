//! The minijinja environment in which chat templates run.

use std::sync::OnceLock;

use chrono::NaiveDateTime;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Rest, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, UndefinedBehavior, Value};

use super::arguments::{bind, integer, required, split, string};
use super::containers::{PyDict, PyRange, PySeq};
use super::error::RaisedByTemplate;
use super::values::{self, error};
use super::{
    filters_seq, filters_text, methods, operators, predicates, python_json, python_repr, rewrite, strftime,
};

/// The stack that nested macro calls may use, in minijinja's units (a macro call costs four).
const RECURSION_LIMIT: usize = 240;

/// Filters of minijinja that Jinja2 does not have, or not alike.
const FOREIGN_FILTERS: [&str; 6] = ["bool", "chain", "lines", "pprint", "split", "zip"];

/// Registers a function that takes any arguments.
pub(super) fn add_function<F>(env: &mut Environment<'static>, name: &'static str, function: F)
where
    F: Fn(&State, &[Value]) -> Result<Value, Error> + Send + Sync + 'static,
{
    env.add_function(name, move |state: &State, args: Rest<ValueOrKwargs>| {
        function(state, &args.into_values())
    });
}

/// Registers a filter that takes any arguments.
pub(super) fn add_filter<F>(env: &mut Environment<'static>, name: &'static str, filter: F)
where
    F: Fn(&State, &[Value]) -> Result<Value, Error> + Send + Sync + 'static,
{
    env.add_filter(name, move |state: &State, args: Rest<ValueOrKwargs>| filter(state, &args.into_values()));
}

/// Registers a filter that applies other filters or tests.
pub(super) fn add_higher_filter<F>(env: &mut Environment<'static>, name: &'static str, filter: F)
where
    F: Fn(&mut State, &[Value]) -> Result<Value, Error> + Send + Sync + 'static,
{
    env.add_filter(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
        filter(state, &args.into_values())
    });
}

/// Registers a test that takes any arguments.
pub(super) fn add_test<F>(env: &mut Environment<'static>, name: &'static str, test: F)
where
    F: Fn(&State, &[Value]) -> Result<bool, Error> + Send + Sync + 'static,
{
    env.add_test(name, move |state: &State, args: Rest<ValueOrKwargs>| test(state, &args.into_values()));
}

/// The environment without templates; cloning it is cheap.
pub(super) fn environment() -> &'static Environment<'static> {
    static ENVIRONMENT: OnceLock<Environment<'static>> = OnceLock::new();
    ENVIRONMENT.get_or_init(build)
}

fn build() -> Environment<'static> {
    let mut env = Environment::new();
    if let Ok(syntax) = SyntaxConfig::builder().keep_trailing_newline(true).build() {
        env.set_syntax(syntax);
    }
    env.set_debug(false);
    env.set_undefined_behavior(UndefinedBehavior::Lenient);
    env.set_recursion_limit(RECURSION_LIMIT);
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_unknown_method_callback(methods::call_unknown);
    env.set_formatter(|out, _, value| {
        python_repr::write_str(out, value)
            .map_err(|_| Error::new(ErrorKind::WriteFailure, "the output cannot be written"))
    });
    for filter in FOREIGN_FILTERS {
        env.remove_filter(filter);
    }
    for test in ["startingwith", "endingwith", "safe", "int"] {
        env.remove_test(test);
    }
    env.remove_global("debug");
    env.add_global(rewrite::GENERATION_BEGIN, "");
    env.add_global(rewrite::GENERATION_END, "");
    operators::register(&mut env);
    filters_text::register(&mut env);
    filters_seq::register(&mut env);
    predicates::register(&mut env);
    add_filter(&mut env, "tojson", python_json::tojson);
    add_filter(&mut env, "fromjson", python_json::fromjson);
    add_function(&mut env, "range", range);
    add_function(&mut env, "dict", dict);
    add_function(&mut env, "namespace", |state, args| {
        let (positional, keywords) = split(args);
        for (_, value) in &keywords {
            values::check_storable(value)?;
        }
        let entries = dict(state, positional)?;
        let pairs =
            entries.downcast_object_ref::<PyDict>().map(|dict| dict.entries().to_vec()).unwrap_or_default();
        let pairs =
            pairs.into_iter().chain(keywords.into_iter().map(|(name, value)| (Value::from(name), value)));
        let attributes = Value::from_pairs(pairs);
        minijinja::functions::namespace(Some(ValueOrKwargs::from(attributes)))
    });
    add_function(&mut env, "raise_exception", |_, args| {
        let [message] = bind("raise_exception", args, ["message"])?;
        let message = required("raise_exception", "message", message)?;
        let message = python_repr::to_str(&message)?;
        Err(error(message.clone()).with_source(RaisedByTemplate(message)))
    });
    set_clock(&mut env, None);
    env
}

/// Sets the time that `strftime_now` formats; `None` is the local time of the call.
pub(super) fn set_clock(env: &mut Environment<'static>, now: Option<NaiveDateTime>) {
    add_function(env, "strftime_now", move |_, args| {
        let [format] = bind("strftime_now", args, ["format"])?;
        let format = required("strftime_now", "format", format)?;
        let now = now.unwrap_or_else(|| chrono::Local::now().naive_local());
        Ok(Value::from(strftime::strftime(&now, string("strftime_now", &format)?)))
    });
}

/// Whether templates can use a filter of this name.
pub(super) fn is_filter(name: &str) -> bool {
    static KNOWN: OnceLock<Vec<&'static str>> = OnceLock::new();
    let known = KNOWN.get_or_init(|| {
        "abs attr batch capitalize center count d default dictsort e escape first float forceescape format \
         fromjson groupby indent int items join last length list lower map max min reject rejectattr replace \
         reverse round safe select selectattr slice sort string sum title tojson trim truncate unique upper \
         urlencode wordcount"
            .split_whitespace()
            .collect()
    });
    known.contains(&name)
}

/// Whether templates can use a test of this name.
pub(super) fn is_test(name: &str) -> bool {
    static KNOWN: OnceLock<Vec<&'static str>> = OnceLock::new();
    let known = KNOWN.get_or_init(|| {
        "boolean callable defined divisibleby eq equalto escaped even false filter float ge greaterthan gt in \
         integer iterable le lessthan lower lt mapping ne none number odd sameas sequence string test true \
         undefined upper"
            .split_whitespace()
            .collect()
    });
    known.contains(&name)
}

fn range(_: &State, args: &[Value]) -> Result<Value, Error> {
    let [first, second, step] = bind("range", args, ["start", "stop", "step"])?;
    let first = integer(&required("range", "stop", first)?)?;
    let step = step.as_ref().map_or(Ok(1), integer)?;
    match second {
        Some(stop) => PyRange::between(first, integer(&stop)?, step),
        None => PyRange::between(0, first, step),
    }
}

fn dict(state: &State, args: &[Value]) -> Result<Value, Error> {
    let (positional, keywords) = split(args);
    let mut entries = Vec::new();
    match positional {
        [] => {}
        [source] => match source.downcast_object_ref::<PyDict>() {
            Some(dict) => entries.extend_from_slice(dict.entries()),
            None if source.is_undefined() => return Err(error("dict() of an undefined value")),
            None => {
                for pair in values::iterate(state, source)? {
                    match pair.downcast_object_ref::<PySeq>().map(|seq| seq.items.as_slice()) {
                        Some([key, value]) => entries.push((key.clone(), value.clone())),
                        _ => return Err(error("dict() needs a mapping or pairs")),
                    }
                }
            }
        },
        _ => {
            return Err(error(format!("dict() takes at most 1 argument ({} given)", positional.len())));
        }
    }
    entries.extend(keywords.into_iter().map(|(name, value)| (Value::from(name), value)));
    values::charge_items(state, entries.len() * 2)?;
    PyDict::from_pairs(entries)
}
