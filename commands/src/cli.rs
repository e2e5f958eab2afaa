//! The command line: global flags, the verbs, and how what clap refuses is said.

use std::ffi::OsString;
use std::io::{IsTerminal, Write};

use clap::error::{ContextKind, ErrorKind};
use clap::{ArgAction, ColorChoice, Command, CommandFactory, FromArgMatches};

use crate::ab::AbArgs;
use crate::bench_matrix::BenchMatrixArgs;
use crate::benchmark::BenchmarkArgs;
use crate::cache_prompt::CachePromptArgs;
use crate::chat::ChatArgs;
use crate::completions::CompletionsArgs;
use crate::convert::ConvertArgs;
use crate::env;
use crate::eval::EvalArgs;
use crate::evals::EvalsArgs;
use crate::exit::ExitStatus;
use crate::fit::FitArgs;
use crate::fuse::FuseArgs;
use crate::gc::GcArgs;
use crate::generate::GenerateArgs;
use crate::get::GetArgs;
use crate::goldens::Goldens;
use crate::ls::LsArgs;
use crate::man::ManArgs;
use crate::perplexity::PerplexityArgs;
use crate::printer::{ColorMode, Printer, Verbosity};
use crate::reference::DocsArgs;
use crate::scan::ScanArgs;
use crate::serve::ServeArgs;
use crate::train::TrainArgs;
use crate::train_watch::TrainWatchArgs;
use crate::upload::UploadArgs;
use crate::version;

/// Run language models on MLX
///
/// Answers prompts and holds conversations; with --l1 it computes bit for bit what mlx-lm computes. One program, one
/// verb a job; begin with `mlx-bun generate "What is the capital of France?"`. Standard output carries the result and
/// nothing else; statistics, progress and messages go to standard error.
#[derive(clap::Parser)]
#[command(name = "mlx-bun", version, max_term_width = 100)]
pub struct Cli {
    #[command(flatten)]
    global: GlobalArgs,
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

/// Flags that every verb has.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Global options")]
struct GlobalArgs {
    /// Say less: once for no statistics and no progress, twice for errors only
    #[arg(short, long, global = true, action = ArgAction::Count)]
    quiet: u8,

    /// Say more: which files are used, how long things take
    #[arg(short = 'v', global = true, conflicts_with = "quiet")]
    details: bool,

    /// No progress bars
    #[arg(long, global = true)]
    no_progress: bool,

    /// When to use colours
    #[arg(
        long,
        global = true,
        value_name = "WHEN",
        value_enum,
        default_value_t,
        hide_possible_values = true
    )]
    color: ColorMode,
}

/// The verbs.
#[derive(clap::Subcommand)]
pub enum Verb {
    #[command(visible_alias = "gen")]
    Generate(Box<GenerateArgs>),
    Chat(Box<ChatArgs>),
    #[command(alias = "cache_prompt")]
    CachePrompt(Box<CachePromptArgs>),
    #[command(visible_alias = "server")]
    Serve(Box<ServeArgs>),
    Get(GetArgs),
    #[command(visible_alias = "list")]
    Ls(LsArgs),
    Scan(ScanArgs),
    Fit(Box<FitArgs>),
    Gc(GcArgs),
    Upload(UploadArgs),
    Convert(Box<ConvertArgs>),
    Fuse(Box<FuseArgs>),
    #[command(alias = "evaluate")]
    Eval(Box<EvalArgs>),
    Perplexity(Box<PerplexityArgs>),
    #[command(visible_alias = "lora")]
    Train(Box<TrainArgs>),
    TrainWatch(TrainWatchArgs),
    #[command(visible_alias = "bench")]
    Benchmark(Box<BenchmarkArgs>),
    BenchMatrix(Box<BenchMatrixArgs>),
    Ab(Box<AbArgs>),
    Evals(Box<EvalsArgs>),
    Goldens(Goldens),
    Completions(CompletionsArgs),
    Man(ManArgs),
    #[command(hide = true)]
    Docs(DocsArgs),
}

impl Cli {
    /// The printer that the global flags ask for.
    pub fn printer(&self) -> Printer {
        let verbosity = match (self.global.quiet, self.global.details) {
            (0, true) => Verbosity::Verbose,
            (0, false) => Verbosity::Default,
            (1, _) => Verbosity::Quiet,
            _ => Verbosity::Silent,
        };
        let unwanted =
            self.global.no_progress || env::get(env::MLX_BUN_NO_PROGRESS).is_some_and(|v| v != "0");
        Printer::new(verbosity, self.global.color, !unwanted)
    }
}

/// The flags of all verbs. A value may be a negative number everywhere, so that one out of range is told the range
/// instead of being taken for a flag.
pub fn command() -> Command {
    Cli::command().mut_subcommands(|verb| {
        // Where mlx-lm has no `-m` of its own, it is llama-bench's.
        let is_benchmark = verb.get_name() == "benchmark";
        let verb = verb.mut_args(|arg| match is_benchmark && arg.get_id() == "model" {
            true => arg.short_alias('m'),
            false => arg,
        });
        verb.mut_args(|arg| match arg.get_action().takes_values() && !arg.is_allow_hyphen_values_set() {
            true => arg.allow_negative_numbers(true),
            false => arg,
        })
    })
}

/// Parses the command line; on help, version or an error, says it and returns how to end.
///
/// # Errors
/// Standard output cannot be written.
pub fn parse(arguments: &[OsString]) -> anyhow::Result<Result<Cli, ExitStatus>> {
    let color = color_flag(arguments);
    let choice = |terminal: bool| match color.resolve(terminal, env::get) {
        true => ColorChoice::Always,
        false => ColorChoice::Never,
    };
    let codes = format!("Exit codes:\n{}", ExitStatus::table());
    let command = without_empty_variables(command())
        .color(choice(std::io::stdout().is_terminal()))
        .long_version(version::long())
        .after_help("`mlx-bun help VERB` or `mlx-bun VERB --help` tells more about a verb.")
        .after_long_help(codes);
    let arguments = with_quantize_spelled_out(arguments);
    let parsed = command.try_get_matches_from(&arguments).and_then(|matches| Cli::from_arg_matches(&matches));
    match parsed {
        Ok(cli) => Ok(Ok(cli)),
        Err(mut error) => {
            // "To pass '--x' as a value, use '-- --x'" helps nobody who mistyped a flag.
            if error.get(ContextKind::SuggestedArg).is_none() {
                error.remove(ContextKind::Suggested);
            }
            say(&error, color).map(Err)
        }
    }
}

/// An empty variable counts as unset, also where it stands for a flag.
fn without_empty_variables(command: clap::Command) -> clap::Command {
    if std::env::vars_os().all(|(_, value)| !value.is_empty()) {
        return command;
    }
    command.mut_subcommands(|verb| {
        without_empty_variables(verb).mut_args(|arg| {
            let empty = arg
                .get_env()
                .is_some_and(|name| std::env::var_os(name).is_some_and(|value| value.is_empty()));
            if empty { arg.env(None) } else { arg }
        })
    })
}

/// In `convert`, `-q` is mlx-lm's flag for quantizing, not `--quiet`.
fn with_quantize_spelled_out(arguments: &[OsString]) -> Vec<OsString> {
    let verb = arguments.iter().position(|word| word == "convert").unwrap_or(arguments.len());
    let spelled = |(index, word): (usize, &OsString)| match index > verb && word == "-q" {
        true => OsString::from("--quantize"),
        false => word.clone(),
    };
    arguments.iter().enumerate().map(spelled).collect()
}

fn say(error: &clap::Error, color: ColorMode) -> anyhow::Result<ExitStatus> {
    let on_terminal =
        if error.use_stderr() { std::io::stderr().is_terminal() } else { std::io::stdout().is_terminal() };
    let styled = error.render();
    let text = match color.resolve(on_terminal, env::get) {
        true => styled.ansi().to_string(),
        false => styled.to_string(),
    };
    let printer = Printer::new(Verbosity::Default, color, false);
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        let mut stdout = printer.stdout();
        stdout.write_all(text.as_bytes())?;
        stdout.flush()?;
        return Ok(ExitStatus::Success);
    }
    // Our word for it everywhere.
    printer.write_stderr(text.replace("tip:", "hint:").as_bytes());
    Ok(ExitStatus::Usage)
}

/// `--color` before anything is parsed: messages about the rest depend on it.
fn color_flag(arguments: &[OsString]) -> ColorMode {
    let mut words = arguments.iter().filter_map(|word| word.to_str()).take_while(|word| *word != "--");
    let mut found = None;
    while let Some(word) = words.next() {
        match word.split_once('=') {
            Some(("--color", value)) => found = Some(value),
            None if word == "--color" => found = words.next(),
            _ => {}
        }
    }
    found.and_then(|value| clap::ValueEnum::from_str(value, false).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flags_are_consistent() {
        command().debug_assert();
    }

    #[test]
    fn q_quantizes_where_mlx_lm_has_it_so() {
        let words = |words: &[&str]| {
            let words: Vec<_> = words.iter().map(OsString::from).collect();
            with_quantize_spelled_out(&words).join(std::ffi::OsStr::new(" "))
        };
        assert_eq!(words(&["x", "-q", "convert", "-q", "m"]), "x -q convert --quantize m");
        assert_eq!(words(&["x", "generate", "-q"]), "x generate -q");
    }

    #[test]
    fn color_is_known_before_parsing() {
        let flag = |words: &[&str]| color_flag(&words.iter().map(OsString::from).collect::<Vec<_>>());
        assert_eq!(flag(&["x", "--color", "never", "--nonsense"]), ColorMode::Never);
        assert_eq!(flag(&["x", "--color=always"]), ColorMode::Always);
        assert_eq!(flag(&["x", "--", "--color=always"]), ColorMode::Auto);
        assert_eq!(flag(&["x", "--color"]), ColorMode::Auto);
        assert_eq!(flag(&["x", "--color=pink"]), ColorMode::Auto);
    }
}
