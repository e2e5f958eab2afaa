//! Whether a value is what a JSON schema describes, for the part of JSON Schema (2020-12) that our own schemas use. A
//! keyword that is not known here is an error, never a silent yes.

use serde_json::{Map, Value};

/// Remarks.
const NO_RESTRICTION: [&str; 6] = ["$schema", "$id", "$defs", "title", "description", "default"];
/// Deeper values are refused: a schema may refer to itself.
const DEEPEST: usize = 64;

/// What is wrong with a value, a line each with the place; nothing when it fits.
///
/// # Errors
/// The schema says something that is not understood here.
pub fn check(schema: &Value, value: &Value) -> Result<Vec<String>, String> {
    let mut problems = Vec::new();
    Checker { root: schema }.check(schema, value, "", 0, &mut problems)?;
    Ok(problems)
}

struct Checker<'a> {
    root: &'a Value,
}

impl Checker<'_> {
    fn check(
        &self,
        schema: &Value,
        value: &Value,
        at: &str,
        depth: usize,
        problems: &mut Vec<String>,
    ) -> Result<(), String> {
        let schema = match schema {
            Value::Bool(true) => return Ok(()),
            Value::Object(schema) => schema,
            _ => return Err(format!("`{schema}` is no schema")),
        };
        if depth > DEEPEST {
            return Err("the schema goes too deep".to_owned());
        }
        for (keyword, wanted) in schema {
            if NO_RESTRICTION.contains(&keyword.as_str()) {
                continue;
            }
            if keyword == "$ref" {
                let place = wanted.as_str().and_then(|place| place.strip_prefix('#'));
                let target = place.and_then(|place| self.root.pointer(place));
                let target = target.ok_or_else(|| format!("`$ref` leads nowhere: {wanted}"))?;
                self.check(target, value, at, depth + 1, problems)?;
                continue;
            }
            match children(keyword, wanted, schema, value)? {
                Children::None => {}
                Children::Some(children) => {
                    for (name, schema, value) in children {
                        self.check(schema, value, &format!("{at}/{name}"), depth + 1, problems)?;
                    }
                    continue;
                }
            }
            if let Some(problem) = restriction(keyword, wanted, schema, value)? {
                problems.push(format!("{}: {problem}", if at.is_empty() { "/" } else { at }));
            }
        }
        Ok(())
    }
}

enum Children<'a> {
    /// The keyword is not about what is inside.
    None,
    Some(Vec<(String, &'a Value, &'a Value)>),
}

/// What a keyword says about the values inside.
fn children<'a>(
    keyword: &str,
    wanted: &'a Value,
    schema: &'a Map<String, Value>,
    value: &'a Value,
) -> Result<Children<'a>, String> {
    let found = match (keyword, wanted) {
        ("properties", Value::Object(properties)) => {
            let named =
                |(name, schema): (&'a String, &'a Value)| Some((name.clone(), schema, value.get(name)?));
            match value.is_object() {
                true => properties.iter().filter_map(named).collect(),
                false => Vec::new(),
            }
        }
        ("additionalProperties", Value::Object(_)) => {
            let known = schema.get("properties").and_then(Value::as_object);
            let others = value.as_object().into_iter().flatten();
            let others = others.filter(|(name, _)| known.is_none_or(|known| !known.contains_key(*name)));
            others.map(|(name, value)| (name.clone(), wanted, value)).collect()
        }
        ("items", Value::Object(_)) => {
            let items = value.as_array().into_iter().flatten();
            items.enumerate().map(|(index, item)| (index.to_string(), wanted, item)).collect()
        }
        _ => return Ok(Children::None),
    };
    Ok(Children::Some(found))
}

/// What a keyword finds wrong with the value itself.
fn restriction(
    keyword: &str,
    wanted: &Value,
    schema: &Map<String, Value>,
    value: &Value,
) -> Result<Option<String>, String> {
    let unknown = || format!("`{keyword}: {wanted}` is not understood");
    let number = || wanted.as_f64().ok_or_else(unknown);
    let size = || wanted.as_u64().ok_or_else(unknown);
    let problem = match keyword {
        "type" => {
            let names: Vec<&str> = match wanted {
                Value::String(name) => vec![name],
                Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
                _ => return Err(unknown()),
            };
            (!names.iter().any(|name| is_type(name, value))).then(|| format!("is no {}", names.join(" or ")))
        }
        "enum" => {
            let allowed = wanted.as_array().ok_or_else(unknown)?;
            (!allowed.contains(value)).then(|| format!("is none of {wanted}"))
        }
        "const" => (wanted != value).then(|| format!("is not {wanted}")),
        "minimum" => number()
            .map(|least| value.as_f64().is_some_and(|v| v < least).then(|| format!("is below {least}")))?,
        "maximum" => number()
            .map(|most| value.as_f64().is_some_and(|v| v > most).then(|| format!("is above {most}")))?,
        "minItems" => size().map(|least| {
            value
                .as_array()
                .is_some_and(|v| (v.len() as u64) < least)
                .then(|| format!("has fewer than {least} items"))
        })?,
        "maxItems" => size().map(|most| {
            value
                .as_array()
                .is_some_and(|v| v.len() as u64 > most)
                .then(|| format!("has more than {most} items"))
        })?,
        "minLength" => size().map(|least| {
            value
                .as_str()
                .is_some_and(|v| (v.chars().count() as u64) < least)
                .then(|| format!("is shorter than {least}"))
        })?,
        "maxLength" => size().map(|most| {
            value
                .as_str()
                .is_some_and(|v| v.chars().count() as u64 > most)
                .then(|| format!("is longer than {most}"))
        })?,
        "required" => {
            let names = wanted.as_array().ok_or_else(unknown)?;
            let missing = |name: &&Value| name.as_str().is_some_and(|name| value.get(name).is_none());
            let missing: Vec<String> = if value.is_object() {
                names.iter().filter(missing).map(Value::to_string).collect()
            } else {
                Vec::new()
            };
            (!missing.is_empty()).then(|| format!("lacks {}", missing.join(", ")))
        }
        "additionalProperties" => {
            let Value::Bool(allowed) = wanted else { return Err(unknown()) };
            let known = schema.get("properties").and_then(Value::as_object);
            let others = value.as_object().into_iter().flat_map(|fields| fields.keys());
            let others: Vec<&str> = others
                .filter(|name| known.is_none_or(|known| !known.contains_key(*name)))
                .map(String::as_str)
                .collect();
            (!allowed && !others.is_empty()).then(|| format!("has unknown fields: {}", others.join(", ")))
        }
        _ => return Err(unknown()),
    };
    Ok(problem)
}

fn is_type(name: &str, value: &Value) -> bool {
    match name {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "number" => value.is_number(),
        "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn problems(schema: Value, value: Value) -> Vec<String> {
        check(&schema, &value).unwrap()
    }

    #[test]
    fn values_are_held_against_every_keyword() {
        let schema = json!({
            "type": "object", "required": ["a", "b"], "additionalProperties": false,
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 9},
                "b": {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 1, "maxItems": 2},
                "c": {"$ref": "#/$defs/text"},
            },
            "$defs": {"text": {"type": ["string", "null"], "minLength": 1, "maxLength": 2}},
        });
        let check = |value: Value| problems(schema.clone(), value);
        assert_eq!(check(json!({"a": 3, "b": ["x"], "c": "é"})), [""; 0]);
        assert_eq!(check(json!({"a": 3.0, "b": ["x"], "c": null})), [""; 0]);
        assert_eq!(check(json!({"a": 10})), ["/: lacks \"b\"", "/a: is above 9"]);
        assert_eq!(check(json!({"a": -1, "b": []})), ["/a: is below 0", "/b: has fewer than 1 items"]);
        assert_eq!(
            check(json!({"a": 0.5, "b": ["z"]})),
            ["/a: is no integer", "/b/0: is none of [\"x\",\"y\"]"]
        );
        assert_eq!(check(json!({"a": 1, "b": ["x", "x", "y"]})), ["/b: has more than 2 items"]);
        assert_eq!(check(json!({"a": 1, "b": ["x"], "d": 1})), ["/: has unknown fields: d"]);
        assert_eq!(check(json!({"a": 1, "b": ["x"], "c": "abc"})), ["/c: is longer than 2"]);
        assert_eq!(check(json!({"a": 1, "b": ["x"], "c": ""})), ["/c: is shorter than 1"]);
        assert_eq!(check(json!([])), ["/: is no object"]);
        let map = json!({"additionalProperties": {"type": "number"}, "properties": {"n": {"const": "k"}}});
        assert_eq!(problems(map.clone(), json!({"n": "k", "x": 1})), [""; 0]);
        assert_eq!(problems(map, json!({"n": "j", "x": "1"})), ["/x: is no number", "/n: is not \"k\""]);
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        for schema in [
            json!({"pattern": "a"}),
            json!({"$ref": "#/nowhere"}),
            json!({"$ref": "other.json"}),
            json!({"items": false}),
            json!({"minimum": "a"}),
            json!(1),
            json!({"$ref": "#"}),
        ] {
            assert!(check(&schema, &json!([1])).is_err(), "{schema}");
        }
    }
}
