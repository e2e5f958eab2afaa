//! HumanEval: functions that have to pass tests (Chen et al. 2021, "Evaluating Large Language Models Trained on Code").

use std::path::Path;
use std::sync::LazyLock;

use regex::Regex;
use serde_json::{Map, Value};

use crate::data::{DataError, read_rows};
use crate::fields;
use crate::prompt::{Prompt, without_thinking};
use crate::runner::{Question, Task, Verdict};
use crate::sandbox::{Outcome, Sandbox};

/// Names of its file, without `.jsonl`.
pub const FILES: &[&str] = &["humaneval", "HumanEval"];
/// Most tokens of a reply unless asked otherwise.
pub const MAX_TOKENS: usize = 512;

/// What ends code that is not in a fence.
const ENDS: [&str; 6] = ["\nclass ", "\ndef ", "\n#", "\nif __name__", "\nprint(", "\n```"];

/// A function to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// What the set calls it.
    pub task_id: String,
    /// The function's head with its docstring, and what it needs.
    pub prompt: String,
    /// The function's name.
    pub entry_point: String,
    /// Defines `check(candidate)`.
    pub test: String,
}

/// Reads a row of OpenAI's layout: `task_id`, `prompt`, `entry_point`, `test`.
///
/// # Errors
/// What is wrong with it.
pub fn row(index: usize, value: &Value) -> Result<Row, String> {
    let row = fields::object(value)?;
    let entry_point = fields::text(row, "entry_point")?;
    if entry_point.is_empty() || !entry_point.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
        return Err("`entry_point` is no name of a function".to_owned());
    }
    Ok(Row {
        task_id: fields::id(row, &["task_id"], index),
        prompt: fields::text(row, "prompt")?.to_owned(),
        entry_point: entry_point.to_owned(),
        test: fields::text(row, "test")?.to_owned(),
    })
}

impl Row {
    /// The program that decides: the prompt, the completion, the tests.
    pub fn program(&self, completion: &str) -> String {
        format!("{}{completion}\n{}\ncheck({})", self.prompt, self.test, self.entry_point)
    }
}

/// The task over some rows.
pub struct HumanEval {
    rows: Vec<Row>,
    questions: Vec<Question>,
    sandbox: Sandbox,
}

impl HumanEval {
    /// Reads `file`; programs run in `sandbox`.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn load(
        file: &Path,
        sandbox: Sandbox,
        choose: impl FnOnce(usize) -> Vec<usize>,
    ) -> Result<Self, DataError> {
        let rows = read_rows(file, row)?;
        let chosen = choose(rows.len());
        let rows: Vec<Row> = chosen.iter().filter_map(|index| rows.get(*index).cloned()).collect();
        let question = |row: &Row| Question {
            id: row.task_id.clone(),
            prompt: Prompt::chat(format!(
                "Complete this Python function. Reply with the whole function, its imports included, in one \
                 ```python code block, and nothing else.\n\n```python\n{}\n```",
                row.prompt.trim_end()
            )),
            group: None,
        };
        Ok(Self { questions: rows.iter().map(question).collect(), rows, sandbox })
    }
}

impl Task for HumanEval {
    fn name(&self) -> &'static str {
        "humaneval"
    }

    fn questions(&self) -> &[Question] {
        &self.questions
    }

    fn judge(&self, index: usize, reply: &str) -> Verdict {
        let Some(row) = self.rows.get(index) else {
            return Verdict { correct: false, answer: Value::Null, detail: Map::new() };
        };
        let completion = extract(without_thinking(reply), &row.entry_point);
        let result = match self.sandbox.run(&row.program(&completion)) {
            Ok(Outcome::Passed) => "passed".to_owned(),
            Ok(Outcome::TimedOut) => "timed out".to_owned(),
            Ok(Outcome::Failed(why)) => format!("failed: {why}"),
            Err(error) => format!("not run: {error}"),
        };
        Verdict {
            correct: result == "passed",
            answer: Value::from(completion),
            detail: Map::from_iter([("result".to_owned(), Value::from(result))]),
        }
    }
}

#[allow(clippy::unwrap_used)] // constants
static FENCE: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"(?m)^[ \t]*```[^\n`]*\n((?s:.*?))(?:^[ \t]*```|\z)").unwrap());

/// What follows the prompt, out of a reply: the last block in a fence, else the text up to what cannot belong to a
/// function's body. A block that defines the function stands for itself: the prompt, whose head and docstring are a
/// whole function, comes before it and is replaced.
pub fn extract(reply: &str, entry_point: &str) -> String {
    let defines = |code: &str| find_definition(code, entry_point);
    let block = FENCE.captures_iter(reply).last().and_then(|found| found.get(1)).map(|found| found.as_str());
    if let Some(block) = block {
        return match defines(block) {
            Some(_) => format!("\n{}", block.trim_end()),
            None => indented(block),
        };
    }
    match defines(reply) {
        // Words before the function are no code; decorators and imports directly above it would be lost with them,
        // which no prompt of the set asks for.
        Some(start) => {
            let (_, code) = reply.split_at_checked(start).unwrap_or(("", reply));
            let head = code.find('\n').map_or(code.len(), |end| end + 1);
            let (head, rest) = code.split_at_checked(head.saturating_sub(1)).unwrap_or((code, ""));
            format!("\n{head}{}", cut(rest))
        }
        None => indented(cut(reply)),
    }
}

/// Where a line begins that defines the function.
fn find_definition(code: &str, entry_point: &str) -> Option<usize> {
    let mut at = 0;
    for line in code.split_inclusive('\n') {
        let rest = line.strip_prefix("async ").unwrap_or(line);
        let name =
            rest.strip_prefix("def ").map(str::trim_start).and_then(|rest| rest.strip_prefix(entry_point));
        if name.is_some_and(|after| after.trim_start().starts_with('(')) {
            return Some(at);
        }
        at += line.len();
    }
    None
}

/// The text before the first thing that ends a body.
fn cut(text: &str) -> &str {
    let end = ENDS.iter().filter_map(|end| text.find(end)).min().unwrap_or(text.len());
    text.get(..end).unwrap_or(text)
}

/// A body, four blanks in if it is not indented.
fn indented(body: &str) -> String {
    let first = body.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
    if first.starts_with([' ', '\t']) {
        return body.trim_end().to_owned();
    }
    let line = |line: &str| if line.trim().is_empty() { line.to_owned() } else { format!("    {line}") };
    body.trim_end().lines().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_last_fence_counts() {
        let reply = "First:\n```python\nx = 1\n```\nBetter:\n```python\nimport os\n\ndef f(a):\n    return a\n```\nDone";
        assert_eq!(extract(reply, "f"), "\nimport os\n\ndef f(a):\n    return a");
        assert_eq!(extract("```\ndef f(a):\n    return a", "f"), "\ndef f(a):\n    return a");
    }

    #[test]
    fn a_body_alone_follows_the_prompt() {
        assert_eq!(extract("```python\nreturn a\n```", "f"), "    return a");
        assert_eq!(extract("    return a\n\ndef g(): pass", "f"), "    return a");
        assert_eq!(extract("    x = 1\n    return x\n# next", "f"), "    x = 1\n    return x");
    }

    #[test]
    fn a_function_without_a_fence_is_found() {
        let reply = "Sure!\ndef f(a):\n    return a\n\nprint(f(1))";
        assert_eq!(extract(reply, "f"), "\ndef f(a):\n    return a\n");
        assert_eq!(find_definition("def ff(): pass\ndef f (): pass", "f"), Some(15));
    }

    #[test]
    fn the_program_is_that_of_the_paper() {
        let row = Row {
            task_id: "t".to_owned(),
            prompt: "def f(a):\n    \"\"\"x\"\"\"\n".to_owned(),
            entry_point: "f".to_owned(),
            test: "def check(c):\n    assert c(1) == 1".to_owned(),
        };
        assert_eq!(
            row.program("    return a"),
            "def f(a):\n    \"\"\"x\"\"\"\n    return a\ndef check(c):\n    assert c(1) == 1\ncheck(f)"
        );
    }

    #[test]
    fn bad_rows_say_what_is_wrong() {
        let value = serde_json::json!({"entry_point": "f; import os", "prompt": "", "test": ""});
        assert_eq!(row(0, &value).unwrap_err(), "`entry_point` is no name of a function");
    }

    proptest! {
        #[test]
        fn any_reply_is_read(reply in "(?s)(```(python)?\n|def f\\(|\n|[ a-z#]{0,8}){0,12}", name in "[a-f]{1,2}") {
            let _ = extract(&reply, &name);
        }
    }
}
