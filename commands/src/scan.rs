//! `mlx-bun scan`: brings the registry of models up to date.

use std::io::Write;
use std::path::PathBuf;

use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::registry::Registry;

use crate::exit::ExitStatus;
use crate::generate::MORE;
use crate::printer::Printer;

const EXAMPLES: &str = "\
Examples:
  mlx-bun scan
  mlx-bun scan ~/models
  mlx-bun scan --forget ~/models";

/// Look for models in the Hugging Face cache and in folders of yours
///
/// Folders that are named once are looked through from then on. Every command that needs the list looks for changes
/// by itself; this one tells what it found.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = MORE, after_long_help = EXAMPLES)]
pub struct ScanArgs {
    /// Folders with models to look through from now on
    #[arg(value_name = "FOLDER")]
    folders: Vec<PathBuf>,

    /// A folder not to look through any more
    #[arg(long, value_name = "FOLDER")]
    forget: Vec<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the verb.
///
/// # Errors
/// A folder is none, or the registry cannot be written.
pub fn run(args: &ScanArgs, printer: &Printer) -> anyhow::Result<ExitStatus> {
    let mut registry = Registry::open(&Environment::of_process())?;
    for folder in &args.folders {
        registry.add_folder(folder)?;
    }
    for folder in &args.forget {
        if !registry.remove_folder(folder)? {
            printer.warning(&format!("{} was not looked through", folder.display()));
        }
    }
    let report = registry.scan()?;
    let mut out = printer.stdout();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&report)?)?;
    } else {
        let models = if report.models == 1 { "model" } else { "models" };
        writeln!(out, "{} {models}: {} new or changed, {} gone", report.models, report.read, report.removed)?;
    }
    for (path, reason) in &report.skipped {
        printer.detail(&format!("skipped {}: {reason}", path.display()));
    }
    if !report.skipped.is_empty() && !args.json {
        printer.note(&format!("{} directories are no usable model; -v tells why", report.skipped.len()));
    }
    Ok(ExitStatus::Success)
}
