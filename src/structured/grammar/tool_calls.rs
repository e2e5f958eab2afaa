//! Grammars of tool calls, for requests that demand one: the family's own syntax around the tool's schema.

use std::fmt::Write as _;

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::{Map, Value, json};

use super::compiler::Limits;
use super::constraint::{reasoning_rules, schema_grammar};
use super::lark::Text;
use super::{GrammarError, Reasoning};
use super::{json_schema, tool_syntax};
use crate::structured::tools::{ToolParser, ToolSchemas};
use crate::tokenizer::Tokenizer;

/// Which calls a reply must make.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolChoice {
    parser: ToolParser,
    tools: Vec<(String, Value)>,
    parallel: bool,
}

impl ToolChoice {
    /// A call of the tool `named`, else of any; with `parallel`, perhaps several. Arguments follow the tools'
    /// schemas as far as the syntax allows: keywords that a grammar cannot express are left out, and where the
    /// syntax writes texts without quotes, their length, pattern and format are.
    ///
    /// # Errors
    /// There is no tool, or none of that name.
    pub fn new(
        parser: ToolParser,
        tools: &ToolSchemas,
        named: Option<&str>,
        parallel: bool,
    ) -> Result<Self, GrammarError> {
        let chosen: Vec<(String, Value)> = tools
            .iter()
            .filter(|(name, _)| named.is_none_or(|named| named == *name))
            .map(|(name, parameters)| (name.to_owned(), parameters.clone()))
            .collect();
        if chosen.is_empty() {
            return Err(GrammarError::Tool {
                tool: named.unwrap_or_default().to_owned(),
                reason: "the request does not offer it".to_owned(),
            });
        }
        Ok(Self { parser, tools: chosen, parallel })
    }

    pub(super) fn size(&self) -> usize {
        self.tools.iter().map(|(name, parameters)| name.len() + parameters.to_string().len()).sum()
    }

    pub(super) fn to_grammars(
        &self,
        tokenizer: &Tokenizer,
        reasoning: Reasoning,
        limits: &Limits,
    ) -> Result<TopLevelGrammar, GrammarError> {
        let mut builder =
            Builder { text: Text::new(tokenizer, "part")?, grammars: Vec::new(), limits, tool: "" };
        let mut calls = Vec::new();
        for (name, parameters) in &self.tools {
            builder.tool = name;
            calls.push(builder.call(self.parser, name, parameters, tokenizer)?);
        }
        let frame = Frame::of(self.parser, tokenizer);
        let mut start = String::from("start: ");
        let mut extra = String::new();
        if self.parser == ToolParser::Harmony && reasoning != Reasoning::None {
            let open = builder.text.exactly("<|channel|>analysis<|message|>");
            let rest = builder.text.until("<|end|>");
            let next = builder.text.exactly("<|start|>assistant");
            match reasoning {
                Reasoning::Open => write!(start, "{rest} {next} "),
                _ => write!(start, "({open} {rest} {next})? "),
            }
            .map_err(GrammarError::invalid)?;
        } else if let Some(rules) = reasoning_rules(tokenizer, reasoning)? {
            start.push_str("reasoning /[ \\n\\r\\t]{0,8}/ ");
            extra = rules;
        }
        let open = builder.text.exactly(frame.open);
        let separator = builder.text.exactly(frame.separator);
        let close = builder.text.exactly(frame.close);
        let several = if self.parallel { format!(" ({separator} call)*") } else { String::new() };
        let rules = format!("{start}{open} call{several} {close}\ncall: {}\n", calls.join("\n | "));
        let top = format!("{rules}{}\n{extra}", builder.text.rules());
        let mut grammars = vec![GrammarWithLexer::from_lark(top)];
        grammars.append(&mut builder.grammars);
        Ok(TopLevelGrammar { grammars, max_tokens: None })
    }
}

/// What stands around and between calls.
struct Frame {
    open: &'static str,
    separator: &'static str,
    close: &'static str,
}

impl Frame {
    fn of(parser: ToolParser, tokenizer: &Tokenizer) -> Self {
        let frame = |open, separator, close| Self { open, separator, close };
        match parser {
            ToolParser::JsonTools | ToolParser::Qwen3Coder | ToolParser::Glm47 | ToolParser::Longcat => {
                frame("", "\n", "")
            }
            ToolParser::KimiK2 => frame("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
            ToolParser::KimiK3 => frame("<|open|>tools<|sep|>", "", "<|close|>tools<|sep|>"),
            ToolParser::MinimaxM2 => frame("<minimax:tool_call>\n", "", "</minimax:tool_call>"),
            ToolParser::MuseSpark => frame("<atem:function_calls>\n", "", "</atem:function_calls>"),
            ToolParser::Dsml => frame("<｜DSML｜function_calls>\n", "", "</｜DSML｜function_calls>"),
            ToolParser::Deepseek => frame("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
            ToolParser::Pythonic => frame("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
            ToolParser::Llama3 => frame("", "; ", ""),
            ToolParser::Mistral if has_arguments_token(tokenizer) => frame("", "", ""),
            ToolParser::Mistral => frame("[TOOL_CALLS][", ", ", "]"),
            ToolParser::Gemma4 | ToolParser::FunctionGemma | ToolParser::Minicpm5 => frame("", "", ""),
            ToolParser::Harmony => frame("", "<|call|><|start|>assistant", ""),
        }
    }
}

/// Mistral's tokenizers from version 11 on write `NAME[ARGS]{…}`.
fn has_arguments_token(tokenizer: &Tokenizer) -> bool {
    tokenizer.token_to_id("[ARGS]").is_some()
}

/// Collects the expressions of a grammar and the JSON grammars that it refers to.
pub(super) struct Builder<'a> {
    pub(super) text: Text<'a>,
    grammars: Vec<GrammarWithLexer>,
    limits: &'a Limits,
    tool: &'a str,
}

impl Builder<'_> {
    fn call(
        &mut self,
        parser: ToolParser,
        name: &str,
        parameters: &Value,
        tokenizer: &Tokenizer,
    ) -> Result<String, GrammarError> {
        if let Some(expression) = tool_syntax::call(self, parser, name, parameters)? {
            return Ok(expression);
        }
        let quoted = Value::from(name).to_string();
        let (before, after) = match parser {
            ToolParser::JsonTools => {
                (format!("<tool_call>\n{{\"name\": {quoted}, \"arguments\": "), "}\n</tool_call>".to_owned())
            }
            ToolParser::Llama3 => (format!("{{\"name\": {quoted}, \"parameters\": "), "}".to_owned()),
            ToolParser::Mistral if has_arguments_token(tokenizer) => {
                (format!("[TOOL_CALLS]{name}[ARGS]"), String::new())
            }
            ToolParser::Mistral => (format!("{{\"name\": {quoted}, \"arguments\": "), "}".to_owned()),
            ToolParser::KimiK3 => (
                format!(
                    "<|open|>call tool=\"{}\" index=\"1\"<|sep|><|open|>json type=\"object\"<|sep|>",
                    name.replace('&', "&amp;").replace('"', "&quot;")
                ),
                "<|close|>json<|sep|><|close|>call<|sep|>".to_owned(),
            ),
            ToolParser::Deepseek => {
                (format!("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>"), "<｜tool▁call▁end｜>".to_owned())
            }
            ToolParser::KimiK2 => {
                let begin = self.text.exactly(&format!("<|tool_call_begin|>functions.{name}:"));
                let arguments_begin = self.text.exactly("<|tool_call_argument_begin|>");
                let end = self.text.exactly("<|tool_call_end|>");
                let arguments = self.arguments(parameters)?;
                return Ok(format!("{begin} /[0-9]/ {arguments_begin} {arguments} {end}"));
            }
            _ => (
                format!("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"),
                String::new(),
            ),
        };
        let (before, after) = (self.text.exactly(&before), self.text.exactly(&after));
        let arguments = self.arguments(parameters)?;
        Ok(format!("{before} {arguments} {after}"))
    }

    /// The arguments as one JSON object.
    fn arguments(&mut self, parameters: &Value) -> Result<String, GrammarError> {
        let mut schema = match parameters {
            Value::Object(schema) => schema.clone(),
            _ => Map::new(),
        };
        json_schema::check_keywords(&schema).map_err(|error| self.refuse(error.to_string()))?;
        schema.entry("type").or_insert_with(|| json!("object"));
        self.json(Value::Object(schema))
    }

    /// Text that a schema describes.
    pub(super) fn json(&mut self, schema: Value) -> Result<String, GrammarError> {
        let mut grammar = schema_grammar(schema, false, true, self.limits)?;
        let name = format!("json{}", self.grammars.len());
        grammar.name = Some(name.clone());
        self.grammars.push(grammar);
        Ok(format!("@{name}"))
    }

    /// An error about the tool at hand.
    pub(super) fn refuse(&self, reason: String) -> GrammarError {
        GrammarError::Tool { tool: self.tool.to_owned(), reason }
    }

    /// Levels that schemas may have.
    pub(super) fn nesting(&self) -> usize {
        self.limits.nesting
    }
}
