//! The command `mlx-bun`.

mod goldens;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "mlx-bun", version)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    Goldens(goldens::Goldens),
}

fn main() -> ExitCode {
    let Verb::Goldens(verb) = Cli::parse().verb;
    match verb.run(&mut std::io::stdout().lock()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            #[allow(clippy::print_stderr)]
            {
                eprintln!("error: {error:#}");
            }
            ExitCode::FAILURE
        }
    }
}
