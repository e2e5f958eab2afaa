//! What every protocol comes down to: a prompt, how to choose tokens, what the reply must look like.

use mlx_bun::sampling::{Hlg, HlgBase};
use mlx_bun::structured::grammar::Constraint;
use serde_json::{Map, Value};

use super::error::ApiError;
use super::fields::{Fields, object};
use crate::args::range;
use crate::args::sampling::LogitBias;
use crate::engine::{Message, text_bytes};

/// Texts that may end a reply, in OpenAI's protocols.
pub const MOST_STOPS: usize = 4;
/// The same in Anthropic's.
pub const MOST_STOP_SEQUENCES: usize = 16;

/// One request, whatever its protocol.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Request {
    /// What to continue.
    pub prompt: Prompt,
    /// How tokens are chosen and when the reply ends.
    pub settings: Settings,
    /// What the reply must look like.
    pub constraint: Option<Constraint>,
    /// Whether that may never become words in the prompt, whatever `--grammar-fallback` says.
    pub enforced: bool,
    /// Adapters by id; `None` for the server's default.
    pub adapters: Option<Vec<String>>,
}

/// What to continue.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Text as it is.
    Text(String),
    /// A conversation.
    Chat(Chat),
}

impl Prompt {
    /// Bytes of text in it.
    pub fn text_bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Chat(chat) => {
                let messages = chat.messages.iter().flat_map(Map::values);
                messages.chain(&chat.tools).chain(chat.variables.values()).map(text_bytes).sum()
            }
        }
    }
}

impl Default for Prompt {
    fn default() -> Self {
        Self::Chat(Chat::default())
    }
}

/// A conversation for the chat template.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chat {
    /// In OpenAI's form, contents as text.
    pub messages: Vec<Message>,
    /// In OpenAI's form.
    pub tools: Vec<Value>,
    /// Whether and which of them are called.
    pub tool_choice: ToolChoice,
    /// Whether a reply may call several.
    pub parallel_tool_calls: bool,
    /// The template's variables.
    pub variables: Map<String, Value>,
}

/// Whether tools are called.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// As the model likes.
    #[default]
    Auto,
    /// Not at all.
    None,
    /// At least one.
    Required,
    /// This one.
    Named(String),
}

/// How tokens are chosen and when the reply ends; what is absent is the server's to decide.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// Temperature.
    pub temperature: Option<f64>,
    /// Nucleus mass.
    pub top_p: Option<f64>,
    /// Number of candidates.
    pub top_k: Option<i32>,
    /// Least share of the likeliest token's probability.
    pub min_p: Option<f64>,
    /// Candidates that it keeps at least.
    pub min_tokens_to_keep: Option<i32>,
    /// XTC's chance.
    pub xtc_probability: Option<f32>,
    /// XTC's threshold.
    pub xtc_threshold: Option<f32>,
    /// The HLG curve: `Some(None)` turns the server's off.
    pub hlg: Option<Option<Hlg>>,
    /// Repetition penalty with its window.
    pub repetition: (Option<f32>, Option<i32>),
    /// Presence penalty with its window.
    pub presence: (Option<f32>, Option<i32>),
    /// Frequency penalty with its window.
    pub frequency: (Option<f32>, Option<i32>),
    /// Added to logits.
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the draws.
    pub seed: Option<u64>,
    /// Texts that end the reply.
    pub stop: Vec<String>,
    /// Most tokens: `Some(None)` for no limit.
    pub max_tokens: Option<Option<usize>>,
    /// Log-probabilities: how many alternatives.
    pub logprobs: Option<usize>,
    /// Whether to think first.
    pub thinking: Option<bool>,
}

impl Settings {
    /// The fields that all protocols share under the same names.
    ///
    /// # Errors
    /// A field is wrong.
    pub fn read(fields: &Fields) -> Result<Self, ApiError> {
        let penalty = |name: &str, range, window: &str| -> Result<_, ApiError> {
            Ok((fields.number(name, range)?, fields.number(window, range::CONTEXT_SIZE)?))
        };
        Ok(Self {
            temperature: fields.number("temperature", range::TEMPERATURE)?,
            top_p: fields.number("top_p", range::TOP_P)?,
            top_k: top_k(fields)?,
            min_p: fields.number("min_p", range::MIN_P)?,
            min_tokens_to_keep: fields.number("min_tokens_to_keep", range::MIN_TOKENS_TO_KEEP)?,
            xtc_probability: fields.number("xtc_probability", range::XTC_PROBABILITY)?,
            xtc_threshold: fields.number("xtc_threshold", range::XTC_THRESHOLD)?,
            hlg: hlg(fields)?,
            repetition: penalty("repetition_penalty", range::REPETITION_PENALTY, "repetition_context_size")?,
            presence: penalty("presence_penalty", range::ADDITIVE_PENALTY, "presence_context_size")?,
            frequency: penalty("frequency_penalty", range::ADDITIVE_PENALTY, "frequency_context_size")?,
            logit_bias: Vec::new(),
            seed: fields.number("seed", range::SEED)?,
            stop: Vec::new(),
            max_tokens: None,
            logprobs: None,
            thinking: None,
        })
    }

    /// Adds `logit_bias`, which Anthropic's protocol lacks.
    ///
    /// # Errors
    /// It is no object of token ids and numbers.
    pub fn with_logit_bias(mut self, fields: &Fields) -> Result<Self, ApiError> {
        if let Some(value) = fields.get("logit_bias") {
            let bias = LogitBias::from_json(value).map_err(|problem| fields.wrong("logit_bias", problem))?;
            self.logit_bias = bias.0;
        }
        Ok(self)
    }
}

/// Other servers write -1 for no limit.
fn top_k(fields: &Fields) -> Result<Option<i32>, ApiError> {
    match fields.get("top_k") {
        Some(value) if value.as_i64() == Some(-1) => Ok(Some(0)),
        _ => fields.number("top_k", range::TOP_K),
    }
}

/// `hlg`: true, false, or an object with the curve's numbers.
fn hlg(fields: &Fields) -> Result<Option<Option<Hlg>>, ApiError> {
    let usual = Hlg { width: 4.0, shoulder: 4.0, toe: 6.0, pivot_offset: 6.0, base: HlgBase::Top };
    let numbers = match fields.get("hlg") {
        None => return Ok(None),
        Some(Value::Bool(on)) => return Ok(Some(on.then_some(usual))),
        Some(Value::Object(numbers)) => Fields::inside(numbers, "hlg"),
        Some(_) => {
            return Err(fields.wrong("hlg", "must be true, false or an object with the curve's numbers"));
        }
    };
    numbers.only(&["width", "shoulder", "toe", "pivot_offset"])?;
    let number = |name: &str, usual: f32| numbers.number(name, range::HLG).map(|n| n.unwrap_or(usual));
    Ok(Some(Some(Hlg {
        width: number("width", usual.width)?,
        shoulder: number("shoulder", usual.shoulder)?,
        toe: number("toe", usual.toe)?,
        pivot_offset: number("pivot_offset", usual.pivot_offset)?,
        base: usual.base,
    })))
}

/// A limit of tokens by the first of these names that is there; -1 is no limit.
///
/// # Errors
/// It is no number of tokens.
pub fn max_tokens(fields: &Fields, names: &[&str]) -> Result<Option<Option<usize>>, ApiError> {
    let Some(name) = names.iter().find(|name| fields.get(name).is_some()) else { return Ok(None) };
    if fields.get(name).and_then(Value::as_i64) == Some(-1) {
        return Ok(Some(None));
    }
    fields.number(name, range::MAX_TOKENS).map(|limit| limit.map(Some))
}

/// A text or a list of texts; empty ones say nothing and are dropped.
///
/// # Errors
/// It is something else, or there are too many.
pub fn stops(fields: &Fields, name: &str, most: usize) -> Result<Vec<String>, ApiError> {
    let texts = match fields.get(name) {
        None => Vec::new(),
        Some(Value::String(text)) => vec![text.clone()],
        Some(Value::Array(texts)) => {
            let texts: Option<Vec<_>> = texts.iter().map(|text| text.as_str().map(str::to_owned)).collect();
            texts.ok_or_else(|| fields.wrong(name, "must be a text or a list of texts"))?
        }
        Some(_) => return Err(fields.wrong(name, "must be a text or a list of texts")),
    };
    match texts.len() > most {
        true => Err(fields.wrong(name, format!("has {} texts; at most {most} are taken", texts.len()))),
        false => Ok(texts.into_iter().filter(|text| !text.is_empty()).collect()),
    }
}

/// `adapter`, `a+b` for a stack, `none` for the base model; `adapters` is a list of the same, or mlx-lm's text.
///
/// # Errors
/// It is no text.
pub fn adapters(fields: &Fields) -> Result<Option<Vec<String>>, ApiError> {
    let split = |text: &str| -> Vec<String> {
        match text {
            "none" | "" => Vec::new(),
            text => text.split('+').map(str::to_owned).collect(),
        }
    };
    if let Some(text) = fields.text("adapter")? {
        return Ok(Some(split(text)));
    }
    match fields.get("adapters") {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(split(text))),
        Some(Value::Array(ids)) => {
            let ids: Option<_> = ids.iter().map(|id| id.as_str().map(str::to_owned)).collect();
            ids.map(Some).ok_or_else(|| fields.wrong("adapters", "must be a list of adapters' ids"))
        }
        Some(_) => Err(fields.wrong("adapters", "must be an adapter's id or a list of them")),
    }
}

/// `chat_template_kwargs` and `reasoning_effort`: the template's variables, and whether to think first.
///
/// # Errors
/// A field is wrong, or asks for another template.
pub fn template_variables(fields: &Fields) -> Result<(Map<String, Value>, Option<bool>), ApiError> {
    const REFUSED: &str = "cannot be set by a request; the server's flag `--chat-template` does that";
    fields.refuse("chat_template", REFUSED)?;
    let mut variables = fields.object("chat_template_kwargs")?.cloned().unwrap_or_default();
    Fields::inside(&variables, "chat_template_kwargs").refuse("chat_template", REFUSED)?;
    let effort = fields.text("reasoning_effort")?;
    let asked = Fields::inside(&variables, "chat_template_kwargs").boolean("enable_thinking")?;
    let thinking = asked.or(effort.map(|effort| effort != "none"));
    if let Some(effort) = effort {
        check_effort(effort).map_err(|problem| fields.wrong("reasoning_effort", problem))?;
        variables.entry("reasoning_effort").or_insert_with(|| Value::from(effort));
    }
    Ok((variables, thinking))
}

/// Refuses a word that is no level of effort.
///
/// # Errors
/// The words that are.
pub fn check_effort(effort: &str) -> Result<(), &'static str> {
    match effort {
        "none" | "minimal" | "low" | "medium" | "high" | "xhigh" | "max" => Ok(()),
        _ => Err("must be none, minimal, low, medium or high"),
    }
}

/// `messages` in OpenAI's form: roles that templates know, contents as text.
///
/// # Errors
/// There are none, or one is no message of text.
pub fn messages(fields: &Fields) -> Result<Vec<Message>, ApiError> {
    let list = fields.list("messages")?.ok_or_else(|| fields.wrong("messages", "is missing"))?;
    if list.is_empty() {
        return Err(fields.wrong("messages", "is empty; send at least one message"));
    }
    list.iter().enumerate().map(|(index, value)| message(value, &format!("messages[{index}]"))).collect()
}

fn message(value: &Value, at: &str) -> Result<Message, ApiError> {
    let mut message = object(value, at)?.clone();
    let role = Fields::inside(object(value, at)?, at).text("role")?;
    match role {
        None | Some("") => return Err(ApiError::field(&format!("{at}.role"), "is missing")),
        Some("developer") => _ = message.insert("role".to_owned(), Value::from("system")),
        Some(_) => {}
    }
    let content = match message.get("content") {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => text_of_parts(parts, &format!("{at}.content"))?,
        Some(_) => {
            return Err(ApiError::field(&format!("{at}.content"), "must be a text or a list of parts"));
        }
    };
    message.insert("content".to_owned(), Value::from(content));
    // Templates know one of the two names.
    let reasoning = ["reasoning_content", "reasoning"].iter().find_map(|name| message.get(*name)?.as_str());
    if let Some(reasoning) = reasoning.map(str::to_owned) {
        message.insert("reasoning_content".to_owned(), Value::from(reasoning));
    }
    check_calls(&message, at)?;
    Ok(message)
}

/// Refuses calls in the history that no template can print.
fn check_calls(message: &Message, at: &str) -> Result<(), ApiError> {
    let Some(calls) = Fields::inside(message, at).list("tool_calls")? else { return Ok(()) };
    for (index, call) in calls.iter().enumerate() {
        let function = call.get("function").unwrap_or(call);
        if function.get("name").and_then(Value::as_str).is_none_or(str::is_empty) {
            return Err(ApiError::field(&format!("{at}.tool_calls[{index}].function.name"), "is missing"));
        }
    }
    Ok(())
}

/// The text of content parts, joined.
///
/// # Errors
/// A part is no text.
pub fn text_of_parts(parts: &[Value], at: &str) -> Result<String, ApiError> {
    let mut text = String::new();
    for (index, part) in parts.iter().enumerate() {
        text.push_str(match part {
            Value::String(text) => text,
            part => part_text(part, &format!("{at}[{index}]"))?,
        });
    }
    Ok(text)
}

fn part_text<'a>(part: &'a Value, at: &str) -> Result<&'a str, ApiError> {
    let kind = part.get("type").and_then(Value::as_str).unwrap_or_default();
    if ["image", "audio", "video", "file"].iter().any(|medium| kind.contains(medium)) {
        return Err(no_media(kind, at));
    }
    let text = ["text", "refusal"].iter().find_map(|name| part.get(*name)?.as_str());
    text.ok_or_else(|| ApiError::field(at, "must be a text part: {\"type\": \"text\", \"text\": \"...\"}"))
}

/// The refusal of a picture or a sound.
pub fn no_media(kind: &str, at: &str) -> ApiError {
    ApiError::field(at, format!("is of type `{kind}`; this server takes text only"))
        .code("unsupported_content")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn body(value: Value) -> Map<String, Value> {
        value.as_object().unwrap().clone()
    }

    #[test]
    fn s3_every_setting_is_read() {
        let body = body(json!({
            "temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0.1, "xtc_probability": 0, "xtc_threshold": 0.2,
            "repetition_penalty": 1.1, "repetition_context_size": 5, "presence_penalty": -1, "frequency_penalty": 2,
            "logit_bias": {"7": -100}, "seed": 3, "hlg": {"width": 1}, "unknown": {"a": 1},
        }));
        let fields = Fields::new(&body);
        let settings = Settings::read(&fields).unwrap().with_logit_bias(&fields).unwrap();
        assert_eq!((settings.temperature, settings.top_p, settings.top_k), (Some(0.0), Some(1.0), Some(0)));
        assert_eq!((settings.xtc_probability, settings.seed), (Some(0.0), Some(3)));
        assert_eq!(settings.repetition, (Some(1.1), Some(5)));
        assert_eq!((settings.presence.0, settings.frequency.0), (Some(-1.0), Some(2.0)));
        assert_eq!(settings.logit_bias, [(7, -100.0)]);
        assert_eq!(settings.hlg.unwrap().unwrap().width, 1.0);
    }

    #[test]
    fn wrong_settings_are_named() {
        let message = |value: Value| {
            let body = body(value);
            let fields = Fields::new(&body);
            Settings::read(&fields).and_then(|s| s.with_logit_bias(&fields)).unwrap_err().message
        };
        assert_eq!(
            message(json!({"logit_bias": {"1": null}})),
            "`logit_bias` the value of token 1 is not a number"
        );
        assert_eq!(message(json!({"temperature": "hot"})), "`temperature` must be a number in [0, 5]");
        assert_eq!(
            message(json!({"seed": -1})),
            "`seed` must be a whole number in [0, 18446744073709551615]"
        );
        assert_eq!(
            message(json!({"hlg": 3})),
            "`hlg` must be true, false or an object with the curve's numbers"
        );
    }

    #[test]
    fn limits_and_stops() {
        let parse = |value: Value| {
            let body = body(value);
            max_tokens(&Fields::new(&body), &["max_completion_tokens", "max_tokens"])
        };
        assert_eq!(parse(json!({})).unwrap(), None);
        assert_eq!(parse(json!({"max_tokens": 5, "max_completion_tokens": 7})).unwrap(), Some(Some(7)));
        assert_eq!(parse(json!({"max_tokens": -1})).unwrap(), Some(None));
        assert!(parse(json!({"max_tokens": true})).is_err());
        assert!(parse(json!({"max_tokens": 0})).is_err());
        let parse = |value: Value| {
            let body = body(json!({"stop": value}));
            stops(&Fields::new(&body), "stop", MOST_STOPS)
        };
        assert_eq!(parse(json!("a")).unwrap(), ["a"]);
        assert_eq!(parse(json!(["a", ""])).unwrap(), ["a"]);
        assert_eq!(parse(json!(null)).unwrap(), [""; 0]);
        assert!(parse(json!(["a", 1])).is_err());
        assert_eq!(
            parse(json!(["a", "b", "c", "d", "e"])).unwrap_err().message,
            "`stop` has 5 texts; at most 4 are taken"
        );
    }

    #[test]
    fn x4_adapters_are_ids() {
        let parse = |value: Value| adapters(&Fields::new(&body(value))).unwrap();
        assert_eq!(parse(json!({})), None);
        assert_eq!(parse(json!({"adapter": "none"})), Some(vec![]));
        assert_eq!(parse(json!({"adapter": "a+b"})), Some(vec!["a".to_owned(), "b".to_owned()]));
        assert_eq!(parse(json!({"adapters": ["a"]})), Some(vec!["a".to_owned()]));
    }

    #[test]
    fn x5_a_template_in_a_request_is_refused() {
        let parse = |value: Value| template_variables(&Fields::new(&body(value)));
        assert!(
            parse(json!({"chat_template": "{{ 1 }}"})).unwrap_err().message.contains("`--chat-template`")
        );
        assert!(parse(json!({"chat_template_kwargs": {"chat_template": "x"}})).is_err());
        let (variables, thinking) =
            parse(json!({"chat_template_kwargs": {"enable_thinking": false}, "reasoning_effort": "high"}))
                .unwrap();
        assert_eq!((thinking, variables.get("reasoning_effort")), (Some(false), Some(&json!("high"))));
        assert_eq!(parse(json!({"reasoning_effort": "none"})).unwrap().1, Some(false));
        assert!(parse(json!({"reasoning_effort": "some"})).is_err());
    }

    #[test]
    fn messages_become_plain() {
        let parse = |value: Value| messages(&Fields::new(&body(json!({"messages": value}))));
        let read = parse(json!([
            {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "input_text", "text": "brief"}]},
            {"role": "assistant", "content": null, "reasoning": "hm", "tool_calls": [{"function": {"name": "f"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "2"},
        ]));
        let read = read.unwrap();
        assert_eq!(Value::Object(read[0].clone()), json!({"role": "system", "content": "be brief"}));
        assert_eq!((&read[1]["content"], &read[1]["reasoning_content"]), (&json!(""), &json!("hm")));
        assert_eq!(read[2]["tool_call_id"], "1");
        let message = |value: Value| parse(value).unwrap_err().message;
        assert_eq!(message(json!([])), "`messages` is empty; send at least one message");
        assert_eq!(message(json!([1])), "`messages[0]` must be an object");
        assert_eq!(message(json!([{"content": "x"}])), "`messages[0].role` is missing");
        assert_eq!(
            message(json!([{"role": "user", "content": [{"type": "image_url"}]}])),
            "`messages[0].content[0]` is of type `image_url`; this server takes text only"
        );
        assert!(
            message(json!([{"role": "assistant", "tool_calls": [{}]}]))
                .contains("tool_calls[0].function.name")
        );
    }
}
