//! Multiple choice over a user's own rows: the likeliest choice after the context is the answer, by its log-probability
//! (`acc`) and by that a character (`acc_norm`), as EleutherAI's lm-evaluation-harness has them.
//!
//! A row is a JSON object:
//!
//! | field | what it is |
//! | --- | --- |
//! | `context` (or `question`) | the text that comes before |
//! | `choices` | two texts or more; a space is put before each that does not begin with one |
//! | `answer` | the right one: its index from 0, its letter, or its text |
//! | `id`, `group` | optional: what the row is called, and the part of the task it belongs to |

use std::path::Path;

use mlx_bun::tokenizer::{Tokenizer, TokenizerError};
use serde_json::Value;

use crate::data::{DataError, read_rows};
use crate::fields;
use crate::likelihood::{Choices, Scored};

/// Most choices of a row.
const MOST_CHOICES: usize = 26;

/// A question of the user's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    id: String,
    group: Option<String>,
    context: String,
    choices: Vec<String>,
    answer: usize,
}

/// Reads a row.
///
/// # Errors
/// What is wrong with it.
pub fn row(index: usize, value: &Value) -> Result<Row, String> {
    let row = fields::object(value)?;
    let context = match (row.get("context"), row.get("question")) {
        (Some(_), _) => fields::text(row, "context")?,
        (None, Some(_)) => fields::text(row, "question")?,
        (None, None) => return Err("the row has neither `context` nor `question`".to_owned()),
    };
    let choices = fields::texts(row, "choices")?;
    if !(2..=MOST_CHOICES).contains(&choices.len()) {
        return Err(format!("`choices` has {} entries, not 2 to {MOST_CHOICES}", choices.len()));
    }
    if choices.iter().any(String::is_empty) {
        return Err("`choices` has an empty entry".to_owned());
    }
    let answer = match fields::field(row, "answer")? {
        Value::Number(number) => number.as_u64().and_then(|index| usize::try_from(index).ok()),
        // A choice may itself be a letter; its text says more than its place.
        Value::String(text) => choices.iter().position(|choice| choice == text).or_else(|| letter(text)),
        _ => None,
    };
    let answer = answer
        .filter(|answer| *answer < choices.len())
        .ok_or("`answer` is no index, letter or text of the choices")?;
    let group = row.get("group").and_then(Value::as_str).map(str::to_owned);
    Ok(Row { id: fields::id(row, &["id"], index), group, context: context.to_owned(), choices, answer })
}

/// The place of a capital letter.
fn letter(text: &str) -> Option<usize> {
    match text.as_bytes() {
        [letter @ b'A'..=b'Z'] => Some(usize::from(letter - b'A')),
        _ => None,
    }
}

/// Reads a file and makes questions of the `chosen` rows. `bos` is whether sequences begin with the tokenizer's first
/// token; `None` leaves that to the tokenizer.
///
/// # Errors
/// A file that cannot be read, or text that the tokenizer refuses.
pub fn load(
    file: &Path,
    bos: Option<bool>,
    tokenizer: &Tokenizer,
    choose: impl FnOnce(usize) -> Vec<usize>,
) -> Result<Result<Vec<Choices>, TokenizerError>, DataError> {
    let rows = read_rows(file, row)?;
    let chosen = choose(rows.len());
    Ok(chosen.iter().filter_map(|index| rows.get(*index)).map(|row| question(row, bos, tokenizer)).collect())
}

fn question(row: &Row, bos: Option<bool>, tokenizer: &Tokenizer) -> Result<Choices, TokenizerError> {
    // Blanks at the end belong to the words that follow, as the tokenizer sees it.
    let context = row.context.trim_end();
    let trailing = row.context.get(context.len()..).unwrap_or_default();
    let encode = |text: &str| encode(text, bos, tokenizer);
    let before = encode(context)?;
    let sequence = |choice: &String| {
        let gap =
            if trailing.is_empty() && !choice.starts_with(char::is_whitespace) { " " } else { trailing };
        let tokens = encode(&format!("{context}{gap}{choice}"))?;
        // The first token can only be predicted after another one.
        let from = before.len().clamp(1, tokens.len().max(1));
        Ok(Scored { tokens, from })
    };
    Ok(Choices {
        id: row.id.clone(),
        group: row.group.clone(),
        sequences: row.choices.iter().map(sequence).collect::<Result<_, TokenizerError>>()?,
        lengths: row.choices.iter().map(|choice| choice.chars().count()).collect(),
        answer: row.answer,
    })
}

/// Tokens of a text with the beginning that is asked for.
fn encode(text: &str, bos: Option<bool>, tokenizer: &Tokenizer) -> Result<Vec<u32>, TokenizerError> {
    let Some(bos) = bos else { return tokenizer.encode_prompt(text) };
    let mut tokens = tokenizer.encode(text, false)?;
    if let Some(id) = tokenizer.bos_id().filter(|_| bos) {
        tokens.insert(0, id);
    }
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn answers_are_indices_texts_or_letters() {
        let answer = |answer: Value| {
            row(7, &json!({"context": "c", "choices": ["x", "B", "z"], "answer": answer}))
                .map(|row| row.answer)
        };
        assert_eq!(answer(json!(2)), Ok(2));
        assert_eq!(answer(json!("z")), Ok(2));
        assert_eq!(answer(json!("C")), Ok(2));
        assert_eq!(answer(json!("B")), Ok(1));
        let problem = "`answer` is no index, letter or text of the choices";
        for wrong in [json!(3), json!(-1), json!("D"), json!("q"), json!(null), json!(1.5)] {
            assert_eq!(answer(wrong.clone()), Err(problem.to_owned()), "{wrong}");
        }
    }

    #[test]
    fn bad_rows_say_what_is_wrong() {
        let problem = |value: Value| row(0, &value).unwrap_err();
        assert_eq!(problem(json!([])), "the row is not an object");
        assert_eq!(problem(json!({})), "the row has neither `context` nor `question`");
        assert_eq!(problem(json!({"context": "", "choices": ["a"]})), "`choices` has 1 entries, not 2 to 26");
        assert_eq!(
            problem(json!({"context": "", "choices": ["a", 1]})),
            "`choices` is not a list of strings"
        );
    }
}
