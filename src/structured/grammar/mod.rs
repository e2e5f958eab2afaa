//! Grammars that a reply must follow, token by token.
//!
//! A [`Constraint`] (JSON, a JSON schema, a regular expression, choices, a Lark or GBNF grammar, tool calls in a
//! family's syntax) is compiled by a [`GrammarCompiler`], one for each model, into a [`Grammar`]; each generation
//! takes a [`Matcher`] from it, which says at every step which tokens may follow. The automata are llguidance's.
//! A constraint that cannot be honoured whole is an error that says why; nothing is ever left out in silence. Size
//! and nesting of what clients send, work and time to compile it, and work for a mask are bounded ([`Limits`]).

mod compiler;
mod constraint;
mod gbnf;
mod json_schema;
mod lark;
mod matcher;
mod references;
mod tool_calls;
mod tool_syntax;
mod vocabulary;

use std::time::Duration;

pub use compiler::{Grammar, GrammarCompiler, Limits};
pub use constraint::{Constraint, Reasoning};
pub use matcher::Matcher;
pub use tool_calls::ToolChoice;

use crate::tokenizer::TokenizerError;

/// Why a constraint cannot be honoured.
#[derive(Debug, thiserror::Error)]
pub enum GrammarError {
    /// The tokenizer's tokens cannot be told apart by their text.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// Without such a token a reply could not end where the grammar lets it.
    #[error("grammars need a tokenizer with an end-of-sequence token; name one with `--extra-eos-token`")]
    NoEndOfSequence,
    /// More text than is compiled.
    #[error("the grammar has {size} bytes, the limit is {limit}; make it smaller")]
    TooLarge {
        /// Its bytes.
        size: usize,
        /// The limit.
        limit: usize,
    },
    /// Brackets or schemas within each other.
    #[error("the grammar nests deeper than {limit} levels; flatten it")]
    TooDeep {
        /// The limit.
        limit: usize,
    },
    /// A keyword of JSON schema that no grammar can express.
    #[error("the schema's `{keyword}` at `{at}` cannot be enforced: {reason}")]
    Keyword {
        /// The keyword.
        keyword: String,
        /// JSON pointer to the schema that has it.
        at: String,
        /// Why.
        reason: &'static str,
    },
    /// A tool that the family's syntax cannot express.
    #[error("calls of the tool `{tool}` cannot be enforced: {reason}")]
    Tool {
        /// Its name.
        tool: String,
        /// Why.
        reason: String,
    },
    /// It is no grammar, or one that is too much work.
    #[error("the grammar cannot be used: {0}")]
    Invalid(String),
    /// Compiling took too long.
    #[error("the grammar takes more than {} s to compile; make it simpler", .0.as_secs_f64())]
    Timeout(Duration),
    /// The matcher gave up in the middle of a reply.
    #[error("the grammar cannot be followed any further: {0}")]
    Matcher(String),
}

impl GrammarError {
    /// From an error of llguidance: the line that says why, without the dump that may follow.
    fn invalid(error: impl std::fmt::Display) -> Self {
        Self::Invalid(reason(&error.to_string()))
    }
}

fn reason(message: &str) -> String {
    const LONGEST: usize = 300;
    let mut lines = message.lines().map(str::trim).filter(|line| !line.is_empty());
    // Below the picture of a regular expression stands what is wrong with it.
    let line = lines
        .clone()
        .find_map(|line| line.strip_prefix("error: "))
        .or_else(|| lines.next())
        .unwrap_or("no reason given");
    let line = line.trim_end_matches('.');
    match line.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", line.get(..end).unwrap_or_default()),
        None => line.to_owned(),
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
