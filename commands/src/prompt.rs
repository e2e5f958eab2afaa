//! From messages to the text of a prompt.

use std::sync::Arc;

use mlx_bun::tokenizer::Tokenizer;
use mlx_bun::tokenizer::chat_template::{
    ChatTemplates, Limits, RenderRequest, TemplateError, flatten_text_content, parse_tool_arguments,
};
use serde_json::{Map, Value};

use crate::args::template::Template;
use crate::engine::Message;
use crate::error::Complaint;

/// Stands for the user's last message while the prompt before it is measured (mlx-lm's generate.py).
const QUERY: &str = "<query>";

/// ChatML, for models without a template whose user asked for one.
const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + \
     '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// What a template may use up: enough to look at all of a long prompt a few times, so that it is never blamed for
/// the prompt's length.
fn limits(text_bytes: usize) -> Limits {
    let usual = Limits::default();
    Limits { fuel: usual.fuel + text_bytes as u64, output_bytes: usual.output_bytes + text_bytes }
}

/// Renders conversations with a model's template, or the one that took its place.
pub struct Renderer {
    templates: Arc<ChatTemplates>,
    special_tokens: Map<String, Value>,
    variables: Map<String, Value>,
}

impl Renderer {
    /// A renderer over a model's templates and what the command line says about them.
    pub fn new(templates: impl Into<Arc<ChatTemplates>>, tokenizer: &Tokenizer, options: &Template) -> Self {
        let templates = templates.into();
        let templates = match &options.source {
            Some(source) => Arc::new(ChatTemplates::from_source(source)),
            None if templates.is_empty() && options.default_to_chatml => {
                Arc::new(ChatTemplates::from_source(CHATML))
            }
            None => templates,
        };
        let tokens = tokenizer.special_tokens().iter();
        let special_tokens = tokens.map(|(role, token)| (role.to_owned(), Value::from(token))).collect();
        // As mlx-lm: a model that can think is asked to, unless told otherwise.
        let mut variables = options.variables.clone();
        variables.entry("enable_thinking").or_insert_with(|| Value::Bool(tokenizer.has_thinking()));
        Self { templates, special_tokens, variables }
    }

    /// Whether all templates can be read, which is otherwise known when the first conversation comes.
    ///
    /// # Errors
    /// What is wrong with one.
    pub fn check(&self) -> Result<(), TemplateError> {
        if self.templates.is_empty() {
            return Ok(());
        }
        [false, true]
            .into_iter()
            .try_for_each(|with_tools| self.templates.select(None, with_tools).map(|_| ()))
    }

    /// The source of the template that conversations with tools are rendered with; `None` without a template.
    pub fn source(&self) -> Option<&str> {
        self.templates.source(None, true).ok()
    }

    /// The prompt for a conversation in which these tools are offered. With `continue_last` it ends inside the last message, else with the header
    /// of the reply.
    ///
    /// # Errors
    /// There is no template, or it fails.
    pub fn render(
        &self,
        messages: &[Message],
        tools: &[Value],
        continue_last: bool,
        variables: &Map<String, Value>,
    ) -> anyhow::Result<String> {
        if self.templates.is_empty() {
            return Err(Complaint::failure("the model has no chat template")
                .hint("use --raw to give the prompt as it is, or --use-default-chat-template for ChatML")
                .into());
        }
        let tools = (!tools.is_empty()).then(|| Value::Array(tools.to_vec()));
        let texts = messages.iter().flat_map(Map::values).filter_map(Value::as_str).map(str::len);
        let text_bytes = texts.sum::<usize>() + tools.as_ref().map_or(0, |tools| tools.to_string().len());
        let mut messages = Value::Array(messages.iter().cloned().map(Value::Object).collect());
        parse_tool_arguments(&mut messages);
        flatten_text_content(&mut messages)?;
        let mut extra = self.variables.clone();
        extra.extend(variables.clone());
        let request = RenderRequest {
            add_generation_prompt: !continue_last,
            continue_final_message: continue_last.then_some("content"),
            tools: tools.as_ref(),
            special_tokens: Some(&self.special_tokens),
            extra: Some(&extra),
            limits: limits(text_bytes),
            ..RenderRequest::new(&messages)
        };
        Ok(self.templates.select(None, tools.is_some())?.render(&request)?)
    }

    /// The prompt from the text of the user's last message on: what follows a saved cache that holds the rest.
    ///
    /// # Errors
    /// As for [`Renderer::render`], and when the place cannot be told.
    pub fn render_suffix(
        &self,
        messages: &[Message],
        continue_last: bool,
        variables: &Map<String, Value>,
    ) -> anyhow::Result<String> {
        let unclear = || {
            Complaint::failure(format!(
                "the prompt after the cache cannot be told: `{QUERY}` occurs in the template"
            ))
        };
        let prompt = self.render(messages, &[], continue_last, variables)?;
        let mut probe = messages.to_vec();
        // Not simply the last message: `--prefill-response` comes after the question.
        let question =
            probe.iter_mut().rfind(|message| message.get("role").is_some_and(|role| role == "user"));
        if let Some(question) = question {
            question.insert("content".to_owned(), Value::from(QUERY));
        }
        let probe = self.render(&probe, &[], continue_last, variables)?;
        let start = probe.find(QUERY).ok_or_else(unclear)?;
        if probe[start + QUERY.len()..].contains(QUERY) || !prompt.is_char_boundary(start) {
            return Err(unclear().into());
        }
        match prompt.split_at_checked(start) {
            Some((head, tail)) if head == &probe[..start] => Ok(tail.to_owned()),
            _ => Err(unclear().into()),
        }
    }
}
