//! IFEval: instructions that a program can check (Zhou et al. 2023, "Instruction-Following Evaluation for Large Language
//! Models"). A reply is right if it follows every instruction of its prompt, as it stands (strict, the headline) or after
//! a line around it or its asterisks are taken off (loose).

mod instruction;
mod language;
mod sentences;
mod words;

use std::path::Path;

use serde_json::{Map, Value};

pub use instruction::Instruction;

use crate::data::{DataError, read_rows};
use crate::fields;
use crate::prompt::{Prompt, without_thinking};
use crate::runner::{Question, Task, Verdict};

/// Names of its file, without `.jsonl`.
pub const FILES: &[&str] = &["ifeval", "input_data"];
/// Most tokens of a reply unless asked otherwise.
pub const MAX_TOKENS: usize = 1280;

/// A prompt and what its reply has to look like.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    key: String,
    prompt: String,
    ids: Vec<String>,
    instructions: Vec<Instruction>,
}

/// Reads a row of Google's layout: `key`, `prompt`, `instruction_id_list`, `kwargs` (one object an instruction).
///
/// # Errors
/// What is wrong with it.
pub fn row(index: usize, value: &Value) -> Result<Row, String> {
    let row = fields::object(value)?;
    let ids = fields::texts(row, "instruction_id_list")?;
    let arguments = fields::list(row, "kwargs")?;
    if ids.is_empty() || ids.len() != arguments.len() {
        return Err(format!("`kwargs` has {} entries, `instruction_id_list` {}", arguments.len(), ids.len()));
    }
    let instructions = ids.iter().zip(arguments).map(|(id, arguments)| Instruction::read(id, arguments));
    Ok(Row {
        key: fields::id(row, &["key"], index),
        prompt: fields::text(row, "prompt")?.to_owned(),
        instructions: instructions.collect::<Result<_, _>>()?,
        ids,
    })
}

/// Which instructions a reply follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Followed {
    /// As it stands, one an instruction.
    pub strict: Vec<bool>,
    /// In one of its variants.
    pub loose: Vec<bool>,
}

impl Row {
    /// Which instructions a reply follows; an empty one follows none.
    pub fn judge(&self, reply: &str) -> Followed {
        let reply = without_thinking(reply).trim();
        let variants = variants(reply);
        let follows = |instruction: &Instruction, reply: &str| {
            !reply.trim().is_empty() && instruction.is_followed(reply)
        };
        let loosely = |instruction: &Instruction| variants.iter().any(|reply| follows(instruction, reply));
        Followed {
            strict: self.instructions.iter().map(|instruction| follows(instruction, reply)).collect(),
            loose: self.instructions.iter().map(loosely).collect(),
        }
    }
}

/// The reply; without its first line, its last, both; each of these also without asterisks.
fn variants(reply: &str) -> Vec<String> {
    let lines: Vec<&str> = reply.split('\n').collect();
    let part = |from: usize, to: usize| {
        lines.get(from..to.max(from)).unwrap_or_default().join("\n").trim().to_owned()
    };
    let count = lines.len();
    let cut = [reply.to_owned(), part(1, count), part(0, count - 1), part(1, count - 1)];
    let plain = cut.iter().map(|reply| reply.replace('*', "")).collect::<Vec<_>>();
    cut.into_iter().chain(plain).collect()
}

/// The task over some rows.
pub struct IfEval {
    rows: Vec<Row>,
    questions: Vec<Question>,
}

impl IfEval {
    /// Reads `file`.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn load(file: &Path, choose: impl FnOnce(usize) -> Vec<usize>) -> Result<Self, DataError> {
        let rows = read_rows(file, row)?;
        let chosen = choose(rows.len());
        let rows: Vec<Row> = chosen.iter().filter_map(|index| rows.get(*index).cloned()).collect();
        let question = |row: &Row| Question {
            id: row.key.clone(),
            prompt: Prompt::chat(row.prompt.clone()),
            group: None,
        };
        Ok(Self { questions: rows.iter().map(question).collect(), rows })
    }
}

impl Task for IfEval {
    fn name(&self) -> &'static str {
        "ifeval"
    }

    fn questions(&self) -> &[Question] {
        &self.questions
    }

    fn judge(&self, index: usize, reply: &str) -> Verdict {
        let Some(row) = self.rows.get(index) else {
            return Verdict { correct: false, answer: Value::Null, detail: Map::new() };
        };
        let followed = row.judge(reply);
        let all = |followed: &[bool]| followed.iter().all(|followed| *followed);
        let missed = row.ids.iter().zip(&followed.strict).filter(|(_, followed)| !**followed);
        Verdict {
            correct: all(&followed.strict),
            answer: Value::from(followed.strict.clone()),
            detail: Map::from_iter([
                ("correct_loose".to_owned(), Value::from(all(&followed.loose))),
                ("not_followed".to_owned(), missed.map(|(id, _)| Value::from(id.as_str())).collect()),
            ]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_line_around_the_reply_is_forgiven_loosely() {
        let row =
            row(0, &json!({"prompt": "p", "instruction_id_list": ["startend:quotation"], "kwargs": [{}]}))
                .unwrap();
        let verdict = |reply: &str| {
            let followed = row.judge(reply);
            (followed.strict[0], followed.loose[0])
        };
        assert_eq!(verdict("\"a\""), (true, true));
        assert_eq!(verdict("Sure:\n\"a\""), (false, true));
        assert_eq!(verdict("**\"a\"**"), (false, true));
        assert_eq!(verdict("a"), (false, false));
        assert_eq!(verdict("  "), (false, false));
        assert_eq!(verdict("<think>x</think>\"a\""), (true, true));
    }

    #[test]
    fn bad_rows_say_what_is_wrong() {
        let problem = |ids: Value, kwargs: Value| {
            row(0, &json!({"prompt": "p", "instruction_id_list": ids, "kwargs": kwargs})).unwrap_err()
        };
        assert_eq!(problem(json!(["a:b"]), json!([])), "`kwargs` has 0 entries, `instruction_id_list` 1");
        assert_eq!(problem(json!(["a:b"]), json!([{}])), "there is no instruction `a:b`");
        assert_eq!(
            problem(json!(["length_constraints:number_words"]), json!([{"relation": "at least"}])),
            "`length_constraints:number_words` needs a number `num_words`"
        );
        assert_eq!(
            problem(
                json!(["length_constraints:number_words"]),
                json!([{"num_words": 3, "relation": "around"}])
            ),
            "`length_constraints:number_words`: `relation` is neither `at least` nor `less than`"
        );
    }
}
