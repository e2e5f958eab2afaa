//! From a prompt to token ids: chat template, one beginning-of-sequence token, and the rest of a saved cache.

use anyhow::{Result, bail};
use mlx_bun::tokenizer::Tokenizer;
use serde_json::{Map, Value};

use crate::engine::{Message, Prompt};
use crate::error::Complaint;

/// Stands for the question while the place where it begins is looked for (mlx-lm's `generate`).
const QUERY: &str = "<query>";

/// Turns messages into text.
pub trait Render {
    /// The text of a conversation, ready for a reply, or open at its last message.
    ///
    /// # Errors
    /// The template raises an error, or is broken.
    fn render(
        &self,
        messages: &[Message],
        continue_last: bool,
        variables: &Map<String, Value>,
    ) -> Result<String>;
}

/// How prompts become text.
pub struct PromptText {
    /// The chat template, if there is one.
    pub template: Option<Box<dyn Render>>,
    /// Template variables of the command line; a request's own win.
    pub variables: Map<String, Value>,
}

impl PromptText {
    /// The ids of a prompt. When `continuing` a saved cache, only what follows it: no beginning-of-sequence token
    /// again, and of a conversation the part from the question on.
    ///
    /// # Errors
    /// A conversation without a template for it, a template that fails, text that cannot be encoded.
    pub fn encode(&self, prompt: &Prompt, tokenizer: &Tokenizer, continuing: bool) -> Result<Vec<u32>> {
        let plain = |text: &str| match continuing {
            true => tokenizer.encode(text, false),
            false => tokenizer.encode_prompt(text),
        };
        let (messages, continue_last, own) = match prompt {
            Prompt::Raw(text) => return Ok(plain(text)?),
            Prompt::Chat { messages, continue_last, variables } => (messages, *continue_last, variables),
        };
        let Some(template) = &self.template else {
            return match messages.as_slice() {
                [only] if only.get("role").is_some_and(|role| role == "user") => Ok(plain(content(only)?)?),
                _ => Err(Complaint::failure("the model has no chat template for a conversation")
                    .hint("give one with `--chat-template`, or take `--use-default-chat-template`")
                    .into()),
            };
        };
        let mut variables = self.variables.clone();
        variables.extend(own.clone());
        let render = |messages: &[Message]| template.render(messages, continue_last, &variables);
        let mut text = render(messages)?;
        if continuing {
            text.drain(..question_start(messages, &text, render)?);
        }
        Ok(tokenizer.encode(&text, false)?)
    }
}

/// Where the last message of the user begins in the rendered text: everything before it lies in the saved cache.
fn question_start(
    messages: &[Message],
    text: &str,
    render: impl Fn(&[Message]) -> Result<String>,
) -> Result<usize> {
    let is_user = |message: &&mut Message| message.get("role").is_some_and(|role| role == "user");
    let mut marked = messages.to_vec();
    let Some(question) = marked.iter_mut().rfind(is_user) else {
        bail!("a saved prompt cache is continued by a user's message, and there is none");
    };
    question.insert("content".to_owned(), Value::from(QUERY));
    let marked = render(&marked)?;
    match marked.find(QUERY) {
        Some(start) if marked.rfind(QUERY) == Some(start) && text.get(..start) == marked.get(..start) => {
            Ok(start)
        }
        _ => bail!(
            "the place of the question cannot be found: the template changes it, or `{QUERY}` occurs elsewhere"
        ),
    }
}

fn content(message: &Message) -> Result<&str> {
    match message.get("content").and_then(Value::as_str) {
        Some(text) => Ok(text),
        None => bail!("the model has no chat template, and the message is not plain text"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::message;

    /// `[role]content` for each message, and a header for each variable.
    struct Brackets;

    impl Render for Brackets {
        fn render(&self, messages: &[Message], open: bool, variables: &Map<String, Value>) -> Result<String> {
            let mut text: String = variables.iter().map(|(name, value)| format!("{name}={value};")).collect();
            for message in messages {
                let part = |key: &str| message[key].as_str().unwrap().to_owned();
                text += &format!("[{}]{}", part("role"), part("content"));
            }
            Ok(if open { text } else { text + "[assistant]" })
        }
    }

    fn suffix(messages: &[Message], open: bool, variables: &Map<String, Value>) -> Result<String> {
        let render = |messages: &[Message]| Brackets.render(messages, open, variables);
        let text = render(messages)?;
        let start = question_start(messages, &text, render)?;
        Ok(text[start..].to_owned())
    }

    #[test]
    fn c8_the_question_is_found_with_the_same_variables_and_with_a_prefilled_reply() {
        let variables = Map::from_iter([("enable_thinking".to_owned(), Value::Bool(false))]);
        let messages = [message("system", "s"), message("user", "who?")];
        assert_eq!(suffix(&messages, false, &variables).unwrap(), "who?[assistant]");
        let prefilled = [message("user", "who?"), message("assistant", "It is")];
        assert_eq!(suffix(&prefilled, true, &variables).unwrap(), "who?[assistant]It is");
    }

    #[test]
    fn c8_a_marker_elsewhere_is_an_error() {
        let messages = [message("system", "say <query>"), message("user", "who?")];
        assert!(suffix(&messages, false, &Map::new()).is_err());
        assert!(suffix(&[message("system", "s")], false, &Map::new()).is_err());
    }
}
