//! `--prompt-file`: one JSON object a line. Every line is checked before the first is answered.

use std::path::Path;

use mlx_bun::checkpoint::json;
use serde_json::{Map, Value};

use crate::args::per_prompt::{Flags, PerPrompt};
use crate::args::prompt::{check_length, read_stdin};
use crate::engine::Message;
use crate::error::Complaint;
use crate::printer::Printer;

/// Some editors begin a file with it.
const BYTE_ORDER_MARK: char = '\u{feff}';
/// Wrong lines in one message before it only counts.
const NAMED: usize = 5;

/// One line: what to answer, and how.
#[derive(Clone, Debug)]
pub struct Line {
    /// Comes back with the answer.
    pub id: Option<Value>,
    /// What is asked.
    pub question: Question,
    /// As the flag of this name.
    pub system_prompt: Option<String>,
    /// As `--prefill-response`.
    pub prefill_response: Option<String>,
    /// As `--chat-template-config`, over it.
    pub chat_template_kwargs: Map<String, Value>,
    /// All other flags as this line has them.
    pub flags: Flags,
}

/// What a line asks.
#[derive(Clone, Debug, PartialEq)]
pub enum Question {
    /// A prompt.
    Prompt(String),
    /// A conversation.
    Messages(Vec<Message>),
}

impl Line {
    fn parse(text: &str, flags: &PerPrompt) -> Result<Self, String> {
        let value = serde_json::from_str(text).map_err(|error| {
            // Of its two numbers only the column counts in a text of one line.
            json::problem(&error).replace("line 1, column", "column")
        })?;
        let Value::Object(mut fields) = value else {
            return Err("not a JSON object like {\"prompt\": \"...\"}".to_owned());
        };
        let question = question(fields.remove("prompt"), fields.remove("messages"))?;
        let kwargs = ["chat_template_kwargs", "chat_template_config", "chat_template_args"];
        let kwargs = kwargs.into_iter().find_map(|name| Some((name, fields.remove(name)?)));
        Ok(Self {
            id: fields.remove("id"),
            question,
            system_prompt: text_field(&mut fields, "system_prompt")?,
            prefill_response: text_field(&mut fields, "prefill_response")?,
            chat_template_kwargs: match kwargs {
                None | Some((_, Value::Null)) => Map::new(),
                Some((_, Value::Object(variables))) => variables,
                Some((name, _)) => return Err(format!("`{name}` must be an object")),
            },
            flags: {
                let flags = flags.with(&fields)?;
                if flags.reply.stop.iter().any(String::is_empty) {
                    return Err("`stop` is empty".to_owned());
                }
                flags
            },
        })
    }

    /// What a saved cache leaves no room for: it holds everything before the question.
    fn check_continues_cache(&self) -> Result<(), String> {
        if self.system_prompt.is_some() {
            return Err("`system_prompt` does not go with `--prompt-cache-file`, which holds the beginning"
                .to_owned());
        }
        match &self.question {
            Question::Messages(messages)
                if messages.len() != 1 || messages[0].get("role").is_none_or(|role| role != "user") =>
            {
                Err("`messages` must be one message of the user with `--prompt-cache-file`, which holds the \
                     beginning"
                    .to_owned())
            }
            _ => Ok(()),
        }
    }
}

fn question(prompt: Option<Value>, messages: Option<Value>) -> Result<Question, String> {
    match (prompt, messages) {
        (None, None) => Err("neither `prompt` nor `messages`".to_owned()),
        (Some(_), Some(_)) => Err("both `prompt` and `messages`".to_owned()),
        (Some(Value::String(prompt)), None) if prompt.is_empty() => Err("`prompt` is empty".to_owned()),
        (Some(Value::String(prompt)), None) => {
            check_length(prompt.len()).map_err(|error| error.to_string())?;
            Ok(Question::Prompt(prompt))
        }
        (Some(_), None) => Err("`prompt` must be a text".to_owned()),
        (None, Some(Value::Array(messages))) if messages.is_empty() => Err("`messages` is empty".to_owned()),
        (None, Some(Value::Array(messages))) => {
            let message = |(index, message): (usize, Value)| match message {
                Value::Object(message) if message.get("role").is_some_and(Value::is_string) => Ok(message),
                Value::Object(_) => Err(format!("`messages[{index}]` has no `role`")),
                _ => Err(format!("`messages[{index}]` must be an object with `role` and `content`")),
            };
            messages.into_iter().enumerate().map(message).collect::<Result<_, _>>().map(Question::Messages)
        }
        (None, Some(_)) => Err("`messages` must be a list".to_owned()),
    }
}

fn text_field(fields: &mut Map<String, Value>, name: &str) -> Result<Option<String>, String> {
    match fields.remove(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(format!("`{name}` must be a text")),
    }
}

/// Reads and checks the whole file; `-` is standard input. Empty lines are skipped. With `continues_cache` every line
/// must be something that a saved cache can go on with.
///
/// # Errors
/// The file cannot be read, or lines of it are wrong: the first few, by number.
pub fn read(
    path: &Path,
    flags: &PerPrompt,
    continues_cache: bool,
    printer: &Printer,
) -> anyhow::Result<Vec<Line>> {
    let (name, text) = match path.to_str() {
        Some("-") => ("standard input".to_owned(), read_stdin(printer, u64::MAX)?),
        _ => {
            let name = path.display().to_string();
            let bytes = std::fs::read(path)
                .map_err(|error| Complaint::failure(format!("cannot read `{name}`: {error}")))?;
            let text = String::from_utf8(bytes).map_err(|error| {
                let before = &error.as_bytes()[..error.utf8_error().valid_up_to()];
                let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
                Complaint::usage(format!("{name}:{line}: the text is not UTF-8"))
            })?;
            (name, text)
        }
    };
    let lines = parse(&text, flags, continues_cache);
    lines.map_err(|wrong| complaint(&name, &wrong).into())
}

/// All lines, or all that are wrong with their numbers.
fn parse(text: &str, flags: &PerPrompt, continues_cache: bool) -> Result<Vec<Line>, Vec<(usize, String)>> {
    let (mut lines, mut wrong) = (Vec::new(), Vec::new());
    let text = text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text);
    for (index, text) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let line = Line::parse(text, flags).and_then(|line| {
            if continues_cache {
                line.check_continues_cache()?;
            }
            Ok(line)
        });
        match line {
            Ok(line) => lines.push(line),
            Err(problem) => wrong.push((index + 1, problem)),
        }
    }
    match (lines.is_empty(), wrong.is_empty()) {
        (_, false) => Err(wrong),
        (true, true) => Err(vec![(1, "no prompts".to_owned())]),
        (false, true) => Ok(lines),
    }
}

fn complaint(name: &str, wrong: &[(usize, String)]) -> Complaint {
    let said: Vec<_> =
        wrong.iter().take(NAMED).map(|(line, problem)| format!("{name}:{line}: {problem}")).collect();
    let mut said = said.into_iter();
    let complaint = Complaint::usage(said.next().unwrap_or_default()).further(said);
    match wrong.len().saturating_sub(NAMED) {
        0 => complaint,
        more => complaint.hint(format!("{more} more lines are wrong; nothing was answered")),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::reply::TokenLimit;
    use crate::args::sampling::LogitBias;

    #[derive(clap::Parser)]
    struct Probe {
        #[command(flatten)]
        flags: PerPrompt,
    }

    fn flags() -> PerPrompt {
        Probe::parse_from(["x", "--temp", "0.5", "--seed", "1", "--stop=END", "-m", "7"]).flags
    }

    fn applied(line: &str) -> Result<Flags, String> {
        Line::parse(line, &flags()).map(|line| line.flags)
    }

    #[test]
    fn a_line_without_overrides_has_the_flags() {
        let flags = applied(r#"{"prompt": "hi", "temperature": null}"#).unwrap();
        assert_eq!(flags.reply.sampling.temperature, 0.5);
        assert_eq!(flags.reply.sampling.seed, Some(1));
        assert_eq!(flags.reply.stop, ["END"]);
        assert_eq!(flags.reply.max_tokens, Some(TokenLimit(Some(7))));
    }

    #[test]
    fn s3_every_override_counts() {
        let flags = applied(
            r#"{"prompt": "hi", "max_tokens": -1, "temp": 1, "top_p": 0.5, "top_k": 3, "min_p": 0.1,
                "xtc_probability": 1, "xtc_threshold": 0.2, "seed": 9, "stop": ["a", "b"], "repetition_penalty": 2,
                "presence_penalty": -3, "frequency_penalty": 4, "logit_bias": {"5": 1}, "logprobs": true,
                "top_logprobs": 2, "hlg_sampling": true, "min_tokens_to_keep": 4, "repetition_context_size": 5}"#
                .replace('\n', " ")
                .as_str(),
        )
        .unwrap();
        let sampling = &flags.reply.sampling;
        assert_eq!(
            (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p),
            (1.0, 0.5, 3, 0.1)
        );
        assert_eq!((sampling.xtc_probability, sampling.xtc_threshold, sampling.seed), (1.0, 0.2, Some(9)));
        assert!(sampling.hlg.hlg_sampling.is_on() && sampling.min_tokens_to_keep == 4);
        let penalties = &flags.reply.penalties;
        assert_eq!((penalties.repetition_penalty, penalties.repetition_context_size), (Some(2.0), 5));
        assert_eq!((penalties.presence_penalty, penalties.frequency_penalty), (Some(-3.0), Some(4.0)));
        assert_eq!(penalties.logit_bias, [LogitBias(vec![(5, 1.0)])]);
        assert_eq!(flags.reply.stop, ["a", "b"]);
        assert_eq!(flags.reply.max_tokens, Some(TokenLimit(None)));
        assert_eq!((flags.logprobs.logprobs, flags.logprobs.top_logprobs), (true, Some(2)));
    }

    #[test]
    fn wrong_lines_are_told_in_words() {
        let error = |text: &str| Line::parse(text, &flags()).unwrap_err();
        assert_eq!(error("{\"prompt\":\"\"}"), "`prompt` is empty");
        assert_eq!(error("{\"prompt\":3}"), "`prompt` must be a text");
        assert_eq!(error("{\"messages\":[]}"), "`messages` is empty");
        assert_eq!(error("{\"messages\":[{\"content\":\"x\"}]}"), "`messages[0]` has no `role`");
        assert_eq!(error("[1]"), "not a JSON object like {\"prompt\": \"...\"}");
        assert_eq!(error("{\"prompt\":"), "not valid JSON: it breaks off at column 10");
        assert_eq!(error("not"), "not valid JSON at column 2");
        let with = |field: &str| error(&format!("{{\"prompt\":\"a\",{field}}}"));
        assert_eq!(with("\"tempreature\":1"), "there is no field `tempreature`; did you mean `temperature`?");
        assert_eq!(with("\"nonsense\":1"), "there is no field `nonsense`");
        assert_eq!(with("\"max_tokens\":true"), "`max_tokens` must be a number");
        assert_eq!(with("\"max_tokens\":0"), "`max_tokens` must be in [1, 10000000], or -1 for no limit");
        assert_eq!(with("\"temperature\":9"), "`temperature` must be in [0, 5]");
        assert_eq!(with("\"top_k\":1.5"), "`top_k` must be a whole number in [0, 1000000]");
        assert_eq!(with("\"seed\":-1"), "`seed` must be a whole number in [0, 18446744073709551615]");
        assert_eq!(with("\"stop\":3"), "`stop` must be a text or a list of texts");
        assert_eq!(with("\"stop\":\"\""), "`stop` is empty");
        assert_eq!(with("\"logprobs\":1"), "`logprobs` must be true or false");
        assert_eq!(with("\"logit_bias\":{\"x\":1}"), "`logit_bias` `x` is not a token id");
        assert_eq!(with("\"system_prompt\":3"), "`system_prompt` must be a text");
    }

    #[test]
    fn all_wrong_lines_are_named_before_anything_is_answered() {
        let wrong = |text: &str| parse(text, &flags(), false).unwrap_err();
        let bad = wrong("{\"prompt\":\"a\"}\n\n{}\n{\"prompt\":\"\"}");
        assert_eq!(
            bad,
            [(3, "neither `prompt` nor `messages`".to_owned()), (4, "`prompt` is empty".to_owned())]
        );
        assert_eq!(wrong("\n"), [(1, "no prompts".to_owned())]);
        let complaint = complaint("p.jsonl", &wrong(&"{}\n".repeat(9)));
        assert_eq!(complaint.further.len() + 1, NAMED);
        assert_eq!(complaint.hint.unwrap(), "4 more lines are wrong; nothing was answered");
    }

    #[test]
    fn a_line_about_a_saved_cache_is_one_question() {
        let checked = |text: &str| parse(text, &flags(), true).map_err(|wrong| wrong[0].1.clone());
        assert!(checked("{\"prompt\":\"a\"}").is_ok());
        assert!(checked("{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]}").is_ok());
        let refused = checked("{\"messages\":[{\"role\":\"system\"},{\"role\":\"user\"}]}").unwrap_err();
        assert!(refused.starts_with("`messages` must be one message of the user"), "{refused}");
        let refused = checked("{\"prompt\":\"a\",\"system_prompt\":\"b\"}").unwrap_err();
        assert!(refused.starts_with("`system_prompt` does not go with"), "{refused}");
    }

    proptest::proptest! {
        #[test]
        fn parsing_takes_anything(text in ".*") {
            let _ = parse(&text, &flags(), false);
        }
    }
}
