//! Which syntax a model's tool calls have (mlx_lm/tokenizer_utils.py, `_infer_tool_parser`).

use serde_json::Value;

use super::ToolParser;

/// `tool_parser_type` of a tokenizer_config.json and the parser it names; the names are mlx-lm's.
const NAMES: [(&str, ToolParser); 18] = [
    ("json_tools", ToolParser::JsonTools),
    ("qwen3_coder", ToolParser::Qwen3Coder),
    ("gemma4", ToolParser::Gemma4),
    ("function_gemma", ToolParser::FunctionGemma),
    ("glm47", ToolParser::Glm47),
    ("laguna", ToolParser::Glm47),
    ("longcat", ToolParser::Longcat),
    ("kimi_k2", ToolParser::KimiK2),
    ("kimi_k3", ToolParser::KimiK3),
    ("minicpm5", ToolParser::Minicpm5),
    ("minimax_m2", ToolParser::MinimaxM2),
    ("mistral", ToolParser::Mistral),
    ("muse_spark", ToolParser::MuseSpark),
    ("pythonic", ToolParser::Pythonic),
    ("llama3", ToolParser::Llama3),
    ("deepseek", ToolParser::Deepseek),
    ("dsml", ToolParser::Dsml),
    ("harmony", ToolParser::Harmony),
];

/// A `tool_parser_type` that does not exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "tokenizer_config.json names the tool parser `{0}`, which does not exist; remove `tool_parser_type` to have it inferred"
)]
pub struct UnknownToolParser(String);

impl ToolParser {
    /// The parser that a tokenizer's config names, else the one that the chat template's text tells, else the one
    /// that the vocabulary tells; `None` for a model without tools. `has_token` says whether the vocabulary has a
    /// token.
    ///
    /// # Errors
    /// The config names a parser that does not exist.
    pub fn choose(
        config: &Value,
        template: Option<&str>,
        has_token: impl Fn(&str) -> bool,
    ) -> Result<Option<Self>, UnknownToolParser> {
        if let Some(name) = config.get("tool_parser_type").and_then(Value::as_str) {
            return Self::from_name(name).map(Some).ok_or_else(|| UnknownToolParser(name.to_owned()));
        }
        let told = template.and_then(Self::from_template);
        Ok(told
            .or_else(|| Self::from_vocabulary(&has_token))
            .or_else(|| template.and_then(Self::beyond_mlx_lm)))
    }

    /// The parser of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        NAMES.iter().find(|(candidate, _)| *candidate == name).map(|(_, parser)| *parser)
    }

    /// The parser's name.
    pub fn name(self) -> &'static str {
        NAMES.iter().find(|(_, parser)| *parser == self).map_or("", |(name, _)| name)
    }

    fn from_template(template: &str) -> Option<Self> {
        let has = |text: &str| template.contains(text);
        if has("<minimax:tool_call>") {
            Some(Self::MinimaxM2)
        } else if has("<|tool_call>") && has("<tool_call|>") {
            Some(Self::Gemma4)
        } else if has("<start_function_call>") {
            Some(Self::FunctionGemma)
        } else if has("<longcat_tool_call>") {
            Some(Self::Longcat)
        } else if has("<arg_key>") {
            Some(Self::Glm47)
        } else if has("<|tool_list_start|>") || has("<|tool_call_start|>") {
            Some(Self::Pythonic)
        } else if has("<tool_call>\\n<function=") || has("<tool_call>\n<function=") {
            Some(Self::Qwen3Coder)
        } else if has("<|tool_calls_section_begin|>") {
            Some(Self::KimiK2)
        } else if has("<function name=\"") && has("<param name=\"") {
            Some(Self::Minicpm5)
        } else if has("[TOOL_CALLS]") {
            Some(Self::Mistral)
        } else if has("<atem:function_calls>") {
            Some(Self::MuseSpark)
        } else if has("<tool_call>") && has("tool_call.name") {
            Some(Self::JsonTools)
        } else {
            None
        }
    }

    fn from_vocabulary(has_token: &dyn Fn(&str) -> bool) -> Option<Self> {
        if ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"].iter().all(|token| has_token(token)) {
            Some(Self::KimiK3)
        } else if has_token("<|tool_call_start|>") && has_token("<|tool_call_end|>") {
            Some(Self::Pythonic)
        } else {
            None
        }
    }

    /// Families that mlx-lm serves without tools.
    fn beyond_mlx_lm(template: &str) -> Option<Self> {
        let has = |text: &str| template.contains(text);
        if has("｜DSML｜") {
            Some(Self::Dsml)
        } else if has("<｜tool▁calls▁begin｜>") {
            Some(Self::Deepseek)
        } else if has("<|channel|>") && has("<|message|>") {
            Some(Self::Harmony)
        } else if has("<|python_start|>") || has("dictionary of argument name and its value") {
            Some(Self::Llama3)
        } else {
            None
        }
    }
}
