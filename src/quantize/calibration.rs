//! Token sequences that a sensitivity sweep looks at.

use std::path::Path;

use serde_json::Value;

use crate::checkpoint::json_lines::{JsonLinesError, TextOrRows, read_text_or_rows};
use crate::tokenizer::{Tokenizer, TokenizerError};

/// A little of everything: prose, code, chat, numbers, law, data.
const BUILT_IN: &str = include_str!("calibration.txt");
/// Seed of the order of the sequences.
const SEED: u32 = 42;

/// Why there are no sequences.
#[derive(Debug, thiserror::Error)]
pub enum CalibrationError {
    /// The file.
    #[error(transparent)]
    File(#[from] JsonLinesError),
    /// Not enough text.
    #[error(
        "the calibration text has {tokens} tokens, and one sequence takes more than {length}; give a longer one"
    )]
    TooShort {
        /// Tokens in all.
        tokens: usize,
        /// Tokens of a sequence.
        length: usize,
    },
    /// The tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// The samples of a file (.jsonl rows with `messages` or `text`, else one text), or the built-in ones.
///
/// # Errors
/// Names the file and the line.
pub fn samples(file: Option<&Path>) -> Result<Vec<String>, CalibrationError> {
    let Some(path) = file else { return Ok(BUILT_IN.split("\n\n").map(str::to_owned).collect()) };
    Ok(match read_text_or_rows(path, |row| Ok(sample(&row)))? {
        TextOrRows::Text(text) => vec![text],
        TextOrRows::Rows(samples) => samples,
    })
}

/// Messages win over text.
fn sample(row: &Value) -> Option<String> {
    let text = |value: Option<&Value>| value.and_then(Value::as_str).unwrap_or_default().to_owned();
    match row.get("messages").and_then(Value::as_array) {
        Some(messages) => {
            let turn = |message: &Value| {
                format!("[{}]: {}", text(message.get("role")), text(message.get("content")))
            };
            Some(messages.iter().map(turn).collect::<Vec<_>>().join("\n\n"))
        }
        None => row.get("text")?.as_str().map(str::to_owned),
    }
}

/// `count` sequences of `length` tokens, cut from all samples one after the other and shuffled; fewer when the text is
/// short. The last piece that would just fit is never used.
///
/// # Errors
/// When not even one sequence comes out.
pub fn sequences(
    samples: &[String],
    tokenizer: &Tokenizer,
    length: usize,
    count: usize,
) -> Result<Vec<Vec<u32>>, CalibrationError> {
    let mut tokens = Vec::new();
    for sample in samples {
        tokens.extend(tokenizer.encode(sample, false)?);
    }
    let last = tokens.len().saturating_sub(length);
    let mut starts: Vec<usize> = (0..last).step_by(length.max(1)).collect();
    if starts.is_empty() {
        return Err(CalibrationError::TooShort { tokens: tokens.len(), length });
    }
    let mut random = Mulberry32 { state: SEED };
    for index in (1..starts.len()).rev() {
        starts.swap(index, (random.next() * (index + 1) as f64) as usize);
    }
    Ok(starts.into_iter().take(count).map(|start| tokens[start..start + length].to_vec()).collect())
}

/// The generator mulberry32.
struct Mulberry32 {
    state: u32,
}

impl Mulberry32 {
    /// A number in `[0, 1)`.
    fn next(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x6d2b_79f5);
        let mut t = (self.state ^ (self.state >> 15)).wrapping_mul(1 | self.state);
        t = t.wrapping_add((t ^ (t >> 7)).wrapping_mul(61 | t)) ^ t;
        f64::from(t ^ (t >> 14)) / 4_294_967_296.0
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn messages_win_over_text() {
        let row = json!({"text": "no", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]});
        assert_eq!(sample(&row).unwrap(), "[user]: a\n\n[assistant]: b");
        assert_eq!(sample(&json!({"tools": []})), None);
        assert!(samples(None).unwrap().len() >= 6);
    }

    #[test]
    fn the_generator_is_mulberry32() {
        let mut random = Mulberry32 { state: 42 };
        let first = [random.next(), random.next()];
        assert!(
            (first[0] - 0.601_103_751_920_163_6).abs() < 1e-15
                && (first[1] - 0.448_290_558_997_541_67).abs() < 1e-15,
            "{first:?}"
        );
    }
}
