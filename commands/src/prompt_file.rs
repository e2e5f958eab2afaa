//! `--prompt-file`: one JSON object a line. Every line is checked before the first is answered.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::args::prompt::read_stdin;
use crate::args::range;
use crate::args::sampling::{LogitBias, LogprobArgs, PenaltyArgs, SamplingArgs};
use crate::args::stopping::TokenLimit;
use crate::engine::Message;
use crate::error::Complaint;
use crate::printer::Printer;

/// One line: what to answer, and where it differs from the flags.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct Line {
    /// Comes back with the answer.
    pub id: Option<Value>,
    /// A prompt.
    pub prompt: Option<String>,
    /// Or a conversation.
    pub messages: Option<Vec<Message>>,
    /// As the flags of these names.
    pub system_prompt: Option<String>,
    /// As `--prefill-response`.
    pub prefill_response: Option<String>,
    /// As `--chat-template-config`, over it.
    #[serde(alias = "chat_template_config", alias = "chat_template_args")]
    pub chat_template_kwargs: Map<String, Value>,
    max_tokens: Option<i64>,
    #[serde(alias = "temp")]
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i32>,
    min_p: Option<f64>,
    xtc_probability: Option<f32>,
    xtc_threshold: Option<f32>,
    seed: Option<u64>,
    stop: Option<Stop>,
    repetition_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    logit_bias: Option<Value>,
    logprobs: Option<bool>,
    top_logprobs: Option<usize>,
}

/// A stop text, or several.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(untagged)]
enum Stop {
    One(String),
    Many(Vec<String>),
}

/// The flags that a line may override.
#[derive(Clone, Debug)]
pub struct Overridable {
    /// `--max-tokens`.
    pub max_tokens: TokenLimit,
    /// Sampling flags.
    pub sampling: SamplingArgs,
    /// Penalty flags.
    pub penalties: PenaltyArgs,
    /// `--stop`.
    pub stop: Vec<String>,
    /// Log-probability flags.
    pub logprobs: LogprobArgs,
}

impl Line {
    /// The flags as this line has them.
    fn apply(&self, flags: &Overridable) -> Result<Overridable, String> {
        let mut flags = flags.clone();
        if let Some(number) = self.max_tokens {
            flags.max_tokens =
                TokenLimit::from_number(number).map_err(|range| format!("`max_tokens` {range}"))?;
        }
        let sampling = &mut flags.sampling;
        set(&mut sampling.temperature, self.temperature, range::TEMPERATURE, "temperature")?;
        set(&mut sampling.top_p, self.top_p, range::TOP_P, "top_p")?;
        set(&mut sampling.top_k, self.top_k, range::TOP_K, "top_k")?;
        set(&mut sampling.min_p, self.min_p, range::MIN_P, "min_p")?;
        set(&mut sampling.xtc_probability, self.xtc_probability, range::XTC_PROBABILITY, "xtc_probability")?;
        set(&mut sampling.xtc_threshold, self.xtc_threshold, range::XTC_THRESHOLD, "xtc_threshold")?;
        sampling.seed = self.seed.or(sampling.seed);
        let penalties = &mut flags.penalties;
        for (target, value, range, name) in [
            (
                &mut penalties.repetition_penalty,
                self.repetition_penalty,
                range::REPETITION_PENALTY,
                "repetition_penalty",
            ),
            (
                &mut penalties.presence_penalty,
                self.presence_penalty,
                range::ADDITIVE_PENALTY,
                "presence_penalty",
            ),
            (
                &mut penalties.frequency_penalty,
                self.frequency_penalty,
                range::ADDITIVE_PENALTY,
                "frequency_penalty",
            ),
        ] {
            if let Some(value) = value {
                *target = Some(range.check(value).map_err(|range| format!("`{name}` {range}"))?);
            }
        }
        if let Some(bias) = &self.logit_bias {
            penalties.logit_bias =
                vec![LogitBias::from_json(bias).map_err(|error| format!("`logit_bias` {error}"))?];
        }
        match &self.stop {
            Some(Stop::One(text)) => flags.stop = vec![text.clone()],
            Some(Stop::Many(texts)) => flags.stop.clone_from(texts),
            None => {}
        }
        if flags.stop.iter().any(String::is_empty) {
            return Err("`stop` is empty".to_owned());
        }
        if let Some(logprobs) = self.logprobs {
            flags.logprobs.logprobs = logprobs;
        }
        if let Some(top) = self.top_logprobs {
            let top = range::TOP_LOGPROBS.check(top).map_err(|range| format!("`top_logprobs` {range}"))?;
            flags.logprobs.top_logprobs = Some(top);
        }
        Ok(flags)
    }

    fn check(&self) -> Result<(), String> {
        match (&self.prompt, &self.messages) {
            (None, None) => Err("neither `prompt` nor `messages`".to_owned()),
            (Some(_), Some(_)) => Err("both `prompt` and `messages`".to_owned()),
            (Some(prompt), None) if prompt.is_empty() => Err("`prompt` is empty".to_owned()),
            (Some(_), None) => Ok(()),
            (None, Some(messages)) if messages.is_empty() => Err("`messages` is empty".to_owned()),
            (None, Some(messages)) => {
                let roleless = messages.iter().position(|m| !m.get("role").is_some_and(Value::is_string));
                roleless.map_or(Ok(()), |index| Err(format!("`messages[{index}]` has no `role`")))
            }
        }
    }
}

fn set<T: range::Number>(
    target: &mut T,
    value: Option<T>,
    range: range::Range<T>,
    name: &str,
) -> Result<(), String> {
    if let Some(value) = value {
        *target = range.check(value).map_err(|range| format!("`{name}` {range}"))?;
    }
    Ok(())
}

/// Reads and checks the whole file; `-` is standard input. Empty lines are skipped. Each line comes with the flags
/// as it has them.
///
/// # Errors
/// The first line that is wrong, by number.
pub fn read(path: &Path, flags: &Overridable, printer: &Printer) -> anyhow::Result<Vec<(Line, Overridable)>> {
    let (name, text) = match path.to_str() {
        Some("-") => ("standard input".to_owned(), read_stdin(printer)?),
        _ => {
            let name = path.display().to_string();
            let text = std::fs::read_to_string(path)
                .map_err(|error| Complaint::failure(format!("cannot read `{name}`: {error}")))?;
            (name, text)
        }
    };
    parse(&text, flags).map_err(|message| Complaint::failure(format!("{name}, {message}")).into())
}

fn parse(text: &str, flags: &Overridable) -> Result<Vec<(Line, Overridable)>, String> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let parsed = lines.map(|(index, text)| {
        let line = serde_json::from_str::<Line>(text).map_err(|error| without_position(&error));
        let checked = line.and_then(|line| {
            line.check()?;
            let flags = line.apply(flags)?;
            Ok((line, flags))
        });
        checked.map_err(|error| format!("line {}: {error}", index + 1))
    });
    let parsed: Vec<_> = parsed.collect::<Result<_, _>>()?;
    if parsed.is_empty() { Err("line 1: no prompts".to_owned()) } else { Ok(parsed) }
}

/// serde counts within the one line it was given; only its column helps.
fn without_position(error: &serde_json::Error) -> String {
    let message = error.to_string();
    let suffix = format!(" at line {} column {}", error.line(), error.column());
    match message.strip_suffix(&suffix) {
        Some(message) => format!("{message} (column {})", error.column()),
        None => message,
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(clap::Parser)]
    struct Probe {
        #[command(flatten)]
        sampling: SamplingArgs,
        #[command(flatten)]
        penalties: PenaltyArgs,
        #[command(flatten)]
        logprobs: LogprobArgs,
    }

    fn flags() -> Overridable {
        let probe = Probe::parse_from(["x", "--temp", "0.5", "--seed", "1"]);
        Overridable {
            max_tokens: TokenLimit(Some(100)),
            sampling: probe.sampling,
            penalties: probe.penalties,
            stop: vec!["END".to_owned()],
            logprobs: probe.logprobs,
        }
    }

    fn applied(line: &str) -> Result<Overridable, String> {
        parse(line, &flags()).map(|mut lines| lines.remove(0).1)
    }

    #[test]
    fn a_line_without_overrides_has_the_flags() {
        let flags = applied(r#"{"prompt": "hi"}"#).unwrap();
        assert_eq!(flags.sampling.temperature, 0.5);
        assert_eq!(flags.sampling.seed, Some(1));
        assert_eq!(flags.stop, ["END"]);
        assert_eq!(flags.max_tokens, TokenLimit(Some(100)));
    }

    #[test]
    fn s3_every_override_counts() {
        let flags = applied(
            r#"{"prompt": "hi", "max_tokens": -1, "temp": 1, "top_p": 0.5, "top_k": 3, "min_p": 0.1,
                "xtc_probability": 1, "xtc_threshold": 0.2, "seed": 9, "stop": ["a", "b"], "repetition_penalty": 2,
                "presence_penalty": 3, "frequency_penalty": 4, "logit_bias": {"5": 1}, "logprobs": true,
                "top_logprobs": 2}"#
                .replace('\n', " ")
                .as_str(),
        )
        .unwrap();
        let sampling = &flags.sampling;
        assert_eq!(
            (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p),
            (1.0, 0.5, 3, 0.1)
        );
        assert_eq!((sampling.xtc_probability, sampling.xtc_threshold, sampling.seed), (1.0, 0.2, Some(9)));
        let penalties = &flags.penalties;
        assert_eq!(penalties.repetition_penalty, Some(2.0));
        assert_eq!((penalties.presence_penalty, penalties.frequency_penalty), (Some(3.0), Some(4.0)));
        assert_eq!(penalties.logit_bias, [LogitBias(vec![(5, 1.0)])]);
        assert_eq!(flags.stop, ["a", "b"]);
        assert_eq!(flags.max_tokens, TokenLimit(None));
        assert_eq!((flags.logprobs.logprobs, flags.logprobs.top_logprobs), (true, Some(2)));
    }

    #[test]
    fn wrong_lines_are_named_by_number() {
        let error = |text: &str| parse(text, &flags()).unwrap_err();
        assert_eq!(error("{\"prompt\":\"a\"}\n\n{}"), "line 3: neither `prompt` nor `messages`");
        assert_eq!(error("{\"prompt\":\"\"}"), "line 1: `prompt` is empty");
        assert_eq!(error("{\"messages\":[]}"), "line 1: `messages` is empty");
        assert_eq!(error("{\"messages\":[{\"content\":\"x\"}]}"), "line 1: `messages[0]` has no `role`");
        assert_eq!(error("\n"), "line 1: no prompts");
        assert!(
            error("{\"prompt\":\"a\",\"tempreature\":1}").starts_with("line 1: unknown field `tempreature`")
        );
        assert!(error("{\"prompt\":").starts_with("line 1: EOF while parsing"));
        assert!(error("{\"prompt\":\"a\",\"max_tokens\":true}").starts_with("line 1: invalid type: boolean"));
        assert_eq!(error("{\"prompt\":\"a\",\"temperature\":9}"), "line 1: `temperature` must be in [0, 5]");
        assert_eq!(error("{\"prompt\":\"a\",\"stop\":\"\"}"), "line 1: `stop` is empty");
    }

    proptest::proptest! {
        #[test]
        fn parsing_takes_anything(text in ".*") {
            let _ = parse(&text, &flags());
        }
    }
}
