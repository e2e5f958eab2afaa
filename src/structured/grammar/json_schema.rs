//! Brings a JSON schema into the form that is compiled, and refuses what cannot be enforced.

use serde_json::{Map, Value};

use super::compiler::Limits;
use super::{GrammarError, references};

/// Keywords whose value is a schema, or with an array a list of them.
const ONE: [&str; 3] = ["items", "additionalItems", "additionalProperties"];
/// Keywords whose value is a list of schemas.
const LIST: [&str; 4] = ["anyOf", "oneOf", "allOf", "prefixItems"];
/// Keywords whose value is an object of schemas.
const NAMED: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];
/// Other keywords that are enforced, or that the enforced ones need.
const PLAIN: [&str; 19] = [
    "$ref",
    "const",
    "enum",
    "type",
    "minItems",
    "maxItems",
    "required",
    "minProperties",
    "maxProperties",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "$schema",
];
/// Keywords that restrict values and cannot be enforced.
const REFUSED: [(&str, &str); 17] = [
    ("not", "a grammar cannot exclude a schema"),
    ("if", "a grammar cannot depend on what was matched"),
    ("then", "a grammar cannot depend on what was matched"),
    ("else", "a grammar cannot depend on what was matched"),
    ("dependentRequired", "a grammar cannot depend on what was matched"),
    ("dependentSchemas", "a grammar cannot depend on what was matched"),
    ("dependencies", "a grammar cannot depend on what was matched"),
    ("propertyNames", "list the names in `properties`, or use `patternProperties`"),
    ("contains", "a grammar cannot count matching items"),
    ("minContains", "a grammar cannot count matching items"),
    ("maxContains", "a grammar cannot count matching items"),
    ("uniqueItems", "a grammar cannot compare items"),
    ("unevaluatedItems", "use `items`"),
    ("unevaluatedProperties", "use `additionalProperties` in each object"),
    ("$dynamicRef", "use `$ref`"),
    ("$recursiveRef", "use `$ref`"),
    ("contentSchema", "a grammar cannot look into an encoded text"),
];
/// Formats that are enforced; JSON schema lets others be remarks.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// The schema without remarks, references in their plainest form.
pub(super) fn prepare(
    schema: Value,
    strict: bool,
    limits: &Limits,
) -> Result<Map<String, Value>, GrammarError> {
    let mut schema = match schema {
        Value::Object(schema) => schema,
        Value::Bool(true) => Map::new(),
        _ => return Err(GrammarError::Invalid("a JSON schema is an object".to_owned())),
    };
    // Anchors are remarks to all but references.
    references::normalize(&mut schema)?;
    let walk = Walk { strict, nesting: limits.nesting };
    walk.object(&mut schema, "#", 0)?;
    Ok(schema)
}

/// Remarks, which restrict nothing.
const REMARKS: [&str; 13] = [
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
    "$id",
    "id",
    "$anchor",
    "$dynamicAnchor",
    "$vocabulary",
];

/// Refuses an object of names that restrict nothing and are no remarks either, which would allow everything: a schema in
/// somebody's envelope, say.
pub(super) fn check_keywords(schema: &Map<String, Value>) -> Result<(), GrammarError> {
    let is_remark = |key: &String| REMARKS.contains(&key.as_str());
    if schema.keys().any(|key| restricts(key)) || schema.keys().all(is_remark) {
        return Ok(());
    }
    let keys: Vec<&str> = schema.keys().take(3).map(String::as_str).collect();
    let problem =
        format!("`#` has no keyword of JSON schema, but {}; is the schema inside?", keys.join(", "));
    Err(GrammarError::Invalid(problem))
}

fn restricts(key: &str) -> bool {
    let lists: [&[&str]; 4] = [&ONE, &LIST, &NAMED, &PLAIN];
    key == "format"
        || lists.iter().any(|list| list.contains(&key))
        || REFUSED.iter().any(|(keyword, _)| *keyword == key)
}

struct Walk {
    strict: bool,
    nesting: usize,
}

impl Walk {
    fn any(&self, schema: &mut Value, at: &str, depth: usize) -> Result<(), GrammarError> {
        match schema {
            Value::Object(schema) => self.object(schema, at, depth),
            Value::Bool(_) => Ok(()),
            _ => Err(GrammarError::Invalid(format!("`{at}` is no schema"))),
        }
    }

    fn object(&self, schema: &mut Map<String, Value>, at: &str, depth: usize) -> Result<(), GrammarError> {
        if depth > self.nesting {
            return Err(GrammarError::TooDeep { limit: self.nesting });
        }
        if schema.get("items").is_some_and(Value::is_array) {
            // The older spelling of tuples.
            if let Some(items) = schema.remove("items") {
                schema.insert("prefixItems".to_owned(), items);
            }
            if let Some(rest) = schema.remove("additionalItems") {
                schema.insert("items".to_owned(), rest);
            }
        }
        let keys: Vec<String> = schema.keys().cloned().collect();
        for key in keys {
            let Some(value) = schema.get_mut(&key) else { continue };
            let at_key = format!("{at}/{}", key.replace('~', "~0").replace('/', "~1"));
            let known = if ONE.contains(&key.as_str()) {
                self.any(value, &at_key, depth + 1)?;
                true
            } else if LIST.contains(&key.as_str()) {
                let Value::Array(schemas) = value else {
                    return Err(GrammarError::Invalid(format!("`{at_key}` is no list of schemas")));
                };
                for (index, schema) in schemas.iter_mut().enumerate() {
                    self.any(schema, &format!("{at_key}/{index}"), depth + 1)?;
                }
                true
            } else if NAMED.contains(&key.as_str()) {
                let Value::Object(schemas) = value else {
                    return Err(GrammarError::Invalid(format!("`{at_key}` is no object of schemas")));
                };
                for (name, schema) in schemas.iter_mut() {
                    self.any(schema, &format!("{at_key}/{name}"), depth + 1)?;
                }
                true
            } else if key == "format" {
                value.as_str().is_some_and(|format| FORMATS.contains(&format))
            } else {
                self.check_refused(&key, value, at)?;
                PLAIN.contains(&key.as_str())
            };
            if !known {
                schema.shift_remove(&key);
            }
        }
        Ok(())
    }

    fn check_refused(&self, key: &str, value: &Value, at: &str) -> Result<(), GrammarError> {
        let restricts_nothing = match key {
            "uniqueItems" => *value == Value::Bool(false),
            "not" => *value == Value::Bool(false),
            _ => *value == Value::Bool(true) || value.as_object().is_some_and(Map::is_empty),
        };
        match REFUSED.iter().find(|(keyword, _)| *keyword == key) {
            Some((_, reason)) if self.strict && !restricts_nothing => {
                Err(GrammarError::Keyword { keyword: key.to_owned(), at: at.to_owned(), reason })
            }
            _ => Ok(()),
        }
    }
}
