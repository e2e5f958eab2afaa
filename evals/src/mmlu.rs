//! MMLU: 57 subjects, four choices (Hendrycks et al. 2021, "Measuring Massive Multitask Language Understanding"). The
//! answer is the letter that the model finds likeliest after a few questions of the same subject.

use std::collections::BTreeMap;
use std::path::Path;

use mlx_bun::tokenizer::{Tokenizer, TokenizerError};
use serde_json::Value;

use crate::data::{DataError, read_rows};
use crate::fields;
use crate::likelihood::{Choices, Scored};
use crate::subsample::subsample;

/// Names of its file, without `.jsonl`.
pub const FILES: &[&str] = &["mmlu_test", "mmlu"];
/// Names of the file with the questions that come before.
pub const DEV_FILES: &[&str] = &["mmlu_optiq_dev", "mmlu_dev"];
/// Questions before the one that is asked, unless asked otherwise.
pub const DEFAULT_SHOTS: usize = 5;
/// Rows of a run unless asked otherwise.
pub const DEFAULT_ROWS: usize = 1000;

const LETTERS: [&str; 4] = ["A", "B", "C", "D"];

/// A question with four choices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    subject: String,
    question: String,
    choices: Vec<String>,
    answer: usize,
}

/// Reads a row: `question`, `subject`, four `choices`, `answer` from 0 to 3 or as a letter.
///
/// # Errors
/// What is wrong with it.
pub fn row(_: usize, value: &Value) -> Result<Row, String> {
    let row = fields::object(value)?;
    let choices = fields::texts(row, "choices")?;
    if choices.len() != LETTERS.len() {
        return Err(format!("`choices` has {} entries, not 4", choices.len()));
    }
    let answer = match fields::field(row, "answer")? {
        Value::Number(number) => number.as_u64().and_then(|index| usize::try_from(index).ok()),
        Value::String(letter) => LETTERS.iter().position(|known| known == letter),
        _ => None,
    };
    Ok(Row {
        subject: fields::text(row, "subject")?.to_owned(),
        question: fields::text(row, "question")?.to_owned(),
        choices,
        answer: answer.filter(|index| *index < LETTERS.len()).ok_or("`answer` is not 0 to 3 or A to D")?,
    })
}

impl Row {
    fn stem(&self) -> String {
        let choices: String = LETTERS
            .iter()
            .zip(&self.choices)
            .map(|(letter, choice)| format!("\n{letter}. {choice}"))
            .collect();
        format!("{}{choices}\nAnswer:", self.question)
    }
}

/// Which rows of an unfrozen set are taken: about as many of each subject, at least one.
pub fn by_subject(rows: &[Row], count: usize, seed: u32) -> Vec<usize> {
    let mut subjects: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (index, row) in rows.iter().enumerate() {
        subjects.entry(&row.subject).or_default().push(index);
    }
    let each = (count / subjects.len().max(1)).max(1);
    let mut chosen: Vec<usize> = subjects
        .values()
        .flat_map(|indices| {
            subsample(indices.len(), each, seed).into_iter().filter_map(|at| indices.get(at).copied())
        })
        .collect();
    chosen.sort_unstable();
    // Fewer than subjects were asked for.
    if chosen.len() > count {
        chosen = subsample(chosen.len(), count, seed)
            .into_iter()
            .filter_map(|at| chosen.get(at).copied())
            .collect();
    }
    chosen
}

/// Reads the rows of a file, and those that come before (none without `dev`), and makes questions of the `chosen` ones.
/// `bos` begins each prompt with the tokenizer's first token; the original does not.
///
/// # Errors
/// A file that cannot be read, or text that the tokenizer refuses.
pub fn load(
    file: &Path,
    dev: Option<&Path>,
    shots: usize,
    bos: bool,
    tokenizer: &Tokenizer,
    choose: impl FnOnce(&[Row]) -> Vec<usize>,
) -> Result<Result<Vec<Choices>, TokenizerError>, DataError> {
    let rows = read_rows(file, row)?;
    let dev = match dev.filter(|_| shots > 0) {
        Some(dev) => read_rows(dev, row)?,
        None => Vec::new(),
    };
    let chosen = choose(&rows);
    let questions = chosen.iter().filter_map(|index| Some((*index, rows.get(*index)?)));
    Ok(questions.map(|(index, row)| question(index, row, &dev, shots, bos, tokenizer)).collect())
}

fn prompt(row: &Row, dev: &[Row], shots: usize) -> String {
    let subject = row.subject.replace('_', " ");
    let mut text = format!("The following are multiple choice questions (with answers) about {subject}.\n\n");
    for example in dev.iter().filter(|example| example.subject == row.subject).take(shots) {
        let letter = LETTERS.get(example.answer).copied().unwrap_or_default();
        text.push_str(&format!("{} {letter}\n\n", example.stem()));
    }
    text + &row.stem()
}

fn question(
    index: usize,
    row: &Row,
    dev: &[Row],
    shots: usize,
    bos: bool,
    tokenizer: &Tokenizer,
) -> Result<Choices, TokenizerError> {
    let mut context = tokenizer.encode(&prompt(row, dev, shots), false)?;
    if let Some(bos) = tokenizer.bos_id().filter(|_| bos) {
        context.insert(0, bos);
    }
    let sequence = |letter: &&str| {
        let first = tokenizer.encode(&format!(" {letter}"), false)?.into_iter().next();
        let from = context.len();
        Ok(Scored { tokens: context.iter().copied().chain(first).collect(), from })
    };
    Ok(Choices {
        id: format!("mmlu/{index}"),
        group: Some(row.subject.clone()),
        sequences: LETTERS.iter().map(sequence).collect::<Result<_, TokenizerError>>()?,
        lengths: vec![1; LETTERS.len()],
        answer: row.answer,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn rows() -> Vec<Row> {
        let make = |subject: &str, question: &str, answer: Value| {
            row(0, &json!({"subject": subject, "question": question, "choices": ["1", "2", "3", "4"], "answer": answer}))
                .unwrap()
        };
        vec![
            make("high_school_physics", "x?", json!(1)),
            make("law", "y?", json!("D")),
            make("law", "z?", json!(0)),
        ]
    }

    #[test]
    fn the_prompt_is_that_of_the_paper() {
        let rows = rows();
        let text = prompt(&rows[1], &rows, 1);
        assert_eq!(
            text,
            "The following are multiple choice questions (with answers) about law.\n\n\
             y?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer: D\n\n\
             y?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:"
        );
        assert!(prompt(&rows[0], &[], 5).contains("about high school physics.\n\nx?"));
    }

    #[test]
    fn subjects_are_drawn_alike() {
        let rows = rows();
        assert_eq!(by_subject(&rows, 3, 42).len(), 2);
        assert_eq!(by_subject(&rows, 4, 42), [0, 1, 2]);
        assert_eq!(by_subject(&rows, 1, 42).len(), 1);
    }

    #[test]
    fn bad_rows_say_what_is_wrong() {
        let choices = ["1", "2", "3", "4"];
        let problem = |value: Value| row(0, &value).unwrap_err();
        assert_eq!(problem(json!({"choices": ["1"]})), "`choices` has 1 entries, not 4");
        let row = json!({"choices": choices, "answer": 4, "subject": "", "question": ""});
        assert_eq!(problem(row), "`answer` is not 0 to 3 or A to D");
        assert_eq!(problem(json!({"choices": choices, "answer": 1})), "the row has no `subject`");
    }
}
