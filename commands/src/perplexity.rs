//! `mlx-bun perplexity`: how well a model predicts text, and how far it strays from another one.

use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mlx_bun::checkpoint::atomic_file::write_bytes_atomically;
use mlx_bun::load::LoadedModel;
use mlx_bun::lora::Adapter;
use mlx_bun::mlx::memory;
use mlx_bun::perplexity::{Estimate, Evaluation, evaluate, read_rows, sequences};
use mlx_bun::record::{Figures, QualityRun, percentile};
use serde_json::{Map, json};

use crate::args::adapter::AdapterArgs;
use crate::args::model::ModelArgs;
use crate::args::numerics::NumericsArgs;
use crate::convert::source_model;
use crate::error::Complaint;
use crate::exit::ExitStatus;
use crate::interrupt::Interrupt;
use crate::load::choose_numerics;
use crate::output::SCHEMA_VERSION;
use crate::output_file;
use crate::printer::Printer;
use crate::recorder::{Recorder, recorded_path};

const CSV_HEADER: &str = "sequence,tokens,loss,perplexity,kl,top1_agreement\n";

const EXAMPLES: &str = "\
Example:
  mlx-bun perplexity --model ./model --data-path wiki.txt --num-samples -1
  mlx-bun perplexity --model ./model-4bit --baseline ./model --data-path chats.jsonl --json";

/// Measure how well a model predicts text
#[derive(Clone, Debug, clap::Args)]
#[command(args_override_self = true, after_help = crate::generate::MORE, after_long_help = EXAMPLES)]
pub struct PerplexityArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    adapter: AdapterArgs,

    /// Also measure KL divergence from this model and agreement with it; it needs the same vocabulary
    #[arg(long, value_name = "MODEL", help_heading = "Model")]
    baseline: Option<String>,

    /// Text to predict: a .jsonl file with a row a line (`text`, `messages`, or `prompt` and `completion`), or a text
    /// file
    #[arg(long, value_name = "FILE", help_heading = "Data")]
    data_path: String,

    /// Tokens of a sequence
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(2..=1_000_000), help_heading = "Data")]
    sequence_length: u32,

    /// How many sequences; -1 for all there are
    #[arg(
        long,
        value_name = "N",
        default_value_t = 256,
        allow_negative_numbers = true,
        help_heading = "Data"
    )]
    num_samples: i64,

    /// Sequences computed at a time
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=4096), help_heading = "Data")]
    batch_size: u32,

    /// Decides the order of the rows
    #[arg(long, value_name = "N", default_value_t = 123, help_heading = "Data")]
    seed: u32,

    /// Print the result as one JSON object
    #[arg(long, help_heading = "Output")]
    json: bool,

    /// Write the figures of each sequence to a CSV file
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    csv: Option<PathBuf>,

    #[command(flatten)]
    numerics: NumericsArgs,
}

/// Runs the verb.
///
/// # Errors
/// A model or text that cannot be used.
pub fn run(args: &PerplexityArgs, printer: &Printer) -> anyhow::Result<ExitStatus> {
    let interrupt = Interrupt::install(printer)?;
    let name = args.model.resolve(None, true)?;
    let samples = match args.num_samples {
        -1 => None,
        samples => Some(usize::try_from(samples).ok().filter(|samples| *samples > 0).ok_or_else(|| {
            Complaint::usage(format!("`--num-samples` must be positive, or -1 for all, and is {samples}"))
        })?),
    };
    if let Some(file) = &args.csv {
        output_file::check(file, "table of this verb", is_table)?;
    }
    let rows = read_rows(data_file(&args.data_path)?)?;
    let mut warnings = Vec::new();
    let numerics = args.numerics.resolve(&mut warnings);
    warnings.iter().for_each(|warning| printer.warning(warning));
    choose_numerics(numerics, printer)?;
    let adapter = args.adapter.adapter_path.as_deref().map(Adapter::open).transpose()?;
    let (loaded, model_path) = load(name.as_deref(), adapter, printer)?;
    let baseline = args.baseline.as_deref().map(|name| load(Some(name), None, printer)).transpose()?;
    let (baseline, baseline_path) = baseline.unzip();
    if let Some(baseline) = &baseline {
        same_vocabulary(&loaded, baseline)?;
    }
    let length = args.sequence_length as usize;
    let (tokenizer, templates) = (&loaded.tokenizer, &loaded.chat_templates);
    let sequences = sequences(&rows, tokenizer, templates, args.seed, length, samples)?;
    check_ids(sequences.iter().map(Vec::as_slice), loaded.model.vocab_size())?;
    if let Some(samples) = samples.filter(|samples| *samples > sequences.len()) {
        printer.warning(&format!("the rows give {} sequences, not {samples}", sequences.len()));
    }

    let mut recorder = Recorder::begin("perplexity", &numerics, Map::new(), printer);
    for problem in recorder.problems() {
        printer.detail(&format!("the machine is not quiet: {problem}"));
    }
    interrupt.begin();
    let started = Instant::now();
    let bar = printer.progress("Measuring", sequences.len() as u64);
    let baseline = baseline.as_ref().map(|baseline| &*baseline.model);
    let batch_size = args.batch_size as usize;
    let evaluation = evaluate(&*loaded.model, baseline, &sequences, batch_size, &mut |done| {
        bar.set(done as u64);
        if interrupt.is_set() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    drop(bar);
    let Some(evaluation) = evaluation else { return Ok(ExitStatus::Interrupted) };
    if evaluation.sequences.iter().flat_map(|sequence| &sequence.losses).any(|loss| loss.is_nan()) {
        let problem = "the model's predictions are not numbers; its weights, its quantization or its adapter are broken";
        return Err(Complaint::failure(problem).into());
    }
    if let Some(file) = &args.csv {
        write_bytes_atomically(file, csv(&evaluation).as_bytes())?;
    }
    let took = started.elapsed();
    record(args, model_path, baseline_path, &evaluation, took, &mut recorder)?;
    say(args, name.as_deref(), &evaluation, took, printer)?;
    Ok(ExitStatus::Success)
}

/// A file; anything else would be a data set of the hub.
fn data_file(argument: &str) -> Result<&Path, Complaint> {
    let path = Path::new(argument);
    if path.is_file() {
        return Ok(path);
    }
    let problem = if path.exists() {
        "is not a file"
    } else {
        "is no file here, and data sets of the hub are not read"
    };
    Err(Complaint::failure(format!("`{argument}` {problem}"))
        .hint("give a .jsonl file with a row a line, or a text file"))
}

/// A model and its place.
fn load(
    name: Option<&str>,
    adapter: Option<Adapter>,
    printer: &Printer,
) -> anyhow::Result<(LoadedModel, String)> {
    let resolved = source_model(name)?;
    printer.detail(&format!("model: {}", resolved.source.path().display()));
    Ok((crate::load::load_adapted(&resolved.source, adapter, printer)?, recorded_path(&resolved.source)))
}

fn same_vocabulary(model: &LoadedModel, baseline: &LoadedModel) -> Result<(), Complaint> {
    let (ours, theirs) = (model.model.vocab_size(), baseline.model.vocab_size());
    if ours == theirs {
        return Ok(());
    }
    Err(Complaint::failure(format!("the baseline has a vocabulary of {theirs} tokens, the model of {ours}"))
        .hint("compare models with the same tokenizer"))
}

/// All tokens have a row in the model's embedding.
///
/// # Errors
/// Names the first that has none.
pub fn check_ids<'a>(
    sequences: impl IntoIterator<Item = &'a [u32]>,
    vocabulary: i32,
) -> Result<(), Complaint> {
    let rows = u32::try_from(vocabulary).unwrap_or(0);
    match sequences.into_iter().flatten().find(|id| **id >= rows) {
        Some(id) => Err(Complaint::failure(format!(
            "the tokenizer gives token {id}, but the model's embedding has {rows} rows; they do not belong together"
        ))),
        None => Ok(()),
    }
}

/// Whether a file begins as ours do.
fn is_table(file: &Path) -> bool {
    let start = output_file::beginning(file, CSV_HEADER.len() as u64);
    start.is_ok_and(|start| start == CSV_HEADER.as_bytes())
}

/// A line a sequence.
fn csv(evaluation: &Evaluation) -> String {
    let mut text = CSV_HEADER.to_owned();
    for (index, sequence) in evaluation.sequences.iter().enumerate() {
        let mean = |values: &[f32]| Estimate::of(values.iter().map(|value| f64::from(*value))).mean;
        let loss = mean(&sequence.losses);
        text.push_str(&format!("{index},{},{loss},{}", sequence.losses.len(), loss.exp()));
        if sequence.divergences.is_empty() {
            text.push_str(",,\n");
        } else {
            let agreeing = sequence.agreements.iter().filter(|agrees| **agrees).count() as f64;
            let share = agreeing / sequence.agreements.len().max(1) as f64;
            text.push_str(&format!(",{},{share}\n", mean(&sequence.divergences)));
        }
    }
    text
}

/// Keeps the figures, and the mean loss of each sequence.
fn record(
    args: &PerplexityArgs,
    model_path: String,
    baseline: Option<String>,
    evaluation: &Evaluation,
    took: Duration,
    recorder: &mut Recorder,
) -> anyhow::Result<()> {
    let (perplexity, divergence) = (evaluation.perplexity()?, evaluation.divergence());
    let mut figures = Figures::default();
    figures.add("perplexity", perplexity.mean, "");
    figures.add("perplexity_standard_error", perplexity.standard_error, "");
    figures.add("loss", evaluation.mean_loss()?, "nats");
    figures.add("tokens_per_second", evaluation.token_count() as f64 / took.as_secs_f64(), "tok/s");
    figures.add("peak_bytes", memory::peak()? as f64, "bytes");
    if let (Some(kl), Some(agreement)) = (divergence, evaluation.agreement()) {
        figures.add("kl", kl.mean, "nats");
        figures.add("kl_standard_error", kl.standard_error, "nats");
        figures.add("top1_agreement", agreement.mean * 100.0, "%");
    }
    let divergences: Vec<f64> = evaluation
        .sequences
        .iter()
        .flat_map(|sequence| &sequence.divergences)
        .map(|value| f64::from(*value))
        .collect();
    let losses: Vec<f64> = evaluation
        .sequences
        .iter()
        .map(|sequence| Estimate::of(sequence.losses.iter().map(|loss| f64::from(*loss))).mean)
        .collect();
    let (count, length) = (evaluation.sequences.len(), args.sequence_length);
    let data = Path::new(&args.data_path).file_name().unwrap_or_default().to_string_lossy();
    let row = QualityRun {
        model_path,
        task: "perplexity".to_owned(),
        config_json: json!({
            "data": args.data_path,
            "sequence_length": length,
            "batch_size": args.batch_size,
            "seed": args.seed,
            "adapter": args.adapter.adapter_path,
        }),
        n_samples: Some(count as u64),
        kl_mean: divergence.map(|kl| kl.mean),
        kl_median: percentile(&divergences, 0.5),
        kl_p95: percentile(&divergences, 0.95),
        kl_ref: baseline,
        ..QualityRun::default()
    };
    let entry = recorder.entry(&format!("{data} {count}x{length}"), figures, json!({"loss": losses}));
    recorder.record(&entry, &row);
    Ok(())
}

/// A number that JSON has; null for the rest.
fn finite(value: f64) -> serde_json::Value {
    serde_json::Number::from_f64(value).map_or(serde_json::Value::Null, Into::into)
}

fn say(
    args: &PerplexityArgs,
    name: Option<&str>,
    evaluation: &Evaluation,
    took: Duration,
    printer: &Printer,
) -> anyhow::Result<()> {
    let perplexity = evaluation.perplexity()?;
    let (divergence, agreement) = (evaluation.divergence(), evaluation.agreement());
    let tokens = evaluation.token_count();
    let seconds = took.as_secs_f64();
    let mut stdout = printer.stdout();
    if args.json {
        let estimate = |estimate: Option<Estimate>| {
            estimate.map(|estimate| json!({"mean": finite(estimate.mean), "standard_error": finite(estimate.standard_error)}))
        };
        let object = json!({
            "schema_version": SCHEMA_VERSION,
            "model": name,
            "baseline": args.baseline,
            "perplexity": estimate(Some(perplexity)),
            "loss": finite(evaluation.mean_loss()?),
            "kl": estimate(divergence),
            "top1_agreement": estimate(agreement),
            "sequences": evaluation.sequences.len(),
            "sequence_length": args.sequence_length,
            "tokens": tokens,
            "seconds": seconds,
            "peak_memory_gb": memory::peak()? as f64 / 1e9,
        });
        writeln!(stdout, "{object}")?;
        stdout.flush()?;
        return Ok(());
    }
    writeln!(stdout, "Perplexity: {:.3} ± {:.3}", perplexity.mean, perplexity.standard_error)?;
    if let (Some(kl), Some(agreement)) = (divergence, agreement) {
        writeln!(stdout, "KL divergence: {:.6} ± {:.6} nats per token", kl.mean, kl.standard_error)?;
        let percent = |value: f64| value * 100.0;
        writeln!(
            stdout,
            "Same top token: {:.2} ± {:.2} %",
            percent(agreement.mean),
            percent(agreement.standard_error)
        )?;
    }
    stdout.flush()?;
    printer.note(&format!("Sequences: {} of {} tokens", evaluation.sequences.len(), args.sequence_length));
    printer.note(&format!("Evaluation time: {seconds:.2} seconds"));
    printer.note(&format!("Peak memory: {:.2} GB", memory::peak()? as f64 / 1e9));
    printer.note(&format!("Tokens per second: {:.0}", tokens as f64 / seconds.max(1e-9)));
    Ok(())
}
