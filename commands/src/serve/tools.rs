//! The tools of a request: which are offered, whether one must be called, and how schemas are shown to templates.

use mlx_bun::structured::tools::type_name;
use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::fields::Fields;
use super::request::ToolChoice;

/// Tools of a request.
const MOST_TOOLS: usize = 1024;
/// Bytes of a tool's name.
const LONGEST_NAME: usize = 256;
/// Schemas within each other before templates see them as they are.
const DEEPEST: usize = 64;

/// `tools` of a chat request.
///
/// # Errors
/// One of them is no function with a name of its own.
pub fn read(fields: &Fields) -> Result<Vec<Value>, ApiError> {
    let Some(list) = fields.list("tools")? else { return Ok(Vec::new()) };
    for (index, tool) in list.iter().enumerate() {
        let at = format!("tools[{index}]");
        let kind = tool.get("type").and_then(Value::as_str);
        if kind != Some("function") {
            let kind = kind.unwrap_or("none");
            return Err(ApiError::field(&at, format!("is of type `{kind}`; only `function` is supported")));
        }
    }
    checked(list.clone())
}

/// Checks functions in OpenAI's form.
///
/// # Errors
/// A name is missing, absurd or there twice, parameters are no schema, or there are too many.
pub fn checked(tools: Vec<Value>) -> Result<Vec<Value>, ApiError> {
    if tools.len() > MOST_TOOLS {
        return Err(ApiError::field(
            "tools",
            format!("has {} tools; at most {MOST_TOOLS} are taken", tools.len()),
        ));
    }
    let mut names: Vec<String> = Vec::new();
    for (index, tool) in tools.iter().enumerate() {
        let at = format!("tools[{index}].function");
        let function = tool.get("function").and_then(Value::as_object);
        let function =
            Fields::inside(function.ok_or_else(|| ApiError::field(&at, "must be an object"))?, &at);
        match function.text("name")? {
            None | Some("") => return Err(function.wrong("name", "is missing")),
            Some(name) if name.len() > LONGEST_NAME => return Err(function.wrong("name", "is too long")),
            Some(name) if names.iter().any(|known| known == name) => {
                return Err(function.wrong("name", format!("is `{name}`, as another tool's is")));
            }
            Some(name) => names.push(name.to_owned()),
        }
        function.object("parameters")?;
    }
    Ok(tools)
}

/// `tool_choice` in OpenAI's forms, also the flat one of Responses.
///
/// # Errors
/// It is something else, or names a tool that is not offered.
pub fn choice(fields: &Fields, tools: &[Value]) -> Result<ToolChoice, ApiError> {
    const NAME: &str = "tool_choice";
    let choice = match fields.get(NAME) {
        None => ToolChoice::Auto,
        Some(Value::String(word)) => match word.as_str() {
            "auto" => ToolChoice::Auto,
            "none" => ToolChoice::None,
            "required" | "any" => ToolChoice::Required,
            _ => return Err(fields.wrong(NAME, "must be none, auto, required or a function")),
        },
        Some(Value::Object(choice)) if choice.get("type").is_some_and(|kind| kind == "function") => {
            let name = choice.get("function").map_or(choice.get("name"), |function| function.get("name"));
            let name = name.and_then(Value::as_str).ok_or_else(|| fields.wrong(NAME, "names no function"))?;
            ToolChoice::Named(name.to_owned())
        }
        Some(_) => return Err(fields.wrong(NAME, "must be none, auto, required or a function")),
    };
    check_choice(&choice, tools)?;
    Ok(choice)
}

/// Refuses a choice that the tools cannot satisfy.
///
/// # Errors
/// There are no tools, or not that one.
pub fn check_choice(choice: &ToolChoice, tools: &[Value]) -> Result<(), ApiError> {
    let problem = match choice {
        ToolChoice::Required if tools.is_empty() => "asks for a call, but there are no `tools`".to_owned(),
        ToolChoice::Named(name) if !tools.iter().any(|tool| tool["function"]["name"] == name.as_str()) => {
            format!("names `{name}`, which is not among the `tools`")
        }
        _ => return Ok(()),
    };
    Err(ApiError::field("tool_choice", problem))
}

/// The tools as templates see them: every schema says its type, which templates print in capitals.
pub fn for_template(tools: &[Value]) -> Vec<Value> {
    let mut tools = tools.to_vec();
    for function in tools.iter_mut().filter_map(|tool| tool.get_mut("function")?.as_object_mut()) {
        match function.get_mut("parameters").filter(|parameters| !parameters.is_null()) {
            Some(parameters) => add_types(parameters, DEEPEST),
            None => _ = function.insert("parameters".to_owned(), json!({"type": "object", "properties": {}})),
        }
    }
    tools
}

fn add_types(schema: &mut Value, deepest: usize) {
    let Some(schema) = schema.as_object_mut().filter(|_| deepest > 0) else { return };
    // Before the branches are given types that they do not say.
    if !schema.contains_key("type") && !schema.contains_key("$ref") {
        let kind = implied_type(schema);
        schema.insert("type".to_owned(), kind);
    }
    for (key, value) in schema.iter_mut() {
        match (key.as_str(), value) {
            ("properties" | "$defs" | "definitions" | "patternProperties", Value::Object(schemas)) => {
                schemas.values_mut().for_each(|schema| add_types(schema, deepest - 1));
            }
            ("items" | "additionalProperties" | "not", schema @ Value::Object(_)) => {
                add_types(schema, deepest - 1)
            }
            ("anyOf" | "oneOf" | "allOf" | "prefixItems", Value::Array(schemas)) => {
                schemas.iter_mut().for_each(|schema| add_types(schema, deepest - 1));
            }
            _ => {}
        }
    }
}

fn implied_type(schema: &Map<String, Value>) -> Value {
    let first = |name: &str| schema.get(name).and_then(Value::as_array).and_then(|list| list.first());
    if let Some(example) = first("enum").or(schema.get("const")) {
        return Value::from(type_name(example));
    }
    if schema.contains_key("properties") || schema.contains_key("additionalProperties") {
        return Value::from("object");
    }
    if schema.contains_key("items") {
        return Value::from("array");
    }
    let branches =
        ["anyOf", "oneOf", "allOf"].iter().filter_map(|name| schema.get(*name)?.as_array()).flatten();
    let typed = branches.filter_map(|branch| branch.get("type")).find(|kind| kind.is_string());
    typed.cloned().unwrap_or_else(|| Value::from("string"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
    }

    fn parse(body: Value) -> Result<(Vec<Value>, ToolChoice), ApiError> {
        let body = body.as_object().unwrap().clone();
        let fields = Fields::new(&body);
        let tools = read(&fields)?;
        let choice = choice(&fields, &tools)?;
        Ok((tools, choice))
    }

    #[test]
    fn choices_have_many_spellings() {
        let choice =
            |choice: Value| parse(json!({"tools": [tool("f")], "tool_choice": choice})).map(|(_, c)| c);
        assert_eq!(choice(json!(null)).unwrap(), ToolChoice::Auto);
        assert_eq!(choice(json!("none")).unwrap(), ToolChoice::None);
        assert_eq!(choice(json!("required")).unwrap(), ToolChoice::Required);
        let named = ToolChoice::Named("f".to_owned());
        assert_eq!(choice(json!({"type": "function", "function": {"name": "f"}})).unwrap(), named);
        assert_eq!(choice(json!({"type": "function", "name": "f"})).unwrap(), named);
        assert!(choice(json!({"type": "function", "name": "g"})).unwrap_err().message.contains("`g`"));
        assert!(choice(json!({"type": "allowed_tools"})).is_err());
        assert!(parse(json!({"tool_choice": "required"})).is_err());
    }

    #[test]
    fn tools_that_cannot_be_called_are_refused() {
        let message = |tools: Value| parse(json!({"tools": tools})).unwrap_err().message;
        assert_eq!(
            message(json!([{"type": "web_search"}])),
            "`tools[0]` is of type `web_search`; only `function` is supported"
        );
        assert_eq!(message(json!([{"type": "function"}])), "`tools[0].function` must be an object");
        assert_eq!(
            message(json!([tool("f"), tool("f")])),
            "`tools[1].function.name` is `f`, as another tool's is"
        );
        assert_eq!(message(json!([tool("")])), "`tools[0].function.name` is missing");
    }

    #[test]
    fn schemas_say_their_types() {
        let tools = [json!({"type": "function", "function": {"name": "f", "parameters": {"properties": {
            "a": {"enum": [1]}, "b": {"items": {"const": "x"}}, "c": {"anyOf": [{"description": "?"}, {"type": "number"}]},
            "d": {}, "e": {"type": "null"},
        }}}})];
        let shown = for_template(&tools);
        let parameters = &shown[0]["function"]["parameters"];
        assert_eq!(parameters["type"], "object");
        let kind = |name: &str| parameters["properties"][name]["type"].clone();
        assert_eq!(
            [kind("a"), kind("b"), kind("c"), kind("d"), kind("e")],
            ["integer", "array", "number", "string", "null"]
        );
        assert_eq!(parameters["properties"]["b"]["items"]["type"], "string");
        let bare = for_template(&[json!({"type": "function", "function": {"name": "f"}})]);
        assert_eq!(bare[0]["function"]["parameters"]["type"], "object");
    }
}
