//! What is asked of a server. Every prompt begins with a number of its own, so that no server finds it in a cache.

use serde_json::{Value, json};

use super::client::ChatRequest;

/// Words of the short prompt, about 40 tokens of a common vocabulary.
pub const SHORT_WORDS: usize = 30;
/// A reply to the schema has about 70 characters, blanks aside.
const SCHEMA_TOKENS: usize = 256;

const WORDS: [&str; 16] = [
    "harbour", "the", "morning", "ships", "of", "cold", "water", "and", "letters", "from", "a", "distant",
    "city", "arrive", "under", "rain",
];

/// What requests look like.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Words of the prompt.
    pub words: usize,
    /// Tokens of the reply at most; replies to a schema may need more.
    pub max_tokens: usize,
    /// Whether the reply has to follow [`schema`].
    pub grammar: bool,
}

impl Workload {
    /// The request of this number; the same number gives the same request.
    pub fn request(&self, number: usize) -> ChatRequest {
        let task = match self.grammar {
            true => "Answer with a JSON object about this text.",
            false => "Go on with this text at length.",
        };
        let words: Vec<&str> =
            (0..self.words).map(|index| WORDS[(index * 7 + number) % WORDS.len()]).collect();
        ChatRequest {
            prompt: format!("{number}. {task} {}", words.join(" ")),
            max_tokens: if self.grammar { self.max_tokens.max(SCHEMA_TOKENS) } else { self.max_tokens },
            schema: self.grammar.then(schema),
        }
    }
}

/// What structured replies look like: every reply to it is short, whatever the model.
pub fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "city": {"enum": ["Paris", "Rome", "Oslo"]},
            "visits": {"type": "integer", "minimum": 0, "maximum": 99},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 3},
            "open": {"type": "boolean"},
        },
        "required": ["city", "visits", "tags", "open"],
        "additionalProperties": false,
    })
}

#[cfg(test)]
mod tests {
    use super::super::schema_check::check;
    use super::*;

    #[test]
    fn requests_differ_from_their_first_character_on() {
        let workload = Workload { words: SHORT_WORDS, max_tokens: 8, grammar: false };
        assert_eq!(workload.request(3).prompt, workload.request(3).prompt);
        assert!(workload.request(3).prompt.starts_with("3. "));
        assert_eq!(workload.request(12).prompt.split(' ').count(), 1 + 7 + SHORT_WORDS);
        assert_eq!((workload.request(1).max_tokens, workload.request(1).schema), (8, None));
        let grammar = Workload { grammar: true, ..workload };
        assert_eq!(grammar.request(1).max_tokens, SCHEMA_TOKENS);
        assert!(grammar.request(1).schema.is_some());
    }

    #[test]
    fn the_schema_can_be_checked() {
        let fits = json!({"city": "Oslo", "visits": 0, "tags": ["red", "red"], "open": false});
        assert_eq!(check(&schema(), &fits).unwrap(), [""; 0]);
        assert!(!check(&schema(), &json!({"city": "Bonn"})).unwrap().is_empty());
    }
}
