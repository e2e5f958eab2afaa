//! What the verbs that speak to the hub share: a client, its errors with their hints, and a progress bar.

use std::sync::OnceLock;
use std::time::Duration;

use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::hub::{HubClient, HubError, HubSettings, TransferProgress};

use crate::env;
use crate::error::Complaint;
use crate::printer::{Printer, Progress};

/// A wait that a person would wonder about.
const WORTH_SAYING: Duration = Duration::from_secs(2);

/// A client for what the environment says.
///
/// # Errors
/// A variable makes no sense.
pub fn client(for_upload: bool) -> Result<HubClient, Complaint> {
    let environment = Environment::of_process();
    let settings = HubSettings::from_environment(&environment).map_err(complaint)?;
    let settings = if for_upload { settings.with_upload_token(&environment) } else { settings };
    HubClient::new(settings).map_err(complaint)
}

/// The error with its hint.
pub fn complaint(error: HubError) -> Complaint {
    let complaint = match &error {
        HubError::BadRepoId { .. } | HubError::Setting { .. } => Complaint::usage(error.to_string()),
        _ => Complaint::failure(error.to_string()),
    };
    match error.hint() {
        Some(hint) => complaint.hint(hint),
        None => complaint,
    }
}

/// A bar over the bytes of a transfer.
pub struct TransferBar<'a> {
    printer: &'a Printer,
    label: &'static str,
    bar: OnceLock<Progress>,
}

impl<'a> TransferBar<'a> {
    /// A bar that shows once the size is known.
    pub fn new(printer: &'a Printer, label: &'static str) -> Self {
        Self { printer, label, bar: OnceLock::new() }
    }
}

impl TransferProgress for TransferBar<'_> {
    fn planned(&self, _files: usize, bytes: u64) {
        let unwanted = env::get(env::HF_HUB_DISABLE_PROGRESS_BARS)
            .is_some_and(|value| matches!(value.to_ascii_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE"));
        if !unwanted {
            self.bar.get_or_init(|| self.printer.transfer(self.label, bytes));
        }
    }

    fn advanced(&self, bytes: u64, moved: bool) {
        if let Some(bar) = self.bar.get() {
            bar.advance(bytes, moved);
        }
    }

    fn rewound(&self, bytes: u64) {
        if let Some(bar) = self.bar.get() {
            bar.rewind(bytes);
        }
    }

    fn waiting(&self, time: Duration) {
        if time >= WORTH_SAYING {
            self.printer.note(&format!("The hub asks for {} s of patience", time.as_secs()));
        }
    }

    fn finished(&self, file: &str) {
        self.printer.detail(&format!("done: {file}"));
    }
}
