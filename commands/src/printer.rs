//! All output goes through here: data to standard output, everything else to standard error.
//!
//! Messages have one style: `error: ...`, `warning: ...`, `hint: ...`; their meaning never hangs on colour.
//! Progress shows only on a terminal. Model output that goes to a terminal loses its control characters.

use std::borrow::Cow;
use std::io::{self, IsTerminal, Write};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use crate::env;

/// How much is said on standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verbosity {
    /// Errors only.
    Silent,
    /// Errors, warnings and hints.
    Quiet,
    /// Also statistics, notes and progress.
    Default,
    /// Also what is done and with which files.
    Verbose,
}

/// `--color`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum ColorMode {
    /// On a terminal, unless the environment says otherwise
    #[default]
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

impl ColorMode {
    /// Whether to colour a stream: the flag, then `NO_COLOR`, then the forcing variables, then the terminal.
    pub fn resolve(self, terminal: bool, variable: impl Fn(&str) -> Option<String>) -> bool {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let forced = |name: &str| set(name).is_some_and(|value| value != "0");
        match self {
            Self::Always => true,
            Self::Never => false,
            Self::Auto if set(env::NO_COLOR).is_some() => false,
            Self::Auto if forced(env::FORCE_COLOR) || forced(env::CLICOLOR_FORCE) => true,
            Self::Auto => terminal && set(env::TERM).is_none_or(|term| term != "dumb"),
        }
    }
}

/// Where output goes.
#[derive(Clone)]
enum Sink {
    Process,
    #[cfg(test)]
    Captured(Captured),
}

/// What a test sees of a printer's output.
#[cfg(test)]
#[derive(Clone, Default)]
pub struct Captured {
    /// Standard output.
    pub stdout: std::sync::Arc<std::sync::Mutex<Vec<u8>>>,
    /// Standard error.
    pub stderr: std::sync::Arc<std::sync::Mutex<Vec<u8>>>,
}

#[cfg(test)]
impl Captured {
    /// Standard output so far, as text.
    pub fn out(&self) -> String {
        String::from_utf8(self.stdout.lock().unwrap().clone()).unwrap()
    }

    /// Standard error so far, as text.
    pub fn err(&self) -> String {
        String::from_utf8(self.stderr.lock().unwrap().clone()).unwrap()
    }
}

/// The one way to standard output and standard error. Clones share it.
#[derive(Clone)]
pub struct Printer {
    verbosity: Verbosity,
    color: bool,
    stdout_is_terminal: bool,
    bars: Option<MultiProgress>,
    sink: Sink,
}

impl Printer {
    /// A printer for this process.
    pub fn new(verbosity: Verbosity, color: ColorMode, progress: bool) -> Self {
        let terminal = io::stderr().is_terminal();
        let dumb = env::get(env::TERM).is_some_and(|term| term == "dumb");
        // Lines of detail and a moving bar would tear each other apart.
        let progress = progress && terminal && !dumb && verbosity == Verbosity::Default;
        Self {
            verbosity,
            color: color.resolve(terminal, env::get),
            stdout_is_terminal: io::stdout().is_terminal(),
            bars: progress.then(MultiProgress::new),
            sink: Sink::Process,
        }
    }

    /// A printer whose output a test can read.
    #[cfg(test)]
    pub fn captured(verbosity: Verbosity) -> (Self, Captured) {
        let captured = Captured::default();
        let printer = Self {
            verbosity,
            color: false,
            stdout_is_terminal: false,
            bars: None,
            sink: Sink::Captured(captured.clone()),
        };
        (printer, captured)
    }

    /// The same printer, saying no more than `most`.
    pub fn limited(mut self, most: Verbosity) -> Self {
        self.verbosity = self.verbosity.min(most);
        if most < Verbosity::Default {
            self.bars = None;
        }
        self
    }

    /// Whether nothing but errors is said.
    pub fn is_silent(&self) -> bool {
        self.verbosity == Verbosity::Silent
    }

    /// Standard output, for data.
    pub fn stdout(&self) -> Data {
        match &self.sink {
            Sink::Process => Data::Stdout(io::stdout().lock()),
            #[cfg(test)]
            Sink::Captured(captured) => Data::Captured(captured.stdout.clone()),
        }
    }

    /// Text that a model made, as it may go to standard output: a terminal gets no control characters.
    pub fn model_text<'a>(&self, text: &'a str) -> Cow<'a, str> {
        if self.stdout_is_terminal { printable(text) } else { Cow::Borrowed(text) }
    }

    /// What went wrong.
    pub fn error(&self, message: &str) {
        self.message(Verbosity::Silent, Some(("error", "1;31")), message);
    }

    /// What may not be what was meant.
    pub fn warning(&self, message: &str) {
        self.message(Verbosity::Quiet, Some(("warning", "1;33")), message);
    }

    /// What to do about an error or a warning.
    pub fn hint(&self, message: &str) {
        self.message(Verbosity::Quiet, Some(("hint", "1;36")), message);
    }

    /// What a user likes to know: statistics, results of commands.
    pub fn note(&self, message: &str) {
        self.message(Verbosity::Default, None, message);
    }

    /// What one wants to know when something is odd.
    pub fn detail(&self, message: &str) {
        self.message(Verbosity::Verbose, None, message);
    }

    fn message(&self, at: Verbosity, prefix: Option<(&str, &str)>, message: &str) {
        if self.verbosity < at {
            return;
        }
        let message = printable(message);
        let line = match prefix {
            None => format!("{message}\n"),
            Some((word, style)) if self.color => format!("\x1b[{style}m{word}:\x1b[0m {message}\n"),
            Some((word, _)) => format!("{word}: {message}\n"),
        };
        match &self.bars {
            Some(bars) => bars.suspend(|| self.write_stderr(line.as_bytes())),
            None => self.write_stderr(line.as_bytes()),
        }
    }

    /// Writes prepared bytes to standard error. When even that fails there is nobody left to tell.
    pub fn write_stderr(&self, bytes: &[u8]) {
        match &self.sink {
            Sink::Process => {
                let _ = io::stderr().lock().write_all(bytes);
            }
            #[cfg(test)]
            Sink::Captured(captured) => captured.stderr.lock().unwrap().extend_from_slice(bytes),
        }
    }

    /// A bar over `total` steps; it draws nothing when progress is off.
    pub fn progress(&self, label: &'static str, total: u64) -> Progress {
        let Some(bars) = &self.bars else { return Progress(None) };
        let bar = bars.add(ProgressBar::new(total).with_message(label));
        if let Ok(style) =
            ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len} ({per_sec}, {eta} left)")
        {
            bar.set_style(style);
        }
        Progress(Some(bar))
    }

    /// A bar over so many bytes, with speed and time left; it draws nothing when progress is off.
    pub fn transfer(&self, label: &'static str, total: u64) -> Progress {
        let progress = self.progress(label, total);
        let template =
            "{msg} {wide_bar} {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} {eta} left";
        if let (Some(bar), Ok(style)) = (&progress.0, ProgressStyle::with_template(template)) {
            bar.set_style(style);
        }
        progress
    }
}

/// A progress bar that leaves no trace when it goes.
pub struct Progress(Option<ProgressBar>);

impl Progress {
    /// Moves the bar.
    pub fn set(&self, done: u64) {
        if let Some(bar) = &self.0 {
            bar.set_position(done);
        }
    }

    /// Moves the bar on; what was there already says nothing about the speed.
    pub fn advance(&self, by: u64, worked: bool) {
        if let Some(bar) = &self.0 {
            bar.inc(by);
            if !worked {
                bar.reset_eta();
            }
        }
    }

    /// Moves the bar back.
    pub fn rewind(&self, by: u64) {
        if let Some(bar) = &self.0 {
            bar.set_position(bar.position().saturating_sub(by));
            bar.reset_eta();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

/// Standard output. Errors say so, and [`stdout_closed`] recognises the harmless one.
pub enum Data {
    /// The process's own, locked.
    Stdout(io::StdoutLock<'static>),
    /// A test's.
    #[cfg(test)]
    Captured(std::sync::Arc<std::sync::Mutex<Vec<u8>>>),
}

impl Write for Data {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Stdout(stdout) => stdout.write(bytes).map_err(stdout_error),
            #[cfg(test)]
            Self::Captured(buffer) => buffer.lock().unwrap().write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Stdout(stdout) => stdout.flush().map_err(stdout_error),
            #[cfg(test)]
            Self::Captured(_) => Ok(()),
        }
    }
}

/// An error of standard output, told apart from the same error elsewhere.
#[derive(Debug)]
struct StdoutError(io::Error);

impl std::fmt::Display for StdoutError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cannot write to standard output: {}", self.0)
    }
}

impl std::error::Error for StdoutError {}

fn stdout_error(error: io::Error) -> io::Error {
    // `write_all` retries this kind and must still recognise it.
    if error.kind() == io::ErrorKind::Interrupted {
        return error;
    }
    io::Error::new(error.kind(), StdoutError(error))
}

/// Whether the reader of standard output went away: the end of the work, not a failure.
pub fn stdout_closed(error: &anyhow::Error) -> bool {
    error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>()).any(|error| {
        error.kind() == io::ErrorKind::BrokenPipe
            && error.get_ref().is_some_and(|inner| inner.is::<StdoutError>())
    })
}

/// The text without characters that steer a terminal; line ends and tabs stay.
fn printable(text: &str) -> Cow<'_, str> {
    let steers = |c: char| c.is_control() && c != '\n' && c != '\t';
    if text.contains(steers) { Cow::Owned(text.replace(steers, "\u{fffd}")) } else { Cow::Borrowed(text) }
}

/// Plain colours, a visible cursor, a fresh line: how a terminal is left when the program is cut short.
pub fn restore_terminal() {
    let mut stderr = io::stderr().lock();
    if stderr.is_terminal() {
        let _ = stderr.write_all(b"\x1b[0m\x1b[?25h\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(mode: ColorMode, terminal: bool, variables: &[(&str, &str)]) -> bool {
        mode.resolve(terminal, |name| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn color_follows_flag_then_environment_then_terminal() {
        use ColorMode::{Always, Auto, Never};
        assert!(resolve(Auto, true, &[]));
        assert!(!resolve(Auto, false, &[]));
        assert!(resolve(Always, false, &[("NO_COLOR", "1")]));
        assert!(!resolve(Never, true, &[("FORCE_COLOR", "1")]));
        assert!(!resolve(Auto, true, &[("NO_COLOR", "0"), ("FORCE_COLOR", "1")]));
        assert!(resolve(Auto, true, &[("NO_COLOR", "")]));
        assert!(resolve(Auto, false, &[("CLICOLOR_FORCE", "1")]));
        assert!(!resolve(Auto, false, &[("FORCE_COLOR", "0")]));
        assert!(!resolve(Auto, true, &[("TERM", "dumb")]));
    }

    #[test]
    fn verbosity_decides_what_is_said() {
        let said = |verbosity| {
            let (printer, captured) = Printer::captured(verbosity);
            printer.error("e");
            printer.warning("w");
            printer.hint("h");
            printer.note("n");
            printer.detail("d");
            assert_eq!(captured.out(), "");
            captured.err()
        };
        assert_eq!(said(Verbosity::Silent), "error: e\n");
        assert_eq!(said(Verbosity::Quiet), "error: e\nwarning: w\nhint: h\n");
        assert_eq!(said(Verbosity::Default), "error: e\nwarning: w\nhint: h\nn\n");
        assert_eq!(said(Verbosity::Verbose), "error: e\nwarning: w\nhint: h\nn\nd\n");
    }

    #[test]
    fn escape_sequences_do_not_reach_a_terminal() {
        assert_eq!(printable("a\x1b]0;title\x07\tb\nc\u{9b}2J"), "a\u{fffd}]0;title\u{fffd}\tb\nc\u{fffd}2J");
        assert!(matches!(printable("plain é 漢"), Cow::Borrowed(_)));
    }

    #[test]
    fn only_our_own_broken_pipe_is_forgiven() {
        let ours = stdout_error(io::ErrorKind::BrokenPipe.into());
        assert!(stdout_closed(&anyhow::Error::from(ours).context("while printing")));
        assert!(!stdout_closed(&anyhow::Error::from(io::Error::from(io::ErrorKind::BrokenPipe))));
        let full = stdout_error(io::ErrorKind::StorageFull.into());
        assert!(!stdout_closed(&anyhow::Error::from(full)));
    }
}
