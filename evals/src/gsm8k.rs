//! GSM8K: grade school mathematics, the last number counts (Cobbe et al. 2021, "Training Verifiers to Solve Math Word
//! Problems").

use std::path::Path;
use std::sync::LazyLock;

use regex::Regex;
use serde_json::{Map, Value};

use crate::data::{DataError, read_rows};
use crate::fields;
use crate::prompt::{Prompt, without_thinking};
use crate::runner::{Question, Task, Verdict};

/// Names of its file, without `.jsonl`.
pub const FILES: &[&str] = &["gsm8k", "gsm8k-test", "gsm8k_test"];
/// Names of the file with more worked examples.
pub const TRAIN_FILES: &[&str] = &["gsm8k-train", "gsm8k_train", "gsm8k-train-64"];
/// Rows of a run unless asked otherwise.
pub const DEFAULT_ROWS: usize = 1000;
/// Worked examples before the question unless asked otherwise.
pub const DEFAULT_SHOTS: usize = 3;
/// Most tokens of a reply unless asked otherwise.
pub const MAX_TOKENS: usize = 256;

const EXAMPLES: [(&str, &str); 3] = [
    (
        "A baker fills 6 trays with 12 rolls each and sells 50 of the rolls. How many rolls are left?",
        "The baker makes 6 * 12 = 72 rolls.\nAfter selling 50, 72 - 50 = 22 rolls are left.\n#### 22",
    ),
    (
        "Lina saves $4 a week for 9 weeks and then spends a third of it on a book. How much money does she have now?",
        "Lina saves 4 * 9 = 36 dollars.\nThe book costs 36 / 3 = 12 dollars.\nShe has 36 - 12 = 24 dollars.\n#### 24",
    ),
    (
        "A train has 5 cars with 40 seats each. 130 people get on, then 25 more. How many seats stay empty?",
        "The train has 5 * 40 = 200 seats.\n130 + 25 = 155 people get on.\n200 - 155 = 45 seats stay empty.\n#### 45",
    ),
];

/// A question and its number.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The question.
    pub question: String,
    /// The worked answer.
    pub answer: String,
    /// Its number.
    pub number: f64,
}

/// Reads a row of OpenAI's layout: `question` and `answer`, a worked answer that ends in `#### n`.
///
/// # Errors
/// What is wrong with it.
pub fn row(_: usize, value: &Value) -> Result<Row, String> {
    let row = fields::object(value)?;
    let answer = match fields::field(row, "answer")? {
        Value::String(answer) => answer.clone(),
        Value::Number(number) => number.to_string(),
        _ => return Err("`answer` is neither a string nor a number".to_owned()),
    };
    let number = extract(&answer).ok_or("`answer` has no number")?;
    Ok(Row { question: fields::text(row, "question")?.to_owned(), answer, number })
}

/// The task over some rows.
pub struct Gsm8k {
    rows: Vec<Row>,
    questions: Vec<Question>,
}

impl Gsm8k {
    /// Reads `file`; `train` has the worked examples beyond the three that are built in.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn load(
        file: &Path,
        train: Option<&Path>,
        shots: usize,
        choose: impl FnOnce(usize) -> Vec<usize>,
    ) -> Result<Self, DataError> {
        let rows = read_rows(file, row)?;
        let mut examples: Vec<(String, String)> = EXAMPLES
            .iter()
            .map(|(question, answer)| ((*question).to_owned(), (*answer).to_owned()))
            .collect();
        if let Some(train) = train.filter(|_| shots > examples.len()) {
            examples.extend(read_rows(train, row)?.into_iter().map(|row| (row.question, row.answer)));
        }
        examples.truncate(shots);
        let preamble: String =
            examples.iter().map(|(question, answer)| format!("Q: {question}\nA: {answer}\n\n")).collect();
        let chosen = choose(rows.len());
        let question = |index: &usize| {
            let row = rows.get(*index)?;
            let prompt = Prompt::chat(format!("{preamble}Q: {}\nA:", row.question));
            Some(Question { id: format!("gsm8k/{index}"), prompt, group: None })
        };
        let questions = chosen.iter().filter_map(question).collect();
        let rows = chosen.iter().filter_map(|index| rows.get(*index).cloned()).collect();
        Ok(Self { rows, questions })
    }
}

impl Task for Gsm8k {
    fn name(&self) -> &'static str {
        "gsm8k"
    }

    fn questions(&self) -> &[Question] {
        &self.questions
    }

    fn judge(&self, index: usize, reply: &str) -> Verdict {
        let expected = self.rows.get(index).map_or(f64::NAN, |row| row.number);
        let answer = extract(without_thinking(reply));
        Verdict {
            correct: answer.is_some_and(|answer| (answer - expected).abs() < 1e-3),
            answer: answer.map_or(Value::Null, Value::from),
            detail: Map::from_iter([("expected".to_owned(), Value::from(expected))]),
        }
    }
}

#[allow(clippy::unwrap_used)] // constants
static NUMBER: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+").unwrap());
#[allow(clippy::unwrap_used)] // constants
static MARKED: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"####\s*[$€£]?\s*(-?[$€£]?\s*\d[\d,]*(?:\.\d+)?)").unwrap());
#[allow(clippy::unwrap_used)] // constants
static BOXED: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"\\boxed\{\s*\\?[$€£]?\s*(-?[$€£]?\s*\d[\d,]*(?:\.\d+)?)[^}]*\}").unwrap());

/// The number that a text answers with: the first after `####`, else the first in `\boxed{}`, else the last.
pub fn extract(text: &str) -> Option<f64> {
    let marked = MARKED.captures(text).or_else(|| BOXED.captures(text)).and_then(|found| found.get(1));
    let found = match marked {
        Some(found) => found.as_str(),
        None => NUMBER.find_iter(text).last()?.as_str(),
    };
    let digits: String = found.chars().filter(|c| c.is_ascii_digit() || matches!(c, '-' | '.')).collect();
    digits.parse().ok().filter(|number: &f64| number.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_marked_number_counts_then_the_boxed_one_then_the_last() {
        assert_eq!(extract("1 then #### 72 and 5"), Some(72.0));
        assert_eq!(extract("#### $1,234.50"), Some(1234.5));
        assert_eq!(extract("#### -3"), Some(-3.0));
        assert_eq!(extract(r"so \boxed{18} of 20"), Some(18.0));
        assert_eq!(extract(r"\boxed{\$18}"), Some(18.0));
        assert_eq!(extract("He has 3 of 1,000."), Some(1000.0));
        assert_eq!(extract("It costs $.50"), Some(0.5));
        assert_eq!(extract("none, really"), None);
        assert_eq!(extract(",,,"), None);
        assert_eq!(extract("#### twelve, that is 12"), Some(12.0));
    }

    #[test]
    fn a_sentence_end_is_no_part_of_the_number() {
        assert_eq!(extract("The answer is 42."), Some(42.0));
        assert_eq!(extract("1, 2, 3, and so on"), Some(3.0));
    }

    proptest! {
        #[test]
        fn any_text_is_read(text in ".{0,200}") {
            let _ = extract(&text);
        }

        #[test]
        fn a_marked_number_is_found(number in -1_000_000i64..1_000_000, before in "[a-z0-9 .]{0,30}") {
            prop_assert_eq!(extract(&format!("{before}\n#### {number}")), Some(number as f64));
        }
    }
}
