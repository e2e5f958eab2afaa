//! `mlx-bun ab`: whether B is better than A, by runs in pairs.

mod arm;
mod gate;
mod levers;
mod output;
mod pairs;
mod process;
mod quality;
mod report;
mod rule;
mod statistics;
mod words;

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Duration;

use self::arm::{Arms, Given};
use self::gate::{Condition, Quality};
use self::output::Figure;
use self::pairs::{Limits, Side, Stopped, run_pairs};
use self::process::{Allowance, Pairs, Sample};
use self::quality::{Setting, Text};
use self::report::Report;
use self::rule::{FEWEST_PAIRS, RESAMPLES, Rule, Verdict};
use crate::error::Complaint;
use crate::exit::ExitStatus;
use crate::generate::MORE;
use crate::interrupt::Interrupt;
use crate::printer::Printer;

const EXAMPLES: &str = "\
Examples:
  mlx-bun ab --a \"--cpu-precision exact\" --b \"--cpu-precision int8\" --figure prefill_tps \\
    --gate \"kl<0.01,ppl<1%\" -- generate --prompt-file prompts.jsonl
  mlx-bun ab --a \"MLX_BUN_CPU_ISA=avx2\" --b \"\" -- generate \"Tell me a story\"
  mlx-bun ab --binary-a old/mlx-bun --binary-b target/release/mlx-bun -- generate \"Tell me a story\"
  mlx-bun ab --command-a \"python a.py\" --command-b \"python b.py\"
  mlx-bun ab levers

B wins or loses only when the 99 % interval of the median ratio leaves out 1, the sign test is below 1 %, and the change
is at least --min-effect; anything else is no difference. The exit code is 1 when B loses or a gate does not hold.";

/// Compare two settings, programs or commands by runs in pairs
///
/// Both run in turn, A B B A, after a warm-up, until the ratio is known well enough. The result is the median ratio with
/// its interval, whether both said the same, what B costs in quality if --gate asks for it, and a verdict.
#[derive(Clone, Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, after_help = MORE, after_long_help = EXAMPLES)]
pub struct AbArgs {
    #[command(subcommand)]
    verb: Option<AbVerb>,

    /// Flags of A, put behind the command's verb; NAME=VALUE in front sets variables
    #[arg(long, value_name = "FLAGS", allow_hyphen_values = true, help_heading = "What to compare")]
    a: Option<String>,

    /// Flags of B
    #[arg(long, value_name = "FLAGS", allow_hyphen_values = true, help_heading = "What to compare")]
    b: Option<String>,

    /// The program that is A [default: this one]
    #[arg(long, value_name = "FILE", help_heading = "What to compare")]
    binary_a: Option<PathBuf>,

    /// The program that is B [default: this one]
    #[arg(long, value_name = "FILE", help_heading = "What to compare")]
    binary_b: Option<PathBuf>,

    /// A as a whole command line of any program
    #[arg(long, value_name = "COMMAND", help_heading = "What to compare")]
    command_a: Option<String>,

    /// B as a whole command line
    #[arg(long, value_name = "COMMAND", help_heading = "What to compare")]
    command_b: Option<String>,

    /// The verb of mlx-bun that both run, with its arguments, behind `--`
    #[arg(last = true, value_name = "VERB ARGUMENTS")]
    command: Vec<String>,

    /// What is compared: wall (time on the clock), decode_tps, prefill_tps, ttft, peak_memory, or a path in the
    /// command's JSON such as stats.prompt_tps
    #[arg(long, value_name = "NAME", default_value = "wall", help_heading = "Judgement")]
    figure: String,

    /// Whether more of the figure is better, where its name does not tell
    #[arg(long, value_name = "higher|lower", value_enum, help_heading = "Judgement")]
    better: Option<Direction>,

    /// Stop once the interval of the ratio is this narrow
    #[arg(long, value_name = "PERCENT", default_value = "2%", value_parser = percent, help_heading = "Judgement")]
    width: f64,

    /// The smallest change worth a verdict
    #[arg(long, value_name = "PERCENT", default_value = "1%", value_parser = percent, help_heading = "Judgement")]
    min_effect: f64,

    /// Pairs before the interval is looked at
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=10_000), help_heading = "Judgement")]
    min_pairs: u32,

    /// Pairs at most
    #[arg(long, value_name = "N", default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..=10_000), help_heading = "Judgement")]
    max_pairs: u32,

    /// No pair begins later than this
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=604_800), help_heading = "Judgement")]
    max_time: u64,

    /// A run that takes longer than this is ended, and fails [default: as --max-time]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=604_800), help_heading = "Judgement")]
    run_timeout: Option<u64>,

    /// Runs of each before the first pair
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..=100), help_heading = "Judgement")]
    warmup: u32,

    /// Seed of the bootstrap
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Judgement")]
    seed: u64,

    /// What B may cost: kl<0.01 (nats a token), ppl<1% (more perplexity), same (the same output)
    #[arg(long, value_name = "CONDITIONS", help_heading = "Quality")]
    gate: Option<String>,

    /// Text for the gate: a .jsonl or text file, as `perplexity --data-path` takes it [default: a built-in mix]
    #[arg(long, value_name = "FILE", requires = "gate", help_heading = "Quality")]
    gate_data: Option<PathBuf>,

    /// Sequences of that text
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=100_000), help_heading = "Quality")]
    gate_samples: u32,

    /// Tokens of a sequence
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(2..=100_000), help_heading = "Quality")]
    gate_length: u32,

    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    json: bool,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum AbVerb {
    Levers(levers::LeversArgs),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Direction {
    /// More is better
    Higher,
    /// Less is better
    Lower,
}

fn percent(text: &str) -> Result<f64, String> {
    crate::bench_matrix::parse_percent(text)
}

/// Runs the verb.
///
/// # Errors
/// Commands that make no sense or fail, a gate that cannot be measured.
pub fn run(args: &AbArgs, printer: &Printer) -> anyhow::Result<ExitStatus> {
    if let Some(AbVerb::Levers(levers)) = &args.verb {
        levers.run(printer)?;
        return Ok(ExitStatus::Success);
    }
    let mut figure = Figure::named(&args.figure);
    if let Some(better) = args.better {
        figure.higher_is_better = better == Direction::Higher;
    }
    let given = Given {
        flags: [args.a.as_deref(), args.b.as_deref()],
        binaries: [args.binary_a.as_ref(), args.binary_b.as_ref()],
        commands: [args.command_a.as_deref(), args.command_b.as_deref()],
        command: &args.command,
    };
    let arms = given.resolve(std::env::current_exe()?, figure.needs_json())?;
    let conditions = args.conditions(&arms)?;
    if (args.max_pairs as usize) < FEWEST_PAIRS {
        printer
            .warning(&format!("fewer than {FEWEST_PAIRS} pairs never give a verdict but \"no difference\""));
    }
    let interrupt = Interrupt::install(printer)?;
    interrupt.begin();
    let Some((pairs, stopped)) = args.measure(&arms, &figure, &interrupt, printer)? else {
        return Ok(ExitStatus::Interrupted);
    };
    let needs = conditions.iter().any(Condition::needs_quality) && stopped != Stopped::Interrupt;
    let quality = if needs { args.quality(&arms, &interrupt, printer)? } else { None };
    // What there is counts, also after Ctrl-C.
    let stopped = if interrupt.is_set() { Stopped::Interrupt } else { stopped };
    let report = Report::new(args.rule(&figure), figure.name, arms, pairs, stopped, &conditions, quality);
    report.record(printer);
    report.print(args.json, printer)?;
    if stopped == Stopped::Interrupt {
        return Ok(ExitStatus::Interrupted);
    }
    let held = report.gates_hold() && report.verdict() != Verdict::Lose;
    Ok(if held { ExitStatus::Success } else { ExitStatus::Failure })
}

impl AbArgs {
    fn rule(&self, figure: &Figure) -> Rule {
        Rule {
            least_effect: self.min_effect,
            higher_is_better: figure.higher_is_better,
            seed: self.seed,
            resamples: RESAMPLES,
        }
    }

    /// The gate, if it can be measured.
    fn conditions(&self, arms: &Arms) -> Result<Vec<Condition>, Complaint> {
        let conditions = match self.gate.as_deref().map(gate::parse) {
            None => return Ok(Vec::new()),
            Some(Err(problem)) => return Err(Complaint::usage(format!("`--gate`: {problem}"))),
            Some(Ok(conditions)) => conditions,
        };
        let environment = arms.arms.iter().any(|arm| !arm.environment.is_empty());
        if conditions.iter().any(Condition::needs_quality) && (!arms.levers || environment) {
            return Err(Complaint::usage(
                "`--gate` can measure `kl` and `ppl` of flags of this program only",
            )
            .hint("give --a and --b without variables and other binaries, or `--gate same`"));
        }
        self.gate_data.as_deref().map_or(Ok(()), quality::check_text)?;
        Ok(conditions)
    }

    /// `None` when the user wants no more before there is a pair.
    fn measure(
        &self,
        arms: &Arms,
        figure: &Figure,
        interrupt: &Interrupt,
        printer: &Printer,
    ) -> anyhow::Result<Option<(Pairs, Stopped)>> {
        let rule = self.rule(figure);
        let allowance = Allowance::of(Duration::from_secs(self.run_timeout.unwrap_or(self.max_time)));
        let run = |side: Side| -> anyhow::Result<Option<Sample>> {
            process::run(&arms.arms[side as usize], figure, allowance, &|| interrupt.is_set())
        };
        for _ in 0..self.warmup {
            for side in [Side::A, Side::B] {
                if run(side)?.is_none() {
                    return Ok(None);
                }
            }
        }
        let limits = Limits {
            least: self.min_pairs as usize,
            most: self.max_pairs as usize,
            time: Duration::from_secs(self.max_time),
            width: self.width,
        };
        let bar = printer.progress("Pairs", u64::from(self.max_pairs));
        let told = |pairs: &[(f64, f64)]| {
            bar.set(pairs.len() as u64);
            if let Some((a, b)) = pairs.last() {
                printer.detail(&format!("pair {}: A {a:.6}, B {b:.6}, ratio {:.4}", pairs.len(), b / a));
            }
        };
        let (pairs, stopped) = run_pairs(&limits, &rule, |sample: &Sample| sample.figure, run, told)?;
        Ok((!pairs.is_empty()).then_some((pairs, stopped)))
    }

    fn quality(
        &self,
        arms: &Arms,
        interrupt: &Interrupt,
        printer: &Printer,
    ) -> anyhow::Result<Option<Quality>> {
        let settings = [Setting::of(&arms.arms[0].arguments)?, Setting::of(&arms.arms[1].arguments)?];
        let text = Text {
            file: self.gate_data.as_deref(),
            sequences: self.gate_samples as usize,
            length: self.gate_length as usize,
        };
        let go_on = || if interrupt.is_set() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
        quality::measure([&settings[0], &settings[1]], text, printer, &go_on)
    }
}
