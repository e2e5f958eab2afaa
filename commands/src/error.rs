//! Errors that carry a hint and an exit status; everything else a verb returns is a plain failure.

use std::fmt;

use crate::exit::ExitStatus;

/// One line saying what is wrong, and perhaps one saying what to do.
#[derive(Debug)]
pub struct Complaint {
    message: String,
    /// What to do about it.
    pub hint: Option<String>,
    /// How the program ends.
    pub status: ExitStatus,
}

impl Complaint {
    /// The command line makes no sense.
    pub fn usage(message: impl Into<String>) -> Self {
        Self { message: message.into(), hint: None, status: ExitStatus::Usage }
    }

    /// The work could not be done.
    pub fn failure(message: impl Into<String>) -> Self {
        Self { message: message.into(), hint: None, status: ExitStatus::Failure }
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
