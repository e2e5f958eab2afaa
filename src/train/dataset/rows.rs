//! One row: which format it has, and its fields.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::perplexity::{self, RowKind};

/// What a row holds.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// Something to imitate.
    Sample(perplexity::Row),
    /// Two answers to one conversation.
    Preference {
        /// What comes before the answers, a list of messages; a prompt that is a string is the user's message.
        prompt: Value,
        /// The tools that the conversation has, if any.
        tools: Option<Value>,
        /// The better answer.
        chosen: String,
        /// The worse one.
        rejected: String,
    },
}

/// The formats of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// `text`.
    Text,
    /// `messages`.
    Messages,
    /// `prompt` and `completion`.
    PromptCompletion,
    /// `prompt`, `chosen` and `rejected`.
    Preference,
}

impl Format {
    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Messages => "messages",
            Self::PromptCompletion => "prompt-completion",
            Self::Preference => "preference",
        }
    }
}

/// A row, and where it comes from.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// What it holds.
    pub content: Content,
    /// How many fields it has.
    pub fields: usize,
    /// The file.
    pub file: Arc<Path>,
    /// Its line (of Parquet, its row), from 1.
    pub line: usize,
}

/// Reads the rows of one file, whose first decides what all are.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Reader {
    format: Option<Format>,
    kind: Option<RowKind>,
}

impl Reader {
    pub(super) fn read(&mut self, row: &Value) -> Result<(Content, usize), String> {
        let fields = row.as_object().ok_or("the row is not an object")?;
        let format = match self.format {
            Some(format) => format,
            None => *self.format.insert(format_of(fields).ok_or_else(|| unknown(fields))?),
        };
        let content = match format {
            Format::Preference => preference(fields)?,
            _ => Content::Sample(perplexity::read_row(row, &mut self.kind)?),
        };
        Ok((content, fields.len()))
    }

    pub(super) fn format(&self) -> Option<Format> {
        self.format
    }
}

fn format_of(fields: &Map<String, Value>) -> Option<Format> {
    let has = |name: &str| fields.contains_key(name);
    if has("chosen") && has("rejected") {
        Some(Format::Preference)
    } else if has("prompt") && has("completion") {
        Some(Format::PromptCompletion)
    } else if has("messages") {
        Some(Format::Messages)
    } else {
        has("text").then_some(Format::Text)
    }
}

fn unknown(fields: &Map<String, Value>) -> String {
    for (given, missing) in [("chosen", "rejected"), ("rejected", "chosen"), ("prompt", "completion")] {
        if fields.contains_key(given) {
            return format!("the row has `{given}` and no `{missing}`");
        }
    }
    let names: Vec<_> = fields.keys().take(8).map(|name| format!("`{name}`")).collect();
    format!(
        "a row needs `messages`, `prompt` and `completion`, `text`, or `chosen` and `rejected`, and has {}",
        if names.is_empty() { "nothing".to_owned() } else { names.join(", ") }
    )
}

fn preference(fields: &Map<String, Value>) -> Result<Content, String> {
    let answer = |name: &str| match fields.get(name) {
        Some(Value::String(text)) => Ok((Vec::new(), text.clone())),
        Some(Value::Array(messages)) => match messages.split_last() {
            Some((last, before)) => match last.get("content").and_then(Value::as_str) {
                Some(text) => Ok((before.to_vec(), text.to_owned())),
                None => Err(format!("the last message of `{name}` has no text as its content")),
            },
            None => Err(format!("`{name}` has no messages")),
        },
        None => Err(format!("the row has no `{name}`")),
        _ => Err(format!("`{name}` is neither a string nor a list of messages")),
    };
    let ((before, chosen), (_, rejected)) = (answer("chosen")?, answer("rejected")?);
    let prompt = match fields.get("prompt").or_else(|| fields.get("messages")) {
        Some(Value::String(text)) => serde_json::json!([{"role": "user", "content": text}]),
        Some(messages @ Value::Array(_)) => messages.clone(),
        None if !before.is_empty() => Value::Array(before),
        None => return Err("the row has no `prompt`".to_owned()),
        Some(_) => return Err("`prompt` is neither a string nor a list of messages".to_owned()),
    };
    let tools = fields.get("tools").filter(|tools| !tools.is_null()).cloned();
    Ok(Content::Preference { prompt, tools, chosen, rejected })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(row: Value) -> Result<(Content, usize), String> {
        Reader::default().read(&row)
    }

    #[test]
    fn formats_are_told_by_their_fields() {
        let mut reader = Reader::default();
        reader.read(&json!({"prompt": "a", "completion": "b"})).unwrap();
        assert_eq!(reader.format().unwrap().name(), "prompt-completion");
        let (content, fields) = read(json!({"prompt": "a", "chosen": "b", "rejected": "c"})).unwrap();
        let Content::Preference { prompt, chosen, .. } = content else { panic!("{content:?}") };
        assert_eq!((prompt[0]["content"].as_str(), chosen.as_str(), fields), (Some("a"), "b", 3));
        let turns = |answer: &str| json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]);
        let (content, _) = read(json!({"chosen": turns("y"), "rejected": turns("n")})).unwrap();
        let Content::Preference { prompt, rejected, .. } = content else { panic!("{content:?}") };
        assert_eq!((prompt[0]["content"].as_str(), rejected.as_str()), (Some("q"), "n"));
    }

    #[test]
    fn what_is_no_row_is_told() {
        assert!(read(json!([1])).unwrap_err().contains("not an object"));
        assert!(read(json!({"txt": 1, "b": 2})).unwrap_err().ends_with("and has `txt`, `b`"));
        assert!(
            read(json!({"chosen": "a", "rejected": 1, "prompt": "p"})).unwrap_err().contains("`rejected`")
        );
        assert!(read(json!({"chosen": "a", "rejected": "b"})).unwrap_err().contains("no `prompt`"));
        assert!(read(json!({"text": 1})).is_err());
        let error = read(json!({"prompt": "p", "chosen": "a"})).unwrap_err();
        assert_eq!(error, "the row has `chosen` and no `rejected`");
        assert_eq!(read(json!({"prompt": "p"})).unwrap_err(), "the row has `prompt` and no `completion`");
        let mut reader = Reader::default();
        reader.read(&json!({"prompt": "p", "chosen": "a", "rejected": "b"})).unwrap();
        let error = reader.read(&json!({"prompt": "p", "chosen": "a"})).unwrap_err();
        assert_eq!(error, "the row has no `rejected`");
    }
}
