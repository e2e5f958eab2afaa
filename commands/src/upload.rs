//! `mlx-bun upload`: sends a model's folder to the hub.

use std::io::Write;
use std::path::{Path, PathBuf};

use mlx_bun::checkpoint::hub_cache::is_repo_id;
use mlx_bun::hub::{HubClient, HubError, UploadRequest};

use crate::args::size::shown_size;
use crate::error::Complaint;
use crate::exit::ExitStatus;
use crate::generate::MORE;
use crate::hub::{TransferBar, client, complaint};
use crate::interrupt::Interrupt;
use crate::printer::Printer;

const EXAMPLES: &str = "\
Example:
  HF_TOKEN=hf_... mlx-bun upload --path ./my-model --upload-repo me/my-model --private";

/// Send a folder to the hub as one commit
///
/// The repository is made if it is not there. Files that the hub has already are not sent again. Prints the commit's
/// address.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = MORE, after_long_help = EXAMPLES)]
pub struct UploadArgs {
    /// The folder
    #[arg(long, value_name = "FOLDER", default_value = "mlx_model")]
    path: PathBuf,

    /// The repository, like org/name
    #[arg(long, value_name = "ID")]
    upload_repo: String,

    /// Make it private, if it is made now
    #[arg(long)]
    private: bool,

    /// The branch
    #[arg(long, value_name = "BRANCH", default_value = "main")]
    revision: String,

    /// The commit's message
    #[arg(
        long,
        visible_alias = "commit-message",
        value_name = "TEXT",
        default_value = "Upload with mlx-bun"
    )]
    message: String,

    /// Only files that match this pattern; can be given several times
    #[arg(long, value_name = "PATTERN")]
    include: Vec<String>,

    /// No files that match this pattern; can be given several times
    #[arg(long, value_name = "PATTERN")]
    exclude: Vec<String>,
}

/// Where a verb sends the model that it makes: known to be possible before the work.
pub struct Destination {
    client: HubClient,
    repo_id: String,
}

impl Destination {
    /// For `--upload-repo`.
    ///
    /// # Errors
    /// No token, or an id that is none.
    pub fn new(repo_id: &str) -> Result<Self, Complaint> {
        let client = client(true)?;
        if client.settings().token.is_none() {
            return Err(complaint(HubError::NoToken));
        }
        if !is_repo_id(repo_id) {
            return Err(Complaint::usage(format!("`--upload-repo {repo_id}` is no id like org/name")));
        }
        Ok(Self { client, repo_id: repo_id.to_owned() })
    }

    /// Sends a folder that `verb` made, and prints the commit's address.
    ///
    /// # Errors
    /// What the hub or the network said; the folder stays.
    pub fn send(&self, folder: &Path, verb: &str, printer: &Printer) -> anyhow::Result<()> {
        let request = UploadRequest {
            folder: folder.to_owned(),
            repo_id: self.repo_id.clone(),
            message: Some(format!("Upload with mlx-bun {verb}")),
            ..UploadRequest::default()
        };
        let bar = TransferBar::new(printer, "Sending");
        let sent = self.client.upload(&request, &bar).map_err(|error| {
            let (folder, id) = (folder.display(), &self.repo_id);
            let again =
                format!("{folder} is whole; send it with mlx-bun upload --path {folder} --upload-repo {id}");
            complaint(error).hint(again)
        })?;
        drop(bar);
        writeln!(printer.stdout(), "{}", sent.url)?;
        Ok(())
    }
}

/// Runs the verb.
///
/// # Errors
/// No token, nothing to send, or what the hub, the network or the disk said.
pub fn run(args: &UploadArgs, printer: &Printer) -> anyhow::Result<ExitStatus> {
    let _interrupt = Interrupt::install(printer)?;
    let client = client(true)?;
    let request = UploadRequest {
        folder: args.path.clone(),
        repo_id: args.upload_repo.clone(),
        private: args.private,
        revision: Some(args.revision.clone()),
        message: Some(args.message.clone()),
        include: args.include.clone(),
        exclude: args.exclude.clone(),
    };
    let bar = TransferBar::new(printer, "Sending");
    let sent = client.upload(&request, &bar).map_err(complaint)?;
    drop(bar);
    let transferred = shown_size(sent.transferred);
    printer.note(&format!("{}: {} files, {transferred} transferred", request.repo_id, sent.files));
    writeln!(printer.stdout(), "{}", sent.url)?;
    Ok(ExitStatus::Success)
}
