//! The command `mlx-bun`: parse, call the engine, print. One file a verb; this is their table.

mod ab;
mod allocator;
mod args;
mod bench_matrix;
mod benchmark;
mod cache_prompt;
mod chat;
mod child;
mod cli;
mod compiled;
mod completions;
mod convert;
mod engine;
mod env;
mod error;
mod eval;
mod evals;
mod exit;
mod fit;
mod fuse;
mod gc;
mod generate;
mod get;
mod gguf_export;
mod goldens;
mod hub;
mod input_file;
mod interrupt;
mod load;
mod ls;
mod man;
mod output;
mod output_file;
mod perplexity;
mod plot;
mod printer;
#[cfg(test)]
#[allow(dead_code)] // each test program uses its part
#[path = "../tests/support/processes.rs"]
mod processes;
mod prompt;
mod prompt_file;
mod recorder;
mod reference;
mod resident_memory;
mod rng;
mod scan;
#[cfg(test)]
mod scripted;
mod serve;
mod session;
mod table;
mod train;
mod train_watch;
mod upload;
mod version;

use std::time::Duration;

use cli::Verb;
use error::Complaint;
use exit::ExitStatus;
use mlx_bun::levers;
use printer::{ColorMode, Printer, Verbosity};

fn main() {
    allocator::end_when_full();
    let arguments: Vec<_> = std::env::args_os().collect();
    let status = match cli::parse(&arguments) {
        Ok(Ok(cli)) => {
            let complaints = cli.printer();
            let printer = cli.printer();
            run(cli.verb, printer).unwrap_or_else(|error| report(&error, &complaints))
        }
        Ok(Err(status)) => status,
        Err(error) => report(&error, &Printer::new(Verbosity::Default, ColorMode::Auto, false)),
    };
    interrupt::settle(status).leave()
}

fn run(verb: Verb, printer: Printer) -> anyhow::Result<ExitStatus> {
    slow_down()?;
    load::check_isa()?;
    match verb {
        Verb::Generate(args) => generate::run(&args, printer, load::load),
        Verb::Chat(args) => chat::run(&args, printer, load::load),
        Verb::CachePrompt(args) => cache_prompt::run(&args, &printer, load::load),
        Verb::Serve(args) => serve::run(&args, &printer),
        Verb::Get(args) => get::run(&args, &printer),
        Verb::Ls(args) => ls::run(&args, &printer),
        Verb::Scan(args) => scan::run(&args, &printer),
        Verb::Fit(args) => fit::run(&args, &printer),
        Verb::Gc(args) => gc::run(&args, &printer),
        Verb::Upload(args) => upload::run(&args, &printer),
        Verb::Convert(args) => convert::run(&args, &printer),
        Verb::Fuse(args) => fuse::run(&args, &printer),
        Verb::Eval(args) => eval::run(&args, &printer),
        Verb::Perplexity(args) => perplexity::run(&args, &printer),
        Verb::Train(args) => train::run(&args, &printer),
        Verb::TrainWatch(args) => train_watch::run(&args, &printer),
        Verb::BenchMatrix(args) => bench_matrix::run(&args, &printer),
        Verb::Ab(args) => ab::run(&args, &printer),
        Verb::Benchmark(args) => benchmark::run(&args, &printer),
        Verb::Evals(args) => evals::run(&args, &printer),
        Verb::Goldens(args) => {
            let agrees = args.run(&mut printer.stdout())?;
            Ok(if agrees { ExitStatus::Success } else { ExitStatus::Failure })
        }
        Verb::Completions(args) => completions::run(&args, &printer),
        Verb::Man(args) => man::run(&args, &printer),
        Verb::Docs(args) => reference::run(&args, &printer),
    }
}

/// `MLX_BUN_DEBUG_STEP_DELAY_MS`, for whichever verb generates.
fn slow_down() -> anyhow::Result<()> {
    let Some(text) = env::get(env::MLX_BUN_DEBUG_STEP_DELAY_MS) else { return Ok(()) };
    let milliseconds = text.parse::<f64>().ok().filter(|ms| (0.0..=60_000.0).contains(ms));
    let name = env::MLX_BUN_DEBUG_STEP_DELAY_MS;
    let complaint = || Complaint::usage(format!("`{name}={text}` must be a number in [0, 60000]"));
    levers::set_step_delay(Duration::from_secs_f64(milliseconds.ok_or_else(complaint)? / 1e3));
    Ok(())
}

/// Says what went wrong; nothing at all when only the reader went away, or the user did not want to wait.
fn report(error: &anyhow::Error, printer: &Printer) -> ExitStatus {
    if printer::stdout_closed(error) {
        return ExitStatus::Success;
    }
    if interrupt::asked() {
        return ExitStatus::Interrupted;
    }
    error::say(error, "", printer)
}
