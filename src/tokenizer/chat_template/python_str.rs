//! Python's string methods. Positions count characters, as Python's do.

use minijinja::formatting::FormatStyle;
use minijinja::value::ValueKind;
use minijinja::{Error, State, Value};

use super::arguments::{bind, integer, optional_integer, required, strict_flag, string};
use super::containers::{PySeq, SeqKind};
use super::methods::clamp_index;
use super::operators::formatted;
use super::python_char::{is_alpha, is_cased, is_decimal, is_digit, is_identifier, is_line_break, is_space};
use super::python_repr::is_printable;
use super::values::{charge, charge_items, error, iterate, type_name};

/// The longest result of a padding method.
const MAX_WIDTH: i64 = 1 << 20;

/// Calls a string method; `None` when there is none of that name.
pub(super) fn call(state: &State, text: &str, method: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    Some(match method {
        "capitalize" => no_arguments(method, args, || capitalize(text)),
        "casefold" | "lower" => no_arguments(method, args, || text.to_lowercase()),
        "upper" => no_arguments(method, args, || text.to_uppercase()),
        "swapcase" => no_arguments(method, args, || swapcase(text)),
        "title" => no_arguments(method, args, || title(text)),
        "strip" | "lstrip" | "rstrip" => strip_method(text, method, args),
        "removeprefix" | "removesuffix" => remove_affix(text, method, args),
        "startswith" | "endswith" => affix_test(state, text, method, args),
        "split" | "rsplit" => split_method(state, text, method, args),
        "splitlines" => split_lines(state, text, args),
        "partition" | "rpartition" => partition(text, method, args),
        "join" => join(state, text, args),
        "replace" => replace_method(state, text, args),
        "count" => count(text, args),
        "find" | "rfind" | "index" | "rindex" => find_method(text, method, args),
        "center" | "ljust" | "rjust" | "zfill" => pad(state, text, method, args),
        "expandtabs" => expand_tabs(state, text, args),
        "format" => formatted(state, FormatStyle::StrFormat, text, args),
        "isalnum" => {
            no_arguments(method, args, || all(text, |c| is_alpha(c) || is_decimal(c) || c.is_numeric()))
        }
        "isalpha" => no_arguments(method, args, || all(text, is_alpha)),
        "isascii" => no_arguments(method, args, || text.is_ascii()),
        "isdecimal" => no_arguments(method, args, || all(text, is_decimal)),
        "isdigit" => no_arguments(method, args, || all(text, is_digit)),
        "isidentifier" => no_arguments(method, args, || is_identifier(text)),
        "islower" => no_arguments(method, args, || cased(text, char::is_lowercase)),
        "isnumeric" => no_arguments(method, args, || all(text, char::is_numeric)),
        "isprintable" => no_arguments(method, args, || text.chars().all(is_printable)),
        "isspace" => no_arguments(method, args, || all(text, is_space)),
        "istitle" => no_arguments(method, args, || text.chars().any(is_cased) && title(text) == text),
        "isupper" => no_arguments(method, args, || cased(text, char::is_uppercase)),
        _ => return None,
    })
}

fn no_arguments<T: Into<Value>>(
    method: &str,
    args: &[Value],
    result: impl FnOnce() -> T,
) -> Result<Value, Error> {
    let [] = bind(method, args, [])?;
    Ok(result().into())
}

fn all(text: &str, test: impl Fn(char) -> bool) -> bool {
    !text.is_empty() && text.chars().all(test)
}

fn cased(text: &str, wanted: fn(char) -> bool) -> bool {
    text.chars().any(wanted) && text.chars().all(|c| !is_cased(c) || wanted(c))
}

/// `str.capitalize`.
pub(super) fn capitalize(text: &str) -> String {
    let mut characters = text.chars();
    match characters.next() {
        Some(first) => {
            // Lowered as one string, for the final sigma.
            let lowered = text.to_lowercase();
            let skip: usize = first.to_lowercase().map(char::len_utf8).sum();
            let rest = lowered.get(skip..).unwrap_or_default();
            first.to_uppercase().chain(rest.chars()).collect()
        }
        None => String::new(),
    }
}

fn swapcase(text: &str) -> String {
    let mut swapped = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_uppercase() {
            swapped.extend(character.to_lowercase());
        } else {
            swapped.extend(character.to_uppercase());
        }
    }
    swapped
}

fn title(text: &str) -> String {
    let mut titled = String::with_capacity(text.len());
    let mut after_cased = false;
    for character in text.chars() {
        if after_cased {
            titled.extend(character.to_lowercase());
        } else {
            titled.extend(character.to_uppercase());
        }
        after_cased = is_cased(character);
    }
    titled
}

/// `str.strip(chars)`; without characters, whitespace.
pub(super) fn strip<'a>(text: &'a str, chars: Option<&str>) -> &'a str {
    strip_end(strip_start(text, chars), chars)
}

fn strip_start<'a>(text: &'a str, chars: Option<&str>) -> &'a str {
    match chars {
        Some(chars) => text.trim_start_matches(|c| chars.contains(c)),
        None => text.trim_start_matches(is_space),
    }
}

/// `str.rstrip(chars)`.
pub(super) fn strip_end<'a>(text: &'a str, chars: Option<&str>) -> &'a str {
    match chars {
        Some(chars) => text.trim_end_matches(|c| chars.contains(c)),
        None => text.trim_end_matches(is_space),
    }
}

fn strip_method(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let [chars] = bind(method, args, ["chars"])?;
    let chars = chars.filter(|chars| !chars.is_none());
    let chars = chars.as_ref().map(|chars| string(method, chars)).transpose()?;
    Ok(Value::from(match method {
        "strip" => strip(text, chars),
        "lstrip" => strip_start(text, chars),
        _ => strip_end(text, chars),
    }))
}

fn remove_affix(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let [affix] = bind(method, args, ["affix"])?;
    let affix = required(method, "affix", affix)?;
    let affix = string(method, &affix)?;
    let removed = match method {
        "removeprefix" => text.strip_prefix(affix),
        _ => text.strip_suffix(affix),
    };
    Ok(Value::from(removed.unwrap_or(text)))
}

/// The part of a text between two Python positions and the characters before it; `None` when the start lies
/// behind the end.
fn window(text: &str, start: Option<Value>, end: Option<Value>) -> Result<Option<(&str, usize)>, Error> {
    let (start, end) = (optional_integer(start)?, optional_integer(end)?);
    if start.is_none() && end.is_none() {
        return Ok(Some((text, 0)));
    }
    let len = text.chars().count();
    if start.is_some_and(|start| usize::try_from(start).is_ok_and(|start| start > len)) {
        return Ok(None);
    }
    let start = clamp_index(start.unwrap_or(0), len);
    let end = end.map_or(len, |end| clamp_index(end, len));
    if start > end {
        return Ok(None);
    }
    let byte = |position: usize| text.char_indices().nth(position).map_or(text.len(), |(byte, _)| byte);
    Ok(Some((text.get(byte(start)..byte(end)).unwrap_or_default(), start)))
}

fn affix_test(state: &State, text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let [affix, start, end] = bind(method, args, ["affix", "start", "end"])?;
    let affix = required(method, "affix", affix)?;
    let Some((part, _)) = window(text, start, end)? else {
        return Ok(Value::from(false));
    };
    let matches = |affix: &str| match method {
        "startswith" => part.starts_with(affix),
        _ => part.ends_with(affix),
    };
    if affix.kind() == ValueKind::String {
        return Ok(Value::from(matches(affix.as_str().unwrap_or_default())));
    }
    let is_tuple = affix.downcast_object_ref::<PySeq>().is_some_and(|seq| seq.kind == SeqKind::Tuple);
    if !is_tuple {
        return Err(error(format!(
            "{method} first arg must be str or a tuple of str, not {}",
            type_name(&affix)
        )));
    }
    for candidate in iterate(state, &affix)? {
        if matches(string(method, &candidate)?) {
            return Ok(Value::from(true));
        }
    }
    Ok(Value::from(false))
}

fn list_of_str<'a>(state: &State, parts: impl Iterator<Item = &'a str>) -> Result<Value, Error> {
    let parts: Vec<_> = parts.map(Value::from).collect();
    charge_items(state, parts.len())?;
    PySeq::list(parts)
}

fn split_method(state: &State, text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let [separator, limit] = bind(method, args, ["sep", "maxsplit"])?;
    let limit = optional_integer(limit)?.unwrap_or(-1);
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    charge(state, text.len())?;
    let separator = separator.filter(|separator| !separator.is_none());
    let Some(separator) = separator else {
        let parts = match method {
            "split" => split_whitespace(text, limit),
            _ => rsplit_whitespace(text, limit),
        };
        return list_of_str(state, parts.into_iter());
    };
    let separator = string(method, &separator)?;
    if separator.is_empty() {
        return Err(error("empty separator"));
    }
    let pieces = limit.saturating_add(1);
    if method == "split" {
        list_of_str(state, text.splitn(pieces, separator))
    } else {
        let mut parts: Vec<_> = text.rsplitn(pieces, separator).collect();
        parts.reverse();
        list_of_str(state, parts.into_iter())
    }
}

fn split_whitespace(text: &str, limit: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text.trim_start_matches(is_space);
    while !rest.is_empty() {
        if parts.len() == limit {
            parts.push(rest);
            break;
        }
        let (part, after) = rest.split_at(rest.find(is_space).unwrap_or(rest.len()));
        parts.push(part);
        rest = after.trim_start_matches(is_space);
    }
    parts
}

fn rsplit_whitespace(text: &str, limit: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text.trim_end_matches(is_space);
    while !rest.is_empty() {
        if parts.len() == limit {
            parts.push(rest);
            break;
        }
        let start = rest
            .char_indices()
            .rev()
            .find(|(_, character)| is_space(*character))
            .map_or(0, |(index, character)| index + character.len_utf8());
        let (before, part) = rest.split_at(start);
        parts.push(part);
        rest = before.trim_end_matches(is_space);
    }
    parts.reverse();
    parts
}

/// The lines of a text by Python's `str.splitlines`, with or without their line breaks.
pub(super) fn lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some((at, first)) = rest.char_indices().find(|(_, c)| is_line_break(*c)) {
        let mut end = at + first.len_utf8();
        if first == '\r' && rest.get(end..).is_some_and(|rest| rest.starts_with('\n')) {
            end += 1;
        }
        let (line, after) = rest.split_at(end);
        lines.push(if keep_ends { line } else { line.get(..at).unwrap_or_default() });
        rest = after;
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}

fn split_lines(state: &State, text: &str, args: &[Value]) -> Result<Value, Error> {
    let [keep_ends] = bind("splitlines", args, ["keepends"])?;
    charge(state, text.len())?;
    list_of_str(state, lines(text, strict_flag(keep_ends)?).into_iter())
}

fn partition(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let [separator] = bind(method, args, ["sep"])?;
    let separator = required(method, "sep", separator)?;
    let separator = string(method, &separator)?;
    if separator.is_empty() {
        return Err(error("empty separator"));
    }
    let parts = match method {
        "partition" => {
            text.split_once(separator).map_or([text, "", ""], |(head, tail)| [head, separator, tail])
        }
        _ => text.rsplit_once(separator).map_or(["", "", text], |(head, tail)| [head, separator, tail]),
    };
    PySeq::tuple(parts.into_iter().map(Value::from).collect())
}

fn join(state: &State, separator: &str, args: &[Value]) -> Result<Value, Error> {
    let [items] = bind("join", args, ["iterable"])?;
    let items = required("join", "iterable", items)?;
    let mut joined = String::new();
    for (index, item) in iterate(state, &items)?.iter().enumerate() {
        if item.kind() != ValueKind::String {
            return Err(error(format!(
                "sequence item {index}: expected str instance, {} found",
                type_name(item)
            )));
        }
        let item = item.as_str().unwrap_or_default();
        charge(state, separator.len() + item.len())?;
        if index > 0 {
            joined.push_str(separator);
        }
        joined.push_str(item);
    }
    Ok(Value::from(joined))
}

fn replace_method(state: &State, text: &str, args: &[Value]) -> Result<Value, Error> {
    let [old, new, count] = bind("replace", args, ["old", "new", "count"])?;
    let (old, new) = (required("replace", "old", old)?, required("replace", "new", new)?);
    replace(
        state,
        text,
        string("replace", &old)?,
        string("replace", &new)?,
        optional_integer(count)?.unwrap_or(-1),
    )
}

/// `str.replace`; a negative count replaces all.
pub(super) fn replace(state: &State, text: &str, old: &str, new: &str, count: i64) -> Result<Value, Error> {
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    let found = text.matches(old).take(count).count();
    charge(state, text.len().saturating_add(found.saturating_mul(new.len())))?;
    Ok(Value::from(text.replacen(old, new, count)))
}

fn count(text: &str, args: &[Value]) -> Result<Value, Error> {
    let [needle, start, end] = bind("count", args, ["sub", "start", "end"])?;
    let needle = required("count", "sub", needle)?;
    let needle = string("count", &needle)?;
    let part = window(text, start, end)?;
    Ok(Value::from(part.map_or(0, |(part, _)| part.matches(needle).count())))
}

fn find_method(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let [needle, start, end] = bind(method, args, ["sub", "start", "end"])?;
    let needle = required(method, "sub", needle)?;
    let needle = string(method, &needle)?;
    let found = window(text, start, end)?.and_then(|(part, offset)| {
        let byte = match method {
            "find" | "index" => part.find(needle),
            _ => part.rfind(needle),
        }?;
        Some(offset + part.get(..byte)?.chars().count())
    });
    match found {
        Some(position) => Ok(Value::from(position)),
        None if method.ends_with("find") => Ok(Value::from(-1)),
        None => Err(error("substring not found")),
    }
}

fn pad(state: &State, text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (width, fill) = if method == "zfill" {
        let [width] = bind(method, args, ["width"])?;
        (width, None)
    } else {
        let [width, fill] = bind(method, args, ["width", "fillchar"])?;
        (width, fill)
    };
    let width = integer(&required(method, "width", width)?)?;
    let fill = match &fill {
        Some(fill) => {
            let mut characters = string(method, fill)?.chars();
            match (characters.next(), characters.next()) {
                (Some(character), None) => character,
                _ => return Err(error("the fill character must be exactly one character long")),
            }
        }
        None if method == "zfill" => '0',
        None => ' ',
    };
    padded(state, text, method, width, fill).map(Value::from)
}

/// Pads a text to a width: `center`, `ljust`, `rjust` or `zfill`.
pub(super) fn padded(
    state: &State,
    text: &str,
    method: &str,
    width: i64,
    fill: char,
) -> Result<String, Error> {
    if width > MAX_WIDTH {
        return Err(error(format!("{method}() width is larger than {MAX_WIDTH}")));
    }
    let len = text.chars().count();
    let width = usize::try_from(width).unwrap_or(0);
    let missing = width.saturating_sub(len);
    charge(state, text.len() + missing * fill.len_utf8())?;
    let filler = |count: usize| fill.to_string().repeat(count);
    Ok(match method {
        "ljust" => format!("{text}{}", filler(missing)),
        "rjust" => format!("{}{text}", filler(missing)),
        "zfill" => match text.strip_prefix(['+', '-']) {
            Some(digits) => {
                let sign = text.get(..1).unwrap_or_default();
                format!("{sign}{}{digits}", filler(missing))
            }
            None => format!("{}{text}", filler(missing)),
        },
        _ => {
            // CPython puts the odd character left when the width is odd.
            let left = missing / 2 + (missing & width & 1);
            format!("{}{text}{}", filler(left), filler(missing - left))
        }
    })
}

fn expand_tabs(state: &State, text: &str, args: &[Value]) -> Result<Value, Error> {
    let [size] = bind("expandtabs", args, ["tabsize"])?;
    let size = optional_integer(size)?.unwrap_or(8).max(0);
    let size = usize::try_from(size.min(1000)).unwrap_or(0);
    charge(state, text.matches('\t').count() * size)?;
    let mut expanded = String::with_capacity(text.len());
    let mut column = 0;
    for character in text.chars() {
        match character {
            '\t' if size > 0 => {
                let spaces = size - column % size;
                expanded.extend(std::iter::repeat_n(' ', spaces));
                column += spaces;
            }
            '\t' => {}
            '\n' | '\r' => {
                expanded.push(character);
                column = 0;
            }
            _ => {
                expanded.push(character);
                column += 1;
            }
        }
    }
    Ok(Value::from(expanded))
}
