//! Rows to tokens (mlx-lm `tuner/datasets.py`), and what of them is learned.

use serde_json::{Value, json};

use super::rows::{Content, Row};
use super::{DataError, Example, Sequence};
use crate::perplexity::{self, encode_chat, tokenize};
use crate::tokenizer::Tokenizer;
use crate::tokenizer::chat_template::ChatTemplates;

/// Which tokens of a sample are learned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Learn {
    /// All.
    Everything,
    /// Those after the prompt.
    Completion,
}

/// How rows are made ready.
#[derive(Clone, Copy, Debug)]
pub struct Preparation {
    /// Which tokens of a sample are learned.
    pub learn: Learn,
    /// Tokens of a sequence, at most. Samples lose their end, preferred and rejected answers the start of their prompt.
    pub max_length: usize,
}

/// Rows made ready, and what was done to them.
#[derive(Clone, Debug, Default)]
pub struct Prepared {
    /// What there is to learn from.
    pub examples: Vec<Example>,
    /// Rows that were longer than allowed.
    pub truncated: usize,
    /// File and line of rows of which nothing would be left to learn; they are left out.
    pub nothing_to_learn: Vec<String>,
    /// Pairs of which no prompt is left.
    pub without_prompt: usize,
    /// Tokens of the longest row, before it was cut.
    pub longest: usize,
}

/// Makes tokens of rows.
///
/// # Errors
/// Names the file and line of the first row that cannot be one.
pub fn prepare(
    rows: &[Row],
    tokenizer: &Tokenizer,
    templates: &ChatTemplates,
    preparation: Preparation,
) -> Result<Prepared, DataError> {
    let mut prepared = Prepared::default();
    for row in rows {
        let failed = |cause| DataError::Row { path: row.file.to_path_buf(), line: row.line, cause };
        let sequences = match &row.content {
            Content::Sample(sample) => {
                vec![sample_tokens(row, sample, tokenizer, templates, preparation.learn)?]
            }
            Content::Preference { prompt, tools, chosen, rejected } => {
                let side =
                    |answer: &String| answer_tokens(prompt, tools.as_ref(), answer, tokenizer, templates);
                vec![side(chosen).map_err(failed)?, side(rejected).map_err(failed)?]
            }
        };
        let example = Example { sequences, fields: row.fields };
        prepared.longest = prepared.longest.max(example.length());
        prepared.truncated += usize::from(example.length() > preparation.max_length);
        let pair = example.sequences.len() > 1;
        let sequences: Vec<_> = example
            .sequences
            .into_iter()
            .map(|sequence| cut(sequence, preparation.max_length, pair))
            .collect();
        if sequences.iter().any(|sequence| sequence.learned() == 0) {
            prepared.nothing_to_learn.push(format!("{}, line {}", row.file.display(), row.line));
            continue;
        }
        prepared.without_prompt += usize::from(pair && sequences.iter().any(|sequence| sequence.prompt == 0));
        prepared.examples.push(Example { sequences, fields: example.fields });
    }
    Ok(prepared)
}

fn cut(mut sequence: Sequence, most: usize, from_start: bool) -> Sequence {
    let excess = sequence.tokens.len().saturating_sub(most);
    if from_start {
        sequence.tokens.drain(..excess);
        sequence.prompt = sequence.prompt.saturating_sub(excess);
    } else {
        sequence.tokens.truncate(most);
    }
    sequence
}

fn sample_tokens(
    row: &Row,
    sample: &perplexity::Row,
    tokenizer: &Tokenizer,
    templates: &ChatTemplates,
    learn: Learn,
) -> Result<Sequence, DataError> {
    let failed = |cause| DataError::Row { path: row.file.to_path_buf(), line: row.line, cause };
    let tokens = tokenize(sample, tokenizer, templates).map_err(failed)?;
    let prompt = match (learn, sample) {
        (Learn::Everything, _) => 0,
        (Learn::Completion, perplexity::Row::Text(_)) => {
            return Err(DataError::NoPrompt { path: row.file.to_path_buf(), line: row.line });
        }
        (Learn::Completion, perplexity::Row::Chat { messages, tools }) => {
            let messages = messages.as_array().map(Vec::as_slice).unwrap_or_default();
            match messages.split_last() {
                // A template may refuse an empty conversation, and there is no prompt in one.
                None | Some((_, [])) => 0,
                Some((last, before)) => {
                    let answered = last.get("role").and_then(Value::as_str) == Some("assistant");
                    let before = Value::Array(before.to_vec());
                    encode_chat(&before, tools.as_ref(), answered, tokenizer, templates)
                        .map_err(failed)?
                        .len()
                }
            }
        }
    };
    Ok(Sequence { tokens, prompt })
}

/// An answer with what comes before it. The boundary is where prompt and whole part, as some templates write a prompt
/// otherwise when an answer follows.
fn answer_tokens(
    prompt: &Value,
    tools: Option<&Value>,
    answer: &str,
    tokenizer: &Tokenizer,
    templates: &ChatTemplates,
) -> Result<Sequence, perplexity::DatasetError> {
    let mut messages = prompt.as_array().cloned().unwrap_or_default();
    let (before, tokens) = if templates.is_empty() {
        // A model without a template reads plain text.
        let text: Vec<&str> =
            messages.iter().filter_map(|message| message.get("content").and_then(Value::as_str)).collect();
        let text = text.join("\n");
        let mut tokens = tokenizer.encode(&format!("{text}{answer}"), true)?;
        tokens.extend(tokenizer.eos_id().filter(|eos| tokens.last() != Some(eos)));
        (tokenizer.encode(&text, true)?, tokens)
    } else {
        let before = encode_chat(prompt, tools, true, tokenizer, templates)?;
        messages.push(json!({"role": "assistant", "content": answer}));
        (before, encode_chat(&Value::Array(messages), tools, false, tokenizer, templates)?)
    };
    let common = before.iter().zip(&tokens).take_while(|(a, b)| a == b).count();
    let prompt = common.min(tokens.len().saturating_sub(1));
    Ok(Sequence { tokens, prompt })
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use super::super::rows::Reader;
    use super::*;

    fn row(value: Value, line: usize) -> Row {
        let (content, fields) = Reader::default().read(&value).unwrap();
        Row { content, fields, file: Arc::from(Path::new("train.jsonl")), line }
    }

    fn prepared(rows: &[Row], learn: Learn, max_length: usize) -> Result<Prepared, DataError> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/checkpoints/llama-f32");
        let tokenizer = Tokenizer::from_dir(&folder).unwrap();
        let templates = ChatTemplates::from_directory(&folder, tokenizer.config()).unwrap();
        prepare(rows, &tokenizer, &templates, Preparation { learn, max_length })
    }

    #[test]
    fn the_prompt_ends_where_the_answer_begins() {
        let pair = row(json!({"prompt": "hello there", "completion": "yes"}), 1);
        let whole = prepared(std::slice::from_ref(&pair), Learn::Everything, 100).unwrap();
        assert_eq!(whole.examples[0].sequences[0].prompt, 0);
        let masked = prepared(&[pair], Learn::Completion, 100).unwrap();
        let sequence = &masked.examples[0].sequences[0];
        assert!(sequence.prompt > 5 && sequence.prompt < sequence.tokens.len(), "{sequence:?}");
        let error = prepared(&[row(json!({"text": "a"}), 7)], Learn::Completion, 100).unwrap_err();
        assert!(error.to_string().starts_with("train.jsonl, line 7: a row with `text`"), "{error}");
    }

    /// mlx-lm divides by zero there, and the run is lost (pull request 1355).
    #[test]
    fn rows_cut_within_their_prompt_are_left_out_and_counted() {
        let rows = [
            row(json!({"prompt": "a long question ".repeat(9), "completion": "yes"}), 1),
            row(json!({"prompt": "hi", "completion": "yes"}), 2),
        ];
        let found = prepared(&rows, Learn::Completion, 60).unwrap();
        assert_eq!((found.examples.len(), found.truncated), (1, 1));
        assert_eq!(found.nothing_to_learn, ["train.jsonl, line 1"]);
    }

    #[test]
    fn pairs_keep_their_answers_when_they_are_cut() {
        let pair = json!({"prompt": "a long question ".repeat(9), "chosen": "yes", "rejected": "oh no"});
        let found = prepared(&[row(pair, 1)], Learn::Everything, 24).unwrap();
        let [chosen, rejected] = &found.examples[0].sequences[..] else { panic!("two") };
        assert_eq!((chosen.tokens.len(), rejected.tokens.len(), found.truncated), (24, 24, 1));
        assert!(chosen.learned() > 0 && chosen.prompt > 0 && rejected.learned() > chosen.learned());
        let tight = prepared(
            &[row(json!({"prompt": "q", "chosen": "a".repeat(50), "rejected": "n"}), 1)],
            Learn::Everything,
            16,
        );
        assert_eq!(tight.unwrap().without_prompt, 1);
    }
}
