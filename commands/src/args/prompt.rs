//! Where the prompt comes from: an argument, `--prompt`, standard input, or a file of many.

use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};

use crate::error::Complaint;
use crate::printer::Printer;

/// Bytes of a prompt: some millions of tokens, more than any context.
pub const LONGEST_PROMPT: usize = 16 << 20;

/// The prompt, and how it is read.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Prompt")]
pub struct PromptArgs {
    /// The prompt; `-` reads standard input
    ///
    /// With two arguments the first is the model: `mlx-bun generate MODEL PROMPT`. Beside --prompt or --prompt-file
    /// the argument is the model.
    #[arg(value_name = "PROMPT", help_heading = None::<&str>)]
    pub words: Vec<String>,

    /// The prompt, as a flag; `-` reads standard input
    #[arg(short, long, value_name = "TEXT", conflicts_with = "prompt_file", allow_hyphen_values = true)]
    pub prompt: Option<String>,

    /// Many prompts, one JSON object a line, answered in order as JSON lines; `-` reads standard input
    ///
    /// A line holds "prompt" or "messages", and may hold "id", "system_prompt", "prefill_response",
    /// "chat_template_kwargs" and, under their names, all flags of sampling, penalties, stopping and log-probabilities:
    /// {"prompt": "A haiku", "temperature": 0.7, "max_tokens": 50}
    #[arg(long, value_name = "FILE")]
    pub prompt_file: Option<PathBuf>,

    /// Feed the prompt as it is, without the chat template
    #[arg(long, visible_alias = "ignore-chat-template")]
    pub raw: bool,

    /// Begin the reply with this text
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub prefill_response: Option<String>,

    /// Turn \n, \t, \r, \\, \', \" and \xHH in texts on the command line into the characters they stand for
    #[arg(short, long)]
    pub escape: bool,
}

/// Where the prompt comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PromptSource {
    /// The command line.
    Text(String),
    /// All of standard input.
    Stdin,
    /// A file of JSON lines; `-` is standard input.
    Lines(PathBuf),
}

impl PromptArgs {
    /// The source of the prompt, and the model if an argument named one.
    ///
    /// # Errors
    /// No prompt, an empty one, or arguments that cannot be told apart.
    pub fn resolve(&self) -> Result<(PromptSource, Option<String>), Complaint> {
        let flagged = self.prompt.is_some() || self.prompt_file.is_some();
        let (model, word) = match self.words.as_slice() {
            [] => (None, None),
            [model] if flagged => (Some(model.clone()), None),
            [prompt] => (None, Some(prompt)),
            [model, prompt] if !flagged => (Some(model.clone()), Some(prompt)),
            words => {
                let count = words.len();
                return Err(Complaint::usage(format!("{count} arguments where a prompt was expected"))
                    .hint("put the prompt in quotes"));
            }
        };
        if let Some(file) = &self.prompt_file {
            return Ok((PromptSource::Lines(file.clone()), model));
        }
        let text = self.prompt.as_ref().or(word).ok_or_else(|| {
            Complaint::usage("no prompt")
                .hint("give one in quotes, `-` to read standard input, or `--prompt-file` for many")
        })?;
        match text.as_str() {
            "-" => Ok((PromptSource::Stdin, model)),
            "" => Err(empty_prompt()),
            path if word.is_some() && model.is_none() && is_model(path) => {
                Err(Complaint::usage(format!("no prompt: `{path}` is a model"))
                    .hint(format!("mlx-bun generate {path} \"your prompt\"")))
            }
            text => Ok((PromptSource::Text(self.text(text)), model)),
        }
    }

    /// A text of the command line, unescaped if `--escape` asks for it.
    pub fn text(&self, text: &str) -> String {
        if self.escape { unescape(text) } else { text.to_owned() }
    }
}

/// However a prompt came to be empty, it is the command that makes no sense.
pub fn empty_prompt() -> Complaint {
    Complaint::usage("the prompt is empty").hint("give at least one word to answer")
}

/// Refuses a prompt of absurd size before it is copied, rendered and tokenized.
///
/// # Errors
/// More than [`LONGEST_PROMPT`] bytes.
pub fn check_length(bytes: usize) -> Result<(), Complaint> {
    if bytes <= LONGEST_PROMPT {
        return Ok(());
    }
    Err(Complaint::failure(format!("the prompt has {bytes} bytes; at most {LONGEST_PROMPT} are taken"))
        .hint("shorten the prompt; `--prompt-file` takes many of them"))
}

fn is_model(path: &str) -> bool {
    let path = Path::new(path);
    path.join("config.json").is_file() || (path.extension().is_some_and(|e| e == "gguf") && path.is_file())
}

/// A prompt from standard input, untouched.
///
/// # Errors
/// Nothing there, too much, or not UTF-8.
pub fn read_prompt(printer: &Printer) -> anyhow::Result<String> {
    let text = read_stdin(printer, LONGEST_PROMPT as u64 + 1)?;
    if text.len() > LONGEST_PROMPT {
        return Err(Complaint::failure(format!(
            "standard input has more than {LONGEST_PROMPT} bytes, the most that a prompt may have"
        ))
        .hint("shorten the prompt; `--prompt-file` takes many of them")
        .into());
    }
    match text.is_empty() {
        true => Err(Complaint::usage("the prompt is empty: nothing came on standard input").into()),
        false => Ok(text),
    }
}

/// Standard input as text, up to `most` bytes; a character that is cut there is left out.
///
/// # Errors
/// Not UTF-8.
pub fn read_stdin(printer: &Printer, most: u64) -> anyhow::Result<String> {
    match std::io::stdin().is_terminal() {
        true => printer.note("Reading the prompt from the terminal; Ctrl-D on a line of its own ends it"),
        false => printer.detail("Reading the prompt from standard input"),
    }
    let mut bytes = Vec::new();
    std::io::stdin()
        .lock()
        .take(most)
        .read_to_end(&mut bytes)
        .map_err(|error| Complaint::failure(format!("cannot read standard input: {error}")))?;
    let full = bytes.len() as u64 == most;
    String::from_utf8(bytes).or_else(|error| {
        let position = error.utf8_error().valid_up_to();
        let mut bytes = error.into_bytes();
        if full && bytes.len() - position < 4 {
            bytes.truncate(position);
            return Ok(String::from_utf8(bytes)?);
        }
        Err(Complaint::failure(format!("standard input is not UTF-8 text (byte {position})")).into())
    })
}

/// Replaces backslash sequences; one that means nothing stays.
fn unescape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('\\') {
        out.push_str(before);
        let mut tail = after.chars();
        let character = match tail.next() {
            Some('n') => Some('\n'),
            Some('t') => Some('\t'),
            Some('r') => Some('\r'),
            Some(same @ ('\\' | '\'' | '"')) => Some(same),
            Some('x') => after.get(1..3).and_then(hex).inspect(|_| {
                tail.nth(1);
            }),
            _ => None,
        };
        match character {
            Some(character) => {
                out.push(character);
                rest = tail.as_str();
            }
            None => {
                out.push('\\');
                rest = after;
            }
        }
    }
    out.push_str(rest);
    out
}

/// A character below 128: a lone byte above would not be text.
fn hex(digits: &str) -> Option<char> {
    let all_hex = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    u8::from_str_radix(digits, 16).ok().filter(|byte| all_hex && byte.is_ascii()).map(char::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(words: &[&str], prompt: Option<&str>) -> Result<(PromptSource, Option<String>), Complaint> {
        let words = words.iter().map(|word| (*word).to_owned()).collect();
        PromptArgs { words, prompt: prompt.map(str::to_owned), ..Default::default() }.resolve()
    }

    fn text(text: &str) -> PromptSource {
        PromptSource::Text(text.to_owned())
    }

    #[test]
    fn one_argument_is_the_prompt_and_the_first_of_two_the_model() {
        assert_eq!(resolve(&["hi"], None).unwrap(), (text("hi"), None));
        assert_eq!(resolve(&["m", "hi"], None).unwrap(), (text("hi"), Some("m".to_owned())));
        assert_eq!(resolve(&["m"], Some("hi")).unwrap(), (text("hi"), Some("m".to_owned())));
        assert_eq!(resolve(&["-"], None).unwrap(), (PromptSource::Stdin, None));
        assert_eq!(resolve(&[], Some("-")).unwrap(), (PromptSource::Stdin, None));
    }

    #[test]
    fn what_cannot_be_told_apart_is_refused() {
        assert_eq!(resolve(&[], None).unwrap_err().to_string(), "no prompt");
        assert_eq!(resolve(&[""], None).unwrap_err().to_string(), "the prompt is empty");
        let error = resolve(&["What", "is", "this?"], None).unwrap_err();
        assert_eq!(error.to_string(), "3 arguments where a prompt was expected");
        assert!(resolve(&["m", "hi"], Some("hi")).is_err());
    }

    #[test]
    fn k7_backslashes_stay_unless_escape_asks() {
        let path = r"C:\new\table";
        assert_eq!(resolve(&[path], None).unwrap().0, text(path));
        let args = PromptArgs { words: vec![path.to_owned()], escape: true, ..Default::default() };
        assert_eq!(args.resolve().unwrap().0, text("C:\new\table"));
    }

    #[test]
    fn escapes() {
        assert_eq!(unescape(r"a\\nb\x41\x7a\'\"), "a\\nbAz'\\");
        assert_eq!(unescape(r"\q \x \xZZ \xé1 \x+1 \xff"), r"\q \x \xZZ \xé1 \x+1 \xff");
    }

    proptest::proptest! {
        #[test]
        fn unescape_takes_anything(text in ".*") {
            unescape(&text);
        }
    }
}
