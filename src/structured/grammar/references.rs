//! References within a JSON schema: anchors and escaped pointers become plain ones (`#/$defs/NAME`), the others are
//! checked.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::GrammarError;

/// References that refer to references.
const LONGEST_CHAIN: usize = 64;

pub(super) fn normalize(root: &mut Map<String, Value>) -> Result<(), GrammarError> {
    let mut found = BTreeMap::new();
    collect(root.values(), &mut found);
    if let Some(Value::String(reference)) = root.get("$ref") {
        found.insert(reference.clone(), String::new());
    }
    let mut copies = Vec::new();
    for (index, (reference, plain)) in found.iter_mut().enumerate() {
        let target = target(root, reference)
            .ok_or_else(|| refused(reference, "it points to no schema of this document"))?;
        check_chain(root, reference, target)?;
        let is_plain = reference == "#" || (reference.starts_with("#/") && !reference.contains(['~', '%']));
        if is_plain {
            reference.clone_into(plain);
        } else {
            *plain = format!("#/$defs/reference-{index}");
            copies.push((format!("reference-{index}"), target.clone()));
        }
    }
    let mut document = Value::Object(std::mem::take(root));
    let mut copies: Map<String, Value> = copies.into_iter().collect();
    rename(&mut document, &found);
    copies.values_mut().for_each(|copy| rename(copy, &found));
    if let Value::Object(document) = document {
        *root = document;
    }
    if copies.is_empty() {
        return Ok(());
    }
    match root.entry("$defs").or_insert_with(|| Value::Object(Map::new())) {
        Value::Object(definitions) => definitions.extend(copies),
        _ => return Err(GrammarError::Invalid("`#/$defs` is no object of schemas".to_owned())),
    }
    Ok(())
}

fn refused(reference: &str, reason: &'static str) -> GrammarError {
    GrammarError::Keyword { keyword: "$ref".to_owned(), at: reference.to_owned(), reason }
}

fn collect<'a>(values: impl Iterator<Item = &'a Value>, found: &mut BTreeMap<String, String>) {
    for value in values {
        match value {
            Value::Object(fields) => {
                if let Some(Value::String(reference)) = fields.get("$ref") {
                    found.insert(reference.clone(), String::new());
                }
                collect(fields.values(), found);
            }
            Value::Array(items) => collect(items.iter(), found),
            _ => {}
        }
    }
}

fn rename(value: &mut Value, names: &BTreeMap<String, String>) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                match value {
                    Value::String(text) if key == "$ref" => {
                        if let Some(name) = names.get(text) {
                            name.clone_into(text);
                        }
                    }
                    value => rename(value, names),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| rename(item, names)),
        _ => {}
    }
}

/// What a reference points to: by pointer, by anchor. The root itself is a document of its own.
fn target<'a>(root: &'a Map<String, Value>, reference: &str) -> Option<Target<'a>> {
    let fragment = reference.strip_prefix('#')?;
    if fragment.is_empty() || fragment == "/" {
        return Some(Target(root));
    }
    let Some(pointer) = fragment.strip_prefix('/') else {
        return anchored(root, fragment);
    };
    let mut segments = pointer.split('/').map(unescape);
    let mut value = root.get(&segments.next()?)?;
    for segment in segments {
        value = match value {
            Value::Array(items) => items.get(segment.parse::<usize>().ok()?)?,
            value => value.get(&segment)?,
        };
    }
    match value {
        Value::Object(schema) => Some(Target(schema)),
        _ => None,
    }
}

/// A schema within the document.
#[derive(Clone, Copy)]
struct Target<'a>(&'a Map<String, Value>);

impl Target<'_> {
    fn clone(self) -> Value {
        Value::Object(self.0.clone())
    }
}

fn anchored<'a>(schema: &'a Map<String, Value>, name: &str) -> Option<Target<'a>> {
    let is = |key: &str, text: &str| schema.get(key).and_then(Value::as_str) == Some(text);
    if is("$anchor", name) || is("$id", &format!("#{name}")) {
        return Some(Target(schema));
    }
    schema.values().find_map(|value| match value {
        Value::Object(schema) => anchored(schema, name),
        Value::Array(items) => {
            items.iter().filter_map(Value::as_object).find_map(|schema| anchored(schema, name))
        }
        _ => None,
    })
}

fn unescape(segment: &str) -> String {
    let mut bytes = Vec::with_capacity(segment.len());
    let mut rest = segment;
    while let Some(c) = rest.chars().next() {
        let hex = rest.strip_prefix('%').and_then(|after| after.get(..2));
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = rest.get(3..).unwrap_or_default();
            }
            None => {
                bytes.extend(c.to_string().into_bytes());
                rest = rest.get(c.len_utf8()..).unwrap_or_default();
            }
        }
    }
    String::from_utf8_lossy(&bytes).replace("~1", "/").replace("~0", "~")
}

/// A reference to a reference to itself describes nothing.
fn check_chain<'a>(
    root: &'a Map<String, Value>,
    reference: &str,
    mut at: Target<'a>,
) -> Result<(), GrammarError> {
    for _ in 0..LONGEST_CHAIN {
        let Some(Value::String(next)) = at.0.get("$ref") else { return Ok(()) };
        match target(root, next) {
            Some(schema) => at = schema,
            None => return Ok(()),
        }
    }
    Err(refused(reference, "it refers to itself"))
}
