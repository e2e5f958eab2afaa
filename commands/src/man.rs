//! `mlx-bun man`: manual pages from the flags, with the exit codes and variables that clap knows nothing of.

use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;

use clap::Command;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

use crate::cli::command;
use crate::env;
use crate::error::Complaint;
use crate::exit::ExitStatus;
use crate::printer::Printer;

const EXAMPLES: &str = "\
Examples:
  mlx-bun man | man -l -
  mlx-bun man generate
  mlx-bun man --dir ~/.local/share/man/man1";

/// Print a manual page, or write all of them
#[derive(Clone, Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct ManArgs {
    /// The verb whose page to print; the program's own page if left out
    #[arg(conflicts_with = "dir")]
    verb: Option<String>,

    /// Write every page into this folder
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// Runs the verb.
///
/// # Errors
/// An unknown verb, a folder or standard output that cannot be written.
pub fn run(args: &ManArgs, printer: &Printer) -> anyhow::Result<ExitStatus> {
    let mut command = command().disable_help_subcommand(true);
    command.build();
    let pages = pages(&command)?;
    if let Some(dir) = &args.dir {
        let cannot = |path: &std::path::Path, error| {
            Complaint::failure(format!("cannot write `{}`: {error}", path.display()))
        };
        fs::create_dir_all(dir).map_err(|error| cannot(dir, error))?;
        for (name, page) in &pages {
            let path = dir.join(format!("{name}.1"));
            fs::write(&path, page).map_err(|error| cannot(&path, error))?;
        }
        printer.note(&format!("{} pages written to {}", pages.len(), dir.display()));
        return Ok(ExitStatus::Success);
    }
    let verb = args.verb.as_ref();
    let wanted = match verb.map(|verb| command.find_subcommand(verb)) {
        None => "mlx-bun".to_owned(),
        Some(Some(verb)) => format!("mlx-bun-{}", verb.get_name()),
        Some(None) => {
            let verb = verb.map_or("", String::as_str);
            return Err(Complaint::usage(format!("no verb `{verb}`"))
                .hint("`mlx-bun --help` lists them")
                .into());
        }
    };
    let page = pages.iter().find(|(name, _)| *name == wanted);
    let (_, page) = page.ok_or_else(|| Complaint::usage(format!("`{wanted}` has no page")))?;
    let mut stdout = printer.stdout();
    stdout.write_all(page)?;
    stdout.flush()?;
    Ok(ExitStatus::Success)
}

/// Names and texts of all pages: the command's own, then those of the verbs below it.
fn pages(command: &Command) -> io::Result<Vec<(String, Vec<u8>)>> {
    let name = command.get_display_name().unwrap_or(command.get_name()).to_owned();
    let mut all = vec![(name, page(command)?)];
    for verb in command.get_subcommands().filter(|verb| !verb.is_hide_set() && verb.get_name() != "help") {
        all.extend(pages(verb)?);
    }
    Ok(all)
}

fn page(command: &Command) -> io::Result<Vec<u8>> {
    let source = concat!("mlx-bun ", env!("CARGO_PKG_VERSION"));
    let man = Man::new(command.clone()).manual("mlx-bun manual").source(source);
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    // clap_mangen would name every flag here.
    let usage = command.clone().render_usage().to_string();
    let mut synopsis = Roff::new();
    synopsis.control("SH", ["SYNOPSIS"]);
    synopsis.text([bold(usage.trim_start_matches("Usage: "))]);
    synopsis.to_writer(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if command.get_subcommands().any(|verb| !verb.is_hide_set()) {
        man.render_subcommands_section(&mut page)?;
    }
    let mut tables = Roff::new();
    tables.control("SH", ["EXIT STATUS"]);
    for (status, meaning) in ExitStatus::ALL {
        tables.control("TP", []);
        tables.text([bold(status.code().to_string())]);
        tables.text([roman(meaning)]);
    }
    tables.control("SH", ["ENVIRONMENT"]);
    for variable in env::GROUPS.iter().flat_map(|(_, variables)| *variables) {
        tables.control("TP", []);
        tables.text([bold(variable.name)]);
        tables.text([roman(variable.doc)]);
    }
    tables.to_writer(&mut page)?;
    man.render_extra_section(&mut page)?;
    if command.get_version().is_some() {
        man.render_version_section(&mut page)?;
    }
    Ok(page)
}
