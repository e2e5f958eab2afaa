//! Closes the objects of a JSON schema to properties that it does not name, as vLLM's
//! `disable_additional_properties` does.

use serde_json::{Map, Value};

/// Keywords whose value is a schema, or a list of schemas.
const SCHEMAS: [&str; 9] = [
    "items",
    "additionalItems",
    "additionalProperties",
    "anyOf",
    "oneOf",
    "allOf",
    "prefixItems",
    "contains",
    "not",
];
/// Keywords whose value is an object of schemas.
const NAMED: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];

/// Forbids additional properties in every object that names some and does not say otherwise.
pub fn close(schema: &mut Value) {
    match schema {
        Value::Object(schema) => close_object(schema),
        Value::Array(schemas) => schemas.iter_mut().for_each(close),
        _ => {}
    }
}

fn close_object(schema: &mut Map<String, Value>) {
    for (keyword, value) in schema.iter_mut() {
        if SCHEMAS.contains(&keyword.as_str()) {
            close(value);
        } else if NAMED.contains(&keyword.as_str()) {
            value.as_object_mut().into_iter().flat_map(Map::values_mut).for_each(close);
        }
    }
    if schema.contains_key("properties") || schema.contains_key("patternProperties") {
        schema.entry("additionalProperties").or_insert(Value::Bool(false));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn objects_close_and_examples_stay() {
        let mut schema = json!({
            "anyOf": [{"properties": {"properties": {"type": "object"}}}, {"patternProperties": {}, "additionalProperties": true}],
            "const": {"properties": {}}, "$defs": {"a": {"items": {"properties": {}}}},
        });
        close(&mut schema);
        let expected = json!({
            "anyOf": [
                {"properties": {"properties": {"type": "object"}}, "additionalProperties": false},
                {"patternProperties": {}, "additionalProperties": true},
            ],
            "const": {"properties": {}}, "$defs": {"a": {"items": {"properties": {}, "additionalProperties": false}}},
        });
        assert_eq!(schema, expected);
    }
}
