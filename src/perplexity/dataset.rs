//! Rows of text to measure on: a local .jsonl or .txt file, tokenized as mlx-lm's datasets are (`tuner/datasets.py`).

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::numpy_random::RandomState;
use crate::checkpoint::error::shown_path;
use crate::checkpoint::json_lines::{JsonLinesError, TextOrRows, read_text_or_rows};
use crate::tokenizer::chat_template::{
    ChatTemplates, RenderRequest, TemplateError, flatten_text_content, parse_tool_arguments,
};
use crate::tokenizer::{Tokenizer, TokenizerError};

/// Why a file gives no rows.
#[derive(Debug, thiserror::Error)]
pub enum DatasetError {
    /// The file.
    #[error(transparent)]
    File(#[from] JsonLinesError),
    /// Nothing in it.
    #[error("{} has no rows", shown_path(path))]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// Chats for a model without a template.
    #[error("the rows are chats and the model has no chat template; use rows with a `text`")]
    NoTemplate,
    /// Less text than one sequence.
    #[error("the rows have {tokens} tokens, a sequence takes {length}; use a smaller --sequence-length")]
    TooShort {
        /// Tokens in all.
        tokens: usize,
        /// Tokens of a sequence.
        length: usize,
    },
    /// The template.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// One row.
#[derive(Clone, Debug, PartialEq)]
pub enum Row {
    /// Plain text.
    Text(String),
    /// A conversation.
    Chat {
        /// Its messages, a list.
        messages: Value,
        /// Its tools, if any.
        tools: Option<Value>,
    },
}

/// Reads a file: .jsonl with a row a line (`text`, `messages`, or `prompt` and `completion`; the first row decides
/// which), anything else as one text.
///
/// # Errors
/// Names the file and the line.
pub fn read_rows(path: &Path) -> Result<Vec<Row>, DatasetError> {
    let mut kind = None;
    let rows = match read_text_or_rows(path, |row| read_row(&row, &mut kind).map(Some))? {
        TextOrRows::Rows(rows) => rows,
        TextOrRows::Text(text) if text.is_empty() => Vec::new(),
        TextOrRows::Text(text) => vec![Row::Text(text)],
    };
    if rows.is_empty() { Err(DatasetError::Empty { path: path.to_owned() }) } else { Ok(rows) }
}

/// What the rows of a file are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowKind {
    /// `prompt` and `completion`.
    Completion,
    /// `messages`.
    Chat,
    /// `text`.
    Text,
}

/// One row; the first decides what all are.
///
/// # Errors
/// What is wrong with it.
pub fn read_row(row: &Value, kind: &mut Option<RowKind>) -> Result<Row, String> {
    let row = row.as_object().ok_or("the row is not an object")?;
    let known = match kind {
        Some(kind) => *kind,
        None => *kind.insert(kind_of(row).ok_or_else(|| {
            "the row has neither `text`, nor `messages`, nor `prompt` and `completion`".to_owned()
        })?),
    };
    row_of(row, known)
}

fn kind_of(row: &Map<String, Value>) -> Option<RowKind> {
    if row.contains_key("prompt") && row.contains_key("completion") {
        Some(RowKind::Completion)
    } else if row.contains_key("messages") {
        Some(RowKind::Chat)
    } else {
        row.contains_key("text").then_some(RowKind::Text)
    }
}

fn row_of(row: &Map<String, Value>, kind: RowKind) -> Result<Row, String> {
    let field = |name: &str| row.get(name).ok_or_else(|| format!("the row has no `{name}`"));
    let tools = row.get("tools").filter(|tools| !tools.is_null()).cloned();
    match kind {
        RowKind::Text => match field("text")?.as_str() {
            Some(text) => Ok(Row::Text(text.to_owned())),
            None => Err("`text` is not a string".to_owned()),
        },
        RowKind::Chat => match field("messages")? {
            messages @ Value::Array(_) => Ok(Row::Chat { messages: messages.clone(), tools }),
            _ => Err("`messages` is not a list".to_owned()),
        },
        RowKind::Completion => {
            let messages = json!([
                {"role": "user", "content": field("prompt")?},
                {"role": "assistant", "content": field("completion")?},
            ]);
            Ok(Row::Chat { messages, tools })
        }
    }
}

/// The tokens of a row.
///
/// # Errors
/// When the template fails or there is none for a chat.
pub fn tokenize(
    row: &Row,
    tokenizer: &Tokenizer,
    templates: &ChatTemplates,
) -> Result<Vec<u32>, DatasetError> {
    match row {
        Row::Text(text) => {
            let mut tokens = tokenizer.encode(text, true)?;
            if let Some(eos) = tokenizer.eos_id().filter(|eos| tokens.last() != Some(eos)) {
                tokens.push(eos);
            }
            Ok(tokens)
        }
        Row::Chat { messages, tools } => encode_chat(messages, tools.as_ref(), false, tokenizer, templates),
    }
}

/// The tokens of a conversation as the model's template writes it, perhaps up to where the assistant's turn begins.
///
/// # Errors
/// When the template fails or there is none.
pub fn encode_chat(
    messages: &Value,
    tools: Option<&Value>,
    add_generation_prompt: bool,
    tokenizer: &Tokenizer,
    templates: &ChatTemplates,
) -> Result<Vec<u32>, DatasetError> {
    if templates.is_empty() {
        return Err(DatasetError::NoTemplate);
    }
    let mut messages = messages.clone();
    parse_tool_arguments(&mut messages);
    flatten_text_content(&mut messages)?;
    let special: Map<String, Value> = tokenizer
        .special_tokens()
        .iter()
        .map(|(role, token)| (role.to_owned(), Value::from(token)))
        .collect();
    let extra = Map::from_iter([("enable_thinking".to_owned(), tokenizer.has_thinking().into())]);
    let request = RenderRequest {
        tools,
        add_generation_prompt,
        special_tokens: Some(&special),
        extra: Some(&extra),
        ..RenderRequest::new(&messages)
    };
    let text = templates.select(None, tools.is_some())?.render(&request)?;
    Ok(tokenizer.encode(&text, false)?)
}

/// Sequences to measure on (mlx-lm `perplexity.py`, `load_data`): rows in NumPy's order for `seed`, one after the
/// other without regard to their ends, cut every `length` tokens. `samples` is how many, `None` for all there are;
/// fewer when the rows do not give as many.
///
/// # Errors
/// When a row cannot be tokenized, or all together are shorter than one sequence.
pub fn sequences(
    rows: &[Row],
    tokenizer: &Tokenizer,
    templates: &ChatTemplates,
    seed: u32,
    length: usize,
    samples: Option<usize>,
) -> Result<Vec<Vec<u32>>, DatasetError> {
    let wanted = samples.map_or(usize::MAX, |samples| samples.saturating_mul(length));
    let mut tokens = Vec::new();
    for index in RandomState::from_seed(seed).permutation(u32::try_from(rows.len()).unwrap_or(u32::MAX)) {
        if tokens.len() >= wanted {
            break;
        }
        if let Some(row) = rows.get(index as usize) {
            tokens.extend(tokenize(row, tokenizer, templates)?);
        }
    }
    let sequences: Vec<Vec<u32>> =
        tokens.chunks_exact(length.max(1)).take(samples.unwrap_or(usize::MAX)).map(<[u32]>::to_vec).collect();
    if sequences.is_empty() {
        return Err(DatasetError::TooShort { tokens: tokens.len(), length });
    }
    Ok(sequences)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_row_decides_what_rows_are() {
        let read_lines = |text: &str| {
            let mut kind = None;
            crate::checkpoint::json_lines::rows(text, |row| read_row(&row, &mut kind).map(Some))
        };
        let rows = read_lines("{\"prompt\": \"a\", \"completion\": \"b\", \"text\": \"c\"}\n\n").unwrap();
        assert!(matches!(&rows[..], [Row::Chat { messages, tools: None }] if messages[1]["content"] == "b"));
        let (line, problem) = read_lines("{\"text\": \"a\"}\n{\"messages\": []}").unwrap_err();
        assert_eq!((line, problem.as_str()), (2, "the row has no `text`"));
        let (line, problem) = read_lines("{\"txt\": 1}").unwrap_err();
        assert!(line == 1 && problem.starts_with("the row has neither"));
        assert!(read_lines("[1]").is_err() && read_lines("{\"text\": 1}").is_err());
    }
}
