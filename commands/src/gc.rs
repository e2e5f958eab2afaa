//! `mlx-bun gc`: deletes old snapshots and what only they need.

use std::io::Write;
use std::time::Duration;

use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::checkpoint::hub_cache::HubCache;
use mlx_bun::registry::gc::{GcOptions, GcPlan, execute, plan};
use serde_json::json;

use crate::args::size::shown_size;
use crate::exit::ExitStatus;
use crate::generate::MORE;
use crate::interrupt::Interrupt;
use crate::printer::Printer;

const EXAMPLES: &str = "\
Examples:
  mlx-bun gc                # what would be deleted
  mlx-bun gc --yes          # delete it
  mlx-bun gc org/name";

/// Delete old snapshots from the Hugging Face cache
///
/// And with them the files that only they need. Without `--yes` it only tells what it would delete. What a branch or tag names is kept, and so is all that a link
/// from anywhere in the cache leads to.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = MORE, after_long_help = EXAMPLES)]
pub struct GcArgs {
    /// Only these models (org/name)
    #[arg(value_name = "MODEL")]
    repos: Vec<String>,

    /// Delete
    #[arg(short, long)]
    yes: bool,

    /// Delete nothing, even with --yes
    #[arg(long)]
    dry_run: bool,

    /// Also old snapshots with files that no kept one has
    #[arg(long)]
    force: bool,

    /// Unfinished downloads count as abandoned after so many days
    #[arg(long, value_name = "DAYS", default_value_t = 7)]
    abandoned_after: u32,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the verb.
///
/// # Errors
/// The cache cannot be read, or something cannot be deleted.
pub fn run(args: &GcArgs, printer: &Printer) -> anyhow::Result<ExitStatus> {
    let _interrupt = Interrupt::install(printer)?;
    let cache = HubCache::from_environment(&Environment::of_process());
    let options = GcOptions {
        force: args.force,
        repos: args.repos.clone(),
        abandoned_after: Duration::from_secs(u64::from(args.abandoned_after) * 24 * 3600),
    };
    let plan = plan(&cache, &options)?;
    let deletes = args.yes && !args.dry_run;
    let mut out = printer.stdout();
    if !args.json {
        tell(&mut out, &plan)?;
    }
    if !deletes {
        if args.json {
            writeln!(out, "{}", json!({"plan": plan, "reclaimable_bytes": plan.reclaimable()}))?;
        } else if !plan.is_empty() {
            printer.hint("nothing was deleted; `--yes` deletes");
        }
        return Ok(ExitStatus::Success);
    }
    let result = execute(&cache, &options, &plan)?;
    for repo in &result.busy {
        printer.warning(&format!("{repo} was left alone: a download is going on"));
    }
    if args.json {
        writeln!(out, "{}", json!({"plan": plan, "result": result}))?;
    } else if !plan.is_empty() {
        let (snapshots, blobs) = (result.snapshots, result.blobs);
        let bytes = shown_size(result.reclaimed_bytes);
        writeln!(out, "deleted {snapshots} snapshots and {blobs} files: {bytes} reclaimed")?;
    }
    Ok(ExitStatus::Success)
}

fn tell(out: &mut impl Write, plan: &GcPlan) -> std::io::Result<()> {
    for snapshot in &plan.snapshots {
        writeln!(out, "old snapshot  {}@{}", snapshot.repo_id, snapshot.commit)?;
    }
    for skipped in &plan.skipped {
        let why = match skipped.only_here.as_slice() {
            [] => "something in the cache links to it".to_owned(),
            [file] => format!("only it has {file}"),
            [file, rest @ ..] => format!("only it has {file} and {} more", rest.len()),
        };
        writeln!(out, "kept          {}@{}: {why}", skipped.repo_id, skipped.commit)?;
    }
    for partial in &plan.partials {
        let name = partial.path.file_name().unwrap_or_default().to_string_lossy();
        writeln!(out, "abandoned     {name} ({})", shown_size(partial.bytes))?;
    }
    if plan.is_empty() {
        return writeln!(out, "nothing to reclaim");
    }
    let files = plan.blobs.len() + plan.partials.len();
    writeln!(out, "{} snapshots, {files} files: {}", plan.snapshots.len(), shown_size(plan.reclaimable()))
}
