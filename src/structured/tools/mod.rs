//! Tool calls in a reply's text: one parser a family, chosen as mlx-lm chooses it.
//!
//! The functions here see the whole text of a call, without the markers around it;
//! [`ReplyParser`](super::ReplyParser) finds it in a stream. What a family parses to is what mlx-lm 0.32.2's
//! `tool_parsers` of the same name returns, with these exceptions: arguments are always a JSON object (Python
//! values that JSON lacks stay text), a call without a name or with arguments that are no object is malformed
//! instead of passed on, and markup that mlx-lm lets a CDATA section end early does not.

mod choose;
mod deepseek;
mod dsml;
mod function_gemma;
mod gemma4;
mod glm47;
mod harmony;
mod json_tools;
mod kimi_k2;
mod kimi_k3;
mod literal;
mod llama3;
mod longcat;
mod minicpm5;
mod minimax_m2;
mod mistral;
mod muse_spark;
mod python;
mod pythonic;
mod qwen3_coder;
mod schemas;

use serde_json::{Map, Value};

pub use choose::UnknownToolParser;
pub(super) use harmony::recipient;
pub use schemas::{ToolSchemas, type_name};

/// A call that a model asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolCall {
    /// The function.
    pub name: String,
    /// Its arguments, with the types of the tool's schema where the family's syntax has none.
    pub arguments: Map<String, Value>,
    /// The model's own id for the call, if its syntax has one.
    pub id: Option<String>,
}

impl ToolCall {
    fn new(name: impl Into<String>, arguments: Map<String, Value>) -> Self {
        Self { name: name.into(), arguments, id: None }
    }

    /// From values of any kind: the name is a text, the arguments are an object, nothing, or an object as text.
    fn from_values(name: Option<&Value>, arguments: Option<&Value>) -> Result<Self, Malformed> {
        let name = name
            .and_then(Value::as_str)
            .filter(|name| !name.is_empty())
            .ok_or(Malformed("the call has no name"))?;
        let arguments = match arguments {
            None | Some(Value::Null) => Map::new(),
            Some(Value::Object(arguments)) => arguments.clone(),
            Some(Value::String(text)) if python::strip(text).is_empty() => Map::new(),
            Some(Value::String(text)) => match python::json(text) {
                Some(Value::Object(arguments)) => arguments,
                _ => return Err(Malformed("the arguments are no object")),
            },
            Some(_) => return Err(Malformed("the arguments are no object")),
        };
        Ok(Self::new(name, arguments))
    }

    /// The arguments as JSON text, as protocols carry them.
    pub fn arguments_json(&self) -> String {
        serde_json::to_string(&self.arguments).unwrap_or_else(|_| "{}".to_owned())
    }
}

/// Why a text is not a call. The text is then shown as it is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("malformed tool call: {0}")]
pub struct Malformed(pub(super) &'static str);

/// What the parsers return: at least one call.
pub type Parsed = Result<Vec<ToolCall>, Malformed>;

/// The syntax of a family's tool calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ToolParser {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`: Qwen 2.5 and 3, Hermes, and many more.
    JsonTools,
    /// `<tool_call><function=NAME><parameter=KEY>…`: Qwen3-Coder.
    Qwen3Coder,
    /// `<|tool_call>call:NAME{key:<|"|>text<|"|>}<tool_call|>`: Gemma 4.
    Gemma4,
    /// `<start_function_call>call:NAME{key:<escape>text<escape>}<end_function_call>`: FunctionGemma.
    FunctionGemma,
    /// `<tool_call>NAME<arg_key>…</arg_key><arg_value>…</arg_value></tool_call>`: GLM 4.5 to 4.7, Laguna.
    Glm47,
    /// GLM's syntax with LongCat's tags.
    Longcat,
    /// `<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0…`: Kimi K2.
    KimiK2,
    /// `<|open|>tools<|sep|>…`: Kimi K3.
    KimiK3,
    /// `<function name="NAME"><param name="KEY">…`: MiniCPM5.
    Minicpm5,
    /// `<minimax:tool_call><invoke name="NAME"><parameter name="KEY">…`: MiniMax M2.
    MinimaxM2,
    /// `[TOOL_CALLS][{"name": …}]` and `[TOOL_CALLS]NAME[ARGS]{…}`: Mistral.
    Mistral,
    /// `<atem:function_calls><atem:invoke name="NAME">…`: Muse Spark.
    MuseSpark,
    /// `<|tool_call_start|>[NAME(key="text")]<|tool_call_end|>`: LFM2 and others.
    Pythonic,
    /// JSON or Python calls that are the whole reply, or follow `<|python_tag|>`: Llama 3.1 to 4. Not in mlx-lm.
    Llama3,
    /// `<｜tool▁calls▁begin｜>…`: DeepSeek V3, R1 and V3.1. Not in mlx-lm.
    Deepseek,
    /// `<｜DSML｜function_calls>…`: DeepSeek V3.2. Not in mlx-lm.
    Dsml,
    /// `<|channel|>commentary to=functions.NAME …<|message|>{…}<|call|>`: gpt-oss. Not in mlx-lm.
    Harmony,
}

impl ToolParser {
    /// The text that begins calls; `None` where a call has no marker of its own.
    pub fn start(self) -> Option<&'static str> {
        Some(match self {
            Self::JsonTools | Self::Qwen3Coder | Self::Glm47 => "<tool_call>",
            Self::Gemma4 => "<|tool_call>",
            Self::FunctionGemma => "<start_function_call>",
            Self::Longcat => "<longcat_tool_call>",
            Self::KimiK2 => "<|tool_calls_section_begin|>",
            Self::KimiK3 => "<|open|>tools<|sep|>",
            Self::Minicpm5 => "<function name=",
            Self::MinimaxM2 => "<minimax:tool_call>",
            Self::Mistral => "[TOOL_CALLS]",
            Self::MuseSpark => "<atem:function_calls>",
            Self::Pythonic => "<|tool_call_start|>",
            Self::Llama3 => "<|python_tag|>",
            Self::Deepseek => "<｜tool▁calls▁begin｜>",
            Self::Dsml => "<｜DSML｜function_calls>",
            Self::Harmony => return None,
        })
    }

    /// The text that ends calls; `None` where the end of the reply does.
    pub fn end(self) -> Option<&'static str> {
        Some(match self {
            Self::JsonTools | Self::Qwen3Coder | Self::Glm47 => "</tool_call>",
            Self::Gemma4 => "<tool_call|>",
            Self::FunctionGemma => "<end_function_call>",
            Self::Longcat => "</longcat_tool_call>",
            Self::KimiK2 => "<|tool_calls_section_end|>",
            Self::KimiK3 => "<|close|>tools<|sep|>",
            Self::Minicpm5 => "</function>",
            Self::MinimaxM2 => "</minimax:tool_call>",
            Self::MuseSpark => "</atem:function_calls>",
            Self::Pythonic => "<|tool_call_end|>",
            Self::Deepseek => "<｜tool▁calls▁end｜>",
            Self::Dsml => "</｜DSML｜function_calls>",
            Self::Mistral | Self::Llama3 | Self::Harmony => return None,
        })
    }

    /// Parses the text between the markers.
    ///
    /// # Errors
    /// The text is no call.
    pub fn parse(self, text: &str, tools: &ToolSchemas) -> Parsed {
        match self {
            Self::JsonTools => json_tools::parse(text),
            Self::Qwen3Coder => qwen3_coder::parse(text, tools),
            Self::Gemma4 => gemma4::parse(text),
            Self::FunctionGemma => function_gemma::parse(text),
            Self::Glm47 => glm47::parse(text, tools),
            Self::Longcat => longcat::parse(text, tools),
            Self::KimiK2 => kimi_k2::parse(text),
            Self::KimiK3 => kimi_k3::parse(text),
            Self::Minicpm5 => minicpm5::parse(text, tools),
            Self::MinimaxM2 => minimax_m2::parse(text, tools),
            Self::Mistral => mistral::parse(text),
            Self::MuseSpark => muse_spark::parse(text),
            Self::Pythonic => pythonic::parse(text),
            Self::Llama3 => llama3::parse(text),
            Self::Deepseek => deepseek::parse(text),
            Self::Dsml => dsml::parse(text),
            Self::Harmony => harmony::parse(text),
        }
    }
}

/// The texts between `open` and the first `close` after it, left to right: `open(.*?)close` in Python.
fn between<'a>(text: &'a str, open: &'a str, close: &'a str) -> impl Iterator<Item = &'a str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let (_, after) = rest.split_once(open)?;
        let (inside, after) = after.split_once(close)?;
        rest = after;
        Some(inside)
    })
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
