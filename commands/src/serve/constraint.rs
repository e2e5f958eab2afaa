//! What a reply must look like: `response_format`, `guided_*` and `structured_outputs`.

use mlx_bun::structured::grammar::Constraint;
use serde_json::{Map, Value};

use super::error::ApiError;
use super::fields::Fields;

/// The constraint of a request.
///
/// # Errors
/// A field is wrong, or two fields ask for different things.
pub fn read(fields: &Fields) -> Result<Option<Constraint>, ApiError> {
    let found = [
        ("response_format", response_format(fields, "response_format")?),
        ("guided_json", guided_json(fields)?),
        ("guided_regex", text(fields, "guided_regex")?.map(Constraint::Regex)),
        ("guided_choice", choices(fields, "guided_choice")?),
        ("guided_grammar", text(fields, "guided_grammar")?.map(Constraint::grammar)),
        ("structured_outputs", structured_outputs(fields)?),
    ];
    let mut given = found.into_iter().filter_map(|(name, constraint)| Some((name, constraint?)));
    match (given.next(), given.next()) {
        (Some((first, _)), Some((second, _))) => {
            Err(ApiError::field(second, format!("cannot be combined with `{first}`; send one of the two")))
        }
        (only, _) => Ok(only.map(|(_, constraint)| constraint)),
    }
}

/// `{"type": "text" | "json_object" | "json_schema"}`; the schema stands in `json_schema`, or, as in Responses,
/// beside the type.
///
/// # Errors
/// It is something else.
pub fn response_format(fields: &Fields, name: &str) -> Result<Option<Constraint>, ApiError> {
    let Some(format) = fields.object(name)? else { return Ok(None) };
    let within = Fields::inside(format, name);
    match within.text("type")? {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(Constraint::JsonObject)),
        Some("json_schema") => {
            let at = format!("{name}.json_schema");
            let described = match within.object("json_schema")? {
                Some(described) => Fields::inside(described, &at),
                None => within,
            };
            let schema = described.get("schema").ok_or_else(|| described.wrong("schema", "is missing"))?;
            Ok(Some(Constraint::JsonSchema {
                schema: schema_of(schema.clone(), &described, "schema")?,
                strict: described.boolean("strict")?.unwrap_or(true),
                any_whitespace: described.boolean("any_whitespace")?.unwrap_or(true),
            }))
        }
        _ => Err(within.wrong("type", "must be text, json_object or json_schema")),
    }
}

fn schema_of(schema: Value, fields: &Fields, name: &str) -> Result<Value, ApiError> {
    match schema {
        schema @ (Value::Object(_) | Value::Bool(_)) => Ok(schema),
        _ => Err(fields.wrong(name, "must be a JSON schema")),
    }
}

fn strict(schema: Value) -> Constraint {
    Constraint::JsonSchema { schema, strict: true, any_whitespace: true }
}

/// A schema, or the text of one.
fn guided_json(fields: &Fields) -> Result<Option<Constraint>, ApiError> {
    json_schema(fields, "guided_json")
}

fn json_schema(fields: &Fields, name: &str) -> Result<Option<Constraint>, ApiError> {
    let schema = match fields.get(name) {
        None => return Ok(None),
        Some(Value::String(text)) => serde_json::from_str(text)
            .map_err(|_| fields.wrong(name, "must be a JSON schema, or its text"))?,
        Some(schema) => schema.clone(),
    };
    schema_of(schema, fields, name).map(strict).map(Some)
}

fn text(fields: &Fields, name: &str) -> Result<Option<String>, ApiError> {
    match fields.text(name)? {
        Some("") => Err(fields.wrong(name, "is empty")),
        text => Ok(text.map(str::to_owned)),
    }
}

fn choices(fields: &Fields, name: &str) -> Result<Option<Constraint>, ApiError> {
    let Some(list) = fields.list(name)? else { return Ok(None) };
    let texts: Option<Vec<_>> = list.iter().map(|text| text.as_str().map(str::to_owned)).collect();
    match texts {
        Some(texts) if !texts.is_empty() && !texts.iter().any(String::is_empty) => {
            Ok(Some(Constraint::Choice(texts)))
        }
        _ => Err(fields.wrong(name, "must be a list of texts, none of them empty")),
    }
}

/// vLLM's object of one of `json`, `regex`, `choice`, `grammar`, `json_object`; anything else is a JSON schema.
fn structured_outputs(fields: &Fields) -> Result<Option<Constraint>, ApiError> {
    const NAME: &str = "structured_outputs";
    let Some(object) = fields.object(NAME)? else { return Ok(None) };
    if !is_vllms(object) {
        return Ok(Some(strict(Value::Object(object.clone()))));
    }
    let within = Fields::inside(object, NAME);
    Ok(json_schema(&within, "json")?
        .or(text(&within, "regex")?.map(Constraint::Regex))
        .or(choices(&within, "choice")?)
        .or(text(&within, "grammar")?.map(Constraint::grammar))
        .or(within.boolean("json_object")?.filter(|on| *on).map(|_| Constraint::JsonObject)))
}

fn is_vllms(object: &Map<String, Value>) -> bool {
    let mut given = object.iter().filter(|(_, value)| !value.is_null());
    let known = |name: &str| matches!(name, "json" | "regex" | "choice" | "grammar" | "json_object");
    matches!((given.next(), given.next()), (Some((name, _)), None) if known(name))
}

/// What a model is told where a constraint is not enforced (`--grammar-fallback prompt`).
pub fn instruction(constraint: &Constraint) -> String {
    match constraint {
        Constraint::JsonObject => "Reply with one JSON object and nothing else.".to_owned(),
        Constraint::JsonSchema { schema, .. } => {
            format!("Reply with JSON that this JSON schema describes, and nothing else: {schema}")
        }
        Constraint::Regex(pattern) => {
            format!("Reply with text that this regular expression matches: {pattern}")
        }
        Constraint::Choice(choices) => {
            format!("Reply with one of these texts and nothing else: {}", choices.join(", "))
        }
        Constraint::Lark(grammar) | Constraint::Gbnf(grammar) => {
            format!("Reply with text that this grammar describes, and nothing else:\n{grammar}")
        }
        Constraint::ToolCalls(_) => "Reply with a call of one of the tools and nothing else.".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(body: Value) -> Result<Option<Constraint>, ApiError> {
        read(&Fields::new(body.as_object().unwrap()))
    }

    #[test]
    fn every_spelling_is_understood() {
        let schema = json!({"type": "null"});
        let expected = Some(strict(schema.clone()));
        assert_eq!(parse(json!({})).unwrap(), None);
        assert_eq!(parse(json!({"response_format": {"type": "text"}})).unwrap(), None);
        assert_eq!(
            parse(json!({"response_format": {"type": "json_object"}})).unwrap(),
            Some(Constraint::JsonObject)
        );
        let format =
            json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": true}});
        assert_eq!(parse(json!({"response_format": format})).unwrap(), expected);
        let flat = json!({"type": "json_schema", "name": "n", "schema": schema});
        assert_eq!(parse(json!({"response_format": flat})).unwrap(), expected);
        assert_eq!(parse(json!({"guided_json": schema})).unwrap(), expected);
        assert_eq!(parse(json!({"guided_json": schema.to_string()})).unwrap(), expected);
        assert_eq!(parse(json!({"structured_outputs": schema})).unwrap(), expected);
        assert_eq!(parse(json!({"structured_outputs": {"json": schema}})).unwrap(), expected);
        let choice = Some(Constraint::Choice(vec!["a".to_owned()]));
        assert_eq!(parse(json!({"guided_choice": ["a"]})).unwrap(), choice);
        assert_eq!(parse(json!({"structured_outputs": {"choice": ["a"]}})).unwrap(), choice);
        assert_eq!(parse(json!({"guided_regex": "a"})).unwrap(), Some(Constraint::Regex("a".to_owned())));
        let gbnf = "root ::= \"a\"";
        assert_eq!(parse(json!({"guided_grammar": gbnf})).unwrap(), Some(Constraint::Gbnf(gbnf.to_owned())));
    }

    #[test]
    fn j1_what_is_no_constraint_is_refused() {
        let message = |body: Value| parse(body).unwrap_err().message;
        assert!(message(json!({"response_format": {"type": "xml"}})).contains("must be text, json_object"));
        assert!(message(json!({"response_format": {"type": "json_schema"}})).contains("schema` is missing"));
        assert!(message(json!({"guided_json": "{"})).contains("`guided_json` must be a JSON schema"));
        assert!(message(json!({"guided_choice": []})).contains("list of texts"));
        assert_eq!(
            message(json!({"guided_regex": "a", "response_format": {"type": "json_object"}})),
            "`guided_regex` cannot be combined with `response_format`; send one of the two"
        );
    }
}
