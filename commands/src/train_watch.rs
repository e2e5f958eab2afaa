//! `mlx-bun train-watch`: follows a run on a terminal, over ssh too.

mod screen;
mod state;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyModifiers};

use self::state::State;
use crate::error::Complaint;
use crate::exit::ExitStatus;
use crate::printer::Printer;
use crate::train::metrics;

/// Between looks at the file.
const INTERVAL: Duration = Duration::from_millis(500);

const EXAMPLES: &str = "\
Example:
  mlx-bun train-watch ./adapters
  ssh -t desk mlx-bun train-watch runs/one
  mlx-bun train-watch ./adapters --once";

/// Follow a training run on the terminal
///
/// Draws the losses and tells the learning rate, the speed, the memory and the time left. Needs nothing of the run but
/// its folder: it reads metrics.jsonl, and may begin before the run does and outlive it. Leave with q.
#[derive(Clone, Debug, clap::Args)]
#[command(args_override_self = true, after_help = crate::generate::MORE, after_long_help = EXAMPLES)]
pub struct TrainWatchArgs {
    /// The adapter's folder, or a metrics.jsonl file
    #[arg(value_name = "DIR", default_value = "adapters")]
    path: PathBuf,

    /// Print where the run stands in a few lines and leave
    #[arg(long)]
    once: bool,
}

/// Runs the verb.
///
/// # Errors
/// There is no run to follow, or no terminal.
pub fn run(args: &TrainWatchArgs, printer: &Printer) -> anyhow::Result<ExitStatus> {
    let file = metrics::file_of(&args.path);
    if args.once {
        let state = State::of(&metrics::read(&file));
        if state.is_empty() {
            return Err(nothing(&file).into());
        }
        use std::io::Write as _;
        let mut out = printer.stdout();
        state.summary().iter().try_for_each(|line| writeln!(out, "{line}"))?;
        out.flush()?;
        return Ok(ExitStatus::Success);
    }
    if !std::io::stdout().is_terminal() {
        return Err(Complaint::usage("standard output is no terminal")
            .hint("`--once` prints where the run stands")
            .into());
    }
    let mut terminal = ratatui::try_init().context("the terminal cannot be drawn on")?;
    let followed = follow(&mut terminal, &args.path);
    ratatui::restore();
    followed
}

fn nothing(file: &Path) -> Complaint {
    Complaint::failure(format!("there is no run to follow: {} has no figures", file.display()))
        .hint("name the folder that `mlx-bun train --adapter-path` writes")
}

fn follow(terminal: &mut ratatui::DefaultTerminal, path: &Path) -> anyhow::Result<ExitStatus> {
    loop {
        let state = State::of(&metrics::read(&metrics::file_of(path)));
        terminal.draw(|frame| screen::draw(frame, &state))?;
        if !event::poll(INTERVAL)? {
            continue;
        }
        if let Event::Key(key) = event::read()? {
            match key.code {
                KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => {
                    return Ok(ExitStatus::Interrupted);
                }
                KeyCode::Char('q') | KeyCode::Esc => return Ok(ExitStatus::Success),
                _ => {}
            }
        }
    }
}
