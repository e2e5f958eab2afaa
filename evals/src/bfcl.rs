//! BFCL, single calls: a function has to be called with the right arguments (Patil et al. 2025, "The Berkeley Function
//! Calling Leaderboard"). Verdicts are those of its `ast_checker` for Python; beside them stands a lenient one that
//! forgives types and arguments that were not asked for.

mod compare;
mod extract;

use std::path::Path;
use std::sync::Arc;

use mlx_bun::structured::ReplyFormat;
use mlx_bun::structured::tools::ToolSchemas;
use mlx_bun::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

pub use compare::{Call, Strict, lenient, strict};
pub use extract::calls;

use crate::data::{DataError, read_rows};
use crate::fields;
use crate::prompt::{Prompt, without_thinking};
use crate::runner::{Question, Task, Verdict};

/// Names of its file, without `.jsonl`.
pub const FILES: &[&str] = &["bfcl"];
/// Rows of a run unless asked otherwise.
pub const DEFAULT_ROWS: usize = 200;
/// Most tokens of a reply unless asked otherwise.
pub const MAX_TOKENS: usize = 512;

/// A call to make.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    id: String,
    question: String,
    functions: Vec<Value>,
    name: String,
    /// Accepted values of each argument; an empty text among them: it may be left out.
    arguments: Map<String, Value>,
}

/// Reads a row: `question` (a text, or BFCL's lists of messages), `function` (descriptions in BFCL's form), and
/// `ground_truth` (`[{name: {argument: [accepted values]}}]`).
///
/// # Errors
/// What is wrong with it.
pub fn row(index: usize, value: &Value) -> Result<Row, String> {
    let row = fields::object(value)?;
    let question = user_text(fields::field(row, "question")?).ok_or("`question` holds no text of a user")?;
    let functions = fields::list(row, "function")?.to_vec();
    for function in &functions {
        if function.get("name").and_then(Value::as_str).is_none() {
            return Err("an entry of `function` has no `name`".to_owned());
        }
        if !function
            .get("parameters")
            .and_then(|schema| schema.get("properties"))
            .is_some_and(Value::is_object)
        {
            return Err("an entry of `function` has no `parameters` with `properties`".to_owned());
        }
    }
    let [call] = fields::list(row, "ground_truth")? else {
        return Err("`ground_truth` is not one call; only single calls are scored".to_owned());
    };
    let call = call.as_object().and_then(|call| call.iter().next()).filter(|(_, values)| values.is_object());
    let Some((name, Value::Object(arguments))) = call else {
        return Err("`ground_truth` is not [{name: {argument: [values]}}]".to_owned());
    };
    if !arguments.values().all(Value::is_array) {
        return Err("an argument of `ground_truth` has no list of accepted values".to_owned());
    }
    if !functions.iter().any(|function| function.get("name") == Some(&Value::from(name.as_str()))) {
        return Err(format!("`function` does not describe `{name}`"));
    }
    Ok(Row {
        id: fields::id(row, &["id"], index),
        question,
        functions,
        name: name.clone(),
        arguments: arguments.clone(),
    })
}

/// The last thing a user says in BFCL's turns of messages.
fn user_text(question: &Value) -> Option<String> {
    match question {
        Value::String(text) => Some(text.clone()),
        Value::Array(items) => items.iter().rev().find_map(user_text),
        Value::Object(message) if message.get("role").is_none_or(|role| role == "user") => {
            message.get("content").and_then(Value::as_str).map(str::to_owned)
        }
        _ => None,
    }
}

impl Row {
    fn schema(&self) -> Option<&Value> {
        self.functions.iter().find(|function| function["name"] == self.name.as_str())
    }

    /// The verdict on the calls of a reply.
    pub fn judge(&self, calls: &[Call]) -> Strict {
        match self.schema() {
            Some(function) => strict(function, &self.name, &self.arguments, calls),
            None => Strict::NoCall,
        }
    }
}

/// A function's description in OpenAI's form: BFCL has Python's names of types.
fn tool(function: &Value) -> Value {
    fn json_schema(value: &Value) -> Value {
        match value {
            Value::Object(fields) => {
                let convert = |(name, value): (&String, &Value)| {
                    let value = match (name.as_str(), value.as_str()) {
                        ("type", Some("dict")) => json!("object"),
                        ("type", Some("float")) => json!("number"),
                        ("type", Some("tuple")) => json!("array"),
                        ("type", Some("any")) => json!("string"),
                        _ => json_schema(value),
                    };
                    (name.clone(), value)
                };
                Value::Object(fields.iter().map(convert).collect())
            }
            Value::Array(items) => Value::Array(items.iter().map(json_schema).collect()),
            other => other.clone(),
        }
    }
    let mut function = function.clone();
    if let Some(parameters) = function.get_mut("parameters") {
        *parameters = json_schema(parameters);
    }
    json!({"type": "function", "function": function})
}

/// The task over some rows.
pub struct Bfcl {
    rows: Vec<Row>,
    questions: Vec<Question>,
    reply: Option<(ReplyFormat, Arc<Tokenizer>)>,
}

impl Bfcl {
    /// Reads `file`. `reply` is the model's own syntax of calls, if its template offers functions; otherwise they are
    /// described in the question.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn load(
        file: &Path,
        reply: Option<(ReplyFormat, Arc<Tokenizer>)>,
        choose: impl FnOnce(usize) -> Vec<usize>,
    ) -> Result<Self, DataError> {
        let rows = read_rows(file, row)?;
        let chosen = choose(rows.len());
        let rows: Vec<Row> = chosen.iter().filter_map(|index| rows.get(*index).cloned()).collect();
        let question = |row: &Row| {
            let tools: Vec<Value> = row.functions.iter().map(tool).collect();
            let prompt = match reply {
                Some(_) => Prompt::Chat { user: row.question.clone(), tools },
                None => Prompt::chat(textual(&row.question, &tools)),
            };
            Question { id: row.id.clone(), prompt, group: None }
        };
        Ok(Self { questions: rows.iter().map(question).collect(), rows, reply })
    }

    /// The calls of a reply: by the model's own syntax, else by any that is known.
    fn calls(&self, row: &Row, reply: &str) -> Vec<Call> {
        if let Some((format, tokenizer)) = &self.reply {
            let tools: Vec<Value> = row.functions.iter().map(tool).collect();
            let parsed = format.parser(tokenizer, &[], ToolSchemas::from_openai(&tools)).parse(reply);
            if !parsed.tool_calls.is_empty() {
                let call = |call: mlx_bun::structured::tools::ToolCall| Call {
                    name: call.name,
                    arguments: call.arguments,
                };
                return parsed.tool_calls.into_iter().map(call).collect();
            }
        }
        calls(without_thinking(reply))
    }
}

/// The question for models whose template knows no functions.
fn textual(question: &str, tools: &[Value]) -> String {
    let functions: Vec<String> = tools.iter().map(|tool| tool["function"].to_string()).collect();
    format!(
        "You can call one of these functions, described as JSON:\n{}\n\nCall the function that answers the question. \
         Reply with the call only, as JSON: {{\"name\": \"...\", \"arguments\": {{...}}}}\n\nQuestion: {question}",
        functions.join("\n")
    )
}

impl Task for Bfcl {
    fn name(&self) -> &'static str {
        "bfcl"
    }

    fn questions(&self) -> &[Question] {
        &self.questions
    }

    fn judge(&self, index: usize, reply: &str) -> Verdict {
        let Some(row) = self.rows.get(index) else {
            return Verdict { correct: false, answer: Value::Null, detail: Map::new() };
        };
        let calls = self.calls(row, reply);
        let verdict = row.judge(&calls);
        let shown =
            calls.iter().map(|call| json!({"name": call.name, "arguments": call.arguments})).collect();
        Verdict {
            correct: verdict == Strict::Right,
            answer: if calls.is_empty() { Value::Null } else { Value::Array(shown) },
            detail: Map::from_iter([
                ("result".to_owned(), Value::from(verdict.name())),
                ("correct_lenient".to_owned(), Value::from(lenient(&row.name, &row.arguments, &calls))),
            ]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Value {
        json!({
            "id": "simple_0",
            "question": [[{"role": "system", "content": "s"}, {"role": "user", "content": "Area?"}]],
            "function": [{"name": "area", "description": "d", "parameters": {
                "type": "dict",
                "properties": {"base": {"type": "integer"}, "points": {"type": "array", "items": {"type": "float"}}},
                "required": ["base"],
            }}],
            "ground_truth": [{"area": {"base": [10], "points": ["", [1.0]]}}],
        })
    }

    #[test]
    fn functions_are_offered_in_json_schema() {
        let offered = tool(&example()["function"][0]);
        assert_eq!(offered["function"]["parameters"]["type"], "object");
        assert_eq!(offered["function"]["parameters"]["properties"]["points"]["items"]["type"], "number");
        assert_eq!(row(0, &example()).unwrap().question, "Area?");
    }

    #[test]
    fn bad_rows_say_what_is_wrong() {
        let problem = |change: &dyn Fn(&mut Value)| {
            let mut value = example();
            change(&mut value);
            row(0, &value).unwrap_err()
        };
        assert_eq!(
            problem(&|row| row["ground_truth"] = json!([{}, {}])),
            "`ground_truth` is not one call; only single calls are scored"
        );
        assert_eq!(
            problem(&|row| row["ground_truth"] = json!([{"b": {}}])),
            "`function` does not describe `b`"
        );
        assert_eq!(
            problem(&|row| row["ground_truth"][0]["area"]["base"] = json!(3)),
            "an argument of `ground_truth` has no list of accepted values"
        );
        assert_eq!(problem(&|row| row["question"] = json!([])), "`question` holds no text of a user");
    }
}
