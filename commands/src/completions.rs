//! `mlx-bun completions`: a script that teaches a shell our flags.

use std::io::Write;

use clap_complete::Shell;

use crate::cli::command;
use crate::exit::ExitStatus;
use crate::printer::Printer;

const EXAMPLES: &str = "\
Examples:
  mlx-bun completions bash > ~/.local/share/bash-completion/completions/mlx-bun
  mlx-bun completions zsh > \"${fpath[1]}/_mlx-bun\"
  mlx-bun completions fish > ~/.config/fish/completions/mlx-bun.fish";

/// Print a completion script for a shell
#[derive(Clone, Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Runs the verb.
///
/// # Errors
/// Standard output cannot be written.
pub fn run(args: &CompletionsArgs, printer: &Printer) -> anyhow::Result<ExitStatus> {
    // The generator panics when its writer fails, so it gets one that does not.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command(), "mlx-bun", &mut script);
    let mut stdout = printer.stdout();
    stdout.write_all(&script)?;
    stdout.flush()?;
    Ok(ExitStatus::Success)
}
