//! How messages become a prompt.

use std::path::Path;

use mlx_bun::checkpoint::json;
use mlx_bun::tokenizer::chat_template::RESERVED;
use serde_json::{Map, Value};

use super::{Truth, Warnings};
use crate::error::Complaint;

/// Flags of the chat template.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Chat template")]
pub struct TemplateArgs {
    /// What the model is told before the conversation
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub system_prompt: Option<String>,

    /// Let a reasoning model think first, or not; the template's variable `enable_thinking`
    #[arg(long, value_name = "true|false", value_enum)]
    pub thinking: Option<Truth>,

    /// Variables for the template, as a JSON object
    #[arg(
        long,
        value_name = "JSON",
        visible_aliases = ["chat-template-args", "chat-template-kwargs"],
        value_parser = json_object, hide_short_help = true)]
    pub chat_template_config: Option<Map<String, Value>>,

    /// A Jinja template instead of the model's: a file, or the template's text
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub chat_template: Option<String>,

    /// Use the ChatML template when the model ships none
    #[arg(long, hide_short_help = true)]
    pub use_default_chat_template: bool,
}

/// A JSON object, for clap.
fn json_object(text: &str) -> Result<Map<String, Value>, String> {
    match serde_json::from_str(text) {
        Ok(Value::Object(map)) => match map.keys().find(|name| RESERVED.contains(&name.as_str())) {
            Some(name) => Err(format!("sets `{name}`, which the request itself sets")),
            None => Ok(map),
        },
        Ok(_) => Err("must be a JSON object, like '{\"enable_thinking\": false}'".to_owned()),
        Err(error) => Err(format!("is {}", json::problem(&error))),
    }
}

/// Which template, and what it is told.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Template {
    /// Source that replaces the model's own template.
    pub source: Option<String>,
    /// ChatML for a model without a template.
    pub default_to_chatml: bool,
    /// Variables beside the messages.
    pub variables: Map<String, Value>,
}

impl TemplateArgs {
    /// Reads the template file and gathers the variables; `--thinking` wins over the JSON.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn resolve(&self) -> Result<Template, Complaint> {
        let mut variables = self.chat_template_config.clone().unwrap_or_default();
        if let Some(thinking) = self.thinking {
            variables.insert("enable_thinking".to_owned(), Value::Bool(thinking.is_true()));
        }
        let source = self.chat_template.as_deref().map(template_source).transpose()?;
        Ok(Template { source, default_to_chatml: self.use_default_chat_template, variables })
    }

    /// Warns about flags that a raw prompt leaves without effect.
    pub fn warn_unused(&self, warnings: &mut Warnings) {
        let given = [
            ("--system-prompt", self.system_prompt.is_some()),
            ("--thinking", self.thinking.is_some()),
            ("--chat-template-config", self.chat_template_config.is_some()),
            ("--chat-template", self.chat_template.is_some()),
            ("--use-default-chat-template", self.use_default_chat_template),
        ];
        for (flag, _) in given.iter().filter(|(_, given)| *given) {
            warnings.push(format!("`{flag}` does nothing with `--raw`"));
        }
    }
}

/// mlx_lm.server takes the text itself under this name, so both are understood.
fn template_source(argument: &str) -> Result<String, Complaint> {
    if argument.contains("{{") || argument.contains("{%") {
        return Ok(argument.to_owned());
    }
    std::fs::read_to_string(Path::new(argument))
        .map_err(|error| Complaint::failure(format!("cannot read the chat template `{argument}`: {error}")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn thinking_wins_over_the_json() {
        let args = TemplateArgs {
            thinking: Some(Truth::False),
            chat_template_config: Some(json_object(r#"{"enable_thinking": true, "date": "today"}"#).unwrap()),
            ..Default::default()
        };
        let variables = args.resolve().unwrap().variables;
        assert_eq!(Value::Object(variables), json!({"enable_thinking": false, "date": "today"}));
    }

    #[test]
    fn a_template_is_a_file_or_the_text_itself() {
        assert_eq!(template_source("{{ messages }}").unwrap(), "{{ messages }}");
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "plain").unwrap();
        assert_eq!(template_source(file.path().to_str().unwrap()).unwrap(), "plain");
        let error = template_source("no/such/file").unwrap_err().to_string();
        assert!(error.starts_with("cannot read the chat template `no/such/file`"), "{error}");
    }
}
