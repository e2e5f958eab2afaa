//! HashHop: following chains of assignments through a long text (Magic 2024). The text is made here, from a seed.

use serde_json::{Map, Value};

use crate::data::{DataError, read_rows};
use crate::fields;
use crate::prompt::{Prompt, without_thinking};
use crate::runner::{Question, Task, Verdict};
use crate::subsample::Mulberry32;

/// Most hops of a chain.
const MOST_HOPS: usize = 4;
/// Questions of each number of hops.
const EACH: usize = 25;
/// Characters of the text, about.
const LENGTH: usize = 12_000;
/// Letters of a hash.
const LETTERS: usize = 16;
/// Most tokens of a reply unless asked otherwise.
pub const MAX_TOKENS: usize = 32;

/// A question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    prompt: String,
    answer: String,
    hops: usize,
}

/// Reads a row of a frozen set: `prompt`, `answer`, `hops`.
///
/// # Errors
/// What is wrong with it.
pub fn row(_: usize, value: &Value) -> Result<Row, String> {
    let row = fields::object(value)?;
    let hops = fields::field(row, "hops")?.as_u64().and_then(|hops| usize::try_from(hops).ok());
    Ok(Row {
        prompt: fields::text(row, "prompt")?.to_owned(),
        answer: fields::text(row, "answer")?.to_owned(),
        hops: hops.ok_or("`hops` is not a number")?,
    })
}

/// The task over some rows.
pub struct HashHop {
    rows: Vec<Row>,
    questions: Vec<Question>,
}

impl HashHop {
    /// 25 questions for each number of hops from 1 to 4, by `seed`.
    pub fn generated(seed: u32, choose: impl FnOnce(usize) -> Vec<usize>) -> Self {
        Self::of(generate(seed), choose)
    }

    /// The rows of a frozen set.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn load(file: &std::path::Path, choose: impl FnOnce(usize) -> Vec<usize>) -> Result<Self, DataError> {
        Ok(Self::of(read_rows(file, row)?, choose))
    }

    fn of(rows: Vec<Row>, choose: impl FnOnce(usize) -> Vec<usize>) -> Self {
        let chosen = choose(rows.len());
        let question = |index: &usize| {
            let row = rows.get(*index)?;
            Some(Question {
                id: format!("hashhop/{index}"),
                prompt: Prompt::chat(row.prompt.clone()),
                group: Some(format!("{} hops", row.hops)),
            })
        };
        let questions = chosen.iter().filter_map(question).collect();
        Self { rows: chosen.iter().filter_map(|index| rows.get(*index).cloned()).collect(), questions }
    }
}

impl Task for HashHop {
    fn name(&self) -> &'static str {
        "hashhop"
    }

    fn questions(&self) -> &[Question] {
        &self.questions
    }

    fn judge(&self, index: usize, reply: &str) -> Verdict {
        let expected = self.rows.get(index).map_or("", |row| row.answer.as_str());
        let answer = extract(without_thinking(reply));
        Verdict {
            correct: answer == Some(expected),
            answer: answer.map_or(Value::Null, Value::from),
            detail: Map::from_iter([("expected".to_owned(), Value::from(expected))]),
        }
    }
}

/// The first run of exactly 16 letters.
fn extract(reply: &str) -> Option<&str> {
    reply.split(|c: char| !c.is_ascii_alphabetic()).find(|word| word.len() == LETTERS)
}

fn hash(random: &mut Mulberry32) -> String {
    const ALPHABET: &[u8; 52] = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    (0..LETTERS).filter_map(|_| ALPHABET.get(random.below(52)).map(|letter| char::from(*letter))).collect()
}

fn generate(seed: u32) -> Vec<Row> {
    let mut random = Mulberry32::new(seed);
    (1..=MOST_HOPS)
        .flat_map(|hops| std::iter::repeat_n(hops, EACH))
        .map(|hops| one(hops, &mut random))
        .collect()
}

/// One question. The first hash leads over `hops` assignments to a quoted one.
fn one(hops: usize, random: &mut Mulberry32) -> Row {
    let chain: Vec<String> = (0..=hops).map(|_| hash(random)).collect();
    let mut lines: Vec<String> = chain
        .windows(2)
        .enumerate()
        .filter_map(|(at, pair)| match pair {
            [from, to] if at + 1 == hops => Some(format!("{from} = '{to}'")),
            [from, to] => Some(format!("{from} = {to}")),
            _ => None,
        })
        .collect();
    let mut length: usize = lines.iter().map(|line| line.len() + 1).sum();
    while length < LENGTH {
        let (from, to) = (hash(random), hash(random));
        let line =
            if random.next_f64() < 0.5 { format!("{from} = '{to}'") } else { format!("{from} = {to}") };
        length += line.len() + 1;
        lines.push(line);
    }
    random.shuffle(&mut lines);
    let (start, answer) =
        (chain.first().cloned().unwrap_or_default(), chain.last().cloned().unwrap_or_default());
    let prompt = format!(
        "Below are assignments, one a line. A name is assigned another name, or a quoted value.\n\n{}\n\nFollow the \
         assignments from {start} until you reach a quoted value. Reply with that value only, without quotes.",
        lines.join("\n")
    );
    Row { prompt, answer, hops }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn the_answer_is_at_the_end_of_the_chain() {
        let rows = generate(42);
        assert_eq!(rows.len(), 100);
        assert_eq!(rows, generate(42));
        assert_ne!(rows, generate(43));
        for row in rows {
            let assignments: HashMap<&str, &str> =
                row.prompt.lines().filter_map(|line| line.split_once(" = ")).collect();
            let start = row.prompt.rsplit_once("from ").unwrap().1.split(' ').next().unwrap();
            let (mut at, mut hops) = (start, 0);
            while let Some(next) = assignments.get(at) {
                (at, hops) = (next, hops + 1);
            }
            assert_eq!((at, hops), (format!("'{}'", row.answer).as_str(), row.hops));
            assert!((12_000..12_400).contains(&row.prompt.len()), "{}", row.prompt.len());
        }
    }

    #[test]
    fn the_first_hash_of_a_reply_counts() {
        assert_eq!(extract("It is 'abcdefghijklmnop'."), Some("abcdefghijklmnop"));
        assert_eq!(extract("abcdefghijklmnopq ABCDEFGHIJKLMNOP"), Some("ABCDEFGHIJKLMNOP"));
        assert_eq!(extract("none"), None);
    }
}
