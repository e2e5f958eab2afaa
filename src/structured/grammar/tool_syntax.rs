//! Grammars of calls whose arguments are not one JSON object: tags around each parameter, or a list with commas.

use serde_json::{Map, Value};

use super::GrammarError;
use super::tool_calls::Builder;
use crate::structured::tools::ToolParser;

/// The expression of one call; `None` for families whose arguments are a JSON object.
pub(super) fn call(
    builder: &mut Builder,
    parser: ToolParser,
    name: &str,
    parameters: &Value,
) -> Result<Option<String>, GrammarError> {
    let schema = Schema { root: parameters };
    let expression = match parser {
        ToolParser::Gemma4 => {
            let braces = gemma_object(builder, schema, parameters, 0)?;
            let (open, close) = (format!("<|tool_call>call:{name}"), "<tool_call|>");
            format!("{} {braces} {}", builder.text.exactly(&open), builder.text.exactly(close))
        }
        ToolParser::FunctionGemma => {
            let list = list(builder, parameters, ",", |builder, key, value| {
                let key = builder.text.exactly(&format!("{key}:"));
                let value = match kind(value) {
                    Kind::Text => quoted(builder, value, "<escape>"),
                    Kind::Json if is_nested(value) => {
                        Err(builder.refuse("the model's syntax has no objects and lists".to_owned()))
                    }
                    Kind::Json => builder.json(schema.part(value)),
                };
                Ok(format!("{key} {}", value?))
            })?;
            let open = builder.text.exactly(&format!("<start_function_call>call:{name}{{"));
            let close = builder.text.exactly("}<end_function_call>");
            format!("{open} {list} {close}")
        }
        ToolParser::Pythonic => {
            let list = list(builder, parameters, ", ", |builder, key, value| {
                let key = builder.text.exactly(&format!("{key}="));
                Ok(format!("{key} {}", builder.json(schema.part(value))?))
            })?;
            let (open, close) = (format!("{name}("), ")");
            format!("{} {list} {}", builder.text.exactly(&open), builder.text.exactly(close))
        }
        _ => match Tags::of(parser, name) {
            Some(tags) => tagged(builder, &tags, schema)?,
            None => return Ok(None),
        },
    };
    Ok(Some(expression))
}

/// A tool's parameters.
#[derive(Clone, Copy)]
struct Schema<'a> {
    root: &'a Value,
}

impl Schema<'_> {
    /// The schema of one value, with the definitions that it may refer to.
    fn part(self, value: &Value) -> Value {
        let mut part = match value {
            Value::Object(part) => part.clone(),
            _ => Map::new(),
        };
        for key in ["$defs", "definitions"] {
            if let Some(definitions) = self.root.get(key) {
                part.entry(key).or_insert_with(|| definitions.clone());
            }
        }
        Value::Object(part)
    }
}

/// How a parameter is written.
enum Kind {
    /// As it is.
    Text,
    /// As JSON.
    Json,
}

/// Numbers, truth values, lists and objects are JSON; what may be a text is one.
fn kind(schema: &Value) -> Kind {
    const JSON: [&str; 6] = ["integer", "number", "boolean", "array", "object", "null"];
    let names = |name: &Value| name.as_str().is_some_and(|name| JSON.contains(&name));
    match schema.get("type") {
        Some(Value::Array(types)) if types.iter().all(names) => Kind::Json,
        Some(name) if names(name) => Kind::Json,
        _ => Kind::Text,
    }
}

fn is_nested(schema: &Value) -> bool {
    schema.get("type").is_some_and(|kind| kind == "object" || kind == "array")
}

fn properties(parameters: &Value) -> impl Iterator<Item = (&str, &Value, bool)> {
    let required = parameters.get("required").and_then(Value::as_array);
    let is_required =
        move |name: &str| required.is_some_and(|required| required.iter().any(|other| other == name));
    let properties = parameters.get("properties").and_then(Value::as_object);
    properties.into_iter().flatten().map(move |(name, schema)| (name.as_str(), schema, is_required(name)))
}

/// The texts that an `enum` of texts allows.
fn choices(schema: &Value) -> Option<Vec<&str>> {
    let values = match schema.get("const") {
        Some(value) => std::slice::from_ref(value),
        None => schema.get("enum")?.as_array()?.as_slice(),
    };
    values.iter().map(Value::as_str).collect::<Option<Vec<_>>>().filter(|values| !values.is_empty())
}

/// A text between two equal quotes.
fn quoted(builder: &mut Builder, schema: &Value, quote: &str) -> Result<String, GrammarError> {
    let open = builder.text.exactly(quote);
    let rest = text(builder, schema, quote);
    Ok(format!("{open} {rest}"))
}

/// A text and the marker after it.
fn text(builder: &mut Builder, schema: &Value, close: &str) -> String {
    match choices(schema) {
        Some(choices) => {
            let choices: Vec<String> = choices.iter().map(|choice| builder.text.exactly(choice)).collect();
            format!("({}) {}", choices.join(" | "), builder.text.exactly(close))
        }
        None => builder.text.until(close),
    }
}

/// The marks of a family that puts each parameter between tags.
struct Tags {
    open: String,
    /// Before and after a parameter's name; the second ends where the value begins.
    key: [&'static str; 2],
    /// In place of the second, for values that are JSON.
    json_key: Option<&'static str>,
    value_end: &'static str,
    close: &'static str,
}

impl Tags {
    fn of(parser: ToolParser, name: &str) -> Option<Self> {
        let tags = |open: String, key, value_end, close| Self { open, key, json_key: None, value_end, close };
        Some(match parser {
            ToolParser::Qwen3Coder => tags(
                format!("<tool_call>\n<function={name}>\n"),
                ["<parameter=", ">\n"],
                "\n</parameter>\n",
                "</function>\n</tool_call>",
            ),
            ToolParser::Glm47 => tags(
                format!("<tool_call>{name}\n"),
                ["<arg_key>", "</arg_key>\n<arg_value>"],
                "</arg_value>\n",
                "</tool_call>",
            ),
            ToolParser::Longcat => tags(
                format!("<longcat_tool_call>{name}\n"),
                ["<longcat_arg_key>", "</longcat_arg_key>\n<longcat_arg_value>"],
                "</longcat_arg_value>\n",
                "</longcat_tool_call>",
            ),
            ToolParser::MinimaxM2 => tags(
                format!("<invoke name=\"{name}\">\n"),
                ["<parameter name=\"", "\">"],
                "</parameter>\n",
                "</invoke>\n",
            ),
            ToolParser::Minicpm5 => tags(
                format!("<function name=\"{name}\">"),
                ["<param name=\"", "\">"],
                "</param>",
                "</function>",
            ),
            ToolParser::MuseSpark => tags(
                format!("<atem:invoke name=\"{name}\">\n"),
                ["<atem:parameter name=\"", "\">"],
                "</atem:parameter>\n",
                "</atem:invoke>\n",
            ),
            ToolParser::Dsml => Self {
                json_key: Some("\" string=\"false\">"),
                ..tags(
                    format!("<｜DSML｜invoke name=\"{name}\">\n"),
                    ["<｜DSML｜parameter name=\"", "\" string=\"true\">"],
                    "</｜DSML｜parameter>\n",
                    "</｜DSML｜invoke>\n",
                )
            },
            _ => return None,
        })
    }
}

fn tagged(builder: &mut Builder, tags: &Tags, schema: Schema) -> Result<String, GrammarError> {
    let mut parts = vec![builder.text.exactly(&tags.open)];
    for (name, value, required) in properties(schema.root) {
        let key = |end| format!("{}{name}{end}", tags.key[0]);
        let parameter = match kind(value) {
            Kind::Text => {
                let key = builder.text.exactly(&key(tags.key[1]));
                format!("{key} {}", text(builder, value, tags.value_end))
            }
            Kind::Json => {
                let key = builder.text.exactly(&key(tags.json_key.unwrap_or(tags.key[1])));
                let value = builder.json(schema.part(value))?;
                format!("{key} {value} {}", builder.text.exactly(tags.value_end))
            }
        };
        parts.push(if required { parameter } else { format!("({parameter})?") });
    }
    parts.push(builder.text.exactly(tags.close));
    Ok(parts.join(" "))
}

/// Parameters with a separator between them, the required ones first.
fn list(
    builder: &mut Builder,
    parameters: &Value,
    separator: &str,
    mut item: impl FnMut(&mut Builder, &str, &Value) -> Result<String, GrammarError>,
) -> Result<String, GrammarError> {
    let separator = builder.text.exactly(separator);
    let (mut required, mut optional) = (Vec::new(), Vec::new());
    for (name, schema, is_required) in properties(parameters) {
        let body = item(builder, name, schema)?;
        let rule = builder.text.rule(&body);
        if is_required { required.push(rule) } else { optional.push(rule) }
    }
    let following =
        |rules: &[String]| rules.iter().map(|rule| format!(" ({separator} {rule})?")).collect::<String>();
    if !required.is_empty() {
        return Ok(format!("{}{}", required.join(&format!(" {separator} ")), following(&optional)));
    }
    // Whichever comes first has no separator before it.
    let starts: Vec<String> = (0..optional.len())
        .filter_map(|first| {
            let (first, rest) = optional.get(first..)?.split_first()?;
            Some(format!("{first}{}", following(rest)))
        })
        .collect();
    Ok(if starts.is_empty() { "\"\"".to_owned() } else { format!("({})?", starts.join(" | ")) })
}

/// `{key:value,…}` as Gemma 4 writes it.
fn gemma_object(
    builder: &mut Builder,
    root: Schema,
    schema: &Value,
    depth: usize,
) -> Result<String, GrammarError> {
    let list = list(builder, schema, ",", |builder, key, value| {
        let key = builder.text.exactly(&format!("{key}:"));
        Ok(format!("{key} {}", gemma_value(builder, root, value, depth + 1)?))
    })?;
    Ok(format!("\"{{\" {list} \"}}\""))
}

fn gemma_value(
    builder: &mut Builder,
    root: Schema,
    schema: &Value,
    depth: usize,
) -> Result<String, GrammarError> {
    if depth > builder.nesting() {
        return Err(GrammarError::TooDeep { limit: builder.nesting() });
    }
    match (schema.get("type").and_then(Value::as_str), schema.get("$ref")) {
        (_, Some(_)) => Err(builder.refuse("the model's syntax cannot follow a `$ref`".to_owned())),
        (Some("object"), _) => gemma_object(builder, root, schema, depth),
        (Some("array"), _) => {
            let value = match schema.get("items") {
                Some(items) => gemma_value(builder, root, items, depth + 1)?,
                None => quoted(builder, &Value::Null, "<|\"|>")?,
            };
            let item = builder.text.rule(&value);
            Ok(format!("\"[\" ({item} (\",\" {item})*)? \"]\""))
        }
        _ => match kind(schema) {
            Kind::Text => quoted(builder, schema, "<|\"|>"),
            Kind::Json => builder.json(root.part(schema)),
        },
    }
}
