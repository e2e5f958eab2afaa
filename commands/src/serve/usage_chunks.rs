//! Where the streams of OpenAI's chat and completions say what a request used.

use serde_json::Value;

use super::reply::{Outcome, Usage};
use super::stream::data;

/// In the last chunk of each reply, or in a chunk of its own for clients that ask for one.
pub struct UsageChunks {
    apart: bool,
    total: Usage,
}

impl UsageChunks {
    /// With a chunk of its own, or without.
    pub fn new(apart: bool) -> Self {
        Self { apart, total: Usage::default() }
    }

    /// Whether there will be a chunk of its own.
    pub fn is_apart(&self) -> bool {
        self.apart
    }

    /// The last chunk of a reply as an event.
    pub fn close(&mut self, mut chunk: Value, outcome: &Outcome) -> String {
        self.total.add(&outcome.usage);
        if !self.apart {
            chunk["usage"] = outcome.usage.openai(outcome.lane);
        }
        data(&chunk)
    }

    /// The end of the stream; `empty` makes a chunk without choices.
    pub fn end(&self, empty: impl FnOnce() -> Value) -> String {
        let mut events = String::new();
        if self.apart {
            let mut chunk = empty();
            chunk["usage"] = self.total.openai(None);
            events = data(&chunk);
        }
        events + "data: [DONE]\n\n"
    }
}
