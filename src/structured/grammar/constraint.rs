//! What a reply can be held to.

use serde_json::{Value, json};

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};

use super::compiler::Limits;
use super::lark::{Text, literal};
use super::tool_calls::ToolChoice;
use super::{GrammarError, gbnf, json_schema};
use crate::tokenizer::Tokenizer;

/// What a reply is held to.
#[derive(Debug, Clone, PartialEq)]
pub enum Constraint {
    /// A JSON object (`response_format` `json_object`).
    JsonObject,
    /// JSON that a schema describes (`json_schema`).
    JsonSchema {
        /// The schema.
        schema: Value,
        /// A keyword that cannot be enforced is an error; otherwise it is dropped, and of overlapping `oneOf`
        /// options any number may hold.
        strict: bool,
        /// Blanks may stand where JSON allows them; otherwise the text is compact.
        any_whitespace: bool,
    },
    /// Text that a regular expression matches as a whole (the syntax of Rust's `regex`, no look-around).
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A grammar in llguidance's dialect of Lark.
    Lark(String),
    /// A grammar in llama.cpp's GBNF.
    Gbnf(String),
    /// Tool calls in the model's own syntax.
    ToolCalls(ToolChoice),
}

/// What may come before the constrained text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Reasoning {
    /// Nothing: the first token is constrained.
    #[default]
    None,
    /// The prompt opened the reasoning: text up to its end.
    Open,
    /// Reasoning, or nothing.
    Optional,
}

/// Runs of blanks that JSON may have between its parts: enough for lines and deep indentation, and an end to models
/// that would write blanks for ever.
const WHITESPACE: &str = "[ \\n\\r\\t]{1,64}";

impl Constraint {
    /// Parses a grammar of either syntax; rules defined with `::=` are GBNF's.
    pub fn grammar(text: String) -> Self {
        if text.contains("::=") { Self::Gbnf(text) } else { Self::Lark(text) }
    }

    /// Bytes of what is compiled.
    pub(super) fn size(&self) -> usize {
        match self {
            Self::JsonObject => 0,
            Self::JsonSchema { schema, .. } => schema.to_string().len(),
            Self::Regex(text) | Self::Lark(text) | Self::Gbnf(text) => text.len(),
            Self::Choice(choices) => choices.iter().map(String::len).sum(),
            Self::ToolCalls(choice) => choice.size(),
        }
    }

    /// The grammars, the first being the one to begin with.
    pub(super) fn to_grammars(
        &self,
        tokenizer: &Tokenizer,
        reasoning: Reasoning,
        limits: &Limits,
    ) -> Result<TopLevelGrammar, GrammarError> {
        let mut grammars = vec![match self {
            Self::JsonObject => schema_grammar(json!({"type": "object"}), true, true, limits)?,
            Self::JsonSchema { schema, strict, any_whitespace } => {
                schema.as_object().map_or(Ok(()), json_schema::check_keywords)?;
                schema_grammar(schema.clone(), *strict, *any_whitespace, limits)?
            }
            Self::Regex(pattern) => {
                limits.check_nesting(pattern)?;
                GrammarWithLexer::from_regex(unanchored(pattern))
            }
            Self::Choice(choices) => choice_grammar(choices)?,
            Self::Lark(text) => {
                limits.check_nesting(text)?;
                GrammarWithLexer::from_lark(text.clone())
            }
            Self::Gbnf(text) => {
                limits.check_nesting(text)?;
                GrammarWithLexer::from_lark(gbnf::to_lark(text)?)
            }
            Self::ToolCalls(choice) => return choice.to_grammars(tokenizer, reasoning, limits),
        }];
        if reasoning != Reasoning::None
            && let Some(before) = reasoning_rules(tokenizer, reasoning)?
        {
            let blanks = matches!(self, Self::JsonObject | Self::JsonSchema { any_whitespace: true, .. });
            let blanks = if blanks { "/[ \\n\\r\\t]{0,8}/ " } else { "" };
            for grammar in &mut grammars {
                grammar.name = Some("answer".to_owned());
            }
            let start = format!("start: reasoning {blanks}@answer\n{before}");
            grammars.insert(0, GrammarWithLexer::from_lark(start));
        }
        Ok(TopLevelGrammar { grammars, max_tokens: None })
    }
}

/// The rule `reasoning`; `None` for a model without reasoning.
pub(super) fn reasoning_rules(
    tokenizer: &Tokenizer,
    reasoning: Reasoning,
) -> Result<Option<String>, GrammarError> {
    let Some(thinking) = tokenizer.thinking().filter(|_| reasoning != Reasoning::None) else {
        return Ok(None);
    };
    let mut text = Text::new(tokenizer, "thought")?;
    let start = text.exactly(&thinking.start);
    let rest = text.until(&thinking.end);
    let rule = match reasoning {
        Reasoning::Optional => format!("reasoning: ({start} {rest})?"),
        Reasoning::Open | Reasoning::None => format!("reasoning: {rest}"),
    };
    Ok(Some(format!("{rule}\n{}", text.rules())))
}

pub(super) fn schema_grammar(
    schema: Value,
    strict: bool,
    any_whitespace: bool,
    limits: &Limits,
) -> Result<GrammarWithLexer, GrammarError> {
    let mut schema = json_schema::prepare(schema, strict, limits)?;
    let mut options = json!({"coerce_one_of": !strict});
    match any_whitespace {
        true => options["whitespace_pattern"] = Value::from(WHITESPACE),
        false => options["whitespace_flexible"] = Value::from(false),
    }
    schema.insert("x-guidance".to_owned(), options);
    Ok(GrammarWithLexer::from_json_schema(Value::Object(schema)))
}

/// A pattern without the anchors that a match of the whole text needs none of.
fn unanchored(pattern: &str) -> &str {
    let pattern = pattern.strip_prefix('^').unwrap_or(pattern);
    match pattern.strip_suffix('$') {
        Some(inside) if (inside.len() - inside.trim_end_matches('\\').len()) % 2 == 0 => inside,
        _ => pattern,
    }
}

fn choice_grammar(choices: &[String]) -> Result<GrammarWithLexer, GrammarError> {
    if choices.is_empty() || choices.iter().any(String::is_empty) {
        return Err(GrammarError::Invalid("a choice needs texts, none of them empty".to_owned()));
    }
    let choices: Vec<String> = choices.iter().map(|choice| literal(choice)).collect();
    // One lexeme: with several, a choice that begins with another would hide it.
    Ok(GrammarWithLexer::from_lark(format!("start: CHOICE\nCHOICE: {}", choices.join(" | "))))
}
