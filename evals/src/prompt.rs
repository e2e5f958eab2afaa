//! From a question to token ids.

use std::sync::Arc;

use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::tokenizer::chat_template::{
    ChatTemplates, Limits, RenderRequest, TemplateError, flatten_text_content,
};
use mlx_bun::tokenizer::{Tokenizer, TokenizerError};
use serde_json::{Map, Value, json};

/// Set to 1: models think before they answer.
pub const MLX_BUN_EVAL_THINK: &str = "MLX_BUN_EVAL_THINK";

/// Whether the environment asks for thinking.
pub fn thinking_wanted(environment: &Environment) -> bool {
    environment.get(MLX_BUN_EVAL_THINK).is_some_and(|value| value != "0")
}

/// What a model is asked.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// One turn of a user, for the chat template; as text where the model has none.
    Chat {
        /// What the user says.
        user: String,
        /// Functions that are offered, in OpenAI's form.
        tools: Vec<Value>,
    },
    /// Text that the model continues.
    Raw(String),
}

impl Prompt {
    /// A user's turn without functions.
    pub fn chat(user: impl Into<String>) -> Self {
        Self::Chat { user: user.into(), tools: Vec::new() }
    }
}

/// Why a question cannot be put.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    /// The chat template.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// Makes prompts for one model.
pub struct Prompter {
    tokenizer: Arc<Tokenizer>,
    templates: Arc<ChatTemplates>,
    special_tokens: Map<String, Value>,
    thinking: bool,
}

impl Prompter {
    /// For a model; `thinking` is the template's `enable_thinking`.
    pub fn new(tokenizer: Arc<Tokenizer>, templates: Arc<ChatTemplates>, thinking: bool) -> Self {
        let tokens = tokenizer.special_tokens().iter();
        let special_tokens = tokens.map(|(role, token)| (role.to_owned(), Value::from(token))).collect();
        Self { tokenizer, templates, special_tokens, thinking }
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// The template that conversations with functions are rendered with.
    pub fn template_source(&self) -> Option<&str> {
        self.templates.source(None, true).ok()
    }

    /// Whether the chat template says something about functions it is given.
    pub fn offers_tools(&self) -> bool {
        !self.templates.is_empty() && self.template_source().is_some_and(|source| source.contains("tools"))
    }

    /// Token ids: a chat's text as the template wrote it, raw text with the tokenizer's own special tokens.
    ///
    /// # Errors
    /// The template fails.
    pub fn encode(&self, prompt: &Prompt) -> Result<Vec<u32>, PromptError> {
        match prompt {
            Prompt::Raw(text) => Ok(self.tokenizer.encode_prompt(text)?),
            Prompt::Chat { user, .. } if self.templates.is_empty() => {
                Ok(self.tokenizer.encode_prompt(user)?)
            }
            Prompt::Chat { user, tools } => Ok(self.tokenizer.encode(&self.render(user, tools)?, false)?),
        }
    }

    fn render(&self, user: &str, tools: &[Value]) -> Result<String, PromptError> {
        let mut messages = json!([{"role": "user", "content": user}]);
        flatten_text_content(&mut messages)?;
        let tools = (!tools.is_empty()).then(|| Value::Array(tools.to_vec()));
        let extra = Map::from_iter([("enable_thinking".to_owned(), Value::Bool(self.thinking))]);
        let bytes = user.len() + tools.as_ref().map_or(0, |tools| tools.to_string().len());
        let usual = Limits::default();
        let request = RenderRequest {
            add_generation_prompt: true,
            tools: tools.as_ref(),
            special_tokens: Some(&self.special_tokens),
            extra: Some(&extra),
            // A long question is not the template's fault.
            limits: Limits { fuel: usual.fuel + bytes as u64, output_bytes: usual.output_bytes + bytes },
            ..RenderRequest::new(&messages)
        };
        Ok(self.templates.select(None, tools.is_some())?.render(&request)?)
    }
}

/// The reply after its reasoning: what follows the first `</think>`; nothing if it never ends.
pub fn without_thinking(reply: &str) -> &str {
    match reply.split_once("</think>") {
        Some((_, answer)) => answer,
        None if reply.trim_start().starts_with("<think>") => "",
        None => reply,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasoning_is_no_answer() {
        assert_eq!(without_thinking("<think>1</think>2</think>3"), "2</think>3");
        assert_eq!(without_thinking("1</think>2"), "2");
        assert_eq!(without_thinking(" <think>1"), "");
        assert_eq!(without_thinking("1"), "1");
    }
}
