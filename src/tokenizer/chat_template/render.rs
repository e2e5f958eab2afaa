//! Renders a conversation with a template, as transformers' `render_jinja_template` does.

use std::io;
use std::ops::Range;

use chrono::NaiveDateTime;
use minijinja::{Environment, Value};
use serde_json::{Map, Value as Json};

use super::environment::{environment, set_clock};
use super::error::{TemplateError, from_minijinja};
use super::python_str::{strip, strip_end};
use super::rewrite::{GENERATION_BEGIN, GENERATION_END, rewrite};
use super::values::from_json;

/// The name under which an environment holds its template.
const TEMPLATE: &str = "chat_template";

/// What transformers appends to the message to be continued, to find its end in the prompt.
const CONTINUE_TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// Variables that the request's own fields set; `chat_template_kwargs` cannot.
pub const RESERVED: [&str; 6] =
    ["add_generation_prompt", "chat_template", "continue_final_message", "documents", "messages", "tools"];

/// What a render may use up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Steps of the template's execution: an operation is one step, and so are 64 bytes of text made or copied.
    /// Long conversations get more, 500 steps and their share of a square term a message.
    pub fuel: u64,
    /// Bytes of prompt.
    pub output_bytes: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { fuel: 500_000, output_bytes: 16 << 20 }
    }
}

impl Limits {
    /// Templates look at each message a few times, and some look at all messages for each.
    fn fuel_for(&self, messages: usize) -> u64 {
        let messages = messages as u64;
        let square = messages.saturating_mul(messages).saturating_mul(8);
        self.fuel.saturating_add(messages.saturating_mul(500)).saturating_add(square.min(5_000_000))
    }
}

/// One conversation to render.
#[derive(Debug, Clone)]
pub struct RenderRequest<'a> {
    /// The conversation: a JSON array of message objects, at least one.
    pub messages: &'a Json,
    /// Tool definitions, a JSON array of objects. `None` and an empty array differ: a template sees `none` or `[]`.
    pub tools: Option<&'a Json>,
    /// Documents for retrieval, a JSON array of objects.
    pub documents: Option<&'a Json>,
    /// Whether to end the prompt with the header of an assistant message.
    pub add_generation_prompt: bool,
    /// The field of the last message to leave open so that the model continues it, usually `content`.
    pub continue_final_message: Option<&'a str>,
    /// `bos_token`, `eos_token` and whatever other special tokens the tokenizer names, as variables.
    pub special_tokens: Option<&'a Map<String, Json>>,
    /// Further variables (`chat_template_kwargs`, for instance `enable_thinking`); they win over special tokens.
    pub extra: Option<&'a Map<String, Json>>,
    /// The time that `strftime_now` formats; `None` is the local time.
    pub now: Option<NaiveDateTime>,
    /// What the render may use up.
    pub limits: Limits,
}

impl<'a> RenderRequest<'a> {
    /// A request with only messages.
    pub fn new(messages: &'a Json) -> RenderRequest<'a> {
        RenderRequest {
            messages,
            tools: None,
            documents: None,
            add_generation_prompt: false,
            continue_final_message: None,
            special_tokens: None,
            extra: None,
            now: None,
            limits: Limits::default(),
        }
    }
}

/// A template, compiled.
#[derive(Debug)]
pub struct ChatTemplate {
    name: String,
    source: String,
    environment: Environment<'static>,
}

impl ChatTemplate {
    /// Compiles a template.
    ///
    /// # Errors
    ///
    /// [`TemplateError::Syntax`] with the line when the template is not valid Jinja, loads other templates, or is
    /// larger or nests deeper than any sensible template.
    pub fn new(name: &str, source: &str) -> Result<ChatTemplate, TemplateError> {
        let rewritten = rewrite(source).map_err(|error| error.named(name))?;
        let mut environment = environment().clone();
        environment
            .add_template_owned(TEMPLATE, rewritten)
            .map_err(|error| from_minijinja(name, 0, &error))?;
        Ok(ChatTemplate { name: name.to_owned(), source: source.to_owned(), environment })
    }

    /// The template's name, `default` when the model has only one.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The template's text as the model ships it.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders a conversation to the prompt, byte for byte what transformers' `apply_chat_template` gives.
    ///
    /// The prompt contains its special tokens: encode it without adding more.
    ///
    /// # Errors
    ///
    /// [`TemplateError::Raised`] when the template refuses the conversation, [`TemplateError::Render`] when it fails,
    /// [`TemplateError::OutOfFuel`] and [`TemplateError::OutputTooLong`] when it goes past the limits,
    /// [`TemplateError::InvalidRequest`] when the request is malformed or the last message cannot be continued.
    pub fn render(&self, request: &RenderRequest) -> Result<String, TemplateError> {
        let Some(field) = request.continue_final_message else {
            return self.execute(request, request.messages, None);
        };
        if request.add_generation_prompt {
            return Err(invalid(
                "the last message cannot be continued and followed by a generation prompt at once",
            ));
        }
        let (messages, text) = self.mark_final_message(request.messages, field)?;
        let mut prompt = self.execute(request, &messages, None)?;
        let tag = CONTINUE_TAG.trim_end();
        let position = match prompt.rfind(tag) {
            Some(position) if prompt.contains(strip(&text, None)) => position,
            _ => {
                return Err(invalid(format!(
                    "the chat template `{}` drops part of the last message, so it cannot be continued",
                    self.name
                )));
            }
        };
        let keeps_spacing = prompt.get(position..).is_some_and(|tail| tail.starts_with(CONTINUE_TAG));
        prompt.truncate(position);
        if !keeps_spacing {
            prompt.truncate(strip_end(&prompt, None).len());
        }
        Ok(prompt)
    }

    /// Renders a conversation and tells which byte ranges of the prompt stand inside `{% generation %}` blocks,
    /// that is, what a model is to learn to write.
    ///
    /// # Errors
    ///
    /// As [`ChatTemplate::render`]; also when the template changes its output after a generation block ended.
    pub fn render_with_generation(
        &self,
        request: &RenderRequest,
    ) -> Result<(String, Vec<Range<usize>>), TemplateError> {
        if request.continue_final_message.is_some() {
            return Err(invalid("generation spans cannot be had of a message that is to be continued"));
        }
        const BEGIN: &str = "\u{f0000}generation\u{f0001}";
        const END: &str = "\u{f0001}generation\u{f0000}";
        let prompt = self.execute(request, request.messages, None)?;
        let marked = self.execute(request, request.messages, Some((BEGIN, END)))?;
        let mut plain = String::with_capacity(prompt.len());
        let mut spans = Vec::new();
        let mut rest = marked.as_str();
        while let Some((before, after)) = rest.split_once(BEGIN) {
            plain.push_str(before);
            let start = plain.len();
            let (inside, after) = after.split_once(END).unwrap_or((after, ""));
            plain.push_str(inside);
            spans.push(start..plain.len());
            rest = after;
        }
        plain.push_str(rest);
        if plain != prompt {
            return Err(invalid(format!(
                "the chat template `{}` rewrites its generation blocks, so they cannot be located",
                self.name
            )));
        }
        Ok((prompt, spans))
    }

    /// Appends the tag to the text to be continued; returns the messages and that text.
    fn mark_final_message(&self, messages: &Json, field: &str) -> Result<(Json, String), TemplateError> {
        let mut messages = messages.clone();
        let last = messages.as_array_mut().and_then(|messages| messages.last_mut());
        let last = last.ok_or_else(|| invalid("the conversation has no messages"))?;
        let Some(value) = last.get_mut(field).filter(|value| !value.is_null()) else {
            return Err(invalid(format!("the last message has no `{field}` to continue")));
        };
        if !self.source.contains(field) {
            return Err(invalid(format!(
                "the chat template `{}` has no field `{field}` to continue",
                self.name
            )));
        }
        let text = match value {
            Json::Array(parts) => parts.iter_mut().rev().find_map(|part| part.get_mut("text")),
            other => Some(other),
        };
        let Some(Json::String(text)) = text else {
            return Err(invalid(format!("the `{field}` of the last message has no text to continue")));
        };
        let original = text.clone();
        text.push_str(CONTINUE_TAG);
        Ok((messages, original))
    }

    fn execute(
        &self,
        request: &RenderRequest,
        messages: &Json,
        markers: Option<(&str, &str)>,
    ) -> Result<String, TemplateError> {
        let count = objects(messages, "messages")?;
        if count == 0 {
            return Err(invalid("the conversation has no messages"));
        }
        let mut variables: Vec<(String, Value)> = Vec::new();
        let mut set = |name: &str, value: Value| {
            variables.retain(|(known, _)| known != name);
            variables.push((name.to_owned(), value));
        };
        let convert = |name: &str, json: &Json| {
            from_json(json)
                .map_err(|error| invalid(format!("`{name}`: {}", error.detail().unwrap_or_default())))
        };
        for (name, value) in request.special_tokens.into_iter().flatten() {
            set(name, convert(name, value)?);
        }
        for (name, value) in request.extra.into_iter().flatten() {
            if RESERVED.contains(&name.as_str()) {
                return Err(invalid(format!("`{name}` cannot be set through the chat template's variables")));
            }
            set(name, convert(name, value)?);
        }
        set("messages", convert("messages", messages)?);
        for (name, value) in [("tools", request.tools), ("documents", request.documents)] {
            set(
                name,
                match value {
                    Some(json) => {
                        objects(json, name)?;
                        convert(name, json)?
                    }
                    None => Value::from(()),
                },
            );
        }
        set("add_generation_prompt", Value::from(request.add_generation_prompt));
        if let Some((begin, end)) = markers {
            set(GENERATION_BEGIN, Value::from(begin));
            set(GENERATION_END, Value::from(end));
        }

        let fuel = request.limits.fuel_for(count);
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(fuel));
        if request.now.is_some() {
            set_clock(&mut environment, request.now);
        }
        let mut output =
            BoundedOutput { bytes: Vec::new(), limit: request.limits.output_bytes, exceeded: false };
        let rendered = environment.get_template(TEMPLATE).and_then(|template| {
            template.render_captured_to(Value::from_pairs(variables), &mut output).map(drop)
        });
        if output.exceeded {
            return Err(TemplateError::OutputTooLong { template: self.name.clone(), limit: output.limit });
        }
        rendered.map_err(|error| from_minijinja(&self.name, fuel, &error))?;
        String::from_utf8(output.bytes).map_err(|_| invalid("the prompt is not valid UTF-8"))
    }
}

fn invalid(message: impl Into<String>) -> TemplateError {
    TemplateError::InvalidRequest(message.into())
}

/// Checks that a JSON value is an array of objects and counts them.
fn objects(json: &Json, name: &str) -> Result<usize, TemplateError> {
    let items = json.as_array().ok_or_else(|| invalid(format!("`{name}` is not a list")))?;
    match items.iter().position(|item| !item.is_object()) {
        Some(index) => Err(invalid(format!("`{name}[{index}]` is not an object"))),
        None => Ok(items.len()),
    }
}

/// Collects the prompt up to a number of bytes.
struct BoundedOutput {
    bytes: Vec<u8>,
    limit: usize,
    exceeded: bool,
}

impl io::Write for BoundedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > self.limit {
            self.exceeded = true;
            return Err(io::Error::other("the prompt is too long"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
