//! Errors that carry a hint and an exit status; everything else a verb returns is a plain failure.

use std::fmt;

use crate::exit::ExitStatus;
use crate::printer::Printer;

/// One line saying what is wrong, and perhaps one saying what to do.
#[derive(Debug)]
pub struct Complaint {
    message: String,
    /// More of the same kind, one line each.
    pub further: Vec<String>,
    /// What to do about it.
    pub hint: Option<String>,
    /// How the program ends.
    pub status: ExitStatus,
}

impl Complaint {
    /// The command line makes no sense.
    pub fn usage(message: impl Into<String>) -> Self {
        Self { message: message.into(), further: Vec::new(), hint: None, status: ExitStatus::Usage }
    }

    /// The work could not be done.
    pub fn failure(message: impl Into<String>) -> Self {
        Self { message: message.into(), further: Vec::new(), hint: None, status: ExitStatus::Failure }
    }

    /// Adds more of the same kind.
    pub fn further(mut self, messages: impl IntoIterator<Item = String>) -> Self {
        self.further.extend(messages);
        self
    }

    /// Adds what to do about it.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl fmt::Display for Complaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Complaint {}

/// Says what went wrong, with its causes and what to do about it; `about` names the part of the work it was.
pub fn say(error: &anyhow::Error, about: &str, printer: &Printer) -> ExitStatus {
    // Names and messages from files may hold line breaks; an error is one line.
    printer.error(&format!("{about}{error:#}").replace('\n', "\\n"));
    let Some(complaint) = error.downcast_ref::<Complaint>() else { return ExitStatus::Failure };
    for message in &complaint.further {
        printer.error(&message.replace('\n', "\\n"));
    }
    if let Some(hint) = &complaint.hint {
        printer.hint(hint);
    }
    complaint.status
}
