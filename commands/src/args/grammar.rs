//! Flags that hold a reply to a grammar.

use std::path::{Path, PathBuf};

use mlx_bun::structured::grammar::Constraint;
use serde_json::Value;

use super::prompt::read_stdin;
use crate::error::Complaint;
use crate::printer::Printer;

/// Bytes taken from standard input; the compiler refuses much shorter grammars as too long.
const MOST_READ: u64 = 16 << 20;

/// What a reply must look like.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Structure")]
#[group(id = "structure", multiple = false)]
pub struct GrammarArgs {
    /// Reply with a JSON object
    #[arg(long)]
    pub json_object: bool,

    /// Reply with JSON that a JSON schema describes: the schema itself, a file, or `-` for standard input
    ///
    /// A keyword that cannot be enforced is an error that names it.
    #[arg(long, value_name = "SCHEMA")]
    pub json_schema: Option<String>,

    /// Reply with text that this regular expression matches as a whole
    #[arg(long, value_name = "REGEX", allow_hyphen_values = true, hide_short_help = true)]
    pub regex: Option<String>,

    /// Reply with one of the texts given; repeat the flag for each
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, hide_short_help = true)]
    pub choice: Vec<String>,

    /// Reply with text that a grammar describes (Lark, or llama.cpp's GBNF): the grammar, a file, or `-`
    #[arg(long, value_name = "GRAMMAR", hide_short_help = true)]
    pub grammar: Option<String>,
}

impl GrammarArgs {
    /// The constraint, if there is one. `stdin_free` says that the prompt does not come from standard input.
    ///
    /// # Errors
    /// A file that cannot be read, a schema that is not JSON, an empty text.
    pub fn resolve(&self, stdin_free: bool, printer: &Printer) -> anyhow::Result<Option<Constraint>> {
        if self.json_object {
            return Ok(Some(Constraint::JsonObject));
        }
        if let Some(argument) = &self.json_schema {
            let inline = argument.trim_start().starts_with('{');
            let text = text("--json-schema", argument, inline, stdin_free, printer)?;
            let schema: Value = serde_json::from_str(&text)
                .map_err(|error| Complaint::usage(format!("`--json-schema` is not JSON: {error}")))?;
            return Ok(Some(Constraint::JsonSchema { schema, strict: true, any_whitespace: true }));
        }
        if let Some(regex) = &self.regex {
            return match regex.is_empty() {
                true => Err(Complaint::usage("`--regex` is empty").into()),
                false => Ok(Some(Constraint::Regex(regex.clone()))),
            };
        }
        if !self.choice.is_empty() {
            return match self.choice.iter().any(String::is_empty) {
                true => Err(Complaint::usage("`--choice` is empty").into()),
                false => Ok(Some(Constraint::Choice(self.choice.clone()))),
            };
        }
        if let Some(argument) = &self.grammar {
            let inline = argument.contains(':') && !Path::new(argument).is_file();
            return Ok(Some(Constraint::grammar(text("--grammar", argument, inline, stdin_free, printer)?)));
        }
        Ok(None)
    }
}

/// The text that an argument is, or names.
fn text(
    flag: &str,
    argument: &str,
    inline: bool,
    stdin_free: bool,
    printer: &Printer,
) -> anyhow::Result<String> {
    match argument {
        _ if inline => Ok(argument.to_owned()),
        "-" if stdin_free => read_stdin(printer, MOST_READ),
        "-" => Err(Complaint::usage(format!("`{flag} -` and the prompt both read standard input"))
            .hint("put one of the two in a file")
            .into()),
        path => {
            let path = PathBuf::from(path);
            let read = std::fs::read_to_string(&path);
            let complaint = |error| Complaint::failure(format!("cannot read `{}`: {error}", path.display()));
            Ok(read.map_err(complaint)?)
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::json;

    use super::*;
    use crate::printer::Verbosity;

    #[derive(clap::Parser)]
    struct Probe {
        #[command(flatten)]
        grammar: GrammarArgs,
    }

    fn resolve(arguments: &[&str]) -> anyhow::Result<Option<Constraint>> {
        let probe = Probe::try_parse_from(std::iter::once("x").chain(arguments.iter().copied()))?;
        probe.grammar.resolve(false, &Printer::captured(Verbosity::Default).0)
    }

    #[test]
    fn constraints_are_given_inline_or_in_files() {
        assert_eq!(resolve(&[]).unwrap(), None);
        assert_eq!(resolve(&["--json-object"]).unwrap(), Some(Constraint::JsonObject));
        assert_eq!(resolve(&["--regex", "-?[0-9]"]).unwrap(), Some(Constraint::Regex("-?[0-9]".to_owned())));
        let choices = Constraint::Choice(vec!["a".to_owned(), "b".to_owned()]);
        assert_eq!(resolve(&["--choice", "a", "--choice", "b"]).unwrap(), Some(choices));
        let schema =
            Constraint::JsonSchema { schema: json!({"type": "null"}), strict: true, any_whitespace: true };
        assert_eq!(resolve(&["--json-schema", " {\"type\": \"null\"}"]).unwrap(), Some(schema.clone()));
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        std::fs::write(path, "{\"type\": \"null\"}").unwrap();
        assert_eq!(resolve(&["--json-schema", path]).unwrap(), Some(schema));
        let lark = "start: \"a\"";
        assert_eq!(resolve(&["--grammar", lark]).unwrap(), Some(Constraint::Lark(lark.to_owned())));
        let gbnf = "root ::= \"a\"";
        std::fs::write(path, gbnf).unwrap();
        assert_eq!(resolve(&["--grammar", path]).unwrap(), Some(Constraint::Gbnf(gbnf.to_owned())));
    }

    #[test]
    fn what_is_no_constraint_is_refused() {
        let message = |arguments: &[&str]| resolve(arguments).unwrap_err().to_string();
        assert!(message(&["--json-schema", "{"]).starts_with("`--json-schema` is not JSON"));
        assert!(message(&["--json-schema", "/none"]).starts_with("cannot read `/none`"));
        assert!(message(&["--grammar", "/none"]).starts_with("cannot read `/none`"));
        assert_eq!(message(&["--grammar", "-"]), "`--grammar -` and the prompt both read standard input");
        assert_eq!(message(&["--regex", ""]), "`--regex` is empty");
        assert_eq!(message(&["--choice", ""]), "`--choice` is empty");
        assert!(resolve(&["--json-object", "--regex", "a"]).is_err());
    }
}
