//! Flags that a line of a prompt file may set for itself, under their names: one definition serves both.
//!
//! A line is read as more flags behind those of the command line, so it has the same names, ranges and messages.

use std::collections::BTreeMap;

use clap::error::{ContextKind, ContextValue};
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use serde_json::{Map, Value};

use super::reply::ReplyArgs;
use super::sampling::LogprobArgs;

/// The flags, parsed.
#[derive(Clone, Debug, clap::Args)]
pub struct Flags {
    #[command(flatten)]
    pub reply: ReplyArgs,
    #[command(flatten)]
    pub logprobs: LogprobArgs,
}

/// The flags with what was typed of them: values by the id of the argument, none for a switch.
#[derive(Clone, Debug)]
pub struct PerPrompt {
    /// What they mean.
    pub flags: Flags,
    typed: BTreeMap<String, Vec<String>>,
}

impl Args for PerPrompt {
    fn augment_args(command: Command) -> Command {
        Flags::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Flags::augment_args_for_update(command)
    }
}

impl FromArgMatches for PerPrompt {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut typed = BTreeMap::new();
        for arg in command().get_arguments() {
            let id = arg.get_id().as_str();
            if matches.value_source(id) != Some(clap::parser::ValueSource::CommandLine) {
                continue;
            }
            let mut values = Vec::new();
            if let (true, Some(raw)) = (arg.get_action().takes_values(), matches.get_raw(id)) {
                values.extend(raw.map(|value| value.to_string_lossy().into_owned()));
            }
            typed.insert(id.to_owned(), values);
        }
        Ok(Self { flags: Flags::from_arg_matches(matches)?, typed })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

fn command() -> Command {
    Flags::augment_args(Command::new("line").no_binary_name(true).disable_help_flag(true))
        .args_override_self(true)
}

impl PerPrompt {
    /// Changes the stop texts of the command line into those that are meant.
    pub fn map_stop(&mut self, meant: impl Fn(&str) -> String) {
        let typed = self.typed.get_mut("stop").into_iter().flatten();
        typed.chain(&mut self.flags.reply.stop).for_each(|text| *text = meant(text));
    }

    /// The flags as a line has them: its own where it names them, else those of the command line.
    ///
    /// # Errors
    /// Which field is wrong, and what it should be.
    pub fn with(&self, line: &Map<String, Value>) -> Result<Flags, String> {
        let mut command = command();
        let mut typed = self.typed.clone();
        for (name, value) in line.iter().filter(|(_, value)| !value.is_null()) {
            let arg = find(&command, name).ok_or_else(|| unknown(&mut command.clone(), name))?;
            let id = arg.get_id().as_str();
            match values(arg, value).map_err(|expected| format!("`{name}` must be {expected}"))? {
                Some(values) => typed.insert(id.to_owned(), values),
                None => typed.remove(id),
            };
            // Alone, so that the message is about this field.
            if let Some(values) = typed.get(id) {
                let words = words(arg, values);
                command.try_get_matches_from_mut(words).map_err(|error| explain(name, &error))?;
            }
        }
        let words: Vec<_> = command
            .get_arguments()
            .filter_map(|arg| typed.get(arg.get_id().as_str()).map(|values| words(arg, values)))
            .flatten()
            .collect();
        let matches = command.try_get_matches_from_mut(words).map_err(|error| error.to_string())?;
        Flags::from_arg_matches(&matches).map_err(|error| error.to_string())
    }
}

/// The argument of a field, by any of its spellings.
fn find<'a>(command: &'a Command, name: &str) -> Option<&'a Arg> {
    let flag = name.replace('_', "-");
    command.get_arguments().find(|arg| {
        arg.get_long() == Some(&flag) || arg.get_all_aliases().is_some_and(|all| all.contains(&flag.as_str()))
    })
}

/// A field as the values of its flag; `None` for a switch that is off.
fn values(arg: &Arg, value: &Value) -> Result<Option<Vec<String>>, &'static str> {
    let choices = arg.get_possible_values();
    match (arg.get_action(), value) {
        (ArgAction::SetTrue, Value::Bool(on)) => Ok(on.then(Vec::new)),
        (ArgAction::SetTrue, _) => Err("true or false"),
        (ArgAction::Append, value) if arg.get_id() == "logit_bias" => match value {
            Value::Object(_) => Ok(Some(vec![value.to_string()])),
            _ => Err("an object of token ids and numbers"),
        },
        (ArgAction::Append, Value::String(text)) => Ok(Some(vec![text.clone()])),
        (ArgAction::Append, Value::Array(texts)) => {
            let texts = texts.iter().map(|text| text.as_str().map(str::to_owned));
            texts.collect::<Option<_>>().map(Some).ok_or("a text or a list of texts")
        }
        (ArgAction::Append, _) => Err("a text or a list of texts"),
        (_, Value::String(text)) if !choices.is_empty() => Ok(Some(vec![text.clone()])),
        (_, Value::Bool(on)) if !choices.is_empty() => Ok(Some(vec![on.to_string()])),
        (_, Value::Number(number)) => Ok(Some(vec![number.to_string()])),
        _ if choices.is_empty() => Err("a number"),
        _ => Err("true or false"),
    }
}

/// `--flag=value` for each value.
fn words(arg: &Arg, values: &[String]) -> Vec<String> {
    let flag = format!("--{}", arg.get_long().unwrap_or_default());
    match arg.get_action().takes_values() {
        true => values.iter().map(|value| format!("{flag}={value}")).collect(),
        false => vec![flag],
    }
}

fn explain(name: &str, error: &clap::Error) -> String {
    match std::error::Error::source(error) {
        Some(cause) => format!("`{name}` {cause}"),
        None => format!("`{name}` has a value that its flag does not know"),
    }
}

/// A field that is no flag, with the one that was probably meant.
fn unknown(command: &mut Command, name: &str) -> String {
    let flag = format!("--{}=1", name.replace('_', "-"));
    let meant = command.try_get_matches_from_mut([flag]).err().and_then(|error| {
        match error.get(ContextKind::SuggestedArg) {
            Some(ContextValue::String(flag)) => Some(flag.trim_start_matches('-').replace('-', "_")),
            _ => None,
        }
    });
    match meant {
        Some(meant) => format!("there is no field `{name}`; did you mean `{meant}`?"),
        None => format!("there is no field `{name}`"),
    }
}
