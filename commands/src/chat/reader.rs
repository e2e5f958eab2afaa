//! Where lines come from: the line editor on a terminal, else standard input as it is.

use std::fs;
use std::io::{self, BufRead, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustyline::error::ReadlineError;
use rustyline::history::FileHistory;
use rustyline::{Config, Editor};

use crate::args::prompt::LONGEST_PROMPT;
use crate::env;

/// Inputs that the history keeps.
const HISTORY_SIZE: usize = 1000;

/// A line, or why there is none.
#[derive(Debug)]
pub enum Line {
    /// A line, without its end.
    Text(String),
    /// A line that cannot be taken, and why.
    Unreadable(String),
    /// Ctrl-C at the prompt.
    Interrupted,
    /// Ctrl-D, or the end of the input.
    End,
}

/// Gives the lines of a conversation.
pub trait Reader {
    /// The next line; `continued` when an input has begun.
    ///
    /// # Errors
    /// The input cannot be read.
    fn line(&mut self, continued: bool) -> anyhow::Result<Line>;

    /// Keeps a complete input for later sessions.
    fn remember(&mut self, input: &str);

    /// Whether a person sits there.
    fn is_interactive(&self) -> bool;
}

/// Lines of a pipe or a file: nothing is asked for.
pub struct Piped<R> {
    input: R,
    number: usize,
}

impl<R: BufRead> Piped<R> {
    /// Over the lines of `input`.
    pub fn new(input: R) -> Self {
        Self { input, number: 0 }
    }
}

impl<R: BufRead> Reader for Piped<R> {
    fn line(&mut self, _: bool) -> anyhow::Result<Line> {
        let mut line = Vec::new();
        self.number += 1;
        let most = LONGEST_PROMPT as u64 + 1;
        let count = self
            .input
            .by_ref()
            .take(most)
            .read_until(b'\n', &mut line)
            .map_err(|error| anyhow::anyhow!("cannot read standard input: {error}"))?;
        if count == 0 {
            return Ok(Line::End);
        }
        let refused = |why: String| {
            Line::Unreadable(format!("line {} of standard input {why}; it is skipped", self.number))
        };
        if count as u64 == most && line.last() != Some(&b'\n') {
            self.input.skip_until(b'\n')?;
            return Ok(refused(format!("has more than {LONGEST_PROMPT} bytes")));
        }
        let Ok(line) = String::from_utf8(line) else { return Ok(refused("is not UTF-8 text".to_owned())) };
        let text = line.strip_suffix('\n').unwrap_or(&line);
        Ok(Line::Text(text.strip_suffix('\r').unwrap_or(text).to_owned()))
    }

    fn remember(&mut self, _: &str) {}

    fn is_interactive(&self) -> bool {
        false
    }
}

/// The line editor.
pub struct Terminal {
    editor: Editor<(), FileHistory>,
    history: Option<PathBuf>,
}

impl Terminal {
    /// With the history of `file`, if there is to be one. The second value says why it cannot be kept.
    ///
    /// # Errors
    /// The terminal cannot be used.
    pub fn new(file: Option<PathBuf>) -> anyhow::Result<(Self, Option<String>)> {
        let config = Config::builder().max_history_size(HISTORY_SIZE)?.history_ignore_space(true).build();
        let mut editor = Editor::with_config(config)?;
        let (history, problem) = match file.map(|file| open_history(&mut editor, file)) {
            None => (None, None),
            Some(Ok(file)) => (Some(file), None),
            Some(Err(problem)) => (None, Some(problem)),
        };
        Ok((Self { editor, history }, problem))
    }
}

/// Loads the history; its folder is made, for the user alone, if it is not there.
fn open_history(editor: &mut Editor<(), FileHistory>, file: PathBuf) -> Result<PathBuf, String> {
    let problem =
        |error: &dyn std::fmt::Display| format!("no history: `{}` cannot be used: {error}", file.display());
    if let Some(folder) = file.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(|error| problem(&error))?;
    }
    match editor.load_history(&file) {
        Ok(()) => Ok(file),
        Err(ReadlineError::Io(error)) if error.kind() == io::ErrorKind::NotFound => Ok(file),
        Err(error) => Err(problem(&error)),
    }
}

impl Reader for Terminal {
    fn line(&mut self, continued: bool) -> anyhow::Result<Line> {
        // What was printed before must be on the screen before the editor takes it over.
        io::stdout().lock().flush()?;
        match self.editor.readline(if continued { "... " } else { ">>> " }) {
            Ok(line) => Ok(Line::Text(line)),
            Err(ReadlineError::Interrupted) => Ok(Line::Interrupted),
            Err(ReadlineError::Eof) => Ok(Line::End),
            Err(ReadlineError::Io(error)) if error.kind() == io::ErrorKind::InvalidData => {
                Ok(Line::Unreadable("the line is not UTF-8 text; it is skipped".to_owned()))
            }
            Err(error) => Err(error.into()),
        }
    }

    fn remember(&mut self, input: &str) {
        // Written at once, so that a crash later loses nothing; a full disk must not end a conversation.
        let added = self.editor.add_history_entry(input).unwrap_or(false);
        if let (true, Some(file)) = (added, &self.history)
            && self.editor.append_history(file).is_err()
        {
            self.history = None;
        }
    }

    fn is_interactive(&self) -> bool {
        true
    }
}

/// `$XDG_STATE_HOME/mlx-bun/chat_history`, by default under `~/.local/state`.
pub fn history_file() -> Option<PathBuf> {
    history_under(env::get(env::XDG_STATE_HOME), env::get(env::HOME))
}

/// The specification tells to ignore a relative `XDG_STATE_HOME`.
fn history_under(state_home: Option<String>, home: Option<String>) -> Option<PathBuf> {
    let state = state_home.map(PathBuf::from).filter(|path| path.is_absolute());
    let state = state.or_else(|| home.map(|home| Path::new(&home).join(".local/state")))?;
    Some(state.join("mlx-bun/chat_history"))
}

#[cfg(test)]
mod tests {
    use rustyline::history::{History, SearchDirection};

    use super::*;

    #[test]
    fn lines_that_are_no_text_or_too_long_are_skipped() {
        let mut input = b"caf\xe9\r\nfirst\r\n".to_vec();
        input.extend(vec![b'x'; LONGEST_PROMPT + 9]);
        input.extend(b"\nlast");
        let mut reader = Piped::new(&*input);
        let mut next = || match reader.line(false).unwrap() {
            Line::Text(text) | Line::Unreadable(text) => Some(text),
            Line::Interrupted | Line::End => None,
        };
        assert_eq!(next().unwrap(), "line 1 of standard input is not UTF-8 text; it is skipped");
        assert_eq!(next().unwrap(), "first");
        assert!(next().unwrap().starts_with("line 3 of standard input has more than "));
        assert_eq!(next().unwrap(), "last");
        assert_eq!(next(), None);
    }

    #[test]
    fn the_history_lies_in_the_state_folder() {
        let under = |state: Option<&str>, home: Option<&str>| {
            history_under(state.map(str::to_owned), home.map(str::to_owned))
        };
        let path = |path: &str| Some(PathBuf::from(path));
        assert_eq!(under(Some("/s"), Some("/h")), path("/s/mlx-bun/chat_history"));
        assert_eq!(under(None, Some("/h")), path("/h/.local/state/mlx-bun/chat_history"));
        assert_eq!(under(Some("relative"), Some("/h")), path("/h/.local/state/mlx-bun/chat_history"));
        assert_eq!(under(None, None), None);
    }

    #[test]
    fn the_history_is_private() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("state/mlx-bun/chat_history");
        let mut editor = Editor::with_config(Config::builder().build()).unwrap();
        open_history(&mut editor, file.clone()).unwrap();
        editor.add_history_entry("two\nlines").unwrap();
        editor.append_history(&file).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(file.parent().unwrap()), mode(&file)), (0o700, 0o600));
        let mut again = Editor::with_config(Config::builder().build()).unwrap();
        open_history(&mut again, file).unwrap();
        assert_eq!(again.history().get(0, SearchDirection::Forward).unwrap().unwrap().entry, "two\nlines");
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_a_problem_not_a_failure() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut editor = Editor::with_config(Config::builder().build()).unwrap();
        let problem = open_history(&mut editor, file.path().join("x/chat_history")).unwrap_err();
        assert!(problem.starts_with("no history: `"), "{problem}");
    }
}
