//! What a reply must look like: `response_format`, `guided_*` and `structured_outputs`.
//!
//! Elsewhere fields that are unknown are ignored. Here they are refused: a reply that is not held to what its client
//! asked for looks as if it were.

use mlx_bun::structured::grammar::Constraint;
use serde_json::{Value, json};

use super::closed_schema::close;
use super::error::ApiError;
use super::fields::Fields;

/// What other servers call the same things.
const FOREIGN: [(&str, &str); 8] = [
    ("grammar", "guided_grammar"),
    ("json_schema", "guided_json"),
    ("regex", "guided_regex"),
    ("ebnf", "guided_grammar"),
    ("choice", "guided_choice"),
    ("guided_json_object", "response_format"),
    ("guided_whitespace_pattern", "guided_regex"),
    ("structural_tag", "structured_outputs"),
];

/// The constraint of a request.
///
/// # Errors
/// A field is wrong, or two fields ask for different things.
pub fn read(fields: &Fields) -> Result<Option<Constraint>, ApiError> {
    with(fields, "", None)
}

/// The same beside what the field `name` of a protocol asks for already.
///
/// # Errors
/// A field is wrong, or two fields ask for different things.
pub fn with(fields: &Fields, name: &str, format: Option<Constraint>) -> Result<Option<Constraint>, ApiError> {
    for (foreign, ours) in FOREIGN {
        // Some clients send all fields, and those that they do not use as empty texts.
        if fields.get(foreign).is_some_and(|value| value != "") {
            return Err(fields.wrong(foreign, format!("is not known here; use `{ours}`")));
        }
    }
    let found = [
        (name, format),
        ("response_format", response_format(fields, "response_format")?),
        ("guided_json", json_schema(fields, "guided_json")?.map(strict)),
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
    const DESCRIPTION: [&str; 5] = ["name", "description", "schema", "strict", "any_whitespace"];
    let Some(format) = fields.object(name)? else { return Ok(None) };
    let within = Fields::inside(format, name);
    let kind = within.text("type")?;
    let at = format!("{name}.json_schema");
    let described = match within.object("json_schema")?.filter(|_| kind == Some("json_schema")) {
        Some(described) => {
            within.only(&["type", "json_schema"])?;
            Fields::inside(described, &at)
        }
        None => within,
    };
    let schema = |schema: &Value| {
        described.only(&[&DESCRIPTION[..], &["type"]].concat())?;
        Ok(Some(Constraint::JsonSchema {
            schema: schema_of(schema.clone(), &described, "schema")?,
            strict: described.boolean("strict")?.unwrap_or(true),
            any_whitespace: described.boolean("any_whitespace")?.unwrap_or(true),
        }))
    };
    match (kind, described.get("schema")) {
        (Some("text"), None) => within.only(&["type"]).map(|()| None),
        (Some("text"), Some(_)) => Err(within.wrong("type", "is text, which no schema describes")),
        (Some("json_object"), None) => within.only(&["type"]).map(|()| Some(Constraint::JsonObject)),
        // An object with a schema is llama.cpp's spelling.
        (Some("json_object" | "json_schema"), Some(found)) => schema(found),
        (Some("json_schema"), None) => Err(described.wrong("schema", "is missing")),
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
fn json_schema(fields: &Fields, name: &str) -> Result<Option<Value>, ApiError> {
    let schema = match fields.get(name) {
        None => return Ok(None),
        Some(Value::String(text)) => serde_json::from_str(text)
            .map_err(|_| fields.wrong(name, "must be a JSON schema, or its text"))?,
        Some(schema) => schema.clone(),
    };
    schema_of(schema, fields, name).map(Some)
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

/// The constraints that vLLM's object may hold one of.
const KINDS: [&str; 5] = ["json", "regex", "choice", "grammar", "json_object"];
/// What else it may hold.
const OPTIONS: [&str; 3] = ["disable_fallback", "disable_any_whitespace", "disable_additional_properties"];
/// What it may hold elsewhere, and why not here.
const REFUSED: [(&str, &str); 2] = [
    ("structural_tag", "is not supported; `tool_choice` holds calls to the schemas of their tools"),
    ("whitespace_pattern", "is not supported; `disable_any_whitespace` leaves out all blanks"),
];

/// vLLM's object, or a JSON schema.
fn structured_outputs(fields: &Fields) -> Result<Option<Constraint>, ApiError> {
    const NAME: &str = "structured_outputs";
    let Some(object) = fields.object(NAME)? else { return Ok(None) };
    if object.values().all(Value::is_null) {
        return Err(fields.wrong(NAME, format!("has none of {}", KINDS.join(", "))));
    }
    let vllms = KINDS.iter().chain(&OPTIONS).chain(REFUSED.iter().map(|(name, _)| name));
    if !{ vllms }.any(|name| object.contains_key(*name)) {
        return schema_of(Value::Object(object.clone()), fields, NAME).map(strict).map(Some);
    }
    let within = Fields::inside(object, NAME);
    for (name, why) in REFUSED {
        within.refuse(name, why)?;
    }
    within.only(&[&KINDS[..], &OPTIONS[..]].concat())?;
    let json_object = within.boolean("json_object")?.unwrap_or(false);
    let found = [
        json_schema(&within, "json")?.map(strict),
        text(&within, "regex")?.map(Constraint::Regex),
        choices(&within, "choice")?,
        text(&within, "grammar")?.map(Constraint::grammar),
        json_object.then_some(Constraint::JsonObject),
    ];
    let mut given = KINDS.iter().zip(found).filter_map(|(name, constraint)| Some((name, constraint?)));
    let constraint = match (given.next(), given.next()) {
        (None, _) => return Err(fields.wrong(NAME, format!("has none of {}", KINDS.join(", ")))),
        (Some((first, _)), Some((second, _))) => {
            return Err(
                within.wrong(second, format!("cannot be combined with `{first}`; send one of the two"))
            );
        }
        (Some((_, constraint)), None) => constraint,
    };
    // Nothing falls back to another engine; what `--grammar-fallback` does is asked by `is_enforced`.
    within.boolean("disable_fallback")?;
    let compact = within.boolean("disable_any_whitespace")?.unwrap_or(false);
    let closed = within.boolean("disable_additional_properties")?.unwrap_or(false);
    match (compact, closed) {
        (false, false) => Ok(Some(constraint)),
        _ => with_options(constraint, compact, closed).map(Some).ok_or_else(|| {
            let option = if compact { OPTIONS[1] } else { OPTIONS[2] };
            within.wrong(option, "goes with `json` and `json_object` only")
        }),
    }
}

/// JSON without blanks, or without properties that no schema names; `None` for what is no JSON.
fn with_options(constraint: Constraint, compact: bool, closed: bool) -> Option<Constraint> {
    let (mut schema, strict) = match constraint {
        Constraint::JsonObject => (json!({"type": "object"}), true),
        Constraint::JsonSchema { schema, strict, .. } => (schema, strict),
        _ => return None,
    };
    if closed {
        close(&mut schema);
    }
    Some(Constraint::JsonSchema { schema, strict, any_whitespace: !compact })
}

/// Whether a request says that its constraint must not become words in the prompt.
///
/// # Errors
/// A field is wrong.
pub fn is_enforced(fields: &Fields) -> Result<bool, ApiError> {
    let Some(object) = fields.object("structured_outputs")? else { return Ok(false) };
    Ok(Fields::inside(object, "structured_outputs").boolean(OPTIONS[0])?.unwrap_or(false))
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

    #[test]
    fn vllms_object_is_taken_whole_or_refused() {
        let structured = |object: Value| parse(json!({"structured_outputs": object}));
        let nothing = json!({
            "json": null, "regex": null, "choice": ["q"], "grammar": null, "json_object": null, "structural_tag": null,
            "disable_fallback": false, "disable_any_whitespace": false, "disable_additional_properties": false,
            "whitespace_pattern": null, "_backend": null,
        });
        assert_eq!(structured(nothing).unwrap(), Some(Constraint::Choice(vec!["q".to_owned()])));
        let object =
            |compact: Value| structured(json!({"json_object": true, "disable_any_whitespace": compact}));
        assert_eq!(object(json!(false)).unwrap(), Some(Constraint::JsonObject));
        let Some(Constraint::JsonSchema { any_whitespace, .. }) = object(json!(true)).unwrap() else {
            panic!()
        };
        assert!(!any_whitespace);
        let schema = json!({"properties": {"a": {"properties": {"b": {}}}}});
        let closed = structured(json!({"json": schema.to_string(), "disable_additional_properties": true}));
        let closed_schema = json!({"additionalProperties": false, "properties": {
            "a": {"additionalProperties": false, "properties": {"b": {}}}}});
        assert_eq!(closed.unwrap(), Some(strict(closed_schema)));
        let message = |object: Value| structured(object).unwrap_err().message;
        for (object, words) in [
            (json!({"regex": "a", "zzz": 1}), "`structured_outputs.zzz` is not known"),
            (json!({"regex": "a", "_backend": "x"}), "`structured_outputs._backend` is not known"),
            (
                json!({"regex": "a", "choice": ["b"]}),
                "`structured_outputs.choice` cannot be combined with `regex`",
            ),
            (
                json!({"json": null}),
                "`structured_outputs` has none of json, regex, choice, grammar, json_object",
            ),
            (json!({"json_object": false}), "has none of"),
            (json!({}), "has none of"),
            (json!({"structural_tag": "x"}), "`structured_outputs.structural_tag` is not supported"),
            (
                json!({"json_object": true, "whitespace_pattern": " "}),
                "`structured_outputs.whitespace_pattern`",
            ),
            (json!({"regex": "a", "disable_any_whitespace": true}), "goes with `json`"),
            (json!({"regex": "a", "disable_fallback": 1}), "must be true or false"),
            (json!({"regex": ""}), "is empty"),
        ] {
            let said = message(object.clone());
            assert!(said.contains(words), "{object}: {said}");
        }
        let enforced = |object: Value| is_enforced(&Fields::new(object.as_object().unwrap())).unwrap();
        assert!(enforced(json!({"structured_outputs": {"regex": "a", "disable_fallback": true}})));
        assert!(!enforced(json!({"structured_outputs": {"regex": "a"}})));
    }

    #[test]
    fn nothing_that_restricts_is_left_out_in_silence() {
        let message = |body: Value| {
            parse(body.clone()).map_or_else(|error| error.message, |_| format!("{body} is taken"))
        };
        let schema = json!({"type": "null"});
        let format = |format: Value| json!({"response_format": format});
        // llama.cpp's spelling.
        let described = format(json!({"type": "json_object", "schema": schema}));
        assert_eq!(parse(described).unwrap(), Some(strict(schema.clone())));
        for (body, words) in [
            (format(json!({"type": "text", "schema": schema})), "no schema"),
            (
                format(json!({"type": "json_object", "json_schema": {"schema": schema}})),
                "`response_format.json_schema`",
            ),
            (
                format(json!({"type": "json_schema", "schema": schema, "pattern": "x"})),
                "`response_format.pattern`",
            ),
            (
                format(json!({"type": "json_schema", "json_schema": {"schema": schema, "regex": "x"}})),
                "`response_format.json_schema.regex`",
            ),
            (
                format(json!({"type": "json_schema", "json_schema": {"schema": schema}, "strict": false})),
                "`response_format.strict`",
            ),
            (json!({"grammar": "root ::= \"a\""}), "use `guided_grammar`"),
            (json!({"json_schema": schema}), "use `guided_json`"),
            (json!({"grammar": ""}), "is taken"),
            (json!({"guided_whitespace_pattern": " "}), "`guided_whitespace_pattern`"),
        ] {
            let said = message(body.clone());
            assert!(said.contains(words), "{body}: {said}");
        }
        let body = json!({"guided_regex": "a"});
        let error =
            with(&Fields::new(body.as_object().unwrap()), "text.format", Some(Constraint::JsonObject));
        assert_eq!(
            error.unwrap_err().message,
            "`guided_regex` cannot be combined with `text.format`; send one of the two"
        );
    }
}
