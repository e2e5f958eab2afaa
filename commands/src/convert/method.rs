//! `convert --method`: mlx-lm's calibrated methods.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use mlx_bun::checkpoint::atomic_file::write_bytes_atomically;
use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::checkpoint::{QuantMode, QuantParams};
use mlx_bun::mlx::{Array, Dtype};
use mlx_bun::perplexity::{RandomState, read_rows, tokenize};
use mlx_bun::quantize::{
    AwqOptions, DwqOptions, DynamicOptions, FloatType, GptqOptions, MethodError, OnStep, Reworked,
    SourceModel, awq, calibration, calibration_batch, dwq, dynamic_allocation, dynamic_sensitivities, gptq,
};

use super::{ConvertArgs, check_results_file, choose_arithmetic};
use crate::error::Complaint;
use crate::interrupt::Interrupt;
use crate::printer::Printer;

/// Where mlx-lm keeps its calibration text.
const MLX_LM_TEXT: &str = ".cache/mlx-lm/calibration_v5.txt";
/// Rows that DWQ validates on.
const VALIDATION_ROWS: usize = 32;

/// `--method`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Method {
    /// Two widths by the gradient of the divergence
    #[value(name = "dynamic_quant")]
    DynamicQuant,
    /// Scales and clips found by search
    Awq,
    /// Columns rounded one by one, each making up for the others' errors
    Gptq,
    /// Scales, biases and norms trained
    Dwq,
}

/// What the methods can be told, with mlx-lm's defaults.
#[derive(Clone, Debug, clap::Args)]
pub struct MethodArgs {
    /// Quantize with calibration: dynamic_quant, awq, gptq or dwq, as mlx-lm does; implies -q
    ///
    /// The text is that of --calibration-mix, else the one that mlx-lm has fetched, else a short built-in one. dwq takes
    /// its rows from --calibration-mix.
    #[arg(long, value_name = "METHOD", hide_possible_values = true, conflicts_with_all = ["dequantize", "quant_predicate", "to_gguf", "requantize"], help_heading = "Methods")]
    pub method: Option<Method>,

    /// Sequences to calibrate with; -1 for all [default: awq 128, dwq 2048, others -1]
    #[arg(
        long,
        value_name = "N",
        allow_negative_numbers = true,
        requires = "method",
        help_heading = "Methods"
    )]
    pub num_samples: Option<i64>,

    /// Tokens of a sequence [default: dwq 1025, others 512]
    #[arg(long, value_name = "N", requires = "method", value_parser = clap::value_parser!(u32).range(2..=1_000_000), help_heading = "Methods")]
    pub sequence_length: Option<u32>,

    /// Decides the order of the sequences
    #[arg(long, value_name = "N", default_value_t = 123, help_heading = "Methods")]
    pub seed: u32,

    /// Bits of the embedding and the head with awq
    #[arg(long, value_name = "N", default_value_t = 4, help_heading = "Methods")]
    pub embed_bits: u64,

    /// Their group size
    #[arg(long, value_name = "N", default_value_t = 32, help_heading = "Methods")]
    pub embed_group_size: u64,

    /// Scales and clips that awq tries
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1000), help_heading = "Methods")]
    pub n_grid: u32,

    /// Bits of what gptq does not cover, the embedding
    #[arg(long, value_name = "N", default_value_t = 6, help_heading = "Methods")]
    pub fallback_bits: u64,

    /// Its group size
    #[arg(long, value_name = "N", default_value_t = 64, help_heading = "Methods")]
    pub fallback_group_size: u64,

    /// Bits of sensitive modules with dynamic_quant; --q-bits are those of the others
    #[arg(long, value_name = "N", default_value_t = 5, help_heading = "Methods")]
    pub high_bits: u64,

    /// Their group size
    #[arg(long, value_name = "N", default_value_t = 64, help_heading = "Methods")]
    pub high_group_size: u64,

    /// Adam's learning rate with dwq
    #[arg(long, value_name = "X", default_value_t = 1e-6, help_heading = "Methods")]
    pub learning_rate: f32,

    /// Rows of a step with dwq
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=4096), help_heading = "Methods")]
    pub batch_size: u32,
}

/// What a method came to.
pub enum Outcome {
    /// The caller wanted it to stop.
    Interrupted,
    /// Widths for the ordinary conversion.
    Widths(BTreeMap<String, QuantParams>),
    /// A model of its own.
    Reworked(Box<Reworked>),
}

/// Runs the method on `source`.
///
/// # Errors
/// Flags that make no sense, text that is too short, a model that cannot be used.
pub fn run(
    method: Method,
    args: &ConvertArgs,
    params: QuantParams,
    source: &SourceModel,
    printer: &Printer,
    interrupt: &Interrupt,
) -> anyhow::Result<Outcome> {
    if params.mode != QuantMode::Affine {
        return Err(Complaint::usage("`--method` makes affine widths; leave --q-mode out").into());
    }
    let given = [("--target-bpw", args.target_bpw.is_some()), ("--dtype", args.dtype.is_some())];
    if let Some((flag, _)) = given.into_iter().find(|(_, given)| *given && method != Method::DynamicQuant) {
        return Err(Complaint::usage(format!("`{flag}` goes with no method but dynamic_quant")).into());
    }
    choose_arithmetic(args, printer)?;
    let own = &args.methods;
    interrupt.begin();
    let mut bar = None;
    let mut on_step = |done: usize, total: usize| {
        bar.get_or_insert_with(|| printer.progress("Calibrating", total as u64)).set(done as u64);
        if interrupt.is_set() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let outcome = match method {
        Method::DynamicQuant => {
            let options = DynamicOptions { low: params, high: affine(own.high_bits, own.high_group_size)? };
            widths(args, options, source, &mut on_step)
        }
        Method::Awq => {
            let embed = affine(own.embed_bits, own.embed_group_size)?;
            let options = AwqOptions { params, embed, grid: own.n_grid };
            let data = batch(args, source, Some(128))?;
            awq(source, &data, options, &mut on_step).map_err(Into::into).map(|(reworked, layers)| {
                let kept = layers.iter().filter(|layer| layer.after <= layer.before).count();
                printer.note(&format!("AWQ made {kept} of {} layers more exact", layers.len()));
                Outcome::Reworked(Box::new(reworked))
            })
        }
        Method::Gptq => {
            let options =
                GptqOptions { params, fallback: affine(own.fallback_bits, own.fallback_group_size)? };
            let data = batch(args, source, None)?;
            let reworked = gptq(source, &data, options, &mut on_step);
            reworked.map(|reworked| Outcome::Reworked(Box::new(reworked))).map_err(Into::into)
        }
        Method::Dwq => train(args, params, source, &mut on_step, printer),
    };
    drop(bar);
    match outcome {
        Err(error) if matches!(error.downcast_ref(), Some(MethodError::Interrupted)) => {
            Ok(Outcome::Interrupted)
        }
        outcome => outcome,
    }
}

fn affine(bits: u64, group_size: u64) -> Result<QuantParams, Complaint> {
    QuantParams::new(QuantMode::Affine, bits, group_size).map_err(|error| Complaint::usage(error.to_string()))
}

/// How many samples; `None` for all.
fn samples(args: &ConvertArgs, default: Option<usize>) -> Result<Option<usize>, Complaint> {
    match args.methods.num_samples {
        None => Ok(default),
        Some(-1) => Ok(None),
        Some(samples) => {
            usize::try_from(samples).ok().filter(|samples| *samples > 0).map(Some).ok_or_else(|| {
                Complaint::usage(format!("`--num-samples` must be positive, or -1 for all, and is {samples}"))
            })
        }
    }
}

/// The calibration text.
fn text(args: &ConvertArgs) -> anyhow::Result<String> {
    let fetched = Environment::of_process().path("HOME").map(|home| home.join(MLX_LM_TEXT));
    match (&args.calibration_mix, fetched.filter(|file| file.is_file())) {
        (None, Some(file)) => Ok(std::fs::read_to_string(file)?),
        (file, _) => Ok(calibration::samples(file.as_deref())?.join("\n\n")),
    }
}

fn batch(args: &ConvertArgs, source: &SourceModel, default: Option<usize>) -> anyhow::Result<Array> {
    let length = args.methods.sequence_length.unwrap_or(512) as usize;
    let (count, seed) = (samples(args, default)?, u64::from(args.methods.seed));
    Ok(calibration_batch(&text(args)?, &source.tokenizer()?, count, length, seed)?)
}

/// dynamic_quant: sensitivities, kept in a file and used again, and the widths that they lead to.
fn widths(
    args: &ConvertArgs,
    options: DynamicOptions,
    source: &SourceModel,
    on_step: OnStep,
) -> anyhow::Result<Outcome> {
    let file: &Path = &args.sensitivities.clone().unwrap_or_else(|| {
        let mut name = args.mlx_path.clone().into_os_string();
        name.push(".gradients.json");
        PathBuf::from(name)
    });
    // The file of mlx-lm: pairs of a module and its sensitivity.
    let known: Option<Vec<(String, f64)>> =
        std::fs::read(file).ok().and_then(|text| serde_json::from_slice(&text).ok());
    let known = known.filter(|pairs| !pairs.is_empty());
    let sensitivities: BTreeMap<String, f64> = match known {
        Some(known) => known.into_iter().collect(),
        None => {
            check_results_file(file)?;
            let data = batch(args, source, None)?;
            let found = dynamic_sensitivities(source, &data, options, on_step)?;
            let pairs: Vec<_> = found.iter().collect();
            write_bytes_atomically(file, &serde_json::to_vec(&pairs)?)?;
            found
        }
    };
    let target = args.target_bpw.unwrap_or(5.0);
    let dtype = args.dtype.as_deref().and_then(FloatType::from_name);
    Ok(Outcome::Widths(dynamic_allocation(source, &sensitivities, options, target, dtype)?))
}

fn train(
    args: &ConvertArgs,
    params: QuantParams,
    source: &SourceModel,
    on_step: OnStep,
    printer: &Printer,
) -> anyhow::Result<Outcome> {
    let Some(file) = &args.calibration_mix else {
        return Err(Complaint::usage(
            "`--method dwq` trains on rows of text; name a file with --calibration-mix",
        )
        .into());
    };
    let own = &args.methods;
    let length = own.sequence_length.unwrap_or(1025) as usize;
    let tokenizer = source.tokenizer()?;
    let templates = source.chat_templates()?;
    let rows = read_rows(file)?;
    let count = samples(args, Some(2048))?.unwrap_or(rows.len());
    let order = RandomState::from_seed(own.seed).permutation(u32::try_from(rows.len()).unwrap_or(u32::MAX));
    let mut tokens = Vec::new();
    for index in order.into_iter().take(count.saturating_add(VALIDATION_ROWS)) {
        if let Some(row) = rows.get(index as usize) {
            let mut row = tokenize(row, &tokenizer, &templates)?;
            row.truncate(length);
            tokens.push(row);
        }
    }
    // A short file gives a quarter of its rows to validation.
    let held_back = VALIDATION_ROWS.min(tokens.len() / 4);
    let valid = tokens.split_off((tokens.len() - held_back).min(count));
    let options = DwqOptions {
        params,
        learning_rate: own.learning_rate,
        batch_size: own.batch_size as usize,
        max_length: length,
        seed: own.seed,
        dtype: Dtype::Bfloat16,
    };
    let (reworked, result) = dwq(source, &tokens, &valid, options, on_step)?;
    printer.note(&format!("Validation loss: {:.4} before, {:.4} after", result.before, result.after));
    if result.after > result.before {
        printer.warning("the validation loss has risen; the model has likely become worse");
        printer.hint("a smaller --learning-rate or more rows may help");
    }
    Ok(Outcome::Reworked(Box::new(reworked)))
}
