//! `mlx-bun get`: downloads a model into the Hugging Face cache.

use std::io::Write;
use std::path::PathBuf;

use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::checkpoint::hub_cache::is_repo_id;
use mlx_bun::hub::DownloadRequest;
use mlx_bun::registry::Registry;

use crate::args::size::shown_size;
use crate::error::Complaint;
use crate::exit::ExitStatus;
use crate::generate::MORE;
use crate::hub::{TransferBar, client, complaint};
use crate::interrupt::Interrupt;
use crate::printer::Printer;

const EXAMPLES: &str = "\
Examples:
  mlx-bun get mlx-community/Qwen3-0.6B-4bit
  mlx-bun get qwen3-0.6b                                 # renew one that is there already
  mlx-bun get org/name --include '*Q4_K_M.gguf'
  mlx-bun generate --model \"$(mlx-bun get -q org/name)\" \"Hello\"";

/// Download a model from the hub, or go on with a download
///
/// Prints the directory it is in. Files that a model does not need are left out; `--include '*'` takes all.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = MORE, after_long_help = EXAMPLES)]
pub struct GetArgs {
    /// The model's id on the hub (org/name), or part of the name of one that was downloaded before
    #[arg(value_name = "MODEL")]
    model: String,

    /// Branch, tag or commit
    #[arg(long, value_name = "REVISION", default_value = "main")]
    revision: String,

    /// Only files that match this pattern; can be given several times
    #[arg(long, value_name = "PATTERN")]
    include: Vec<String>,

    /// No files that match this pattern; can be given several times
    #[arg(long, value_name = "PATTERN")]
    exclude: Vec<String>,

    /// Download into this folder instead of the cache
    #[arg(long, value_name = "FOLDER")]
    local_dir: Option<PathBuf>,

    /// Files to download at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..=64))]
    max_workers: u8,

    /// Print one JSON object: path, repo, commit, files, bytes, transferred
    #[arg(long)]
    json: bool,
}

/// Runs the verb.
///
/// # Errors
/// The hub, the network or the disk.
pub fn run(args: &GetArgs, printer: &Printer) -> anyhow::Result<ExitStatus> {
    // Never asked: whatever ends a download, the next one goes on.
    let _interrupt = Interrupt::install(printer)?;
    let client = client(false)?;
    let request = DownloadRequest {
        repo_id: repo_of(&args.model)?,
        revision: Some(args.revision.clone()),
        include: args.include.clone(),
        exclude: args.exclude.clone(),
        local_dir: args.local_dir.clone(),
        workers: usize::from(args.max_workers),
    };
    let bar = TransferBar::new(printer, "Downloading");
    let got = client.download(&request, &bar).map_err(complaint)?;
    drop(bar);
    let how = match got.transferred {
        0 => "all there already".to_owned(),
        bytes => format!("{} transferred", shown_size(bytes)),
    };
    printer.note(&format!("{}: {} files, {}, {how}", request.repo_id, got.files, shown_size(got.bytes)));
    let mut out = printer.stdout();
    if args.json {
        let report = serde_json::json!({
            "path": got.path, "repo": request.repo_id, "commit": got.commit, "files": got.files,
            "bytes": got.bytes, "transferred": got.transferred,
        });
        writeln!(out, "{report}")?;
    } else {
        writeln!(out, "{}", got.path.display())?;
    }
    Ok(ExitStatus::Success)
}

/// An id is taken as it is; anything else is looked for among the models that are there.
fn repo_of(argument: &str) -> anyhow::Result<String> {
    if is_repo_id(argument) {
        return Ok(argument.to_owned());
    }
    let mut registry = Registry::open(&Environment::of_process())?;
    registry.scan()?;
    let no_id = "give the id of a model on the hub, like org/name";
    match registry.resolve(argument)? {
        Ok(model) if model.revision.is_some() => Ok(model.repo_id),
        Ok(model) => {
            Err(Complaint::failure(format!("{} did not come from the hub", model.repo_id)).hint(no_id).into())
        }
        Err(error) => Err(Complaint::failure(error.to_string()).hint(no_id).into()),
    }
}
