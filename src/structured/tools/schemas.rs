//! The tools of a request, as parsers need them: names, and the properties of each function's parameters.

use serde_json::{Map, Value};

/// The functions that a request offers.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ToolSchemas {
    functions: Vec<Function>,
}

#[derive(Debug, Clone, PartialEq)]
struct Function {
    name: String,
    parameters: Value,
}

/// What JSON Schema calls the type of a value.
pub fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

impl ToolSchemas {
    /// From the `tools` of a chat request, `{"type": "function", "function": {"name", "parameters"}}`. Other entries
    /// (tools that a server would run) have no functions to call and count for nothing.
    pub fn from_openai(tools: &[Value]) -> Self {
        let functions = tools.iter().filter_map(|tool| {
            let function = tool.get("function")?;
            let name = function.get("name")?.as_str()?.to_owned();
            Some(Function { name, parameters: function.get("parameters").cloned().unwrap_or_default() })
        });
        Self { functions: functions.collect() }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.functions.is_empty()
    }

    /// Whether a function is offered.
    pub fn contains(&self, name: &str) -> bool {
        self.functions.iter().any(|function| function.name == name)
    }

    /// The functions with the schemas of their parameters; null for one that declares none.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.functions.iter().map(|function| (function.name.as_str(), &function.parameters))
    }

    /// The schemas of a function's parameters.
    pub(super) fn properties(&self, function: &str) -> Option<&Map<String, Value>> {
        let function = self.functions.iter().find(|candidate| candidate.name == function)?;
        function.parameters.get("properties")?.as_object()
    }

    /// The schema of one parameter.
    pub(super) fn property(&self, function: &str, parameter: &str) -> Option<&Value> {
        self.properties(function)?.get(parameter)
    }

    /// Whether a parameter's type is exactly `string`.
    pub(super) fn is_string(&self, function: &str, parameter: &str) -> bool {
        let kind = self.property(function, parameter).and_then(|schema| schema.get("type"));
        kind.is_some_and(|kind| kind == "string")
    }
}
