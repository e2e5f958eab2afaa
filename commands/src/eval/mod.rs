//! `mlx-bun eval`: what a model knows and can do, as a score with its interval.

mod identity;
mod likelihood;
mod questions;
mod report;
mod rows;
mod settings;

use std::path::PathBuf;

use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::registry::select::select_model;
use mlx_bun_evals::data::EvalData;
use mlx_bun_evals::sandbox::{Sandbox, SandboxError};

use crate::args::adapter::AdapterArgs;
use crate::args::kv_cache::KvCacheArgs;
use crate::args::model::ModelArgs;
use crate::args::numerics::NumericsArgs;
use crate::args::{Truth, range};
use crate::error::Complaint;
use crate::exit::ExitStatus;
use crate::generate::MORE;
use crate::interrupt::Interrupt;
use crate::output_file;
use crate::printer::Printer;
use crate::recorder::Recorder;
use report::Report;
use settings::{Kind, Settings};

const EXAMPLES: &str = "\
Examples:
  mlx-bun eval gsm8k --limit 50
  mlx-bun eval fetch-data                  # HumanEval and BFCL, from Python's package index
  mlx-bun eval import ifeval input_data.jsonl
  mlx-bun eval all --model ./my-model --output-dir scores --out scores.json
  mlx-bun eval all --model ./my-model --output-dir scores --resume
  mlx-bun eval multiple-choice --data-path questions.jsonl
  mlx-bun eval kl --model ./my-model-4bit --baseline ./my-model";

/// Score a model on tasks
///
/// Decoding is greedy, so a score is the same however many questions are asked at a time. With --output-dir every
/// question's line is on the disk before the next is begun, and --resume goes on after Ctrl-C or worse.
#[derive(Clone, Debug, clap::Args)]
#[command(
    args_override_self = true,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    subcommand_precedence_over_arg = true,
    after_help = MORE,
    after_long_help = EXAMPLES
)]
pub struct EvalArgs {
    /// The tasks; `smoketest` is kl and 50 questions of gsm8k, `all` is what there are rows for
    #[arg(value_name = "TASK", value_enum, required_unless_present = "more_tasks")]
    tasks: Vec<TaskArg>,

    /// The same, as mlx-lm has it
    #[arg(long = "tasks", id = "more_tasks", value_name = "TASK", value_enum, num_args = 1.., hide_short_help = true)]
    more_tasks: Vec<TaskArg>,

    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    adapter: AdapterArgs,

    /// The model that kl measures from; without it, this model under mlx-lm's arithmetic, or without `--kv-quant`
    #[arg(long, value_name = "MODEL", help_heading = "Model")]
    baseline: Option<String>,

    /// Questions of each task, drawn by the seed [default: 1000 of mmlu and gsm8k, 200 of bfcl, all of the others]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Questions")]
    limit: Option<u32>,

    /// Decides which questions are taken
    #[arg(long, value_name = "N", default_value_t = 42, help_heading = "Questions")]
    seed: u32,

    /// Solved examples before each question [default: 5 for mmlu, 3 for gsm8k]
    #[arg(long, visible_alias = "num-fewshot", value_name = "N", value_parser = clap::value_parser!(u32).range(0..=64), help_heading = "Questions")]
    num_shots: Option<u32>,

    /// Rows for multiple-choice and kl: a .jsonl file
    #[arg(long, value_name = "FILE", help_heading = "Questions")]
    data_path: Option<PathBuf>,

    /// Whether scored sequences begin with the tokenizer's first token [default: no for mmlu, as the tokenizer does it
    /// for multiple-choice]
    #[arg(long, value_name = "true|false", value_enum, help_heading = "Questions", hide_short_help = true)]
    add_bos: Option<Truth>,

    #[arg(short, long, value_name = "N", help = range::MAX_TOKENS.help("Most tokens of a reply [default: the task's]"), value_parser = range::MAX_TOKENS.parser(), help_heading = "Replies")]
    max_tokens: Option<usize>,

    /// Let a reasoning model think first [default: false]
    #[arg(long, value_name = "true|false", value_enum, help_heading = "Replies")]
    thinking: Option<Truth>,

    #[arg(long, visible_alias = "batch-size", value_name = "N", default_value_t = 8, help = range::BATCH.help("Questions computed together; changes the time, not the score"), value_parser = range::BATCH.parser(), help_heading = "Replies")]
    batch: usize,

    /// Run the code of humaneval even where it cannot be kept from files and the network
    #[arg(long, help_heading = "Replies", hide_short_help = true)]
    confirm_run_unsafe_code: bool,

    /// Write a line a question to TASK.jsonl in this folder
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    output_dir: Option<PathBuf>,

    /// Go on with the files in `--output-dir`
    #[arg(long, requires = "output_dir", help_heading = "Output")]
    resume: bool,

    /// Write the result as one JSON object to a file
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    out: Option<PathBuf>,

    /// Print the result as one JSON object
    #[arg(long, help_heading = "Output")]
    json: bool,

    #[command(flatten)]
    kv_cache: KvCacheArgs,
    #[command(flatten)]
    numerics: NumericsArgs,

    #[command(subcommand)]
    verb: Option<rows::RowsVerb>,
}

/// What can be named on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum TaskArg {
    /// 57 subjects, four choices
    Mmlu,
    /// Grade school mathematics
    Gsm8k,
    /// Functions that have to pass tests
    #[value(name = "humaneval", alias = "human-eval")]
    HumanEval,
    /// Instructions that a program can check
    #[value(name = "ifeval")]
    IfEval,
    /// Calls of functions
    Bfcl,
    /// Chains of assignments in a long text
    #[value(name = "hashhop")]
    HashHop,
    /// Divergence from a reference
    Kl,
    /// Your own questions with choices
    MultipleChoice,
    /// kl and 50 questions of gsm8k
    Smoketest,
    /// What there are rows for
    All,
}

/// Runs the verb.
///
/// # Errors
/// Flags that make no sense, rows or a model that cannot be used.
pub fn run(args: &EvalArgs, printer: &Printer) -> anyhow::Result<ExitStatus> {
    if let Some(verb) = &args.verb {
        return rows::run(verb, printer);
    }
    let interrupt = Interrupt::install(printer)?;
    let environment = Environment::of_process();
    let data = EvalData::from_environment(&environment);
    let mut warnings = Vec::new();
    let settings = settings::resolve(args, &environment, &data, &mut warnings)?;
    warnings.iter().for_each(|warning| printer.warning(warning));
    if let Some(file) = &args.out {
        output_file::check(file, "result of this verb", report::is_result)?;
    }
    if let Some(folder) = &args.output_dir {
        std::fs::create_dir_all(folder).map_err(|error| {
            Complaint::failure(format!("cannot make the folder `{}`: {error}", folder.display()))
        })?;
    }
    let needs_sandbox = settings.plans.iter().any(|plan| plan.kind == Kind::HumanEval);
    let sandbox = needs_sandbox.then(|| sandbox(args, &environment, printer)).transpose()?;
    let resolved = select_model(settings.model.as_deref(), &environment)?;
    printer.detail(&format!("model: {}", resolved.source.path().display()));
    let model = identity::of_model(&resolved)?;
    let mut recorder = Recorder::begin("eval", &settings.numerics, settings.flags(), printer);
    for problem in recorder.problems() {
        printer.detail(&format!("the machine is not quiet: {problem}"));
    }

    let mut report = Report::new(&model);
    let job = Job {
        args,
        settings: &settings,
        data: &data,
        resolved: &resolved,
        model: &model,
        printer,
        interrupt: &interrupt,
    };
    let finished = questions::run(&job, sandbox, &mut report)? && likelihood::run(&job, &mut report)?;
    if !finished {
        let done = match &args.output_dir {
            Some(_) => "--resume goes on from here",
            None => "give --output-dir next time to be able to go on",
        };
        printer.hint(done);
        return Ok(ExitStatus::Interrupted);
    }
    report.sort(&settings.plans);
    report.record(&settings, &resolved, &mut recorder);
    report.say(args, &settings, printer)?;
    Ok(ExitStatus::Success)
}

/// What the parts of a run share.
struct Job<'a> {
    args: &'a EvalArgs,
    settings: &'a Settings,
    data: &'a EvalData,
    resolved: &'a mlx_bun::checkpoint::source::ResolvedModel,
    model: &'a identity::Identity,
    printer: &'a Printer,
    interrupt: &'a Interrupt,
}

/// A place for the code that the model writes.
fn sandbox(args: &EvalArgs, environment: &Environment, printer: &Printer) -> anyhow::Result<Sandbox> {
    match Sandbox::find(environment) {
        Ok(sandbox) => Ok(sandbox),
        Err(error @ SandboxError::NoWalls(_)) if args.confirm_run_unsafe_code => {
            printer.warning(&format!("{error}: what the model writes runs with your rights"));
            Ok(Sandbox::without_walls(environment)?)
        }
        Err(error @ SandboxError::NoWalls(_)) => Err(Complaint::failure(error.to_string())
            .hint("leave humaneval out, or give --confirm-run-unsafe-code to run what the model writes with your rights")
            .into()),
        Err(error) => Err(Complaint::failure(error.to_string())
            .hint("humaneval needs Python 3; name one with MLX_BUN_ORACLE_PYTHON")
            .into()),
    }
}
